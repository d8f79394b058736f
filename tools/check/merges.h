/* merge_states, reduce_segments and merge_ranks on random partial results. */
#ifndef FV_TOOLS_CHECK_MERGES_H
#define FV_TOOLS_CHECK_MERGES_H

#include "check/lane.h"
#include "check/report.h"

/* Case `index` of `seed` for merge_states of `table`; shapes as in vLLM's test_merge_attn_states.py,
 * with -inf, +inf and NaN among the LSEs and garbage in the sides that they mark. */
void check_run_merge_states(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                            int32_t index);

/* The same for reduce_segments: ragged segments, some of them without keys, with and without sinks. */
void check_run_reduce_segments(check_result *result, const check_lane *lane, const fv_kernel_table *table,
                               uint64_t seed, int32_t index);

/* The same for merge_ranks: 1 to 256 ranks, some without keys, in any order in memory, out in the place of one
 * of them; and one rank weighed by a total that is given. */
void check_run_merge_ranks(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                           int32_t index);

#endif
