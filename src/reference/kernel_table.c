/* The table of the reference kernels: complete, so that every other table may leave gaps. */
#include "reference/reference.h"

const fv_kernel_table fv_reference_kernels = {
    .name = "reference",
    .attend_paged = fv_reference_attend_variants,
    .num_attend_paged = FV_ARRAY_LEN(fv_reference_attend_variants),
    .attend_dense = fv_reference_attend_variants,
    .num_attend_dense = FV_ARRAY_LEN(fv_reference_attend_variants),
    .reduce_segments = fv_reference_reduce_segments,
    .kv_write = fv_reference_kv_write,
    .kv_gather = fv_reference_kv_gather,
    .kv_copy = fv_reference_kv_copy,
    .copy_rows = fv_reference_copy_rows,
    .rms_norm = fv_reference_rms_norm,
    .rope = fv_reference_rope,
    .rope_kv_write = fv_reference_rope_kv_write,
    .merge_states = fv_reference_merge_states,
    .merge_ranks = fv_reference_merge_ranks,
    .mla_query = &fv_reference_mla_query_step,
    .mla_decode = fv_reference_mla_variants,
    .num_mla_decode = FV_ARRAY_LEN(fv_reference_mla_variants),
};
