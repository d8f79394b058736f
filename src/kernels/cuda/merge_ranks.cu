/* merge_ranks: a block for each row. The ranks' LSEs become weights in shared memory, then each thread
 * merges its elements. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/merge_row.cuh"

#define THREADS 128

/* A rank weighs e^(lse - max) / sum. Their LSE, max + ln(sum), is rounded; weights by it would be too. */
typedef struct rank_total {
    float max; /* -inf: no rank has keys */
    float sum;
} rank_total;

/* The first warp. */
static __device__ rank_total find_total(const fv_merge_ranks_params *params, const float *lse, int32_t token,
                                        int32_t head)
{
    rank_total total = {-INFINITY, 1};
    if (params->total_lse) {
        total.max = load_lse(params->total_lse, params->total_token_stride, params->total_head_stride, token, head);
        return total;
    }
    float max = -INFINITY, sum = 0;
    for (int32_t rank = threadIdx.x; rank < params->num_ranks; rank += 32) max = fmaxf(max, lse[rank]);
    max = fv_warp_max(max);
    if (max == -INFINITY) return total;
    const float sink = params->sinks ? params->sinks[head] : -INFINITY;
    total.max = fmaxf(max, sink);
    for (int32_t rank = threadIdx.x; rank < params->num_ranks; rank += 32) sum += expf(lse[rank] - total.max);
    total.sum = fv_warp_sum(sum) + expf(sink - total.max);
    return total;
}

static __device__ __forceinline__ float weight_of(float lse, const rank_total *total)
{
    return total->max == -INFINITY || lse == -INFINITY ? 0.0f : expf(lse - total->max) / total->sum;
}

static __global__ void __launch_bounds__(THREADS, 1) merge_ranks(const __grid_constant__ fv_merge_ranks_params params)
{
    __shared__ float weights[FV_MAX_MERGE_RANKS];
    const int32_t token = (int32_t)(blockIdx.x / params.num_heads), head = (int32_t)(blockIdx.x % params.num_heads);
    if (threadIdx.x < 32) {
        for (int32_t rank = threadIdx.x; rank < params.num_ranks; rank += 32) {
            const fv_merge_side side = fv_merge_rank(&params, rank);
            weights[rank] = side_lse(&side, token, head);
        }
        __syncwarp();
        const rank_total total = find_total(&params, weights, token, head);
        __syncwarp();
        for (int32_t rank = threadIdx.x; rank < params.num_ranks; rank += 32)
            weights[rank] = weight_of(weights[rank], &total);
        if (params.lse && threadIdx.x == 0)
            *(float *)((char *)params.lse + token * params.lse_token_stride + head * params.lse_head_stride) =
                total.max == -INFINITY ? -INFINITY : total.max + logf(total.sum);
    }
    __syncthreads();
    if (!params.out) return;
    const int32_t out_bytes = fv_element_bytes(params.out_dtype);
    char *row = (char *)params.out + token * params.token_stride + head * params.head_stride;
    for (int32_t d = threadIdx.x; d < params.head_size; d += THREADS) {
        float value = 0;
        for (int32_t rank = 0; rank < params.num_ranks; rank++) {
            const fv_merge_side side = fv_merge_rank(&params, rank);
            value += side_element(&side, params.dtype, token, head, weights[rank], d);
        }
        fv_element_store(row + (int64_t)d * out_bytes, value, params.out_dtype);
    }
}

extern "C" fv_status fv_cuda_merge_ranks(const fv_launch *launch, const fv_merge_ranks_params *params)
{
    const dim3 grid((uint32_t)params->num_tokens * (uint32_t)params->num_heads);
    return fv_cuda_launch(launch, "merge_ranks", merge_ranks, grid, THREADS, 0, *params);
}
