/* embed and add_norm: a block of threads for each row; activate: a thread for each element.
 *
 * add_norm keeps its row in registers, four elements to a chunk, so that it reads and writes each array once and all
 * loads are on their way at once: a decode has a row or two, and then latency is all there is.
 * Each thread adds up its own elements and the warps' sums are added in their order, so that the bits of a row
 * depend on its size alone. */
#include "kernels/cuda/layers/layers.h"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/overlap.cuh"

#define THREADS 512
#define WARPS (THREADS / 32)
#define CHUNK FV_CUDA_ROW_STEP                            /* elements that a thread takes at a time */
#define MAX_CHUNKS (FV_CUDA_MAX_ROW / (CHUNK * THREADS)) /* of a row */

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
#pragma unroll
    for (int32_t i = 0; i < WARPS; i++) sum += sums[i];
    return sum;
}

/* Element at which chunk `chunk` of this thread begins. */
static __device__ __forceinline__ int32_t chunk_at(int32_t chunk)
{
    return (chunk * THREADS + (int32_t)threadIdx.x) * CHUNK;
}

static __device__ __forceinline__ float4 load_added(const fv_add_norm_params *params, int64_t at)
{
    if (params->added_dtype == FV_DTYPE_F32) return *(const float4 *)((const float *)params->added + at);
    const uint2 words = *(const uint2 *)((const __nv_bfloat16 *)params->added + at);
    return make_float4(__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000u),
                       __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xffff0000u));
}

static __device__ __forceinline__ float squares_of(float sum, const float4 &x)
{
    return __fmaf_rn(x.w, x.w, __fmaf_rn(x.z, x.z, __fmaf_rn(x.y, x.y, __fmaf_rn(x.x, x.x, sum))));
}

/* a * factor * weight */
static __device__ __forceinline__ float4 scaled(const float4 &a, float factor, const float4 &weight)
{
    return make_float4(a.x * factor * weight.x, a.y * factor * weight.y, a.z * factor * weight.z,
                       a.w * factor * weight.w);
}

/* What is added, normed where it has a norm of its own. */
static __device__ __forceinline__ void norm_added(float4 (&added)[MAX_CHUNKS], float *sums,
                                                  const fv_add_norm_params *params)
{
    float squares = 0;
#pragma unroll
    for (int32_t i = 0; i < MAX_CHUNKS; i++) {
        if (chunk_at(i) < params->size) squares = squares_of(squares, added[i]);
    }
    const float factor = 1.0f / sqrtf(sum_over_block(squares, sums) / (float)params->size + params->epsilon);
#pragma unroll
    for (int32_t i = 0; i < MAX_CHUNKS; i++) {
        if (chunk_at(i) >= params->size) continue;
        added[i] = scaled(added[i], factor, *(const float4 *)(params->added_norm + chunk_at(i)));
    }
}

static __global__ void __launch_bounds__(THREADS, 1) add_norm(const __grid_constant__ fv_add_norm_params params)
{
    __shared__ float sums[2][WARPS];
    const int64_t out_row = blockIdx.x, size = params.size;
    float4 x[MAX_CHUNKS], added[MAX_CHUNKS], weight[MAX_CHUNKS];
    overlap_let_next_start();
#pragma unroll
    for (int32_t i = 0; i < MAX_CHUNKS; i++) { /* weights do not wait for the kernel before */
        if (chunk_at(i) < size) weight[i] = *(const float4 *)(params.weight + chunk_at(i));
    }
    overlap_wait();
    const int64_t row = params.rows ? params.rows[out_row] : out_row;
    float *hidden = params.hidden + row * size;
#pragma unroll
    for (int32_t i = 0; i < MAX_CHUNKS; i++) {
        if (chunk_at(i) >= size) continue;
        x[i] = *(const float4 *)(hidden + chunk_at(i));
        if (params.added) added[i] = load_added(&params, row * size + chunk_at(i));
    }
    if (params.added && params.added_norm) norm_added(added, sums[0], &params);
    float squares = 0;
#pragma unroll
    for (int32_t i = 0; i < MAX_CHUNKS; i++) {
        if (chunk_at(i) >= size) continue;
        if (params.added) {
            x[i] = make_float4(x[i].x + added[i].x, x[i].y + added[i].y, x[i].z + added[i].z, x[i].w + added[i].w);
            if (!params.rows) *(float4 *)(hidden + chunk_at(i)) = x[i];
        }
        squares = squares_of(squares, x[i]);
    }
    const float factor = 1.0f / sqrtf(sum_over_block(squares, sums[1]) / (float)size + params.epsilon);
#pragma unroll
    for (int32_t i = 0; i < MAX_CHUNKS; i++) {
        if (chunk_at(i) >= size) continue;
        const float4 y = scaled(x[i], factor, weight[i]);
        const uint2 words = {fv_narrow_pair<__nv_bfloat16>(y.x, y.y), fv_narrow_pair<__nv_bfloat16>(y.z, y.w)};
        *(uint2 *)((__nv_bfloat16 *)params.normed + out_row * size + chunk_at(i)) = words;
        if (params.normed_f32) *(float4 *)(params.normed_f32 + out_row * size + chunk_at(i)) = y;
    }
}

extern "C" fv_status fv_cuda_add_norm(const fv_launch *launch, const fv_add_norm_params *params)
{
    if (params->size % FV_CUDA_ROW_STEP != 0 || params->size > FV_CUDA_MAX_ROW) {
        return fv_cuda_state_of(launch->device)
            ->host.fail(FV_ERR_UNSUPPORTED, "%s: rows of %d elements; accepted: multiples of %d up to %d",
                        launch->device->name, params->size, FV_CUDA_ROW_STEP, FV_CUDA_MAX_ROW);
    }
    return fv_cuda_launch_overlapped(launch, "add_norm", add_norm, dim3((uint32_t)params->num_rows), THREADS, 0,
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
    const int32_t i = (int32_t)(blockIdx.y * THREADS + threadIdx.x);
    const int64_t row = blockIdx.x; /* of which there may be more than a grid's y holds */
    if (i >= params.size) return;
    const float *gate = params.gate_up + 2 * row * params.size, *up = gate + params.size;
    const float y = gated(gate[i], params.is_gelu != 0) * up[i];
    ((__nv_bfloat16 *)params.out)[row * params.size + i] = __float2bfloat16_rn(y);
}

extern "C" fv_status fv_cuda_activate(const fv_launch *launch, const fv_activate_params *params)
{
    const dim3 grid((uint32_t)params->num_rows, fv_cuda_blocks(params->size, THREADS));
    return fv_cuda_launch_overlapped(launch, "activate", activate, grid, THREADS, 0, *params);
}
