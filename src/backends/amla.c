/* AMLA: absorbed decode whose output follows the running maximum by an integer addition to its exponents
 * (arXiv 2509.25224); the rest as ROCM_AITER_MLA. */
#include "backends/backend.h"
#include "backends/mla_schedule.h"

static void why_not(fv_reasons *reasons, const fv_device *device, const fv_problem *problem)
{
    fv_mla_why_not(reasons, device, problem, FV_RESCALING_ADD);
}

static fv_status create(fv_plan *plan)
{
    return fv_mla_create(plan, &(fv_strategy){.rescaling = FV_RESCALING_ADD, .lse_by_head = 1});
}

static fv_status schedule(fv_schedule *schedule) { return fv_mla_schedule(schedule, &schedule->plan->rule); }

const fv_backend fv_amla = {
    .name = "AMLA",
    .summary = "MLA: absorbed decode that rescales by integer addition (AMLA); longer queries on expanded latents",
    .layout = FV_KV_LAYOUT_LATENT,
    .why_not = why_not,
    .create = create,
    .schedule = schedule,
};
