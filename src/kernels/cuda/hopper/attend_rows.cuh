/* Attention of many rows on Hopper (wgmma): 128 rows x tiles of 128 keys (64 of heads of 256), a warpgroup for each 64 rows, and two that
 * bring what they need (rows_copy.cuh).
 *
 *   S(t + 1) = Q K(t + 1)       issued, then
 *   O += P(t) V(t)              issued; while it runs:
 *   softmax of S(t + 1)         maxima, exponentials, in the registers of S
 *   P(t + 1), and where maxima moved O to the new ones
 *
 * P stays in registers: the layout of a sum is that of an operand. The two warpgroups wait for tiles, not for each other, and
 * fall into turns by themselves. After the design of FlashAttention-3 (arXiv 2407.08608, section 3.2, algorithm 2). */
#ifndef FV_KERNELS_CUDA_HOPPER_ATTEND_ROWS_CUH
#define FV_KERNELS_CUDA_HOPPER_ATTEND_ROWS_CUH

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/hopper/rows_copy.cuh"
#include "kernels/cuda/hopper/rows_end.cuh"

/* What a warpgroup knows of a job's tiles. */
typedef struct rows_walk {
    const rows_slot *slot;
    const char *q; /* of its rows */
    int32_t row;   /* the thread's first one in the block; the other is 8 further on */
    int32_t origin, num_tiles;
    int32_t dense_from;
    float scale;    /* of a dot product, in base 2 */
    float lacks[2]; /* next to one byte: what those of the thread's rows lack beside */
} rows_walk;

/* A tile is there. What came row by row is seen by products behind a fence, which who widened it has passed. */
template <class S>
static __device__ __forceinline__ void await_rows_tile(rows_barriers *barriers, int32_t parity, const attend_args *args,
                                                       const rows_walk *walk, int32_t tile)
{
    ptx_mbarrier_wait(&barriers->full, parity);
    if (!S::IS_NARROW && !comes_in_row_boxes<S>(args, &walk->slot->keys, walk->dense_from, walk->origin + tile * S::TILE))
        ptx_fence_proxy_async();
}

/* S = Q K of a tile, for a warpgroup's rows: issued. */
template <class S>
static __device__ __forceinline__ void multiply_rows_keys(float (&s)[S::TILE / 2], const char *q, const char *keys)
{
    using T = typename S::T;
    const uint64_t q_at = ptx_matrix_descriptor(q, 16, 1024), k_at = ptx_matrix_descriptor(keys, 16, 1024);
    ptx_wgmma_fence();
#pragma unroll
    for (int d = 0; d < S::HEAD; d += 16) {
        const int32_t panel = d / FV_PANEL_COLUMNS * FV_PANEL_ROW_BYTES, column = d % FV_PANEL_COLUMNS * 2;
        const uint64_t a = ptx_descriptor_at(q_at, panel * ROWS_BLOCK_M + column);
        const uint64_t b = ptx_descriptor_at(k_at, panel * S::TILE + column);
        if constexpr (S::TILE == 64) ptx_wgmma_m64n64k16_ss<T>(s, a, b, d > 0);
        if constexpr (S::TILE == 128) ptx_wgmma_m64n128k16_ss<T>(s, a, b, d > 0);
    }
    ptx_wgmma_commit();
}

/* O += P V: issued. */
template <class S>
static __device__ __forceinline__ void multiply_rows_values(float (&out)[S::HEAD / 2],
                                                            const uint32_t (&p)[S::TILE / 4], const char *values)
{
    using T = typename S::T;
    const uint64_t v_at = ptx_matrix_descriptor(values, S::TILE * FV_PANEL_ROW_BYTES, 1024);
    ptx_wgmma_fence();
#pragma unroll
    for (int key = 0; key < S::TILE; key += 16) {
        const uint32_t a[4] = {p[key / 4], p[key / 4 + 1], p[key / 4 + 2], p[key / 4 + 3]};
        const uint64_t v = ptx_descriptor_at(v_at, key * FV_PANEL_ROW_BYTES);
        if constexpr (S::HEAD == 64) ptx_wgmma_m64n64k16_rs_nt<T>(out, a, v, 1);
#pragma unroll
        for (int d = 0; S::HEAD >= 128 && d < S::HEAD; d += 128) /* of 256 at once a kernel of so many threads has no registers */
            ptx_wgmma_m64n128k16_rs_nt<T>(*(float (*)[64])&out[d / 2], a,
                                          ptx_descriptor_at(v, d / FV_PANEL_COLUMNS * S::TILE * FV_PANEL_ROW_BYTES), 1);
    }
    ptx_wgmma_commit();
}

/* From here on, in base 2, what a product loses to rounding counts as an exponent: scores are rounded first, as their maxima are. */
#define ROWS_LARGE_SCORE 0x1p16f

/* The sums of P go over to new maxima; `factor` is what the values' sums have to be multiplied by. */
static __device__ __forceinline__ void move_row_maxima(float (&factor)[2], row_sums *sums, const float (&max)[2])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        factor[half] = max[half] == sums->max[half] ? 1.0f : ptx_ex2(sums->max[half] - max[half]);
        sums->max[half] = max[half];
        sums->sum[half] *= factor[half];
    }
}

/* Of a dot product of the thread's first row, or of the second. */
template <class S> static __device__ __forceinline__ float scale_of_rows(const rows_walk *walk, int which)
{
    return S::IS_NARROW ? walk->scale * walk->lacks[which] : walk->scale;
}

/* Do all rows see all keys of the tile? */
template <class S> static __device__ __forceinline__ bool rows_see_tile(const rows_walk *walk, int32_t tile)
{
    const attend_keys *keys = &walk->slot->keys;
    const int32_t tile_first = walk->origin + tile * S::TILE;
    return tile_first >= keys->full_first && tile_first + S::TILE <= keys->full_end;
}

/* P of a tile in place of its dot products, relative to the rows' own maxima so far, so that the largest weight is 1 but for what the product loses to rounding, and
 * its sums, before it is rounded; to the end of all products under way. */
template <class S>
static __device__ __forceinline__ void weigh_rows_keys(float (&out)[S::HEAD / 2], float (&s)[S::TILE / 2],
                                                       row_sums *sums, const rows_walk *walk, int32_t tile,
                                                       bool is_seen)
{
    const bool keeps_order = walk->scale > 0; /* of products and scores */
    if (!is_seen || !keeps_order) {
#pragma unroll
        for (int i = 0; i < S::TILE / 2 && !keeps_order; i++) s[i] *= scale_of_rows<S>(walk, i / 2 % 2);
        mask_keys(s, walk->slot->rows, walk->row, walk->origin + tile * S::TILE);
    }
    float own[2], factor[2], scale[2];
#pragma unroll
    for (int half = 0; half < 2; half++) scale[half] = keeps_order ? scale_of_rows<S>(walk, half) : 1.0f;
    row_sums of_tile = {};
    find_own_maxima(own, s);
    if constexpr (S::IS_NARROW) {
        own[0] *= scale[0];
        own[1] *= scale[1];
    }
    choose_row_maxima(of_tile.max, own, sums, S::IS_NARROW ? 1.0f : scale[0], 0);
    const bool moves = __any_sync(~0u, of_tile.max[0] != sums->max[0] || of_tile.max[1] != sums->max[1]);
    if (__any_sync(~0u, fmaxf(fabsf(of_tile.max[0]), fabsf(of_tile.max[1])) >= ROWS_LARGE_SCORE)) {
#pragma unroll
        for (int i = 0; i < S::TILE / 2; i++) s[i] *= scale[i / 2 % 2];
        scale[0] = scale[1] = 1;
    }
    const float least[2] = {of_tile.max[0] == -INFINITY ? 0.0f : of_tile.max[0],
                            of_tile.max[1] == -INFINITY ? 0.0f : of_tile.max[1]};
#pragma unroll
    for (int i = 0; i < S::TILE / 2; i++) s[i] = ptx_ex2(fmaf(s[i], scale[i / 2 % 2], -least[i / 2 % 2]));
    float odd[2] = {}; /* two chains of a row's sum */
#pragma unroll
    for (int i = 0; i < S::TILE / 2; i += 2) {
        of_tile.sum[i / 2 % 2] += s[i];
        odd[i / 2 % 2] += s[i + 1];
    }
    ptx_wgmma_settle(s);
    if (moves) move_row_maxima(factor, sums, of_tile.max); /* a branch, which P does not sink behind */
    ptx_wgmma_wait<0>();
    ptx_wgmma_settle(out);
    if (moves) rescale_values(out, factor);
#pragma unroll
    for (int half = 0; half < 2; half++) sums->sum[half] += of_tile.sum[half] + odd[half];
}

/* P as T holds it. */
template <class T, int N> static __device__ __forceinline__ void narrow_rows_keys(uint32_t (&p)[N / 2], const float (&s)[N])
{
#pragma unroll
    for (int i = 0; i < N / 2; i++) p[i] = fv_narrow_pair<T>(s[2 * i], s[2 * i + 1]);
}

/* Where tiles of keys, and of values, come from next. */
template <class S> struct rows_turns {
    rows_turn<S::STAGES> keys, values;
};

/* Tile by tile: its scores, beside the values of the one before. */
template <class S>
static __device__ __forceinline__ void attend_rows_tiles(float (&out)[S::HEAD / 2], row_sums *sums,
                                                         rows_memory<S> *memory, rows_turns<S> *turns,
                                                         const attend_args *args, const rows_walk *walk)
{
    using T = typename S::T;
    const int32_t num_tiles = walk->num_tiles;
    float s[S::TILE / 2];
    uint32_t p[S::TILE / 4];
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; tile++, turns->keys.step()) {
        rows_barriers *of_keys = &memory->of_tiles[0][turns->keys.place];
        rows_barriers *of_values = &memory->of_tiles[1][turns->values.place];
        await_rows_tile<S>(of_keys, turns->keys.parity, args, walk, tile);
        multiply_rows_keys<S>(s, walk->q, memory->tiles[0][turns->keys.place]);
        const bool is_seen = rows_see_tile<S>(walk, tile); /* asked before S is waited for */
        if (tile > 0) {
            await_rows_tile<S>(of_values, turns->values.parity, args, walk, tile - 1);
            multiply_rows_values<S>(out, p, memory->tiles[1][turns->values.place]);
            ptx_wgmma_wait<1>();
        } else {
            ptx_wgmma_wait<0>();
        }
        ptx_wgmma_settle(s);
        release_rows(&of_keys->empty);
        weigh_rows_keys<S>(out, s, sums, walk, tile, is_seen);
        if (tile > 0) {
            release_rows(&of_values->empty);
            turns->values.step();
        }
        narrow_rows_keys<T>(p, s); /* not before: the registers of P were an operand */
    }
    if (num_tiles == 0) return;
    rows_barriers *of_values = &memory->of_tiles[1][turns->values.place];
    await_rows_tile<S>(of_values, turns->values.parity, args, walk, num_tiles - 1);
    multiply_rows_values<S>(out, p, memory->tiles[1][turns->values.place]);
    ptx_wgmma_wait<0>();
    ptx_wgmma_settle(out);
    release_rows(&of_values->empty);
    turns->values.step();
}

/* All jobs of the block. */
template <class S> static __device__ __forceinline__ void consume_rows(rows_memory<S> *memory, const attend_args *args)
{
    const int32_t group = warpgroup_of_thread();
    rows_turns<S> turns = {};
#pragma unroll 1
    for (rows_turn<2> of_slots = {};; of_slots.step()) {
        rows_slot *slot = &memory->slots[of_slots.place];
        ptx_mbarrier_wait(&slot->is_written, of_slots.parity);
        if (slot->num_rows == 0) return;
        char *q = memory->q[of_slots.place % S::QUERIES];
        rows_walk walk = {
            .slot = slot,
            .q = q + group * 64 * FV_PANEL_ROW_BYTES,
            .row = (int32_t)threadIdx.x / 32 * 16 + (int32_t)threadIdx.x % 32 / 4,
            .origin = first_rows_key(args, &slot->keys),
            .num_tiles = count_rows_tiles<S>(args, &slot->keys),
            .dense_from = uniform(slot->job.dense_from),
            .scale = args->params.scale * slot->job.k_head_scale * FV_LOG2E,
        };
        float out[S::HEAD / 2];
#pragma unroll
        for (int i = 0; i < S::HEAD / 2; i++) out[i] = 0;
        row_sums sums;
        clear_row_sums(&sums);
        ptx_mbarrier_wait(&slot->has_queries, of_slots.parity);
        ptx_fence_proxy_async();
        if constexpr (S::IS_NARROW) {
            walk.lacks[0] = slot->lacks[walk.row];
            walk.lacks[1] = slot->lacks[walk.row + 8];
        }
        attend_rows_tiles<S>(out, &sums, memory, &turns, args, &walk);
#pragma unroll
        for (int half = 0; half < 2; half++) sums.sum[half] = sum_of_quad(sums.sum[half]);
        store_rows<S>(out, &sums, q, slot, args);
        __syncwarp();
        release_rows(&slot->is_free);
    }
}

template <class S>
static __global__ void __launch_bounds__(ROWS_THREADS, 1) wgmma_rows_kernel(const __grid_constant__ attend_args args)
{
    PTX_DYNAMIC_SHARED(1024, shared);
    rows_memory<S> *memory = (rows_memory<S> *)shared;
    if (threadIdx.x == 0) init_rows_memory<S>(memory);
    overlap_begin();
    __syncthreads();
    if (threadIdx.x >= ROWS_CONSUMERS + ROWS_LOADERS) {
        ptx_give_registers<S::SCOUT_REGISTERS>();
        scout_rows<S>(memory, &args);
    } else if (threadIdx.x >= ROWS_CONSUMERS) {
        ptx_give_registers<S::LOADER_REGISTERS>();
        load_rows<S>(memory, &args);
    } else {
        ptx_take_registers<S::CONSUMER_REGISTERS>();
        consume_rows<S>(memory, &args);
    }
}

template <class S> constexpr fv_cuda_attend_kernel wgmma_rows_of(void)
{
    return {
        .kernel = wgmma_rows_kernel<S>,
        .shared_bytes = (int32_t)sizeof(rows_memory<S>),
        .num_threads = ROWS_THREADS,
        .block_m = ROWS_BLOCK_M,
        .takes_row_parts = 1,
        .stays = 1,
        .map_tile = S::IS_NARROW ? S::HALF : S::TILE, /* what a warp widens it has asked for */
    };
}

#endif
