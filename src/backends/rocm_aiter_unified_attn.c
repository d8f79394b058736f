/* ROCM_AITER_UNIFIED_ATTN: the unified strategy of TRITON_ATTN over K and V in two planes, cut by the work
 * at hand: the number of segments follows from the lengths, the cost of the whole batch and the number of
 * cores, where TRITON_ATTN always takes 16. aiter's counterpart counts programs against compute units.
 *
 *   kv_write  ->  attend_paged (as many segments as shares)  ->  reduce */
#include "backends/backend.h"
#include "backends/strategy.h"

static const fv_mha_support support = {
    .types = 1u << FV_ATTENTION_DECODER | 1u << FV_ATTENTION_ENCODER | 1u << FV_ATTENTION_CROSS,
    .layouts = 1u << FV_KV_LAYOUT_STRIDED | 1u << FV_KV_LAYOUT_2_NB_BS_H_D | 1u << FV_KV_LAYOUT_PACKED_NHD |
               1u << FV_KV_LAYOUT_PACKED_HND,
    .layout = FV_KV_LAYOUT_2_NB_BS_H_D,
    .min_head_size = 32,
    .head_sizes = "32 to 512 in steps of 8",
};

static void why_not(fv_reasons *reasons, const fv_device *device, const fv_problem *problem)
{
    fv_mha_why_not(reasons, &support, device, problem);
}

static fv_status create(fv_plan *plan) { return fv_strategy_create(plan, &(fv_strategy){0}); }

static fv_status schedule(fv_schedule *schedule)
{
    return fv_schedule_attend_all(schedule, FV_OP_ATTEND_PAGED, FV_KEYS_CACHE);
}

const fv_backend fv_rocm_aiter_unified_attn = {
    .name = "ROCM_AITER_UNIFIED_ATTN",
    .summary = "unified, K and V in planes of their own; the number of segments follows work, lengths and cores",
    .layout = FV_KV_LAYOUT_2_NB_BS_H_D,
    .why_not = why_not,
    .create = create,
    .schedule = schedule,
};
