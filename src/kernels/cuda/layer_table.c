/* The table of layers. */
#include "kernels/cuda/layers/layers.h"

const fv_layer_table fv_cuda_layers = {
    .limits = {FV_CUDA_MAX_ROW, FV_CUDA_ROW_STEP, FV_CUDA_MAX_EXPERT},
    .embed = fv_cuda_embed,
    .add_norm = fv_cuda_add_norm,
    .split_heads = fv_cuda_split_heads,
    .activate = fv_cuda_activate,
    .route = fv_cuda_route,
    .run_experts = fv_cuda_run_experts,
    .add_experts = fv_cuda_add_experts,
    .fill_random = fv_cuda_fill_random,
    .read_memory = fv_cuda_read_memory,
};
