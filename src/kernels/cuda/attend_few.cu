/* The instances of the kernels of few rows. */
#include "kernels/cuda/attend_few.cuh"

#define FV_FEW_OF(T, HEAD)                                                                                \
    {                                                                                                     \
        attend_few_of<few_shape<T, HEAD, HEAD>, false>(), attend_few_of<few_shape<T, HEAD, HEAD>, true>() \
    }

const fv_cuda_attend_few_kernels fv_cuda_attend_few[FV_CUDA_NUM_ATTEND_FEW] = {
    {64, {FV_FEW_OF(__nv_bfloat16, 64), FV_FEW_OF(__half, 64)}, {}},
    {128,
     {FV_FEW_OF(__nv_bfloat16, 128), FV_FEW_OF(__half, 128)},
     {attend_few_of<few_shape<__nv_bfloat16, 128, 128, 4>, false>(),
      attend_few_of<few_shape<__half, 128, 128, 4>, false>()}},
    {256, {FV_FEW_OF(__nv_bfloat16, 256), FV_FEW_OF(__half, 256)}, {}},
};
