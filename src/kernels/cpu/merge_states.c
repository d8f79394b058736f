/* merge_states: two partial results of the same rows, weighted by e^lse; runs of rows in parallel. */
#include <math.h>

#include "core/executor.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/kv_row.h"

#define ROWS_PER_TASK 32

static float side_lse(const fv_merge_side *side, int64_t token, int64_t head)
{
    float lse;
    memcpy(&lse, (const char *)side->lse + token * side->lse_token_stride + head * side->lse_head_stride, sizeof(lse));
    return isfinite(lse) ? lse : -INFINITY;
}

static const char *side_row(const fv_merge_side *side, int64_t token, int64_t head)
{
    return (const char *)side->out + token * side->token_stride + head * side->head_stride;
}

/* A side of weight 0 may hold anything, so it is not even multiplied. */
FV_ALWAYS_INLINE fv_f32x8 weigh(const char *row, float weight, fv_dtype dtype)
{
    return weight == 0.0f ? fv_splat(0.0f) : fv_load8(row, dtype) * weight;
}

static void merge_elements(char *to, const char *a, float weight_a, const char *b, float weight_b, int32_t size,
                           fv_dtype dtype)
{
    const size_t bytes = fv_dtype_bytes(dtype);
    int32_t d = 0;
    for (; d + FV_LANES <= size; d += FV_LANES) {
        const size_t at = (size_t)d * bytes;
        fv_store8(to + at, weigh(a + at, weight_a, dtype) + weigh(b + at, weight_b, dtype), dtype);
    }
    for (; d < size; d++) {
        const size_t at = (size_t)d * bytes;
        const float value_a = weight_a == 0.0f ? 0.0f : fv_float_load(a + at, dtype) * weight_a;
        const float value_b = weight_b == 0.0f ? 0.0f : fv_float_load(b + at, dtype) * weight_b;
        fv_float_store(to + at, value_a + value_b, dtype);
    }
}

static void merge_row(const fv_merge_params *params, int64_t token, int64_t head)
{
    const float lse_a = side_lse(&params->a, token, head);
    const float lse_b = side_lse(&params->b, token, head);
    const float max = lse_a > lse_b ? lse_a : lse_b;
    const int32_t is_empty = max == -INFINITY;
    const float share_a = is_empty ? 0.0f : expf(lse_a - max);
    const float share_b = is_empty ? 0.0f : expf(lse_b - max);
    const float sum = is_empty ? 1.0f : share_a + share_b;

    merge_elements((char *)params->out + token * params->token_stride + head * params->head_stride,
                   side_row(&params->a, token, head), share_a / sum, side_row(&params->b, token, head), share_b / sum,
                   params->head_size, params->dtype);
    if (!params->lse) return;
    char *lse = (char *)params->lse + token * params->lse_token_stride + head * params->lse_head_stride;
    *(float *)(void *)lse = max + logf(sum);
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
