/* The cache as tensor maps of Hopper's copy engine: latents, or keys and values of heads. */
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
    if (fv_cuda_map_tensor(&args->maps[0], state, &keys)) args->map_rows = rows;
}

/* Does the cache's plane, with its heads of `head` pairs of bytes, make a tensor of three dimensions? */
static bool find_head_places(attend_args *args, fv_cuda_tensor *tensor, const fv_kv_plane *plane, int32_t head)
{
    const fv_attend_params *params = &args->params;
    const int64_t heads = params->num_kv_heads, head_bytes = head * 2;
    const int64_t page_bytes = params->cache.block_size * plane->slot_stride;
    tensor->sizes[0] = head;
    tensor->sizes[2] = params->cache.num_blocks;
    tensor->strides[1] = plane->block_stride;
    args->map_block_z = 1;
    if (plane->head_stride >= head_bytes && heads * plane->head_stride <= plane->slot_stride) { /* side by side */
        args->map_head_x = (int32_t)(plane->head_stride / 2);
        tensor->sizes[0] += (heads - 1) * args->map_head_x;
    } else if (plane->head_stride >= page_bytes && plane->block_stride % plane->head_stride == 0) {
        args->map_head_z = 1;
        args->map_block_z = (int32_t)(plane->block_stride / plane->head_stride);
        tensor->sizes[2] = (params->cache.num_blocks - 1) * args->map_block_z + heads;
        tensor->strides[1] = plane->head_stride;
    } else {
        return heads == 1;
    }
    return true;
}

/* The largest box, of rows of one page, that tiles are made of; 0: none. */
static int32_t find_box_rows(int32_t block_size, int32_t tile)
{
    int32_t rows = 128;
    while (rows >= LEAST_ROWS && (block_size % rows != 0 || tile % rows != 0)) rows /= 2;
    return rows >= LEAST_ROWS ? rows : 0;
}

void fv_cuda_map_planes(attend_args *args, const fv_cuda_state *state, int32_t tile)
{
    const fv_attend_params *params = &args->params;
    const fv_kv_plane *plane = &args->k[0].plane;
    const int32_t rows = find_box_rows(params->cache.block_size, tile), head = params->head_size;
    if (!state->encode_map || !plane->data || rows == 0 || params->cache.num_blocks < 1 || !args->planes_alike) return;
    if ((head != 64 && head != 128 && head != 256) || params->v_head_size != head) return; /* whole panels of the kernels */
    const int32_t pairs = args->is_narrow ? head / 2 : head; /* entries of one byte go two by two */
    if (pairs % PANEL != 0) return;
    fv_cuda_tensor tensor = {.data = plane->data, .dtype = params->q_dtype};
    if (!find_head_places(args, &tensor, plane, pairs) || tensor.sizes[2] > INT32_MAX) return;
    tensor.sizes[1] = params->cache.block_size;
    tensor.strides[0] = plane->slot_stride;
    tensor.box[0] = PANEL;
    tensor.box[1] = rows;
    tensor.box[2] = 1;
    if (!fv_cuda_map_tensor(&args->maps[0], state, &tensor)) return;
    tensor.data = args->v[0].plane.data;
    if (fv_cuda_map_tensor(&args->maps[1], state, &tensor)) args->map_rows = rows;
}
