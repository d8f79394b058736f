/* Head sizes up to 512: two warps share the rows of O, and one tile is all that fits. */
#include "kernels/cuda/attend_mma.cuh"

template <class T> using few_rows = attend_shape<T, 512, 512, 1, 4, 1, 32, 1>;
template <class T> using many_rows = attend_shape<T, 512, 512, 4, 2, 1, 32, 1>;

const fv_cuda_attend_kernels fv_cuda_attend_512 = {
    512,
    512,
    {attend_kernel_of<few_rows<__nv_bfloat16>>(), attend_kernel_of<few_rows<__half>>()},
    {attend_kernel_of<many_rows<__nv_bfloat16>>(), attend_kernel_of<many_rows<__half>>()},
};
