/* A lane: where a case runs. Large cases have one lane with the threads of the machine; small cases run
 * side by side, each on a lane of its own whose executor runs tasks one after the other, but in a
 * shuffled order and as if by several workers: what depends on the order shows, and shows again from
 * the same seed. */
#ifndef FV_TOOLS_CHECK_LANE_H
#define FV_TOOLS_CHECK_LANE_H

#include "check/random.h"
#include "core/device.h"
#include "ops/kernel_table.h"

typedef struct check_lane {
    fv_context *context;
    fv_device *device;
    const fv_executor *executor;
    fv_executor shuffled; /* its user is the lane */
    check_random random;
} check_lane;

/* A shuffled lane on the named device; the lane must not move after. `isa` as in fv_context_options. */
fv_status check_lane_init_shuffled(check_lane *lane, const char *device, const char *isa);

/* A lane with `num_threads` threads, 0 = all CPUs. */
fv_status check_lane_init_threaded(check_lane *lane, const char *device, const char *isa, int32_t num_threads);

void check_lane_deinit(check_lane *lane);

fv_launch check_lane_launch(const check_lane *lane);

/* Waits until what was launched has run: `status` of the launch, or of what came of it. */
fv_status check_lane_ran(const check_lane *lane, fv_status status);

/* A function of `table`, or of the next weaker table of the lane that has it. */
fv_reduce_segments_fn check_lane_reduce_segments(const check_lane *lane, const fv_kernel_table *table);

#endif
