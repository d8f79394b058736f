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

#include "kernels/cuda/hopper/attend_latent.cuh"
#include "kernels/cuda/hopper/latent_columns.cuh"

enum {
    FEW_LATENT_BYTES = LATENT_HEAD * 2,
    FEW_UNIT = 32, /* latents that are there, and released, together */
    FEW_UNITS = 5,
    FEW_UNIT_BYTES = FEW_UNIT * FEW_LATENT_BYTES,
    FEW_TILE_UNITS = LATENT_TILE / FEW_UNIT,
    FEW_UNIT_STEPS = FEW_UNIT / 16, /* of the depth of a product of values; warps of a tile's scores */
    FEW_COPY_LANES = FEW_UNIT / 4,  /* of a warp of the producers: a lane for each copy of a unit, at most */
    FEW_LATENT_SCORER_REGISTERS = 96,
    FEW_LATENT_VALUER_REGISTERS = 128,
    FEW_LATENT_PRODUCER_REGISTERS = 32
};
static_assert(FEW_LATENT_BYTES % 128 == 0, "all latents begin in the same bank, and in a line of shared memory");

/* Roles of a block's threads: two warpgroups score, of every second tile each; two more multiply values, half of the
 * columns each; the last one brings keys. */
enum {
    FEW_LATENT_SCORERS = 256,
    FEW_LATENT_VALUERS = 256,
    FEW_LATENT_CONSUMERS = FEW_LATENT_SCORERS + FEW_LATENT_VALUERS,
    FEW_LATENT_PRODUCERS = 4, /* warps, the last warpgroup */
    FEW_LATENT_THREADS = FEW_LATENT_CONSUMERS + FEW_LATENT_PRODUCERS * 32,
    FEW_LATENT_BLOCKS = LATENT_VALUE / 2 / 64 /* products of 64 columns, of a warpgroup of valuers */
};

/* Barriers of threads, by their numbers; 0 is __syncthreads(). */
enum {
    FEW_LATENT_BARRIER_EVEN = 1, /* the first warpgroup has chosen what its tile's P is relative to */
    FEW_LATENT_BARRIER_ODD,      /* the second */
    FEW_LATENT_BARRIER_GROUP,    /* of the threads of the first, the next number of those of the second */
    FEW_LATENT_BARRIER_SCORERS = FEW_LATENT_BARRIER_GROUP + 2,
    FEW_LATENT_BARRIER_CONSUMERS,
    FEW_LATENT_BARRIER_PRODUCERS,
    FEW_LATENT_BARRIER_VALUERS /* of the threads of their first warpgroup, the next number of those of the second */
};

/* What the output moves by before a tile is added. */
template <int N> struct few_latent_move {
    float by[N];
    int32_t is_needed;
};

/* The ends of rows. */
template <int N> struct few_latent_ends {
    float2 sums[FEW_LATENT_SCORERS / 32][N]; /* of P, and of P as rounded */
    float largest[2][4][N];                  /* element that each warp of the valuers has, of rows in 16 bits */
    float by[2][N];                          /* what they are multiplied by, as each warpgroup of valuers finds it */
    char *targets[2][N];                     /* where the warpgroup's half of a row goes */
    float2 weights[N]; /* of two blocks that share an item's keys: of the block's own sums, of the other's */
};

template <int N> struct few_latent_memory {
    static constexpr int NUM_P = N <= 16 ? 2 : 1;
    union {
        alignas(1024) char q[LATENT_PANELS][N * FV_PANEL_ROW_BYTES];
        few_latent_ends<N> ends; /* when all scores are there */
    };
    alignas(1024) char p[NUM_P][N * FV_PANEL_ROW_BYTES];
    alignas(128) char units[FEW_UNITS][FEW_UNIT_BYTES];
    attend_row rows[N];
    alignas(16) float max[N];                                /* what the sums of a row are relative to */
    alignas(16) float known_max[FEW_LATENT_SCORERS / 32][N]; /* by the warps of the scorers: what theirs are */
    few_latent_move<N> move[NUM_P];
    alignas(16) float found_max[2][4][N]; /* by the warps of a warpgroup, in a tile */
    uint64_t full[FEW_UNITS], empty[FEW_UNITS];
    uint64_t p_full[NUM_P], p_empty[NUM_P];
    attend_keys keys;
    int32_t has_item;
    attend_job job;

    /* of two blocks that share an item's keys, what comes from the other */
    alignas(16) float4 sums_of_other[N]; /* maximum, sum, and sum of P as rounded, of its rows */
    uint64_t met;                        /* they are there */
    uint64_t inbox[4];                   /* a warp's part of its half of the output: inbox_of_warp() */
    uint64_t taken;                      /* word that it has the other half */
    float4 word;
};
static_assert(sizeof(few_latent_memory<16>) <= 227 * 1024 && sizeof(few_latent_memory<32>) <= 227 * 1024,
              "the shared memory of a block");

/* A kernel's form: the queries' dtype, and rows of a block. */
template <class Element, int NUM_ROWS> struct few_latent_form {
    typedef Element T;
    typedef few_latent_memory<NUM_ROWS> memory;
    static constexpr int ROWS = NUM_ROWS;
};

/* --- the block's rows ------------------------------------------------------------------------------------------ */

/* The block's item; of two blocks that share its keys, with its half of them. */
static __device__ __forceinline__ bool find_few_item(fv_work_item *item, const attend_args *args)
{
    const fv_attend_params *params = &args->params;
    if (!params->items) return find_item(item, args);
    const int32_t place = latent_place(args);
    if (place < 0) return false;
    *item = params->items[divide_index(place, args->row_parts)];
    if (is_split(args)) take_half(item);
    return true;
}

static __device__ __forceinline__ bool find_few_job(attend_job *job, const attend_args *args)
{
    fv_work_item item;
    if (!find_few_item(&item, args)) return false;
    const attend_lengths lengths = load_lengths(args, &item);
    *job = job_of(args, &item, item.first_kv_head, &lengths);
    return true;
}

/* A lane for each row of the block, and the keys that they have. */
template <int N>
static __device__ __forceinline__ void find_few_latent_rows(few_latent_memory<N> *memory, const attend_args *args,
                                                            int32_t row0)
{
    const int32_t r = (int32_t)threadIdx.x % 32;
    const attend_row row = row_of(args, &memory->job, r < N ? row0 + r : INT32_MAX);
    const bool is_row = r < N && row0 + r < memory->job.num_rows, has_keys = row.first < row.end;
    attend_keys keys;
    keys.first = __reduce_min_sync(~0u, has_keys ? row.first : INT32_MAX);
    keys.end = __reduce_max_sync(~0u, has_keys ? row.end : 0);
    keys.full_first = __reduce_max_sync(~0u, is_row ? row.first : 0);
    keys.full_end = __reduce_min_sync(~0u, is_row ? row.end : INT32_MAX);
    if (r < N) memory->rows[r] = row;
    if (r == 0) memory->keys = keys;
    __syncwarp();
}

/* --- producers ------------------------------------------------------------------------------------------------- */

/* The keys to bring, of a sequence's table: all others are a neighbour's, whose latents weigh nothing there. */
typedef struct latent_source {
    const int32_t *table;
    int32_t first, end;
} latent_source;

/* Known before the block's rows: of an item whose one token is its sequence's last, as in decode, all keys that there
 * are. In other cases none. */
static __device__ __forceinline__ latent_source find_early_source(const attend_args *args, int32_t row0)
{
    const fv_attend_params *params = &args->params;
    latent_source source = {NULL, 0, 0};
    fv_work_item item;
    if (params->window > 0 || params->context_parallel.world > 1 || row0 >= (int32_t)args->group.by) return source;
    if (!find_few_item(&item, args) || item.num_tokens != 1) return source;
    if (item.first_token + 1 != item.query_end - item.query_start) return source;
    source.table = params->block_table + item.table_row * params->block_table_stride;
    source.first = item.first_key;
    source.end = fv_max_i32(item.first_key, fv_min_i32(item.end_key, item.seq_len));
    return source;
}

static __device__ __forceinline__ int32_t count_few_units(const latent_source *source)
{
    const int32_t first_tile = source->first / LATENT_TILE, end_tile = (source->end + LATENT_TILE - 1) / LATENT_TILE;
    return source->first < source->end ? (end_tile - first_tile) * FEW_TILE_UNITS : 0;
}

/* A lane's copy of one of a tile's units, of which the table is asked a tile ahead. */
typedef struct latent_copy {
    int32_t page, slot;
    int32_t key;  /* of the unit, its first; FEW_UNIT: none */
    int32_t keys; /* that it has */
} latent_copy;

/* Runs, or one by one where some of the unit's keys are a neighbour's. `unit`: that of the first lanes. */
static __device__ __forceinline__ latent_copy find_latent_copy(const latent_source *source, const attend_args *args,
                                                               int32_t unit, int32_t run)
{
    const int32_t lane = (int32_t)threadIdx.x % 32, warp = warp_of_group();
    const int32_t first = source->first / LATENT_TILE * LATENT_TILE + (unit + lane / FEW_COPY_LANES) * FEW_UNIT;
    const bool is_inside = first >= source->first && first + FEW_UNIT <= source->end;
    latent_copy copy = {0, 0, FEW_UNIT, is_inside ? run : 1};
    const int32_t of_warp = lane % FEW_COPY_LANES * copy.keys;
    if (lane < FEW_TILE_UNITS * FEW_COPY_LANES && of_warp < FEW_COPY_LANES)
        copy.key = fv_min_i32(warp * fv_max_i32(FEW_COPY_LANES, copy.keys) + of_warp, FEW_UNIT);
    const int32_t key = first + fv_min_i32(copy.key, FEW_UNIT - 1);
    const int2 at = split_key(args, fv_max_i32(source->first, fv_min_i32(key, source->end - 1)));
    copy.page = source->table[at.x];
    copy.slot = at.y;
    return copy;
}

/* Units first .. end - 1, as many as a tile has at a time. Bytes of the other warps may be there before the first one
 * has said how many are expected: the phase ends behind that. */
template <int N>
static __device__ __forceinline__ void bring_few_latents(few_latent_memory<N> *memory, const attend_args *args,
                                                         const latent_source *source, int32_t first, int32_t end)
{
    if (first >= end) return;
    const fv_kv_plane *plane = &args->k[0].plane;
    const int32_t run = find_run_latents(args, FEW_LATENT_BYTES, FEW_UNIT);
    latent_copy next = find_latent_copy(source, args, first, run);
#pragma unroll 1
    for (int32_t unit = first; unit < end; unit += FEW_TILE_UNITS) {
        const latent_copy copy = next;
        const char *from = (const char *)plane->data + copy.page * plane->block_stride + copy.slot * plane->slot_stride;
        next = find_latent_copy(source, args, unit + FEW_TILE_UNITS, run);
        /* A warp without a copy does not lead by a phase; nor does it wait, for without its bytes the unit may come and
         * be gone before. */
        ptx_bar_sync(FEW_LATENT_BARRIER_PRODUCERS, FEW_LATENT_PRODUCERS * 32);
#pragma unroll
        for (int i = 0; i < FEW_TILE_UNITS; i++) {
            const int32_t at = (unit + i) % FEW_UNITS;
            if (unit + i >= end) break;
            const bool copies = threadIdx.x % 32 / FEW_COPY_LANES == i && copy.key < FEW_UNIT;
            if (!__any_sync(~0u, copies)) continue;
            ptx_mbarrier_wait(&memory->empty[at], ((unit + i) / FEW_UNITS + 1) % 2);
            if (threadIdx.x == FEW_LATENT_CONSUMERS) ptx_mbarrier_expect(&memory->full[at], FEW_UNIT_BYTES);
            __syncwarp();
            if (copies)
                ptx_bulk_load(memory->units[at] + copy.key * FEW_LATENT_BYTES, from, copy.keys * FEW_LATENT_BYTES,
                              &memory->full[at]);
            __syncwarp();
        }
    }
}

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
    const bool is_odd = threadIdx.x / 4 % 2 != 0;
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
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        if (state->max[i] != before[i]) move_column_sums(state, i, ptx_ex2(before[i] - state->max[i]));
        if (threadIdx.x % 32 < 4) known[column_of_thread(i)] = state->max[i];
    }
    __syncwarp();
}

/* Does a score pass what its row's sums are relative to by too much? */
template <int N>
static __device__ __forceinline__ bool exceeds_latent_maxima(const float (&s)[N / 2], const few_latent_state<N> *state)
{
    bool exceeds = false;
#pragma unroll
    for (int i = 0; i < N / 4; i++)
        exceeds = exceeds ||
                  fmaxf(s[element_of_column(i, 0)], s[element_of_column(i, 1)]) > state->max[i] + FV_MAX_SLACK;
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
    ptx_bar_sync(FEW_LATENT_BARRIER_GROUP + group, 128);
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
                                                           few_latent_memory<N> *memory, int32_t tile)
{
    few_latent_move<N> *output = &memory->move[tile % few_latent_memory<N>::NUM_P];
    const bool tells = threadIdx.x % 128 < 4;
    wait_for_weights_space(memory, tile);
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float before = state->max[i];
        const float now = max[i] > before + FV_MAX_SLACK ? max[i] : before;
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
        const float2 rounded = widen_pair<typename F::T>(p[i]);
        state->sums[1][i / 2 * 2] += rounded.x;
        state->sums[1][i / 2 * 2 + 1] += rounded.y;
    }
    store_columns<F::ROWS>(memory->p[buffer], p);
}

/* Tiles group, group + 2, ... */
template <class F>
static __device__ __forceinline__ void weigh_few_latents(few_latent_state<F::ROWS> *state, typename F::memory *memory,
                                                         int32_t group, int32_t origin, int32_t num_tiles, float scale)
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
#pragma unroll
        for (int i = 0; i < N / 2; i++) s[i] *= scale;
        if (tile_first < memory->keys.full_first || tile_first + LATENT_TILE > memory->keys.full_end)
            mask_columns<N>(s, memory->rows, tile_first);
        if (tile > 0) ptx_bar_sync(FEW_LATENT_BARRIER_ODD - group, FEW_LATENT_SCORERS);
        follow_latent_maxima<N>(state, memory);
        const bool raises = ptx_bar_any(FEW_LATENT_BARRIER_GROUP + group, 128, exceeds_latent_maxima<N>(s, state));
        if (raises) {
            float max[N / 4];
            find_latent_maxima<N>(max, s, memory, group);
            raise_latent_maxima<N>(state, max, memory, tile);
        }
        if (tile + 1 < num_tiles) ptx_bar_arrive(FEW_LATENT_BARRIER_EVEN + group, FEW_LATENT_SCORERS);
        exponentiate_few_latents<N>(s, state);
        wait_for_weights_space(memory, tile);
        if (threadIdx.x % 128 == 0) memory->move[p_buffer].is_needed = raises;
        store_latent_weights<F>(memory, s, state, p_buffer);
        ptx_fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx_mbarrier_arrive(&memory->p_full[p_buffer]);
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
    ptx_bar_sync(FEW_LATENT_BARRIER_SCORERS, FEW_LATENT_SCORERS);
    few_latent_state<N> state = {};
    const float scale = args->params.scale * memory->job.k_head_scale * FV_LOG2E; /* of scores, in base 2 */
    weigh_few_latents<F>(&state, memory, group, origin, num_tiles, scale);
    ptx_bar_sync(FEW_LATENT_BARRIER_SCORERS, FEW_LATENT_SCORERS);
    follow_latent_maxima<N>(&state, memory);
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float2 own = make_float2(sum_of_column(state.sums[0][i]), sum_of_column(state.sums[1][i]));
        if (threadIdx.x % 32 < 4) memory->ends.sums[threadIdx.x / 32][column_of_thread(i)] = own;
    }
    ptx_bar_arrive(FEW_LATENT_BARRIER_CONSUMERS, FEW_LATENT_CONSUMERS);
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

/* O^T of columns 256 group .. of all tiles: element 4 i + 2 half + c of block b: column 64 w + 8 (l / 4) + 2 b + half
 * of row 8 i + 2 (l % 4) + c. A unit is released when its last operands are in registers. */
template <class F>
static __device__ __forceinline__ void attend_few_latents(float (&out)[FEW_LATENT_BLOCKS][F::ROWS / 2],
                                                          typename F::memory *memory, int32_t group, int32_t num_tiles)
{
    constexpr int NUM_P = F::memory::NUM_P, BUFFERS = F::ROWS <= 16 ? 2 : 1; /* of operands, which take registers */
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
        ptx_mbarrier_wait(&memory->full[first_unit % FEW_UNITS], first_unit / FEW_UNITS % 2);
        latent_pairs next = read_latent_pairs(memory->units[first_unit % FEW_UNITS], offsets);
        ptx_mbarrier_wait(&memory->p_full[p_buffer], tile / NUM_P % 2);
        if (memory->move[p_buffer].is_needed) move_latent_values<F::ROWS>(out, &memory->move[p_buffer]);
#pragma unroll
        for (int block = 0; block < FEW_LATENT_BLOCKS; block++) ptx_wgmma_settle(out[block]);
#pragma unroll
        for (int step = 0; step < LATENT_TILE / 16; step++) {
            const int32_t unit = first_unit + step / FEW_UNIT_STEPS;
            if (step >= BUFFERS) ptx_wgmma_wait<BUFFERS - 1>(); /* what is multiplied from the same registers */
            take_latent_pairs(a[step % BUFFERS], &next);
            if (step + 1 < LATENT_TILE / 16) {
                const int32_t next_unit = first_unit + (step + 1) / FEW_UNIT_STEPS, at = next_unit % FEW_UNITS;
                if (next_unit != unit) ptx_mbarrier_wait(&memory->full[at], next_unit / FEW_UNITS % 2);
                next = read_latent_pairs(memory->units[at] + (step + 1) % FEW_UNIT_STEPS * 16 * FEW_LATENT_BYTES,
                                         offsets);
            }
            ptx_wgmma_fence();
#pragma unroll
            for (int block = 0; block < FEW_LATENT_BLOCKS; block++)
                multiply_columns<typename F::T>(out[block], a[step % BUFFERS][block],
                                                ptx_descriptor_at(p_at, step * 32), 1);
            ptx_wgmma_commit();
            if (step % FEW_UNIT_STEPS == FEW_UNIT_STEPS - 1) {
                __syncwarp();
                if (lane == 0) ptx_mbarrier_arrive(&memory->empty[unit % FEW_UNITS]);
            }
        }
        ptx_wgmma_wait<0>();
#pragma unroll
        for (int block = 0; block < FEW_LATENT_BLOCKS; block++) ptx_wgmma_settle(out[block]);
        __syncwarp();
        if (lane == 0) ptx_mbarrier_arrive(&memory->p_empty[p_buffer]);
    }
}

/* Maximum, sum, and sum of P as rounded, of a row, from the scorers. */
template <int N>
static __device__ __forceinline__ float4 sum_few_latent_row(const few_latent_memory<N> *memory, int32_t r)
{
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int warp = 0; warp < FEW_LATENT_SCORERS / 32; warp++) {
        const float2 part = memory->ends.sums[warp][r];
        sum = make_float2(sum.x + part.x, sum.y + part.y);
    }
    return make_float4(memory->max[r], sum.x, sum.y, 0);
}

/* Bytes from one staged row to the next: lanes meet no bank twice. */
static __device__ __forceinline__ constexpr int32_t staged_row_bytes(int32_t element_bytes)
{
    return LATENT_VALUE / 2 * element_bytes + 16;
}

/* --- two blocks of an item: the first ends the first valuers' columns, the second the second's -------------------- */

/* What a warp of the other block's valuers sends: 16 bytes of each lane after the other. In the place of units, behind
 * what both warpgroups stage. */
template <int N> constexpr int32_t few_part_bytes = FEW_LATENT_BLOCKS * N / 2 * 4 * 32;
static_assert(2 * 32 * staged_row_bytes(4) + 4 * few_part_bytes<32> <= FEW_UNITS * FEW_UNIT_BYTES,
              "rows are staged, and come from the other block, in the place of units");

template <int N> static __device__ __forceinline__ char *inbox_of_warp(few_latent_memory<N> *memory, int32_t warp)
{
    return (char *)memory->units + 2 * N * staged_row_bytes(4) + warp * few_part_bytes<N>;
}

/* The warp's part of the output, relative to the block's own maxima, goes to the other block when that has sent its
 * sums, too: then it has no units any more. The block stays until it is there. */
template <int N>
static __device__ __forceinline__ void give_few_latents(const float (&out)[FEW_LATENT_BLOCKS][N / 2],
                                                        few_latent_memory<N> *memory, int32_t group)
{
    const uint32_t other_rank = ~blockIdx.x % 2;
    const int32_t warp = warp_of_group(), lane = threadIdx.x % 32, r = threadIdx.x % 128;
    char *staged = memory->units[0] + group * N * staged_row_bytes(4) + warp * few_part_bytes<N>;
    ptx_cluster_wait(); /* its barriers are there */
    if (r < N)
        ptx_store_async_16(ptx_shared_address_in(&memory->sums_of_other[r], other_rank), sum_few_latent_row(memory, r),
                           ptx_shared_address_in(&memory->met, other_rank));
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
#pragma unroll
        for (int block = 0; block < FEW_LATENT_BLOCKS; block++)
            *(float4 *)(staged + ((i * FEW_LATENT_BLOCKS + block) * 32 + lane) * 16) =
                make_float4(out[block][4 * i], out[block][4 * i + 1], out[block][4 * i + 2], out[block][4 * i + 3]);
    }
    ptx_fence_proxy_async();
    ptx_mbarrier_wait(&memory->met, 0);
    __syncwarp();
    if (ptx_elect())
        ptx_bulk_send(ptx_shared_address_in(inbox_of_warp(memory, warp), other_rank), staged, few_part_bytes<N>,
                      ptx_shared_address_in(&memory->inbox[warp], other_rank));
    __syncwarp();
    ptx_mbarrier_wait(&memory->taken, 0);
}

/* A row's sums go over to the keys of both blocks; what each weighs. By a thread for each row. */
template <int N>
static __device__ __forceinline__ float4 take_few_latent_sums(few_latent_memory<N> *memory, const float4 &sums,
                                                              int32_t r)
{
    ptx_mbarrier_wait(&memory->met, 0);
    const float4 other = memory->sums_of_other[r];
    const float max = fmaxf(sums.x, other.x), base = max == -INFINITY ? 0.0f : max;
    const float weight = ptx_ex2(sums.x - base), of_other = ptx_ex2(other.x - base);
    memory->ends.weights[r] = make_float2(weight, of_other);
    return make_float4(max, weight * sums.y + of_other * other.y, weight * sums.z + of_other * other.z, 0);
}

/* The warp's part of the output goes over to the keys of both. */
template <int N>
static __device__ __forceinline__ void take_few_latents(float (&out)[FEW_LATENT_BLOCKS][N / 2],
                                                        few_latent_memory<N> *memory)
{
    const uint32_t other_rank = ~blockIdx.x % 2;
    const int32_t warp = warp_of_group(), lane = threadIdx.x % 32;
    const char *from = inbox_of_warp(memory, warp) + lane * 16;
    ptx_mbarrier_wait(&memory->inbox[warp], 0);
    if (ptx_elect())
        ptx_store_async_16(ptx_shared_address_in(&memory->word, other_rank), make_float4(0, 0, 0, 0),
                           ptx_shared_address_in(&memory->taken, other_rank));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
        const float2 even = memory->ends.weights[column_of_thread(2 * i)];
        const float2 odd = memory->ends.weights[column_of_thread(2 * i + 1)];
#pragma unroll
        for (int block = 0; block < FEW_LATENT_BLOCKS; block++) {
            const float4 other = *(const float4 *)(from + (i * FEW_LATENT_BLOCKS + block) * 32 * 16);
            float *own = &out[block][4 * i];
            own[0] = own[0] * even.x + other.x * even.y;
            own[1] = own[1] * odd.x + other.y * odd.y;
            own[2] = own[2] * even.x + other.z * even.y;
            own[3] = own[3] * odd.x + other.w * odd.y;
        }
    }
}

/* --- the end of the rows ----------------------------------------------------------------------------------------- */

/* The largest element of each row, of the warp's columns: for all of them, behind a barrier. */
template <int N>
static __device__ __forceinline__ void keep_largest_latents(few_latent_memory<N> *memory,
                                                            const float (&out)[FEW_LATENT_BLOCKS][N / 2], int32_t group)
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        float largest = FV_NARROW_LEAST;
#pragma unroll
        for (int block = 0; block < FEW_LATENT_BLOCKS; block++) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                largest = ptx_max_or_nan(largest, fabsf(out[block][element_of_column(i, half)]));
        }
#pragma unroll
        for (int step = 4; step < 32; step *= 2) largest = ptx_max_or_nan(largest, __shfl_xor_sync(~0u, largest, step));
        if (threadIdx.x % 32 < 4) memory->ends.largest[group][threadIdx.x / 32 % 4][column_of_thread(i)] = largest;
    }
}

/* The scale of the warpgroup's half of row `r`, from its warps' largest elements: to the row's slot, with maximum and
 * sum. */
template <int N>
static __device__ __forceinline__ void narrow_few_row(few_latent_memory<N> *memory, const attend_args *args, int32_t r,
                                                      int32_t group, const attend_end *end)
{
    float largest = memory->ends.largest[group][0][r];
#pragma unroll
    for (int warp = 1; warp < 4; warp++) largest = ptx_max_or_nan(largest, memory->ends.largest[group][warp][r]);
    store_narrow_tail(narrow_row(args->params.partial_out, end->partial, LATENT_VALUE), group,
                      narrow_scale_of(largest, end->out_factor), end);
    memory->ends.by[group][r] = narrow_inverse_of(largest);
}

/* Of all rows, when what came from the other block is added. */
template <int N>
static __device__ __forceinline__ void narrow_few_rows(few_latent_memory<N> *memory,
                                                       const float (&out)[FEW_LATENT_BLOCKS][N / 2],
                                                       const attend_args *args, int32_t group, const attend_end *end)
{
    keep_largest_latents<N>(memory, out, group);
    ptx_bar_sync(FEW_LATENT_BARRIER_VALUERS + group, 128);
    if (end->partial >= 0) narrow_few_row<N>(memory, args, threadIdx.x % 128, group, end);
    ptx_bar_sync(FEW_LATENT_BARRIER_VALUERS + group, 128);
}

/* The ends of all rows, from the sums of the scorers: where they go and what they are multiplied by. That of the
 * thread's own row is returned; others: of no place. */
template <int N>
static __device__ __forceinline__ attend_end end_few_latent_rows(few_latent_memory<N> *memory, const attend_args *args,
                                                                 int32_t row0, int32_t group, int32_t bytes,
                                                                 bool narrows)
{
    const attend_job *job = &memory->job;
    const int32_t r = threadIdx.x % 128;
    attend_end end = {-INFINITY, 0, 0, -1, 0};
    if (r < N) {
        char *to = NULL;
        float4 sums = sum_few_latent_row(memory, r);
        if (is_split(args)) sums = take_few_latent_sums(memory, sums, r);
        if (row0 + r < job->num_rows) {
            const attend_row *row = &memory->rows[r];
            end = end_row(args, job, row, sums.x, sums.y, factor_of_values(job, sums.y, sums.z));
            to = place_latent_row(args, row, &end, narrows) + group * bytes;
            if (group == 0 && !narrows) store_sums(args, row, &end);
        }
        memory->ends.by[group][r] = end.out_factor;
        memory->ends.targets[group][r] = to;
        if (narrows && end.partial >= 0 && !is_split(args)) narrow_few_row<N>(memory, args, r, group, &end);
    }
    ptx_bar_sync(FEW_LATENT_BARRIER_VALUERS + group, 128);
    return end;
}

/* The thread's part of the output as its ends have it, to shared memory, a row of the output after the other. */
template <class T, int N>
static __device__ __forceinline__ void stage_few_latents(const float (&out)[FEW_LATENT_BLOCKS][N / 2], char *staged,
                                                         const float *by_of_rows)
{
    constexpr int32_t BYTES = (int32_t)sizeof(T), ROW_BYTES = staged_row_bytes(BYTES);
    char *to = staged + threadIdx.x % 4 * 2 * ROW_BYTES +
               (warp_of_group() * 64 + (int32_t)threadIdx.x % 32 / 4 * 8) * BYTES;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float by = by_of_rows[column_of_thread(i)];
        char *at = to + (i / 2 * 8 + i % 2) * ROW_BYTES;
        float of[FEW_LATENT_BLOCKS][2]; /* neighbours */
#pragma unroll
        for (int block = 0; block < FEW_LATENT_BLOCKS; block++) {
#pragma unroll
            for (int half = 0; half < 2; half++) /* no key: 0, whatever the sums are */
                of[block][half] = by == 0 ? 0.0f : out[block][element_of_column(i, half)];
        }
        if constexpr (BYTES == 4) {
            *(float4 *)at = make_float4(of[0][0] * by, of[0][1] * by, of[1][0] * by, of[1][1] * by);
            *(float4 *)(at + 16) = make_float4(of[2][0] * by, of[2][1] * by, of[3][0] * by, of[3][1] * by);
        } else {
            *(uint4 *)at = make_uint4(latent_pair<T>(of[0][0], of[0][1], by), latent_pair<T>(of[1][0], of[1][1], by),
                                      latent_pair<T>(of[2][0], of[2][1], by), latent_pair<T>(of[3][0], of[3][1], by));
        }
    }
}

/* The output of the block's rows, by way of the latents' place, of which each warpgroup has its own. */
template <int N>
static __device__ __forceinline__ void store_few_latents(float (&out)[FEW_LATENT_BLOCKS][N / 2],
                                                         few_latent_memory<N> *memory, const attend_args *args,
                                                         int32_t row0, int32_t group)
{
    const bool is_partial = memory->job.item.partial >= 0, narrows = is_partial && narrows_partials(&args->params);
    const fv_dtype dtype = is_partial ? FV_DTYPE_F32 : args->params.out_dtype;
    const int32_t element_bytes = dtype == FV_DTYPE_F32 && !narrows ? 4 : 2, bytes = LATENT_VALUE / 2 * element_bytes;
    const int32_t row_bytes = staged_row_bytes(element_bytes);
    char *staged = memory->units[0] + group * N * staged_row_bytes(4);
    const bool splits = is_split(args);
    if (narrows && !splits) keep_largest_latents<N>(memory, out, group);
    ptx_bar_sync(FEW_LATENT_BARRIER_CONSUMERS, FEW_LATENT_CONSUMERS);
    if (splits) {
        if (group != (int32_t)blockIdx.x % 2) return give_few_latents<N>(out, memory, group);
        ptx_cluster_wait();
    }
    const attend_end end = end_few_latent_rows<N>(memory, args, row0, group, bytes, narrows);
    if (splits) take_few_latents<N>(out, memory);
    if (splits && narrows) narrow_few_rows<N>(memory, out, args, group, &end);
    const float *by = memory->ends.by[group];
    if (narrows)
        stage_few_latents<int16_t, N>(out, staged, by);
    else if (dtype == FV_DTYPE_F32)
        stage_few_latents<float, N>(out, staged, by);
    else if (dtype == FV_DTYPE_F16)
        stage_few_latents<__half, N>(out, staged, by);
    else
        stage_few_latents<__nv_bfloat16, N>(out, staged, by);
    ptx_fence_proxy_async();
    ptx_bar_sync(FEW_LATENT_BARRIER_VALUERS + group, 128);
    const int32_t lane = threadIdx.x % 32, first_row = warp_of_group() * (N / 4);
    char *to = lane < N / 4 ? memory->ends.targets[group][first_row + lane] : NULL;
    send_latent_rows(to, staged + first_row * row_bytes, row_bytes, bytes);
    ptx_bulk_wait_read();
}

template <int N>
static __device__ __forceinline__ void init_few_latent_memory(few_latent_memory<N> *memory, const attend_args *args)
{
    for (int32_t i = 0; i < FEW_UNITS; i++) {
        ptx_mbarrier_init(&memory->full[i], 1);
        ptx_mbarrier_init(&memory->empty[i], FEW_LATENT_VALUERS / 32);
    }
    for (int32_t i = 0; i < few_latent_memory<N>::NUM_P; i++) {
        ptx_mbarrier_init(&memory->p_full[i], 4);
        ptx_mbarrier_init(&memory->p_empty[i], FEW_LATENT_VALUERS / 32);
    }
    ptx_mbarrier_init(&memory->met, 1);
    ptx_mbarrier_init(&memory->taken, 1);
    for (int32_t warp = 0; warp < 4; warp++) ptx_mbarrier_init(&memory->inbox[warp], 1);
    ptx_fence_mbarrier_init();
    if (!is_split(args)) return;
    ptx_mbarrier_expect(&memory->met, N * sizeof(float4));
    ptx_mbarrier_expect(&memory->taken, 4 * sizeof(float4));
    for (int32_t warp = 0; warp < 4; warp++) ptx_mbarrier_expect(&memory->inbox[warp], few_part_bytes<N>);
}

template <class F>
static __global__ void __launch_bounds__(FEW_LATENT_THREADS, 1)
    wgmma_few_latent_kernel(const __grid_constant__ attend_args args)
{
#if FV_HAS_WGMMA
    constexpr int N = F::ROWS;
    extern __shared__ __align__(1024) char shared[];
    typename F::memory *memory = (typename F::memory *)shared;
    const int32_t row0 = latent_row_part(&args) * N, group = warpgroup_of_thread();
    const bool produces = group == FEW_LATENT_CONSUMERS / 128;
    int32_t num_early = 0; /* units that are asked for before rows are known: a trip to memory earlier, or two */
    latent_query query;
    if (threadIdx.x < FEW_LATENT_SCORERS) clear_latent_maxima<N>(memory);
    if (threadIdx.x == FEW_LATENT_CONSUMERS) init_few_latent_memory<N>(memory, &args);
    overlap_begin();
    if (produces) {
        ptx_bar_sync(FEW_LATENT_BARRIER_PRODUCERS, FEW_LATENT_PRODUCERS * 32);
        const latent_source source = find_early_source(&args, row0);
        num_early = fv_min_i32(FEW_UNITS, count_few_units(&source));
        bring_few_latents<N>(memory, &args, &source, 0, num_early);
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
        if (is_split(&args)) ptx_cluster_wait();
    } else {
        ptx_take_registers<FEW_LATENT_VALUER_REGISTERS>();
        float out[FEW_LATENT_BLOCKS][N / 2] = {};
        attend_few_latents<F>(out, memory, group - FEW_LATENT_SCORERS / 128, num_tiles);
        store_few_latents<N>(out, memory, &args, row0, group - FEW_LATENT_SCORERS / 128);
    }
#endif
}

template <class F> constexpr fv_cuda_attend_kernel wgmma_few_latent_of(void)
{
    return {wgmma_few_latent_kernel<F>, (int32_t)sizeof(typename F::memory), FEW_LATENT_THREADS, F::ROWS, 1};
}

#endif
