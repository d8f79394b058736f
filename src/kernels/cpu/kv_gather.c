/* kv_gather: cached keys and values to dense rows, scales applied; runs of rows in parallel. Of a cache in pieces of 16 bytes the
 * rows of 16 keys are made at once (piece_rows.h). */
#include "core/executor.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/kv_row.h"
#include "kernels/cpu/piece_rows.h"
#include "kvcache/latent_entry.h"

#define ROWS_PER_TASK 8
#define ROWS_PER_PIECE_TASK 64
#define MAX_PIECE_ROW 1024 /* bytes of a row that is made beside others */
#define PIECE 64           /* elements gathered at a time from a row that is not dense */

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

/* Where a row comes from. */
typedef struct row_source {
    int64_t key, block, slot;
    int32_t in_seq, left; /* rows of its sequence before it, and from it on */
} row_source;

static row_source row_source_of(const fv_kv_gather_params *params, int32_t row)
{
    const int32_t seq = fv_kv_gather_seq(params, row), block_size = params->cache.block_size;
    const int64_t key = params->key_start[seq] + row - params->out_start[seq];
    return (row_source){
        .key = key,
        .block = params->block_table[seq * params->block_table_stride + key / block_size],
        .slot = key % block_size,
        .in_seq = row - params->out_start[seq],
        .left = params->out_start[seq + 1] - row,
    };
}

static void gather_key(const fv_kv_gather_params *params, int32_t row)
{
    const fv_kv_view *cache = &params->cache;
    const row_source from = row_source_of(params, row);
    const int64_t block = from.block, slot = from.slot;
    if (fv_kv_layout_is_latent(cache->layout)) {
        gather_latent(params, row, from.key, block, slot);
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

/* Rows of one plane and head, row_stride bytes apart, of 16 keys from a source on. */
typedef struct piece_plane {
    const fv_kv_plane *plane;
    const fv_scale_plane *scales;
    char *to;
    int64_t row_stride;
    float head_scale;
    int32_t head, size, is_value;
} piece_plane;

static void gather_pieces(const fv_kv_gather_params *params, const piece_plane *of, const row_source *from)
{
    const fv_kv_view *cache = &params->cache;
    const int64_t bytes = (int64_t)fv_dtype_bytes(cache->dtype);
    const int64_t raw_bytes = fv_round_up(of->size * bytes, FV_PART_BYTES);
    char raw[FV_PIECE_KEYS * MAX_PIECE_ROW] __attribute__((aligned(FV_CACHE_LINE)));
    const fv_row_target target = {raw, raw_bytes, FV_PART_BYTES};
    const char *data = (const char *)of->plane->data;
    const char *const pieces[2] = {
        data + fv_kv_row_offset(of->plane, from->block, of->head, from->slot),
        data + fv_kv_row_offset(of->plane, from->block, of->head, from->slot + FV_PIECE_KEYS / 2),
    };
    fv_pieces_to_rows(&target, of->plane, pieces, of->size, bytes, of->is_value);
    const fv_kv_plane dense = {.element_stride = bytes};
    for (int32_t i = 0; i < FV_PIECE_KEYS; i++) {
        const float scale = of->head_scale * fv_scale_at(of->scales, from->block, from->slot + i, of->head);
        gather_row(of->to + i * of->row_stride, params->dst_dtype, raw + i * raw_bytes, &dense, cache->dtype, scale,
                   of->size);
    }
}

/* 16 rows, from a multiple of 16 keys on. */
static void gather_sixteen(const fv_kv_gather_params *params, int32_t row, const row_source *from)
{
    const fv_kv_view *cache = &params->cache;
    for (int32_t head = 0; head < cache->num_kv_heads; head++) {
        const piece_plane k = {
            .plane = &cache->k,
            .scales = &cache->k_scales,
            .to = (char *)params->k + row * params->k_token_stride + head * params->k_head_stride,
            .row_stride = params->k_token_stride,
            .head_scale = fv_head_scale_of(params->k_scale, params->num_kv_scales, head),
            .head = head,
            .size = cache->head_size,
        };
        const piece_plane v = {
            .plane = &cache->v,
            .scales = &cache->v_scales,
            .to = (char *)params->v + row * params->v_token_stride + head * params->v_head_stride,
            .row_stride = params->v_token_stride,
            .head_scale = fv_head_scale_of(params->v_scale, params->num_kv_scales, head),
            .head = head,
            .size = cache->v_head_size,
            .is_value = 1,
        };
        if (params->k) gather_pieces(params, &k, from);
        if (params->v) gather_pieces(params, &v, from);
    }
}

/* Sixteen rows that belong together are done by the task that has their first. */
static void gather_pieces_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const fv_kv_gather_params *params = user;
    const int32_t first = (int32_t)index * ROWS_PER_PIECE_TASK;
    const int32_t end = (int32_t)fv_min_i64((index + 1) * ROWS_PER_PIECE_TASK, params->num_rows);
    for (int32_t row = first; row < end; row++) {
        const row_source from = row_source_of(params, row);
        const int32_t among = (int32_t)(from.key % FV_PIECE_KEYS);
        const int32_t are_together = from.in_seq >= among && from.left >= FV_PIECE_KEYS - among;
        if (!are_together)
            gather_key(params, row);
        else if (among == 0)
            gather_sixteen(params, row, &from);
        if (are_together) row += FV_PIECE_KEYS - among - 1;
    }
}

static int32_t has_piece_rows(const fv_kv_gather_params *params)
{
    const fv_kv_view *cache = &params->cache;
    const int64_t bytes = (int64_t)fv_dtype_bytes(cache->dtype);
    return !fv_kv_layout_is_latent(cache->layout) && fv_cache_has_piece_rows(cache) &&
           fv_max_i32(cache->head_size, cache->v_head_size) * bytes <= MAX_PIECE_ROW;
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
    const int32_t in_pieces = has_piece_rows(params), rows = in_pieces ? ROWS_PER_PIECE_TASK : ROWS_PER_TASK;
    fv_executor_run(launch->executor, fv_ceil_div(params->num_rows, rows), in_pieces ? gather_pieces_task : gather_task,
                    (void *)params);
    return FV_OK;
}
