/* The instances of the kernel of many rows over entries of one byte. */
#include "kernels/cuda/hopper/attend_rows.cuh"
#include "kernels/cuda/hopper/many_rows.h"

const fv_cuda_attend_kernel fv_hopper_narrow_rows[3] = {
    wgmma_rows_of<rows_shape<__half, 64, 128, 4, 2, true>>(),
    wgmma_rows_of<rows_shape<__half, 128, 128, 2, 2, true>>(),
    wgmma_rows_of<rows_shape<__half, 256, 64, 2, 1, true>>(),
};
