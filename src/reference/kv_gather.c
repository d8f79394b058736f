/* kv_gather: cached keys and values to dense rows, scales applied. */
#include "core/error.h"
#include "reference/attend_row.h"
#include "reference/kv_reader.h"
#include "reference/reference.h"

static void gather_key(const fv_kv_gather_params *params, const fv_kv_reader *reader, int32_t seq, int32_t key,
                       int64_t row)
{
    const fv_kv_view *cache = &params->cache;
    double values[FV_REFERENCE_MAX_HEAD_SIZE];
    for (int32_t head = 0; head < cache->num_kv_heads; head++) {
        if (params->k) {
            fv_kv_reader_key(values, reader, seq, seq, key, head);
            fv_row_store((char *)params->k + row * params->k_token_stride + head * params->k_head_stride, values,
                         cache->head_size, params->dst_dtype);
        }
        if (params->v) {
            fv_kv_reader_value(values, reader, seq, seq, key, head);
            fv_row_store((char *)params->v + row * params->v_token_stride + head * params->v_head_stride, values,
                         cache->v_head_size, params->dst_dtype);
        }
    }
}

fv_status fv_reference_kv_gather(const fv_launch *launch, const fv_kv_gather_params *params)
{
    (void)launch;
    if (params->cache.head_size > FV_REFERENCE_MAX_HEAD_SIZE || params->cache.v_head_size > FV_REFERENCE_MAX_HEAD_SIZE)
        return fv_fail(FV_ERR_UNSUPPORTED, "head sizes are %d and %d; the reference kernels take up to %d",
                       params->cache.head_size, params->cache.v_head_size, FV_REFERENCE_MAX_HEAD_SIZE);
    const fv_kv_reader reader = {
        .view = &params->cache,
        .block_table = params->block_table,
        .block_table_stride = params->block_table_stride,
        .k_scale = params->k_scale,
        .v_scale = params->v_scale,
        .num_scales = params->num_kv_scales,
        .context_parallel = params->context_parallel,
        .rotation = params->rotation,
        .head_size = params->cache.head_size,
        .v_head_size = params->cache.v_head_size,
    };
    for (int32_t seq = 0; seq < params->num_seqs; seq++) {
        const int32_t first_row = params->out_start[seq];
        for (int32_t row = first_row; row < params->out_start[seq + 1]; row++)
            gather_key(params, &reader, seq, params->key_start[seq] + row - first_row, row);
    }
    return FV_OK;
}
