/* merge_states: a warp for each row. Each lane writes the elements that it has read, so that out may be a
 * side; all have read the LSE of both sides when one writes that of the row. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/merge_row.cuh"

#define WARPS 4

static __global__ void __launch_bounds__(WARPS * 32, 1) merge_states(const __grid_constant__ fv_merge_params params)
{
    const int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int32_t token = (int32_t)(at / params.num_heads), head = (int32_t)(at % params.num_heads);
    if (token >= params.num_tokens) return;
    const float lse_a = side_lse(&params.a, token, head, params.nan_stays);
    const float lse_b = side_lse(&params.b, token, head, params.nan_stays);
    __syncwarp();
    const float max = fmaxf(lse_a, lse_b); /* of a number and NaN the number: the weights become NaN */
    const bool is_empty = lse_a == -INFINITY && lse_b == -INFINITY;
    const float sink = params.sinks && !is_empty ? params.sinks[head] : -INFINITY;
    const float top = is_empty ? 0.0f : fmaxf(max, sink);
    const float weight_a = expf(lse_a - top), weight_b = expf(lse_b - top);
    const float sum = weight_a + weight_b + expf(sink - top);
    const float inverse = is_empty ? 0.0f : 1.0f / sum;

    const int32_t out_bytes = fv_element_bytes(params.out_dtype);
    char *row = (char *)params.out + token * params.token_stride + head * params.head_stride;
    for (int32_t d = threadIdx.x % 32; d < params.head_size; d += 32) {
        const float value = side_element(&params.a, params.dtype, token, head, weight_a * inverse, d) +
                            side_element(&params.b, params.dtype, token, head, weight_b * inverse, d);
        fv_element_store(row + (int64_t)d * out_bytes, value, params.out_dtype);
    }
    if (!params.lse || threadIdx.x % 32 != 0) return;
    *(float *)((char *)params.lse + token * params.lse_token_stride +
               head * params.lse_head_stride) = is_empty ? -INFINITY : top + logf(sum);
}

extern "C" fv_status fv_cuda_merge_states(const fv_launch *launch, const fv_merge_params *params)
{
    const int64_t num_rows = (int64_t)params->num_tokens * params->num_heads;
    return fv_cuda_launch(launch, "merge_states", merge_states, dim3(fv_cuda_blocks(num_rows, WARPS)), WARPS * 32, 0,
                          *params);
}
