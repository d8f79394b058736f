/* From the library's launch to CUDA's: the device's GPU, the stream, and the status of the call. */
#ifndef FV_KERNELS_CUDA_LAUNCH_CUH
#define FV_KERNELS_CUDA_LAUNCH_CUH

#include "kernels/cuda/device.h"
#include "kernels/cuda/kernels.h"

/* Calls a kernel of one parameter. A grid with nothing in it is no launch. */
template <class Params>
static fv_status fv_cuda_launch(const fv_launch *launch, const char *operation, void (*kernel)(Params), dim3 grid,
                                uint32_t num_threads, size_t shared_bytes, const Params &params)
{
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return FV_OK;
    const int32_t has_entered = fv_cuda_enter(launch->device);
    kernel<<<grid, num_threads, shared_bytes, (cudaStream_t)launch->stream>>>(params);
    const cudaError_t error = cudaGetLastError();
    fv_cuda_leave(launch->device, has_entered);
    return error == cudaSuccess ? FV_OK : fv_cuda_status(launch->device, operation, error);
}

/* Blocks for `count` things, `each` to a block. */
static inline uint32_t fv_cuda_blocks(int64_t count, int32_t each) { return (uint32_t)fv_ceil_div(count, each); }

#endif
