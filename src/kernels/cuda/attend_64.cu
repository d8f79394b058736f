/* Head sizes up to 64. Many rows: 32 of 128 for each warp, so that a tile is read half as often. */
#include "kernels/cuda/attend_mma.cuh"

template <class T> using few_rows = attend_shape<T, 64, 64, 1, 4, 1, 64, 2>;
template <class T> using many_rows = attend_shape<T, 64, 64, 4, 1, 2, 64, 2>;

const fv_cuda_attend_kernels fv_cuda_attend_64 = {
    64,
    64,
    {attend_kernel_of<few_rows<__nv_bfloat16>>(), attend_kernel_of<few_rows<__half>>()},
    {attend_kernel_of<many_rows<__nv_bfloat16>>(), attend_kernel_of<many_rows<__half>>()},
};
