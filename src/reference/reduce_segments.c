/* reduce_segments: the partial results of a row, merged by maximum and sum. */
#include "core/error.h"
#include "ops/attend_paged.h"
#include "reference/attend_row.h"
#include "reference/reference.h"

static void reduce_row(const fv_reduce_params *params, const fv_reduce_item *item, int32_t token, int32_t head)
{
    double out[FV_REFERENCE_MAX_HEAD_SIZE];
    fv_softmax_state state;
    fv_softmax_state_init(&state, out, params->v_head_size);
    for (int32_t segment = 0; segment < item->num_segments; segment++) {
        const int64_t slot = (int64_t)item->partial + (int64_t)segment * fv_reduce_segment_slots(item) + token;
        const int64_t at = slot * params->num_heads + head;
        fv_softmax_state_merge(&state, params->partial_max[at], params->partial_sum[at],
                               params->partial_out + at * params->v_head_size);
    }
    const double lse = fv_softmax_state_finish(&state, params->sinks ? &params->sinks[head] : NULL);

    const int64_t row = (int64_t)item->first_token + token;
    fv_row_store((char *)params->out + row * params->out_token_stride + head * params->out_head_stride, out,
                 params->v_head_size, params->out_dtype);
    if (params->lse)
        fv_row_store((char *)params->lse + row * params->lse_token_stride + head * params->lse_head_stride, &lse, 1,
                     FV_DTYPE_F32);
}

static void reduce_item(const fv_reduce_params *params, const fv_reduce_item *item)
{
    for (int32_t token = 0; token < item->num_tokens; token++)
        for (int32_t head = 0; head < params->num_heads; head++) reduce_row(params, item, token, head);
}

static void reduce_grid(const fv_reduce_params *params)
{
    for (int32_t q_block = 0; q_block < params->num_q_blocks; q_block++) {
        fv_reduce_item item;
        if (fv_grid_reduce_item(&item, params, q_block)) reduce_item(params, &item);
    }
}

fv_status fv_reference_reduce_segments(const fv_launch *launch, const fv_reduce_params *params)
{
    (void)launch;
    if (params->v_head_size > FV_REFERENCE_MAX_HEAD_SIZE)
        return fv_fail(FV_ERR_UNSUPPORTED, "v_head_size is %d; the reference kernels take up to %d",
                       params->v_head_size, FV_REFERENCE_MAX_HEAD_SIZE);
    if (!params->items)
        reduce_grid(params);
    else
        for (int32_t i = 0; i < params->num_items; i++) reduce_item(params, &params->items[i]);
    return FV_OK;
}
