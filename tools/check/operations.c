/* The table of the operations. */
#include "check/operations.h"

#include "check/cache_ops.h"
#include "check/merges.h"
#include "check/mla_weights.h"
#include "check/row_ops.h"

static int32_t has_merge_states(const fv_kernel_table *table) { return table->merge_states != NULL; }
static int32_t has_reduce_segments(const fv_kernel_table *table) { return table->reduce_segments != NULL; }
static int32_t has_merge_ranks(const fv_kernel_table *table) { return table->merge_ranks != NULL; }
static int32_t has_kv_copy(const fv_kernel_table *table) { return table->kv_copy != NULL; }
static int32_t has_rope(const fv_kernel_table *table) { return table->rope != NULL; }
static int32_t has_rope_kv_write(const fv_kernel_table *table) { return table->rope_kv_write != NULL; }
static int32_t has_rms_norm(const fv_kernel_table *table) { return table->rms_norm != NULL; }
static int32_t has_copy_rows(const fv_kernel_table *table) { return table->copy_rows != NULL; }
static int32_t has_mla_query(const fv_kernel_table *table) { return table->mla_query != NULL; }
static int32_t has_mla(const fv_kernel_table *table) { return table->num_mla_decode > 0; }

const check_operation check_operations[CHECK_NUM_OPERATIONS] = {
    {"merge_states", has_merge_states, check_run_merge_states},
    {"reduce_segments", has_reduce_segments, check_run_reduce_segments},
    {"merge_ranks", has_merge_ranks, check_run_merge_ranks},
    {"kv_copy", has_kv_copy, check_run_kv_copy},
    {"rope", has_rope, check_run_rope},
    {"rope_kv_write", has_rope_kv_write, check_run_rope_kv_write},
    {"rms_norm", has_rms_norm, check_run_rms_norm},
    {"copy_rows", has_copy_rows, check_run_copy_rows},
    {"mla_query", has_mla_query, check_run_mla_query},
    {"mla_weights", has_mla, check_run_mla_weights},
};
