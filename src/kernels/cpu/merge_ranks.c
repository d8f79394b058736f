/* merge_ranks: the partial results of the ranks of a context-parallel group; runs of rows in parallel. */
#include "core/error.h"
#include "core/executor.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/merge_row.h"

#define ROWS_PER_TASK 16

/* The LSEs of the ranks become their weights. Returns the total LSE. */
static float weigh_ranks(float *weights, const fv_merge_ranks_params *params, int64_t token, int64_t head)
{
    for (int32_t rank = 0; rank < params->num_ranks; rank++) {
        const fv_merge_side side = fv_merge_rank(params, rank);
        weights[rank] = fv_merge_side_lse(&side, token, head, 0);
    }
    if (!params->total_lse) {
        return fv_merge_weigh(weights, params->num_ranks, params->sinks ? params->sinks[head] : -INFINITY);
    }
    const float total = fv_merge_lse(params->total_lse, params->total_token_stride, params->total_head_stride, token,
                                     head, 0);
    for (int32_t rank = 0; rank < params->num_ranks; rank++) {
        weights[rank] = total == -INFINITY ? 0.0f : expf(weights[rank] - total);
    }
    return total;
}

static void merge_row(const fv_merge_ranks_params *params, int64_t token, int64_t head)
{
    float shares[FV_MAX_MERGE_RANKS], weights[FV_MAX_MERGE_RANKS];
    const char *rows[FV_MAX_MERGE_RANKS];
    const float total = weigh_ranks(shares, params, token, head);
    if (params->out) {
        fv_merge_row merge = {rows, weights, 0};
        for (int32_t rank = 0; rank < params->num_ranks; rank++) {
            const fv_merge_side side = fv_merge_rank(params, rank);
            fv_merge_row_add(&merge, &side, token, head, shares[rank]);
        }
        fv_merge_row_sum((char *)params->out + token * params->token_stride + head * params->head_stride,
                         params->out_dtype, &merge, params->head_size, params->dtype);
    }
    if (!params->lse) return;
    char *lse = (char *)params->lse + token * params->lse_token_stride + head * params->lse_head_stride;
    *(float *)(void *)lse = total;
}

static void merge_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const fv_merge_ranks_params *params = user;
    const int64_t num_rows = (int64_t)params->num_tokens * params->num_heads;
    const int64_t end = fv_min_i64((index + 1) * ROWS_PER_TASK, num_rows);
    for (int64_t row = index * ROWS_PER_TASK; row < end; row++) {
        merge_row(params, row / params->num_heads, row % params->num_heads);
    }
}

fv_status FV_ISA_SYMBOL(fv_merge_ranks)(const fv_launch *launch, const fv_merge_ranks_params *params)
{
    if (params->num_ranks > FV_MAX_MERGE_RANKS) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%d ranks; the kernels merge up to %d", params->num_ranks,
                       FV_MAX_MERGE_RANKS);
    }
    const int64_t num_rows = (int64_t)params->num_tokens * params->num_heads;
    fv_executor_run(launch->executor, fv_ceil_div(num_rows, ROWS_PER_TASK), merge_task, (void *)params);
    return FV_OK;
}
