/* fill_random: weights without a file; read_memory: how fast memory can be read at all. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/layers/layers.h"
#include "kernels/cuda/number.cuh"

#define THREADS 512
#define BLOCKS_OF_MULTIPROCESSOR 4
#define LOADS 8 /* in flight for each thread */

static uint32_t num_blocks(const fv_launch *launch, int64_t num_items)
{
    const int64_t most = (int64_t)launch->device->num_workers * BLOCKS_OF_MULTIPROCESSOR;
    return (uint32_t)fv_min_i64(most, fv_ceil_div(num_items, THREADS));
}

static __global__ void __launch_bounds__(THREADS, 1) fill_random(const __grid_constant__ fv_fill_random_params params)
{
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < params.count; i += step) {
        const float value = fv_random_weight(params.seed, params.first + i) * params.scale;
        ((__nv_bfloat16 *)params.out)[i] = __float2bfloat16_rn(value);
    }
}

extern "C" fv_status fv_cuda_fill_random(const fv_launch *launch, const fv_fill_random_params *params)
{
    return fv_cuda_launch(launch, "fill_random", fill_random, dim3(num_blocks(launch, params->count)), THREADS, 0,
                          *params);
}

static __global__ void __launch_bounds__(THREADS, 1) read_memory(const __grid_constant__ fv_read_memory_params params)
{
    const uint4 *data = (const uint4 *)params.data;
    const int64_t count = params.bytes / 16, step = (int64_t)gridDim.x * THREADS;
    uint32_t sum = 0;
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    for (; i + (LOADS - 1) * step < count; i += LOADS * step) {
        uint4 words[LOADS];
#pragma unroll
        for (int32_t j = 0; j < LOADS; j++) words[j] = __ldcs(data + i + j * step);
#pragma unroll
        for (int32_t j = 0; j < LOADS; j++) sum += words[j].x ^ words[j].y ^ words[j].z ^ words[j].w;
    }
    for (; i < count; i += step) sum += data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
    atomicAdd(params.sum, sum);
}

extern "C" fv_status fv_cuda_read_memory(const fv_launch *launch, const fv_read_memory_params *params)
{
    return fv_cuda_launch(launch, "read_memory", read_memory, dim3(num_blocks(launch, params->bytes / 16)), THREADS, 0,
                          *params);
}
