/* The instances of the kernels of few rows. */
#include "kernels/cuda/attend_few.cuh"

#define FV_FEW(...) attend_few_of<few_shape<__VA_ARGS__>>()

/* With heads of 64 up to 8 rows of 16-bit entries, which memory bounds, are not worth a kernel of their own. */
const fv_cuda_attend_few_kernels fv_cuda_attend_few[FV_CUDA_NUM_ATTEND_FEW] = {
    {64, {FV_FEW(64, false, 16), FV_FEW(64, false, 16)}, {FV_FEW(64, true, 8), FV_FEW(64, true, 16)}, {}, {}, {}},
    {128,
     {FV_FEW(128, false, 8), FV_FEW(128, false, 16)},
     {FV_FEW(128, true, 8, 4), FV_FEW(128, true, 16)},
     FV_FEW(128, true, 8),
     FV_FEW(128, false, 8, 4),
     FV_FEW(128, true, 8, 6, 2)},
    {256, {FV_FEW(256, false, 8), FV_FEW(256, false, 16)}, {FV_FEW(256, true, 8), FV_FEW(256, true, 16)}, {}, {}, {}},
};
