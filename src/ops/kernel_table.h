/* The kernels of one device at one level: a function for each operation, NULL where a level has none
 * (only above the reference, which has them all). */
#ifndef FV_OPS_KERNEL_TABLE_H
#define FV_OPS_KERNEL_TABLE_H

#include "ops/attend_paged.h"
#include "ops/kv_write.h"
#include "ops/merge_states.h"
#include "ops/mla_decode.h"

typedef struct fv_kernel_table {
    const char *name;                      /* "reference", "portable", "avx2", ... */
    const fv_attend_variant *attend_paged; /* the variants; the planner picks one */
    int32_t num_attend_paged;
    fv_reduce_segments_fn reduce_segments;
    fv_kv_write_fn kv_write;
    fv_kv_gather_fn kv_gather;
    fv_merge_states_fn merge_states;
    fv_mla_decode_fn mla_decode;
} fv_kernel_table;

#endif
