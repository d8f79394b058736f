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
#include "kernels/cuda/hopper/latent_copy.cuh"
#include "kernels/cuda/hopper/latent_end.cuh"

/* What the output of each of the thread's rows has to be multiplied by; AMLA: what is added to its bits. */
typedef struct latent_move {
    float by[2];
} latent_move;

/* The queries of LATENT_ROPE, operands of its four products. S reads shared memory for as long as it multiplies, and so a
 * ninth of the queries less of it. */
typedef struct latent_rope {
    uint32_t q[4][4];
} latent_rope;

static __device__ __forceinline__ void load_latent_rope(latent_rope *rope, const latent_memory *memory)
{
    const int32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    const uint32_t from = ptx_shared_address(memory->q[LATENT_ROPE]) + panel_offset(LATENT_ROWS, row, lane / 16);
#pragma unroll
    for (int step = 0; step < 4; step++) ptx_ldmatrix_x4(rope->q[step], from ^ (step << 5));
}

/* S = Q K of a tile, of its first panel, LATENT_ROPE: issued as soon as it is there, a group. */
template <class T>
static __device__ __forceinline__ void multiply_latent_rope(float (&s)[LATENT_TILE / 2], const latent_rope *rope,
                                                            latent_memory *memory, int32_t buffer, uint32_t parity)
{
    const uint64_t k_at = ptx_anew(ptx_matrix_descriptor(memory->tiles[buffer][LATENT_ROPE], 16, 1024));
    ptx_mbarrier_wait(&memory->full[buffer][LATENT_ROPE], parity);
    ptx_wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
        ptx_wgmma_m64n64k16_rs<T>(s, rope->q[step], ptx_descriptor_at(k_at, step * 32), step > 0);
    ptx_wgmma_commit();
}

/* Of its other panels: issued, each as soon as it is there, and each a group. */
template <class T>
static __device__ __forceinline__ void multiply_latent_panels(float (&s)[LATENT_TILE / 2], latent_memory *memory,
                                                              int32_t buffer, uint32_t parity)
{
    uint64_t q_at = ptx_anew(ptx_matrix_descriptor(memory->q[0], 16, 1024));
    uint64_t k_at = ptx_anew(ptx_matrix_descriptor(memory->tiles[buffer][0], 16, 1024));
#pragma unroll 1
    for (int32_t panel = 0; panel < LATENT_ROPE; panel++) {
        ptx_mbarrier_wait(&memory->full[buffer][panel], parity);
        ptx_wgmma_fence();
#pragma unroll
        for (int d = 0; d < 64; d += 16)
            ptx_wgmma_m64n64k16_ss<T>(s, ptx_descriptor_at(q_at, d * 2), ptx_descriptor_at(k_at, d * 2), 1);
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

/* The products with part of a tile have ended: it may be overwritten. Part `group`: that group's values. */
static __device__ __forceinline__ void release_latents(latent_memory *memory, int32_t buffer, int32_t part)
{
    if (arrives_for_warp()) ptx_mbarrier_arrive(&memory->empty[buffer][part]);
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

/* All sums go over to new maxima, when no product with the output is under way. Rare, and a warp's own decision: so there
 * is no wait for products here, which warps of a warpgroup would come to apart. */
template <class F>
static __device__ __forceinline__ void move_latent_sums(float (&out)[LATENT_VALUE / 4], latent_state *state,
                                                        const float (&max)[2], const attend_args *args)
{
    latent_move move;
    move_latent_maxima<F>(&move, state, max, args);
    rescale_latent_values<F>(out, &move, args);
}

/* Do all rows see all keys of a tile? Asked before S is there: it takes a trip to shared memory. */
static __device__ __forceinline__ bool is_latent_tile_seen(const latent_memory *memory, int32_t tile_first)
{
    const attend_keys *keys = &memory->keys;
    return tile_first >= keys->full_first && tile_first + LATENT_TILE <= keys->full_end;
}

/* P of the warpgroup's own tile in place of its dot products, and its sums; to the end of all products under way. */
template <class F>
static __device__ __forceinline__ void weigh_latent_keys(float (&out)[LATENT_VALUE / 4], float (&s)[LATENT_TILE / 2],
                                                         latent_state *state, const latent_memory *memory,
                                                         const attend_args *args, int32_t tile_first, float scale,
                                                         bool is_seen)
{
    const bool keeps_order = scale > 0; /* of products and scores */
    if (!is_seen || !keeps_order) {
#pragma unroll
        for (int i = 0; i < LATENT_TILE / 2 && !keeps_order; i++) s[i] *= scale;
        mask_keys(s, memory->rows, state->row, tile_first);
    }
    const float factor = keeps_order ? scale : 1.0f;
    row_sums of_tile = {};
    float own[2];
    find_own_maxima(own, s);
    choose_row_maxima(of_tile.max, own, &state->sums, factor, args->max_slack);
    const bool moves = has_moved<F>(state, of_tile.max);
    exponentiate_products(s, &of_tile, factor);
    latent_move move;
    ptx_wgmma_settle(s);
    if (moves) move_latent_maxima<F>(&move, state, of_tile.max, args); /* a branch, which P does not sink behind */
    ptx_wgmma_wait<0>();
    ptx_wgmma_settle(out);
    if (moves) rescale_latent_values<F>(out, &move, args);
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

/* P as the tensor cores get it. */
template <class F>
static __device__ __forceinline__ void narrow_latent_weights(uint32_t (&p)[LATENT_TILE / 4],
                                                             const float (&s)[LATENT_TILE / 2], latent_state *state)
{
    row_sums of_tile = {};
    narrow_keys<typename F::T>(p, s, &of_tile);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (F::IS_AMLA) of_tile.rounded[half] = __fdividef(of_tile.rounded[half], state->scale[half]);
        state->sums.rounded[half] += of_tile.rounded[half];
    }
}

/* P to where the other warpgroup reads it, and the maxima it is relative to: while the own values are multiplied. */
static __device__ __forceinline__ void hand_over_weights(const uint32_t (&p)[LATENT_TILE / 4],
                                                         const latent_state *state, latent_memory *memory,
                                                         int32_t barrier)
{
    const int32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    const uint32_t to = ptx_shared_address(memory->p) + panel_offset(LATENT_ROWS, row, lane / 16);
#pragma unroll
    for (int i = 0; i < LATENT_TILE / 16; i++)
        ptx_stmatrix_x4(to ^ (i << 5), p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
    __syncwarp(); /* the other's maxima are read */
    if (threadIdx.x % 4 == 0) {
        memory->row_max[state->row] = state->sums.max[0];
        memory->row_max[state->row + 8] = state->sums.max[1];
    }
    ptx_fence_proxy_async();
    arrive_at_bar(barrier, LATENT_CONSUMERS);
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
    latent_rope rope;
    /* Without a tile of its own a warpgroup never looks at them, and ends of rows may lie there already: racecheck's form
     * leaves them, for the ordinary one, whose tiles take up to 4% longer so, reads what it does not use. */
    if (ARRIVALS_OF_WARP == 1 || group < num_tiles) load_latent_rope(&rope, memory);
#pragma unroll 1
    for (int32_t tile = group; tile < num_tiles; tile += 2, parity ^= 1) {
        if (group == 0 && tile > 0) attend_other_latent<F>(out, state, memory, args, group);
        multiply_latent_rope<typename F::T>(s, &rope, memory, group, parity);
        const bool is_seen = ptx_keep((uint32_t)is_latent_tile_seen(memory, origin + tile * LATENT_TILE)) != 0;
        ptx_wgmma_wait<1>(); /* the values' product, with one panel behind it for the tensor cores to go on with */
        if (group == 0 && tile > 0) release_latents(memory, 1, 0);
        multiply_latent_panels<typename F::T>(s, memory, group, parity);
        if (group == 1) {
            attend_other_latent<F>(out, state, memory, args, group);
            ptx_wgmma_wait<1>();
        } else {
            ptx_wgmma_wait<0>();
        }
        ptx_wgmma_settle(s);
        release_latents(memory, group, LATENT_ROPE / LATENT_LOW_PANELS);
        weigh_latent_keys<F>(out, s, state, memory, args, origin + tile * LATENT_TILE, scale, is_seen);
        if (group == 1) release_latents(memory, 0, 1);
        narrow_latent_weights<F>(p, s, state);
        multiply_own_values<typename F::T>(out, p, memory, group, group);
        hand_over_weights(p, state, memory, LATENT_BARRIER_EVEN + group);
        ptx_wgmma_wait<0>();
        ptx_wgmma_settle(out);
        release_latents(memory, group, group);
    }
    if (num_tiles == 0 || num_tiles % 2 != group) return give_row_sums(state, memory, group);
    attend_other_latent<F>(out, state, memory, args, group);
    give_row_sums(state, memory, group);
    ptx_wgmma_wait<0>();
    ptx_wgmma_settle(out);
}

template <class F>
static __device__ __forceinline__ void consume_latents(latent_memory *memory, const attend_args *args,
                                                       const fv_work_item *item, int32_t row0)
{
    const int32_t group = warpgroup_of_thread();
    keep_latent_job(memory, args, item, row0);
    __syncwarp();
    arrive_at_bar(&memory->bars, LATENT_BARRIER_JOB, LATENT_ENDERS);
    float out[LATENT_VALUE / 4];
#pragma unroll
    for (int i = 0; i < LATENT_VALUE / 4; i++) out[i] = 0;
    latent_state state;
    clear_row_sums(&state.sums);
    state.scale[0] = state.scale[1] = 1;
    state.row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    ptx_cp_async_wait<0>();
    ptx_fence_proxy_async();
    ptx_bar_sync(LATENT_BARRIER_CONSUMERS, LATENT_CONSUMERS);
    const int32_t origin = first_latent_key(&memory->keys), num_tiles = count_latent_tiles(&memory->keys);
    const float scale = args->params.scale * memory->job.k_head_scale * FV_LOG2E;
    attend_latents<F>(out, &state, memory, args, group, origin, num_tiles, scale);
    store_latent_rows<F>(out, &state, memory, args, group);
}

/* The last two warps. */
template <class F>
static __device__ __forceinline__ void announce_and_end_latents(latent_memory *memory, const attend_args *args,
                                                                const attend_keys *keys)
{
    attend_end end;
    char *const to = place_row_of_announcer(&end, memory, args);
    announce_latents(memory, args, keys);
    if (is_split(args)) ptx_cluster_wait(); /* the other block's barriers are there */
    end_latent_rows<F>(&end, to, memory, args);
}

template <class F>
static __global__ void __launch_bounds__(LATENT_THREADS, 1)
    wgmma_latent_kernel(const __grid_constant__ attend_args args)
{
    PTX_DYNAMIC_SHARED(1024, shared);
    latent_memory *memory = (latent_memory *)shared;
    fv_work_item item;
    attend_keys keys;
    int32_t row0;
    const bool produces = threadIdx.x >= LATENT_CONSUMERS;
    if (args.map_rows > 0 && threadIdx.x == LATENT_CONSUMERS) ptx_prefetch_map(&args.maps[0]);
    if (!find_latent_item(&item, &row0, memory, &args)) return;
    if (!produces) load_latent_queries(memory, &args, &item, row0);
    const bool is_early = produces && find_early_keys(&keys, &args, &item, row0, LATENT_ROWS);
    if (!is_early && !find_latent_rows(&keys, memory, &args, &item, row0)) return;
    if (produces) {
        if (is_split(&args)) ptx_cluster_arrive();
        ptx_give_registers<LATENT_PRODUCER_REGISTERS>(); /* waits for loads under way */
        if (threadIdx.x < LATENT_CONSUMERS + LATENT_LOADERS) {
            load_latents(memory, &args, &item, &keys, row0);
            if (is_split(&args)) ptx_cluster_wait();
        } else {
            announce_and_end_latents<F>(memory, &args, &keys);
        }
    } else {
        if (is_split(&args)) ptx_cluster_arrive();
        ptx_take_registers<LATENT_CONSUMER_REGISTERS>();
        consume_latents<F>(memory, &args, &item, row0);
    }
}

template <class F> constexpr fv_cuda_attend_kernel wgmma_latent_of(void)
{
    return {
        .kernel = wgmma_latent_kernel<F>,
        .shared_bytes = (int32_t)sizeof(latent_memory),
        .num_threads = LATENT_THREADS,
        .block_m = LATENT_ROWS,
        .takes_row_parts = 1,
        .splits_items = !F::IS_AMLA,
        .narrows_partials = 1,
    };
}

#endif
