/* Lists of a fixed length (fv_plan_options.static_list): what launches under a captured graph are sized by is the plan's, what
 * they do is the step's.
 *
 *   items       | seq 0 | seq 1 .. cut by this step's lengths | empty, empty .. up to the most that a step may have |
 *   reductions  | those of this step | empty .. |
 *   header        how many are not empty */
#ifndef FV_BACKENDS_STATIC_LIST_H
#define FV_BACKENDS_STATIC_LIST_H

#include "backends/schedule.h"

/* Do all steps within the bounds decode? */
int32_t fv_plan_decodes(const fv_plan *plan);

/* Can the list of a step have a fixed length? `plan->rule` is there. Lanes take what is cut of decodes; empty items are dear to
 * others. */
int32_t fv_static_list_serves(const fv_plan *plan);

/* Changes the rule: what kernels are chosen by must not change from step to step, and pieces have to be bounded. */
void fv_static_list_fix(fv_plan *plan);

/* Of a reduction, about: those of each sequence where all have as many. */
int32_t fv_static_list_segments(const fv_plan *plan);

/* Writes the items of all queries, and empty ones behind them: as many in each step. */
fv_status fv_static_list_fill(fv_schedule *schedule);

#endif
