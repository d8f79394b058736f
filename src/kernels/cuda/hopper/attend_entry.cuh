/* MLA decode over the 656-byte entry on Hopper (wgmma), N rows of queries (16, 32 or 64): keys, and then columns of the
 * values, are the 64 rows of a product, the queries its N columns, so no tensor core multiplies empty rows. Why:
 * docs/cuda/mla_decode.md.
 *
 *   entry   512 e4m3 | 4 scales, one for 128 elements each | 64 bf16 for RoPE; in shared memory as in the cache
 *   S^T     = s0 (K0 Q0^T) + s1 (K1 Q1^T) + s2 (K2 Q2^T) + s3 (K3 Q3^T) + Kr Qr^T
 *   O^T_g  += (s_g V_g)^T P^T
 *
 * The left operand comes from registers, so entries go from their bytes to the tensor cores without panels in between:
 * e4m3 is exact in fp16, and of entries nothing but bytes is written to shared memory. Queries are fp16 for the latents: a
 * row of bf16 times a power of two loses nothing that fp32 sums would keep. Roles:
 *
 *   four warps                       bring tiles of 64 entries by the copy engine, as far ahead as tiles are held
 *   two warpgroups; one of 64 rows   S^T and softmax, of every second tile each, or of all; P to shared memory
 *   two more                         O^T, half of the columns each: 64 of them for N / 2 registers of a thread
 *
 * What a row's sums are relative to, and the unit of scales, are chosen tile by tile, so two warpgroups of scores pass them
 * on to each other; most tiles change neither, which a barrier's vote says. */
#ifndef FV_KERNELS_CUDA_HOPPER_ATTEND_ENTRY_CUH
#define FV_KERNELS_CUDA_HOPPER_ATTEND_ENTRY_CUH

#include <float.h>

#include "kernels/cuda/hopper/attend_latent.cuh"
#include "kernels/cuda/hopper/latent_columns.cuh"

enum {
    ENTRY_GROUPS = FV_DS_LATENT / FV_DS_TILE, /* of elements that share a scale */
    ENTRY_TILE_BYTES = (int32_t)LATENT_TILE * (int32_t)FV_DS_ENTRY_BYTES,
    ENTRY_P = 2,         /* tiles whose P has a place */
    ENTRY_VALUERS = 256, /* threads; two warpgroups, behind those of the scorers */
    ENTRY_PRODUCERS = 4, /* warps, the last warpgroup */
    ENTRY_PRODUCER_REGISTERS = 24,
    ENTRY_ROPE_STEPS = FV_DS_ROPE / 16, /* products 16 deep, of S^T */
    ENTRY_GROUP_STEPS = FV_DS_TILE / 16,
    ENTRY_CHUNK_STEPS = 4 /* for which a chunk of 16 e4m3 is enough */
};

/* What fp16 holds, 2^-24 to 2^15, is for P, and for the values of a key times its scales. What a row's sums are relative to
 * lies ENTRY_HEADROOM below the largest score that it was chosen by, so P is up to 2^12; scales are in units, powers of two,
 * up to ENTRY_LARGEST_SCALE of them. */
#define ENTRY_HEADROOM 4.0f
#define ENTRY_FIRST_UNIT 0x1p-100f
#define ENTRY_LARGEST_SCALE 8.0f

/* Barriers of threads, by their numbers; 0 is __syncthreads(). */
enum {
    ENTRY_BARRIER_EVEN = 1, /* the first warpgroup has chosen what its tile's P is relative to */
    ENTRY_BARRIER_ODD,      /* the second */
    ENTRY_BARRIER_GROUP,    /* of the threads of the first, the next number of those of the second */
    ENTRY_BARRIER_SCORERS = ENTRY_BARRIER_GROUP + 2,
    ENTRY_BARRIER_VALUERS,
    ENTRY_BARRIER_QUERIES, /* are there; not the next one, which valuers without tiles reach before scorers pass this one */
    ENTRY_BARRIER_CONSUMERS,
    ENTRY_BARRIER_PRODUCERS
};

/* What the sums of a row without keys are relative to: no infinity, so what follows needs no case for it. */
#define ENTRY_NO_MAX (-FLT_MAX)

/* Of a block of N rows. The output of 64 takes half of all registers, and leaves scores to one warpgroup. */
template <int N> struct entry_shape {
    static constexpr int SCORER_GROUPS = N <= 32 ? 2 : 1, TILES = N <= 32 ? 4 : 3;
    static constexpr int SCORERS = SCORER_GROUPS * 128; /* threads, the first of a block */
    static constexpr int CONSUMERS = SCORERS + ENTRY_VALUERS, THREADS = CONSUMERS + ENTRY_PRODUCERS * 32;
    static constexpr int SCORER_REGISTERS = N <= 32 ? 104 : 136, VALUER_REGISTERS = N <= 32 ? 120 : 176;
    static_assert(SCORER_REGISTERS * SCORER_GROUPS + VALUER_REGISTERS * 2 + ENTRY_PRODUCER_REGISTERS <=
                      65536 / THREADS / 8 * 8 * (THREADS / 128),
                  "what warpgroups take, others gave");
};

/* What the output moves by before a tile is added. */
template <int N> struct entry_move {
    alignas(8) float by[N];
    int32_t is_needed;
};

template <int N> struct entry_memory {
    typedef entry_shape<N> shape;
    alignas(1024) char q[LATENT_PANELS][N * FV_PANEL_ROW_BYTES];
    alignas(1024) char p[ENTRY_P][N * FV_PANEL_ROW_BYTES];
    alignas(128) char tiles[shape::TILES][ENTRY_TILE_BYTES];
    alignas(16) __half scales[ENTRY_P][ENTRY_GROUPS][LATENT_TILE]; /* of P's tile, in units */
    attend_row rows[N];
    alignas(16) float max[N];                            /* what the sums of a row are relative to */
    alignas(16) float known_max[shape::SCORERS / 32][N]; /* by the warps of the scorers: what theirs are */
    entry_move<N> move[ENTRY_P];
    alignas(16) float found_max[2][4][N]; /* by the warps of a warpgroup, in a tile */
    alignas(16) float found_scale[2][4];
    alignas(16) float sums[shape::SCORERS / 32][N];
    uint64_t full[shape::TILES], empty[shape::TILES];
    uint64_t p_full[ENTRY_P], p_empty[ENTRY_P];
    uint64_t scored[2]; /* where one warpgroup has all scores: of every second tile they are done */
    float inverse_unit;
    uint32_t largest_query;
    attend_keys keys;
    int32_t has_item;
    attend_job job;
};
static_assert(sizeof(entry_memory<16>) <= 227 * 1024 && sizeof(entry_memory<32>) <= 227 * 1024 &&
                  sizeof(entry_memory<64>) <= 227 * 1024,
              "the shared memory of a block");

/* --- the producer ---------------------------------------------------------------------------------------------- */

/* The block's rows, by the lanes of a warp, and the keys that they have. */
template <int N>
static __device__ __forceinline__ void find_entry_rows(entry_memory<N> *memory, const attend_args *args, int32_t row0)
{
    attend_keys keys = {.first = INT32_MAX, .end = 0, .full_first = 0, .full_end = INT32_MAX};
#pragma unroll 1
    for (int32_t r = threadIdx.x % 32; r < N; r += 32) {
        const attend_row row = row_of(args, &memory->job, row0 + r);
        memory->rows[r] = row;
        if (row.first < row.end) {
            keys.first = fv_min_i32(keys.first, row.first);
            keys.end = fv_max_i32(keys.end, row.end);
        }
        if (row0 + r < memory->job.num_rows) {
            keys.full_first = fv_max_i32(keys.full_first, row.first);
            keys.full_end = fv_min_i32(keys.full_end, row.end);
        }
    }
    __syncwarp();
    keys.first = __reduce_min_sync(~0u, keys.first);
    keys.end = __reduce_max_sync(~0u, keys.end);
    keys.full_first = __reduce_max_sync(~0u, keys.full_first);
    keys.full_end = __reduce_min_sync(~0u, keys.full_end);
    if (threadIdx.x % 32 == 0) memory->keys = keys;
    __syncwarp();
}

/* A lane's copy of a tile, known before it is asked for. A copy is some hundred cycles of a warp, so where they are many
 * all four warps ask for some. */
typedef struct entry_run {
    const char *from;
    int32_t key;  /* of the tile, its first; LATENT_TILE: none */
    int32_t keys; /* that it has */
} entry_run;

/* Keys that no row sees are a neighbour's, which weigh nothing there: one by one. */
template <int N>
static __device__ __forceinline__ entry_run find_entry_run(const entry_memory<N> *memory, const attend_args *args,
                                                           int32_t tile_first, int32_t run_keys)
{
    const attend_keys *keys = &memory->keys;
    const fv_kv_plane *plane = &args->k[0].plane;
    const bool is_inside = tile_first >= keys->first && tile_first + LATENT_TILE <= keys->end;
    entry_run run = {NULL, LATENT_TILE, is_inside ? run_keys : 1};
    const int32_t of_warp = fv_max_i32(1, LATENT_TILE / ENTRY_PRODUCERS / run.keys), lane = threadIdx.x % 32;
    const int32_t first = (warp_of_group() * of_warp + lane) * run.keys;
    if (lane < of_warp) run.key = fv_min_i32(first, LATENT_TILE);
    const int32_t key = tile_first + fv_min_i32(run.key, LATENT_TILE - 1);
    const int2 at = split_key(args, fv_max_i32(keys->first, fv_min_i32(key, keys->end - 1)));
    run.from = (const char *)plane->data + memory->job.table[at.x] * plane->block_stride + at.y * plane->slot_stride;
    return run;
}

/* Bytes of the other warps may be there before the first one has said how many are expected: the phase ends behind that. */
template <int N>
static __device__ __forceinline__ void bring_entries(entry_memory<N> *memory, const attend_args *args, int32_t origin,
                                                     int32_t num_tiles)
{
    constexpr int TILES = entry_shape<N>::TILES;
    if (num_tiles == 0) return;
    const int32_t run_keys = find_run_latents(args, FV_DS_ENTRY_BYTES, LATENT_TILE);
    entry_run next = find_entry_run(memory, args, origin, run_keys);
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; tile++) {
        const int32_t at = tile % TILES;
        const entry_run run = next;
        next = find_entry_run(memory, args, origin + (tile + 1) * LATENT_TILE, run_keys);
        /* A warp without a copy does not lead by a phase; nor does it wait, for without its bytes the tile may come and
         * be gone before. */
        ptx_bar_sync(ENTRY_BARRIER_PRODUCERS, ENTRY_PRODUCERS * 32);
        const bool copies = run.key < LATENT_TILE;
        if (!__any_sync(~0u, copies)) continue;
        ptx_mbarrier_wait(&memory->empty[at], (tile / TILES + 1) % 2);
        if (threadIdx.x == entry_shape<N>::CONSUMERS) ptx_mbarrier_expect(&memory->full[at], ENTRY_TILE_BYTES);
        __syncwarp();
        if (copies)
            ptx_bulk_load(memory->tiles[at] + run.key * FV_DS_ENTRY_BYTES, run.from, run.keys * FV_DS_ENTRY_BYTES,
                          &memory->full[at]);
        __syncwarp();
    }
}

/* --- scores and softmax ---------------------------------------------------------------------------------------- */

/* Of a warpgroup's scores a thread has those of two keys, 16 w + l / 4 of warp w and lane l and the eighth after it,
 * with N / 4 rows: 8 i + 2 (l % 4) + c, element 4 i + 2 key + c. What belongs to a row is at 2 i + c here. */
template <int N> struct entry_state {
    float sum[N / 4]; /* of the thread's keys */
    float max[N / 4]; /* what they are relative to: known in between follow_entry_maxima() and the tile's end */
    float inverse_unit;
};

/* A chunk of each of the thread's two keys, as it is in the entry. */
typedef struct key_chunks {
    uint4 of[2];
} key_chunks;

static __device__ __forceinline__ key_chunks read_key_chunks(const char *at)
{
    return {*(const uint4 *)at, *(const uint4 *)(at + 8 * FV_DS_ENTRY_BYTES)};
}

static __device__ __forceinline__ uint32_t word_of(const uint4 &chunk, int word)
{
    return word == 0 ? chunk.x : word == 1 ? chunk.y : word == 2 ? chunk.z : chunk.w;
}

/* Operand of a product from four e4m3 of each key: the depth goes through the elements in the order that the four lanes of
 * a key read them in, for sums have none; that of the queries is the same (store_entry_chunk). */
static __device__ __forceinline__ void widen_key_word(uint32_t (&a)[4], const key_chunks *chunks, int word)
{
    const uint2 first = ptx_widen_e4m3(word_of(chunks->of[0], word));
    const uint2 second = ptx_widen_e4m3(word_of(chunks->of[1], word));
    a[0] = first.x;
    a[1] = second.x;
    a[2] = first.y;
    a[3] = second.y;
}

/* The same from RoPE's elements, of which a chunk is for two products. */
static __device__ __forceinline__ void take_rope_words(uint32_t (&a)[4], const key_chunks *chunks, int which)
{
    a[0] = word_of(chunks->of[0], which * 2);
    a[1] = word_of(chunks->of[1], which * 2);
    a[2] = word_of(chunks->of[0], which * 2 + 1);
    a[3] = word_of(chunks->of[1], which * 2 + 1);
}

/* Scores of a group's elements, which are done, times scales: of the key at `key`, and the eighth after it. */
template <int N>
static __device__ __forceinline__ void add_entry_group(float (&s)[N / 2], float (&of_group)[N / 2], const char *key,
                                                       int group, float scale)
{
    const float *scales = (const float *)(key + FV_DS_SCALES_AT) + group;
    const float low = scales[0] * scale, high = scales[8 * FV_DS_ENTRY_BYTES / 4] * scale;
    ptx_wgmma_settle(of_group);
#pragma unroll
    for (int i = 0; i < N / 2; i++) s[i] = fmaf(of_group[i], i / 2 % 2 ? high : low, s[i]);
}

/* S^T of a tile, in base 2: RoPE, then the groups, a few steps at a time. Their operands are made while those of the part
 * before are multiplied, and take the registers of the part before that. Blocks of 32 rows have registers for the sums of
 * one group, others for two. */
template <int N>
static __device__ __forceinline__ void multiply_entry_keys(float (&s)[N / 2], const entry_memory<N> *memory,
                                                           const char *key, float scale)
{
    constexpr int PANEL_BYTES = N * FV_PANEL_ROW_BYTES, STEPS = N <= 16 ? 4 : 2 /* of a part */, SUMS = N <= 16 ? 2 : 1;
    constexpr int ROPE_PARTS = ENTRY_ROPE_STEPS / STEPS, GROUP_PARTS = ENTRY_GROUP_STEPS / STEPS;
    constexpr int PARTS = ROPE_PARTS + ENTRY_GROUPS * GROUP_PARTS;
    const uint64_t q_at = ptx_anew(ptx_matrix_descriptor(memory->q[0], 16, 1024));
    const char *own = key + threadIdx.x % 4 * 32; /* of a key's four lanes each has two of eight chunks: all banks */
    key_chunks rope[2] = {read_key_chunks(own + FV_DS_ROPE_AT), read_key_chunks(own + FV_DS_ROPE_AT + 16)};
    key_chunks chunks = read_key_chunks(own);
    uint32_t a[2][STEPS][4];
    float of_group[SUMS][N / 2];
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int first = part * STEPS - ENTRY_ROPE_STEPS, group = first / ENTRY_GROUP_STEPS;
        const int ended = part - ROPE_PARTS - SUMS; /* of the groups' parts, the last one whose sums are needed here */
        const bool adds = ended >= 0 && ended % GROUP_PARTS == GROUP_PARTS - 1;
        if (part >= 2) ptx_wgmma_wait<1>();
        if (part == ROPE_PARTS + 1) {
            ptx_wgmma_settle(s);
#pragma unroll
            for (int i = 0; i < N / 2; i++) s[i] *= scale;
        }
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (first < 0)
                take_rope_words(a[part % 2][i], &rope[(part * STEPS + i) / 2], i % 2);
            else
                widen_key_word(a[part % 2][i], &chunks, (first + i) % ENTRY_CHUNK_STEPS);
        }
        const int next = (first + STEPS) / ENTRY_CHUNK_STEPS; /* chunk */
        if (first >= 0 && (first + STEPS) % ENTRY_CHUNK_STEPS == 0 && next < ENTRY_GROUPS * 2)
            chunks = read_key_chunks(own + next / 2 * FV_DS_TILE + next % 2 * 16);
        if (adds) {
            if (SUMS == 1) ptx_wgmma_wait<0>();
            add_entry_group<N>(s, of_group[ended / GROUP_PARTS % SUMS], key, ended / GROUP_PARTS, scale);
        }
        ptx_wgmma_fence();
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const int step = first + i;
            if (step < 0)
                multiply_columns<__nv_bfloat16>(
                    s, a[part % 2][i],
                    ptx_descriptor_at(q_at, (LATENT_PANELS - 1) * PANEL_BYTES + (part * STEPS + i) * 32),
                    part * STEPS + i > 0);
            else
                multiply_columns<__half>(of_group[group % SUMS], a[part % 2][i],
                                         ptx_descriptor_at(q_at, step / 4 * PANEL_BYTES + step % 4 * 32),
                                         step % ENTRY_GROUP_STEPS > 0);
        }
        ptx_wgmma_commit();
    }
    ptx_wgmma_wait<0>();
    add_entry_group<N>(s, of_group[(ENTRY_GROUPS - 1) % SUMS], key, ENTRY_GROUPS - 1, scale);
}

/* Of the thread's two keys, in the group of the columns that it has for that: lane % 4. */
static __device__ __forceinline__ float2 read_entry_scales(const char *key)
{
    const float *scales = (const float *)(key + FV_DS_SCALES_AT) + threadIdx.x % 4;
    return make_float2(scales[0], scales[8 * FV_DS_ENTRY_BYTES / 4]);
}

/* What the tiles before are relative to: the sums follow. What the warp knew lies in shared memory, for registers are full
 * of products in between. */
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

/* Of the thread's values of COLUMNS columns and those of lane ^ by, of the same columns, the larger ones: of half of them
 * where there are more than two, the second half where the lane has that bit. */
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
    ptx_bar_sync(ENTRY_BARRIER_GROUP + group, 128);
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

/* P's place is free for a tile. */
template <int N> static __device__ __forceinline__ void wait_for_entry_space(entry_memory<N> *memory, int32_t tile)
{
    ptx_mbarrier_wait(&memory->p_empty[tile % ENTRY_P], (tile / ENTRY_P + 1) % 2);
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

/* P in place of scores. */
template <int N>
static __device__ __forceinline__ void exponentiate_entry_scores(float (&s)[N / 2], entry_state<N> *state)
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        float *low = &s[element_of_column(i, 0)], *high = low + 2;
        *low = ptx_ex2(*low - state->max[i]);
        *high = ptx_ex2(*high - state->max[i]);
        state->sum[i] += *low + *high;
    }
}

/* P to its panel, and what the values of its keys have to be multiplied by: scales in units, in the order in which the
 * valuers take keys (read_value_scales). */
template <int N>
static __device__ __forceinline__ void store_entry_weights(entry_memory<N> *memory, const float (&s)[N / 2],
                                                           float2 scales, float inverse_unit, int32_t buffer)
{
    const int32_t step = threadIdx.x / 32 % 4, key = threadIdx.x % 32 / 4;
    __half *to = memory->scales[buffer][threadIdx.x % 4] + step * 16 + key / 2 * 4 + key % 2;
    uint32_t p[N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; i++) p[i] = fv_narrow_pair<__half>(s[2 * i], s[2 * i + 1]);
    store_columns<N>(memory->p[buffer], p);
    to[0] = fv_narrow<__half>(scales.x * inverse_unit);
    to[2] = fv_narrow<__half>(scales.y * inverse_unit);
}

/* A warpgroup's tiles: all, or every second one. */
template <int N>
static __device__ __forceinline__ void weigh_entries(entry_state<N> *state, entry_memory<N> *memory, int32_t group,
                                                     int32_t origin, int32_t num_tiles, float scale)
{
    constexpr int TILES = entry_shape<N>::TILES, GROUPS = entry_shape<N>::SCORER_GROUPS,
                  SCORERS = entry_shape<N>::SCORERS;
    const int32_t offset = key_of_thread() * (int32_t)FV_DS_ENTRY_BYTES;
#pragma unroll 1
    for (int32_t tile = group; tile < num_tiles; tile += GROUPS) {
        const int32_t buffer = tile % ENTRY_P;
        float s[N / 2];
        ptx_mbarrier_wait(&memory->full[tile % TILES], tile / TILES % 2);
        const char *key = memory->tiles[tile % TILES] + offset;
        multiply_entry_keys<N>(s, memory, key, scale);
        if (GROUPS == 1 && threadIdx.x % 32 == 0) ptx_mbarrier_arrive(&memory->scored[tile % 2]);
        const int32_t tile_first = origin + tile * LATENT_TILE;
        if (tile_first < memory->keys.full_first || tile_first + LATENT_TILE > memory->keys.full_end)
            mask_columns<N>(s, memory->rows, tile_first);
        const float2 scales = read_entry_scales(key);
        const float largest_scale = fmaxf(fabsf(scales.x), fabsf(scales.y));
        if (GROUPS > 1 && tile > 0) ptx_bar_sync(ENTRY_BARRIER_ODD - group, SCORERS);
        follow_entry_maxima<N>(state, memory);
        const bool raises = ptx_bar_any(ENTRY_BARRIER_GROUP + group, 128,
                                        exceeds_entry_maxima<N>(s, state, largest_scale));
        if (raises) raise_entry_maxima<N>(state, s, largest_scale, memory, group, tile);
        if (GROUPS > 1 && tile + 1 < num_tiles) ptx_bar_arrive(ENTRY_BARRIER_EVEN + group, SCORERS);
        exponentiate_entry_scores<N>(s, state);
        wait_for_entry_space(memory, tile);
        if (threadIdx.x % 128 == 0) memory->move[buffer].is_needed = raises;
        store_entry_weights<N>(memory, s, scales, state->inverse_unit, buffer);
        ptx_fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx_mbarrier_arrive(&memory->p_full[buffer]);
    }
}

/* The largest magnitude of bf16 in a thread's part of a row, as its bits. */
static __device__ __forceinline__ uint32_t largest_of_chunks(const uint4 (&chunks)[LATENT_PANELS])
{
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < LATENT_PANELS; i++) {
        const uint32_t words[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++) largest = __vmaxu2(largest, words[j] & 0x7fff7fffu);
    }
    return max(largest & 0xffffu, largest >> 16);
}

/* A power of two, and its inverse. */
typedef struct query_scale {
    float factor, inverse;
} query_scale;

/* What brings elements whose largest has those bits to 2^14 and above. */
static __device__ __forceinline__ query_scale find_query_scale(uint32_t largest)
{
    const uint32_t biased = max(largest >> 7, 15u); /* exponent; then all factors are normal */
    return {__uint_as_float((127 + 141 - biased) << 23), __uint_as_float((127 + biased - 141) << 23)};
}

template <class T> static __device__ __forceinline__ uint4 scale_chunk(uint4 chunk, float factor)
{
    uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = widen_pair<__nv_bfloat16>(words[i]);
        words[i] = fv_narrow_pair<T>(pair.x * factor, pair.y * factor);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* Chunk `chunk` of row `r` of the queries, of 16 bytes, to a panel, or two of a group, in the order of the keys' elements:
 * of LANE_CHUNKS that a lane reads of a key, a word each to four steps' halves. */
template <int N, int LANE_CHUNKS>
static __device__ __forceinline__ void store_entry_chunk(char *panels, int32_t r, int32_t chunk, uint4 of)
{
    const uint32_t words[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        *(uint32_t *)(panels + panel_offset(N, r, chunk % LANE_CHUNKS * 4 + i) + chunk / LANE_CHUNKS * 4) = words[i];
}

/* Queries into panels, times the power of two that brings the largest element of all rows to 2^14 and above: what is 2^31
 * below that is exact. By the valuers, whose registers are free: eight threads for a row. */
template <int N>
static __device__ __forceinline__ void load_entry_queries(entry_memory<N> *memory, const attend_args *args)
{
    constexpr int PASS = ENTRY_VALUERS / 8 /* rows */, NUM_PASSES = (N + PASS - 1) / PASS;
    const int32_t first_row = ((int32_t)threadIdx.x - entry_shape<N>::SCORERS) / 8, chunk = threadIdx.x % 8;
    uint4 chunks[NUM_PASSES][LATENT_PANELS];
#pragma unroll
    for (int i = 0; i < NUM_PASSES; i++) {
        const int32_t r = first_row + i * PASS;
        if (r >= N) continue;
        const attend_row *row = &memory->rows[r];
        const char *from = row->first < row->end ? query_row(&args->params, row) + chunk * 16 : NULL;
#pragma unroll
        for (int panel = 0; panel < LATENT_PANELS; panel++)
            chunks[i][panel] = from ? *(const uint4 *)(from + panel * FV_PANEL_ROW_BYTES) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < NUM_PASSES; i++) {
        if (first_row + i * PASS < N)
            atomicMax(&memory->largest_query, __reduce_max_sync(~0u, largest_of_chunks(chunks[i])));
    }
    ptx_bar_sync(ENTRY_BARRIER_VALUERS, ENTRY_VALUERS);
    const float factor = find_query_scale(memory->largest_query).factor;
#pragma unroll
    for (int i = 0; i < NUM_PASSES; i++) {
        const int32_t r = first_row + i * PASS;
        if (r >= N) continue;
#pragma unroll
        for (int panel = 0; panel < LATENT_PANELS - 1; panel++)
            store_entry_chunk<N, 4>(memory->q[panel / 2 * 2], r, panel % 2 * 8 + chunk,
                                    scale_chunk<__half>(chunks[i][panel], factor));
        store_entry_chunk<N, 2>(memory->q[LATENT_PANELS - 1], r, chunk,
                                scale_chunk<__nv_bfloat16>(chunks[i][LATENT_PANELS - 1], factor));
    }
    ptx_fence_proxy_async();
    ptx_bar_arrive(ENTRY_BARRIER_QUERIES, entry_shape<N>::CONSUMERS);
}

template <int N>
static __device__ __forceinline__ void score_entries(entry_memory<N> *memory, const attend_args *args, int32_t group,
                                                     int32_t origin, int32_t num_tiles)
{
    ptx_bar_sync(ENTRY_BARRIER_QUERIES, entry_shape<N>::CONSUMERS);
    const float inverse = find_query_scale(memory->largest_query).inverse;
    const float scale = args->params.scale * memory->job.k_head_scale * FV_LOG2E * inverse; /* of scores, in base 2 */
    entry_state<N> state = {};
    state.inverse_unit = 1.0f / ENTRY_FIRST_UNIT;
    weigh_entries<N>(&state, memory, group, origin, num_tiles, scale);
    ptx_bar_sync(ENTRY_BARRIER_SCORERS, entry_shape<N>::SCORERS);
    follow_entry_maxima<N>(&state, memory);
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float sum = sum_of_column(state.sum[i]);
        if (threadIdx.x % 32 < 4) memory->sums[threadIdx.x / 32][column_of_thread(i)] = sum;
    }
    ptx_bar_arrive(ENTRY_BARRIER_CONSUMERS, entry_shape<N>::CONSUMERS);
}

/* --- values ---------------------------------------------------------------------------------------------------- */

enum { ENTRY_BLOCKS = LATENT_VALUE / 2 / 64 }; /* of a warpgroup's columns; two have a scale */

/* Four elements of each of a thread's four keys of a step. */
typedef struct value_words {
    uint32_t of[4];
} value_words;

/* Keys 16 steps + 2 (l % 4), the next, and those eight further on: four rows of 32 bytes of each, all banks. */
static __device__ __forceinline__ value_words read_value_words(const char *values)
{
    value_words words;
#pragma unroll
    for (int i = 0; i < 4; i++) words.of[i] = *(const uint32_t *)(values + (i / 2 * 8 + i % 2) * FV_DS_ENTRY_BYTES);
    return words;
}

/* Of those keys in a group of columns: scales of pairs. */
static __device__ __forceinline__ uint2 read_value_scales(const __half *scales, int32_t step)
{
    return *(const uint2 *)(scales + step * 16 + threadIdx.x % 4 * 4);
}

static __device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b)
{
    const __half2 product = __hmul2(*(const __half2 *)&a, *(const __half2 *)&b);
    return *(const uint32_t *)&product;
}

/* Operands of two blocks, times scales: rows l / 4 and the eighth after it of the first are the first and second element,
 * those of the second the third and fourth. */
static __device__ __forceinline__ void widen_value_words(uint32_t (&a)[2][4], const value_words *words, uint2 scales)
{
#pragma unroll
    for (int pair = 0; pair < 2; pair++) { /* of keys */
        const uint32_t first = words->of[2 * pair], second = words->of[2 * pair + 1],
                       scale = pair ? scales.y : scales.x;
        const uint2 low = ptx_widen_e4m3(__byte_perm(first, second, 0x5140));
        const uint2 high = ptx_widen_e4m3(__byte_perm(first, second, 0x7362));
        a[0][2 * pair] = multiply_halves(low.x, scale);
        a[0][2 * pair + 1] = multiply_halves(low.y, scale);
        a[1][2 * pair] = multiply_halves(high.x, scale);
        a[1][2 * pair + 1] = multiply_halves(high.y, scale);
    }
}

template <int N>
static __device__ __forceinline__ void move_entry_values(float (&out)[ENTRY_BLOCKS][N / 2], const entry_move<N> *move)
{
#pragma unroll
    for (int i = 0; i < N / 4; i += 2) {
        const float2 by = *(const float2 *)&move->by[column_of_thread(i)];
#pragma unroll
        for (int block = 0; block < ENTRY_BLOCKS; block++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                out[block][element_of_column(i, half)] *= by.x;
                out[block][element_of_column(i + 1, half)] *= by.y;
            }
        }
    }
}

/* O^T of columns 256 group .. of all tiles. Element 4 i + 2 half + c of block b: column 128 (b / 2) + 32 w + 4 (l / 4) +
 * 2 (b % 2) + half of row 8 i + 2 (l % 4) + c. */
template <int N>
static __device__ __forceinline__ void attend_entry_values(float (&out)[ENTRY_BLOCKS][N / 2], entry_memory<N> *memory,
                                                           int32_t group, int32_t num_tiles)
{
    constexpr int TILES = entry_shape<N>::TILES;
    const int32_t lane = threadIdx.x % 32;
    const int32_t offset = lane % 4 * 2 * FV_DS_ENTRY_BYTES + group * (LATENT_VALUE / 2) + warp_of_group() * 32 +
                           lane / 4 * 4;
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; tile++) {
        const int32_t at = tile % TILES, buffer = tile % ENTRY_P;
        const char *values = memory->tiles[at] + offset;
        const __half(*scales)[LATENT_TILE] = memory->scales[buffer] + group * 2;
        const uint64_t p_at = ptx_anew(ptx_matrix_descriptor(memory->p[buffer], 16, 1024));
        uint32_t a[2][2][4]; /* of two parts: a group of columns, 16 keys */
        ptx_mbarrier_wait(&memory->full[at], tile / TILES % 2);
        value_words next = read_value_words(values);
        ptx_mbarrier_wait(&memory->p_full[buffer], tile / ENTRY_P % 2);
        if (entry_shape<N>::SCORER_GROUPS == 1 &&
            tile + 1 < num_tiles) /* while its softmax leaves the tensor cores free */
            ptx_mbarrier_wait(&memory->scored[(tile + 1) % 2], (tile + 1) / 2 % 2);
        uint2 next_scales = read_value_scales(scales[0], 0);
        if (memory->move[buffer].is_needed) move_entry_values<N>(out, &memory->move[buffer]);
#pragma unroll
        for (int block = 0; block < ENTRY_BLOCKS; block++) ptx_wgmma_settle(out[block]);
#pragma unroll
        for (int part = 0; part < LATENT_TILE / 8; part++) {
            const int columns = part % 2, step = part / 2;
            if (part > 1) ptx_wgmma_wait<1>(); /* the part before the last one, of the same registers */
            widen_value_words(a[part % 2], &next, next_scales);
            if (part + 1 < LATENT_TILE / 8) {
                next = read_value_words(values + (part + 1) / 2 * 16 * FV_DS_ENTRY_BYTES + (part + 1) % 2 * FV_DS_TILE);
                next_scales = read_value_scales(scales[(part + 1) % 2], (part + 1) / 2);
            }
            ptx_wgmma_fence();
#pragma unroll
            for (int block = 0; block < 2; block++)
                multiply_columns<__half>(out[columns * 2 + block], a[part % 2][block],
                                         ptx_descriptor_at(p_at, step * 32), 1);
            ptx_wgmma_commit();
        }
        ptx_wgmma_wait<0>();
#pragma unroll
        for (int block = 0; block < ENTRY_BLOCKS; block++) ptx_wgmma_settle(out[block]);
        __syncwarp();
        if (lane == 0) {
            ptx_mbarrier_arrive(&memory->p_empty[buffer]);
            ptx_mbarrier_arrive(&memory->empty[at]);
        }
    }
}

/* Four neighbouring elements, as T. */
template <class T> static __device__ __forceinline__ void store_four(char *to, const float (&of)[4])
{
    if constexpr (sizeof(T) == 4)
        *(float4 *)to = make_float4(of[0], of[1], of[2], of[3]);
    else
        *(uint2 *)to = make_uint2(fv_narrow_pair<T>(of[0], of[1]), fv_narrow_pair<T>(of[2], of[3]));
}

/* What a thread has of all rows, whose targets are by lanes, 32 at a time; four elements at once where they are at
 * multiples of them. */
template <class T, bool FOUR, int N>
static __device__ __forceinline__ void store_entry_columns(const float (&out)[ENTRY_BLOCKS][N / 2],
                                                           const attend_target (&of_lane)[(N + 31) / 32], int32_t first)
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const attend_target *of = &of_lane[i / 8];
        const int32_t lane = column_of_thread(i) % 32;
        attend_target target = *of;
        target.to = (char *)__shfl_sync(~0u, (uint64_t)of->to, lane);
        target.out_factor = __shfl_sync(~0u, of->out_factor, lane);
        if (!target.to) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) { /* of the columns */
            const float(&low)[N / 2] = out[2 * half], (&high)[N / 2] = out[2 * half + 1];
            const int at = element_of_column(i, 0), next = element_of_column(i, 1), d = half * FV_DS_TILE;
            float four[4] = {low[at], low[next], high[at], high[next]};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (!FOUR) store_element(&target, first + d + j, four[j]);
                four[j] = target.out_factor == 0 ? 0.0f : four[j] * target.out_factor; /* no key: whatever sums are */
            }
            if (FOUR) store_four<T>(target.to + (first + d) * (int32_t)sizeof(T), four);
        }
    }
}

/* A row's end, by a lane. `to` is NULL where there is no such row. */
template <int N>
static __device__ __forceinline__ attend_target end_entry_row(const entry_memory<N> *memory, const attend_args *args,
                                                              int32_t row0, int32_t r, bool tells)
{
    const attend_job *job = &memory->job;
    const attend_row *row = &memory->rows[fv_min_i32(r, N - 1)];
    const bool is_row = r < N && row0 + r < job->num_rows;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < entry_shape<N>::SCORERS / 32; i++) sum += memory->sums[i][fv_min_i32(r, N - 1)];
    float max = memory->max[fv_min_i32(r, N - 1)];
    if (max == ENTRY_NO_MAX) max = -INFINITY;
    const attend_end end = end_row(args, job, row, max, sum, job->v_head_scale / memory->inverse_unit);
    attend_target target = target_of(args, row, &end);
    if (!is_row) target.to = NULL;
    if (is_row && tells) store_sums(args, row, &end);
    return target;
}

/* Lanes find the ends of rows, and all write what they have of them: eight lanes 32 neighbouring elements. */
template <int N>
static __device__ __forceinline__ void store_entry_values(const float (&out)[ENTRY_BLOCKS][N / 2],
                                                          const entry_memory<N> *memory, const attend_args *args,
                                                          int32_t row0, int32_t group)
{
    const int32_t lane = threadIdx.x % 32, warp = warp_of_group();
    attend_target targets[(N + 31) / 32];
    bool is_apart = false;
    ptx_bar_sync(ENTRY_BARRIER_CONSUMERS, entry_shape<N>::CONSUMERS);
#pragma unroll
    for (int i = 0; i < (N + 31) / 32; i++) {
        targets[i] = end_entry_row<N>(memory, args, row0, lane + i * 32, group == 0 && warp == 0);
        is_apart = is_apart || (uintptr_t)targets[i].to % 16 != 0;
    }
    const int32_t first = group * (LATENT_VALUE / 2) + warp * 32 + lane / 4 * 4;
    const fv_dtype dtype = memory->job.item.partial >= 0 ? FV_DTYPE_F32 : args->params.out_dtype;
    if (__any_sync(~0u, is_apart))
        store_entry_columns<float, false, N>(out, targets, first);
    else if (dtype == FV_DTYPE_F32)
        store_entry_columns<float, true, N>(out, targets, first);
    else if (dtype == FV_DTYPE_F16)
        store_entry_columns<__half, true, N>(out, targets, first);
    else
        store_entry_columns<__nv_bfloat16, true, N>(out, targets, first);
}

template <int N> static __device__ __forceinline__ void init_entry_memory(entry_memory<N> *memory)
{
    for (int32_t i = 0; i < entry_shape<N>::TILES; i++) {
        ptx_mbarrier_init(&memory->full[i], 1);
        ptx_mbarrier_init(&memory->empty[i], ENTRY_VALUERS / 32);
    }
    for (int32_t i = 0; i < 2; i++) ptx_mbarrier_init(&memory->scored[i], 4);
    for (int32_t i = 0; i < ENTRY_P; i++) {
        ptx_mbarrier_init(&memory->p_full[i], 4);
        ptx_mbarrier_init(&memory->p_empty[i], ENTRY_VALUERS / 32);
    }
    ptx_fence_mbarrier_init();
    memory->largest_query = 0;
    memory->inverse_unit = 1.0f / ENTRY_FIRST_UNIT;
}

template <int N>
static __global__ void __launch_bounds__(entry_shape<N>::THREADS, 1)
    wgmma_entry_kernel(const __grid_constant__ attend_args args)
{
    typedef entry_shape<N> shape;
    extern __shared__ __align__(1024) char shared[];
    entry_memory<N> *memory = (entry_memory<N> *)shared;
    const int32_t row0 = row_part_of_block(&args) * N, group = warpgroup_of_thread();
    if (threadIdx.x < N) memory->max[threadIdx.x] = ENTRY_NO_MAX;
    if (threadIdx.x < shape::SCORERS) {
        for (int32_t r = threadIdx.x % 32; r < N; r += 32) memory->known_max[threadIdx.x / 32][r] = ENTRY_NO_MAX;
    }
    if (threadIdx.x == 0) init_entry_memory<N>(memory);
    overlap_begin();
    if (threadIdx.x == 0) memory->has_item = find_job(&memory->job, &args);
    __syncthreads();
    if (!memory->has_item) return;
    if (threadIdx.x < 32) find_entry_rows<N>(memory, &args, row0);
    __syncthreads();
    const int32_t origin = first_latent_key(&memory->keys), num_tiles = count_latent_tiles(&memory->keys);
    if (group == shape::CONSUMERS / 128) {
        ptx_give_registers<ENTRY_PRODUCER_REGISTERS>();
        bring_entries<N>(memory, &args, origin, num_tiles);
    } else if (group < shape::SCORER_GROUPS) {
        ptx_take_registers<shape::SCORER_REGISTERS>();
        score_entries<N>(memory, &args, group, origin, num_tiles);
    } else {
        ptx_take_registers<shape::VALUER_REGISTERS>();
        load_entry_queries<N>(memory, &args);
        float out[ENTRY_BLOCKS][N / 2] = {};
        attend_entry_values<N>(out, memory, group - shape::SCORER_GROUPS, num_tiles);
        store_entry_values<N>(out, memory, &args, row0, group - shape::SCORER_GROUPS);
    }
}

template <int N> constexpr fv_cuda_attend_kernel wgmma_entry_of(void)
{
    return {wgmma_entry_kernel<N>, (int32_t)sizeof(entry_memory<N>), entry_shape<N>::THREADS, N, 1};
}

#endif
