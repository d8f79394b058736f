/* split_heads: a warp for each token and head of q, k and v; the norm and the rotation are one pass over the head,
 * rounded once. */
#include "kernels/cuda/layers/layers.h"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/overlap.cuh"

#define WARPS 4

/* What the elements of a head are multiplied with, beside the norm's weight. */
static __device__ __forceinline__ float norm_factor(const float *head, const fv_split_heads_params *params)
{
    float squares = 0;
    for (int32_t i = threadIdx.x % 32; i < params->head_size; i += 32) squares = __fmaf_rn(head[i], head[i], squares);
    return 1.0f / sqrtf(fv_warp_sum(squares) / (float)params->head_size + params->epsilon);
}

static __global__ void __launch_bounds__(WARPS * 32, 1)
    split_heads(const __grid_constant__ fv_split_heads_params params)
{
    overlap_let_next_start();
    overlap_wait();
    const int32_t rotated = params.num_heads + params.num_kv_heads, heads = rotated + params.num_kv_heads;
    const int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int32_t token = (int32_t)(at / heads), head = (int32_t)(at % heads), lane = threadIdx.x % 32;
    if (token >= params.num_rows) return;
    const float *from = params.qkv + at * params.head_size;
    __nv_bfloat16 *to = (__nv_bfloat16 *)params.out + at * params.head_size;

    const int64_t position = head < rotated ? params.positions[token] : -1;
    const bool turns = position >= 0 && position < params.max_position;
    const float *norm = head < params.num_heads ? params.q_norm : head < rotated ? params.k_norm : NULL;
    const float factor = norm ? norm_factor(from, &params) : 1.0f;
    const int32_t half = turns ? params.rope_dim / 2 : 0;
    for (int32_t i = lane; i < half; i += 32) {
        const bool interleaved = params.style == FV_ROPE_INTERLEAVED;
        const int32_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
        const float a = from[first] * factor * (norm ? norm[first] : 1.0f);
        const float b = from[second] * factor * (norm ? norm[second] : 1.0f);
        const float c = params.cos[position * half + i], s = params.sin[position * half + i];
        to[first] = __float2bfloat16_rn(__fmaf_rn(a, c, -__fmul_rn(b, s)));
        to[second] = __float2bfloat16_rn(__fmaf_rn(b, c, __fmul_rn(a, s)));
    }
    for (int32_t i = 2 * half + lane; i < params.head_size; i += 32) {
        to[i] = __float2bfloat16_rn(from[i] * factor * (norm ? norm[i] : 1.0f));
    }
}

extern "C" fv_status fv_cuda_split_heads(const fv_launch *launch, const fv_split_heads_params *params)
{
    const int64_t num_warps = (int64_t)params->num_rows * (params->num_heads + 2 * params->num_kv_heads);
    return fv_cuda_launch_overlapped(launch, "split_heads", split_heads, dim3(fv_cuda_blocks(num_warps, WARPS)),
                                     WARPS * 32, 0, *params);
}
