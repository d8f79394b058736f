/* Sizes of a plan: kernel variants, the split rule, the workspace, and host memory of the schedule. */
#ifndef FV_BACKENDS_STRATEGY_H
#define FV_BACKENDS_STRATEGY_H

#include "planner/plan.h"

/* What a strategy needs beside attend_paged, or mla_decode. */
typedef struct fv_strategy {
    int32_t num_segments;   /* of a Q block that is cut; 0: as its cost says */
    int32_t partition_keys; /* decode in runs of so many keys; 0: no */
    int32_t needs_dense;    /* 1: new tokens are attended as they came */
    int32_t needs_gather;   /* 1: the context is gathered in chunks and merged by LSE */
    fv_rescaling rescaling; /* of mla_decode */
    int32_t lse_by_head;    /* 1: the LSE of states lies [Hq, tokens], else [tokens, Hq] */
} fv_strategy;

/* What attend_dense has to serve: the problem itself, or MLA with its latents expanded to MHA. */
fv_problem fv_dense_problem(const fv_problem *problem);

/* The create() of a backend. FV_ERR_INVALID where max_workspace_bytes is below the least that the
 * problem needs; the text says how much that is. */
fv_status fv_strategy_create(fv_plan *plan, const fv_strategy *strategy);

/* The split rule of the partitioned decode over `num_tokens` tokens: runs of partition_keys keys, or of a
 * multiple of that by a power of two where the partial results would not fit their room. */
fv_split_rule fv_strategy_partition_rule(const fv_plan *plan, const fv_step *step, const fv_query_run *runs,
                                         int32_t num_runs);

#endif
