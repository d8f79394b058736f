/* merge_states: two partial results of the same rows into one, by their LSE (see fovea/ops.h). Kernels
 * take element by element, so that out may be a side of the same dtype. */
#ifndef FV_OPS_MERGE_STATES_H
#define FV_OPS_MERGE_STATES_H

#include "core/device.h"
#include "fovea/dtype.h"

typedef struct fv_merge_side {
    const void *out; /* [T, H, D] dtype; strides in bytes, last dimension dense */
    int64_t token_stride, head_stride;
    const float *lse; /* [T, H]; -inf, +inf or, but for nan_stays, NaN: no keys */
    int64_t lse_token_stride, lse_head_stride;
} fv_merge_side;

typedef struct fv_merge_params {
    void *out; /* may be a's or b's if the dtypes agree */
    int64_t token_stride, head_stride;
    float *lse; /* or NULL */
    int64_t lse_token_stride, lse_head_stride;
    fv_merge_side a, b;
    fv_dtype dtype;     /* of a and b */
    fv_dtype out_dtype; /* of out */
    const float *sinks; /* [H] or NULL: enters the denominator here, so that no side has to know it */
    int32_t num_tokens, num_heads, head_size;
    int32_t nan_stays; /* 1: an LSE of NaN is that of a row with NaN in its scores, which stays one */
} fv_merge_params;

typedef fv_status (*fv_merge_states_fn)(const fv_launch *launch, const fv_merge_params *params);

#endif
