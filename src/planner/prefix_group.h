/* Prefix groups: runs of consecutive sequences whose first blocks are the same, found in the block table.
 *
 *   seq 0   7 8 9 | 4 1       group 0: 3 blocks, sequences 0 to 2
 *   seq 1   7 8 9 | 2
 *   seq 2   7 8 9 | 5 6
 *   seq 3   3 1               alone
 *   seq 4   2 2 | 9           group 1: 2 blocks, sequences 4 and 5; a table may have several groups
 *   seq 5   2 2 | 4
 *
 * Cascade attention reads such keys once for all members. A group is taken where that saves more than the
 * merge costs (fv_work_cascade_gain). */
#ifndef FV_PLANNER_PREFIX_GROUP_H
#define FV_PLANNER_PREFIX_GROUP_H

#include "planner/pass.h"

/* What the table looks like where the host can read it. */
typedef struct fv_block_rows {
    const int32_t *table; /* [num_seqs, stride] */
    int64_t stride;
    int32_t width;
} fv_block_rows;

/* Finds the groups of the pass's runs and writes them to `groups`, room for num_runs / 2. Runs that are not
 * whole queries from key 0 on are left alone, and so are all where windows, ALiBi or context parallelism
 * make the shared keys look different to each member. always: takes every group of at least one block,
 * whatever the gain. Returns their number. */
int32_t fv_prefix_groups_find(fv_prefix_group *groups, const fv_problem *problem, const fv_step *step,
                              const fv_query_run *runs, int32_t num_runs, const fv_block_rows *rows, int32_t always);

#endif
