/* reduce_segments: a block for each item and query head. Slots hold maxima in natural units; segments
 * without keys are skipped.
 *
 *   all threads    maximum and sum of the segments, a thread for each         one round trip to memory
 *   chunk by chunk weights of the segments in shared memory
 *   groups         elements x groups of segments, a thread for each           loads that wait for nothing
 *   all threads    the groups' sums added up */
#include "kernels/cuda/grid_item.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/overlap.cuh"

enum {
    THREADS = 256,
    CHUNK = 256, /* segments whose weights are kept */
};

typedef struct reduce_memory {
    float warp_values[THREADS / 32];
    float weights[CHUNK];
    float sums[THREADS];
} reduce_memory;

typedef struct segment_sums {
    float max; /* of the segments, and of the sink where there are keys */
    float sum;
} segment_sums;

static __device__ __forceinline__ int64_t slot_of(const fv_reduce_params *params, const fv_reduce_item *item,
                                                  int32_t segment, int32_t token, int32_t head)
{
    const int64_t slot = (int64_t)item->partial + (int64_t)segment * fv_reduce_segment_slots(item) + token;
    return slot * params->num_heads + head;
}

/* Maximum or sum over the block, in every thread. */
static __device__ __forceinline__ float reduce_block(reduce_memory *memory, float value, bool is_max)
{
    const float of_warp = is_max ? fv_warp_max(value) : fv_warp_sum(value);
    if (threadIdx.x % 32 == 0) memory->warp_values[threadIdx.x / 32] = of_warp;
    __syncthreads();
    float all = memory->warp_values[0];
    for (int32_t warp = 1; warp < THREADS / 32; warp++)
        all = is_max ? fmaxf(all, memory->warp_values[warp]) : all + memory->warp_values[warp];
    __syncthreads();
    return all;
}

static __device__ __forceinline__ segment_sums sum_segments(reduce_memory *memory, const fv_reduce_params *params,
                                                            const fv_reduce_item *item, int32_t token, int32_t head)
{
    segment_sums sums = {-INFINITY, 0};
    float max = -INFINITY, sum = 0;
    for (int32_t segment = threadIdx.x; segment < item->num_segments; segment += THREADS)
        max = fmaxf(max, params->partial_max[slot_of(params, item, segment, token, head)]);
    max = reduce_block(memory, max, true);
    if (max == -INFINITY) return sums;
    const float sink = params->sinks ? params->sinks[head] : -INFINITY;
    sums.max = fmaxf(max, sink);
    for (int32_t segment = threadIdx.x; segment < item->num_segments; segment += THREADS) {
        const int64_t at = slot_of(params, item, segment, token, head);
        const float own = params->partial_max[at];
        if (own > -INFINITY) sum += expf(own - sums.max) * params->partial_sum[at];
    }
    sums.sum = reduce_block(memory, sum, false) + expf(sink - sums.max);
    return sums;
}

/* The weighed sum of element d over every num_groups-th segment of the chunk. Without branches, so that loads
 * do not wait for each other; a segment without keys has weight 0 and outputs of 0. */
static __device__ __forceinline__ float sum_values(const float *weights, const float *values, int64_t segment_floats,
                                                   int32_t count, int32_t group, int32_t num_groups)
{
    float sum = 0;
#pragma unroll 8
    for (int32_t segment = group; segment < count; segment += num_groups)
        sum += weights[segment] * values[segment * segment_floats];
    return sum;
}

static __device__ __forceinline__ void reduce_row(reduce_memory *memory, const fv_reduce_params *params,
                                                  const fv_reduce_item *item, int32_t token, int32_t head)
{
    const segment_sums sums = sum_segments(memory, params, item, token, head);
    const int64_t row = (int64_t)item->first_token + token;
    const int32_t bytes = fv_element_bytes(params->out_dtype), size = params->v_head_size;
    const int32_t span = size < THREADS ? (size + 31) / 32 * 32 : THREADS, num_groups = THREADS / span;
    const int32_t group = (int32_t)threadIdx.x / span, lane = (int32_t)threadIdx.x % span;
    const int64_t segment_floats = (int64_t)fv_reduce_segment_slots(item) * params->num_heads * size;
    char *out = (char *)params->out + row * params->out_token_stride + head * params->out_head_stride;
    for (int32_t first = 0; first < size; first += span) {
        const int32_t d = first + lane;
        float value = 0;
        for (int32_t chunk = 0; chunk < item->num_segments; chunk += CHUNK) {
            const int32_t count = fv_min_i32(CHUNK, item->num_segments - chunk);
            for (int32_t i = threadIdx.x; i < count; i += THREADS) {
                const float own = params->partial_max[slot_of(params, item, chunk + i, token, head)];
                memory->weights[i] = own > -INFINITY ? expf(own - sums.max) : 0.0f;
            }
            __syncthreads();
            const float *values = params->partial_out + slot_of(params, item, chunk, token, head) * size + d;
            if (d < size && group < num_groups)
                value += sum_values(memory->weights, values, segment_floats, count, group, num_groups);
            __syncthreads();
        }
        memory->sums[threadIdx.x] = value;
        __syncthreads();
        if (group == 0 && d < size) {
            for (int32_t other = 1; other < num_groups; other++) value += memory->sums[other * span + lane];
            fv_element_store(out + (int64_t)d * bytes, sums.sum > 0 ? value / sums.sum : 0.0f, params->out_dtype);
        }
        __syncthreads();
    }
    if (!params->lse || threadIdx.x != 0) return;
    *(float *)((char *)params->lse + row * params->lse_token_stride +
               head * params->lse_head_stride) = sums.sum > 0 ? sums.max + logf(sums.sum) : -INFINITY;
}

static __global__ void __launch_bounds__(THREADS, 1) reduce_segments(const __grid_constant__ fv_reduce_params params)
{
    __shared__ reduce_memory memory;
    fv_reduce_item item;
    bool has_item = true; /* found before the segments are there: the step is older than their kernel */
    if (params.items)
        item = params.items[blockIdx.x];
    else
        has_item = find_grid_reduce_item(&item, &params, (int32_t)blockIdx.x);
    overlap_begin();
    if (!has_item) return;
    for (int32_t token = 0; token < item.num_tokens; token++)
        reduce_row(&memory, &params, &item, token, (int32_t)blockIdx.y);
}

extern "C" fv_status fv_cuda_reduce_segments(const fv_launch *launch, const fv_reduce_params *params)
{
    const int32_t num_items = params->items ? params->num_items : params->num_q_blocks;
    const dim3 grid((uint32_t)num_items, (uint32_t)params->num_heads);
    return fv_cuda_launch_overlapped(launch, "reduce_segments", reduce_segments, grid, THREADS, 0, *params);
}
