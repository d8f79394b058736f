/* merge_states: two partial results of the same rows, weighted by e^lse; runs of rows in parallel. */
#include "core/executor.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/merge_row.h"

#define ROWS_PER_TASK 32

static void merge_row(const fv_merge_params *params, int64_t token, int64_t head)
{
    float shares[2] = {fv_merge_side_lse(&params->a, token, head, params->nan_stays),
                       fv_merge_side_lse(&params->b, token, head, params->nan_stays)};
    const float total = fv_merge_weigh(shares, 2, params->sinks ? params->sinks[head] : -INFINITY);
    const char *rows[2];
    float weights[2];
    fv_merge_row merge = {rows, weights, 0};
    fv_merge_row_add(&merge, &params->a, token, head, shares[0]);
    fv_merge_row_add(&merge, &params->b, token, head, shares[1]);
    char *to = (char *)params->out + token * params->token_stride + head * params->head_stride;
    fv_merge_row_sum(to, params->out_dtype, &merge, params->head_size, params->dtype);
    if (!params->lse) return;
    char *lse = (char *)params->lse + token * params->lse_token_stride + head * params->lse_head_stride;
    *(float *)(void *)lse = total;
}

static void merge_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const fv_merge_params *params = user;
    const int64_t num_rows = (int64_t)params->num_tokens * params->num_heads;
    const int64_t end = fv_min_i64((index + 1) * ROWS_PER_TASK, num_rows);
    for (int64_t row = index * ROWS_PER_TASK; row < end; row++) {
        merge_row(params, row / params->num_heads, row % params->num_heads);
    }
}

fv_status FV_ISA_SYMBOL(fv_merge_states)(const fv_launch *launch, const fv_merge_params *params)
{
    const int64_t num_rows = (int64_t)params->num_tokens * params->num_heads;
    fv_executor_run(launch->executor, fv_ceil_div(num_rows, ROWS_PER_TASK), merge_task, (void *)params);
    return FV_OK;
}
