/* kv_write: new rows of K and V into the cache; runs of tokens in parallel. */
#include <float.h>
#include <math.h>

#include "core/executor.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/kv_row.h"
#include "kernels/cpu/kv_write_token.h"
#include "kvcache/latent_entry.h"

#define BYTES_PER_TASK 16384
#define PIECE 64 /* elements converted at a time on the way to a row that is not dense */

/* to = from / scale. A division, not a product with 1 / scale: what is stored is defined to the bit. */
static void convert(char *to, fv_dtype dtype, const char *from, fv_dtype src_dtype, float scale, int32_t num_elements)
{
    const size_t bytes = fv_dtype_bytes(dtype), src_bytes = fv_dtype_bytes(src_dtype);
    int32_t d = 0;
    for (; d + FV_LANES <= num_elements; d += FV_LANES) {
        fv_store8(to + (size_t)d * bytes, fv_load8(from + (size_t)d * src_bytes, src_dtype) / scale, dtype);
    }
    for (; d < num_elements; d++) {
        fv_float_store(to + (size_t)d * bytes, fv_float_load(from + (size_t)d * src_bytes, src_dtype) / scale, dtype);
    }
}

static void write_row(char *row, const fv_kv_plane *plane, fv_dtype dtype, const char *from, fv_dtype src_dtype,
                      float scale, int32_t num_elements)
{
    const size_t bytes = fv_dtype_bytes(dtype), src_bytes = fv_dtype_bytes(src_dtype);
    const int32_t is_copy = dtype == src_dtype && scale == 1.0f; /* a NaN keeps its bits */
    const int32_t is_dense = fv_plane_is_dense(plane, (int64_t)bytes);
    if (is_copy && is_dense) {
        memcpy(row, from, (size_t)num_elements * bytes);
    } else if (is_copy) {
        fv_row_scatter(row, from, plane, 0, num_elements, bytes);
    } else if (is_dense) {
        convert(row, dtype, from, src_dtype, scale, num_elements);
    } else {
        char piece[PIECE * sizeof(float)];
        for (int32_t d = 0; d < num_elements; d += PIECE) {
            const int32_t num = fv_min_i32(PIECE, num_elements - d);
            convert(piece, dtype, from + (size_t)d * src_bytes, src_dtype, scale, num);
            fv_row_scatter(row, piece, plane, d, num, bytes);
        }
    }
}

/* Largest magnitude of a row, only finite elements. */
static float largest_of(const char *from, fv_dtype dtype, int32_t num_elements)
{
    const size_t bytes = fv_dtype_bytes(dtype);
    fv_f32x8 lanes = fv_splat(0.0f);
    int32_t d = 0;
    for (; d + FV_LANES <= num_elements; d += FV_LANES) {
        const fv_f32x8 magnitude = fv_abs(fv_load8(from + (size_t)d * bytes, dtype));
        lanes = fv_max(lanes, fv_select((fv_i32x8)(magnitude <= FLT_MAX), magnitude, fv_splat(0.0f)));
    }
    float largest = fv_max_by_period(lanes, 1)[0];
    for (; d < num_elements; d++) {
        const float magnitude = fabsf(fv_float_load(from + (size_t)d * bytes, dtype));
        if (magnitude <= FLT_MAX && magnitude > largest) largest = magnitude;
    }
    return largest;
}

/* What a row is divided by: the scale given for its head, times, where the cache keeps a scale for each
 * token and head, the row's own, which is stored. */
static float find_scale(const fv_scale_plane *plane, const fv_kv_write_params *params, const float *head_scales,
                        const char *from, int32_t num_elements, int64_t block, int32_t head, int64_t slot)
{
    const float head_scale = fv_head_scale_of(head_scales, params->num_kv_scales, head);
    if (!plane->data) return head_scale;
    const float largest = largest_of(from, params->src_dtype, num_elements);
    const float scale = fv_scale_of_largest(largest / head_scale, params->cache.dtype);
    memcpy(fv_scale_address(plane, block, slot, head), &scale, sizeof(scale));
    return head_scale * scale;
}

/* Largest magnitude of 128 latent elements, infinity among them: a tile that has it becomes 0 and NaN. */
static float largest_of_tile(const char *from, fv_dtype dtype)
{
    const size_t bytes = fv_dtype_bytes(dtype);
    fv_f32x8 lanes = fv_splat(0.0f);
    for (size_t d = 0; d < FV_DS_TILE; d += FV_LANES) lanes = fv_max(fv_abs(fv_load8(from + d * bytes, dtype)), lanes);
    return fv_max_by_period(lanes, 1)[0];
}

/* The 656-byte entry: a scale for each 128 latent elements, chosen so that the largest becomes 448. */
static void write_ds_entry(char *entry, const char *from, fv_dtype src_dtype)
{
    const size_t bytes = fv_dtype_bytes(src_dtype);
    for (int32_t d = 0; d < FV_DS_LATENT; d += FV_DS_TILE) {
        const char *tile = from + (size_t)d * bytes;
        const float scale = fmaxf(largest_of_tile(tile, src_dtype) / 448.0f, FLT_MIN);
        memcpy(entry + FV_DS_SCALES_AT + d / FV_DS_TILE * 4, &scale, sizeof(scale));
        convert(entry + d, FV_DTYPE_F8_E4M3, tile, src_dtype, scale, FV_DS_TILE);
    }
    convert(entry + FV_DS_ROPE_AT, FV_DTYPE_BF16, from + FV_DS_LATENT * bytes, src_dtype, 1.0f, FV_DS_ROPE);
}

void FV_ISA_SYMBOL(fv_kv_write_token)(const fv_kv_write_params *params, int64_t token, int64_t block, int64_t slot)
{
    const fv_kv_view *cache = &params->cache;
    const char *k = (const char *)params->k + token * params->k_token_stride;
    if (cache->layout == FV_KV_LAYOUT_LATENT_FP8_DS) {
        write_ds_entry((char *)cache->k.data + fv_kv_row_offset(&cache->k, block, 0, slot), k, params->src_dtype);
        return;
    }
    for (int32_t head = 0; head < cache->num_kv_heads; head++) {
        const char *k_row = k + head * params->k_head_stride;
        const float k_scale = find_scale(&cache->k_scales, params, params->k_scale, k_row, cache->head_size, block,
                                         head, slot);
        write_row((char *)cache->k.data + fv_kv_row_offset(&cache->k, block, head, slot), &cache->k, cache->dtype,
                  k_row, params->src_dtype, k_scale, cache->head_size);
        if (cache->layout == FV_KV_LAYOUT_LATENT) continue; /* the value is the start of the key */
        const char *v_row = (const char *)params->v + token * params->v_token_stride + head * params->v_head_stride;
        const float v_scale = find_scale(&cache->v_scales, params, params->v_scale, v_row, cache->v_head_size, block,
                                         head, slot);
        write_row((char *)cache->v.data + fv_kv_row_offset(&cache->v, block, head, slot), &cache->v, cache->dtype,
                  v_row, params->src_dtype, v_scale, cache->v_head_size);
    }
}

static int64_t tokens_per_task(const fv_kv_view *cache)
{
    const int64_t token_bytes = (int64_t)cache->num_kv_heads * (cache->head_size + cache->v_head_size) *
                                (int64_t)fv_dtype_bytes(cache->dtype);
    return fv_max_i64(1, BYTES_PER_TASK / fv_max_i64(1, token_bytes));
}

static void write_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const fv_kv_write_params *params = user;
    const int64_t block_size = params->cache.block_size;
    const int64_t num_slots = params->cache.num_blocks * block_size;
    const int64_t per_task = tokens_per_task(&params->cache);
    const int64_t end = fv_min_i64((index + 1) * per_task, fv_kv_write_tokens(params));
    for (int64_t token = index * per_task; token < end; token++) {
        const int64_t slot = params->slot_mapping[token];
        if (slot < 0 || slot >= num_slots) continue;
        FV_ISA_SYMBOL(fv_kv_write_token)(params, token, slot / block_size, slot % block_size);
    }
}

fv_status FV_ISA_SYMBOL(fv_kv_write)(const fv_launch *launch, const fv_kv_write_params *params)
{
    const int64_t num_tasks = fv_ceil_div(fv_kv_write_tokens(params), tokens_per_task(&params->cache));
    fv_executor_run(launch->executor, num_tasks, write_task, (void *)params);
    return FV_OK;
}
