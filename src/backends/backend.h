/* A backend: a strategy that composes kernels, the same for every device. */
#ifndef FV_BACKENDS_BACKEND_H
#define FV_BACKENDS_BACKEND_H

#include "backends/reasons.h"
#include "backends/schedule.h"
#include "planner/plan.h"

typedef struct fv_backend {
    const char *name;    /* as in vLLM */
    const char *summary; /* one line */
    fv_kv_layout layout; /* that it wants where the caller leaves it open */
    /* Adds the reasons why not; nothing added: it can. `problem` is normal. */
    void (*why_not)(fv_reasons *reasons, const fv_device *device, const fv_problem *problem);
    /* Chooses kernels and sizes for plan->problem, bounds and options; allocates the plan's buffers. */
    fv_status (*create)(fv_plan *plan);
    /* Writes the calls of a step whose lengths are known. Where they are not, and under a static grid,
     * every backend attends through the cache on the static grid: there is nothing to route by. */
    fv_status (*schedule)(fv_schedule *schedule);
} fv_backend;

extern const fv_backend fv_triton_attn;
extern const fv_backend fv_rocm_aiter_unified_attn;
extern const fv_backend fv_rocm_attn;
extern const fv_backend fv_rocm_aiter_fa;
extern const fv_backend fv_triton_mla;
extern const fv_backend fv_rocm_aiter_mla;
extern const fv_backend fv_rocm_aiter_triton_mla;
extern const fv_backend fv_amla;

/* The backend called `name`, or NULL with the list of names as the error text. takes_auto: "auto", which the caller has
 * looked for before, is one of them. */
const fv_backend *fv_backend_find(const char *name, int32_t takes_auto);

/* All backends; NULL outside. */
const fv_backend *fv_backend_at(int32_t index);

/* The order in which `auto` asks for the problem on the device: backends/selector.c. NULL outside. */
const fv_backend *fv_backend_preferred(int32_t rank, const fv_device *device, const fv_problem *problem);

#endif
