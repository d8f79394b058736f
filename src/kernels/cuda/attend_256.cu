/* Head sizes up to 256. O of 16 rows takes half of a thread's registers. */
#include "kernels/cuda/attend_mma.cuh"

template <class T> using few_rows = attend_shape<T, 256, 256, 1, 4, 1, 32, 2>;
template <class T> using many_rows = attend_shape<T, 256, 256, 4, 1, 1, 32, 2>;

const fv_cuda_attend_kernels fv_cuda_attend_256 = {
    256,
    256,
    {attend_kernel_of<few_rows<__nv_bfloat16>>(), attend_kernel_of<few_rows<__half>>()},
    {attend_kernel_of<many_rows<__nv_bfloat16>>(), attend_kernel_of<many_rows<__half>>()},
};
