/* The work list: a step cut into items of about equal cost.
 *
 *   seq 0, 1 token   |--------- keys ---------|      ->  items a b c (segments) and one reduction
 *   seq 1, 1 token   |----|                          ->  item d, written directly
 *   seq 2, prefill   |...                            ->  one item for each Q block and KV head
 *
 * Host arithmetic only; allocates nothing; same step, same list. */
#ifndef FV_PLANNER_WORK_LIST_H
#define FV_PLANNER_WORK_LIST_H

#include "fovea/plan.h"
#include "ops/attend_paged.h"

/* The lengths of a step, on the host. */
typedef struct fv_step {
    int32_t num_seqs;
    const int32_t *query_start; /* [num_seqs + 1] */
    const int32_t *seq_lens;    /* [num_seqs], global */
    const uint8_t *causal;      /* [num_seqs] or NULL = all causal */
} fv_step;

/* How to cut. */
typedef struct fv_split_rule {
    const fv_problem *problem; /* normal */
    int32_t block_q;           /* tokens of a Q block of a long query */
    int32_t tile_keys;
    int32_t num_workers;
    fv_softmax_path path;
    int32_t batch_invariant; /* 1: cut by the sequence's own lengths only */
    int32_t segment_keys;    /* keys of a segment, where the rule does not follow the load; 0: follow it */
} fv_split_rule;

typedef struct fv_work_list {
    fv_work_item *items;
    int32_t num_items, item_capacity;
    fv_reduce_item *reduces;
    int32_t num_reduces, reduce_capacity;
    int32_t num_slots, slot_capacity; /* of partial results */
} fv_work_list;

/* Batch-invariant rules: sets segment_keys so that all short queries within the bounds can be cut at
 * once, or path 2D where the slots would not suffice. Others: nothing. Call once, before the room. */
void fv_split_rule_fix(fv_split_rule *rule, const fv_bounds *bounds, size_t slot_bytes);

/* Room that no step within the bounds passes: items, reductions and slots. `slot_bytes` is the size of
 * one slot; all slots together stay under 64 MiB, beyond which Q blocks are left whole. */
void fv_work_list_room(fv_work_list *list, const fv_split_rule *rule, const fv_bounds *bounds, size_t slot_bytes);

/* Fills the list. FV_ERR_NO_SPACE when a step within the bounds does not fit: a fault of
 * fv_work_list_room. */
fv_status fv_work_list_build(fv_work_list *list, const fv_split_rule *rule, const fv_step *step);

#endif
