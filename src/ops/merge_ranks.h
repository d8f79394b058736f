/* merge_ranks: the partial results of the ranks of a context-parallel group into one, by their LSE; or
 * each rank's weighed by a total LSE that is given (see fovea/context_parallel.h).
 *
 *   lse = ln(sum_r e^lse_r + e^sink)        out = sum_r e^(lse_r - lse) out_r
 *
 * A row without keys on any rank: out 0 and lse -inf, sink or not. */
#ifndef FV_OPS_MERGE_RANKS_H
#define FV_OPS_MERGE_RANKS_H

#include "core/compiler.h"
#include "ops/merge_states.h"

/* What a kernel weighs at a time. */
#define FV_MAX_MERGE_RANKS 256

typedef struct fv_merge_ranks_params {
    void *out; /* [T, H, D] out_dtype, or NULL: only the LSE is wanted. May be a rank's if the dtypes agree */
    int64_t token_stride, head_stride;
    float *lse; /* [T, H] or NULL */
    int64_t lse_token_stride, lse_head_stride;
    fv_merge_side ranks; /* of rank 0; rank r lies r * rank_stride and r * lse_rank_stride bytes further */
    int64_t rank_stride, lse_rank_stride;
    const float *total_lse; /* [T, H] or NULL; given, it stands for the sum over the ranks (lse, sinks unused) */
    int64_t total_token_stride, total_head_stride;
    fv_dtype dtype, out_dtype;
    const float *sinks; /* [H] or NULL */
    int32_t num_ranks;  /* 1 to FV_MAX_MERGE_RANKS */
    int32_t num_tokens, num_heads, head_size;
} fv_merge_ranks_params;

FV_SHARED_INLINE fv_merge_side fv_merge_rank(const fv_merge_ranks_params *params, int32_t rank)
{
    fv_merge_side side = params->ranks;
    if (side.out) side.out = (const char *)side.out + rank * params->rank_stride;
    side.lse = (const float *)(const void *)((const char *)side.lse + rank * params->lse_rank_stride);
    return side;
}

typedef fv_status (*fv_merge_ranks_fn)(const fv_launch *launch, const fv_merge_ranks_params *params);

#endif
