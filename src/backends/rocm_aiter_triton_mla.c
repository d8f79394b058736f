/* ROCM_AITER_TRITON_MLA: decodes as ROCM_AITER_MLA; prefill and extend by the portable kernel, whose LSE
 * comes by token, [tokens, Hq]: the merge reads it as it lies, nothing is transposed. */
#include "backends/backend.h"
#include "backends/mla_schedule.h"

static void why_not(fv_reasons *reasons, const fv_device *device, const fv_problem *problem)
{
    fv_mla_why_not(reasons, device, problem, FV_RESCALING_MULTIPLY);
}

static fv_status create(fv_plan *plan) { return fv_mla_create(plan, &(fv_strategy){.lse_by_head = 0}); }

static fv_status schedule(fv_schedule *schedule) { return fv_mla_schedule(schedule, &schedule->plan->rule); }

const fv_backend fv_rocm_aiter_triton_mla = {
    .name = "ROCM_AITER_TRITON_MLA",
    .summary = "MLA: decode of ROCM_AITER_MLA, longer queries by the portable kernel with its LSE by token",
    .layout = FV_KV_LAYOUT_LATENT,
    .why_not = why_not,
    .create = create,
    .schedule = schedule,
};
