/* reduce_segments: a block for each item and query head, or four where there are many rows; one token after the other.
 * Slots hold maxima in natural units; segments without keys weigh nothing. Maxima, sums and values are asked for together,
 * so that all is one trip to memory; sums follow the largest maximum. Where they lie, and where the row goes, is found
 * before they are there: a warp takes about 5 cycles for an instruction that waits for the one before.
 *
 *   two segments      warp w has query head h + w
 *   a span            warp w has elements 32 w .. of it, eight lanes four each; the four groups of eight lanes have
 *                     segments g, g + 4, g + 8 ... Longer rows of more than 32 segments have a block for each span
 *   longer rows       groups of lanes likewise, one to eight of them, so that a lane has eight segments: all of them come in
 *                     one trip. Where there are few rows, each part of one that four warps have is a block. A row's
 *                     maxima and sums come once for a block, and with them what each segment weighs
 *   odd rows          elements that are no multiple of four: a thread for each, one segment after the other
 *
 * Rows of 16 bits (narrow_partial.cuh) have a kernel for each span here, NARROW, for one item of more than 16 segments, and
 * others of more than 32: they have their maximum and sum behind them, and are of whole spans, as their halves are, so
 * what a warp has at once is of one of them. The rest is in reduce_narrow.cuh. */
#include "kernels/cuda/reduce_narrow.cuh"

enum {
    SPAN = 128,        /* elements of a row that a warp, or all of them with a quarter each, take at once */
    GROUPS = 4,        /* of lanes that have different segments of the same elements */
    LANE_SEGMENTS = 8, /* of a longer row, that a lane has all at once */
    MOST_GROUPS = 8,   /* of a longer row */
    CHUNK = LANE_SEGMENTS * MOST_GROUPS,
    MOST_LONG_SEGMENTS = 32, /* of a longer row; above, and for one item from 17 on, a block for each span is faster */
    MOST_LONG_OF_ITEM = 16,  /* (docs/notes/cuda-hopper.md) */
    MANY_ROWS = 2048         /* from here on a block has four heads */
};
static_assert(CHUNK == 16 * REDUCE_WARPS, "a half of a warp's lanes for its share of the maxima, one for the sums");

/* Segments of a longer row, in shared memory: enough can be on their way so, registers would be too few. */
typedef struct segment_memory {
    float4 values[LANE_SEGMENTS][REDUCE_THREADS]; /* a thread's own */
    float max[CHUNK], sum[CHUNK];
} segment_memory;

/* Groups of lanes for a longer row, 2 to the power of this: a lane has LANE_SEGMENTS segments at most where they
 * suffice, and each warp elements. Without divisions, which were a third of what a block does before it can ask for
 * values. */
static __host__ __device__ __forceinline__ int32_t groups_log2(int32_t num_segments, int32_t size)
{
    int32_t log2 = 0;
    while (1 << log2 < MOST_GROUPS && (num_segments > LANE_SEGMENTS << log2 || REDUCE_WARPS * SPAN > size << log2))
        log2++;
    return log2;
}

/* Sums relative to a maximum: of some segments, of one row. */
typedef struct segment_sums {
    float max;
    float sum;
    float values[4]; /* of the lane's elements */
} segment_sums;

/* The next segments of a row that a lane has. */
template <int N> struct segment_batch {
    int32_t rows[N];
};

/* Where the next segments lie. */
template <int N> static __device__ __forceinline__ segment_batch<N> place_segments(const segment_walk *walk)
{
    segment_batch<N> batch;
#pragma unroll
    for (int i = 0; i < N; i++) {
        batch.rows[i] = walk->row + i * walk->step;
        asm volatile("" : "+r"(batch.rows[i])); /* found here, not at its use */
    }
    return batch;
}

/* Where elements d .. of a row of the partial results are. */
template <bool NARROW>
static __device__ __forceinline__ const char *place_values(const fv_reduce_params *params, int32_t row, int32_t d)
{
    if (NARROW) return narrow_row(params->partial_out, row, params->v_head_size) + d * 2;
    return (const char *)(params->partial_out + (int64_t)row * params->v_head_size + d);
}

/* The end of a narrow row; where there is none, that of one without keys. */
static __device__ __forceinline__ narrow_tail load_tail(const fv_reduce_params *params, int32_t row, bool is_there)
{
    const char *from = place_values<true>(params, row, params->v_head_size);
    const float4 tail = ptx_load_or_zero((const float4 *)from, is_there);
    return {{tail.x, tail.y}, is_there ? tail.z : -INFINITY, tail.w};
}

/* A lane's elements, narrow ones as multiples of their scale. */
static __device__ __forceinline__ float4 widen(float4 stored) { return stored; }
static __device__ __forceinline__ float4 widen(uint2 stored)
{
    const float2 low = narrow_multiples(stored.x), high = narrow_multiples(stored.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

/* Four elements to shared memory, or zeros: asked for. */
static __device__ __forceinline__ void copy_four(float4 *to, const char *from, bool is_there)
{
    ptx_cp_async_16_or_zeros(to, from, is_there ? 16 : 0);
}

/* Values of a segment, which weighs `weight`. */
template <class Stored>
static __device__ __forceinline__ void add_values(segment_sums *sums, float weight, Stored stored)
{
    const float4 values = widen(stored);
    sums->values[0] += weight * values.x;
    sums->values[1] += weight * values.y;
    sums->values[2] += weight * values.z;
    sums->values[3] += weight * values.w;
}

/* Four elements as they are stored. */
template <bool NARROW> struct stored_four {
    typedef float4 type;
};
template <> struct stored_four<true> {
    typedef uint2 type;
};

template <bool NARROW, int N>
static __device__ __forceinline__ void add_segments(segment_sums *sums, const segment_batch<N> *batch, int32_t num,
                                                    const fv_reduce_params *params, int32_t d)
{
    typedef typename stored_four<NARROW>::type stored;
    float max[N], sum[N], scale[N], largest = sums->max;
    stored values[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (NARROW) {
            const narrow_tail tail = load_tail(params, batch->rows[i], i < num);
            max[i] = tail.max;
            sum[i] = tail.sum;
            scale[i] = 2 * d < params->v_head_size ? tail.scale[0] : tail.scale[1];
        } else {
            max[i] = ptx_load_or(params->partial_max + batch->rows[i], i < num, -INFINITY);
            sum[i] = ptx_load_or(params->partial_sum + batch->rows[i], i < num, 0.0f);
            scale[i] = 1;
        }
        values[i] = ptx_load_or_zero((const stored *)place_values<NARROW>(params, batch->rows[i], d), i < num);
    }
#pragma unroll
    for (int i = 0; i < N; i++) largest = fmaxf(largest, max[i]);
    if (largest == -INFINITY) return;
    const float before = weight_of(sums->max, largest);
    sums->max = largest;
    sums->sum *= before;
#pragma unroll
    for (int k = 0; k < 4; k++) sums->values[k] *= before;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float weight = weight_of(max[i], largest);
        sums->sum += weight * sum[i];
        add_values(sums, weight * scale[i], values[i]);
    }
}

static __device__ __forceinline__ void add_sums(segment_sums *sums, const segment_sums *others)
{
    const float max = fmaxf(sums->max, others->max);
    if (max == -INFINITY) return;
    const float own = weight_of(sums->max, max), weight = weight_of(others->max, max);
    sums->max = max;
    sums->sum = own * sums->sum + weight * others->sum;
#pragma unroll
    for (int k = 0; k < 4; k++) sums->values[k] = own * sums->values[k] + weight * others->values[k];
}

/* The sums of all groups of lanes, in each. */
static __device__ __forceinline__ void meet_sums(segment_sums *sums)
{
#pragma unroll
    for (int step = 32 / GROUPS; step < 32; step *= 2) {
        segment_sums other;
        other.max = __shfl_xor_sync(~0u, sums->max, step);
        other.sum = __shfl_xor_sync(~0u, sums->sum, step);
#pragma unroll
        for (int k = 0; k < 4; k++) other.values[k] = __shfl_xor_sync(~0u, sums->values[k], step);
        add_sums(sums, &other);
    }
}

static __device__ __forceinline__ void store_values(const segment_sums *sums, const reduce_target *target, int32_t d)
{
    const float share = finish_sums(sums->max, sums->sum, target, d == 0);
    store_four(target, d,
               make_float4(sums->values[0] * share, sums->values[1] * share, sums->values[2] * share,
                           sums->values[3] * share));
}

/* Elements d .. of a row of two segments. */
static __device__ __forceinline__ void store_pair(const float (&max)[2], const float (&sum)[2], float4 low, float4 high,
                                                  const reduce_target *target, int32_t d)
{
    segment_sums sums = {max[0], sum[0], {low.x, low.y, low.z, low.w}};
    const segment_sums other = {max[1], sum[1], {high.x, high.y, high.z, high.w}};
    add_sums(&sums, &other);
    store_values(&sums, target, d);
}

/* A row of two segments of up to a span: by a warp. `waits`: for the segments, which nobody has waited for. */
static __device__ __forceinline__ void reduce_pair(const fv_reduce_params *params, const fv_reduce_item *item,
                                                   int32_t token, int32_t head, bool waits)
{
    const int32_t d = threadIdx.x % 32 * 4;
    const bool is_there = d < params->v_head_size;
    const segment_walk walk = walk_segments(params, item, 0, 1, token, head);
    const reduce_target target = find_target(params, item, token, head);
    const segment_batch<2> batch = place_segments<2>(&walk);
    if (waits) overlap_wait();
    const float max[2] = {params->partial_max[batch.rows[0]], params->partial_max[batch.rows[1]]};
    const float sum[2] = {params->partial_sum[batch.rows[0]], params->partial_sum[batch.rows[1]]};
    const float4 low = ptx_load_or_zero((const float4 *)place_values<false>(params, batch.rows[0], d), is_there);
    const float4 high = ptx_load_or_zero((const float4 *)place_values<false>(params, batch.rows[1], d), is_there);
    if (is_there) store_pair(max, sum, low, high, &target, d);
}

/* A longer one: up to four spans at once. */
static __device__ __forceinline__ void reduce_long_pair(segment_memory *memory, const fv_reduce_params *params,
                                                        const fv_reduce_item *item, int32_t token, int32_t head,
                                                        bool waits)
{
    const segment_walk walk = walk_segments(params, item, 0, 1, token, head);
    const segment_batch<2> batch = place_segments<2>(&walk);
    if (waits) overlap_wait();
    const float max[2] = {params->partial_max[batch.rows[0]], params->partial_max[batch.rows[1]]};
    const float sum[2] = {params->partial_sum[batch.rows[0]], params->partial_sum[batch.rows[1]]};
#pragma unroll 1
    for (int32_t first = threadIdx.x % 32 * 4; first < params->v_head_size; first += LANE_SEGMENTS / 2 * SPAN) {
        const char *const from[2] = {place_values<false>(params, batch.rows[0], first),
                                     place_values<false>(params, batch.rows[1], first)};
#pragma unroll
        for (int i = 0; i < LANE_SEGMENTS; i++)
            copy_four(&memory->values[i][threadIdx.x], from[i % 2] + i / 2 * SPAN * 4,
                      first + i / 2 * SPAN < params->v_head_size);
        ptx_cp_async_commit();
        const reduce_target target = find_target(params, item, token,
                                                 (int32_t)ptx_keep((uint32_t)head)); /* not before */
        ptx_cp_async_wait<0>();
#pragma unroll 1
        for (int32_t i = 0, d = first; i < LANE_SEGMENTS && d < params->v_head_size; i += 2, d += SPAN)
            store_pair(max, sum, memory->values[i][threadIdx.x], memory->values[i + 1][threadIdx.x], &target, d);
    }
}

/* A span of a row of a query head, by a block, N segments a lane at once. */
template <bool NARROW, int N>
static __device__ __forceinline__ void reduce_span(const fv_reduce_params *params, const fv_reduce_item *item,
                                                   int32_t token, int32_t head, bool waits)
{
    const int32_t lane = threadIdx.x % 32, own_segment = lane / (32 / GROUPS);
    const int32_t d = (int32_t)blockIdx.z * SPAN + threadIdx.x / 32 * (SPAN / REDUCE_WARPS) + lane % (32 / GROUPS) * 4;
    const bool is_there = d < params->v_head_size;
    const reduce_target target = find_target(params, item, token, head);
    segment_walk walk = walk_segments(params, item, own_segment, GROUPS, token, head);
    segment_sums sums = {-INFINITY, 0, {}};
#pragma unroll 1
    for (int32_t segment = 0; segment < item->num_segments; segment += GROUPS * N) {
        const segment_batch<N> batch = place_segments<N>(&walk);
        if (waits) overlap_wait();
        waits = false;
        add_segments<NARROW>(&sums, &batch, walk.num, params, is_there ? d : 0);
        walk.row += N * walk.step;
        walk.num -= N;
    }
    meet_sums(&sums);
    if (own_segment == 0 && is_there) store_values(&sums, &target, d);
}

static __device__ __forceinline__ float largest_of_warp(float value)
{
#pragma unroll
    for (int step = 1; step < 32; step *= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

static __device__ __forceinline__ float sum_of_warp(float value)
{
#pragma unroll
    for (int step = 1; step < 32; step *= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

/* A chunk of a row's segments, of which the lane has each `groups`th from `group` on. What they weigh lies in the lanes of
 * each warp, two a lane. */
static __device__ __forceinline__ void add_weighed(segment_sums *sums, const segment_memory *memory, int32_t group,
                                                   int32_t groups)
{
    const int32_t lane = threadIdx.x % 32;
    const float max[2] = {memory->max[lane], memory->max[lane + 32]};
    const float largest = fmaxf(sums->max, largest_of_warp(fmaxf(max[0], max[1])));
    const float base = largest == -INFINITY ? 0.0f : largest; /* no key: all weigh 0 */
    const float weights[2] = {weight_of(max[0], base), weight_of(max[1], base)};
    const float before = weight_of(sums->max, base);
    sums->max = largest;
    sums->sum = before * sums->sum + sum_of_warp(weights[0] * memory->sum[lane] + weights[1] * memory->sum[lane + 32]);
#pragma unroll
    for (int k = 0; k < 4; k++) sums->values[k] *= before;
    ptx_cp_async_wait<0>();
#pragma unroll
    for (int i = 0; i < LANE_SEGMENTS; i++) {
        const int32_t first = i * groups; /* of the chunk's, and of groups that are in the same half of it */
        const float weight = __shfl_sync(~0u, first < 32 ? weights[0] : weights[1], first + group); /* modulo 32 */
        add_values(sums, weight, memory->values[i][threadIdx.x]);
    }
}

/* The block's parts of a longer row. All of its threads come here together. */
static __device__ __forceinline__ void reduce_long_row(segment_memory *memory, const fv_reduce_params *params,
                                                       const fv_reduce_item *item, int32_t token, int32_t head,
                                                       bool waits)
{
    const int32_t size = params->v_head_size, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t log2 = groups_log2(item->num_segments, size), groups = 1 << log2, lanes = 32 >> log2;
    const int32_t group = lane >> (5 - log2), part = REDUCE_WARPS * lanes * 4, own_segment = warp * 16 + lane % 16;
    const bool brings_max = lane < 16;
    const segment_walk all = walk_segments(params, item, 0, 1, token, head);
#pragma unroll 1
    for (int32_t first = (int32_t)blockIdx.z * part; first < size; first += (int32_t)gridDim.z * part) {
        const int32_t d = first + (warp * lanes + (lane & (lanes - 1))) * 4;
        segment_walk walk = all;
        segment_sums sums = {-INFINITY, 0, {}};
#pragma unroll 1
        for (; walk.num > 0; walk.row += LANE_SEGMENTS * groups * walk.step, walk.num -= LANE_SEGMENTS * groups) {
            const int32_t apart = (int32_t)ptx_keep((uint32_t)groups); /* nothing of it is kept over the loop */
            const int32_t own_row = walk.row + own_segment * walk.step;
            const char *row = place_values<false>(params, walk.row + group * walk.step, d < size ? d : 0);
            const char *from = ptx_keep(row); /* found before the wait */
            const int64_t from_step = (int64_t)(apart * walk.step) * (size * 4);
            __syncthreads(); /* maxima and sums have been read */
            if (waits) overlap_wait();
            waits = false;
            const bool has_own = own_segment < fv_min_i32(walk.num, LANE_SEGMENTS * groups);
            const float own = ptx_load_or((brings_max ? params->partial_max : params->partial_sum) + own_row, has_own,
                                          brings_max ? -INFINITY : 0);
#pragma unroll
            for (int i = 0; i < LANE_SEGMENTS; i++, from += from_step)
                copy_four(&memory->values[i][threadIdx.x], from, group + i * apart < walk.num);
            ptx_cp_async_commit();
            (brings_max ? memory->max : memory->sum)[own_segment] = own;
            __syncthreads();
            add_weighed(&sums, memory, group, apart);
        }
#pragma unroll 1
        for (int32_t to = lanes; to < 32; to *= 2) {
#pragma unroll
            for (int k = 0; k < 4; k++) sums.values[k] += __shfl_xor_sync(~0u, sums.values[k], to);
        }
        const reduce_target target = find_target(params, item, token,
                                                 (int32_t)ptx_keep((uint32_t)head)); /* not before */
        if (group == 0 && d < size) store_values(&sums, &target, d);
    }
    if (waits) overlap_wait(); /* a block that has no part */
}

template <bool IS_LONG, bool NARROW>
static __device__ __forceinline__ void reduce_row(segment_memory *memory, const fv_reduce_params *params,
                                                  const fv_reduce_item *item, int32_t token, int32_t head, bool waits)
{
    if constexpr (IS_LONG) {
        reduce_long_row(memory, params, item, token, head, waits);
    } else if (item->num_segments <= 4 * GROUPS) {
        reduce_span<NARROW, 4>(params, item, token, head, waits);
    } else {
        reduce_span<NARROW, 8>(params, item, token, head, waits);
    }
}

/* A row of any size. */
static __device__ __forceinline__ void reduce_odd_row(const fv_reduce_params *params, const fv_reduce_item *item,
                                                      int32_t token, int32_t head)
{
    const int32_t size = params->v_head_size;
    const reduce_target target = find_target(params, item, token, head);
    const int32_t bytes = fv_element_bytes(params->out_dtype);
    for (int32_t d = threadIdx.x; blockIdx.z == 0 && d < size; d += REDUCE_THREADS) {
        segment_sums sums = {-INFINITY, 0, {}};
        for (int32_t segment = 0; segment < item->num_segments; segment++) {
            const int32_t row = row_of_segment(params, item, segment, token, head);
            const segment_sums other = {
                params->partial_max[row], params->partial_sum[row], {params->partial_out[(int64_t)row * size + d]}};
            add_sums(&sums, &other);
        }
        fv_element_store(target.out + (int64_t)d * bytes,
                         sums.values[0] * finish_sums(sums.max, sums.sum, &target, d == 0), params->out_dtype);
    }
}

/* Of a multiprocessor, by the registers that they need. */
static constexpr int32_t blocks_at_once(bool is_long, bool is_narrow, bool is_listed)
{
    return is_long ? (is_listed ? 7 : 8) : is_narrow ? 4 : 5;
}

/* IS_LONG: rows of more than a span, each warp or block all of one; else a block for each span, or odd rows. */
template <bool IS_LONG, bool NARROW, bool LISTED>
static __global__ void __launch_bounds__(REDUCE_THREADS, blocks_at_once(IS_LONG, NARROW, LISTED))
    reduce_segments(const __grid_constant__ fv_reduce_params params)
{
    __shared__ segment_memory memory;
    overlap_let_next_start();
    const reduce_place place = place_reduce_block<LISTED>(&params);
    const int32_t step = LISTED ? (params.num_heads + place.num_shares - 1) / place.num_shares
                                : (place.num_shares < params.num_heads ? REDUCE_WARPS : 1);
    const int32_t first = place.share * step, end = fv_min_i32(params.num_heads, first + step);
    const bool is_odd = !IS_LONG && !NARROW && params.v_head_size % 4 != 0;
#pragma unroll 1
    for (int32_t i = place.first; i < place.end; i += place.step) {
        const bool is_first = !LISTED || i == place.first; /* and waits as late as can be */
        if (!is_first || is_odd) overlap_wait();
        fv_reduce_item item;
        if (!find_reduce_item(&item, &params, i)) break; /* of a static grid */
        const bool is_pair = item.num_segments == 2 && !NARROW && !is_odd && (IS_LONG || params.v_head_size <= SPAN);
        const int32_t own = first + (is_pair ? (int32_t)threadIdx.x / 32 : 0);
        if (is_pair && blockIdx.z > 0) continue;
#pragma unroll 1
        for (int32_t token = 0; token < item.num_tokens; token++) {
#pragma unroll 1
            for (int32_t head = own; head < end; head += is_pair ? REDUCE_WARPS : 1) {
                const bool waits = is_first && token == 0 && head == own;
                if (is_odd)
                    reduce_odd_row(&params, &item, token, head);
                else if (is_pair && IS_LONG)
                    reduce_long_pair(&memory, &params, &item, token, head, waits);
                else if (is_pair)
                    reduce_pair(&params, &item, token, head, waits);
                else
                    reduce_row<IS_LONG, NARROW>(&memory, &params, &item, token, head, waits);
            }
        }
        if (!LISTED) break;
    }
    overlap_wait();
}

extern "C" fv_status fv_cuda_reduce_segments(const fv_launch *launch, const fv_reduce_params *params)
{
    const int32_t num_items = params->items ? params->num_items : params->num_q_blocks, size = params->v_head_size;
    const int64_t num_rows = (int64_t)num_items * params->num_heads;
    const bool has_spans = size > SPAN && size % 4 == 0, are_many = num_rows >= MANY_ROWS;
    const bool is_long = has_spans && params->most_segments <= (num_items > 1 ? MOST_LONG_SEGMENTS : MOST_LONG_OF_ITEM);
    const bool is_narrow = params->narrow_partials;
    if (is_narrow && is_long && size == NARROW_SIZE) return launch_narrow(launch, params, num_items, are_many);
    const int64_t blocks = are_many ? fv_ceil_div(params->num_heads, REDUCE_WARPS) : params->num_heads;
    const int32_t log2 = is_long && !are_many ? groups_log2(params->most_segments, size) : 0;
    const int64_t long_parts = log2 > 0 ? fv_ceil_div(size, REDUCE_WARPS * SPAN >> log2) : 1;
    const int64_t parts = (is_long && !is_narrow) || !has_spans ? long_parts : fv_ceil_div(size, SPAN);
    const dim3 grid = reduce_grid(launch, params, num_items, blocks, parts);
    void (*const kernels[])(fv_reduce_params) = {
        is_narrow ? reduce_segments<false, true, false> : is_long ? reduce_segments<true, false, false>
                                                                  : reduce_segments<false, false, false>,
        is_narrow ? reduce_segments<false, true, true> : is_long ? reduce_segments<true, false, true>
                                                                 : reduce_segments<false, false, true>,
    };
    void (*const kernel)(fv_reduce_params) = kernels[params->num_items_at != NULL];
    return fv_cuda_launch_overlapped(launch, "reduce_segments", kernel, grid, REDUCE_THREADS, 0, *params);
}
