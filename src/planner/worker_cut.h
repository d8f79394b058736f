/* Cutting a pass for workers that take items one by one, the threads of a CPU: no more pieces than it takes for all
 * workers to end at about the same time, because a piece costs what its partial results cost to be written and merged,
 * as much as hundreds of keys where rows are many and wide (MLA), and a smaller Q block what its keys cost once more.
 *
 *   worker 0   |--- seq 0 ---|- seq 1 -|         shares that are too large: the others wait for worker 0
 *   worker 1   |-- seq 2 --|
 *   worker 0   |- 0 -|- 0 -|+|- 2 -|             smaller ones: both end together, each has merges (+) to pay for
 *   worker 1   |-- 1 --|- 2 -|+
 *
 * Where a worker without keys takes those of others (fv_split_rule.deals_keys), one piece for each worker is enough, and
 * nobody waits for the last. */
#ifndef FV_PLANNER_WORKER_CUT_H
#define FV_PLANNER_WORKER_CUT_H

#include "planner/pass.h"

/* Shares of a worker that a pass is at most cut into. */
#define FV_SHARES_PER_WORKER 8

/* Keys of the shortest piece that is worth a reduction. */
#define FV_MIN_SEGMENT_KEYS 256

/* Where the slots have no room for the partial results of as many runs of keys as there are shares, runs are longer, and KV
 * heads parted for them. */
typedef struct fv_worker_cut {
    int32_t block_q;   /* tokens of a Q block of a long query: the rule's, or halves of it down to least_block_q */
    int64_t share;     /* cost of the largest piece */
    int64_t key_share; /* of the largest run of keys: the share, or more */
} fv_worker_cut;

/* Of a pass without prefix groups, which costs `total`, the Q block and the share, total / workers / {1 ... 8}, that let
 * the last worker end first when pieces are dealt out in their order. */
fv_worker_cut fv_worker_cut_choose(const fv_split_rule *rule, const fv_step *step, const fv_pass *pass, int64_t total);

#endif
