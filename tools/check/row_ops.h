/* rms_norm and copy_rows on random rows. */
#ifndef FV_TOOLS_CHECK_ROW_OPS_H
#define FV_TOOLS_CHECK_ROW_OPS_H

#include "check/lane.h"
#include "check/report.h"

/* Case `index` of `seed` for rms_norm of `table`: every row against its formula by the accuracy rule, rows of zeros
 * among them, and not a byte changed between the rows. */
void check_run_rms_norm(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                        int32_t index);

/* The same for copy_rows, byte by byte: pieces of any length at any address. */
void check_run_copy_rows(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                         int32_t index);

#endif
