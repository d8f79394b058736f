/* The reference kernels: every operation in plain C, double accumulation, no threads, no SIMD. They
 * are what the other kernels are checked against, so they are written to be read, not to be fast:
 * one row at a time, one key at a time, only the keys that the row sees are ever read. */
#ifndef FV_REFERENCE_REFERENCE_H
#define FV_REFERENCE_REFERENCE_H

#include "ops/kernel_table.h"
#include "ops/layer_table.h"

extern const fv_kernel_table fv_reference_kernels;
extern const fv_layer_table fv_reference_layers; /* of an engine's forward pass */

/* The largest head size of the reference kernels: their rows live on the stack. */
#define FV_REFERENCE_MAX_HEAD_SIZE 1024

extern const fv_attend_variant fv_reference_attend_variants[1];
extern const fv_attend_variant fv_reference_mla_variants[1];

fv_status fv_reference_reduce_segments(const fv_launch *launch, const fv_reduce_params *params);
fv_status fv_reference_kv_write(const fv_launch *launch, const fv_kv_write_params *params);
fv_status fv_reference_kv_gather(const fv_launch *launch, const fv_kv_gather_params *params);
fv_status fv_reference_copy_rows(const fv_launch *launch, const fv_copy_rows_params *params);
fv_status fv_reference_kv_copy(const fv_launch *launch, const fv_kv_copy_params *params);
fv_status fv_reference_rms_norm(const fv_launch *launch, const fv_rms_norm_params *params);
fv_status fv_reference_rope(const fv_launch *launch, const fv_rope_params *params);
fv_status fv_reference_rope_kv_write(const fv_launch *launch, const fv_rope_kv_write_params *params);
fv_status fv_reference_mla_query(const fv_launch *launch, const fv_mla_query_params *params);
extern const fv_mla_query_step fv_reference_mla_query_step;
fv_status fv_reference_merge_states(const fv_launch *launch, const fv_merge_params *params);
fv_status fv_reference_merge_ranks(const fv_launch *launch, const fv_merge_ranks_params *params);

/* As fovea/gemm.h says, any dtypes, in double. */
void fv_reference_gemm(const fv_gemm *gemm);

#endif
