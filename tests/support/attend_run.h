/* Runs one variant of an attention kernel as a plan would: fenced scratch that holds NaN, then
 * the reduction of its segments. */
#ifndef FV_TESTS_SUPPORT_ATTEND_RUN_H
#define FV_TESTS_SUPPORT_ATTEND_RUN_H

#include "ops/kernel_table.h"

/* On one worker. The launch must succeed and stay within its scratch, which is this function's. `reduces` [num_reduces] are
 * the reductions of a list of items; with the static grid they are not looked at. */
void attend_run_variant(const fv_attend_params *params, const fv_reduce_item *reduces, int32_t num_reduces,
                        const fv_kernel_table *table, const fv_attend_variant *variant);

/* The same on several workers, whose turns follow each other. */
void attend_run_variant_by(int32_t num_workers, const fv_attend_params *params, const fv_reduce_item *reduces,
                           int32_t num_reduces, const fv_kernel_table *table, const fv_attend_variant *variant);

/* The reduction alone. */
void attend_run_reduce(const fv_attend_params *params, const fv_reduce_item *reduces, int32_t num_reduces,
                       fv_reduce_segments_fn reduce_segments);

#endif
