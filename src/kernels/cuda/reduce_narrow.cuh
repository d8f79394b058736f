/* The reduction of partial results in 16 bits (narrow_partial.cuh), rows of NARROW_SIZE elements. A warp knows nothing of
 * the others: it has a part of a row, or where segments are two, a row. All that it needs is asked for at once, from places
 * found before the segments are there. What binds is L2, of which each multiprocessor reads 64 KB for few sequences of MLA,
 * and then the number of instructions: so a lane has eight elements of eight segments.
 *
 *   two segments    a row for a warp: of each 128 elements four for a lane, of both segments
 *   up to 8         half of a row; lane l finds what segment l % 8 weighs
 *   up to 16        a quarter; two groups of lanes have eight segments each, and find what those weigh
 *   more            an eighth; four groups, for 32 segments at a time */
#ifndef FV_KERNELS_CUDA_REDUCE_NARROW_CUH
#define FV_KERNELS_CUDA_REDUCE_NARROW_CUH

#include "kernels/cuda/narrow_partial.cuh"
#include "kernels/cuda/reduce_row.cuh"

enum {
    NARROW_SIZE = 512,
    NARROW_SPANS = NARROW_SIZE / 128,
    NARROW_LANE = 8,        /* elements of a lane ... */
    NARROW_SEGMENTS = 8,    /* ... of so many segments */
    NARROW_BLOCKS = 5,      /* of a multiprocessor, by the registers that they need */
    NARROW_PAIR_BLOCKS = 8, /* where segments are two */
    NARROW_MANY_PARTS = 4   /* of a warp, where there are many rows */
};

/* Groups of lanes that have different segments, 2 to the power of this. */
static __host__ __device__ __forceinline__ int32_t narrow_groups_log2(int32_t num_segments)
{
    return (num_segments > NARROW_SEGMENTS) + (num_segments > 2 * NARROW_SEGMENTS);
}

/* Parts of a row, each of a warp, 2 to the power of this. */
static __host__ __device__ __forceinline__ int32_t narrow_parts_log2(int32_t num_segments)
{
    return 1 + narrow_groups_log2(num_segments);
}
static_assert(NARROW_SIZE == 2 * 32 * NARROW_LANE, "two parts where lanes are one group");

/* The largest of a warp's numbers. */
static __device__ __forceinline__ float largest_number_of_warp(float value)
{
    const int32_t bits = __float_as_int(value), largest = ptx_redux_max(bits ^ (bits >> 31 & INT32_MAX));
    return __int_as_float(largest ^ (largest >> 31 & INT32_MAX));
}

/* --- two segments ------------------------------------------------------------------------------------------------ */

/* A row, by a warp; where it has but one segment, the other is one without keys. */
static __device__ __forceinline__ void reduce_narrow_pair(const fv_reduce_params *params, const fv_reduce_item *item,
                                                          int32_t token, int32_t head, bool waits)
{
    const int32_t first = threadIdx.x % 32 * 4;
    const reduce_target target = find_target(params, item, token, head);
    const segment_walk walk = walk_segments(params, item, 0, 1, token, head);
    const char *rows[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        rows[i] = ptx_keep(narrow_row(params->partial_out, walk.row + (i < walk.num ? i * walk.step : 0), NARROW_SIZE));
    if (waits) overlap_wait();
    float4 ends[2];
    uint2 stored[2][NARROW_SPANS];
#pragma unroll
    for (int i = 0; i < 2; i++) ends[i] = ptx_load_or_zero((const float4 *)(rows[i] + NARROW_SIZE * 2), true);
#pragma unroll
    for (int i = 0; i < 2 * NARROW_SPANS; i++)
        stored[i % 2][i / 2] = ptx_load_or_zero((const uint2 *)(rows[i % 2] + (i / 2 * 128 + first) * 2), true);
    const float max[2] = {ends[0].z, walk.num > 1 ? ends[1].z : -INFINITY};
    const float largest = fmaxf(max[0], max[1]), base = largest == -INFINITY ? 0.0f : largest; /* no key: all weigh 0 */
    const float weights[2] = {weight_of(max[0], base), weight_of(max[1], base)};
    const float share = finish_sums(largest, weights[0] * ends[0].w + weights[1] * ends[1].w, &target, first == 0);
#pragma unroll
    for (int k = 0; k < NARROW_SPANS; k++) {
        float values[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float by = weights[i] * (2 * k < NARROW_SPANS ? ends[i].x : ends[i].y) * share;
            const float2 low = narrow_multiples(stored[i][k].x), high = narrow_multiples(stored[i][k].y);
            values[0] += by * low.x;
            values[1] += by * low.y;
            values[2] += by * high.x;
            values[3] += by * high.y;
        }
        store_four(&target, k * 128 + first, make_float4(values[0], values[1], values[2], values[3]));
    }
}

/* --- more -------------------------------------------------------------------------------------------------------- */

/* Sums relative to a maximum: of some segments, of the lane's elements. */
typedef struct narrow_sums {
    float max;
    float sum;
    float values[NARROW_LANE];
} narrow_sums;

/* Adds the eight segments from `first` on that the lane's group has; of segment 0 the lane's elements are at `from`, those of the
 * others every `step` bytes, up to segment `last`. Each lane finds what one of them weighs. */
static __device__ __forceinline__ void add_narrow_segments(narrow_sums *sums, const char *from, uint32_t step,
                                                           int32_t first, int32_t last, int32_t d, bool waits)
{
    const int32_t own = first + threadIdx.x % NARROW_SEGMENTS;
    const char *places[NARROW_SEGMENTS];
#pragma unroll
    for (int i = 0; i < NARROW_SEGMENTS; i++)
        places[i] = ptx_keep(from + (uint64_t)step * (uint32_t)fv_min_i32(first + i, last));
    const char *tail = ptx_keep(from + (uint64_t)step * (uint32_t)fv_min_i32(own, last) + (NARROW_SIZE - d) * 2);
    if (waits) overlap_wait();
    const float4 end = ptx_load_or_zero((const float4 *)tail, true);
    float4 stored[NARROW_SEGMENTS];
#pragma unroll
    for (int i = 0; i < NARROW_SEGMENTS; i++) stored[i] = ptx_load_or_zero((const float4 *)places[i], true);
    __syncwarp(); /* all are asked for before the first one is waited for */
    const float max = own <= last ? end.z : -INFINITY, largest = fmaxf(sums->max, largest_number_of_warp(max));
    const float base = largest == -INFINITY ? 0.0f : largest; /* no key: all weigh 0 */
    const float weight = weight_of(max, base), before = weight_of(sums->max, base);
    const float by = own <= last ? weight * (2 * d < NARROW_SIZE ? end.x : end.y) : 0.0f;
    float sum = own <= last ? weight * end.w : 0.0f;
    sums->max = largest;
#pragma unroll
    for (int to = 1; to < NARROW_SEGMENTS; to *= 2) sum += __shfl_xor_sync(~0u, sum, to);
    sums->sum = before * sums->sum + sum;
#pragma unroll
    for (int k = 0; k < NARROW_LANE; k++) sums->values[k] *= before;
#pragma unroll
    for (int i = 0; i < NARROW_SEGMENTS; i++) {
        const float weight_of_values = __shfl_sync(~0u, by, i, NARROW_SEGMENTS);
        const float pairs[4] = {stored[i].x, stored[i].y, stored[i].z, stored[i].w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float2 values = narrow_multiples(__float_as_uint(pairs[k]));
            sums->values[2 * k] += weight_of_values * values.x;
            sums->values[2 * k + 1] += weight_of_values * values.y;
        }
    }
}

/* Part `part` of a row, by a warp. */
static __device__ __forceinline__ void reduce_narrow_part(const fv_reduce_params *params, const fv_reduce_item *item,
                                                          int32_t token, int32_t head, int32_t part, bool waits)
{
    const int32_t log2 = narrow_groups_log2(item->num_segments), lanes = 32 >> log2, lane = threadIdx.x % 32;
    const int32_t d = (part * lanes + (lane & (lanes - 1))) * NARROW_LANE;
    const reduce_target target = find_target(params, item, token, head);
    const segment_walk all = walk_segments(params, item, 0, 1, token, head);
    const uint32_t step = (uint32_t)all.step * (uint32_t)narrow_row_bytes(NARROW_SIZE);
    const char *row = ptx_keep(narrow_row(params->partial_out, all.row, NARROW_SIZE) + d * 2);
    narrow_sums sums = {-INFINITY, 0, {}};
#pragma unroll 1
    for (int32_t chunk = 0; chunk < all.num; chunk += NARROW_SEGMENTS << log2) {
        const char *from = ptx_keep(row + (uint64_t)step * (uint32_t)chunk);
        add_narrow_segments(&sums, from, step, (lane >> (5 - log2)) * NARROW_SEGMENTS, all.num - 1 - chunk, d, waits);
        waits = false;
    }
#pragma unroll 1
    for (int32_t to = lanes; to < 32; to *= 2) {
        sums.sum += __shfl_xor_sync(~0u, sums.sum, to);
#pragma unroll
        for (int k = 0; k < NARROW_LANE; k++) sums.values[k] += __shfl_xor_sync(~0u, sums.values[k], to);
    }
    if (lane >= lanes) return;
    const float share = finish_sums(sums.max, sums.sum, &target, d == 0);
#pragma unroll
    for (int k = 0; k < NARROW_LANE; k += 4)
        store_four(&target, d + k,
                   make_float4(sums.values[k] * share, sums.values[k + 1] * share, sums.values[k + 2] * share,
                               sums.values[k + 3] * share));
}

/* --- kernels ----------------------------------------------------------------------------------------------------- */

/* An item's parts are dealt out to the warps of its blocks. */
template <bool LISTED>
static __global__ void __launch_bounds__(REDUCE_THREADS, LISTED ? NARROW_BLOCKS - 1 : NARROW_BLOCKS)
    reduce_narrow_rows(const __grid_constant__ fv_reduce_params params)
{
    overlap_let_next_start();
    const reduce_place place = place_reduce_block<LISTED>(&params);
#pragma unroll 1
    for (int32_t i = place.first; i < place.end; i += place.step) {
        const bool is_first = !LISTED || i == place.first; /* and waits as late as can be */
        if (!is_first) overlap_wait();
        fv_reduce_item item;
        const bool has_item = find_reduce_item(&item, &params, i), is_pair = has_item && item.num_segments == 2;
        const int32_t parts_log2 = !has_item || is_pair ? 0 : narrow_parts_log2(item.num_segments);
        const int32_t num_parts = has_item ? params.num_heads << parts_log2 : 0;
        const int32_t own = place.share * REDUCE_WARPS + (int32_t)threadIdx.x / 32,
                      step = place.num_shares * REDUCE_WARPS;
#pragma unroll 1
        for (int32_t token = 0; has_item && token < item.num_tokens; token++) {
#pragma unroll 1
            for (int32_t at = own; at < num_parts; at += step) {
                const bool waits = is_first && token == 0 && at == own;
                if (is_pair)
                    reduce_narrow_pair(&params, &item, token, at, waits);
                else
                    reduce_narrow_part(&params, &item, token, at >> parts_log2, at & ((1 << parts_log2) - 1), waits);
            }
        }
        if (!LISTED) break;
    }
    overlap_wait();
}

/* Where no row has more than two segments. */
static __global__ void __launch_bounds__(REDUCE_THREADS, NARROW_PAIR_BLOCKS)
    reduce_narrow_pairs(const __grid_constant__ fv_reduce_params params)
{
    overlap_let_next_start();
    fv_reduce_item item;
    const int32_t head = (int32_t)(blockIdx.y * REDUCE_WARPS + threadIdx.x / 32);
    if (!find_reduce_item(&item, &params, (int32_t)blockIdx.x) || head >= params.num_heads || item.num_tokens <= 0) {
        overlap_wait();
        return;
    }
#pragma unroll 1
    for (int32_t token = 0; token < item.num_tokens; token++)
        reduce_narrow_pair(&params, &item, token, head, token == 0);
}

/* The grid, of `each` blocks for an item and so many parts; of a list of fixed length as many blocks as run at once. */
static inline dim3 reduce_grid(const fv_launch *launch, const fv_reduce_params *params, int32_t num_items, int64_t each,
                               int64_t parts)
{
    enum { BLOCKS = 4 }; /* of a multiprocessor */
    if (!params->num_items_at) return dim3((uint32_t)num_items, (uint32_t)each, (uint32_t)parts);
    const int64_t at_once = fv_ceil_div(BLOCKS * launch->device->num_workers, parts);
    return dim3((uint32_t)fv_min_i64(num_items * each, at_once), 1, (uint32_t)parts);
}

static inline fv_status launch_narrow(const fv_launch *launch, const fv_reduce_params *params, int32_t num_items,
                                      bool are_many)
{
    const bool are_pairs = params->most_segments == 2 && !params->num_items_at;
    const int64_t parts = (int64_t)params->num_heads << (are_pairs ? 0 : narrow_parts_log2(params->most_segments));
    const int32_t of_warp = are_many && !are_pairs ? NARROW_MANY_PARTS : 1;
    const dim3 grid = reduce_grid(launch, params, num_items, fv_cuda_blocks(parts, REDUCE_WARPS * of_warp), 1);
    void (*const kernel)(fv_reduce_params) = params->num_items_at ? reduce_narrow_rows<true>
                                             : are_pairs          ? reduce_narrow_pairs
                                                                  : reduce_narrow_rows<false>;
    return fv_cuda_launch_overlapped(launch, "reduce_segments", kernel, grid, REDUCE_THREADS, 0, *params);
}

#endif
