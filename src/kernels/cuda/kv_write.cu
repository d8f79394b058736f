/* kv_write: a warp for each row, that is token, head, and K or V. */
#include "kernels/cuda/kv_write_token.cuh"
#include "kernels/cuda/overlap.cuh"

#define WARPS 4

static __global__ void __launch_bounds__(WARPS * 32, 1) kv_write(const __grid_constant__ fv_kv_write_params params)
{
    overlap_begin();
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int32_t rows_of_token = 2 * params.cache.num_kv_heads;
    const int32_t token = (int32_t)(row / rows_of_token);
    if (token >= fv_kv_write_tokens(&params)) return;
    int64_t block, slot;
    if (!find_slot(&block, &slot, &params, token)) return;
    const int32_t at = (int32_t)(row - (int64_t)token * rows_of_token);
    write_head(&params, token, at / 2, at % 2 != 0, block, slot);
}

extern "C" fv_status fv_cuda_kv_write(const fv_launch *launch, const fv_kv_write_params *params)
{
    const int64_t num_rows = (int64_t)params->num_tokens * params->cache.num_kv_heads * 2;
    return fv_cuda_launch_overlapped(launch, "kv_write", kv_write, dim3(fv_cuda_blocks(num_rows, WARPS)), WARPS * 32, 0,
                                     *params);
}
