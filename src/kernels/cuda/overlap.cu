#include "kernels/cuda/overlap.cuh"

#include "kernels/cuda/attend.cuh"

/* All kernels of a build are for the same GPUs: one of them stands for those that are launched overlapped. The code that
 * the driver chose for this GPU waits where it is of PTX for 9.0 or later; of an earlier one it would start while its
 * input is still written. */
extern "C" fv_status fv_cuda_overlap_open(const fv_device *device)
{
    cudaFuncAttributes code = {};
    const int32_t has_entered = fv_cuda_enter(device);
    const cudaError_t error = cudaFuncGetAttributes(&code, (const void *)fv_cuda_attend_f32[0].kernel);
    fv_cuda_leave(device, has_entered);
    fv_cuda_state_of(device)->overlaps = code.ptxVersion >= 90;
    return fv_cuda_status(device, "the code of its kernels", error);
}
