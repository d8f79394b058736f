/* The table of the reference kernels: complete, so that every other table may leave gaps. */
#include "reference/reference.h"

const fv_kernel_table fv_reference_kernels = {
    .name = "reference",
    .attend_paged = fv_reference_attend_variants,
    .num_attend_paged = FV_ARRAY_LEN(fv_reference_attend_variants),
    .reduce_segments = fv_reference_reduce_segments,
    .kv_write = fv_reference_kv_write,
    .kv_gather = fv_reference_kv_gather,
    .merge_states = fv_reference_merge_states,
    .mla_decode = fv_reference_mla_decode,
};
