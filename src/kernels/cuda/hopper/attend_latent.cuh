/* MLA decode of 64 rows on Hopper (wgmma): tiles of 64 latents of 576 elements, whose first 512 are the values. Two
 * of three warpgroups multiply, the third brings latents to two tiles of shared memory. Why: docs/cuda/mla_decode.md.
 *
 *   first warpgroup                         second warpgroup                       tensor cores
 *   S(0) = Q K(0)                                                                  S(0)
 *   softmax, P(0) to shared memory          S(1) = Q K(1)                          S(1)
 *   O_low += P(0) V(0)_low                  O_high += P(0) V(0)_high, softmax      P(0) V(0)
 *   O_low += P(1) V(1)_low                  P(1) to shared memory, O_high += ...   P(1) V(1)
 *   S(2) = Q K(2) ...                       S(3) = Q K(3) ...
 *
 * 64 rows x 512 values in fp32 are the registers of two warpgroups: so each has all rows and half of the values, and S
 * of every second tile. A warpgroup's own P is an operand from registers; the other's comes through shared memory, of
 * which a warp writes the rows that it alone reads in its own products. */
#ifndef FV_KERNELS_CUDA_HOPPER_ATTEND_LATENT_CUH
#define FV_KERNELS_CUDA_HOPPER_ATTEND_LATENT_CUH

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/exponent_add.cuh"
#include "kernels/cuda/hopper/latent_block.cuh"
#include "kernels/cuda/narrow_partial.cuh"

/* --- producers ------------------------------------------------------------------------------------------------- */

/* Where a key lies, known before it is asked for. */
typedef struct latent_slot {
    int32_t page, slot;
} latent_slot;

/* Keys that no row sees are a neighbour's, whose latents weigh nothing there. */
static __device__ __forceinline__ latent_slot find_latent_slot(const attend_args *args, const int32_t *table,
                                                               const attend_keys *keys, int32_t key)
{
    const int2 at = split_key(args, fv_max_i32(keys->first, fv_min_i32(key, keys->end - 1)));
    return {table[at.x], at.y};
}

/* A tile comes as boxes of the map where there is one, and no box has keys that no row sees. */
static __device__ __forceinline__ bool comes_in_boxes(const attend_args *args, const attend_keys *keys,
                                                      int32_t tile_first)
{
    return args->map_rows > 0 && tile_first >= keys->first && tile_first + LATENT_TILE <= keys->end;
}

/* The row of a tile that a loader looks up; a warp's 32 are those that it brings. */
static __device__ __forceinline__ int32_t row_of_loader(void) { return threadIdx.x % LATENT_LOADERS; }

/* Half a tile may be overwritten. */
static __device__ __forceinline__ void wait_for_space(latent_memory *memory, int32_t tile, int32_t side)
{
    ptx_mbarrier_wait(&memory->empty[tile % 2][side], (tile / 2 + 1) % 2);
}

/* Where box `box` of the warp's lies: the same in all lanes. */
static __device__ __forceinline__ latent_slot slot_of_box(const attend_args *args, latent_slot at, int32_t box)
{
    return {__shfl_sync(~0u, at.page, box * args->map_rows), __shfl_sync(~0u, at.slot, box * args->map_rows)};
}

/* Panels FIRST .. END - 1 of the boxes that begin at the warp's rows, when there is space, and how many bytes that is: the
 * phase of a panel's barrier ends when both warps have said so, and all bytes are there. By one lane, and from what is the
 * same in all: else a copy takes 40 instructions, and a tile longer to ask for than to multiply. */
template <int FIRST, int END>
static __device__ __forceinline__ void load_box_panels(latent_memory *memory, const attend_args *args, int32_t tile,
                                                       latent_slot at, int32_t num_boxes)
{
    const int32_t buffer = uniform(tile % 2), row = uniform(row_of_loader() / 32 * 32), box_rows = args->map_rows;
    latent_slot of_box = slot_of_box(args, at, 0);
    wait_for_space(memory, tile, FIRST > 0);
#pragma unroll 1
    for (int32_t box = 0; box < num_boxes; box++) {
        const int32_t offset = (row + box * box_rows) * FV_PANEL_ROW_BYTES;
        if (ptx_elect()) {
#pragma unroll
            for (int panel = FIRST; panel < END; panel++)
                ptx_tensor_copy(memory->tiles[buffer][panel] + offset, &args->key_map, panel * 64, of_box.slot,
                                of_box.page, &memory->full[buffer][panel]);
        }
        of_box = slot_of_box(args, at, box + 1);
    }
    if (ptx_elect()) {
#pragma unroll
        for (int panel = FIRST; panel < END; panel++)
            ptx_mbarrier_expect(&memory->full[buffer][panel], num_boxes * box_rows * FV_PANEL_ROW_BYTES);
    }
    __syncwarp();
}

/* The warp's part of a tile that comes in boxes of the map; the first warp's are all where one is a tile. */
static __device__ __forceinline__ void load_latent_boxes(latent_memory *memory, const attend_args *args, int32_t tile,
                                                         latent_slot at)
{
    const int32_t box_rows = args->map_rows;
    const int32_t num_boxes = uniform(box_rows < LATENT_TILE ? 32 / box_rows : row_of_loader() < 32 ? 1 : 0);
    load_box_panels<0, LATENT_LOW_PANELS>(memory, args, tile, at, num_boxes);
    load_box_panels<LATENT_LOW_PANELS, LATENT_PANELS>(memory, args, tile, at, num_boxes);
}

/* Panels FIRST .. END - 1 of the warp's rows, eight lanes to each: asked for. L2 takes 256 bytes at a time from memory, as
 * for boxes, which a row's first and last panel may share with other rows. */
template <int FIRST, int END>
static __device__ __forceinline__ void load_latent_panels(latent_memory *memory, int32_t buffer,
                                                          const char *const (&rows)[8])
{
    const int32_t row = row_of_loader() / 32 * 32 + threadIdx.x % 32 / 8;
    const uint32_t to = ptx_shared_address(memory->tiles[buffer]) + panel_offset(LATENT_TILE, row, threadIdx.x % 8);
#pragma unroll
    for (int panel = FIRST; panel < END; panel++) {
#pragma unroll
        for (int i = 0; i < 8; i++) { /* every fourth row: the swizzle has two forms */
            const uint32_t at = panel * LATENT_PANEL_BYTES + i * 4 * FV_PANEL_ROW_BYTES;
            const char *from = rows[i] + panel * FV_PANEL_ROW_BYTES;
            if (panel > 0 && panel + 1 < LATENT_PANELS)
                ptx_cp_async_16_of_256((to ^ (i % 2 << 6)) + at, from);
            else
                ptx_cp_async_16((to ^ (i % 2 << 6)) + at, from);
        }
        ptx_cp_async_arrive(&memory->landed[buffer][panel]);
    }
}

/* The warp's rows one by one: for pages of any size. */
static __device__ __forceinline__ void load_latent_rows(latent_memory *memory, const attend_args *args, int32_t tile,
                                                        latent_slot at)
{
    const fv_kv_plane *plane = &args->k[0].plane;
    const int64_t own = at.page * plane->block_stride + at.slot * plane->slot_stride;
    const int32_t buffer = uniform(tile % 2);
    const char *rows[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        rows[i] = (const char *)plane->data + __shfl_sync(~0u, own, i * 4 + threadIdx.x % 32 / 8) +
                  threadIdx.x % 8 * 16;
    wait_for_space(memory, tile, 0);
    load_latent_panels<0, LATENT_LOW_PANELS>(memory, buffer, rows);
    wait_for_space(memory, tile, 1);
    load_latent_panels<LATENT_LOW_PANELS, LATENT_PANELS>(memory, buffer, rows);
}

/* The first two warps: they ask for latents, and wait for nothing but space. */
static __device__ __forceinline__ void load_latents(latent_memory *memory, const attend_args *args,
                                                    const int32_t *table, const attend_keys *keys, int32_t origin,
                                                    int32_t num_tiles)
{
    const int32_t first = origin + row_of_loader();
    latent_slot next = find_latent_slot(args, table, keys, first);
    latent_slot second = find_latent_slot(args, table, keys, first + LATENT_TILE);
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; tile++) {
        const int32_t tile_first = origin + tile * LATENT_TILE;
        const latent_slot at = next;
        next = second;
        second = find_latent_slot(args, table, keys, first + (tile + 2) * LATENT_TILE);
        if (comes_in_boxes(args, keys, tile_first))
            load_latent_boxes(memory, args, tile, at);
        else
            load_latent_rows(memory, args, tile, at);
    }
}

/* The other two take turns: what landed row by row is announced, in place of the boxes' two arrivals, behind the fence
 * that products need. It may wait for copies under way, so it is not for those who ask for them. */
static __device__ __forceinline__ void announce_latents(latent_memory *memory, const attend_args *args,
                                                        const attend_keys *keys, int32_t origin, int32_t num_tiles)
{
    const int32_t first_panel = threadIdx.x / 32 % 2;
    uint32_t parities = 0; /* a bit for each buffer */
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; tile++) {
        if (comes_in_boxes(args, keys, origin + tile * LATENT_TILE)) continue;
        const int32_t buffer = tile % 2;
#pragma unroll 1
        for (int32_t panel = first_panel; panel < LATENT_PANELS; panel += 2) {
            ptx_mbarrier_wait(&memory->landed[buffer][panel], parities >> buffer & 1);
            ptx_fence_proxy_async();
            if (threadIdx.x % 32 < LATENT_LOADERS / 32) ptx_mbarrier_arrive(&memory->full[buffer][panel]);
        }
        parities ^= 1u << buffer;
    }
}

static __device__ __forceinline__ void produce_latents(latent_memory *memory, const attend_args *args,
                                                       const fv_work_item *item, const attend_keys *keys)
{
    const int32_t *table = args->params.block_table + item->table_row * args->params.block_table_stride;
    const int32_t origin = first_latent_key(keys), num_tiles = count_latent_tiles(keys);
    if (num_tiles == 0) return;
    if (threadIdx.x < LATENT_CONSUMERS + LATENT_LOADERS)
        load_latents(memory, args, table, keys, origin, num_tiles);
    else
        announce_latents(memory, args, keys, origin, num_tiles);
}

/* --- consumers ------------------------------------------------------------------------------------------------- */

/* What a warpgroup knows of its rows, of which a thread has two. */
typedef struct latent_state {
    row_sums sums;  /* of the warpgroup's own tiles; maxima of all */
    float scale[2]; /* of AMLA's rows, as it follows from their maxima */
    int32_t row;    /* the thread's first one; the other is 8 further on */
} latent_state;

/* What the output of each of the thread's rows has to be multiplied by; AMLA: what is added to its bits. */
typedef struct latent_move {
    float by[2];
} latent_move;

/* S = Q K of a tile, panels FIRST .. END - 1: issued, each as soon as it is there, and each a group. */
template <class T, int FIRST, int END>
static __device__ __forceinline__ void multiply_latent_panels(float (&s)[LATENT_TILE / 2], latent_memory *memory,
                                                              int32_t buffer, uint32_t parity)
{
    uint64_t q_at = ptx_anew(ptx_matrix_descriptor(memory->q[FIRST], 16, 1024));
    uint64_t k_at = ptx_anew(ptx_matrix_descriptor(memory->tiles[buffer][FIRST], 16, 1024));
#pragma unroll 1
    for (int32_t panel = FIRST; panel < END; panel++) {
        ptx_mbarrier_wait(&memory->full[buffer][panel], parity);
        ptx_wgmma_fence();
#pragma unroll
        for (int d = 0; d < 64; d += 16)
            ptx_wgmma_m64n64k16_ss<T>(s, ptx_descriptor_at(q_at, d * 2), ptx_descriptor_at(k_at, d * 2), panel + d > 0);
        ptx_wgmma_commit();
        q_at = ptx_descriptor_at(q_at, LATENT_PANEL_BYTES);
        k_at = ptx_descriptor_at(k_at, LATENT_PANEL_BYTES);
    }
}

static __device__ __forceinline__ uint64_t latent_values_at(const latent_memory *memory, int32_t buffer, int32_t group)
{
    return ptx_anew(ptx_matrix_descriptor(memory->tiles[buffer][group * LATENT_LOW_PANELS], LATENT_PANEL_BYTES, 1024));
}

/* O += P V of a tile, half of the columns: issued. With the warpgroup's own P, from registers. */
template <class T>
static __device__ __forceinline__ void multiply_own_values(float (&out)[LATENT_VALUE / 4],
                                                           const uint32_t (&p)[LATENT_TILE / 4],
                                                           const latent_memory *memory, int32_t buffer, int32_t group)
{
    const uint64_t v_at = latent_values_at(memory, buffer, group);
    ptx_wgmma_settle(out);
    ptx_wgmma_fence();
#pragma unroll
    for (int key = 0; key < LATENT_TILE; key += 16) {
        const uint32_t a[4] = {p[key / 4], p[key / 4 + 1], p[key / 4 + 2], p[key / 4 + 3]};
        ptx_wgmma_m64n256k16_rs_nt<T>(out, a, ptx_descriptor_at(v_at, key * FV_PANEL_ROW_BYTES), 1);
    }
    ptx_wgmma_commit();
}

/* With the other's, from shared memory. */
template <class T>
static __device__ __forceinline__ void multiply_other_values(float (&out)[LATENT_VALUE / 4],
                                                             const latent_memory *memory, int32_t buffer, int32_t group)
{
    const uint64_t p_at = ptx_anew(ptx_matrix_descriptor(memory->p, 16, 1024));
    const uint64_t v_at = latent_values_at(memory, buffer, group);
    ptx_wgmma_settle(out);
    ptx_wgmma_fence();
#pragma unroll
    for (int key = 0; key < LATENT_TILE; key += 16)
        ptx_wgmma_m64n256k16_ss_nt<T>(out, ptx_descriptor_at(p_at, key * 2),
                                      ptx_descriptor_at(v_at, key * FV_PANEL_ROW_BYTES), 1);
    ptx_wgmma_commit();
}

/* The products with half a tile have ended: it may be overwritten. */
static __device__ __forceinline__ void release_latents(latent_memory *memory, int32_t buffer, int32_t group)
{
    if (threadIdx.x % 32 == 0) ptx_mbarrier_arrive(&memory->empty[buffer][group]);
}

/* What a row's sums are relative to after a tile whose largest score is `max`. */
static __device__ __forceinline__ float choose_latent_max(float before, float max)
{
    return max > before + FV_MAX_SLACK ? max : before;
}

/* What has to be added to the output's bits when a row's maximum changes. */
static __device__ __forceinline__ int32_t move_latent_scale(float *scale, float max, float before,
                                                            const attend_args *args)
{
    amla_scale row = amla_scale_at_first();
    amla_move_scale(&row, before, -INFINITY, args->params.q_dtype, args->rescaling);
    const int32_t addend = amla_move_scale(&row, max, before, args->params.q_dtype, args->rescaling);
    *scale = row.scale;
    return addend;
}

/* The sums go over to new maxima; true: the output has to. */
template <class F>
static __device__ __forceinline__ bool move_latent_maxima(latent_move *move, latent_state *state, const float (&max)[2],
                                                          const attend_args *args)
{
    row_sums *sums = &state->sums;
    bool changes = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float before = sums->max[half];
        const float factor = max[half] == before ? 1.0f : ptx_ex2(before - max[half]);
        sums->max[half] = max[half];
        sums->sum[half] *= factor;
        sums->rounded[half] *= factor;
        move->by[half] = factor;
        if (F::IS_AMLA && args->rescaling != FV_RESCALING_MULTIPLY_BF16)
            move->by[half] = __int_as_float(move_latent_scale(&state->scale[half], max[half], before, args));
        changes = changes || factor != 1.0f;
    }
    return __any_sync(~0u, changes);
}

template <class F>
static __device__ __forceinline__ void rescale_latent_values(float (&out)[LATENT_VALUE / 4], const latent_move *move,
                                                             const attend_args *args)
{
    if (!F::IS_AMLA || args->rescaling == FV_RESCALING_MULTIPLY_BF16) {
        rescale_values(out, move->by);
    } else {
#pragma unroll
        for (int i = 0; i < LATENT_VALUE / 4; i++)
            out[i] = ptx_keep(exponent_add(ptx_keep(out[i]), __float_as_int(move->by[i / 2 % 2])));
    }
}

/* Do the sums have to move to new maxima? Those of a row without a key yet are 0 at any; AMLA's scale moves with it. */
template <class F> static __device__ __forceinline__ bool has_moved(const latent_state *state, const float (&max)[2])
{
    bool moves = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float before = state->sums.max[half];
        moves = moves || (max[half] != before && (F::IS_AMLA || before > -INFINITY));
    }
    return __any_sync(~0u, moves);
}

/* All sums go over to new maxima; products with the output may be under way. Rare. */
template <class F>
static __device__ __forceinline__ void move_latent_sums(float (&out)[LATENT_VALUE / 4], latent_state *state,
                                                        const float (&max)[2], const attend_args *args)
{
    latent_move move;
    ptx_wgmma_wait<0>();
    ptx_wgmma_settle(out);
    move_latent_maxima<F>(&move, state, max, args);
    rescale_latent_values<F>(out, &move, args);
}

/* P of the warpgroup's own tile in place of its dot products, and its sums. */
template <class F>
static __device__ __forceinline__ void weigh_latent_keys(float (&out)[LATENT_VALUE / 4], float (&s)[LATENT_TILE / 2],
                                                         latent_state *state, const latent_memory *memory,
                                                         const attend_args *args, int32_t tile_first, float scale)
{
    const attend_keys *keys = &memory->keys;
    const bool is_inside = tile_first >= keys->full_first && tile_first + LATENT_TILE <= keys->full_end;
    const bool keeps_order = scale > 0; /* of products and scores */
    if (!is_inside || !keeps_order) {
#pragma unroll
        for (int i = 0; i < LATENT_TILE / 2 && !keeps_order; i++) s[i] *= scale;
        mask_keys(s, memory->rows, state->row, tile_first);
    }
    const float factor = keeps_order ? scale : 1.0f;
    row_sums of_tile = {};
    find_row_maxima(of_tile.max, s);
#pragma unroll
    for (int half = 0; half < 2; half++)
        of_tile.max[half] = choose_latent_max(state->sums.max[half], of_tile.max[half] * factor);
    const bool moves = has_moved<F>(state, of_tile.max);
    exponentiate_products(s, &of_tile, factor);
    ptx_wgmma_settle(s); /* before the branch: what follows it may begin with a wait for products under way */
    if (moves) move_latent_sums<F>(out, state, of_tile.max, args);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        state->sums.max[half] = of_tile.max[half];
        state->sums.sum[half] += of_tile.sum[half];
    }
    if (F::IS_AMLA) {
#pragma unroll
        for (int i = 0; i < LATENT_TILE / 2; i++) s[i] *= state->scale[i / 2 % 2];
    }
}

/* P to where the other warpgroup reads it, and the maxima it is relative to. */
template <class F>
static __device__ __forceinline__ void hand_over_weights(uint32_t (&p)[LATENT_TILE / 4],
                                                         const float (&s)[LATENT_TILE / 2], latent_state *state,
                                                         latent_memory *memory, int32_t barrier)
{
    row_sums of_tile = {};
    narrow_keys<typename F::T>(p, s, &of_tile);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (F::IS_AMLA) of_tile.rounded[half] = __fdividef(of_tile.rounded[half], state->scale[half]);
        state->sums.rounded[half] += of_tile.rounded[half];
    }
    const int32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    const uint32_t to = ptx_shared_address(memory->p) + panel_offset(LATENT_ROWS, row, lane / 16);
#pragma unroll
    for (int i = 0; i < LATENT_TILE / 16; i++)
        ptx_stmatrix_x4(to ^ (i << 5), p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
    if (threadIdx.x % 4 == 0) {
        memory->row_max[state->row] = state->sums.max[0];
        memory->row_max[state->row + 8] = state->sums.max[1];
    }
    ptx_fence_proxy_async();
    ptx_bar_arrive(barrier, LATENT_CONSUMERS);
}

/* A tile of the other warpgroup's, when its P is there: the product is issued, of an output relative to its maxima. */
template <class F>
static __device__ __forceinline__ void attend_other_latent(float (&out)[LATENT_VALUE / 4], latent_state *state,
                                                           const latent_memory *memory, const attend_args *args,
                                                           int32_t group)
{
    ptx_bar_sync(LATENT_BARRIER_ODD - group, LATENT_CONSUMERS);
    const float max[2] = {memory->row_max[state->row], memory->row_max[state->row + 8]};
    if (has_moved<F>(state, max)) move_latent_sums<F>(out, state, max, args);
    state->sums.max[0] = max[0];
    state->sums.max[1] = max[1];
    multiply_other_values<typename F::T>(out, memory, 1 - group, group);
}

/* Tiles group, group + 2, ... and the group's half of the columns of all. Both warpgroups run the same instructions:
 * two loops were as much as a multiprocessor keeps near. The second has S under way when the other's tile comes, the
 * first has not asked for it yet. */
template <class F>
static __device__ __forceinline__ void attend_latents(float (&out)[LATENT_VALUE / 4], latent_state *state,
                                                      latent_memory *memory, const attend_args *args, int32_t group,
                                                      int32_t origin, int32_t num_tiles, float scale)
{
    float s[LATENT_TILE / 2];
    uint32_t p[LATENT_TILE / 4];
    uint32_t parity = 0;
#pragma unroll 1
    for (int32_t tile = group; tile < num_tiles; tile += 2, parity ^= 1) {
        if (group == 0 && tile > 0) attend_other_latent<F>(out, state, memory, args, group);
        multiply_latent_panels<typename F::T, 0, 1>(s, memory, group, parity);
        ptx_wgmma_wait<1>(); /* the values' product, with one panel behind it for the tensor cores to go on with */
        if (group == 0 && tile > 0) release_latents(memory, 1, 0);
        multiply_latent_panels<typename F::T, 1, LATENT_PANELS>(s, memory, group, parity);
        if (group == 1) {
            attend_other_latent<F>(out, state, memory, args, group);
            ptx_wgmma_wait<1>();
        } else {
            ptx_wgmma_wait<0>();
        }
        ptx_wgmma_settle(s);
        weigh_latent_keys<F>(out, s, state, memory, args, origin + tile * LATENT_TILE, scale);
        ptx_wgmma_wait<0>();
        ptx_wgmma_settle(out);
        if (group == 1) release_latents(memory, 0, 1);
        hand_over_weights<F>(p, s, state, memory, LATENT_BARRIER_EVEN + group);
        multiply_own_values<typename F::T>(out, p, memory, group, group);
        ptx_wgmma_wait<0>();
        ptx_wgmma_settle(out);
        release_latents(memory, group, group);
    }
    if (num_tiles == 0 || num_tiles % 2 != group) return;
    attend_other_latent<F>(out, state, memory, args, group);
    ptx_wgmma_wait<0>();
    ptx_wgmma_settle(out);
}

/* Maximum, sum and sum of P as rounded of row lane % 16 of the warp's 16, from both warpgroups. Two barriers, after the first of
 * which no product reads shared memory any more. */
static __device__ __forceinline__ float4 sum_latent_row(const latent_state *state, latent_memory *memory, int32_t group)
{
    const row_sums *sums = &state->sums;
    float2 *values = (float2 *)memory->p;
    ptx_bar_sync(LATENT_BARRIER_CONSUMERS, LATENT_CONSUMERS);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float2 own = make_float2(sum_of_quad(sums->sum[half]), sum_of_quad(sums->rounded[half]));
        if (threadIdx.x % 4 == 0) values[group * LATENT_ROWS + state->row + half * 8] = own;
    }
    ptx_bar_sync(LATENT_BARRIER_CONSUMERS, LATENT_CONSUMERS);
    const int32_t lane = threadIdx.x % 32, r = threadIdx.x / 32 % 4 * 16 + lane % 16, from = lane % 8 * 4;
    const float max[2] = {__shfl_sync(~0u, sums->max[0], from), __shfl_sync(~0u, sums->max[1], from)};
    const float2 low = values[r], high = values[LATENT_ROWS + r];
    return make_float4(lane % 16 < 8 ? max[0] : max[1], low.x + high.x, low.y + high.y, 0);
}

/* The end of row `lane` of the warp's 16, in its first 16 lanes; others: out_factor 0, of no row. */
template <class F>
static __device__ __forceinline__ attend_end end_latent_row(const float4 *sums, const latent_state *state,
                                                            const latent_memory *memory, const attend_args *args,
                                                            int32_t num_rows)
{
    const attend_job *job = &memory->job;
    const int32_t lane = threadIdx.x % 32, r = threadIdx.x / 32 % 4 * 16 + lane, from = lane % 8 * 4;
    const float scale[2] = {F::IS_AMLA ? __shfl_sync(~0u, state->scale[0], from) : 1.0f,
                            F::IS_AMLA ? __shfl_sync(~0u, state->scale[1], from) : 1.0f};
    if (lane >= 16 || r >= num_rows) return {-INFINITY, 0, 0, -1, 0};
    float factor = factor_of_values(job, sums->y, sums->z);
    if (F::IS_AMLA) factor = __fdividef(factor, lane < 8 ? scale[0] : scale[1]);
    return end_row(args, job, &memory->rows[r], sums->x, sums->y, factor);
}

/* Neighbouring elements in 16 bits: multiplied by `by`, as fp16 or bf16, or as multiples of the scale that it is the
 * inverse of. */
template <class T> static __device__ __forceinline__ uint32_t latent_pair(float low, float high, float by)
{
    return fv_narrow_pair<T>(low * by, high * by);
}
template <> __device__ __forceinline__ uint32_t latent_pair<int16_t>(float low, float high, float by)
{
    return narrow_pair(low, high, by);
}

/* Where the thread's part of rows of fp32 lies, of `row_bytes`. */
static __device__ __forceinline__ int32_t staged_part(int32_t row_bytes)
{
    return threadIdx.x % 32 / 4 * row_bytes + threadIdx.x % 4 * (int32_t)sizeof(float2);
}

/* The warp's part of the output as its end has it, to shared memory from `to` on, rows of `row_bytes`: where four rows
 * of fp32, or eight of 16 bits, lie in all banks. */
template <class T>
static __device__ __forceinline__ void stage_latent_values(const float (&out)[LATENT_VALUE / 4], char *to,
                                                           int32_t row_bytes, const float (&by)[2])
{
    if constexpr (sizeof(T) == 4) {
        char *const own = to + staged_part(row_bytes), *const rows[2] = {own, own + 8 * row_bytes};
#pragma unroll
        for (int i = 0; i < LATENT_VALUE / 8; i++)
            *(float2 *)(rows[i % 2] + i / 2 * 32) = make_float2(out[2 * i] * by[i % 2], out[2 * i + 1] * by[i % 2]);
    } else {
        const int32_t lane = threadIdx.x % 32;
        const uint32_t at = ptx_shared_address(to) + lane % 16 * row_bytes + lane / 16 * 16;
#pragma unroll
        for (int i = 0; i < LATENT_VALUE / 4; i += 8)
            ptx_stmatrix_x4(
                at + i * 4, latent_pair<T>(out[i], out[i + 1], by[0]), latent_pair<T>(out[i + 2], out[i + 3], by[1]),
                latent_pair<T>(out[i + 4], out[i + 5], by[0]), latent_pair<T>(out[i + 6], out[i + 7], by[1]));
    }
}

/* Of the warp's half of each of the thread's rows the inverse of the scale of a partial result in 16 bits. The scale
 * takes the place of what the row is multiplied by. */
static __device__ __forceinline__ void find_narrow_scales(float (&inverse)[2], float (&factor)[2],
                                                          const float (&out)[LATENT_VALUE / 4])
{
    float largest[2] = {FV_NARROW_LEAST, FV_NARROW_LEAST};
#pragma unroll
    for (int i = 0; i < LATENT_VALUE / 4; i++) largest[i / 2 % 2] = ptx_max_or_nan(largest[i / 2 % 2], fabsf(out[i]));
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int step = 1; step < 4; step *= 2)
            largest[half] = ptx_max_or_nan(largest[half], __shfl_xor_sync(~0u, largest[half], step));
        inverse[half] = narrow_inverse_of(largest[half]);
        factor[half] = narrow_scale_of(largest[half], factor[half]);
    }
}

/* Rows first .. end - 1 of the warp's, whose places the lanes have, from shared memory: by the copy engine, or, where one is at no
 * multiple of 16 bytes, 16 bits at a time. */
static __device__ __forceinline__ void send_latent_rows(char *to_of_lane, const char *staged, int32_t row_bytes,
                                                        int32_t bytes, int32_t first = 0, int32_t end = 16)
{
    staged += first * row_bytes;
#pragma unroll 1
    for (int32_t i = first; i < end; i++, staged += row_bytes) {
        char *to = (char *)__shfl_sync(~0u, (uint64_t)to_of_lane, i);
        if (!to) break; /* the last ones are no rows */
        if ((uintptr_t)to % 16 == 0) {
            if (ptx_elect()) ptx_bulk_store(to, staged, bytes);
            continue;
        }
#pragma unroll 1
        for (int32_t at = threadIdx.x % 32 * 2; at < bytes; at += 64)
            *(uint16_t *)(to + at) = *(const uint16_t *)(staged + at);
    }
    ptx_bulk_commit();
}

/* Bytes that lie together, if there are any. */
static __device__ __forceinline__ void send_latent_run(char *to, const char *staged, int32_t bytes)
{
    if (bytes > 0 && ptx_elect()) ptx_bulk_store(to, staged, bytes);
    ptx_bulk_commit();
}

/* --- two blocks of an item: the first ends the first warpgroup's columns, the second the second's ----------------- */

/* The warp's part of the output, relative to the block's own maxima, goes to the other block when that has sent its sums too and
 * needs its queries no more. The block stays until it is there. */
static __device__ __forceinline__ void give_latent_values(const float (&out)[LATENT_VALUE / 4], const float4 *sums,
                                                          latent_memory *memory, int32_t group)
{
    const uint32_t other_rank = ~blockIdx.x % 2;
    const int32_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const float as_it_is[2] = {1, 1};
    char *staged = memory->tiles[group][0] + warp * LATENT_WARP_BYTES;
    ptx_cluster_wait(); /* its barriers are there */
    if (lane < 16)
        ptx_store_async_16(ptx_shared_address_in(sums_of_other(memory, warp * 16 + lane), other_rank), *sums,
                           ptx_shared_address_in(&memory->met, other_rank));
    stage_latent_values<float>(out, staged, LATENT_STAGED_BYTES, as_it_is);
    ptx_fence_proxy_async();
    ptx_mbarrier_wait(&memory->met, 0);
    __syncwarp();
    if (ptx_elect())
        ptx_bulk_send(ptx_shared_address_in(memory->q[0] + warp * LATENT_WARP_BYTES, other_rank), staged,
                      LATENT_WARP_BYTES, ptx_shared_address_in(&memory->inbox[warp], other_rank));
    __syncwarp();
    ptx_mbarrier_wait(&memory->taken, 0);
}

/* Output and sums go over to the keys of both blocks. */
static __device__ __forceinline__ void take_latent_values(float (&out)[LATENT_VALUE / 4], float4 *sums,
                                                          latent_memory *memory)
{
    const uint32_t other_rank = ~blockIdx.x % 2;
    const int32_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    ptx_cluster_wait();
    ptx_mbarrier_wait(&memory->met, 0);
    const float4 other = *sums_of_other(memory, warp * 16 + lane % 16);
    const float max = fmaxf(sums->x, other.x), base = max == -INFINITY ? 0.0f : max;
    const float weight = ptx_ex2(sums->x - base), of_other = ptx_ex2(other.x - base);
    *sums = make_float4(max, weight * sums->y + of_other * other.y, weight * sums->z + of_other * other.z, 0);
    const float weights[2] = {__shfl_sync(~0u, weight, lane / 4), __shfl_sync(~0u, weight, lane / 4 + 8)};
    const float others[2] = {__shfl_sync(~0u, of_other, lane / 4), __shfl_sync(~0u, of_other, lane / 4 + 8)};
    ptx_mbarrier_wait(&memory->inbox[warp], 0);
    if (ptx_elect()) /* to where nothing is any more */
        ptx_store_async_16(ptx_shared_address_in(memory->p + LATENT_PANEL_BYTES / 2 + warp * 16, other_rank), other,
                           ptx_shared_address_in(&memory->taken, other_rank));
    __syncwarp();
    const char *from = memory->q[0] + warp * LATENT_WARP_BYTES + staged_part(LATENT_STAGED_BYTES);
#pragma unroll
    for (int i = 0; i < LATENT_VALUE / 8; i++) {
        const float2 values = *(const float2 *)(from + i % 2 * 8 * LATENT_STAGED_BYTES + i / 2 * 32);
        out[2 * i] = out[2 * i] * weights[i % 2] + values.x * others[i % 2];
        out[2 * i + 1] = out[2 * i + 1] * weights[i % 2] + values.y * others[i % 2];
    }
}

/* --- the end of the rows ----------------------------------------------------------------------------------------- */

/* Where a row goes, as fp32, in 16 bits, or as the output. */
static __device__ __forceinline__ char *place_latent_row(const attend_args *args, const attend_row *row,
                                                         const attend_end *end, bool narrows)
{
    return narrows ? narrow_row(args->params.partial_out, end->partial, LATENT_VALUE) : target_of(args, row, end).to;
}

/* Scales, maximum and sum of a row in 16 bits: what the group has of it. */
static __device__ __forceinline__ void store_narrow_tail(char *row, int32_t group, float scale, const attend_end *end)
{
    narrow_tail *tail = (narrow_tail *)(row + LATENT_VALUE * 2);
    tail->scale[group] = scale;
    if (group == 0) store_partial_sums(&tail->max, &tail->sum, end);
}

/* The output, by way of the tiles' shared memory: written from registers it would be 3000 instructions, which a block runs
 * once, and 32 bytes of a row at a time. The two warps that have the same rows send half of them each. */
template <class F>
static __device__ __forceinline__ void store_latent_rows(float (&out)[LATENT_VALUE / 4], const latent_state *state,
                                                         latent_memory *memory, const attend_args *args, int32_t group,
                                                         int32_t num_rows)
{
    const bool shares = !F::IS_AMLA && is_split(args);
    float4 sums = sum_latent_row(state, memory, group);
    if (shares) {
        if (group != (int32_t)blockIdx.x % 2) return give_latent_values(out, &sums, memory, group);
        take_latent_values(out, &sums, memory);
    }
    const attend_end end = end_latent_row<F>(&sums, state, memory, args, num_rows);
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, first_row = warp * 16;
    const bool is_row = lane < 16 && first_row + lane < num_rows, is_partial = memory->job.item.partial >= 0;
    const bool narrows = is_partial && narrows_partials(&args->params);
    const fv_dtype dtype = is_partial ? FV_DTYPE_F32 : args->params.out_dtype;
    const int32_t element_bytes = dtype == FV_DTYPE_F32 && !narrows ? 4 : 2;
    const int32_t half_bytes = LATENT_VALUE / 2 * element_bytes;
    const int32_t row_bytes = (shares ? LATENT_VALUE / 2 + 8 : LATENT_VALUE + 8) * element_bytes;
    float factor[2] = {__shfl_sync(~0u, end.out_factor, lane / 4), __shfl_sync(~0u, end.out_factor, lane / 4 + 8)};
    char *rows = memory->tiles[shares ? group : 0][0] + first_row * row_bytes;
    char *staged = rows + (shares ? 0 : group * half_bytes);
    const attend_row *row = &memory->rows[first_row + lane % 16];
    char *to = is_row ? place_latent_row(args, row, &end, narrows) : NULL;
    if (narrows) {
        float inverse[2];
        find_narrow_scales(inverse, factor, out);
        const float scales[2] = {__shfl_sync(~0u, factor[0], lane % 8 * 4), __shfl_sync(~0u, factor[1], lane % 8 * 4)};
        if (is_row)
            store_narrow_tail(shares ? to : rows + lane * row_bytes, group, lane < 8 ? scales[0] : scales[1], &end);
        stage_latent_values<int16_t>(out, staged, row_bytes, inverse);
    } else if (dtype == FV_DTYPE_F32) {
        stage_latent_values<float>(out, staged, row_bytes, factor);
    } else if (dtype == FV_DTYPE_F16) {
        stage_latent_values<__half>(out, staged, row_bytes, factor);
    } else {
        stage_latent_values<__nv_bfloat16>(out, staged, row_bytes, factor);
    }
    __syncwarp();
    if (is_row && end.out_factor == 0 && !narrows) { /* no key: 0, whatever the sums are */
#pragma unroll 1
        for (int32_t at = 0; at < half_bytes; at += 16)
            *(uint4 *)(staged + lane * row_bytes + at) = make_uint4(0, 0, 0, 0);
    }
    ptx_fence_proxy_async();
    if (shares) {
        __syncwarp();
        send_latent_rows(is_row ? to + group * half_bytes : NULL, rows, row_bytes, half_bytes, 0, 16);
    } else {
        ptx_bar_sync(LATENT_BARRIER_ROWS + warp, 64); /* whole rows are there: half as many copies */
        if (narrows) /* one after the other in their slots, too, for all heads have one key */
            send_latent_run((char *)__shfl_sync(~0u, (uint64_t)to, group * 8), rows + group * 8 * row_bytes,
                            fv_min_i32(8, num_rows - first_row - group * 8) * row_bytes);
        else
            send_latent_rows(to, rows, row_bytes, 2 * half_bytes, group * 8, group * 8 + 8);
    }
    if (is_row && group == 0 && !narrows) store_sums(args, row, &end);
    ptx_bulk_wait_read();
}

template <class F>
static __device__ __forceinline__ void consume_latents(latent_memory *memory, const attend_args *args,
                                                       const fv_work_item *item)
{
    const int32_t group = warpgroup_of_thread();
    ptx_bar_sync(LATENT_BARRIER_CONSUMERS, LATENT_CONSUMERS);
    load_latent_queries(memory, args);
    ptx_cp_async_commit();
    keep_latent_job(memory, args, item);
    float out[LATENT_VALUE / 4];
#pragma unroll
    for (int i = 0; i < LATENT_VALUE / 4; i++) out[i] = 0;
    latent_state state;
    clear_row_sums(&state.sums);
    state.scale[0] = state.scale[1] = 1;
    state.row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const int32_t origin = first_latent_key(&memory->keys), num_tiles = count_latent_tiles(&memory->keys);
    ptx_cp_async_wait<0>();
    ptx_fence_proxy_async();
    ptx_bar_sync(LATENT_BARRIER_CONSUMERS, LATENT_CONSUMERS);
    const float scale = args->params.scale * memory->job.k_head_scale * FV_LOG2E;
    attend_latents<F>(out, &state, memory, args, group, origin, num_tiles, scale);
    /* In registers for the end alone: the loop's descriptors need it in a uniform one. */
    latent_memory *at_end = (latent_memory *)ptx_keep((const char *)memory);
    const int32_t num_rows = fv_min_i32(LATENT_ROWS, at_end->job.num_rows - first_latent_row(args));
    store_latent_rows<F>(out, &state, at_end, args, group, num_rows);
}

template <class F>
static __global__ void __launch_bounds__(LATENT_THREADS, 1)
    wgmma_latent_kernel(const __grid_constant__ attend_args args)
{
#if FV_HAS_WGMMA
    extern __shared__ __align__(1024) char shared[];
    latent_memory *memory = (latent_memory *)shared;
    fv_work_item item;
    attend_keys keys;
    if (args.map_rows > 0 && threadIdx.x == LATENT_CONSUMERS) ptx_prefetch_map(&args.key_map);
    if (!find_latent_item(&item, memory, &args)) return;
    if (!find_latent_rows(&keys, memory, &args, &item)) return;
    if (is_split(&args)) ptx_cluster_arrive();
    if (threadIdx.x >= LATENT_CONSUMERS) {
        ptx_give_registers<LATENT_PRODUCER_REGISTERS>();
        produce_latents(memory, &args, &item, &keys);
        if (is_split(&args)) ptx_cluster_wait();
    } else {
        ptx_take_registers<LATENT_CONSUMER_REGISTERS>();
        consume_latents<F>(memory, &args, &item);
    }
#endif
}

template <class F> constexpr fv_cuda_attend_kernel wgmma_latent_of(void)
{
    return {wgmma_latent_kernel<F>, (int32_t)sizeof(latent_memory), LATENT_THREADS, LATENT_ROWS, 1};
}

#endif
