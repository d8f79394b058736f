/* Latents of MLA: keys of 576 elements, whose first 512 are the values. */
#include "kernels/cuda/attend_mma.cuh"

template <class T> using few_rows = attend_shape<T, 576, 512, 1, 4, 1, 32, 2, true>;
template <class T> using many_rows = attend_shape<T, 576, 512, 4, 2, 1, 32, 2, true>;

const fv_cuda_attend_kernels fv_cuda_attend_latent = {
    576,
    512,
    {attend_kernel_of<few_rows<__nv_bfloat16>>(), attend_kernel_of<few_rows<__half>>()},
    {attend_kernel_of<many_rows<__nv_bfloat16>>(), attend_kernel_of<many_rows<__half>>()},
};
