/* libfovea-cuda.so: the entry, and the kernels that the plugin brings. */
#include "core/plugin.h"

#include "kernels/cuda/device.h"
#include "kernels/cuda/kernels.h"

#define FV_CUDA_TABLE(NAME, PREFIX, MLA_QUERY)                                                                    \
    {                                                                                                             \
        .name = NAME, .attend_paged = PREFIX##_attend_paged, .num_attend_paged = FV_CUDA_NUM_ATTEND,              \
        .attend_dense = PREFIX##_attend_dense, .num_attend_dense = FV_CUDA_NUM_ATTEND,                            \
        .mla_decode = PREFIX##_mla_decode, .num_mla_decode = FV_CUDA_NUM_MLA_DECODE,                              \
        .reduce_segments = fv_cuda_reduce_segments, .kv_write = fv_cuda_kv_write, .kv_gather = fv_cuda_kv_gather, \
        .kv_copy = fv_cuda_kv_copy, .copy_rows = fv_cuda_copy_rows, .rms_norm = fv_cuda_rms_norm,                 \
        .rope = fv_cuda_rope, .rope_kv_write = fv_cuda_rope_kv_write, .merge_states = fv_cuda_merge_states,       \
        .merge_ranks = fv_cuda_merge_ranks, .mla_query = MLA_QUERY,                                               \
    }

static const fv_mla_query_step mla_query = {fv_hopper_mla_query_why_not, fv_hopper_mla_query_slower,
                                            fv_hopper_mla_query};

const fv_kernel_table fv_cuda_kernels = FV_CUDA_TABLE("portable", fv_cuda, NULL);
const fv_kernel_table fv_hopper_kernels = FV_CUDA_TABLE("hopper", fv_hopper, &mla_query);

__attribute__((visibility("default"))) const fv_plugin *fv_plugin_entry(void);

const fv_plugin *fv_plugin_entry(void)
{
    static const fv_plugin plugin = {FV_PLUGIN_ABI, FV_BUILD_ID, fv_cuda_device_open};
    return &plugin;
}
