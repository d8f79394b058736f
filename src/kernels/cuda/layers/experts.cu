/* A mixture of experts, the simple way: a block of threads for each token routes it; a block for each token and
 * used expert multiplies with that expert's weights. Right for decodes of small batches, where each expert has a
 * token or two; many tokens read the weights of an expert many times. */
#include "kernels/cuda/layers/layers.h"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/ptx.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)

/* Scores of one token, by one thread: a few hundred numbers. */
static __device__ __forceinline__ void apply_gating(float *scores, const fv_route_params *params)
{
    float largest = -INFINITY, sum = 0;
    for (int32_t i = 0; i < params->num_experts; i++) largest = fmaxf(largest, scores[i]);
    for (int32_t i = 0; i < params->num_experts; i++) {
        scores[i] = params->is_sigmoid ? 1.0f / (1.0f + expf(-scores[i])) : expf(scores[i] - largest);
        sum += scores[i];
    }
    for (int32_t i = 0; i < params->num_experts && !params->is_sigmoid; i++) scores[i] /= sum;
}

static __global__ void __launch_bounds__(THREADS, 1) route(const __grid_constant__ fv_route_params params)
{
    overlap_let_next_start();
    overlap_wait();
    const int64_t row = blockIdx.x;
    const float *x = params.x + row * params.size;
    float *scores = params.scratch + 3 * row * params.num_experts;
    for (int32_t expert = threadIdx.x / 32; expert < params.num_experts; expert += WARPS) {
        const float *weights = params.router + (int64_t)expert * params.size;
        float sum = 0;
        for (int32_t i = threadIdx.x % 32; i < params.size; i += 32) sum = __fmaf_rn(x[i], weights[i], sum);
        sum = fv_warp_sum(sum);
        if (threadIdx.x % 32 == 0) scores[expert] = sum;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    apply_gating(scores, &params);
    fv_route_token(params.experts + row * params.num_used, params.weights + row * params.num_used, scores,
                   scores + params.num_experts, &params);
}

extern "C" fv_status fv_cuda_route(const fv_launch *launch, const fv_route_params *params)
{
    return fv_cuda_launch_overlapped(launch, "route", route, dim3((uint32_t)params->num_rows), THREADS, 0, *params);
}

/* A row of weights times x, by a warp; the same in every lane. */
static __device__ __forceinline__ float multiply_row(const __nv_bfloat16 *weights, const __nv_bfloat16 *x, int32_t size)
{
    float sum = 0;
    for (int32_t i = threadIdx.x % 32; i < size; i += 32) {
        sum = __fmaf_rn(__bfloat162float(weights[i]), __bfloat162float(x[i]), sum);
    }
    return fv_warp_sum(sum);
}

static __global__ void __launch_bounds__(THREADS, 1) run_experts(const __grid_constant__ fv_run_experts_params params)
{
    overlap_let_next_start();
    overlap_wait();
    PTX_DYNAMIC_SHARED(16, shared);
    __nv_bfloat16 *activated = (__nv_bfloat16 *)shared; /* [ffn_size] */
    const int64_t at = blockIdx.x;
    const int32_t expert = params.experts[at], warp = threadIdx.x / 32, size = params.size, ffn = params.ffn_size;
    const __nv_bfloat16 *x = (const __nv_bfloat16 *)params.x + at / params.num_used * size;
    const __nv_bfloat16 *gate = (const __nv_bfloat16 *)params.gate_up[expert], *up = gate + (int64_t)ffn * size;
    const __nv_bfloat16 *down = (const __nv_bfloat16 *)params.down[expert];
    for (int32_t i = warp; i < ffn; i += WARPS) {
        const float g = multiply_row(gate + (int64_t)i * size, x, size);
        const float u = multiply_row(up + (int64_t)i * size, x, size);
        if (threadIdx.x % 32 == 0) activated[i] = __float2bfloat16_rn(g / (1.0f + expf(-g)) * u);
    }
    __syncthreads();
    for (int32_t i = warp; i < size; i += WARPS) {
        const float sum = multiply_row(down + (int64_t)i * ffn, activated, ffn);
        if (threadIdx.x % 32 == 0) params.out[at * size + i] = sum;
    }
}

extern "C" fv_status fv_cuda_run_experts(const fv_launch *launch, const fv_run_experts_params *params)
{
    const size_t shared = (size_t)params->ffn_size * sizeof(__nv_bfloat16);
    if (params->ffn_size > FV_CUDA_MAX_EXPERT) {
        return fv_cuda_state_of(launch->device)
            ->host.fail(FV_ERR_UNSUPPORTED, "%s: experts of %d; accepted: up to %d", launch->device->name,
                        params->ffn_size, FV_CUDA_MAX_EXPERT);
    }
    const dim3 grid((uint32_t)params->num_rows * (uint32_t)params->num_used);
    return fv_cuda_launch_overlapped(launch, "run_experts", run_experts, grid, THREADS, shared, *params);
}

static __global__ void __launch_bounds__(THREADS, 1) add_experts(const __grid_constant__ fv_add_experts_params params)
{
    overlap_let_next_start();
    overlap_wait();
    const int64_t row = blockIdx.x; /* of which there may be more than a grid's y holds */
    const int32_t i = (int32_t)(blockIdx.y * THREADS + threadIdx.x);
    if (i >= params.size) return;
    float *to = params.sum + row * params.size + i;
    float sum = params.overwrites ? 0.0f : *to;
    for (int32_t used = 0; used < params.num_used; used++) {
        const int64_t part = row * params.num_used + used;
        sum = __fmaf_rn(params.weights[part], params.parts[part * params.size + i], sum);
    }
    *to = sum;
}

extern "C" fv_status fv_cuda_add_experts(const fv_launch *launch, const fv_add_experts_params *params)
{
    const dim3 grid((uint32_t)params->num_rows, fv_cuda_blocks(params->size, THREADS));
    return fv_cuda_launch_overlapped(launch, "add_experts", add_experts, grid, THREADS, 0, *params);
}
