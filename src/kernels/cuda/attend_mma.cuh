/* The attention kernel on tensor cores (mma.sync, sm_80 and later): tiles of keys against a block of rows,
 * online softmax, for queries of bf16 and fp16 over caches whose entries are exact in the queries' dtype.
 *
 *            tile of keys t            t + 1
 *   K, V     [ in shared memory ]      [ on its way: cp.async, or loads and conversions ]
 *   S = Q K  each warp: its rows x its share of the tile's keys
 *   P        several warps to a row: maxima and P meet in shared memory; else P stays in registers
 *   O += P V each warp: its rows x its share of the value's elements
 *
 * Where a row belongs to one warp (WARPS_N 1: long queries), nothing but the tiles is shared. Where rows are
 * few, or the head is so long that O does not fit one warp's registers, WARPS_N warps share a row.
 *
 * Rows in shared memory are 16 bytes longer than their elements, so that the eight rows of an 8x8 matrix
 * lie in different banks. Elements past the head size are zero. Keys that no row of the block sees are zeros
 * too: their place may hold NaN, and 0 * NaN is NaN. */
#ifndef FV_KERNELS_CUDA_ATTEND_MMA_CUH
#define FV_KERNELS_CUDA_ATTEND_MMA_CUH

#include <type_traits>

#include "kernels/cuda/mma_load.cuh"

/* --- one tile ------------------------------------------------------------------------------------------ */

/* Adds the products of elements [first, first + SPAN) to `s`. */
template <class S, int SPAN>
static __device__ __forceinline__ void multiply_span(float (&s)[S::ROW_TILES][S::KEY_TILES][4], uint32_t q_at,
                                                     uint32_t k_at, int32_t first)
{
    using T = typename S::T;
#pragma unroll
    for (int d = 0; d < SPAN; d += 32) {
        uint32_t q[2][S::ROW_TILES][4];
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int m = 0; m < S::ROW_TILES; m++)
                ptx_ldmatrix_x4(q[half][m], q_at + (m * 16 * S::K_ROW + first + d + half * 16) * (int)sizeof(T));
        if constexpr (S::KEY_TILES == 1) { /* one load: 8 keys x 32 elements */
            uint32_t k[4];
            ptx_ldmatrix_x4(k, k_at + (first + d) * (int)sizeof(T));
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int m = 0; m < S::ROW_TILES; m++)
                    ptx_mma_m16n8k16<T>(s[m][0], q[half][m], k[2 * half], k[2 * half + 1]);
        } else { /* 16 keys x 16 elements */
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int n = 0; n < S::KEY_TILES; n += 2) {
                    uint32_t k[4];
                    ptx_ldmatrix_x4(k, k_at + (n * 8 * S::K_ROW + first + d + half * 16) * (int)sizeof(T));
#pragma unroll
                    for (int m = 0; m < S::ROW_TILES; m++) {
                        ptx_mma_m16n8k16<T>(s[m][n], q[half][m], k[0], k[1]);
                        ptx_mma_m16n8k16<T>(s[m][n + 1], q[half][m], k[2], k[3]);
                    }
                }
            }
        }
    }
}

/* S of the warp's rows and its share of the keys: sums in fp32, not scaled. The tensor cores cut what they add
 * off instead of rounding it, always down; of long heads they add up spans of 64, which are added here. */
template <class S>
static __device__ __forceinline__ void multiply_keys(float (&s)[S::ROW_TILES][S::KEY_TILES][4],
                                                     const attend_memory<S> *memory, int32_t stage, int32_t warp_m,
                                                     int32_t warp_n)
{
    using T = typename S::T;
    constexpr int SPAN = S::HEAD > 128 ? 64 : S::HEAD;
    const int32_t lane = threadIdx.x % 32, in_matrix = lane % 8, matrix = lane / 8;
    const int32_t q_row = warp_m * S::ROW_TILES * 16 + matrix % 2 * 8 + in_matrix;
    const uint32_t q_at = ptx_shared_address(memory->q + q_row * S::K_ROW + matrix / 2 * 8);
    const T *keys = memory->k[stage] + warp_n * S::KEY_TILES * 8 * S::K_ROW;
    const uint32_t k_at = S::KEY_TILES == 1
                              ? ptx_shared_address(keys + in_matrix * S::K_ROW + matrix * 8)
                              : ptx_shared_address(keys + (matrix / 2 * 8 + in_matrix) * S::K_ROW + matrix % 2 * 8);
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
        for (int n = 0; n < S::KEY_TILES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) s[m][n][j] = 0;
    multiply_span<S, SPAN>(s, q_at, k_at, 0);
#pragma unroll 1
    for (int first = SPAN; first < S::HEAD; first += SPAN) {
        float part[S::ROW_TILES][S::KEY_TILES][4] = {};
        multiply_span<S, SPAN>(part, q_at, k_at, first);
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
            for (int n = 0; n < S::KEY_TILES; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) s[m][n][j] += part[m][n][j];
    }
}

/* From dot products to scores in base 2. */
template <class S>
static __device__ __forceinline__ void score_tile(float (&s)[S::ROW_TILES][S::KEY_TILES][4],
                                                  const attend_memory<S> *memory, const attend_args *args,
                                                  const attend_job *job, int32_t tile, int32_t first_key,
                                                  int32_t warp_m, int32_t warp_n, float scale)
{
    const attend_tile<S::TILE> *places = &memory->tiles[tile % 3];
    const int32_t lane = threadIdx.x % 32;
    const int32_t column = warp_n * S::KEY_TILES * 8 + lane % 4 * 2, row = warp_m * S::ROW_TILES * 16 + lane / 4;
    const int32_t tile_first = first_key + tile * S::TILE;
    const bool is_plain = !args->is_special && tile_first >= memory->keys.full_first &&
                          tile_first + S::TILE <= memory->keys.full_end;
    const float plain_scale = is_plain ? scale * FV_LOG2E : scale;
#pragma unroll
    for (int n = 0; n < S::KEY_TILES; n++) {
        const float low = args->key_scales ? plain_scale * places->k_scale[column + n * 8] : plain_scale;
        const float high = args->key_scales ? plain_scale * places->k_scale[column + n * 8 + 1] : plain_scale;
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++) {
            s[m][n][0] *= low;
            s[m][n][1] *= high;
            s[m][n][2] *= low;
            s[m][n][3] *= high;
        }
    }
    if (is_plain) return;
    if (args->params.soft_cap > 0) {
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
            for (int n = 0; n < S::KEY_TILES; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) s[m][n][j] = cap_score(args, s[m][n][j]);
    }
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const attend_row *at = &memory->rows[row + m * 16 + half * 8];
            const int32_t first = at->first - tile_first - column, end = at->end - tile_first - column;
#pragma unroll
            for (int n = 0; n < S::KEY_TILES; n++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int32_t key = n * 8 + j;
                    float *score = &s[m][n][2 * half + j];
                    *score *= FV_LOG2E;
                    if (args->params.alibi != FV_ALIBI_NONE)
                        *score += alibi_of(args->params.alibi, at->slope, places->position[column + key], at->position);
                    bool sees = key >= first && key < end;
                    if (args->params.tree_mask)
                        sees = sees && tree_shows(at->tree, job->context, places->position[column + key]);
                    *score = sees ? *score : -INFINITY;
                }
            }
        }
    }
}

/* The largest of each row's scores, of all its warps. */
template <class S>
static __device__ __forceinline__ void find_maxima(float (&max)[S::ROW_TILES][2], attend_memory<S> *memory,
                                                   const float (&s)[S::ROW_TILES][S::KEY_TILES][4], int32_t warp_m,
                                                   int32_t warp_n)
{
    const int32_t lane = threadIdx.x % 32, row = warp_m * S::ROW_TILES * 16 + lane / 4;
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float largest = -INFINITY;
#pragma unroll
            for (int n = 0; n < S::KEY_TILES; n++)
                largest = fmaxf(largest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            max[m][half] = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            if (S::WARPS_N > 1 && lane % 4 == 0) memory->row_values[warp_n][row + m * 16 + half * 8] = max[m][half];
        }
    }
    if constexpr (S::WARPS_N > 1) {
        __syncthreads();
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int w = 0; w < S::WARPS_N; w++)
                    max[m][half] = fmaxf(max[m][half], memory->row_values[w][row + m * 16 + half * 8]);
    }
}

/* New maxima; the sums so far follow them. */
template <class S>
static __device__ __forceinline__ void rescale(attend_state<S> *state, const float (&max)[S::ROW_TILES][2])
{
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
        float factor[2];
        bool changes = false;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float larger = fmaxf(state->max[m][half], max[m][half]);
            factor[half] = larger == state->max[m][half] ? 1.0f : ptx_ex2(state->max[m][half] - larger);
            changes = changes || factor[half] != 1.0f;
            state->max[m][half] = larger;
            state->sum[m][half] *= factor[half];
        }
        if (!__any_sync(~0u, changes)) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) state->rounded[m][j] *= factor[j / 2];
#pragma unroll
        for (int n = 0; n < S::VALUE_TILES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) state->out[m][n][j] *= factor[j / 2];
    }
}

/* P of the warp's share of the keys, in place of the scores, and its sums. */
template <class S>
static __device__ __forceinline__ void exponentiate(float (&s)[S::ROW_TILES][S::KEY_TILES][4], attend_state<S> *state,
                                                    const attend_memory<S> *memory, const attend_args *args,
                                                    int32_t tile, int32_t warp_n)
{
    const attend_tile<S::TILE> *places = &memory->tiles[tile % 3];
    const int32_t column = warp_n * S::KEY_TILES * 8 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
        const float max[2] = {state->max[m][0] == -INFINITY ? 0.0f : state->max[m][0],
                              state->max[m][1] == -INFINITY ? 0.0f : state->max[m][1]};
#pragma unroll
        for (int n = 0; n < S::KEY_TILES; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float p = ptx_ex2(s[m][n][j] - max[j / 2]);
                state->sum[m][j / 2] += p;
                s[m][n][j] = args->key_scales ? p * places->v_scale[column + n * 8 + j % 2] : p;
            }
        }
    }
}

/* O += P V for the warp's rows and its share of the value's elements, P as T holds it. */
template <class S>
static __device__ __forceinline__ void multiply_values(attend_state<S> *state, attend_memory<S> *memory,
                                                       const float (&s)[S::ROW_TILES][S::KEY_TILES][4], int32_t stage,
                                                       int32_t warp_m, int32_t warp_n)
{
    using T = typename S::T;
    const int32_t lane = threadIdx.x % 32, in_matrix = lane % 8, matrix = lane / 8;
    uint32_t p_at = 0;
    if constexpr (S::WARPS_N > 1) {
        const int32_t row = warp_m * S::ROW_TILES * 16, column = warp_n * S::KEY_TILES * 8 + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
            for (int n = 0; n < S::KEY_TILES; n++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *(uint32_t *)(memory->p + (row + m * 16 + half * 8 + lane / 4) * S::P_ROW + column +
                                  n * 8) = fv_narrow_pair<T>(s[m][n][2 * half], s[m][n][2 * half + 1]);
        __syncthreads();
        p_at = ptx_shared_address(memory->p + (row + matrix % 2 * 8 + in_matrix) * S::P_ROW + matrix / 2 * 8);
    }
    const T *values = S::SHARED_KV ? memory->k[stage] : memory->v[stage];
    const uint32_t v_at = ptx_shared_address(values + (matrix % 2 * 8 + in_matrix) * S::V_ROW +
                                             warp_n * S::VALUE_TILES * 8 + matrix / 2 * 8);
#pragma unroll
    for (int k = 0; k < S::TILE / 16; k++) {
        uint32_t p[S::ROW_TILES][4];
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++) {
            if constexpr (S::WARPS_N > 1) {
                ptx_ldmatrix_x4(p[m], p_at + (m * 16 * S::P_ROW + k * 16) * (int)sizeof(T));
            } else { /* the layout of a result is that of an operand */
                p[m][0] = fv_narrow_pair<T>(s[m][2 * k][0], s[m][2 * k][1]);
                p[m][1] = fv_narrow_pair<T>(s[m][2 * k][2], s[m][2 * k][3]);
                p[m][2] = fv_narrow_pair<T>(s[m][2 * k + 1][0], s[m][2 * k + 1][1]);
                p[m][3] = fv_narrow_pair<T>(s[m][2 * k + 1][2], s[m][2 * k + 1][3]);
            }
        }
        const uint32_t ones = fv_narrow_pair<T>(1, 1);
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++) ptx_mma_m16n8k16<T>(state->rounded[m], p[m], ones, ones);
#pragma unroll
        for (int n = 0; n < S::VALUE_TILES; n += 2) {
            uint32_t v[4];
            ptx_ldmatrix_x4_trans(v, v_at + (k * 16 * S::V_ROW + n * 8) * (int)sizeof(T));
#pragma unroll
            for (int m = 0; m < S::ROW_TILES; m++) {
                ptx_mma_m16n8k16<T>(state->out[m][n], p[m], v[0], v[1]);
                ptx_mma_m16n8k16<T>(state->out[m][n + 1], p[m], v[2], v[3]);
            }
        }
    }
}

template <class S>
static __device__ __forceinline__ void attend_one_tile(attend_state<S> *state, attend_memory<S> *memory,
                                                       const attend_args *args, const attend_job *job, int32_t tile,
                                                       int32_t first_key, int32_t warp_m, int32_t warp_n, float scale)
{
    float s[S::ROW_TILES][S::KEY_TILES][4], max[S::ROW_TILES][2];
    const int32_t stage = S::WIDENS && args->is_narrow ? 0 : tile % S::STAGES;
    multiply_keys<S>(s, memory, stage, warp_m, warp_n);
    score_tile<S>(s, memory, args, job, tile, first_key, warp_m, warp_n, scale);
    find_maxima<S>(max, memory, s, warp_m, warp_n);
    rescale<S>(state, max);
    exponentiate<S>(s, state, memory, args, tile, warp_n);
    /* P times the scale of a key is rounded where P alone may be exact: the rest of it in a second pass, and of
     * bf16 a third. */
    constexpr int LAST_PASS = std::is_same<typename S::T, __half>::value ? 1 : 2;
#pragma unroll 1
    for (int pass = 0;; pass++) {
        multiply_values<S>(state, memory, s, stage, warp_m, warp_n);
        if (!args->key_scales || pass == LAST_PASS) return;
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
            for (int n = 0; n < S::KEY_TILES; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) s[m][n][j] -= (float)fv_narrow<typename S::T>(s[m][n][j]);
        if (S::WARPS_N > 1) __syncthreads();
    }
}

/* --- a block of rows ----------------------------------------------------------------------------------- */

/* All tiles; with two of them in shared memory the loads of tile t + 1 are under way while tile t is worked on. */
template <class S>
static __device__ __forceinline__ void attend_tiles(attend_state<S> *state, attend_memory<S> *memory,
                                                    const attend_args *args, const attend_job *job, int32_t warp_m,
                                                    int32_t warp_n)
{
    constexpr int AHEAD = S::STAGES - 1;
    const float scale = args->params.scale * (args->key_scales ? 1.0f : job->k_head_scale);
    const int32_t first_key = memory->keys.first / 8 * 8; /* see transpose_rows */
    const int32_t num_tiles = (memory->keys.end - first_key + S::TILE - 1) / S::TILE;
    find_keys<S::TILE>(&memory->tiles[0], args, job, &memory->keys, first_key);
    __syncthreads();
#pragma unroll 1
    for (int32_t tile = -AHEAD; tile < num_tiles; tile++) {
        const int32_t loaded = tile + AHEAD;
        if (loaded < num_tiles) load_tile<S>(memory, args, job, loaded, first_key + loaded * S::TILE);
        ptx_cp_async_commit();
        find_keys<S::TILE>(&memory->tiles[(loaded + 1) % 3], args, job, &memory->keys,
                           first_key + (loaded + 1) * S::TILE);
        if (tile >= 0) {
            ptx_cp_async_wait<AHEAD>();
            __syncthreads();
            if (S::WIDENS && args->is_narrow) {
                widen_tile<S>(memory, args, tile);
                __syncthreads();
            }
            attend_one_tile<S>(state, memory, args, job, tile, first_key, warp_m, warp_n, scale);
        }
        __syncthreads();
    }
    ptx_cp_async_wait<0>();
}

/* Sums of all threads of a row, and the row's results to memory. */
template <class S>
static __device__ __forceinline__ void store_rows(attend_state<S> *state, attend_memory<S> *memory,
                                                  const attend_args *args, const attend_job *job, int32_t num_rows,
                                                  int32_t warp_m, int32_t warp_n)
{
    const int32_t lane = threadIdx.x % 32, first_row = warp_m * S::ROW_TILES * 16 + lane / 4;
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = state->sum[m][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            state->sum[m][half] = sum + __shfl_xor_sync(~0u, sum, 2);
            if (S::WARPS_N > 1 && lane % 4 == 0)
                memory->row_values[warp_n][first_row + m * 16 + half * 8] = state->sum[m][half];
        }
    }
    if constexpr (S::WARPS_N > 1) __syncthreads();
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int32_t r = first_row + m * 16 + half * 8;
            if (r >= num_rows) continue;
            float sum = state->sum[m][half];
            if constexpr (S::WARPS_N > 1) {
                sum = 0;
#pragma unroll
                for (int w = 0; w < S::WARPS_N; w++) sum += memory->row_values[w][r];
            }
            const attend_row *row = &memory->rows[r];
            /* Values are weighed by the rounded P, so what they are divided by is its sum. */
            const float rounded = state->rounded[m][2 * half];
            const float values_factor = args->key_scales
                                            ? __fdividef(1.0f, args->p_factor)
                                            : job->v_head_scale * (rounded > 0 ? __fdividef(sum, rounded) : 1.0f);
            const attend_end end = end_row(args, job, row, state->max[m][half], sum, values_factor);
            if (warp_n == 0 && lane % 4 == 0) store_sums(args, row, &end);
            const attend_target target = target_of(args, row, &end);
            const int32_t first = warp_n * S::VALUE_TILES * 8 + lane % 4 * 2, size = args->params.v_head_size;
            if (target.pairs) {
#pragma unroll
                for (int n = 0; n < S::VALUE_TILES; n++)
                    if (first + n * 8 < size)
                        store_pair(&target, first + n * 8, state->out[m][n][2 * half], state->out[m][n][2 * half + 1]);
                continue;
            }
#pragma unroll
            for (int n = 0; n < S::VALUE_TILES; n++) {
                if (first + n * 8 >= size) continue;
                store_element(&target, first + n * 8, state->out[m][n][2 * half]);
                store_element(&target, first + n * 8 + 1, state->out[m][n][2 * half + 1]);
            }
        }
    }
}

template <class S>
static __device__ __forceinline__ void attend_rows(attend_memory<S> *memory, const attend_args *args, int32_t row0)
{
    const attend_job *job = &memory->job;
    const int32_t warp = threadIdx.x / 32, warp_m = warp / S::WARPS_N, warp_n = warp % S::WARPS_N;
    const int32_t num_rows = fv_min_i32(S::BLOCK_M, job->num_rows - row0);
    find_rows<S::BLOCK_M>(memory->rows, &memory->keys, args, job, row0);
    load_queries<S>(memory, args, num_rows);
    attend_state<S> state;
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
#pragma unroll
        for (int n = 0; n < S::VALUE_TILES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) state.out[m][n][j] = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) state.rounded[m][j] = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            state.max[m][half] = -INFINITY;
            state.sum[m][half] = 0;
        }
    }
    if (memory->keys.first < memory->keys.end) attend_tiles<S>(&state, memory, args, job, warp_m, warp_n);
    store_rows<S>(&state, memory, args, job, num_rows, warp_m, warp_n);
    __syncthreads(); /* rows and sums are read to the end */
}

template <class S>
static __global__ void __launch_bounds__(S::THREADS, S::THREADS <= 128 ? 2 : 1)
    attend_kernel(const __grid_constant__ attend_args args)
{
    PTX_DYNAMIC_SHARED(16, shared);
    attend_memory<S> *memory = (attend_memory<S> *)shared;
    overlap_begin();
    if (threadIdx.x == 0) memory->has_item = find_job(&memory->job, &args);
    __syncthreads();
    if (!memory->has_item) return;
    for (int stage = 0; stage < S::STAGES; stage++) {
        clear_tails<S, S::K_ROW>(memory->k[stage], S::TILE, args.params.head_size);
        if constexpr (!S::SHARED_KV) clear_tails<S, S::V_ROW>(memory->v[stage], S::TILE, args.params.v_head_size);
    }
    for (int32_t row0 = 0; row0 < memory->job.num_rows; row0 += S::BLOCK_M) attend_rows<S>(memory, &args, row0);
}

/* The kernel of a shape as the launcher takes it. */
template <class S> constexpr fv_cuda_attend_kernel attend_kernel_of(void)
{
    return {attend_kernel<S>, (int32_t)sizeof(attend_memory<S>), S::THREADS, S::BLOCK_M, 0};
}

#endif
