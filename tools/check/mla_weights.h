/* MLA with its weights through every MLA backend: absorbed and expanded queries of one batch, context in chunks. */
#ifndef FV_TOOLS_CHECK_MLA_WEIGHTS_H
#define FV_TOOLS_CHECK_MLA_WEIGHTS_H

#include "check/lane.h"
#include "check/report.h"
#include "fovea/plan.h"

/* Spoils an updated plan, or the layer that it is to run. */
typedef void (*check_mla_fault)(fv_plan *plan, fv_layer *layer);

/* Random case `index` of `seed` through a backend, in turn, on the kernels of `table`: rows against the formula, the
 * cache byte by byte. */
void check_run_mla_weights(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                           int32_t index);

/* The same with a fault, on the reference's kernels. */
void check_run_mla_weights_spoiled(check_result *result, const check_lane *lane, uint64_t seed, int32_t index,
                                   check_mla_fault fault);

#endif
