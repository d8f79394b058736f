/* Head sizes up to 128. Many rows: 32 of 128 for each warp, so that a tile is
 * read half as often; tiles of 32 keys, for what the registers hold beside O.
 * Few rows: tiles of 32 too, so that four blocks of threads share a multiprocessor. */
#include "kernels/cuda/attend_mma.cuh"

template <class T> using few_rows = attend_shape<T, 128, 128, 1, 4, 1, 32, 2>;
template <class T> using many_rows = attend_shape<T, 128, 128, 4, 1, 2, 32, 2>;
using many_half_rows = attend_shape<__half, 128, 128, 8, 1, 1, 32, 2>; /* registers do not suffice for two row tiles */

const fv_cuda_attend_kernels fv_cuda_attend_128 = {
    128,
    128,
    {attend_kernel_of<few_rows<__nv_bfloat16>>(), attend_kernel_of<few_rows<__half>>()},
    {attend_kernel_of<many_rows<__nv_bfloat16>>(), attend_kernel_of<many_half_rows>()},
};
