/* Q blocks, the rows that are cut together, and what they cost. */
#ifndef FV_PLANNER_QUERY_BLOCK_H
#define FV_PLANNER_QUERY_BLOCK_H

#include "planner/pass.h"

/* Cost of a key, in rows x keys, where a device has lanes: few rows take as long from memory as many in the products. */
#define FV_LANE_KEY_COST 256

typedef struct fv_query_block {
    int32_t seq, first_token, num_tokens;
    int32_t first_key, end_key;
    int32_t is_short;
} fv_query_block;

/* The Q block of a run that begins at `first_token`, and the keys of the run that it sees. */
fv_query_block fv_query_block_at(const fv_split_rule *rule, const fv_step *step, const fv_query_run *run,
                                 int32_t first_token);

/* All KV heads, in units of a row x key of many rows; of a run all its Q blocks. */
int64_t fv_query_block_cost(const fv_split_rule *rule, const fv_query_block *block);
int64_t fv_query_run_cost(const fv_split_rule *rule, const fv_step *step, const fv_query_run *run);

/* 1: runs i - 1 and i of the pass have the same Q blocks over as many keys, so that what holds for one holds for the
 * other: most steps of decode are a few such stretches. */
int32_t fv_query_run_repeats(const fv_step *step, const fv_pass *pass, int32_t i);

/* Cost of a Q block of num_tokens tokens over num_keys keys and all KV heads: keys x heads x (KEY_COST + rows),
 * for bringing in a key costs as much as KEY_COST rows of arithmetic. Blocks of few rows and of many are compared by the
 * functions above. */
int64_t fv_work_cost(const fv_problem *problem, int64_t num_keys, int64_t num_tokens);

/* What sharing the reading of `num_keys` keys among num_seqs sequences of num_tokens tokens in all saves,
 * less what merging costs; in units of fv_work_cost. */
int64_t fv_work_cascade_gain(const fv_problem *problem, int64_t num_keys, int64_t num_seqs, int64_t num_tokens);

#endif
