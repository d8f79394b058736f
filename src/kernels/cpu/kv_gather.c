/* kv_gather: cached keys and values to dense rows, scales applied; runs of rows in parallel. */
#include "core/error.h"
#include "core/executor.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/kv_row.h"

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

/* The sequence that owns row `row`: the last r with out_start[r] <= row. */
static int32_t find_seq(const fv_kv_gather_params *params, int32_t row)
{
    int32_t low = 0, high = params->num_seqs;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (params->out_start[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void gather_key(const fv_kv_gather_params *params, int32_t row)
{
    const fv_kv_view *cache = &params->cache;
    const int32_t seq = find_seq(params, row);
    const int32_t key = params->key_start[seq] + row - params->out_start[seq];
    const int64_t block = params->block_table[seq * params->block_table_stride + key / cache->block_size];
    const int64_t slot = key % cache->block_size;
    const int32_t is_latent = cache->layout == FV_KV_LAYOUT_LATENT; /* the value is the start of the key */
    const fv_kv_plane *v_plane = is_latent ? &cache->k : &cache->v;
    const fv_scale_plane *v_scales = is_latent ? &cache->k_scales : &cache->v_scales;
    const float *v_scale_at = is_latent ? params->k_scale : params->v_scale;
    for (int32_t head = 0; head < cache->num_kv_heads; head++) {
        if (params->k) {
            const float scale = fv_head_scale_of(params->k_scale, params->num_kv_scales, head) *
                                fv_scale_at(&cache->k_scales, block, slot, head);
            gather_row((char *)params->k + row * params->k_token_stride + head * params->k_head_stride,
                       params->dst_dtype, (const char *)cache->k.data + fv_kv_row_offset(&cache->k, block, head, slot),
                       &cache->k, cache->dtype, scale, cache->head_size);
        }
        if (params->v) {
            const float scale = fv_head_scale_of(v_scale_at, params->num_kv_scales, head) *
                                fv_scale_at(v_scales, block, slot, head);
            gather_row((char *)params->v + row * params->v_token_stride + head * params->v_head_stride,
                       params->dst_dtype, (const char *)v_plane->data + fv_kv_row_offset(v_plane, block, head, slot),
                       v_plane, cache->dtype, scale, cache->v_head_size);
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
    if (params->cache.layout == FV_KV_LAYOUT_LATENT_FP8_DS) {
        return fv_fail(FV_ERR_UNSUPPORTED, "kv_gather does not read layout %s; the reference kernels do",
                       fv_kv_layout_name(params->cache.layout));
    }
    fv_executor_run(launch->executor, fv_ceil_div(params->num_rows, ROWS_PER_TASK), gather_task, (void *)params);
    return FV_OK;
}
