/* The work list: a pass over a step, cut into items of about equal cost.
 *
 *   seq 0, 1 token   |--------- keys ---------|      ->  items a b c (segments) and one reduction
 *   seq 1, 1 token   |----|                          ->  item d, written directly
 *   seq 2, prefill   |...                            ->  one item for each Q block and KV head
 *
 * Host arithmetic only; allocates nothing; same step, same list. */
#ifndef FV_PLANNER_WORK_LIST_H
#define FV_PLANNER_WORK_LIST_H

#include "planner/pass.h"

typedef struct fv_work_list {
    fv_work_item *items;
    int32_t num_items, item_capacity;
    int32_t num_split;   /* the last ones of the pass, each for two lanes to share, or for num_meeting */
    int32_t num_meeting; /* lanes that share each item of the pass (planner/lane_meeting.h); 0: as above */
    int32_t piece_keys;  /* of a lane, where lanes share items: as the longest item has them */
    int32_t lane_heads;  /* fv_split_rule.lane_heads, of the pass */
    fv_reduce_item *reduces;
    int32_t num_reduces, reduce_capacity;
    int32_t num_slots, slot_capacity; /* of partial results */
    int32_t spare_items;              /* that prefix groups may use; counts down */
    int32_t spare_pieces;             /* of the pass: fv_split_rule.spare_pieces; counts down */
} fv_work_list;

/* Batch-invariant rules: sets segment_keys so that all short queries within the bounds can be cut at
 * once, or path 2D where the slots would not suffice. Others: nothing. Call once, before the room.
 * `slots_limit_bytes` is what all slots together may take, `slot_bytes` the size of one. */
void fv_split_rule_fix(fv_split_rule *rule, const fv_bounds *bounds, size_t slot_bytes, size_t slots_limit_bytes);

/* Room that no pass within the bounds passes: items, reductions and slots. Where the slots would take more
 * than slots_limit_bytes there are fewer, and Q blocks are left whole. Items and reductions of INT32_MAX / 2 stand for
 * that many or more: the caller has a limit below. */
void fv_work_list_room(fv_work_list *list, const fv_split_rule *rule, const fv_bounds *bounds, size_t slot_bytes,
                       size_t slots_limit_bytes);

/* Fewer items and reductions, of which a step has all, empty ones behind its own: one pass, and what rule->spare_pieces
 * allows. Behind fv_work_list_room. */
void fv_work_list_fix(fv_work_list *list, const fv_split_rule *rule, const fv_bounds *bounds);

/* Appends a pass; its slots start at 0, for a pass is reduced before the next one runs. FV_ERR_NO_SPACE
 * when a step within the bounds does not fit: a fault of fv_work_list_room. */
fv_status fv_work_list_append(fv_work_list *list, const fv_split_rule *rule, const fv_step *step, const fv_pass *pass);

#endif
