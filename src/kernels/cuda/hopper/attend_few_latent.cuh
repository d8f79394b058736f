/* MLA decode of up to 16 or 32 rows on Hopper (wgmma), with keys and values along the 64 rows of its products:
 * latent_columns.cuh. Tiles, and the warpgroup that brings them, are those of attend_latent.cuh. Why:
 * docs/cuda/mla_decode.md.
 *
 *   first warpgroup    S(0) softmax  O_low += P(0) V(0)_low                  O_low += P(1) V(1)_low   S(2) ...
 *   second                           O_high += P(0) V(0)_high  S(1) softmax  O_high += P(1) V(1)_high
 *
 * Memory sets the pace. So who has no tile of its own to multiply takes the other's values at once, for them to be
 * overwritten, before it waits for keys. */
#ifndef FV_KERNELS_CUDA_HOPPER_ATTEND_FEW_LATENT_CUH
#define FV_KERNELS_CUDA_HOPPER_ATTEND_FEW_LATENT_CUH

#include "kernels/cuda/hopper/latent_columns.cuh"

/* As many panels as 227 KiB hold beside Q and P: they are a ring, which tiles go round. */
static constexpr int few_latent_slots(int rows) { return rows <= 16 ? 25 : 22; }

template <int NUM_ROWS> struct few_latent_memory {
    static constexpr int32_t ROWS = NUM_ROWS;
    static constexpr int32_t SLOTS = few_latent_slots(ROWS);
    /* What a ring holds beside whole tiles goes to panels that are free a tile before the others. */
    static constexpr int32_t FIRST_PANELS = SLOTS % LATENT_PANELS > 0 ? SLOTS % LATENT_PANELS : LATENT_LOW_PANELS;
    static constexpr bool IS_RING = true;
    alignas(1024) char q[LATENT_PANELS][ROWS * FV_PANEL_ROW_BYTES];
    alignas(1024) char tiles[1][SLOTS][LATENT_PANEL_BYTES];
    alignas(1024) char p[2][ROWS * FV_PANEL_ROW_BYTES]; /* of even tiles and of odd ones */
    column_memory<ROWS> columns;
    attend_row rows[ROWS];
    uint64_t full[1][SLOTS];
    uint64_t empty[SLOTS];
    uint64_t landed[1][SLOTS];
    attend_keys keys;
    int32_t has_item;
    attend_job job;
};
static_assert(few_latent_memory<16>::SLOTS <= 32, "a lane initialises each");
static_assert(sizeof(few_latent_memory<16>) <= 227 * 1024, "the shared memory of a block");
static_assert(sizeof(few_latent_memory<32>) <= 227 * 1024, "the shared memory of a block");
static_assert(32 * column_row_bytes(4) <= LATENT_PANELS * LATENT_PANEL_BYTES, "rows are staged in a tile's place");

/* A kernel's form: the queries' dtype, and rows of a block. */
template <class Element, int NUM_ROWS> struct few_latent_form {
    typedef Element T;
    typedef few_latent_memory<NUM_ROWS> memory;
    static constexpr int ROWS = NUM_ROWS;
};

/* The warpgroup's products with a tile's panels FIRST .. FIRST + COUNT - 1 have ended: they may be overwritten. */
template <int COUNT, class Memory>
static __device__ __forceinline__ void release_panels(Memory *memory, latent_place place, int32_t first)
{
    const int32_t lane = threadIdx.x % 32;
    if (lane < COUNT) ptx_mbarrier_arrive(&memory->empty[slot_of_panel<Memory>(place, first + lane)]);
}

/* S^T of a tile, to the end: panel by panel, each as soon as it is there. */
template <class F>
static __device__ __forceinline__ void multiply_few_keys(float (&s)[F::ROWS / 2], typename F::memory *memory,
                                                         latent_place place)
{
    uint64_t q_at = ptx_anew(ptx_matrix_descriptor(memory->q[0], 16, 1024));
    uint64_t k_at = ptx_anew(ptx_matrix_descriptor(panel_in_slot(memory, place.first), 16, 1024));
    int32_t slot = place.first;
    uint32_t parity = place.phase % 2;
#pragma unroll 1
    for (int32_t panel = 0; panel < LATENT_PANELS; panel++) {
        ptx_mbarrier_wait(&memory->full[0][slot], parity);
        ptx_wgmma_fence();
        multiply_key_panel<typename F::T, F::ROWS>(s, k_at, q_at, panel == 0);
        ptx_wgmma_commit();
        q_at = ptx_descriptor_at(q_at, F::ROWS * FV_PANEL_ROW_BYTES);
        k_at = ptx_descriptor_at(k_at, LATENT_PANEL_BYTES);
        if (++slot == F::memory::SLOTS) {
            slot = 0;
            parity ^= 1;
            k_at = ptx_matrix_descriptor(panel_in_slot(memory, 0), 16, 1024);
        }
    }
    ptx_wgmma_wait<0>();
    ptx_wgmma_settle(s);
}

/* O^T += V^T P^T of a tile, the warpgroup's values, to the end. */
template <class F>
static __device__ __forceinline__ void multiply_few_values(float (&out)[4][F::ROWS / 2], typename F::memory *memory,
                                                           latent_place place, int32_t owner, int32_t group)
{
    uint64_t v_at[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int32_t slot = slot_of_panel<typename F::memory>(place, group * LATENT_LOW_PANELS + i);
        v_at[i] = ptx_anew(ptx_matrix_descriptor(panel_in_slot(memory, slot), 16, 1024));
    }
    multiply_value_panels<typename F::T, F::ROWS>(out, v_at,
                                                  ptx_anew(ptx_matrix_descriptor(memory->p[owner], 16, 1024)), 0);
    await_value_panels<F::ROWS>(out);
}

/* P of the warpgroup's own tile to where both read it, and its sums; true: the output has to be moved. */
template <class F>
static __device__ __forceinline__ bool weigh_few_keys(float (&s)[F::ROWS / 2], column_move<F::ROWS> *move,
                                                      column_state<F::ROWS> *state, typename F::memory *memory,
                                                      int32_t group, int32_t tile_first, float scale)
{
    const attend_keys *keys = &memory->keys;
    const bool is_inside = tile_first >= keys->full_first && tile_first + LATENT_TILE <= keys->full_end;
    const bool keeps_order = scale > 0; /* of products and scores */
    if (!is_inside || !keeps_order) {
#pragma unroll
        for (int i = 0; i < F::ROWS / 2; i++) s[i] = keeps_order ? s[i] : s[i] * scale;
        mask_columns<F::ROWS>(s, memory->rows, tile_first);
    }
    const float factor = keeps_order ? scale : 1.0f;
    const bool moves = raise_columns<F::ROWS>(move, state, s, &memory->columns, group, factor, 0.0f);
    exponentiate_columns<F::ROWS>(s, state, factor);
    uint32_t p[F::ROWS / 4];
    narrow_columns<typename F::T, F::ROWS>(p, s, state);
    store_columns<F::ROWS>(memory->p[group], p);
    ptx_fence_proxy_async();
    ptx_bar_arrive(LATENT_BARRIER_EVEN + group, LATENT_CONSUMERS);
    ptx_bar_sync(COLUMN_BARRIER_WARPGROUP + group, 128);
    return moves;
}

/* Even tiles are the first warpgroup's own, odd ones the second's; of all each has half of the values. */
template <class F>
static __device__ __forceinline__ void attend_few_latents(float (&out)[4][F::ROWS / 2], column_state<F::ROWS> *state,
                                                          typename F::memory *memory, int32_t group, int32_t origin,
                                                          int32_t num_tiles, float scale)
{
    float s[F::ROWS / 2];
    column_move<F::ROWS> move;
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; tile++) {
        const latent_place place = place_of_tile<typename F::memory>(tile);
        const int32_t owner = tile % 2;
        bool moves;
        if (owner == group) {
            multiply_few_keys<F>(s, memory, place);
            release_panels<1>(memory, place, LATENT_PANELS - 1);
            moves = weigh_few_keys<F>(s, &move, state, memory, group, origin + tile * LATENT_TILE, scale);
        } else {
            ptx_bar_sync(LATENT_BARRIER_EVEN + owner, LATENT_CONSUMERS);
            moves = follow_columns<F::ROWS>(&move, state, &memory->columns);
        }
        if (moves) rescale_columns<F::ROWS>(out, &move);
        multiply_few_values<F>(out, memory, place, owner, group);
        release_panels<LATENT_LOW_PANELS>(memory, place, group * LATENT_LOW_PANELS);
    }
}

template <class F>
static __device__ __forceinline__ void consume_few_latents(typename F::memory *memory, const attend_args *args)
{
    const attend_job *job = &memory->job;
    const int32_t row0 = (int32_t)blockIdx.x % args->row_parts * F::ROWS, group = warpgroup_of_thread();
    find_latent_rows<F::ROWS>(memory, args, row0);
    ptx_bar_arrive(LATENT_BARRIER_KEYS, LATENT_THREADS);
    load_latent_queries<F::ROWS>(memory, args);
    ptx_cp_async_commit();
    float out[4][F::ROWS / 2];
#pragma unroll
    for (int panel = 0; panel < 4; panel++) {
#pragma unroll
        for (int i = 0; i < F::ROWS / 2; i++) out[panel][i] = 0;
    }
    column_state<F::ROWS> state;
    clear_columns(&state);
    const float scale = args->params.scale * job->k_head_scale * FV_LOG2E;
    const int32_t origin = first_latent_key(&memory->keys), num_tiles = count_latent_tiles(&memory->keys);
    ptx_cp_async_wait<0>();
    ptx_fence_proxy_async();
    ptx_bar_sync(LATENT_BARRIER_CONSUMERS, LATENT_CONSUMERS);
    attend_few_latents<F>(out, &state, memory, group, origin, num_tiles, scale);
    store_output_columns<F::ROWS>(out, &state, &memory->columns, panel_in_slot(memory, group * LATENT_PANELS),
                                  memory->rows, job, args, group, fv_min_i32(F::ROWS, job->num_rows - row0));
}

/* By the first warp. */
template <class Memory> static __device__ __forceinline__ void init_few_latent_memory(Memory *memory)
{
    const int32_t lane = threadIdx.x;
    if (lane < Memory::SLOTS) {
        ptx_mbarrier_init(&memory->full[0][lane], LATENT_LOADERS / 32);
        ptx_mbarrier_init(&memory->landed[0][lane], LATENT_LOADERS);
        ptx_mbarrier_init(&memory->empty[lane], 4);
        ptx_fence_mbarrier_init();
    }
    if (lane < Memory::ROWS) memory->columns.max[lane] = -INFINITY;
    if (lane > 0) return;
    memory->keys.first = memory->keys.full_end = INT32_MAX;
    memory->keys.end = memory->keys.full_first = 0;
}

template <class F>
static __global__ void __launch_bounds__(LATENT_THREADS, 1)
    wgmma_few_latent_kernel(const __grid_constant__ attend_args args)
{
#if FV_HAS_WGMMA
    extern __shared__ __align__(1024) char shared[];
    typename F::memory *memory = (typename F::memory *)shared;
    if (threadIdx.x < 32) init_few_latent_memory(memory);
    if (args.map_rows > 0 && threadIdx.x == LATENT_CONSUMERS) ptx_prefetch_map(&args.key_map);
    overlap_begin();
    if (threadIdx.x == 0) memory->has_item = find_job(&memory->job, &args);
    __syncthreads();
    if (!memory->has_item) return;
    if (threadIdx.x >= LATENT_CONSUMERS)
        produce_latents(memory, &args);
    else
        consume_few_latents<F>(memory, &args);
#endif
}

template <class F> constexpr fv_cuda_attend_kernel wgmma_few_latent_of(void)
{
    return {wgmma_few_latent_kernel<F>, (int32_t)sizeof(typename F::memory), LATENT_THREADS, F::ROWS, 1};
}

#endif
