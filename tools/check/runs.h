/* How a scene is run: straight through the kernels of one table, or through the public API. */
#ifndef FV_TOOLS_CHECK_RUNS_H
#define FV_TOOLS_CHECK_RUNS_H

#include "check/expected.h"
#include "check/report.h"

/* One variant of attend_paged of `table`, with a schedule of our own, and reduce_segments. */
void check_run_variant(check_result *result, check_scene *scene, const check_expected *expected, const check_lane *lane,
                       const fv_kernel_table *table, const fv_attend_variant *variant);

/* kv_write of `table`, some slots spoiled, against the reference. The case must write its new K/V. */
void check_run_kv_write(check_result *result, check_scene *scene, const check_lane *lane, const fv_kernel_table *table);

/* kv_gather of `table`: a run of keys of each sequence. */
void check_run_kv_gather(check_result *result, check_scene *scene, const check_lane *lane,
                         const fv_kernel_table *table);

/* fv_plan_create, update, run: `backend` by name, kernels NULL = the device's best. Batch-invariant
 * plans are run again without the sequence's mates, and must give the same bits. Where the kernel
 * rounded a cache element at a tie the other way, *expected is computed anew from its cache. */
void check_run_plan(check_result *result, check_scene *scene, const check_expected *expected, const check_lane *lane,
                    const char *backend, const char *kernels);

#endif
