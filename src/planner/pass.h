/* A pass over a step, and the rule by which it is cut: what the files that cut know of each other.
 *
 * A pass is one launch of an attention kernel: which tokens of which sequences, and which of their keys. */
#ifndef FV_PLANNER_PASS_H
#define FV_PLANNER_PASS_H

#include "core/compiler.h"
#include "fovea/plan.h"
#include "ops/attend_paged.h"

/* The lengths of a step, on the host. */
typedef struct fv_step {
    int32_t num_seqs;
    const int32_t *query_start; /* [num_seqs + 1] */
    const int32_t *seq_lens;    /* [num_seqs], global */
    const uint8_t *causal;      /* [num_seqs] or NULL = all causal */
} fv_step;

static inline int32_t fv_step_query_len(const fv_step *step, int32_t seq)
{
    return step->query_start[seq + 1] - step->query_start[seq];
}

/* Tokens of one sequence and the local keys that a pass attends; masks cut them further. */
typedef struct fv_query_run {
    int32_t seq;
    int32_t first_token, num_tokens; /* of the sequence's new tokens */
    int32_t first_key, end_key;
} fv_query_run;

/* All keys of all new tokens of a sequence. */
static inline fv_query_run fv_step_whole_query(const fv_step *step, int32_t seq)
{
    return (fv_query_run){seq, 0, fv_step_query_len(step, seq), 0, step->seq_lens[seq]};
}

/* Consecutive runs of a pass, whole queries of consecutive sequences, whose first num_keys keys are the
 * same blocks: planner/prefix_group.h. */
typedef struct fv_prefix_group {
    int32_t first_run, num_runs;
    int32_t num_keys;
} fv_prefix_group;

typedef struct fv_pass {
    const fv_query_run *runs;
    int32_t num_runs;
    const fv_prefix_group *groups; /* in the order of their runs */
    int32_t num_groups;
} fv_pass;

/* How to cut. */
typedef struct fv_split_rule {
    const fv_problem *problem; /* normal */
    int32_t block_q;           /* tokens of a Q block of a long query */
    int32_t least_block_q;     /* down to these it may be halved, where workers would wait for each other; 0: never */
    int32_t tile_keys;
    int32_t num_workers;
    int32_t num_lanes;    /* items that a device works on at once, each KV head of an item by itself; 0: a worker takes
                           * items one by one, and where rows are few an item has several KV heads */
    int32_t half_rows;    /* of an item, at most, where more items than lanes run twice as many at once, each in half a
                           * lane; 0: none do */
    int32_t lane_heads;   /* KV heads of an item of one token that a lane can take side by side; 0: one */
    int32_t splits_items; /* 1: two lanes may share an item; more: so many, at most, share items of one token */
    int32_t deals_keys;   /* 1: workers without keys take those of short queries from others; worker_cut.h */
    int32_t shared_rows;  /* up to so many rows of a KV head an item of a worker has several heads; 0: FV_DECODE_ROWS */
    int32_t few_row_cost; /* time of a row x key of an item with several heads, over that of one of many rows; 0: 1 */
    fv_softmax_path path;
    int32_t batch_invariant; /* 1: cut by the sequence's own lengths only */
    int32_t segment_keys;    /* keys of a segment, where the rule does not follow the load; 0: follow it */
    int32_t num_segments;    /* of a Q block that is cut; 0: as its cost says */
    int32_t cascade;         /* 1: passes may have prefix groups */
    int32_t spare_pieces; /* that Q blocks may be cut into beside one for each, all together; 0: as many as they like */
    int32_t max_slots;    /* partial results of a token that a pass leaves, at most; 0: any number */
    int32_t num_passes;   /* over disjoint tokens that a step makes, at most; 0: two */
} fv_split_rule;

/* Tokens of the smallest Q block of a long query, but for its last one. */
static inline int32_t fv_least_block_tokens(const fv_split_rule *rule)
{
    return rule->least_block_q > 0 ? rule->least_block_q : rule->block_q;
}

/* Query heads of a KV head. */
static inline int32_t fv_group_of(const fv_problem *problem)
{
    return problem->mha.num_heads / problem->mha.num_kv_heads;
}

/* Items that a piece of a Q block's keys is, at most: where there are lanes it is one, with all KV heads. */
static inline int32_t fv_most_head_runs(const fv_split_rule *rule)
{
    return rule->num_lanes ? 1 : rule->problem->mha.num_kv_heads;
}

/* What lanes take of an item, each `lane_heads` of its KV heads. */
static inline int32_t fv_lane_parts(const fv_split_rule *rule)
{
    return rule->problem->mha.num_kv_heads / fv_max_i32(1, rule->lane_heads);
}

/* Most tokens of a short query; 1 where even a single token has more rows than that. */
static inline int32_t fv_short_query_tokens(const fv_problem *problem)
{
    return fv_max_i32(1, FV_DECODE_ROWS / fv_group_of(problem));
}

/* Most tokens of an item: what the kernels' scratch has room for. */
static inline int32_t fv_most_item_tokens(const fv_split_rule *rule)
{
    return fv_max_i32(rule->block_q, fv_short_query_tokens(rule->problem));
}

/* 1: so few tokens that an item may have several KV heads. Lanes take one each. */
static inline int32_t fv_takes_several_heads(const fv_split_rule *rule, int32_t num_tokens)
{
    const int32_t most_rows = rule->shared_rows > 0 ? rule->shared_rows : FV_DECODE_ROWS;
    return !rule->num_lanes && (int64_t)num_tokens * fv_group_of(rule->problem) <= most_rows;
}

static inline int32_t fv_few_row_cost(const fv_split_rule *rule) { return fv_max_i32(1, rule->few_row_cost); }

/* A short query is one Q block with all its tokens; a long one is cut into blocks of block_q. */
static inline int32_t fv_query_is_short(const fv_problem *problem, int32_t query_len)
{
    return (int64_t)query_len * fv_group_of(problem) <= FV_DECODE_ROWS;
}

#endif
