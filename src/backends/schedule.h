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

/* All keys of all new tokens of a sequence. */
fv_query_run fv_schedule_whole_query(const fv_schedule *schedule, int32_t seq);

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

/* Makes the calls for one layer. `layer` is checked. Where `rope` is given, q and k come before their rotation, and the
 * write of the new k rotates them. */
fv_status fv_schedule_run(fv_plan *plan, const fv_layer *layer, const fv_rope_params *rope, char *workspace,
                          fv_stream stream);

/* fv_plan_run of a layer whose q and k come before their rotation, `rope`, but for the number of tokens read on the
 * device. NULL: they come rotated. */
fv_status fv_plan_run_rotating(fv_plan *plan, const fv_layer *layer, const fv_rope_params *rope, void *workspace,
                               fv_stream stream);

#endif
