/* Filling lanes that take one item at a time with sequences of different lengths, or alike ones that are no whole
 * rounds: where an item costs much beside its keys (MLA: as much as hundreds of them) and lanes are few, equal shares
 * leave some lanes with one item more than others.
 *
 *   lane 0   |------ seq 4 ------|-- 2 --|        longest first, each to the lane that is free first; what would end
 *   lane 1   |---- seq 0 ----|--- 3 ---|          after all the others is cut there and goes on elsewhere
 *   lane 2   |---- seq 1 ----|- 4 -|-2-|
 *
 * That is Graham's rule of the longest processing time (SIAM J. Appl. Math. 17, 1969) with a time limit that rises
 * until everything fits, or until runs that stay whole would end before parts are reduced. Pieces are listed in the
 * order in which they begin, so that a device which hands them out in order does the same. */
#ifndef FV_PLANNER_LANE_FILL_H
#define FV_PLANNER_LANE_FILL_H

#include "planner/lane_cut.h"
#include "planner/pass.h"

/* What a part of `rows` rows takes of a lane beside its keys, as keys: by times of cuts on an H200
 * (docs/notes/cuda-hopper.md) a little less than a whole item. What they wrote is reduced when all have ended, ... */
static inline int32_t fv_lane_fill_part_keys(int32_t rows) { return fv_lane_item_keys(rows, 0) * 15 / 16; }

/* ... which takes so long: 6 us for 128 rows. */
static inline int32_t fv_lane_fill_reduce_keys(int32_t rows)
{
    return (fv_lane_item_keys(rows, 1) - fv_lane_item_keys(rows, 0)) / 2;
}

enum { FV_LANE_FILL_RUNS = 256, FV_LANE_FILL_PIECES = 512, FV_LANE_FILL_LANES = 256 };

/* The next `keys` keys of a run. */
typedef struct fv_lane_piece {
    int32_t run, keys;
} fv_lane_piece;

typedef struct fv_lane_fill {
    fv_lane_piece pieces[FV_LANE_FILL_PIECES];
    int32_t num_pieces;
    int32_t num_of_run[FV_LANE_FILL_RUNS];
} fv_lane_fill;

/* 1: filled. 0: not for this pass: there are several KV heads or more than one lane of a worker, a run is not one Q
 * block, the rule is not to follow the load, or there are too many runs or lanes. Runs that differ are filled without a
 * `cut`; those that are all alike only where that takes less time than the cut that was chosen for them. */
int32_t fv_lane_fill_choose(fv_lane_fill *fill, const fv_split_rule *rule, const fv_step *step, const fv_pass *pass,
                            const fv_lane_cut *cut);

#endif
