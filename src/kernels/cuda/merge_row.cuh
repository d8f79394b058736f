/* What merge_states and merge_ranks read of one side. */
#ifndef FV_KERNELS_CUDA_MERGE_ROW_CUH
#define FV_KERNELS_CUDA_MERGE_ROW_CUH

#include <math.h>

#include "kernels/cuda/number.cuh"
#include "ops/merge_ranks.h"

/* -inf for everything that marks a side without keys. */
static __device__ __forceinline__ float load_lse(const float *lse, int64_t token_stride, int64_t head_stride,
                                                 int32_t token, int32_t head, bool nan_stays = false)
{
    const float value = *(const float *)((const char *)lse + token * token_stride + head * head_stride);
    return isfinite(value) || (nan_stays && isnan(value)) ? value : -INFINITY;
}

static __device__ __forceinline__ float side_lse(const fv_merge_side *side, int32_t token, int32_t head,
                                                 bool nan_stays = false)
{
    return load_lse(side->lse, side->lse_token_stride, side->lse_head_stride, token, head, nan_stays);
}

/* 0 with a weight of 0: a side without keys may hold anything. */
static __device__ __forceinline__ float side_element(const fv_merge_side *side, fv_dtype dtype, int32_t token,
                                                     int32_t head, float weight, int32_t d)
{
    if (weight == 0) return 0;
    const char *row = (const char *)side->out + token * side->token_stride + head * side->head_stride;
    return weight * fv_element_load(row + (int64_t)d * fv_element_bytes(dtype), dtype);
}

#endif
