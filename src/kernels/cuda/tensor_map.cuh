/* Tensors of three dimensions for Hopper's copy engine: "Tensor Map Object Management" of the CUDA driver API. */
#ifndef FV_KERNELS_CUDA_TENSOR_MAP_CUH
#define FV_KERNELS_CUDA_TENSOR_MAP_CUH

#include "fovea/dtype.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/ptx.cuh"

/* Looks for the driver's function that makes tensor maps; leaves NULL where there is none. */
void fv_cuda_find_encode_map(fv_cuda_state *state);

/* Elements of 16 bits; the first dimension is dense, and a box is a panel of up to 64 of it. */
typedef struct fv_cuda_tensor {
    const void *data;
    fv_dtype dtype;
    int64_t sizes[3];
    int64_t strides[2]; /* bytes, of the second and the third dimension */
    int32_t box[3];
} fv_cuda_tensor;

/* false: the driver does not take it, or there is no such function. */
bool fv_cuda_map_tensor(fv_tensor_map *map, const fv_cuda_state *state, const fv_cuda_tensor *tensor);

#endif
