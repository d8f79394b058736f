/* Decode of few rows (attend_few.cuh) whose pieces meet: those of a sequence and KV head are the blocks of a cluster, which
 * add up their results in shared memory. No partial results go to memory, and no kernel has to come after this one.
 *
 *   block 0   its keys | its warps' sums become one | element e of row r to block (r, e) says ---> inbox 0   its share
 *   block 1   its keys |                            |                                        \--> inbox 1   of the rows
 *
 * Each block ends an equal share of the rows' elements, so that the end is parallel. What a block sends are st.async, whose
 * bytes arrive at the other's mbarrier: nothing but a relaxed arrival at the cluster's barrier is needed before, so that
 * the inbox is there. A block stays until it has what is sent to it; what it sends itself needs it no more.
 *
 * A block has one job, whose item says all of it: the launcher sees to that. */
#ifndef FV_KERNELS_CUDA_HOPPER_ATTEND_FEW_MEETING_CUH
#define FV_KERNELS_CUDA_HOPPER_ATTEND_FEW_MEETING_CUH

#include <stddef.h>

#include "kernels/cuda/attend_few.cuh"
#include "kernels/cuda/hopper/few_meeting.h"
#include "kernels/cuda/hopper/mbarrier.cuh"

/* Of a power of two. */
static __device__ __forceinline__ uint32_t log2_of(uint32_t power)
{
    return (__float_as_uint((float)power) >> 23) - 127;
}

/* Fours are four neighbouring elements of a row. The job's are dealt out in runs of args.row_parts.by; each block sends. */
template <class S> struct few_inbox {
    static constexpr uint32_t FOURS = S::VALUE / 4;
    alignas(16) float4 values[S::BLOCK_M * FOURS];         /* [sender][four] */
    float4 sums[FV_CUDA_MOST_MEETING + S::BLOCK_M];        /* [sender][row]: maximum and sum, of few_share */
    uint64_t arrived;
};

template <class S> struct few_meeting_memory {
    few_memory<S> few;
    few_inbox<S> inbox;
};

/* Rows of which a run of fours has elements. */
template <class S> static __device__ __forceinline__ uint32_t rows_of_run(const attend_args *args)
{
    const uint32_t run = args->row_parts.by;
    return run > few_inbox<S>::FOURS ? run / few_inbox<S>::FOURS : 1;
}

/* By all threads; those of other blocks may send when this one has waited for the cluster. */
template <class S> static __device__ __forceinline__ void open_inbox(few_inbox<S> *inbox, const attend_args *args)
{
    if (threadIdx.x == 0) {
        ptx_mbarrier_init(&inbox->arrived, 1);
        ptx_fence_mbarrier_init();
        ptx_mbarrier_expect(&inbox->arrived, gridDim.x * (args->row_parts.by + rows_of_run<S>(args)) * 16);
    }
    __syncwarp();
    ptx_cluster_arrive();
}

/* The warps' sums become one, which goes to the blocks that end it. One barrier, as in store_few_rows(). */
template <class S>
static __device__ __forceinline__ void send_few_rows(few_meeting_memory<S> *memory, const attend_args *args,
                                                     const few_slot *slot)
{
    constexpr uint32_t FOURS = few_inbox<S>::FOURS;
    few_inbox<S> *inbox = &memory->inbox;
    const uint32_t run = args->row_parts.by, num_fours = (uint32_t)slot->job.num_rows * FOURS;
    const float v_head_scale = slot->job.v_head_scale;
    float4 *values = inbox->values + blockIdx.x * run;
    float4 *sums = inbox->sums + blockIdx.x * rows_of_run<S>(args);
    ptx_cluster_wait();
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < num_fours; i += S::THREADS) {
        const uint32_t to = (uint32_t)divide_index((int32_t)i, args->row_parts), at = i & (run - 1);
        const few_four four = add_few_shares<S>(&memory->few, i / FOURS, i % FOURS * 4);
        const float factor = few_values_factor(&four, v_head_scale);
        const uint32_t arrived = ptx_shared_address_in(&inbox->arrived, to);
        ptx_store_async_16(
            ptx_shared_address_in(values + at, to),
            make_float4(four.value.x * factor, four.value.y * factor, four.value.z * factor, four.value.w * factor),
            arrived);
        if (at % FOURS == 0)
            ptx_store_async_16(ptx_shared_address_in(sums + at / FOURS, to), make_float4(four.max, four.sum, 0, 0),
                               arrived);
    }
}

/* The block's run of fours, by as many threads, of P senders; where it is shorter than a warp, groups of lanes share their
 * values. */
template <class S, uint32_t P>
static __device__ __forceinline__ void take_few_rows_of(few_inbox<S> *inbox, const attend_args *args,
                                                        const few_slot *slot)
{
    constexpr uint32_t FOURS = few_inbox<S>::FOURS;
    const uint32_t run = args->row_parts.by, shift = log2_of(run), groups = run < 32 ? 32 >> shift : 1;
    if (threadIdx.x >= max(32u, run)) return;
    const uint32_t at = threadIdx.x & (run - 1), group = threadIdx.x >> shift;
    const uint32_t four = blockIdx.x * run + at, r = four / FOURS, d = four % FOURS * 4;
    char *to = slot->targets[r].to;
    attend_row row = {};
    row.token = slot->rows[r].token;
    row.head = slot->rows[r].head;
    attend_end end = {-INFINITY, 0.0f, 0.0f, -1, (int64_t)row.token - args->params.out_first_token};
    const float4 *sums = inbox->sums + at / FOURS, *values = inbox->values + at;
    const uint32_t num_rows = rows_of_run<S>(args);
    ptx_mbarrier_wait(&inbox->arrived, 0);
    float4 parts[P], value = make_float4(0, 0, 0, 0);
    float maxima[P], sums_of[P], sum = 0;
#pragma unroll
    for (uint32_t k = 0; k < P; k++) {
        const float2 share = *(const float2 *)&sums[k * num_rows];
        maxima[k] = share.x;
        sums_of[k] = share.y;
        if ((k & (groups - 1)) == group) parts[k] = values[k * run];
    }
    const float max = largest_of(maxima);
#pragma unroll
    for (uint32_t k = 0; k < P; k++) {
        const float weight = ptx_ex2(maxima[k] - max);
        sum += sums_of[k] * weight;
        if (weight == 0.0f || (k & (groups - 1)) != group) continue; /* whatever its values are */
        value.x += parts[k].x * weight;
        value.y += parts[k].y * weight;
        value.z += parts[k].z * weight;
        value.w += parts[k].w * weight;
    }
    for (uint32_t step = run; step < 32; step *= 2) {
        value.x += __shfl_xor_sync(~0u, value.x, (int)step);
        value.y += __shfl_xor_sync(~0u, value.y, (int)step);
        value.z += __shfl_xor_sync(~0u, value.z, (int)step);
        value.w += __shfl_xor_sync(~0u, value.w, (int)step);
    }
    if (group > 0) return;
    finish_row(&end, args, &row, few_maximum(max, sum), sum, 1.0f);
    if (d == 0) store_sums(args, &row, &end);
    store_few_four(args, to, end.out_factor, d, value);
}

template <class S>
static __device__ __forceinline__ void take_few_rows(few_inbox<S> *inbox, const attend_args *args, const few_slot *slot)
{
    static_assert(FV_CUDA_MOST_MEETING == 8, "as many senders");
    if (gridDim.x == 8)
        take_few_rows_of<S, 8>(inbox, args, slot);
    else if (gridDim.x == 4)
        take_few_rows_of<S, 4>(inbox, args, slot);
    else
        take_few_rows_of<S, 2>(inbox, args, slot);
}

/* --- the way to the first tile: nothing else goes on meanwhile, and each instruction takes 5 cycles ------------- */

/* What a block has asked for before it knows its item: with it, most likely, the numbers of its pages. */
typedef struct meeting_guess {
    few_pages pages; /* of row blockIdx.z of the block table */
    float k_head_scale, v_head_scale;
} meeting_guess;

/* Asks for it, which a kernel before this one may have written: pages from where the block's keys began at the launch on. A
 * captured graph may serve other lengths since, and rows may lie off their 16 bytes: what is missing is looked up. */
static __device__ __forceinline__ meeting_guess ask_meeting_guess(const attend_args *args, int32_t lane)
{
    const fv_attend_params *params = &args->params;
    meeting_guess guess;
    guess.pages.first = (int32_t)blockIdx.x * params->piece_pages & ~3;
    const int32_t row = (int32_t)blockIdx.z, own = guess.pages.first + lane * 4, end = params->block_table_width & ~3;
    const int32_t *from = params->block_table + row * params->block_table_stride + own;
    const bool has_fours = ((uintptr_t)from & 15) == 0 && row < params->num_seqs;
    guess.pages.four = make_int4(-1, -1, -1, -1);
    if (has_fours && own < end) guess.pages.four = *(const int4 *)from;
    guess.pages.count = has_fours ? fv_max_i32(0, fv_min_i32(end - guess.pages.first, 128)) : 0;
    guess.k_head_scale = fv_scale_of_head(params->k_scale, params->num_kv_scales, 0);
    guess.v_head_scale = fv_scale_of_head(params->v_scale, params->num_kv_scales, 0);
    return guess;
}

/* The block's job: its piece of the item, of one KV head; each warp asks for its first tile and its part of the
 * queries, and two write the slot meanwhile. What begin_first_job() asks the problem for the launcher knows, and an item has
 * one token. A barrier must follow. */
template <class S>
static __device__ __forceinline__ void begin_meeting(few_walk *walk, few_memory<S> *memory, const attend_args *args,
                                                     const fv_work_item *item, const meeting_guess *guess, int32_t warp,
                                                     int32_t lane)
{
    static_assert(few_queries<S>::OWN == 1 && S::OCTETS == 1, "a thread has a part of the queries");
    const fv_attend_params *params = &args->params;
    const uint32_t pieces = gridDim.x, first_tile = (uint32_t)item->first_key / S::TILE;
    const uint32_t num_tiles = ((uint32_t)item->end_key + S::TILE - 1) / S::TILE - first_tile;
    const uint32_t each = (num_tiles + pieces - 1) >> log2_of(pieces), own = first_tile + blockIdx.x * each;
    const int32_t first = (int32_t)(own + warp) * S::TILE, second = first + S::WARPS * S::TILE;
    const int32_t end_key = fv_min_i32(item->end_key, (int32_t)(own + each) * S::TILE);
    const int32_t num_keys = fv_min_i32(item->seq_len, end_key); /* all of them have pages */
    const int32_t context = item->seq_len - (item->query_end - item->query_start);
    const int32_t seen = fv_min_i32(num_keys, context + item->first_token + 1); /* all keys before */
    const int32_t num_rows = (int32_t)args->group.by, kv_head = item->first_kv_head + (int32_t)blockIdx.y;
    const int32_t token = item->query_start + item->first_token;
    const auto row_of = [&](int32_t r) { return few_row{0, 0, token, kv_head * num_rows + r}; };
    uint4 query = make_uint4(0, 0, 0, 0);
    if constexpr (S::IS_NARROW) query = ask_few_query<S>(memory, args, num_rows, 0, row_of);
    const int32_t *table = params->block_table + item->table_row * params->block_table_stride;
    const int2 at = split_key(args, first), next = split_key(args, second);
    if (item->table_row != (int32_t)blockIdx.z) walk->pages.count = 0;
    const few_place place = {page_of_lanes(&walk->pages, table, at.x, first < num_keys), at.y};
    walk->asked = FEW_QUERIES;
    if (first >= item->first_key && first + S::TILE <= seen) {
        copy_whole_tile<S>(&walk->own, args, &place, kv_head, 0);
        walk->asked |= FEW_FIRST_TILE;
    } else if (lane < S::TILE) {
        memory->jobs.first_blocks[0][warp * S::TILE + lane] = place.block;
    }
    if constexpr (!S::IS_NARROW) load_few_queries<S>(memory, args, num_rows, row_of);
    walk->place = few_place{page_of_lanes(&walk->pages, table, next.x, second < num_keys), next.y};
    if constexpr (S::IS_NARROW) store_few_query<S>(memory, args, query, 0); /* while the tile is on its way */
    if (warp < S::WARPS - 2) return;
    fv_work_item piece = *item;
    piece.first_kv_head = kv_head;
    piece.first_key = fv_min_i32(fv_max_i32(item->first_key, (int32_t)own * S::TILE), item->end_key);
    piece.end_key = end_key;
    const attend_lengths lengths = {item->query_start, item->query_end, item->seq_len, 1, guess->k_head_scale,
                                    guess->v_head_scale};
    const attend_job job = cached_job_of(args, &piece, kv_head, &lengths);
    write_first_slot<S>(&memory->jobs.slots[0], args, &job, warp, lane);
}

template <class S>
static __global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    attend_few_meeting_kernel(const __grid_constant__ attend_args args)
{
    PTX_DYNAMIC_SHARED(256, few_shared);
    few_meeting_memory<S> *meeting = (few_meeting_memory<S> *)few_shared;
    few_memory<S> *memory = &meeting->few;
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    few_item_words first;
    ask_first_item<S>(&first, &args);
    if (!args.params.sinks) overlap_let_next_start(); /* as in attend_few_kernel */
    overlap_begin();
    const meeting_guess guess = ask_meeting_guess(&args, lane);
    few_walk walk = {0, 0, 0, {-1, 0}, guess.pages, few_lane_of<S>(memory, &args, warp, lane)};
    few_scout scout = {};
    scout.step = FEW_DONE; /* there is no job to look for */
    open_inbox<S>(&meeting->inbox, &args);
    begin_meeting<S>(&walk, memory, &args, &first.item, &guess, warp, lane);
    __syncthreads();
    few_slot *slot = &memory->jobs.slots[0];
    few_state<S> state;
    clear_few_state(&state);
    attend_few_tiles<S>(&state, &walk, &scout, memory, &args, slot, warp, lane);
    /* As in attend_few_job(). */
    const int32_t own_warp = (int32_t)ptx_keep((uint32_t)warp), own_lane = (int32_t)ptx_keep((uint32_t)lane);
    char *values = memory->ring[own_warp] + (S::FIRST > 0 ? 0 : (walk.stage ^ 1) * S::STAGE);
    share_few_state<S>(memory, &state, slot, (float *)values, own_warp, own_lane);
    send_few_rows<S>(meeting, &args, slot);
    take_few_rows<S>(&meeting->inbox, &args, slot);
    ptx_cp_async_wait<0>();
}

template <class S> constexpr fv_cuda_attend_kernel attend_few_meeting_of(void)
{
    return {attend_few_meeting_kernel<S>,
            (int32_t)sizeof(few_meeting_memory<S>),
            S::THREADS,
            S::BLOCK_M,
            0,
            S::BLOCKS,
            S::HEADS};
}

#endif
