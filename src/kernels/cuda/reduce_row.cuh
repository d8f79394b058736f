/* What every reduction of segments does: finds where a row's segments lie and where the row goes, and ends it. */
#ifndef FV_KERNELS_CUDA_REDUCE_ROW_CUH
#define FV_KERNELS_CUDA_REDUCE_ROW_CUH

#include "kernels/cuda/grid_item.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/ptx.cuh"

constexpr int32_t REDUCE_WARPS = 4, REDUCE_THREADS = 32 * REDUCE_WARPS; /* of a block */

/* A row of the output. */
typedef struct reduce_target {
    const fv_reduce_params *params;
    int32_t token, head; /* of the batch */
    char *out;
    float sink; /* -inf: none */
} reduce_target;

/* Segments of a row that a lane has, one every `step`: where the next of them lies. Rows of the partial results are fewer
 * than 2^31, for each has memory of its own. */
typedef struct segment_walk {
    int32_t row;
    int32_t step; /* rows from one to the next */
    int32_t num;  /* left */
} segment_walk;

/* What a block has of the items, `first` and each `step` further on before `end`, and of the rows of those: share `share` of
 * `num_shares`. */
typedef struct reduce_place {
    int32_t first, step, end;
    int32_t share, num_shares;
} reduce_place;

/* The grid has a column for each item; of a list of fixed length (LISTED), most of which may be empty, all blocks share the
 * items that are not. */
template <bool LISTED> static __device__ __forceinline__ reduce_place place_reduce_block(const fv_reduce_params *params)
{
    const int32_t block = (int32_t)blockIdx.x, num_blocks = (int32_t)gridDim.x;
    if (!LISTED) return {block, num_blocks, num_blocks, (int32_t)blockIdx.y, (int32_t)gridDim.y};
    const int32_t num_items = *params->num_items_at, columns = max(1, min(num_items, num_blocks));
    const int32_t num_shares = num_blocks / columns, share = block / columns;
    return {block - share * columns, columns, share < num_shares ? num_items : 0, share, num_shares};
}

/* Item `at`; false: there is none. It is found before the segments are there: the step is older than their kernel. */
static __device__ __forceinline__ bool find_reduce_item(fv_reduce_item *item, const fv_reduce_params *params,
                                                        int32_t at)
{
    if (!params->items) return find_grid_reduce_item(item, params, at);
    *item = params->items[at];
    return true;
}

static __device__ __forceinline__ reduce_target find_target(const fv_reduce_params *params, const fv_reduce_item *item,
                                                            int32_t token, int32_t head)
{
    reduce_target target = {params, item->first_token + token, head, (char *)params->out, -INFINITY};
    target.out += target.token * params->out_token_stride + head * params->out_head_stride;
    if (params->sinks) target.sink = params->sinks[head];
    return target;
}

/* Found late, for most warps have no part of it. */
static __device__ __forceinline__ float *place_lse(const reduce_target *target)
{
    const fv_reduce_params *params = target->params;
    return (float *)((char *)params->lse + target->token * params->lse_token_stride +
                     target->head * params->lse_head_stride);
}

static __device__ __forceinline__ int32_t row_of_segment(const fv_reduce_params *params, const fv_reduce_item *item,
                                                         int32_t segment, int32_t token, int32_t head)
{
    return (item->partial + segment * fv_reduce_segment_slots(item) + token) * params->num_heads + head;
}

static __device__ __forceinline__ segment_walk walk_segments(const fv_reduce_params *params, const fv_reduce_item *item,
                                                             int32_t first, int32_t step, int32_t token, int32_t head)
{
    segment_walk walk;
    walk.row = row_of_segment(params, item, first, token, head);
    walk.step = step * fv_reduce_segment_slots(item) * params->num_heads;
    walk.num = (item->num_segments - first + step - 1) / step;
    return walk;
}

/* How much what is relative to `max` weighs where the largest maximum, a number, is `largest`. */
static __device__ __forceinline__ float weight_of(float max, float largest) { return __expf(max - largest); }

/* What values are divided by, and with `is_first` the LSE. A sink is a key without a value; where there is no key, it does
 * not count either. */
static __device__ __forceinline__ float finish_sums(float max, float sum, const reduce_target *target, bool is_first)
{
    float before = 1;
    if (target->sink > -INFINITY && max > -INFINITY) {
        const float largest = fmaxf(max, target->sink);
        before = weight_of(max, largest);
        max = largest;
        sum = sum * before + weight_of(target->sink, max);
    }
    if (is_first && target->params->lse) *place_lse(target) = sum == 0 ? -INFINITY : max + logf(sum);
    return sum == 0 ? 0.0f : __fdividef(before, sum); /* of NaN NaN */
}

/* The row's elements d .. d + 3, d a multiple of four. */
static __device__ __forceinline__ void store_four(const reduce_target *target, int32_t d, float4 value)
{
    const fv_dtype dtype = target->params->out_dtype;
    const int32_t bytes = fv_element_bytes(dtype);
    if (bytes == 2 && (uintptr_t)target->out % 8 == 0) {
        *(uint2 *)(target->out + d * 2) = dtype == FV_DTYPE_F16
                                              ? make_uint2(fv_narrow_pair<__half>(value.x, value.y),
                                                           fv_narrow_pair<__half>(value.z, value.w))
                                              : make_uint2(fv_narrow_pair<__nv_bfloat16>(value.x, value.y),
                                                           fv_narrow_pair<__nv_bfloat16>(value.z, value.w));
        return;
    }
#pragma unroll 1
    for (int32_t k = 0; k < 4; k++) {
        fv_element_store(target->out + (d + k) * bytes, value.x, dtype);
        value = make_float4(value.y, value.z, value.w, 0);
    }
}

#endif
