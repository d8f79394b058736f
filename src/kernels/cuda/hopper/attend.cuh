/* Hopper's kernels as their launchers (../attend.cu, ../mla_query.cu) know them. */
#ifndef FV_KERNELS_CUDA_HOPPER_ATTEND_CUH
#define FV_KERNELS_CUDA_HOPPER_ATTEND_CUH

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/mla_query.cuh"

/* [0] bf16, [1] fp16. */
typedef struct fv_cuda_hopper_kernels {
    const fv_cuda_attend_kernel *rows[3], *narrow_rows; /* many_rows.h: heads of up to 64, 128, 256 */
    fv_cuda_attend_kernel latent[2], amla[2];         /* MLA: latents of 512 + 64 */
    fv_cuda_attend_kernel latent_16[2], latent_32[2]; /* the same, items of up to 16 and 32 rows */
    fv_cuda_attend_kernel entries[3];                 /* MLA: the 656-byte entry, queries of bf16; 16, 32, 64 rows */
    const fv_cuda_mla_query_kernel *query; /* [2] */
    const fv_cuda_attend_kernel *few_meeting; /* few_meeting.h */
} fv_cuda_hopper_kernels;

#endif
