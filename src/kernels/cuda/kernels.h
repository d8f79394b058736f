/* The operations of the CUDA plugin: one .cu file each. Portable: sm_80 and later; what is Hopper's own is in hopper/. */
#ifndef FV_KERNELS_CUDA_KERNELS_H
#define FV_KERNELS_CUDA_KERNELS_H

#include "core/device_probes.h"
#include "ops/kernel_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The kernels of every GPU, and the same with Hopper's own where they serve a call. */
extern const fv_kernel_table fv_cuda_kernels, fv_hopper_kernels;
extern const fv_device_probes fv_cuda_probes;

/* In plugins with machine code of sm_90a. */
extern const struct fv_cuda_hopper_kernels fv_cuda_hopper;

enum { FV_CUDA_NUM_ATTEND = 3, FV_CUDA_NUM_MLA_DECODE = 6 };

extern const fv_attend_variant fv_cuda_attend_paged[FV_CUDA_NUM_ATTEND], fv_hopper_attend_paged[FV_CUDA_NUM_ATTEND];
extern const fv_attend_variant fv_cuda_attend_dense[FV_CUDA_NUM_ATTEND], fv_hopper_attend_dense[FV_CUDA_NUM_ATTEND];
extern const fv_attend_variant fv_cuda_mla_decode[FV_CUDA_NUM_MLA_DECODE], fv_hopper_mla_decode[FV_CUDA_NUM_MLA_DECODE];

/* Lets the attention kernels have the shared memory that they ask for; once for each device. */
fv_status fv_cuda_attend_open(const fv_device *device);

/* Sets fv_cuda_state.overlaps. */
fv_status fv_cuda_overlap_open(const fv_device *device);

fv_status fv_cuda_reduce_segments(const fv_launch *launch, const fv_reduce_params *params);
fv_status fv_cuda_kv_write(const fv_launch *launch, const fv_kv_write_params *params);
fv_status fv_cuda_kv_gather(const fv_launch *launch, const fv_kv_gather_params *params);
fv_status fv_cuda_kv_copy(const fv_launch *launch, const fv_kv_copy_params *params);
fv_status fv_cuda_copy_rows(const fv_launch *launch, const fv_copy_rows_params *params);
fv_status fv_cuda_rms_norm(const fv_launch *launch, const fv_rms_norm_params *params);
fv_status fv_cuda_rope(const fv_launch *launch, const fv_rope_params *params);
fv_status fv_cuda_rope_kv_write(const fv_launch *launch, const fv_rope_kv_write_params *params);
fv_status fv_cuda_merge_states(const fv_launch *launch, const fv_merge_params *params);
fv_status fv_cuda_merge_ranks(const fv_launch *launch, const fv_merge_ranks_params *params);

/* Of Hopper alone. */
const char *fv_hopper_mla_query_why_not(const fv_launch *launch, const fv_mla_query_params *params);
const char *fv_hopper_mla_query_slower(const fv_launch *launch, const fv_mla_query_params *params);
fv_status fv_hopper_mla_query(const fv_launch *launch, const fv_mla_query_params *params);

#ifdef __cplusplus
}
#endif
#endif
