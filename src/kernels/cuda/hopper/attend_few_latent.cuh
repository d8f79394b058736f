/* MLA decode of up to 16 or 32 rows (N) over latents of 16 bits on Hopper (wgmma): keys, and then columns of the
 * values, are the 64 rows of a product, the queries its N columns, so no tensor core multiplies empty rows. Why:
 * docs/cuda/mla_decode.md.
 *
 *   S^T [64 keys x N]     = K Q^T        of a tile
 *   O^T [256 values x N] += V^T P^T      of all tiles
 *
 * A latent lies in shared memory as it does in the cache, 1152 bytes and then the next one's: so it comes by bulk
 * copies of whole pages, or one by one, which read as fast as memory does; copies to places that are no multiples of
 * 128 bytes do not. Then all latents begin in the same bank, so each lane goes through them in an order of its own, to
 * registers, from where the tensor cores take their left operand. Roles:
 *
 *   four warps        bring units of 32 latents, as far ahead as five units hold
 *   two warpgroups    S^T and softmax, of every second tile each; P to shared memory
 *   two more          O^T, half of the columns each: 64 of them for N / 2 registers of a thread
 *
 * What a row's sums are relative to is chosen tile by tile, so the scorers pass it on to each other; most tiles
 * change nothing, which a barrier's vote says. */
#ifndef FV_KERNELS_CUDA_HOPPER_ATTEND_FEW_LATENT_CUH
#define FV_KERNELS_CUDA_HOPPER_ATTEND_FEW_LATENT_CUH

#include "kernels/cuda/hopper/few_latent_copy.cuh"
#include "kernels/cuda/hopper/few_latent_end.cuh"

/* A kernel's form: the queries' dtype, and rows of a block. */
template <class Element, int NUM_ROWS> struct few_latent_form {
    typedef Element T;
    typedef few_latent_memory<NUM_ROWS> memory;
    static constexpr int ROWS = NUM_ROWS;
};

/* --- scores and softmax ---------------------------------------------------------------------------------------- */

/* 16 bytes of each half of 128 bytes, of each of the thread's two keys. */
typedef struct latent_chunks {
    uint4 of[2][2]; /* key, half; of an odd key the second half first */
} latent_chunks;

/* `own`: chunk l % 4 of the half that the key begins with. Eight lanes, two keys: all banks. */
static __device__ __forceinline__ latent_chunks read_latent_chunks(const char *own, const char *other, int panel)
{
    latent_chunks chunks;
#pragma unroll
    for (int key = 0; key < 2; key++) {
        const int32_t offset = key * 8 * FEW_LATENT_BYTES + panel * FV_PANEL_ROW_BYTES;
        chunks.of[key][0] = *(const uint4 *)(own + offset);
        chunks.of[key][1] = *(const uint4 *)(other + offset);
    }
    return chunks;
}

/* Operands of a panel's four products: the depth goes through the elements in the order that the four lanes of a key
 * read them in, for sums have none; that of the queries is the same (store_latent_query). */
static __device__ __forceinline__ void take_latent_chunks(uint32_t (&a)[4][4], const latent_chunks *chunks, bool is_odd)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int key = 0; key < 2; key++) {
            const uint4 &even = chunks->of[key][half], &odd = chunks->of[key][1 - half];
            a[half * 2][key] = is_odd ? odd.x : even.x;
            a[half * 2][key + 2] = is_odd ? odd.y : even.y;
            a[half * 2 + 1][key] = is_odd ? odd.z : even.z;
            a[half * 2 + 1][key + 2] = is_odd ? odd.w : even.w;
        }
    }
}

/* S^T of a tile, to the end; `own`, `other`: of read_latent_chunks(). The operands of a panel are made while those of
 * the panel before are multiplied, and take the registers of the panel before that. */
template <class F>
static __device__ __forceinline__ void multiply_few_latents(float (&s)[F::ROWS / 2], const typename F::memory *memory,
                                                            const char *own, const char *other)
{
    const uint64_t q_at = ptx_anew(ptx_matrix_descriptor(memory->q[0], 16, 1024));
    const bool is_odd = (own - (const char *)memory) % FV_PANEL_ROW_BYTES >= FV_PANEL_ROW_BYTES / 2;
    latent_chunks next = read_latent_chunks(own, other, 0);
    uint32_t a[2][4][4];
#pragma unroll
    for (int panel = 0; panel < LATENT_PANELS; panel++) {
        if (panel >= 2) ptx_wgmma_wait<1>();
        take_latent_chunks(a[panel % 2], &next, is_odd);
        if (panel + 1 < LATENT_PANELS) next = read_latent_chunks(own, other, panel + 1);
        ptx_wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; step++)
            multiply_columns<typename F::T>(s, a[panel % 2][step],
                                            ptx_descriptor_at(q_at, panel * F::ROWS * FV_PANEL_ROW_BYTES + step * 32),
                                            panel + step > 0);
        ptx_wgmma_commit();
    }
    ptx_wgmma_wait<0>();
    ptx_wgmma_settle(s);
}

/* Of a warpgroup's scores a thread has those of two keys, 16 w + l / 4 of warp w and lane l and the eighth after it,
 * with N / 4 rows: 8 i + 2 (l % 4) + c, element 4 i + 2 key + c. What belongs to a row is at 2 i + c here. */
template <int N> struct few_latent_state {
    float sums[2][N / 4]; /* of the thread's keys: of P, and of P as the tensor cores get it */
    float max[N / 4];     /* what they are relative to: known in between follow_latent_maxima() and the tile's end */
};

template <int N> static __device__ __forceinline__ void move_column_sums(few_latent_state<N> *state, int i, float by)
{
#pragma unroll
    for (int which = 0; which < 2; which++) state->sums[which][i] *= by;
}

/* P's place is free for a tile. Where there is one for all tiles, the barrier may still be two tiles behind, which
 * looks the same, until the tile before is there. */
template <int N>
static __device__ __forceinline__ void wait_for_weights_space(few_latent_memory<N> *memory, int32_t tile)
{
    constexpr int NUM_P = few_latent_memory<N>::NUM_P;
    if (NUM_P == 1 && tile > 0) ptx_mbarrier_wait(&memory->p_full[0], (tile - 1) % 2);
    ptx_mbarrier_wait(&memory->p_empty[tile % NUM_P], (tile / NUM_P + 1) % 2);
}

/* Before any tile: by the scorers. */
template <int N> static __device__ __forceinline__ void clear_latent_maxima(few_latent_memory<N> *memory)
{
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane >= N) return;
    memory->known_max[warp][lane] = -INFINITY;
    if (warp == 0) memory->max[lane] = -INFINITY;
}

/* What the tiles before are relative to: the sums follow. What the warp knew lies in shared memory, for registers are
 * full of products in between. */
template <int N>
static __device__ __forceinline__ void follow_latent_maxima(few_latent_state<N> *state, few_latent_memory<N> *memory)
{
    float *known = memory->known_max[threadIdx.x / 32];
    float before[N / 4];
    const bool moves = load_column_maxima<N>(before, state->max, known, memory->max);
    if (!__any_sync(~0u, moves)) return;
    __syncwarp(); /* what is known is read */
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        if (state->max[i] != before[i]) move_column_sums(state, i, ptx_ex2(before[i] - state->max[i]));
        if (threadIdx.x % 32 < 4) known[column_of_thread(i)] = state->max[i];
    }
    __syncwarp();
}

/* Does a score pass what its row's sums are relative to by too much? */
template <int N>
static __device__ __forceinline__ bool exceeds_latent_maxima(const float (&s)[N / 2], const few_latent_state<N> *state,
                                                             float slack)
{
    bool exceeds = false;
#pragma unroll
    for (int i = 0; i < N / 4; i++)
        exceeds = exceeds || fmaxf(s[element_of_column(i, 0)], s[element_of_column(i, 1)]) > state->max[i] + slack;
    return exceeds;
}

/* The largest score of each row in the tile: from all threads of the warpgroup. */
template <int N>
static __device__ __forceinline__ void find_latent_maxima(float (&max)[N / 4], const float (&s)[N / 2],
                                                          few_latent_memory<N> *memory, int32_t group)
{
    const int32_t warp = warp_of_group(), lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        float most = fmaxf(s[element_of_column(i, 0)], s[element_of_column(i, 1)]);
#pragma unroll
        for (int by = 4; by < 32; by *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
        if (lane < 4) memory->found_max[group][warp][column_of_thread(i)] = most;
    }
    wait_at_bar(&memory->bars, FEW_LATENT_BARRIER_GROUP + group, 128);
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        max[i] = -INFINITY;
#pragma unroll
        for (int w = 0; w < 4; w++) max[i] = fmaxf(max[i], memory->found_max[group][w][column_of_thread(i)]);
    }
}

/* Sums become relative to a row's largest score where that passes what they were relative to by too much: to the other
 * scorers, and what the output moves by to the valuers, when P's place is free. Rare. */
template <int N>
static __device__ __forceinline__ void raise_latent_maxima(few_latent_state<N> *state, const float (&max)[N / 4],
                                                           few_latent_memory<N> *memory, int32_t tile, float slack)
{
    few_latent_move<N> *output = &memory->move[tile % few_latent_memory<N>::NUM_P];
    const bool tells = threadIdx.x % 128 < 4;
    wait_for_weights_space(memory, tile);
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float before = state->max[i];
        const float now = max[i] > before + slack ? max[i] : before;
        const float factor = now == before ? 1.0f : ptx_ex2(before - now);
        state->max[i] = now;
        move_column_sums(state, i, factor);
        if (threadIdx.x % 32 < 4) memory->known_max[threadIdx.x / 32][column_of_thread(i)] = now;
        if (tells) {
            memory->max[column_of_thread(i)] = now;
            output->by[column_of_thread(i)] = factor;
        }
    }
    __syncwarp();
}

/* P in place of scores. */
template <int N>
static __device__ __forceinline__ void exponentiate_few_latents(float (&s)[N / 2], few_latent_state<N> *state)
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float max = state->max[i] == -INFINITY ? 0.0f : state->max[i];
        float *low = &s[element_of_column(i, 0)], *high = low + 2;
        *low = ptx_ex2(*low - max);
        *high = ptx_ex2(*high - max);
        state->sums[0][i] += *low + *high;
    }
}

/* P as T holds it, and its sums, to where the valuers read it. */
template <class F>
static __device__ __forceinline__ void store_latent_weights(typename F::memory *memory, const float (&s)[F::ROWS / 2],
                                                            few_latent_state<F::ROWS> *state, int32_t buffer)
{
    uint32_t p[F::ROWS / 4];
#pragma unroll
    for (int i = 0; i < F::ROWS / 4; i++) {
        p[i] = fv_narrow_pair<typename F::T>(s[2 * i], s[2 * i + 1]);
        const float2 rounded = fv_widen_pair<typename F::T>(p[i]);
        state->sums[1][i / 2 * 2] += rounded.x;
        state->sums[1][i / 2 * 2 + 1] += rounded.y;
    }
    store_columns<F::ROWS>(memory->p[buffer], p);
}

/* Tiles group, group + 2, ... */
template <class F>
static __device__ __forceinline__ void weigh_few_latents(few_latent_state<F::ROWS> *state, typename F::memory *memory,
                                                         int32_t group, int32_t origin, int32_t num_tiles, float scale,
                                                         float slack)
{
    constexpr int N = F::ROWS, NUM_P = F::memory::NUM_P;
    const int32_t warp = warp_of_group();
    const int32_t first_unit = warp / FEW_UNIT_STEPS, key = key_of_thread();
    const int32_t offset = key % FEW_UNIT * FEW_LATENT_BYTES + (int32_t)threadIdx.x % 4 * 16;
    const int32_t half = key % 2 * (FV_PANEL_ROW_BYTES / 2);
#pragma unroll 1
    for (int32_t tile = group; tile < num_tiles; tile += 2) {
        const int32_t p_buffer = tile % NUM_P, tile_first = origin + tile * LATENT_TILE;
        const int32_t unit = tile * FEW_TILE_UNITS + first_unit, at = unit % FEW_UNITS;
        float s[N / 2];
        ptx_mbarrier_wait(&memory->full[at], unit / FEW_UNITS % 2);
        const char *latent = memory->units[at] + offset;
        multiply_few_latents<F>(s, memory, latent + half, latent + (FV_PANEL_ROW_BYTES / 2 - half));
        if (F::memory::VALUES_AHEAD) {
            __syncwarp();
            if (arrives_for_warp()) ptx_mbarrier_arrive(&memory->empty[at]);
        }
#pragma unroll
        for (int i = 0; i < N / 2; i++) s[i] *= scale;
        if (tile_first < memory->keys.full_first || tile_first + LATENT_TILE > memory->keys.full_end)
            mask_columns<N>(s, memory->rows, tile_first);
        if (tile > 0) wait_at_bar(&memory->bars, FEW_LATENT_BARRIER_ODD - group, FEW_LATENT_SCORERS);
        follow_latent_maxima<N>(state, memory);
        const bool raises = vote_at_bar(&memory->bars, FEW_LATENT_BARRIER_GROUP + group, 128,
                                        exceeds_latent_maxima<N>(s, state, slack));
        if (raises) {
            float max[N / 4];
            find_latent_maxima<N>(max, s, memory, group);
            raise_latent_maxima<N>(state, max, memory, tile, slack);
        }
        if (tile + 1 < num_tiles) arrive_at_bar(&memory->bars, FEW_LATENT_BARRIER_EVEN + group, FEW_LATENT_SCORERS);
        exponentiate_few_latents<N>(s, state);
        wait_for_weights_space(memory, tile);
        if (threadIdx.x % 128 == 0) memory->move[p_buffer].is_needed = raises;
        store_latent_weights<F>(memory, s, state, p_buffer);
        ptx_fence_proxy_async();
        __syncwarp();
        if (arrives_for_warp()) ptx_mbarrier_arrive(&memory->p_full[p_buffer]);
    }
}

/* Chunks of a row of the queries, of which eight threads have one of each panel. */
typedef struct latent_query {
    uint4 of[LATENT_PANELS];
} latent_query;

/* By the scorers, before it is known what keys the rows see. */
static __device__ __forceinline__ latent_query read_latent_query(const attend_args *args, const attend_job *job,
                                                                 int32_t row0)
{
    latent_query query;
    const int32_t r = row0 + (int32_t)threadIdx.x / 8, token = divide_index(r, args->group);
    const bool is_row = r < job->num_rows;
    attend_row row = {};
    row.token = job->query_start + job->item.first_token + token;
    row.head = job->kv_head * job->group + r - token * job->group;
    const char *from = is_row ? query_row(&args->params, &row) + threadIdx.x % 8 * 16 : NULL;
#pragma unroll
    for (int panel = 0; panel < LATENT_PANELS; panel++)
        query.of[panel] = is_row ? *(const uint4 *)(from + panel * FV_PANEL_ROW_BYTES) : make_uint4(0, 0, 0, 0);
    return query;
}

/* Into panels, in the order of the keys' elements. */
template <int N>
static __device__ __forceinline__ void store_latent_query(few_latent_memory<N> *memory, const latent_query *query)
{
    const int32_t r = (int32_t)threadIdx.x / 8, chunk = threadIdx.x % 8;
    if (r >= N) return;
#pragma unroll
    for (int panel = 0; panel < LATENT_PANELS; panel++) {
        const uint4 &of = query->of[panel];
        const uint32_t words[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(uint32_t *)(memory->q[panel] + panel_offset(N, r, chunk / 4 * 4 + i) + chunk % 4 * 4) = words[i];
    }
}

template <class F>
static __device__ __forceinline__ void score_few_latents(few_latent_memory<F::ROWS> *memory, const attend_args *args,
                                                         const latent_query *query, int32_t group, int32_t origin,
                                                         int32_t num_tiles)
{
    constexpr int N = F::ROWS;
    store_latent_query<N>(memory, query);
    ptx_fence_proxy_async();
    wait_at_bar(&memory->bars, FEW_LATENT_BARRIER_SCORERS, FEW_LATENT_SCORERS);
    few_latent_state<N> state = {};
    const float scale = args->params.scale * memory->job.k_head_scale * FV_LOG2E; /* of scores, in base 2 */
    weigh_few_latents<F>(&state, memory, group, origin, num_tiles, scale, args->max_slack);
    wait_at_bar(&memory->bars, FEW_LATENT_BARRIER_SCORERS, FEW_LATENT_SCORERS);
    follow_latent_maxima<N>(&state, memory);
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float2 own = make_float2(sum_of_column(state.sums[0][i]), sum_of_column(state.sums[1][i]));
        if (threadIdx.x % 32 < 4) memory->ends.sums[threadIdx.x / 32][column_of_thread(i)] = own;
    }
    wait_at_bar(&memory->bars, FEW_LATENT_BARRIER_SCORERS, FEW_LATENT_SCORERS);
    end_few_latent_rows<N>(memory, args);
}

/* --- values ---------------------------------------------------------------------------------------------------- */

template <int N>
static __device__ __forceinline__ void move_latent_values(float (&out)[FEW_LATENT_BLOCKS][N / 2],
                                                          const few_latent_move<N> *move)
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float by = move->by[column_of_thread(i)];
#pragma unroll
        for (int block = 0; block < FEW_LATENT_BLOCKS; block++) {
            out[block][element_of_column(i, 0)] *= by;
            out[block][element_of_column(i, 1)] *= by;
        }
    }
}

/* Of each of a thread's four keys of a step eight elements, in pairs: pair i ^ l % 4 at i. */
typedef struct latent_pairs {
    uint32_t of[4][4];
} latent_pairs;

/* Keys 2 (l % 4), the next, and those eight further on; chunk l / 4 of 128 bytes: all banks. `offsets`: of the first
 * key's pairs. */
static __device__ __forceinline__ latent_pairs read_latent_pairs(const char *from, const int32_t (&offsets)[4])
{
    latent_pairs pairs;
#pragma unroll
    for (int key = 0; key < 4; key++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            pairs.of[key][i] = *(const uint32_t *)(from + offsets[i] + (key / 2 * 8 + key % 2) * FEW_LATENT_BYTES);
    }
    return pairs;
}

/* Operands of four blocks: rows l / 4 and the eighth after it of block b are elements 2 b and 2 b + 1. */
static __device__ __forceinline__ void take_latent_pairs(uint32_t (&a)[FEW_LATENT_BLOCKS][4], const latent_pairs *pairs)
{
    const bool swaps_pairs = threadIdx.x % 2 != 0, swaps_halves = threadIdx.x / 2 % 2 != 0;
    uint32_t of[4][4];
#pragma unroll
    for (int key = 0; key < 4; key++) {
        uint32_t by_half[4];
#pragma unroll
        for (int i = 0; i < 4; i++) by_half[i] = swaps_halves ? pairs->of[key][i ^ 2] : pairs->of[key][i];
#pragma unroll
        for (int i = 0; i < 4; i++) of[key][i] = swaps_pairs ? by_half[i ^ 1] : by_half[i];
    }
#pragma unroll
    for (int block = 0; block < FEW_LATENT_BLOCKS; block++) {
#pragma unroll
        for (int pair = 0; pair < 2; pair++) { /* of keys */
            a[block][2 * pair] = __byte_perm(of[2 * pair][block], of[2 * pair + 1][block], 0x5410);
            a[block][2 * pair + 1] = __byte_perm(of[2 * pair][block], of[2 * pair + 1][block], 0x7632);
        }
    }
}

/* Of a step of a tile, whose unit is awaited with its first. */
template <class Memory>
static __device__ __forceinline__ latent_pairs read_latent_step(Memory *memory, const int32_t (&offsets)[4],
                                                                int32_t first_unit, int step)
{
    const int32_t unit = first_unit + step / FEW_UNIT_STEPS, at = unit % FEW_UNITS;
    if (step % FEW_UNIT_STEPS == 0) ptx_mbarrier_wait(&memory->full[at], unit / FEW_UNITS % 2);
    return read_latent_pairs(memory->units[at] + step % FEW_UNIT_STEPS * 16 * FEW_LATENT_BYTES, offsets);
}

/* Behind a step whose operands are in registers: with its unit's last ones that is free. */
template <class Memory>
static __device__ __forceinline__ void leave_latent_step(Memory *memory, int32_t first_unit, int step)
{
    if (step % FEW_UNIT_STEPS < FEW_UNIT_STEPS - 1) return;
    __syncwarp();
    const int32_t unit = first_unit + step / FEW_UNIT_STEPS;
    if (arrives_for_warp()) ptx_mbarrier_arrive(&memory->empty[unit % FEW_UNITS]);
}

/* O^T of columns 256 group .. of all tiles: element 4 i + 2 half + c of block b: column 64 w + 8 (l / 4) + 2 b + half
 * of row 8 i + 2 (l % 4) + c. */
template <class F>
static __device__ __forceinline__ void attend_few_latents(float (&out)[FEW_LATENT_BLOCKS][F::ROWS / 2],
                                                          typename F::memory *memory, int32_t group, int32_t num_tiles)
{
    constexpr int NUM_P = F::memory::NUM_P, STEPS = LATENT_TILE / 16;
    constexpr int AHEAD = F::memory::VALUES_AHEAD ? STEPS : 0; /* steps whose operands are there before P */
    constexpr int BUFFERS = AHEAD > 0 ? AHEAD : 1;
    const int32_t lane = threadIdx.x % 32, panel = group * FEW_LATENT_BLOCKS + warp_of_group();
    int32_t offsets[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        offsets[i] = lane % 4 * 2 * FEW_LATENT_BYTES + panel * FV_PANEL_ROW_BYTES + lane / 4 * 16 + (lane % 4 ^ i) * 4;
    uint32_t a[BUFFERS][FEW_LATENT_BLOCKS][4];
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; tile++) {
        const int32_t p_buffer = tile % NUM_P, first_unit = tile * FEW_TILE_UNITS;
        const uint64_t p_at = ptx_anew(ptx_matrix_descriptor(memory->p[p_buffer], 16, 1024));
        latent_pairs next = read_latent_step(memory, offsets, first_unit, 0);
#pragma unroll
        for (int step = 0; step < AHEAD; step++) {
            take_latent_pairs(a[step], &next);
            if (step + 1 < STEPS) next = read_latent_step(memory, offsets, first_unit, step + 1);
            leave_latent_step(memory, first_unit, step);
        }
        ptx_mbarrier_wait(&memory->p_full[p_buffer], tile / NUM_P % 2);
        if (memory->move[p_buffer].is_needed) move_latent_values<F::ROWS>(out, &memory->move[p_buffer]);
#pragma unroll
        for (int block = 0; block < FEW_LATENT_BLOCKS; block++) ptx_wgmma_settle(out[block]);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const bool is_late = step >= AHEAD;
            if (is_late && step > 0) ptx_wgmma_wait<0>(); /* what is multiplied from the same registers */
            if (is_late) take_latent_pairs(a[step % BUFFERS], &next);
            if (is_late && step + 1 < STEPS) next = read_latent_step(memory, offsets, first_unit, step + 1);
            ptx_wgmma_fence();
#pragma unroll
            for (int block = 0; block < FEW_LATENT_BLOCKS; block++)
                multiply_columns<typename F::T>(out[block], a[step % BUFFERS][block],
                                                ptx_descriptor_at(p_at, step * 32), 1);
            ptx_wgmma_commit();
            if (is_late) leave_latent_step(memory, first_unit, step);
        }
        ptx_wgmma_wait<0>();
#pragma unroll
        for (int block = 0; block < FEW_LATENT_BLOCKS; block++) ptx_wgmma_settle(out[block]);
        __syncwarp();
        if (arrives_for_warp()) ptx_mbarrier_arrive(&memory->p_empty[p_buffer]);
    }
}

template <class F>
static __global__ void __launch_bounds__(FEW_LATENT_THREADS, 1)
    wgmma_few_latent_kernel(const __grid_constant__ attend_args args)
{
    constexpr int N = F::ROWS;
    PTX_DYNAMIC_SHARED(1024, shared);
    typename F::memory *memory = (typename F::memory *)shared;
    const int32_t row0 = latent_row_part(&args) * N, group = warpgroup_of_thread();
    const bool produces = group == FEW_LATENT_CONSUMERS / 128;
    int32_t num_early = 0; /* units that are asked for before rows are known: a trip to memory earlier, or two */
    latent_query query;
    if (threadIdx.x < FEW_LATENT_SCORERS) clear_latent_maxima<N>(memory);
    if (threadIdx.x == FEW_LATENT_THREADS - 32) init_few_latent_memory<N>(memory, &args);
    overlap_begin();
    if (produces) {
        const latent_source source = find_early_source(&args, row0, N);
        ptx_bar_sync(FEW_LATENT_BARRIER_PRODUCERS, FEW_LATENT_PRODUCERS * 32);
        num_early = bring_early_latents<N>(memory, &args, &source);
    } else {
        if (threadIdx.x == 0) memory->has_item = find_few_job(&memory->job, &args);
        ptx_bar_sync(FEW_LATENT_BARRIER_CONSUMERS, FEW_LATENT_CONSUMERS);
        if (memory->has_item && group < FEW_LATENT_SCORERS / 128) query = read_latent_query(&args, &memory->job, row0);
        if (memory->has_item && threadIdx.x < 32) find_few_latent_rows<N>(memory, &args, row0);
    }
    __syncthreads();
    if (!memory->has_item) return;
    if (is_split(&args)) ptx_cluster_arrive();
    const int32_t origin = first_latent_key(&memory->keys), num_tiles = count_latent_tiles(&memory->keys);
    if (produces) {
        ptx_give_registers<FEW_LATENT_PRODUCER_REGISTERS>();
        const latent_source source = {memory->job.table, memory->keys.first, memory->keys.end};
        bring_few_latents(memory, &args, &source, num_early, num_tiles * FEW_TILE_UNITS);
        if (is_split(&args)) ptx_cluster_wait();
    } else if (group < FEW_LATENT_SCORERS / 128) {
        ptx_take_registers<FEW_LATENT_SCORER_REGISTERS>();
        score_few_latents<F>(memory, &args, &query, group, origin, num_tiles);
    } else {
        ptx_take_registers<FEW_LATENT_VALUER_REGISTERS>();
        float out[FEW_LATENT_BLOCKS][N / 2] = {};
        attend_few_latents<F>(out, memory, group - FEW_LATENT_SCORERS / 128, num_tiles);
        store_few_latents<N>(out, memory, &args, group - FEW_LATENT_SCORERS / 128);
    }
}

template <class F> constexpr fv_cuda_attend_kernel wgmma_few_latent_of(void)
{
    return {
        .kernel = wgmma_few_latent_kernel<F>,
        .shared_bytes = (int32_t)sizeof(typename F::memory),
        .num_threads = FEW_LATENT_THREADS,
        .block_m = F::ROWS,
        .takes_row_parts = 1,
        .splits_items = 1,
        .narrows_partials = 1,
    };
}

#endif
