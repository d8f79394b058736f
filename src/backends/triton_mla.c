/* TRITON_MLA: absorbed decode over latents in a number of splits that is the same for all sequences,
 *
 *   min(2^ceil(log2(longest sequence / 512)), 2 x workers)
 *
 * and prefill and extend on what the latents expand to. A Q block that costs less than its share is left
 * whole, and no split has fewer keys than are worth a reduction. */
#include "backends/backend.h"
#include "backends/mla_schedule.h"

#define SPLIT_KEYS 512

static void why_not(fv_reasons *reasons, const fv_device *device, const fv_problem *problem)
{
    fv_mla_why_not(reasons, device, problem, FV_RESCALING_MULTIPLY);
}

static int32_t num_splits(const fv_plan *plan, int32_t max_seq_len)
{
    int32_t splits = 1;
    while (splits < max_seq_len / SPLIT_KEYS) splits *= 2;
    return fv_min_i32(splits, 2 * plan->device->num_workers);
}

static fv_status create(fv_plan *plan)
{
    const int32_t splits = fv_max_i32(2, num_splits(plan, plan->bounds.max_seq_len));
    return fv_mla_create(plan, &(fv_strategy){.num_segments = splits, .lse_by_head = 1});
}

static fv_status schedule(fv_schedule *schedule)
{
    const fv_step *step = schedule->step;
    int32_t longest = 0;
    for (int32_t seq = 0; seq < step->num_seqs; seq++) longest = fv_max_i32(longest, step->seq_lens[seq]);
    fv_split_rule rule = schedule->plan->rule;
    if (rule.num_segments > 0) rule.num_segments = num_splits(schedule->plan, longest);
    if (rule.num_segments == 1) rule.path = FV_PATH_2D;
    return fv_mla_schedule(schedule, &rule);
}

const fv_backend fv_triton_mla = {
    .name = "TRITON_MLA",
    .summary =
        "MLA: absorbed decode in equally many splits for all sequences; longer queries on expanded latents, in chunks",
    .layout = FV_KV_LAYOUT_LATENT,
    .why_not = why_not,
    .create = create,
    .schedule = schedule,
};
