/* A backend: a strategy that composes kernels, the same for every device. */
#ifndef FV_BACKENDS_BACKEND_H
#define FV_BACKENDS_BACKEND_H

#include "planner/plan.h"

/* Collects why a backend cannot serve a problem: "reason; reason". */
typedef struct fv_reasons {
    char *text;
    size_t capacity, used; /* used >= capacity: cut short */
} fv_reasons;

void fv_reasons_add(fv_reasons *reasons, const char *format, ...) FV_PRINTF(2, 3);

typedef struct fv_backend {
    const char *name;    /* as in vLLM */
    const char *summary; /* one line */
    fv_kv_layout layout; /* that it wants where the caller leaves it open */
    /* Adds the reasons why not; nothing added: it can. `problem` is normal. */
    void (*why_not)(fv_reasons *reasons, const fv_device *device, const fv_problem *problem);
    /* Chooses kernels and sizes for plan->problem, bounds and options; allocates the plan's buffers. */
    fv_status (*create)(fv_plan *plan);
    /* Fills the buffers for plan->batch; `step` has the lengths where the host knows them. */
    fv_status (*update)(fv_plan *plan, const fv_step *step, fv_stream stream);
    /* Launches. `layer` is checked. */
    fv_status (*run)(fv_plan *plan, const fv_layer *layer, char *workspace, fv_stream stream);
} fv_backend;

extern const fv_backend fv_triton_attn;

/* The backend called `name`, or NULL with the list of names as the error text. */
const fv_backend *fv_backend_find(const char *name);

/* All backends, in the order of preference of `auto` on the CPU. */
const fv_backend *fv_backend_at(int32_t index);

#endif
