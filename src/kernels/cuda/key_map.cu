/* The cache of latents as a tensor map of Hopper's copy engine. */
#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/tensor_map.cuh"

enum { TILE = 64, PANEL = 64, LEAST_ROWS = 16 /* of a box: smaller ones come faster row by row */ };

void fv_cuda_map_keys(attend_args *args, const fv_cuda_state *state)
{
    const fv_attend_params *params = &args->params;
    const fv_kv_plane *plane = &args->k[0].plane;
    const int32_t block_size = params->cache.block_size, rows = fv_min_i32(TILE, block_size);
    const int64_t num_blocks = params->cache.num_blocks;
    if (!state->encode_map || args->is_ds || rows < LEAST_ROWS || TILE % rows != 0 || block_size % rows != 0) return;
    if (!plane->data || num_blocks < 1 || num_blocks > INT32_MAX) return;
    const fv_cuda_tensor keys = {
        .data = plane->data,
        .dtype = params->q_dtype,
        .sizes = {params->head_size, block_size, num_blocks},
        .strides = {plane->slot_stride, plane->block_stride},
        .box = {PANEL, rows, 1},
    };
    if (fv_cuda_map_tensor(&args->key_map, state, &keys)) args->map_rows = rows;
}
