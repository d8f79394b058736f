/* The layers of an engine's forward pass on CUDA GPUs: one .cu file for those that belong together. */
#ifndef FV_KERNELS_CUDA_LAYERS_LAYERS_H
#define FV_KERNELS_CUDA_LAYERS_LAYERS_H

#include "ops/layer_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* fv_layer_limits: a block's registers hold a row of add_norm, its shared memory what an expert activates. */
enum { FV_CUDA_MAX_ROW = 8192, FV_CUDA_ROW_STEP = 4, FV_CUDA_MAX_EXPERT = 24576 };

extern const fv_layer_table fv_cuda_layers;

fv_status fv_cuda_embed(const fv_launch *launch, const fv_embed_params *params);
fv_status fv_cuda_add_norm(const fv_launch *launch, const fv_add_norm_params *params);
fv_status fv_cuda_split_heads(const fv_launch *launch, const fv_split_heads_params *params);
fv_status fv_cuda_activate(const fv_launch *launch, const fv_activate_params *params);
fv_status fv_cuda_route(const fv_launch *launch, const fv_route_params *params);
fv_status fv_cuda_run_experts(const fv_launch *launch, const fv_run_experts_params *params);
fv_status fv_cuda_add_experts(const fv_launch *launch, const fv_add_experts_params *params);
fv_status fv_cuda_fill_random(const fv_launch *launch, const fv_fill_random_params *params);
fv_status fv_cuda_read_memory(const fv_launch *launch, const fv_read_memory_params *params);

#ifdef __cplusplus
}
#endif
#endif
