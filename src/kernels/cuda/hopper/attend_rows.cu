/* The instances of the kernel of many rows. */
#include "kernels/cuda/hopper/attend_rows.cuh"
#include "kernels/cuda/hopper/many_rows.h"

template <class T> using rows_64 = rows_shape<T, 64, 128, 4, 2>;
template <class T> using rows_128 = rows_shape<T, 128, 128, 2, 2>;
template <class T> using rows_256 = rows_shape<T, 256, 64, 2, 1>;

const fv_cuda_attend_kernel fv_hopper_rows_64[2] = {
    wgmma_rows_of<rows_64<__nv_bfloat16>>(),
    wgmma_rows_of<rows_64<__half>>(),
};
const fv_cuda_attend_kernel fv_hopper_rows_128[2] = {
    wgmma_rows_of<rows_128<__nv_bfloat16>>(),
    wgmma_rows_of<rows_128<__half>>(),
};
const fv_cuda_attend_kernel fv_hopper_rows_256[2] = {
    wgmma_rows_of<rows_256<__nv_bfloat16>>(),
    wgmma_rows_of<rows_256<__half>>(),
};
