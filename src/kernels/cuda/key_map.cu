/* The cache of latents as a tensor map of Hopper's copy engine: "Tensor Map Object Management" of the CUDA driver
 * API. */
#include <cudaTypedefs.h>
#include <string.h>

#include "kernels/cuda/attend.cuh"

enum { TILE = 64, PANEL = 64, LEAST_ROWS = 8 /* of a box: the swizzle repeats after so many */ };

static_assert(sizeof(fv_tensor_map) == sizeof(CUtensorMap), "the driver's own type");

void fv_cuda_find_encode_map(fv_cuda_state *state)
{
    cudaDriverEntryPointQueryResult found;
    void *function = NULL;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    if (error == cudaSuccess && found == cudaDriverEntryPointSuccess) state->encode_map = function;
}

/* L2 asks memory for the 128 bytes that are a row of a box: for 256 the same boxes take 7% longer. */
void fv_cuda_map_keys(attend_args *args, const fv_cuda_state *state)
{
    const fv_attend_params *params = &args->params;
    const fv_kv_plane *plane = &args->k[0].plane;
    const int32_t block_size = params->cache.block_size, rows = fv_min_i32(TILE, block_size);
    const int64_t num_blocks = params->cache.num_blocks;
    if (!state->encode_map || args->is_ds || rows < LEAST_ROWS || TILE % rows != 0 || block_size % rows != 0) return;
    if (!plane->data || num_blocks < 1 || num_blocks > INT32_MAX) return;
    const cuuint64_t sizes[3] = {(cuuint64_t)params->head_size, (cuuint64_t)block_size, (cuuint64_t)num_blocks};
    const cuuint64_t strides[2] = {(cuuint64_t)plane->slot_stride, (cuuint64_t)plane->block_stride};
    const cuuint32_t box[3] = {PANEL, (cuuint32_t)rows, 1}, steps[3] = {1, 1, 1};
    CUtensorMap map;
    const CUresult result = ((PFN_cuTensorMapEncodeTiled_v12000)state->encode_map)(
        &map, params->q_dtype == FV_DTYPE_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
        plane->data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) return;
    memcpy(&args->key_map, &map, sizeof(map));
    args->map_rows = rows;
}
