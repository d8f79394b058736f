/* attend_paged and attend_dense: item by item, row by row, key by key. */
#include "reference/attend_paged.h"

#include "core/error.h"
#include "reference/attend_row.h"
#include "reference/reference.h"

/* The vectors of a row. */
typedef struct row_memory {
    double q[FV_REFERENCE_MAX_HEAD_SIZE];
    double k[FV_REFERENCE_MAX_HEAD_SIZE];
    double v[FV_REFERENCE_MAX_HEAD_SIZE];
    double out[FV_REFERENCE_MAX_HEAD_SIZE];
} row_memory;

static double dot(const double *a, const double *b, int32_t size)
{
    double sum = 0;
    for (int32_t d = 0; d < size; d++) sum += a[d] * b[d];
    return sum;
}

static void attend_keys(fv_softmax_state *state, row_memory *memory, const fv_attend_row *row,
                        const fv_attend_params *params, const fv_kv_reader *reader, const fv_work_item *item)
{
    const int32_t first = fv_max_i32(row->keys.first, item->first_key);
    const int32_t end = fv_min_i32(row->keys.end, item->end_key);
    fv_attend_row_query(memory->q, row, params);
    for (int32_t key = first; key < end; key++) {
        if (!fv_attend_row_sees(row, params, key)) continue;
        fv_kv_reader_key(memory->k, reader, item->seq, item->table_row, key, row->kv_head);
        fv_kv_reader_value(memory->v, reader, item->seq, item->table_row, key, row->kv_head);
        const double product = dot(memory->q, memory->k, params->head_size);
        fv_softmax_state_add(state, fv_attend_row_score(row, params, key, product), memory->v);
    }
}

static void store_result(fv_softmax_state *state, const fv_attend_row *row, const fv_attend_params *params)
{
    const double lse = fv_softmax_state_finish(state, params->sinks ? &params->sinks[row->head] : NULL);
    const int64_t out_row = row->token - params->out_first_token;
    char *out = (char *)params->out + out_row * params->out_token_stride + row->head * params->out_head_stride;
    fv_row_store(out, state->out, params->v_head_size, params->out_dtype);
    if (!params->lse) return;
    char *to = (char *)params->lse + out_row * params->lse_token_stride + row->head * params->lse_head_stride;
    fv_row_store(to, &lse, 1, FV_DTYPE_F32);
}

static void store_partial(const fv_softmax_state *state, const fv_attend_row *row, const fv_attend_params *params,
                          int64_t slot)
{
    const int64_t at = slot * params->num_heads + row->head;
    params->partial_max[at] = (float)state->max;
    params->partial_sum[at] = (float)state->sum;
    fv_row_store(params->partial_out + at * params->v_head_size, state->out, params->v_head_size, FV_DTYPE_F32);
}

static void attend_item(row_memory *memory, const fv_attend_params *params, const fv_kv_reader *reader,
                        const fv_work_item *item)
{
    const int32_t group = params->num_heads / params->num_kv_heads;
    const int32_t first_head = item->first_kv_head * group;
    const int32_t end_head = first_head + item->num_kv_heads * group;
    for (int32_t t = 0; t < item->num_tokens; t++) {
        for (int32_t head = first_head; head < end_head; head++) {
            const fv_attend_row row = fv_attend_row_of(params, item->seq, item->first_token + t, head);
            fv_softmax_state state;
            fv_softmax_state_init(&state, memory->out, params->v_head_size);
            attend_keys(&state, memory, &row, params, reader, item);
            if (item->partial < 0)
                store_result(&state, &row, params);
            else
                store_partial(&state, &row, params, (int64_t)item->partial + t);
        }
    }
}

static void attend_grid(row_memory *memory, const fv_attend_params *params, const fv_kv_reader *reader)
{
    for (int32_t q_block = 0; q_block < params->num_q_blocks; q_block++) {
        for (int32_t kv_head = 0; kv_head < params->num_kv_heads; kv_head++) {
            for (int32_t segment = 0; segment < params->num_segments; segment++) {
                fv_work_item item;
                if (fv_grid_item(&item, params, q_block, kv_head, segment)) attend_item(memory, params, reader, &item);
            }
        }
    }
}

fv_status fv_reference_attend(const fv_attend_params *params, const fv_kv_reader *reader)
{
    if (params->head_size > FV_REFERENCE_MAX_HEAD_SIZE || params->v_head_size > FV_REFERENCE_MAX_HEAD_SIZE)
        return fv_fail(FV_ERR_UNSUPPORTED, "head sizes are %d and %d; the reference kernels take up to %d",
                       params->head_size, params->v_head_size, FV_REFERENCE_MAX_HEAD_SIZE);
    row_memory memory;
    if (params->items) {
        for (int32_t i = 0; i < params->num_items; i++) attend_item(&memory, params, reader, &params->items[i]);
    } else {
        attend_grid(&memory, params, reader);
    }
    return FV_OK;
}

static fv_status attend_paged(const fv_launch *launch, const fv_attend_params *params)
{
    (void)launch;
    const fv_kv_reader reader = fv_kv_reader_of(params);
    return fv_reference_attend(params, &reader);
}

static const char *why_not(const fv_problem *problem)
{
    (void)problem;
    return NULL;
}

static size_t scratch_bytes(const fv_attend_params *params)
{
    (void)params;
    return 0;
}

const fv_attend_variant fv_reference_attend_variants[1] = {
    {"reference", .block_m = 16, .tile_keys = 32, why_not, scratch_bytes, attend_paged},
};
