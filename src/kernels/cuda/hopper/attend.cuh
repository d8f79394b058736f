/* Hopper's attention kernels as their launcher (../attend.cu) knows them. */
#ifndef FV_KERNELS_CUDA_HOPPER_ATTEND_CUH
#define FV_KERNELS_CUDA_HOPPER_ATTEND_CUH

#include "kernels/cuda/attend.cuh"

/* [0] bf16, [1] fp16. */
typedef struct fv_cuda_hopper_kernels {
    fv_cuda_attend_kernel rows_64[2], rows_128[2]; /* many rows, head sizes up to 64 and 128 */
    fv_cuda_attend_kernel latent[2], amla[2];      /* MLA: latents of 512 + 64 */
} fv_cuda_hopper_kernels;

extern const fv_cuda_hopper_kernels fv_cuda_hopper;

#endif
