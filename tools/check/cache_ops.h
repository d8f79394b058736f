/* kv_copy, rope, rope_kv_write and mla_query on random caches and rows. */
#ifndef FV_TOOLS_CHECK_CACHE_OPS_H
#define FV_TOOLS_CHECK_CACHE_OPS_H

#include "check/lane.h"
#include "check/report.h"

/* Case `index` of `seed` for kv_copy of `table`: within a cache and from one to another with other strides; the
 * bytes of both are what the reference makes of them. Some pairs name blocks that are not there. */
void check_run_kv_copy(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                       int32_t index);

/* The same for rope: every pair as near to the rotated one as fp32 arithmetic allows, and not a byte changed
 * elsewhere: behind rope_dim, between rows, in padding, in tokens whose position is outside the tables. */
void check_run_rope(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                    int32_t index);

/* The same for rope_kv_write: q and k have the bits of the table's rope, and the cache those that the reference's
 * kv_write makes of the rotated k. Some slots must be skipped. */
void check_run_rope_kv_write(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                             int32_t index);

/* The same for mla_query: every query by the accuracy rule, its sums in double; the keys as rope_kv_write of the table
 * leaves them. */
void check_run_mla_query(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                         int32_t index);

#endif
