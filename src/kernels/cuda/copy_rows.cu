/* copy_rows: a warp for each piece. */
#include "kernels/cuda/copy_bytes.cuh"
#include "kernels/cuda/launch.cuh"

#define WARPS 4

static __global__ void __launch_bounds__(WARPS * 32, 1) copy_rows(const __grid_constant__ fv_copy_rows_params params)
{
    const int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int64_t token = at / params.num_heads, head = at % params.num_heads;
    if (token >= params.num_tokens) return;
    copy_bytes((char *)params.dst + token * params.dst_token_stride + head * params.dst_head_stride,
               (const char *)params.src + token * params.src_token_stride + head * params.src_head_stride,
               params.row_bytes);
}

extern "C" fv_status fv_cuda_copy_rows(const fv_launch *launch, const fv_copy_rows_params *params)
{
    const int64_t num_pieces = (int64_t)params->num_tokens * params->num_heads;
    return fv_cuda_launch(launch, "copy_rows", copy_rows, dim3(fv_cuda_blocks(num_pieces, WARPS)), WARPS * 32, 0,
                          *params);
}
