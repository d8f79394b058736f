/* rms_norm: a block of threads for each row; the first pass brings the row into the cache, the second scales it
 * in place. Each thread adds up its own elements and the warps' sums are added in their order, so that the bits
 * of a row depend on its size alone. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/number.cuh"
#include "ops/rms_norm.h"

#define THREADS 256
#define WARPS (THREADS / 32)

/* The same in every thread. */
static __device__ __forceinline__ float sum_over_block(float value)
{
    __shared__ float sums[WARPS];
    const float warp_sum = fv_warp_sum(value);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = warp_sum;
    __syncthreads();
    float sum = 0;
    for (int32_t i = 0; i < WARPS; i++) sum += sums[i];
    return sum;
}

static __global__ void __launch_bounds__(THREADS, 1) rms_norm(const __grid_constant__ fv_rms_norm_params params)
{
    const int32_t bytes = fv_element_bytes(params.dtype), weight_bytes = fv_element_bytes(params.weight_dtype);
    char *row = (char *)params.rows + blockIdx.x * params.row_stride;
    const char *weight = (const char *)params.weight;
    float sum = 0;
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < params.size; i += THREADS) {
        const float x = fv_element_load(row + (int64_t)i * bytes, params.dtype);
        sum = __fmaf_rn(x, x, sum);
    }
    const float factor = 1.0f / sqrtf(sum_over_block(sum) / (float)params.size + params.epsilon);
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < params.size; i += THREADS) {
        const float x = fv_element_load(row + (int64_t)i * bytes, params.dtype);
        const float w = fv_element_load(weight + (int64_t)i * weight_bytes, params.weight_dtype);
        fv_element_store(row + (int64_t)i * bytes, x * factor * w, params.dtype);
    }
}

extern "C" fv_status fv_cuda_rms_norm(const fv_launch *launch, const fv_rms_norm_params *params)
{
    return fv_cuda_launch(launch, "rms_norm", rms_norm, dim3((uint32_t)params->num_rows), THREADS, 0, *params);
}
