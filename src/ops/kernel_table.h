/* The kernels of one device at one level: a function for each operation, NULL where a level has none
 * (only above the reference, which has them all). */
#ifndef FV_OPS_KERNEL_TABLE_H
#define FV_OPS_KERNEL_TABLE_H

#include "ops/attend_paged.h"
#include "ops/copy_rows.h"
#include "ops/kv_copy.h"
#include "ops/kv_write.h"
#include "ops/merge_ranks.h"
#include "ops/merge_states.h"
#include "ops/mla_query.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"

typedef struct fv_kernel_table {
    const char *name;                      /* "reference", "portable", "avx2", ... */
    const fv_attend_variant *attend_paged; /* the variants; the planner picks one */
    int32_t num_attend_paged;
    const fv_attend_variant *attend_dense; /* the same over fv_attend_params.dense */
    int32_t num_attend_dense;
    const fv_attend_variant *mla_decode; /* the same over paged latents */
    int32_t num_mla_decode;
    fv_reduce_segments_fn reduce_segments;
    fv_kv_write_fn kv_write;
    fv_kv_gather_fn kv_gather;
    fv_kv_copy_fn kv_copy;
    fv_copy_rows_fn copy_rows;
    fv_rms_norm_fn rms_norm;
    fv_rope_fn rope;
    fv_rope_kv_write_fn rope_kv_write;
    fv_merge_states_fn merge_states;
    fv_merge_ranks_fn merge_ranks;
    const fv_mla_query_step *mla_query;
} fv_kernel_table;

#endif
