/* When lanes share items and add up their results themselves: the lanes of an item run at once, near each other, so
 * that no partial results go to memory and nothing is left to reduce. All queries of the pass are of one token and of
 * about one length, and few.
 *
 *   seq 0  |--|--|--|--|     four lanes each, whatever the lengths
 *   seq 1  |-|-|-|-| */
#ifndef FV_PLANNER_LANE_MEETING_H
#define FV_PLANNER_LANE_MEETING_H

#include "planner/pass.h"

/* Lanes for each query of the pass, a power of two; 0: they had better be cut. */
int32_t fv_lane_meeting_choose(const fv_split_rule *rule, const fv_step *step, const fv_pass *pass);

#endif
