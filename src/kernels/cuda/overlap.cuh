/* Programmatic dependent launch, on compute capability 9.0 and later: a kernel may start while the one before it in
 * the stream still runs, and waits for it where it first needs it. Between small kernels this hides the launch, and
 * a product with weights can fetch them meanwhile (CUDA C++ Programming Guide, "Programmatic Dependent Launch and
 * Synchronization"; PTX ISA, griddepcontrol).
 *
 * A kernel that is launched so reads and writes nothing that others touch before overlap_wait(), and every thread
 * calls it: then all kernels before have ended, for the one before this has waited, too. A kernel may let the next one
 * start before it waits itself where what that one reads before it waits is older than both.
 * On older GPUs both calls are nothing and the launch is a plain one. So they are in code that a later GPU's driver made of
 * PTX for an older one: what counts is what the code was made of (fv_cuda_overlap_open). */
#ifndef FV_KERNELS_CUDA_OVERLAP_CUH
#define FV_KERNELS_CUDA_OVERLAP_CUH

#include "kernels/cuda/launch.cuh"

/* The next kernel may start, once all blocks have come here. */
static __device__ __forceinline__ void overlap_let_next_start(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Returns when the kernels before have ended and what they wrote is there. */
static __device__ __forceinline__ void overlap_wait(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Both, at the start of a kernel that is long, or that has nothing to do before. */
static __device__ __forceinline__ void overlap_begin(void)
{
    overlap_wait();
    overlap_let_next_start();
}

/* fv_cuda_launch of a kernel that calls overlap_wait(), in clusters of so many blocks, neighbours along x. */
template <class Params>
static fv_status fv_cuda_launch_overlapped(const fv_launch *launch, const char *operation, void (*kernel)(Params),
                                           dim3 grid, uint32_t num_threads, size_t shared_bytes, const Params &params,
                                           uint32_t cluster = 1)
{
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return FV_OK;
    cudaLaunchAttribute attributes[2] = {};
    int32_t num_attributes = 0;
    if (fv_cuda_state_of(launch->device)->overlaps) {
        attributes[num_attributes].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[num_attributes++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[num_attributes].id = cudaLaunchAttributeClusterDimension;
        attributes[num_attributes++].val.clusterDim = {cluster, 1, 1};
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(num_threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = (cudaStream_t)launch->stream;
    config.attrs = attributes;
    config.numAttrs = num_attributes;
    const int32_t has_entered = fv_cuda_enter(launch->device);
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
    fv_cuda_leave(launch->device, has_entered);
    return error == cudaSuccess ? FV_OK : fv_cuda_status(launch->device, operation, error);
}

#endif
