/* What rows' sums are relative to, and the unit of scales, in MLA decode over the 656-byte entry (attend_entry.cuh):
 * chosen tile by tile, and passed on. */
#ifndef FV_KERNELS_CUDA_HOPPER_ENTRY_MAXIMA_CUH
#define FV_KERNELS_CUDA_HOPPER_ENTRY_MAXIMA_CUH

#include "kernels/cuda/hopper/entry_block.cuh"

/* Of a warpgroup's scores a thread has those of two keys, 16 w + l / 4 of warp w and lane l and the eighth after it,
 * with N / 4 rows: 8 i + 2 (l % 4) + c, element 4 i + 2 key + c. What belongs to a row is at 2 i + c here. */
template <int N> struct entry_state {
    float sum[N / 4]; /* of the thread's keys */
    float max[N / 4]; /* what they are relative to: known in between follow_entry_maxima() and the tile's end */
    float inverse_unit;
};

/* Of the thread's two keys, in the group of the columns that it has for that: lane % 4. */
static __device__ __forceinline__ float2 read_entry_scales(const char *key)
{
    const float *scales = (const float *)(key + FV_DS_SCALES_AT) + threadIdx.x % 4;
    return make_float2(scales[0], scales[8 * FV_DS_ENTRY_BYTES / 4]);
}

/* What the tiles before are relative to: the sums follow. What the warp knew lies in shared memory, for registers are
 * full of products in between. */
template <int N>
static __device__ __forceinline__ void follow_entry_maxima(entry_state<N> *state, entry_memory<N> *memory)
{
    float *known = memory->known_max[threadIdx.x / 32];
    if (entry_shape<N>::SCORER_GROUPS == 1) { /* the warp knows them all */
#pragma unroll
        for (int i = 0; i < N / 4; i++) state->max[i] = known[column_of_thread(i)];
        return;
    }
    float before[N / 4];
    const bool moves = load_column_maxima<N>(before, state->max, known, memory->max);
    state->inverse_unit = memory->inverse_unit;
    if (!__any_sync(~0u, moves)) return;
    __syncwarp(); /* what is known is read */
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        if (state->max[i] != before[i]) state->sum[i] *= ptx_ex2(before[i] - state->max[i]);
        if (threadIdx.x % 32 < 4) known[column_of_thread(i)] = state->max[i];
    }
    __syncwarp();
}

/* Does a score pass what its row's sums are relative to by too much, or a scale the unit? */
template <int N>
static __device__ __forceinline__ bool exceeds_entry_maxima(const float (&s)[N / 2], const entry_state<N> *state,
                                                            float largest_scale)
{
    float excess = -INFINITY;
#pragma unroll
    for (int i = 0; i < N / 4; i++)
        excess = fmaxf(excess, fmaxf(s[element_of_column(i, 0)], s[element_of_column(i, 1)]) - state->max[i]);
    return excess > ENTRY_HEADROOM + FV_MAX_SLACK || largest_scale * state->inverse_unit >= ENTRY_LARGEST_SCALE;
}

/* Of the thread's values of COLUMNS columns and those of lane ^ by, of the same columns, the larger ones: of half of
 * them where there are more than two, the second half where the lane has that bit. */
template <int COLUMNS> static __device__ __forceinline__ void take_larger(float *values, int32_t by)
{
    constexpr int KEPT = COLUMNS > 2 ? COLUMNS / 2 : COLUMNS, OTHER = COLUMNS - KEPT;
    const bool keeps_second = OTHER > 0 && threadIdx.x & by;
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        const float first = values[i], second = values[i + OTHER];
        values[i] = fmaxf(keeps_second ? second : first, __shfl_xor_sync(~0u, keeps_second ? first : second, by));
    }
}

/* Of lanes that share columns each knows two of them in the end: this and the next. */
template <int N> static __device__ __forceinline__ int32_t column_of_lane(void)
{
    const int32_t lane = threadIdx.x % 32;
    return lane / (256 / N) * 8 + lane % 4 * 2;
}

/* The largest score of each row in the tile, of the lane's two, and the largest scale: from all threads of the
 * warpgroup. */
template <int N>
static __device__ __forceinline__ float find_entry_maxima(float2 *max, const float (&s)[N / 2], float largest_scale,
                                                          entry_memory<N> *memory, int32_t group)
{
    const int32_t warp = warp_of_group(), own = column_of_lane<N>();
    float most[N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; i++) most[i] = fmaxf(s[element_of_column(i, 0)], s[element_of_column(i, 1)]);
    take_larger<N / 4>(most, 16);
    take_larger<(N > 16 ? N / 8 : 2)>(most, 8);
    take_larger<(N > 32 ? N / 16 : 2)>(most, 4);
    largest_scale = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest_scale)));
    *(float2 *)&memory->found_max[group][warp][own] = make_float2(most[0], most[1]);
    if (threadIdx.x % 32 == 0) memory->found_scale[group][warp] = largest_scale;
    wait_at_bar(&memory->bars, ENTRY_BARRIER_GROUP + group, 128);
    *max = make_float2(-INFINITY, -INFINITY);
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const float2 of = *(const float2 *)&memory->found_max[group][w][own];
        *max = make_float2(fmaxf(max->x, of.x), fmaxf(max->y, of.y));
    }
    const float4 of = *(const float4 *)memory->found_scale[group];
    return fmaxf(fmaxf(of.x, of.y), fmaxf(of.z, of.w));
}

/* What sums move by. */
static __device__ __forceinline__ float factor_of_move(float before, float now)
{
    return now == before ? 1.0f : ptx_ex2(before - now);
}

/* To the unit of scales up to `largest`; returns what sums in units move by. */
static __device__ __forceinline__ float enlarge_unit(float *inverse_unit, float largest)
{
    const uint32_t power = __float_as_uint(largest) & 0x7f800000u; /* at or below it */
    const float inverse = __uint_as_float((254u << 23) - power);
    const float factor = inverse * __uint_as_float((254u << 23) - __float_as_uint(*inverse_unit));
    *inverse_unit = inverse;
    return factor;
}

/* What a row's sums are relative to after a tile whose largest score is `max`. */
static __device__ __forceinline__ float choose_entry_max(float before, float max)
{
    return max > before + ENTRY_HEADROOM + FV_MAX_SLACK ? max - ENTRY_HEADROOM : before;
}

/* New maxima, and a new unit, where the tile asks for them: to the other scorers, and what the output moves by to the
 * valuers, when P's place is free. Rare. */
template <int N>
static __device__ __forceinline__ void raise_entry_maxima(entry_state<N> *state, const float (&s)[N / 2],
                                                          float largest_scale, entry_memory<N> *memory, int32_t group,
                                                          int32_t tile)
{
    entry_move<N> *output = &memory->move[tile % ENTRY_P];
    float *known = memory->known_max[threadIdx.x / 32];
    float2 max;
    const float largest = find_entry_maxima<N>(&max, s, largest_scale, memory, group);
    const bool fits = largest * state->inverse_unit < ENTRY_LARGEST_SCALE;
    const float by_unit = fits ? 1.0f : enlarge_unit(&state->inverse_unit, largest);
    const int32_t own = column_of_lane<N>();
    const float2 before = *(const float2 *)&known[own];
    const float2 now = make_float2(choose_entry_max(before.x, max.x), choose_entry_max(before.y, max.y));
    wait_for_entry_space(memory, tile);
    if (threadIdx.x % 128 < 32) {
        *(float2 *)&memory->max[own] = now;
        *(float2 *)&output->by[own] = make_float2(factor_of_move(before.x, now.x) * by_unit,
                                                  factor_of_move(before.y, now.y) * by_unit);
        if (threadIdx.x % 128 == 0) memory->inverse_unit = state->inverse_unit;
    }
    __syncwarp();
    *(float2 *)&known[own] = now;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float is = known[column_of_thread(i)];
        state->sum[i] *= factor_of_move(state->max[i], is);
        state->max[i] = is;
    }
    __syncwarp();
}

#endif
