/* The instances of the kernels of few rows. */
#include "kernels/cuda/attend_few.cuh"

#define FV_FEW_OF(HEAD)                                                                                       \
    {                                                                                                         \
        attend_few_of<few_shape<__nv_bfloat16, HEAD, HEAD>>(), attend_few_of<few_shape<__half, HEAD, HEAD>>() \
    }

const fv_cuda_attend_few_kernels fv_cuda_attend_few[FV_CUDA_NUM_ATTEND_FEW] = {
    {64, FV_FEW_OF(64)},
    {128, FV_FEW_OF(128)},
    {256, FV_FEW_OF(256)},
};
