#include "kernels/cuda/tensor_map.cuh"

#include <cudaTypedefs.h>
#include <string.h>

static_assert(sizeof(fv_tensor_map) == sizeof(CUtensorMap), "the driver's own type");

void fv_cuda_find_encode_map(fv_cuda_state *state)
{
    state->encode_map = fv_cuda_driver_function("cuTensorMapEncodeTiled");
}

/* L2 asks memory for the 128 bytes that are a row of a box: with 256 the keys of latents take 7% longer. */
bool fv_cuda_map_tensor(fv_tensor_map *map, const fv_cuda_state *state, const fv_cuda_tensor *tensor)
{
    if (!state->encode_map) return false;
    const cuuint64_t sizes[3] = {(cuuint64_t)tensor->sizes[0], (cuuint64_t)tensor->sizes[1],
                                 (cuuint64_t)tensor->sizes[2]};
    const cuuint64_t strides[2] = {(cuuint64_t)tensor->strides[0], (cuuint64_t)tensor->strides[1]};
    const cuuint32_t box[3] = {(cuuint32_t)tensor->box[0], (cuuint32_t)tensor->box[1], (cuuint32_t)tensor->box[2]};
    const cuuint32_t steps[3] = {1, 1, 1};
    const bool is_f16 = tensor->dtype == FV_DTYPE_F16;
    const int32_t has_entered = fv_cuda_context_enter(&state->context); /* without one the driver makes no map */
    CUtensorMap made;
    const CUresult result = ((PFN_cuTensorMapEncodeTiled_v12000)state->encode_map)(
        &made, is_f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)tensor->data,
        sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    fv_cuda_context_leave(&state->context, has_entered);
    if (result != CUDA_SUCCESS) return false;
    memcpy(map, &made, sizeof(made));
    return true;
}
