/* A kernel with its grid and parameters. */
#ifndef CUDA_EMULATOR_LAUNCH_H
#define CUDA_EMULATOR_LAUNCH_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#include <functional>

typedef struct emu_launch {
    const char *operation; /* for reports */
    const void *kernel;
    std::function<void()> call; /* the kernel, with a copy of its parameters */
    dim3 grid;
    uint32_t num_threads;
    uint32_t shared_bytes;
    uint32_t cluster; /* blocks, neighbours along x */
} emu_launch;

/* In the order of the stream: runs it at once, or keeps it for the graph that the stream captures. */
cudaError_t emu_launch_on(cudaStream_t stream, const emu_launch *launch);

/* What the kernels are taken to be made of: PTX for compute capability 9.0 is 90. Those of less do not wait for the kernel
 * before them. */
int emu_ptx_version(void);

/* Runs it to the end; false: it failed. */
bool emu_launch_run(const emu_launch *launch);

template <class Params>
cudaError_t emu_launch_of(const char *operation, void (*kernel)(Params), dim3 grid, uint32_t num_threads,
                          size_t shared_bytes, cudaStream_t stream, uint32_t cluster, const Params &params)
{
    const emu_launch launch = {
        operation, (const void *)kernel, [kernel, params] { kernel(params); },
        grid,      num_threads,          (uint32_t)shared_bytes,
        cluster,
    };
    return emu_launch_on(stream, &launch);
}

#endif
