/* embed and add_norm: a block of threads for each row; activate: a thread for each element.
 *
 * add_norm keeps its row in shared memory between the two norms, so that it reads and writes each array once.
 * Each thread adds up its own elements and the warps' sums are added in their order, so that the bits of a row
 * depend on its size alone. */
#include "kernels/cuda/layers/layers.h"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/overlap.cuh"

#define THREADS 512
#define WARPS (THREADS / 32)
#define MAX_SHARED 49152 /* what a block has without asking */

static __global__ void __launch_bounds__(THREADS, 1) embed(const __grid_constant__ fv_embed_params params)
{
    overlap_let_next_start();
    overlap_wait();
    const int64_t row = blockIdx.x;
    const int32_t token = params.tokens[row];
    const bool is_there = token >= 0 && token < params.num_weights;
    const __nv_bfloat16 *weights = (const __nv_bfloat16 *)params.weights + (int64_t)token * params.size;
    for (int32_t i = threadIdx.x; i < params.size; i += THREADS) {
        params.hidden[row * params.size + i] = is_there ? __bfloat162float(weights[i]) * params.scale : 0.0f;
    }
}

extern "C" fv_status fv_cuda_embed(const fv_launch *launch, const fv_embed_params *params)
{
    return fv_cuda_launch_overlapped(launch, "embed", embed, dim3((uint32_t)params->num_rows), THREADS, 0, *params);
}

/* The same in every thread. */
static __device__ __forceinline__ float sum_over_block(float value, float *sums)
{
    const float warp_sum = fv_warp_sum(value);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = warp_sum;
    __syncthreads();
    float sum = 0;
    for (int32_t i = 0; i < WARPS; i++) sum += sums[i];
    return sum;
}

static __device__ __forceinline__ float added_element(const fv_add_norm_params *params, int64_t at)
{
    if (params->added_dtype == FV_DTYPE_F32) return ((const float *)params->added)[at];
    return __bfloat162float(((const __nv_bfloat16 *)params->added)[at]);
}

/* What is added, before its norm, to `kept`; returns what it is multiplied with. */
static __device__ __forceinline__ float load_added(float *kept, float *sums, const fv_add_norm_params *params,
                                                   int64_t row)
{
    float squares = 0;
    for (int32_t i = threadIdx.x; i < params->size; i += THREADS) {
        const float x = added_element(params, row * params->size + i);
        kept[i] = x;
        squares = __fmaf_rn(x, x, squares);
    }
    if (!params->added_norm) return 1.0f;
    return 1.0f / sqrtf(sum_over_block(squares, sums) / (float)params->size + params->epsilon);
}

static __global__ void __launch_bounds__(THREADS, 1) add_norm(const __grid_constant__ fv_add_norm_params params)
{
    overlap_let_next_start();
    overlap_wait();
    extern __shared__ float kept[]; /* [size]: each thread's elements are its own */
    __shared__ float sums[2][WARPS];
    const int64_t out_row = blockIdx.x, row = params.rows ? params.rows[out_row] : out_row;
    float *hidden = params.hidden + row * params.size;
    const float added_factor = params.added ? load_added(kept, sums[0], &params, row) : 0.0f;
    float squares = 0;
    for (int32_t i = threadIdx.x; i < params.size; i += THREADS) {
        float x = hidden[i];
        if (params.added) x += params.added_norm ? kept[i] * added_factor * params.added_norm[i] : kept[i];
        kept[i] = x;
        if (params.added && !params.rows) hidden[i] = x;
        squares = __fmaf_rn(x, x, squares);
    }
    const float factor = 1.0f / sqrtf(sum_over_block(squares, sums[1]) / (float)params.size + params.epsilon);
    __nv_bfloat16 *normed = (__nv_bfloat16 *)params.normed + out_row * params.size;
    for (int32_t i = threadIdx.x; i < params.size; i += THREADS) {
        const float y = kept[i] * factor * params.weight[i];
        normed[i] = __float2bfloat16_rn(y);
        if (params.normed_f32) params.normed_f32[out_row * params.size + i] = y;
    }
}

extern "C" fv_status fv_cuda_add_norm(const fv_launch *launch, const fv_add_norm_params *params)
{
    const size_t shared = (size_t)params->size * sizeof(float);
    if (shared > MAX_SHARED - 2 * WARPS * sizeof(float)) {
        return fv_cuda_state_of(launch->device)
            ->host.fail(FV_ERR_UNSUPPORTED, "%s: rows of %d elements; accepted: up to %d", launch->device->name,
                        params->size, (int)(MAX_SHARED / sizeof(float)) - 2 * WARPS);
    }
    return fv_cuda_launch_overlapped(launch, "add_norm", add_norm, dim3((uint32_t)params->num_rows), THREADS, shared,
                                     *params);
}

/* (1 + tanh(u)) / 2 = 1 / (1 + e^(-2u)), so one exponential does. */
static __device__ __forceinline__ float gated(float x, bool is_gelu)
{
    const float two_sqrt_2_over_pi = 1.5957691216057308f;
    const float u = is_gelu ? two_sqrt_2_over_pi * (x + 0.044715f * x * x * x) : x;
    return x / (1.0f + expf(-u));
}

static __global__ void __launch_bounds__(THREADS, 1) activate(const __grid_constant__ fv_activate_params params)
{
    overlap_let_next_start();
    overlap_wait();
    const int32_t i = (int32_t)(blockIdx.x * THREADS + threadIdx.x);
    const int64_t row = blockIdx.y;
    if (i >= params.size) return;
    const float *gate = params.gate_up + 2 * row * params.size, *up = gate + params.size;
    const float y = gated(gate[i], params.is_gelu != 0) * up[i];
    ((__nv_bfloat16 *)params.out)[row * params.size + i] = __float2bfloat16_rn(y);
}

extern "C" fv_status fv_cuda_activate(const fv_launch *launch, const fv_activate_params *params)
{
    const dim3 grid(fv_cuda_blocks(params->size, THREADS), (uint32_t)params->num_rows);
    return fv_cuda_launch_overlapped(launch, "activate", activate, grid, THREADS, 0, *params);
}
