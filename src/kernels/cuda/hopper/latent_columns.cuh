/* MLA decode of few rows on Hopper: keys and values along the 64 rows of a wgmma, the queries' rows along its columns,
 * of which 16 or 32 are enough, so nothing is padded.
 *
 *   S^T [64 keys x ROWS]    = K [64 x 576] Q^T         K from its panels as they lie, Q a panel of ROWS for each
 *   O^T [64 values x ROWS] += V^T [64 x 64 keys] P^T   V^T from one of the same panels, transposed by the product
 *
 * Two warpgroups: S of a tile is whole in one of them, its owner; values are shared out, four panels to each. P and the
 * maxima that it is relative to go from the owner to both through shared memory. A thread has of each sum the columns
 * that column_of_thread() says, and of a tile's keys key_of_thread() and the eighth after it. */
#ifndef FV_KERNELS_CUDA_HOPPER_LATENT_COLUMNS_CUH
#define FV_KERNELS_CUDA_HOPPER_LATENT_COLUMNS_CUH

#include "kernels/cuda/hopper/attend_latent.cuh"

/* Barriers of threads beyond those of attend_latent.cuh. */
enum {
    COLUMN_BARRIER_WARPGROUP = LATENT_BARRIER_KEYS + 1, /* and the next: of each warpgroup alone */
    COLUMN_STAGED_COLUMNS = LATENT_VALUE / 2            /* of a row of the output, in each warpgroup */
};

/* What the rows of a block share beside tiles, Q and P. `max` begins as -inf. */
template <int ROWS> struct column_memory {
    float max[ROWS];            /* what the sums of a row are relative to, from the tile whose P is there on */
    float max_of_warp[4][ROWS]; /* of the owner's scores, where maxima move */
    float2 sums[8][ROWS];       /* of P and of P as rounded, by warps */
    float out_factor[2][ROWS];  /* of the ends of rows, as each warpgroup finds them */
    char *targets[2][ROWS];     /* where the warpgroup's half of a row goes */
};

/* What a thread knows of its columns. Sums are of the keys that the thread had. */
template <int ROWS> struct column_state {
    float max[ROWS / 4]; /* of all keys so far, the same in both warpgroups */
    float sum[ROWS / 4];
    float rounded[ROWS / 4]; /* of P as the tensor cores get it */
};

/* The thread's i-th column, and the element of a sum that it has there, of the first or second half of 16 rows. */
static __device__ __forceinline__ int32_t column_of_thread(int i)
{
    return i / 2 * 8 + (int32_t)(threadIdx.x % 4 * 2) + i % 2;
}
static __device__ __forceinline__ constexpr int element_of_column(int i, int which)
{
    return i / 2 * 4 + which * 2 + i % 2;
}

/* The thread's first row of 64: a key of the tile, or a value of a panel. */
static __device__ __forceinline__ int32_t key_of_thread(void)
{
    return (int32_t)(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
}

template <int ROWS> static __device__ __forceinline__ void clear_columns(column_state<ROWS> *state)
{
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        state->max[i] = -INFINITY;
        state->sum[i] = state->rounded[i] = 0;
    }
}

/* --- products -------------------------------------------------------------------------------------------------- */

/* S^T of one panel: issued. Descriptors: of the panel of keys, and of that of Q, both for rows along the depth. */
template <class T, int ROWS>
static __device__ __forceinline__ void multiply_key_panel(float (&s)[ROWS / 2], uint64_t k_at, uint64_t q_at,
                                                          bool is_first)
{
#pragma unroll
    for (int d = 0; d < 64; d += 16) {
        const uint64_t k = ptx_descriptor_at(k_at, d * 2), q = ptx_descriptor_at(q_at, d * 2);
        if constexpr (ROWS == 16)
            ptx_wgmma_m64n16k16_ss<T>(s, k, q, !is_first || d > 0);
        else
            ptx_wgmma_m64n32k16_ss<T>(s, k, q, !is_first || d > 0);
    }
}

/* O^T += V^T P^T of a tile, a warpgroup's four panels, which lie at v_at: issued, as a group. P's panels for each two of
 * them lie p_bytes apart; 0: they share one. */
template <class T, int ROWS>
static __device__ __forceinline__ void multiply_value_panels(float (&out)[4][ROWS / 2], const uint64_t (&v_at)[4],
                                                             uint64_t p_at, uint32_t p_bytes)
{
#pragma unroll
    for (int panel = 0; panel < 4; panel++) ptx_wgmma_settle(out[panel]);
    ptx_wgmma_fence();
#pragma unroll
    for (int key = 0; key < LATENT_TILE; key += 16) {
#pragma unroll
        for (int panel = 0; panel < 4; panel++) {
            const uint64_t v = ptx_descriptor_at(v_at[panel], key * FV_PANEL_ROW_BYTES);
            const uint64_t p = ptx_descriptor_at(p_at, panel / 2 * p_bytes + key * 2);
            if constexpr (ROWS == 16)
                ptx_wgmma_m64n16k16_ss_tn<T>(out[panel], v, p, 1);
            else
                ptx_wgmma_m64n32k16_ss_tn<T>(out[panel], v, p, 1);
        }
    }
    ptx_wgmma_commit();
}

/* The same with panels LATENT_PANEL_BYTES apart. */
template <class T, int ROWS>
static __device__ __forceinline__ void multiply_value_panels(float (&out)[4][ROWS / 2], uint64_t v_at, uint64_t p_at,
                                                             uint32_t p_bytes)
{
    const uint64_t panels[4] = {v_at, ptx_descriptor_at(v_at, LATENT_PANEL_BYTES),
                                ptx_descriptor_at(v_at, 2 * LATENT_PANEL_BYTES),
                                ptx_descriptor_at(v_at, 3 * LATENT_PANEL_BYTES)};
    multiply_value_panels<T, ROWS>(out, panels, p_at, p_bytes);
}

template <int ROWS> static __device__ __forceinline__ void await_value_panels(float (&out)[4][ROWS / 2])
{
    ptx_wgmma_wait<0>();
#pragma unroll
    for (int panel = 0; panel < 4; panel++) ptx_wgmma_settle(out[panel]);
}

/* --- maxima ---------------------------------------------------------------------------------------------------- */

/* What the sums of a thread's columns have to be multiplied by. */
template <int ROWS> struct column_move {
    float by[ROWS / 4];
};

/* The thread's own sums of one column go over to another maximum. */
template <int ROWS>
static __device__ __forceinline__ void move_column(column_move<ROWS> *move, column_state<ROWS> *state, int i, float max)
{
    const float factor = max == state->max[i] ? 1.0f : ptx_ex2(state->max[i] - max);
    state->max[i] = max;
    state->sum[i] *= factor;
    state->rounded[i] *= factor;
    move->by[i] = factor;
}

/* -inf for keys that a row does not see. */
template <int ROWS>
static __device__ __forceinline__ void mask_columns(float (&s)[ROWS / 2], const attend_row *rows, int32_t tile_first)
{
    const int32_t origin = tile_first + key_of_thread();
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const attend_row *row = &rows[column_of_thread(i)];
        const int32_t first = row->first - origin, end = row->end - origin;
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (half * 8 < first || half * 8 >= end) s[element_of_column(i, half)] = -INFINITY;
    }
}

/* The owner: does a score pass its row's maximum by more than headroom + FV_MAX_SLACK? Then sums go over to new ones,
 * `headroom` below the largest scores, and true says that the output has to. Scores are s times `factor` > 0. Maxima are
 * looked for across the warpgroup only then, which is rare after the first tile. */
template <int ROWS>
static __device__ __forceinline__ bool raise_columns(column_move<ROWS> *move, column_state<ROWS> *state,
                                                     const float (&s)[ROWS / 2], column_memory<ROWS> *memory,
                                                     int32_t group, float factor, float headroom)
{
    const int32_t barrier = COLUMN_BARRIER_WARPGROUP + group, warp = threadIdx.x / 32 % 4;
    float max[ROWS / 4];
    bool passes = false;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        max[i] = fmaxf(s[element_of_column(i, 0)], s[element_of_column(i, 1)]) * factor;
        passes = passes || max[i] > state->max[i] + (headroom + FV_MAX_SLACK);
    }
    if (!ptx_bar_any(barrier, 128, passes)) return false;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) max[i] = fmaxf(max[i], __shfl_xor_sync(~0u, max[i], step));
        if (threadIdx.x % 32 < 4) memory->max_of_warp[warp][column_of_thread(i)] = max[i];
    }
    ptx_bar_sync(barrier, 128);
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const int32_t column = column_of_thread(i);
#pragma unroll
        for (int other = 0; other < 4; other++) max[i] = fmaxf(max[i], memory->max_of_warp[other][column]);
        const bool is_higher = max[i] > state->max[i] + (headroom + FV_MAX_SLACK);
        move_column(move, state, i, is_higher ? max[i] - headroom : state->max[i]);
        if (warp == 0 && threadIdx.x % 32 < 4) memory->max[column] = state->max[i];
    }
    return true;
}

/* The other warpgroup, when the owner's P is there: true where the owner's maxima have moved. */
template <int ROWS>
static __device__ __forceinline__ bool follow_columns(column_move<ROWS> *move, column_state<ROWS> *state,
                                                      const column_memory<ROWS> *memory)
{
    float max[ROWS / 4];
    bool moves = false;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        max[i] = memory->max[column_of_thread(i)];
        moves = moves || max[i] != state->max[i];
    }
    if (!__any_sync(~0u, moves)) return false;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) move_column(move, state, i, max[i]);
    return true;
}

/* No product with the output may be under way. */
template <int ROWS>
static __device__ __forceinline__ void rescale_columns(float (&out)[4][ROWS / 2], const column_move<ROWS> *move)
{
#pragma unroll
    for (int panel = 0; panel < 4; panel++) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) out[panel][i] *= move->by[i / 4 * 2 + i % 2];
    }
}

/* --- P --------------------------------------------------------------------------------------------------------- */

/* P in place of products whose scores are s times `factor`, and its sums. */
template <int ROWS>
static __device__ __forceinline__ void exponentiate_columns(float (&s)[ROWS / 2], column_state<ROWS> *state,
                                                            float factor)
{
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const float max = state->max[i] == -INFINITY ? 0.0f : state->max[i];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = element_of_column(i, half);
            s[at] = ptx_ex2(fmaf(s[at], factor, -max));
            state->sum[i] += s[at];
        }
    }
}

/* P as T holds it, in pairs of columns: p[2 n] of the thread's first key, p[2 n + 1] of the second. */
template <class T, int ROWS>
static __device__ __forceinline__ void narrow_columns(uint32_t (&p)[ROWS / 4], const float (&s)[ROWS / 2],
                                                      column_state<ROWS> *state)
{
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        p[i] = fv_narrow_pair<T>(s[2 * i], s[2 * i + 1]);
        const float2 rounded = widen_pair<T>(p[i]);
        state->rounded[i / 2 * 2] += rounded.x;
        state->rounded[i / 2 * 2 + 1] += rounded.y;
    }
}

/* To a panel of ROWS rows of 64 keys, as products take P^T; they read it behind a fence (ptx_fence_proxy_async) and a
 * barrier. */
template <int ROWS> static __device__ __forceinline__ void store_columns(char *panel, const uint32_t (&p)[ROWS / 4])
{
    const int32_t lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8;
    const int32_t chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
    const uint32_t to = ptx_shared_address(panel) + panel_offset(ROWS, row, chunk);
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
        ptx_stmatrix_x4_trans(to + i * 16 * FV_PANEL_ROW_BYTES, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
}

/* --- the end --------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float sum_of_column(float value)
{
#pragma unroll
    for (int step = 4; step < 32; step *= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

/* The ends of all rows, from the sums of both warpgroups: where they go and what they are multiplied by, to shared
 * memory. Two barriers, behind the first of which no product reads shared memory any more. */
template <int ROWS>
static __device__ __forceinline__ void end_columns(const column_state<ROWS> *state, column_memory<ROWS> *memory,
                                                   const attend_row *rows, const attend_job *job,
                                                   const attend_args *args, int32_t group, int32_t num_rows,
                                                   int32_t bytes)
{
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const float2 own = make_float2(sum_of_column(state->sum[i]), sum_of_column(state->rounded[i]));
        if (threadIdx.x % 32 < 4) memory->sums[threadIdx.x / 32][column_of_thread(i)] = own;
    }
    ptx_bar_sync(LATENT_BARRIER_CONSUMERS, LATENT_CONSUMERS);
    const int32_t r = threadIdx.x % 128;
    if (r < ROWS) {
        attend_end end = {-INFINITY, 0, 0, -1, 0};
        char *to = NULL;
        if (r < num_rows) {
            float2 sum = make_float2(0, 0);
#pragma unroll
            for (int warp = 0; warp < 8; warp++) {
                const float2 part = memory->sums[warp][r];
                sum = make_float2(sum.x + part.x, sum.y + part.y);
            }
            end = end_row(args, job, &rows[r], memory->max[r], sum.x, factor_of_values(job, sum.x, sum.y));
            to = target_of(args, &rows[r], &end).to + group * bytes;
            if (group == 0) store_sums(args, &rows[r], &end);
        }
        memory->out_factor[group][r] = end.out_factor;
        memory->targets[group][r] = to;
    }
    ptx_bar_sync(COLUMN_BARRIER_WARPGROUP + group, 128);
}

/* Bytes from one staged row to the next: lanes meet no bank twice. */
static __device__ __forceinline__ constexpr int32_t column_row_bytes(int32_t element_bytes)
{
    return COLUMN_STAGED_COLUMNS * element_bytes + 16;
}

/* The thread's part of the output as its ends have it, to shared memory, a row of the output after the other. */
template <class T, int ROWS>
static __device__ __forceinline__ void stage_columns(const float (&out)[4][ROWS / 2], char *staged,
                                                     const float *out_factor)
{
    constexpr int32_t BYTES = (int32_t)sizeof(T), ROW_BYTES = column_row_bytes(BYTES);
    char *to = staged + threadIdx.x % 4 * 2 * ROW_BYTES + key_of_thread() * BYTES;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const float factor = out_factor[column_of_thread(i)];
#pragma unroll
        for (int panel = 0; panel < 4; panel++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                /* no key: 0, whatever the sums are */
                const float value = factor == 0 ? 0.0f : out[panel][element_of_column(i, half)] * factor;
                char *at = to + (i / 2 * 8 + i % 2) * ROW_BYTES + (panel * 64 + half * 8) * BYTES;
                if constexpr (BYTES == 4)
                    *(float *)at = value;
                else
                    *(T *)at = fv_narrow<T>(value);
            }
        }
    }
}

/* The output of the block's rows, by way of `staged`, of which each warpgroup has its own: ROWS rows of
 * column_row_bytes(4). By both warpgroups, when all products have ended. */
template <int ROWS>
static __device__ __forceinline__ void store_output_columns(const float (&out)[4][ROWS / 2],
                                                            const column_state<ROWS> *state,
                                                            column_memory<ROWS> *memory, char *staged,
                                                            const attend_row *rows, const attend_job *job,
                                                            const attend_args *args, int32_t group, int32_t num_rows)
{
    const fv_dtype dtype = job->item.partial >= 0 ? FV_DTYPE_F32 : args->params.out_dtype;
    const int32_t element_bytes = dtype == FV_DTYPE_F32 ? 4 : 2, bytes = COLUMN_STAGED_COLUMNS * element_bytes;
    const int32_t row_bytes = column_row_bytes(element_bytes);
    end_columns(state, memory, rows, job, args, group, num_rows, bytes);
    if (dtype == FV_DTYPE_F32)
        stage_columns<float, ROWS>(out, staged, memory->out_factor[group]);
    else if (dtype == FV_DTYPE_F16)
        stage_columns<__half, ROWS>(out, staged, memory->out_factor[group]);
    else
        stage_columns<__nv_bfloat16, ROWS>(out, staged, memory->out_factor[group]);
    ptx_fence_proxy_async();
    ptx_bar_sync(COLUMN_BARRIER_WARPGROUP + group, 128);
    const int32_t lane = threadIdx.x % 32, first_row = threadIdx.x / 32 % 4 * (ROWS / 4);
    char *to = lane < ROWS / 4 ? memory->targets[group][first_row + lane] : NULL;
    send_latent_rows(to, staged + first_row * row_bytes, row_bytes, bytes);
    ptx_bulk_wait_read();
}

#endif
