/* TRITON_ATTN: the unified strategy. The new K/V go to the cache, then one kernel serves prefill, extend
 * and decode: Q blocks of several tokens x the query heads of a KV head, against tiles of keys.
 *
 *   kv_write  ->  attend_paged                              2D: a Q block sees all its keys in one go
 *   kv_write  ->  attend_paged (segments)  ->  reduce       3D: keys cut into 16 segments, then merged
 *
 * Source: "The Anatomy of a Triton Attention Kernel" (Ringlein et al.): Q blocks 4.3, parallel tiled
 * softmax 4.4, adjustable tiles 4.5, static launch grid 4.7. Differences: where the host knows the
 * lengths, 2D or 3D is decided for each Q block by cost (planner/work_list.c), so queries of several
 * tokens are cut too and nothing jumps at a batch size; the sink is added at the end, once. The static
 * grid, with binary search over the prefix sums of Q blocks, serves where lengths are on the device only
 * and under captured graphs. */
#include "backends/backend.h"
#include "backends/strategy.h"

#define SEGMENTS 16

static const fv_mha_support support = {
    .types = 1u << FV_ATTENTION_DECODER | 1u << FV_ATTENTION_ENCODER | 1u << FV_ATTENTION_CROSS,
    .layouts = 1u << FV_KV_LAYOUT_STRIDED | 1u << FV_KV_LAYOUT_NB_2_BS_H_D | 1u << FV_KV_LAYOUT_PACKED_NHD |
               1u << FV_KV_LAYOUT_PACKED_HND,
    .layout = FV_KV_LAYOUT_NB_2_BS_H_D,
    .min_head_size = 32,
    .head_sizes = "32 to 512 in steps of 8",
};

static void why_not(fv_reasons *reasons, const fv_device *device, const fv_problem *problem)
{
    fv_mha_why_not(reasons, &support, device, problem);
}

static fv_status create(fv_plan *plan) { return fv_strategy_create(plan, &(fv_strategy){.num_segments = SEGMENTS}); }

static fv_status schedule(fv_schedule *schedule)
{
    return fv_schedule_attend_all(schedule, FV_OP_ATTEND_PAGED, FV_KEYS_CACHE);
}

const fv_backend fv_triton_attn = {
    .name = "TRITON_ATTN",
    .summary = "unified: writes the new K/V, then one kernel for prefill, extend and decode; 2D, or 3D in 16 segments",
    .layout = FV_KV_LAYOUT_NB_2_BS_H_D,
    .why_not = why_not,
    .create = create,
    .schedule = schedule,
};
