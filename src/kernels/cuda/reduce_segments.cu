/* reduce_segments: a block for each item and query head, one token after the other. Slots hold maxima in natural units;
 * segments without keys weigh nothing.
 *
 *   warp w     segments w, w + 4, w + 8 ...: maxima, sums and values asked for together, eight segments at a time,
 *              so that all is one trip to memory; the warp's sums follow its largest maximum
 *   the end    the four warps' sums meet in shared memory */
#include "kernels/cuda/grid_item.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/overlap.cuh"

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    SPAN = 128,  /* elements of a row that a warp takes at once, four a lane */
    AT_ONCE = 8, /* segments of a warp */
};

typedef struct reduce_memory {
    float max[WARPS], sum[WARPS];
    float values[WARPS][SPAN];
} reduce_memory;

/* Sums relative to a maximum: of some segments, of one row. */
typedef struct segment_sums {
    float max;
    float sum;
    float values[4]; /* of the lane's elements */
} segment_sums;

static __device__ __forceinline__ int64_t slot_of(const fv_reduce_params *params, const fv_reduce_item *item,
                                                  int32_t segment, int32_t token, int32_t head)
{
    const int64_t slot = (int64_t)item->partial + (int64_t)segment * fv_reduce_segment_slots(item) + token;
    return slot * params->num_heads + head;
}

/* How much what is relative to `max` weighs where the largest maximum is `largest`. */
static __device__ __forceinline__ float weight_of(float max, float largest)
{
    return max > -INFINITY ? expf(max - largest) : 0.0f;
}

/* The lane's elements d .. d + 3 of a slot; 0 past the row. */
static __device__ __forceinline__ void load_values(float (&values)[4], const fv_reduce_params *params, int64_t at,
                                                   int32_t d)
{
    const int32_t size = params->v_head_size;
    const float *from = params->partial_out + at * size + d;
    if (size % 4 == 0 && d < size) {
        const float4 all = *(const float4 *)from;
        values[0] = all.x, values[1] = all.y, values[2] = all.z, values[3] = all.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] = d + i < size ? from[i] : 0.0f;
}

/* The segments first, first + WARPS, ... that a warp takes at once. */
static __device__ __forceinline__ void add_segments(segment_sums *sums, const fv_reduce_params *params,
                                                    const fv_reduce_item *item, int32_t first, int32_t token,
                                                    int32_t head, int32_t d)
{
    float max[AT_ONCE], sum[AT_ONCE], values[AT_ONCE][4], largest = sums->max;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const int32_t segment = first + i * WARPS;
        const bool is_there = segment < item->num_segments;
        const int64_t at = slot_of(params, item, is_there ? segment : first, token, head);
        max[i] = is_there ? params->partial_max[at] : -INFINITY;
        sum[i] = params->partial_sum[at];
        load_values(values[i], params, at, d);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) largest = fmaxf(largest, max[i]);
    if (largest == -INFINITY) return;
    const float before = weight_of(sums->max, largest);
    sums->max = largest;
    sums->sum *= before;
#pragma unroll
    for (int k = 0; k < 4; k++) sums->values[k] *= before;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const float weight = weight_of(max[i], largest);
        sums->sum += weight * sum[i];
#pragma unroll
        for (int k = 0; k < 4; k++) sums->values[k] += weight * values[i][k];
    }
}

/* SPAN elements of a row from `first_d` on, and with the first ones the LSE. Two barriers. */
static __device__ __forceinline__ void reduce_span(reduce_memory *memory, const fv_reduce_params *params,
                                                   const fv_reduce_item *item, int32_t token, int32_t head,
                                                   int32_t first_d)
{
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    segment_sums sums = {-INFINITY, 0, {}};
    for (int32_t first = warp; first < item->num_segments; first += WARPS * AT_ONCE)
        add_segments(&sums, params, item, first, token, head, first_d + lane * 4);
    if (lane == 0) {
        memory->max[warp] = sums.max;
        memory->sum[warp] = sums.sum;
    }
    *(float4 *)&memory->values[warp][lane * 4] = make_float4(sums.values[0], sums.values[1], sums.values[2],
                                                             sums.values[3]);
    __syncthreads();
    const float sink = params->sinks ? params->sinks[head] : -INFINITY;
    float keys_max = -INFINITY, sum = 0, value = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) keys_max = fmaxf(keys_max, memory->max[w]);
    const float max = fmaxf(keys_max, sink);
    if (keys_max > -INFINITY) { /* no key: the sink does not count either */
        sum = weight_of(sink, max);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float weight = weight_of(memory->max[w], max);
            sum += weight * memory->sum[w];
            value += weight * memory->values[w][threadIdx.x];
        }
    }
    const int64_t row = (int64_t)item->first_token + token;
    const int32_t d = first_d + (int32_t)threadIdx.x;
    char *out = (char *)params->out + row * params->out_token_stride + head * params->out_head_stride;
    if (d < params->v_head_size)
        fv_element_store(out + (int64_t)d * fv_element_bytes(params->out_dtype), sum > 0 ? value / sum : 0.0f,
                         params->out_dtype);
    if (params->lse && d == 0)
        *(float *)((char *)params->lse + row * params->lse_token_stride +
                   head * params->lse_head_stride) = sum > 0 ? max + logf(sum) : -INFINITY;
    __syncthreads(); /* the sums are read */
}

static __global__ void __launch_bounds__(THREADS, 6) reduce_segments(const __grid_constant__ fv_reduce_params params)
{
    __shared__ __align__(16) reduce_memory memory;
    fv_reduce_item item;
    bool has_item = true; /* found before the segments are there: the step is older than their kernel */
    if (params.items)
        item = params.items[blockIdx.x];
    else
        has_item = find_grid_reduce_item(&item, &params, (int32_t)blockIdx.x);
    overlap_begin();
    if (!has_item) return;
    for (int32_t token = 0; token < item.num_tokens; token++)
        for (int32_t d = 0; d < params.v_head_size; d += SPAN)
            reduce_span(&memory, &params, &item, token, (int32_t)blockIdx.y, d);
}

extern "C" fv_status fv_cuda_reduce_segments(const fv_launch *launch, const fv_reduce_params *params)
{
    const int32_t num_items = params->items ? params->num_items : params->num_q_blocks;
    const dim3 grid((uint32_t)num_items, (uint32_t)params->num_heads);
    return fv_cuda_launch_overlapped(launch, "reduce_segments", reduce_segments, grid, THREADS, 0, *params);
}
