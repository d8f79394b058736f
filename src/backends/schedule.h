/* The schedule of a step: the list of kernel calls that a backend writes in its update, and that the run
 * makes for each layer. */
#ifndef FV_BACKENDS_SCHEDULE_H
#define FV_BACKENDS_SCHEDULE_H

#include "planner/plan.h"

typedef struct fv_schedule {
    fv_plan *plan;
    const fv_step *step;
    fv_step_view host; /* where items, reductions and indices are written */
    fv_work_list list;
    int32_t num_indices;
} fv_schedule;

/* A step's lengths are known here: step->query_start is not NULL. */
static inline int32_t fv_schedule_context(const fv_schedule *schedule, int32_t seq)
{
    return schedule->step->seq_lens[seq] - fv_step_query_len(schedule->step, seq);
}

/* Appends a pass: an attention call with its items, and a reduction where some Q block is cut. Prefix
 * groups are looked for where the plan cascades and the source is the cache. No runs: no call. */
fv_status fv_schedule_attend(fv_schedule *schedule, const fv_split_rule *rule, fv_operation operation,
                             fv_key_source source, fv_result_target target, int32_t first_token,
                             const fv_query_run *runs, int32_t num_runs);

/* One pass over all queries with all their keys, to the output. */
fv_status fv_schedule_attend_all(fv_schedule *schedule, fv_operation operation, fv_key_source source);

/* Appends one call. FV_ERR_NO_SPACE: a fault of the capacity that the plan was created with. */
fv_status fv_schedule_add(fv_schedule *schedule, const fv_call *call);

/* Fills the step of `plan`: the write of the new K/V, then what the backend schedules, or the static grid. */
fv_status fv_schedule_step(fv_plan *plan, const fv_step *step, fv_stream stream);

/* What is still to be done to a layer's q and k. */
typedef struct fv_before_layer {
    const fv_rope_params *rope; /* they are rotated with the write of k */
    const fv_tensor *x, *q_up;  /* q = x q_up^T: layer.q is not read, see fv_plan_makes_queries. x NULL: q is there */
} fv_before_layer;

/* Makes the calls for one layer. `layer` is checked. `before` NULL: q and k come as they are attended. */
fv_status fv_schedule_run(fv_plan *plan, const fv_layer *layer, const fv_before_layer *before, char *workspace,
                          fv_stream stream);

/* fv_plan_run of a layer with something to do before it; the number of tokens in `rope` is the step's. */
fv_status fv_plan_run_behind(fv_plan *plan, const fv_layer *layer, const fv_before_layer *before, void *workspace,
                             fv_stream stream);

/* 1: the device makes a step's queries from x in one kernel, and faster than by products: mla_query. Only where products
 * are the device's own, since a caller's GEMM is to see all of them. */
int32_t fv_plan_makes_queries(const fv_plan *plan, const fv_layer *layer, const fv_before_layer *before);

#endif
