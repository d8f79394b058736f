/* The room of gathered context (planner/context_round.h): the least that its buffers may have, and what a step within the
 * bounds lists for its rounds and chunks at most. */
#ifndef FV_BACKENDS_CONTEXT_ROOM_H
#define FV_BACKENDS_CONTEXT_ROOM_H

#include "planner/plan.h"

/* Entries that the gathering of context may take at most, beside those of a plain step. */
typedef struct fv_context_room {
    int64_t num_items, num_calls, num_indices;
} fv_context_room;

/* The smallest state and gather buffers with which any step can be served. */
fv_context_limits fv_context_room_fewest(const fv_plan *plan);

/* The least that a workspace may have: not so few gathered rows, of row_bytes each, that the entries of the many chunks would
 * take more memory than all those rows. */
fv_context_limits fv_context_room_least(const fv_plan *plan, size_t row_bytes);

/* Gathered rows, at most. */
int32_t fv_context_room_most_rows(const fv_plan *plan);

/* Nothing where no query is an extend, or the limits are 0. */
fv_context_room fv_context_room_of(const fv_plan *plan, const fv_context_limits *limits);

#endif
