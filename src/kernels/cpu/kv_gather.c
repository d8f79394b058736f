/* kv_gather: cached keys and values to dense rows, scales applied; runs of rows in parallel. */
#include "core/executor.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/kv_row.h"
#include "kvcache/latent_entry.h"

#define ROWS_PER_TASK 8
#define PIECE 64 /* elements gathered at a time from a row that is not dense */

/* to = from * scale */
static void convert(char *to, fv_dtype dtype, const char *from, fv_dtype src_dtype, float scale, int32_t num_elements)
{
    const size_t bytes = fv_dtype_bytes(dtype), src_bytes = fv_dtype_bytes(src_dtype);
    int32_t d = 0;
    for (; d + FV_LANES <= num_elements; d += FV_LANES) {
        fv_store8(to + (size_t)d * bytes, fv_load8(from + (size_t)d * src_bytes, src_dtype) * scale, dtype);
    }
    for (; d < num_elements; d++) {
        fv_float_store(to + (size_t)d * bytes, fv_float_load(from + (size_t)d * src_bytes, src_dtype) * scale, dtype);
    }
}

static void gather_row(char *to, fv_dtype dtype, const char *row, const fv_kv_plane *plane, fv_dtype src_dtype,
                       float scale, int32_t num_elements)
{
    const size_t bytes = fv_dtype_bytes(dtype), src_bytes = fv_dtype_bytes(src_dtype);
    if (fv_plane_is_dense(plane, (int64_t)src_bytes)) {
        if (dtype == src_dtype && scale == 1.0f)
            memcpy(to, row, (size_t)num_elements * bytes);
        else
            convert(to, dtype, row, src_dtype, scale, num_elements);
        return;
    }
    char piece[PIECE * sizeof(float)];
    for (int32_t d = 0; d < num_elements; d += PIECE) {
        const int32_t num = fv_min_i32(PIECE, num_elements - d);
        fv_row_gather(piece, row, plane, d, num, src_bytes);
        convert(to + (size_t)d * bytes, dtype, piece, src_dtype, scale, num);
    }
}

/* --- latents ------------------------------------------------------------------------------------------- */

/* The first num_elements of a latent entry. */
static void gather_entry(char *to, fv_dtype dtype, const fv_kv_view *cache, const char *entry, float scale,
                         int32_t num_elements)
{
    if (cache->layout != FV_KV_LAYOUT_LATENT_FP8_DS) {
        gather_row(to, dtype, entry, &cache->k, cache->dtype, scale, num_elements);
        return;
    }
    const size_t bytes = fv_dtype_bytes(dtype);
    for (int32_t d = 0; d < FV_DS_LATENT; d += FV_DS_TILE) {
        float tile_scale;
        memcpy(&tile_scale, entry + FV_DS_SCALES_AT + d / FV_DS_TILE * 4, sizeof(tile_scale));
        convert(to + (size_t)d * bytes, dtype, entry + d, FV_DTYPE_F8_E4M3, tile_scale, FV_DS_TILE);
    }
    convert(to + FV_DS_LATENT * bytes, dtype, entry + FV_DS_ROPE_AT, FV_DTYPE_BF16, 1.0f, num_elements - FV_DS_LATENT);
}

static float load_element(const fv_kv_view *cache, const char *entry, float scale, int32_t d)
{
    if (cache->layout == FV_KV_LAYOUT_LATENT_FP8_DS) {
        return fv_float_load(entry + FV_DS_ROPE_AT + (d - FV_DS_LATENT) * 2, FV_DTYPE_BF16);
    }
    return scale * fv_float_load(entry + fv_kv_element_offset(&cache->k, d), cache->dtype);
}

/* The rope part of a key, which ends at to + head_size: half rotation, element i pairs with i + half. From the
 * entry again, for `to` has it rounded. */
static void gather_rotated(char *to, const fv_kv_gather_params *params, const char *entry, float scale, int64_t key)
{
    const fv_kv_view *cache = &params->cache;
    const fv_key_rotation *rotation = &params->rotation;
    const int64_t bytes = (int64_t)fv_dtype_bytes(params->dst_dtype);
    const int32_t half = rotation->rope_dim / 2, first = cache->head_size - rotation->rope_dim;
    const int64_t at = fv_key_position(&params->context_parallel, key) * half;
    for (int32_t i = 0; i < half; i++) {
        const float cos = rotation->cos[at + i], sin = rotation->sin[at + i];
        const float low = load_element(cache, entry, scale, first + i);
        const float high = load_element(cache, entry, scale, first + half + i);
        fv_float_store(to + (first + i) * bytes, low * cos - high * sin, params->dst_dtype);
        fv_float_store(to + (first + half + i) * bytes, high * cos + low * sin, params->dst_dtype);
    }
}

static void gather_latent(const fv_kv_gather_params *params, int64_t row, int64_t key, int64_t block, int64_t slot)
{
    const fv_kv_view *cache = &params->cache;
    const char *entry = (const char *)cache->k.data + fv_kv_row_offset(&cache->k, block, 0, slot);
    const float scale = fv_head_scale_of(params->k_scale, params->num_kv_scales, 0) *
                        fv_scale_at(&cache->k_scales, block, slot, 0);
    if (params->k) {
        char *k = (char *)params->k + row * params->k_token_stride;
        gather_entry(k, params->dst_dtype, cache, entry, scale, cache->head_size);
        if (params->rotation.cos) gather_rotated(k, params, entry, scale, key);
    }
    if (params->v) { /* the value is the start of the key */
        gather_entry((char *)params->v + row * params->v_token_stride, params->dst_dtype, cache, entry, scale,
                     cache->v_head_size);
    }
}

/* --- rows ---------------------------------------------------------------------------------------------- */

static void gather_key(const fv_kv_gather_params *params, int32_t row)
{
    const fv_kv_view *cache = &params->cache;
    const int32_t seq = fv_kv_gather_seq(params, row);
    const int32_t key = params->key_start[seq] + row - params->out_start[seq];
    const int64_t block = params->block_table[seq * params->block_table_stride + key / cache->block_size];
    const int64_t slot = key % cache->block_size;
    if (fv_kv_layout_is_latent(cache->layout)) {
        gather_latent(params, row, key, block, slot);
        return;
    }
    for (int32_t head = 0; head < cache->num_kv_heads; head++) {
        if (params->k) {
            const float scale = fv_head_scale_of(params->k_scale, params->num_kv_scales, head) *
                                fv_scale_at(&cache->k_scales, block, slot, head);
            gather_row((char *)params->k + row * params->k_token_stride + head * params->k_head_stride,
                       params->dst_dtype, (const char *)cache->k.data + fv_kv_row_offset(&cache->k, block, head, slot),
                       &cache->k, cache->dtype, scale, cache->head_size);
        }
        if (params->v) {
            const float scale = fv_head_scale_of(params->v_scale, params->num_kv_scales, head) *
                                fv_scale_at(&cache->v_scales, block, slot, head);
            gather_row((char *)params->v + row * params->v_token_stride + head * params->v_head_stride,
                       params->dst_dtype, (const char *)cache->v.data + fv_kv_row_offset(&cache->v, block, head, slot),
                       &cache->v, cache->dtype, scale, cache->v_head_size);
        }
    }
}

static void gather_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const fv_kv_gather_params *params = user;
    const int32_t end = (int32_t)fv_min_i64((index + 1) * ROWS_PER_TASK, params->num_rows);
    for (int32_t row = (int32_t)index * ROWS_PER_TASK; row < end; row++) gather_key(params, row);
}

fv_status FV_ISA_SYMBOL(fv_kv_gather)(const fv_launch *launch, const fv_kv_gather_params *params)
{
    fv_executor_run(launch->executor, fv_ceil_div(params->num_rows, ROWS_PER_TASK), gather_task, (void *)params);
    return FV_OK;
}
