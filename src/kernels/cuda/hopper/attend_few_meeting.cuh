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
 * A block has one job, the first one, whose item says all of it (begin_first_job): the launcher sees to that. */
#ifndef FV_KERNELS_CUDA_HOPPER_ATTEND_FEW_MEETING_CUH
#define FV_KERNELS_CUDA_HOPPER_ATTEND_FEW_MEETING_CUH

#include "kernels/cuda/attend_few.cuh"
#include "kernels/cuda/hopper/few_meeting.h"
#include "kernels/cuda/hopper/mbarrier.cuh"

/* Fours are four neighbouring elements of a row; the job's are dealt out in runs of args.row_parts.by. */
template <class S> struct few_inbox {
    static constexpr uint32_t FOURS = S::VALUE / 4;
    alignas(16) float4 values[S::BLOCK_M * FOURS];  /* [sender][four] */
    float4 sums[FV_CUDA_MOST_MEETING + S::BLOCK_M]; /* [sender][row]: maximum and sum */
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

/* A value of each group of lanes, `step` lanes apart, to all of them. */
static __device__ __forceinline__ float add_groups(float value, uint32_t step)
{
    for (; step < 32; step *= 2) value += __shfl_xor_sync(~0u, value, (int)step);
    return value;
}

/* The block's run of fours, by as many threads; where it is shorter than a warp, groups of lanes share the senders. */
template <class S>
static __device__ __forceinline__ void take_few_rows(few_inbox<S> *inbox, const attend_args *args, const few_slot *slot)
{
    constexpr uint32_t FOURS = few_inbox<S>::FOURS;
    const uint32_t run = args->row_parts.by, groups = run < 32 ? 32 / run : 1;
    if (threadIdx.x >= max(32u, run)) return;
    const uint32_t at = threadIdx.x & (run - 1), group = (uint32_t)divide_index((int32_t)threadIdx.x, args->row_parts);
    const uint32_t four = blockIdx.x * run + at, r = four / FOURS, d = four % FOURS * 4;
    char *to = slot->targets[r].to;
    attend_row row = {};
    row.token = slot->rows[r].token;
    row.head = slot->rows[r].head;
    attend_end end = {-INFINITY, 0.0f, 0.0f, -1, (int64_t)row.token - args->params.out_first_token};
    const uint32_t num_rows = rows_of_run<S>(args);
    ptx_mbarrier_wait(&inbox->arrived, 0);
    float4 parts[FV_CUDA_MOST_MEETING], sums[FV_CUDA_MOST_MEETING], value = make_float4(0, 0, 0, 0);
    float max = -INFINITY, sum = 0;
#pragma unroll
    for (uint32_t k = 0; k < FV_CUDA_MOST_MEETING; k++) {
        const uint32_t sender = group + k * groups;
        sums[k] = make_float4(-INFINITY, 0, 0, 0);
        if (sender >= gridDim.x) continue;
        sums[k] = inbox->sums[sender * num_rows + at / FOURS];
        parts[k] = inbox->values[sender * run + at];
    }
#pragma unroll
    for (int k = 0; k < FV_CUDA_MOST_MEETING; k++) {
        /* Maxima pass NaN by: a row of nothing else has keys, at any maximum. */
        if (sums[k].x == -INFINITY && sums[k].y != sums[k].y) sums[k].x = 0;
        max = fmaxf(max, sums[k].x);
    }
    for (uint32_t step = run; step < 32; step *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, (int)step));
#pragma unroll
    for (int k = 0; k < FV_CUDA_MOST_MEETING; k++) {
        const float weight = sums[k].x == -INFINITY ? 0.0f : ptx_ex2(sums[k].x - max);
        if (weight == 0.0f) continue; /* whatever its values are */
        sum += sums[k].y * weight;
        value.x += parts[k].x * weight;
        value.y += parts[k].y * weight;
        value.z += parts[k].z * weight;
        value.w += parts[k].w * weight;
    }
    sum = add_groups(sum, run);
    value = make_float4(add_groups(value.x, run), add_groups(value.y, run), add_groups(value.z, run),
                        add_groups(value.w, run));
    if (group > 0) return;
    finish_row(&end, args, &row, max, sum, 1.0f);
    if (d == 0) store_sums(args, &row, &end);
    store_few_four(args, to, end.out_factor, d, value);
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
    open_inbox<S>(&meeting->inbox, &args);
    few_walk walk = {-1, 0, 0, {-1, 0}, few_lane_of<S>(memory, &args, warp, lane)};
    few_scout scout = begin_few_jobs(&memory->jobs, &args);
    if (!args.params.sinks) overlap_let_next_start(); /* as in attend_few_kernel */
    overlap_begin();
    begin_first_job<S>(&walk, &scout, memory, &args, first.item, warp, lane);
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
