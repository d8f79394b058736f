/* The instances of the kernels of few rows. */
#include "kernels/cuda/attend_few.cuh"

template <int HEAD> static constexpr fv_cuda_attend_few_kernels kernels_of_heads(void)
{
    return {
        HEAD,
        {attend_few_of<few_shape<__nv_bfloat16, HEAD, HEAD>, false>(),
         attend_few_of<few_shape<__half, HEAD, HEAD>, false>()},
        attend_few_of<few_shape<__half, HEAD, HEAD>, true>(),
        {},
    };
}

static constexpr fv_cuda_attend_few_kernels kernels_of_128(void)
{
    fv_cuda_attend_few_kernels kernels = kernels_of_heads<128>();
    kernels.of_three[0] = attend_few_of<few_shape<__nv_bfloat16, 128, 128, 4>, false>();
    kernels.of_three[1] = attend_few_of<few_shape<__half, 128, 128, 4>, false>();
    return kernels;
}

const fv_cuda_attend_few_kernels fv_cuda_attend_few[FV_CUDA_NUM_ATTEND_FEW] = {
    kernels_of_heads<64>(),
    kernels_of_128(),
    kernels_of_heads<256>(),
};
