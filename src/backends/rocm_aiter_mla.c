/* ROCM_AITER_MLA: the device's tuned decode kernel, for queries of one and of several tokens (MTP), over a
 * work list in persistent buffers that shares out the keys by cost; any block size. Prefill and extend on
 * what the latents expand to. */
#include "backends/backend.h"
#include "backends/mla_schedule.h"

static void why_not(fv_reasons *reasons, const fv_device *device, const fv_problem *problem)
{
    fv_mla_why_not(reasons, device, problem, FV_RESCALING_MULTIPLY);
}

static fv_status create(fv_plan *plan) { return fv_mla_create(plan, &(fv_strategy){.lse_by_head = 1}); }

static fv_status schedule(fv_schedule *schedule) { return fv_mla_schedule(schedule, &schedule->plan->rule); }

const fv_backend fv_rocm_aiter_mla = {
    .name = "ROCM_AITER_MLA",
    .summary = "MLA: tuned absorbed decode of one or several tokens, split by cost; longer queries on expanded latents",
    .layout = FV_KV_LAYOUT_LATENT,
    .why_not = why_not,
    .create = create,
    .schedule = schedule,
};
