/* One row of a merge: what each side weighs, and the weighed sum. */
#ifndef FV_KERNELS_CPU_MERGE_ROW_H
#define FV_KERNELS_CPU_MERGE_ROW_H

#include <math.h>

#include "kernels/cpu/kv_row.h"
#include "ops/merge_states.h"

/* The sides of a row that have a weight; a side without keys may hold anything and is never read. */
typedef struct fv_merge_row {
    const char **rows; /* the caller's, as many as there are sides */
    float *weights;
    int32_t num_sides;
} fv_merge_row;

static inline float fv_merge_lse(const float *lse, int64_t token_stride, int64_t head_stride, int64_t token,
                                 int64_t head, int32_t nan_stays)
{
    float value;
    memcpy(&value, (const char *)lse + token * token_stride + head * head_stride, sizeof(value));
    return isfinite(value) || (nan_stays && isnan(value)) ? value : -INFINITY;
}

static inline float fv_merge_side_lse(const fv_merge_side *side, int64_t token, int64_t head, int32_t nan_stays)
{
    return fv_merge_lse(side->lse, side->lse_token_stride, side->lse_head_stride, token, head, nan_stays);
}

/* From LSEs to weights, in place: w_i = e^lse_i / (sum of e^lse_j + e^sink). Returns the LSE of all. Where
 * all are -inf the weights are 0 and the LSE is -inf, sink or not; no sink is -inf. One NaN makes all of it NaN. */
static inline float fv_merge_weigh(float *weights, int32_t num_sides, float sink)
{
    float max = -INFINITY;
    for (int32_t i = 0; i < num_sides; i++) max = isnan(max) || weights[i] <= max ? max : weights[i];
    const int32_t is_empty = max == -INFINITY;
    if (sink > max) max = sink;
    float sum = is_empty ? 1.0f : expf(sink - max);
    for (int32_t i = 0; i < num_sides; i++) {
        weights[i] = is_empty ? 0.0f : expf(weights[i] - max);
        sum += weights[i];
    }
    for (int32_t i = 0; i < num_sides; i++) weights[i] /= sum;
    return is_empty ? -INFINITY : max + logf(sum);
}

static inline void fv_merge_row_add(fv_merge_row *merge, const fv_merge_side *side, int64_t token, int64_t head,
                                    float weight)
{
    if (weight == 0.0f) return;
    merge->rows[merge->num_sides] = (const char *)side->out + token * side->token_stride + head * side->head_stride;
    merge->weights[merge->num_sides++] = weight;
}

FV_ALWAYS_INLINE void fv_merge_row_sum_of(char *to, fv_dtype out_dtype, const fv_merge_row *merge,
                                          const int32_t num_sides, int32_t size, fv_dtype dtype)
{
    const size_t bytes = fv_dtype_bytes(dtype), out_bytes = fv_dtype_bytes(out_dtype);
    int32_t d = 0;
    for (; d + FV_LANES <= size; d += FV_LANES) {
        fv_f32x8 sum = fv_splat(0.0f);
        for (int32_t i = 0; i < num_sides; i++)
            sum += fv_load8(merge->rows[i] + (size_t)d * bytes, dtype) * merge->weights[i];
        fv_store8(to + (size_t)d * out_bytes, sum, out_dtype);
    }
    for (; d < size; d++) {
        float sum = 0.0f;
        for (int32_t i = 0; i < num_sides; i++)
            sum += fv_float_load(merge->rows[i] + (size_t)d * bytes, dtype) * merge->weights[i];
        fv_float_store(to + (size_t)d * out_bytes, sum, out_dtype);
    }
}

/* to = the weighed sum. `to` may be one of the rows if the dtypes agree. Two sides of the output's dtype,
 * or of fp32 into bf16, are what most rows are: those get loops of their own. */
static inline void fv_merge_row_sum(char *to, fv_dtype out_dtype, const fv_merge_row *merge, int32_t size,
                                    fv_dtype dtype)
{
    const int32_t two = merge->num_sides == 2, same = dtype == out_dtype;
    if (two && same && dtype == FV_DTYPE_BF16)
        fv_merge_row_sum_of(to, FV_DTYPE_BF16, merge, 2, size, FV_DTYPE_BF16);
    else if (two && same && dtype == FV_DTYPE_F16)
        fv_merge_row_sum_of(to, FV_DTYPE_F16, merge, 2, size, FV_DTYPE_F16);
    else if (two && same && dtype == FV_DTYPE_F32)
        fv_merge_row_sum_of(to, FV_DTYPE_F32, merge, 2, size, FV_DTYPE_F32);
    else if (two && out_dtype == FV_DTYPE_BF16 && dtype == FV_DTYPE_F32)
        fv_merge_row_sum_of(to, FV_DTYPE_BF16, merge, 2, size, FV_DTYPE_F32);
    else
        fv_merge_row_sum_of(to, out_dtype, merge, merge->num_sides, size, dtype);
}

#endif
