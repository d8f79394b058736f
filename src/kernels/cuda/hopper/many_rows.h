/* The kernels of many rows (attend_rows.cuh), as their launcher knows them. */
#ifndef FV_KERNELS_CUDA_HOPPER_MANY_ROWS_H
#define FV_KERNELS_CUDA_HOPPER_MANY_ROWS_H

#include "kernels/cuda/attend.cuh"

/* Heads of up to 64, 128, 256: [1] queries of fp16. */
extern const fv_cuda_attend_kernel fv_hopper_rows_64[2];
extern const fv_cuda_attend_kernel fv_hopper_rows_128[2];
extern const fv_cuda_attend_kernel fv_hopper_rows_256[2];

/* The same over entries of one byte, for queries of both (attend_rows_narrow.cu). */
extern const fv_cuda_attend_kernel fv_hopper_narrow_rows[3];

#endif
