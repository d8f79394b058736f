/* reduce_segments: a block for each item and query head, or four where there are many rows; one token after the other.
 * Slots hold maxima in natural units; segments without keys weigh nothing. Maxima, sums and values are asked for together,
 * eight segments at a time, so that all is one trip to memory; sums follow the largest maximum.
 *
 *   two segments           warp w has query head h + w
 *   up to eight            warp w has elements 128 w .. of the row and all segments
 *   more                   warp w has segments w, w + 4, w + 8 ...; the four warps' sums meet in shared memory. Where
 *                          there are few rows, each 128 elements of one are a block */
#include "kernels/cuda/grid_item.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/overlap.cuh"

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    SPAN = 128,      /* elements of a row that a warp takes at once, four a lane */
    AT_ONCE = 8,     /* segments of a warp */
    FEW_ROWS = 512,  /* up to here blocks share a row */
    MANY_ROWS = 2048 /* from here on a block has four heads */
};

/* Sums relative to a maximum: of some segments, of one row. */
typedef struct segment_sums {
    float max;
    float sum;
    float values[4]; /* of the lane's elements */
} segment_sums;

typedef struct reduce_memory {
    segment_sums of[WARPS][32];
} reduce_memory;

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

/* The segments first, first + step, ... that a warp takes at once. */
static __device__ __forceinline__ void add_segments(segment_sums *sums, const fv_reduce_params *params,
                                                    const fv_reduce_item *item, int32_t first, int32_t step,
                                                    int32_t token, int32_t head, int32_t d)
{
    float max[AT_ONCE], sum[AT_ONCE], values[AT_ONCE][4], largest = sums->max;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        max[i] = -INFINITY;
        sum[i] = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) values[i][k] = 0;
        const int32_t segment = first + i * step;
        if (segment >= item->num_segments) continue;
        const int64_t at = slot_of(params, item, segment, token, head);
        max[i] = params->partial_max[at];
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

static __device__ __forceinline__ void add_sums(segment_sums *sums, const segment_sums *others)
{
    const float max = fmaxf(sums->max, others->max), own = weight_of(sums->max, max),
                weight = weight_of(others->max, max);
    sums->max = max;
    sums->sum = own * sums->sum + weight * others->sum;
#pragma unroll
    for (int k = 0; k < 4; k++) sums->values[k] = own * sums->values[k] + weight * others->values[k];
}

/* A sink is a key without a value; where there is no key, it does not count either. */
static __device__ __forceinline__ void add_sink(segment_sums *sums, const fv_reduce_params *params, int32_t head)
{
    const float sink = params->sinks ? params->sinks[head] : -INFINITY;
    if (sums->max == -INFINITY || sink == -INFINITY) return;
    const float max = fmaxf(sums->max, sink), before = weight_of(sums->max, max);
    sums->max = max;
    sums->sum = sums->sum * before + weight_of(sink, max);
#pragma unroll
    for (int k = 0; k < 4; k++) sums->values[k] *= before;
}

/* fp16 or bf16. */
static __device__ __forceinline__ uint16_t narrow_bits(float value, fv_dtype dtype)
{
    if (value != value) return (uint16_t)fv_bits_of_nan(value, dtype);
    return dtype == FV_DTYPE_F16 ? __half_as_ushort(__float2half_rn(value))
                                 : __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

/* The row's elements d .. d + 3 of all keys, and with the first ones the LSE. */
static __device__ __forceinline__ void store_values(const segment_sums *sums, const fv_reduce_params *params,
                                                    const fv_reduce_item *item, int32_t token, int32_t head, int32_t d)
{
    const int64_t row = (int64_t)item->first_token + token;
    char *out = (char *)params->out + row * params->out_token_stride + head * params->out_head_stride;
    const float share = sums->sum > 0 ? 1.0f / sums->sum : 0.0f;
    const int32_t bytes = fv_element_bytes(params->out_dtype);
    char *to = out + (int64_t)d * bytes;
    if (bytes == 2 && d + 4 <= params->v_head_size && (uintptr_t)to % 8 == 0) {
        ushort4 narrow;
        narrow.x = narrow_bits(sums->values[0] * share, params->out_dtype);
        narrow.y = narrow_bits(sums->values[1] * share, params->out_dtype);
        narrow.z = narrow_bits(sums->values[2] * share, params->out_dtype);
        narrow.w = narrow_bits(sums->values[3] * share, params->out_dtype);
        *(ushort4 *)to = narrow;
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (d + k < params->v_head_size)
                fv_element_store(to + k * bytes, sums->values[k] * share, params->out_dtype);
        }
    }
    if (params->lse && d == 0)
        *(float *)((char *)params->lse + row * params->lse_token_stride +
                   head * params->lse_head_stride) = sums->sum > 0 ? sums->max + logf(sums->sum) : -INFINITY;
}

/* What the warps made of segments of their own, in the first warp. */
static __device__ __forceinline__ void meet_sums(segment_sums *sums, reduce_memory *memory)
{
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads(); /* the sums before are read */
    memory->of[warp][lane] = *sums;
    __syncthreads();
    if (warp > 0) return;
    for (int32_t w = 1; w < WARPS; w++) add_sums(sums, &memory->of[w][lane]);
}

/* A row of two segments: by a warp, up to four spans at once. */
static __device__ __forceinline__ void reduce_pair(const fv_reduce_params *params, const fv_reduce_item *item,
                                                   int32_t token, int32_t head)
{
    const int32_t size = params->v_head_size, lane = threadIdx.x % 32;
    const int64_t at[2] = {slot_of(params, item, 0, token, head), slot_of(params, item, 1, token, head)};
    const float max[2] = {params->partial_max[at[0]], params->partial_max[at[1]]};
    const float sum[2] = {params->partial_sum[at[0]], params->partial_sum[at[1]]};
    for (int32_t first = lane * 4; first < size; first += WARPS * SPAN) {
        float values[WARPS][2][4];
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            load_values(values[i][0], params, at[0], first + i * SPAN);
            load_values(values[i][1], params, at[1], first + i * SPAN);
        }
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            const int32_t d = first + i * SPAN;
            if (d >= size) break;
            const segment_sums other = {
                max[1], sum[1], {values[i][1][0], values[i][1][1], values[i][1][2], values[i][1][3]}};
            segment_sums sums = {max[0], sum[0], {values[i][0][0], values[i][0][1], values[i][0][2], values[i][0][3]}};
            add_sums(&sums, &other);
            add_sink(&sums, params, head);
            store_values(&sums, params, item, token, head, d);
        }
    }
}

/* A row of a query head. */
static __device__ __forceinline__ void reduce_row(reduce_memory *memory, const fv_reduce_params *params,
                                                  const fv_reduce_item *item, int32_t token, int32_t head)
{
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool is_few = item->num_segments <= AT_ONCE;
    const int32_t span = is_few ? WARPS * SPAN : SPAN; /* of the block */
    const int32_t own_d = (is_few ? warp * SPAN : 0) + lane * 4;
    const int32_t own_segment = is_few ? 0 : warp, step = is_few ? 1 : WARPS;
    for (int32_t first = (int32_t)blockIdx.z * span; first < params->v_head_size; first += (int32_t)gridDim.z * span) {
        segment_sums sums = {-INFINITY, 0, {}};
        const int32_t d = first + own_d;
        for (int32_t segment = own_segment; segment < item->num_segments; segment += step * AT_ONCE)
            add_segments(&sums, params, item, segment, step, token, head, d);
        if (!is_few) meet_sums(&sums, memory);
        if ((!is_few && warp > 0) || d >= params->v_head_size) continue;
        add_sink(&sums, params, head);
        store_values(&sums, params, item, token, head, d);
    }
}

static __global__ void __launch_bounds__(THREADS, 5) reduce_segments(const __grid_constant__ fv_reduce_params params)
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
    const int32_t step = params.num_heads / (int32_t)gridDim.y + (params.num_heads % (int32_t)gridDim.y > 0);
    const int32_t first = (int32_t)blockIdx.y * step, end = fv_min_i32(params.num_heads, first + step);
    for (int32_t token = 0; token < item.num_tokens; token++) {
        if (item.num_segments == 2) {
            const int32_t head = first + (int32_t)threadIdx.x / 32;
            if (blockIdx.z == 0 && head < end) reduce_pair(&params, &item, token, head);
        } else {
            for (int32_t head = first; head < end; head++) reduce_row(&memory, &params, &item, token, head);
        }
    }
}

extern "C" fv_status fv_cuda_reduce_segments(const fv_launch *launch, const fv_reduce_params *params)
{
    const int32_t num_items = params->items ? params->num_items : params->num_q_blocks;
    const int64_t num_rows = (int64_t)num_items * params->num_heads;
    const int64_t spans = num_rows <= FEW_ROWS ? fv_ceil_div(params->v_head_size, SPAN) : 1;
    const int64_t blocks = num_rows < MANY_ROWS ? params->num_heads : fv_ceil_div(params->num_heads, WARPS);
    const dim3 grid((uint32_t)num_items, (uint32_t)blocks, (uint32_t)spans);
    return fv_cuda_launch_overlapped(launch, "reduce_segments", reduce_segments, grid, THREADS, 0, *params);
}
