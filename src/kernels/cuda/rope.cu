/* rope: a warp for some heads of q or k of a token, in place; rope_kv_write: the same for q, which may be written to a
 * second place, too, and a warp for each head of k, which goes on to write its rotated row, and of v. One expression
 * rotates in both, so that they agree bit for bit. */
#include "kernels/cuda/copy_bytes.cuh"
#include "kernels/cuda/kv_write_token.cuh"
#include "kernels/cuda/overlap.cuh"
#include "ops/rope.h"

#define WARPS 4
#define HEADS 8 /* of a warp at most: it asks for all of them at once */

/* Heads first .. first + num - 1 of a token; what they become is also written to `copy`, if that has data. The heads
 * are asked for before the position that says how they are rotated. */
template <fv_dtype DTYPE>
static __device__ __forceinline__ void rotate_as(const fv_rope_rows *rows, const fv_rope_rows *copy,
                                                 const fv_rope_params *params, int32_t token, int32_t first,
                                                 int32_t num)
{
    const int32_t half = params->rope_dim / 2, bytes = fv_element_bytes(DTYPE);
    const bool interleaved = params->style == FV_ROPE_INTERLEAVED;
    char *row = (char *)rows->data + token * rows->token_stride + first * rows->head_stride;
    char *to = copy->data ? (char *)copy->data + token * copy->token_stride + first * copy->head_stride : NULL;
    for (int32_t i = threadIdx.x % 32; i < half; i += 32) {
        const int32_t low = (interleaved ? 2 * i : i) * bytes, high = (interleaved ? 2 * i + 1 : i + half) * bytes;
        float a[HEADS], b[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            if (h >= num) continue;
            a[h] = fv_element_load(row + h * rows->head_stride + low, DTYPE);
            b[h] = fv_element_load(row + h * rows->head_stride + high, DTYPE);
        }
        const int64_t position = fv_rope_position(params, token);
        if (position < 0) return;
        const float c = params->cos[position * params->row_stride + i];
        const float s = params->sin[position * params->row_stride + i];
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            if (h >= num) continue;
            const float first_of_pair = __fmaf_rn(a[h], c, -__fmul_rn(b[h], s));
            const float second_of_pair = __fmaf_rn(b[h], c, __fmul_rn(a[h], s));
            fv_element_store(row + h * rows->head_stride + low, first_of_pair, DTYPE);
            fv_element_store(row + h * rows->head_stride + high, second_of_pair, DTYPE);
            if (!to) continue;
            fv_element_store(to + h * copy->head_stride + low, first_of_pair, DTYPE);
            fv_element_store(to + h * copy->head_stride + high, second_of_pair, DTYPE);
        }
    }
}

static __device__ __forceinline__ void rotate_heads(const fv_rope_rows *rows, const fv_rope_rows *copy,
                                                    const fv_rope_params *params, int32_t token, int32_t first,
                                                    int32_t num)
{
    if (!rows->data) return;
    switch (params->dtype) {
    case FV_DTYPE_BF16: rotate_as<FV_DTYPE_BF16>(rows, copy, params, token, first, num); return;
    case FV_DTYPE_F16: rotate_as<FV_DTYPE_F16>(rows, copy, params, token, first, num); return;
    default: rotate_as<FV_DTYPE_F32>(rows, copy, params, token, first, num); return;
    }
}

/* Warps of a token for the heads of q, or of k; none where those are absent. */
static __host__ __device__ int32_t warps_of(const fv_rope_rows *rows)
{
    return rows->data ? (rows->num_heads + HEADS - 1) / HEADS : 0;
}

/* The heads of a token's warp number `warp`. */
static __device__ __forceinline__ void rotate_of_warp(const fv_rope_rows *rows, const fv_rope_rows *copy,
                                                      const fv_rope_params *params, int32_t token, int32_t warp)
{
    rotate_heads(rows, copy, params, token, warp * HEADS, fv_min_i32(HEADS, rows->num_heads - warp * HEADS));
}

static __global__ void __launch_bounds__(WARPS * 32, 5) rope(const __grid_constant__ fv_rope_params params)
{
    overlap_begin();
    const fv_rope_rows no_copy = {};
    const int32_t q_warps = warps_of(&params.q), warps = q_warps + warps_of(&params.k);
    const int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int32_t token = (int32_t)(at / warps), warp = (int32_t)(at % warps);
    if (token >= fv_rope_tokens(&params)) return;
    const bool is_query = warp < q_warps;
    rotate_of_warp(is_query ? &params.q : &params.k, &no_copy, &params, token, is_query ? warp : warp - q_warps);
}

extern "C" fv_status fv_cuda_rope(const fv_launch *launch, const fv_rope_params *params)
{
    const int64_t num_warps = (int64_t)params->num_tokens * (warps_of(&params->q) + warps_of(&params->k));
    return fv_cuda_launch_overlapped(launch, "rope", rope, dim3(fv_cuda_blocks(num_warps, WARPS)), WARPS * 32, 0,
                                     *params);
}

/* A token outside the tables is not rotated: its heads of q go to their second place as they are. */
static __device__ __forceinline__ void copy_unrotated(const fv_rope_kv_write_params *params, int32_t token,
                                                      int32_t warp)
{
    const fv_rope_rows *q = &params->rope.q, *copy = &params->q_copy;
    if (!copy->data || fv_rope_position(&params->rope, token) >= 0) return;
    for (int32_t head = warp * HEADS; head < fv_min_i32(warp * HEADS + HEADS, q->num_heads); head++) {
        copy_bytes((char *)copy->data + token * copy->token_stride + head * copy->head_stride,
                   (const char *)q->data + token * q->token_stride + head * q->head_stride,
                   (int64_t)params->rope.rope_dim * fv_element_bytes(params->rope.dtype));
    }
}

/* Warps of a token: those of the heads of q, and for each KV head one for K and one for V. */
static __global__ void __launch_bounds__(WARPS * 32, 5)
    rope_kv_write(const __grid_constant__ fv_rope_kv_write_params params)
{
    overlap_begin();
    const fv_rope_rows no_copy = {};
    const int32_t q_warps = warps_of(&params.rope.q);
    const int32_t warps = q_warps + 2 * params.write.cache.num_kv_heads;
    const int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int32_t token = (int32_t)(at / warps), warp = (int32_t)(at % warps);
    if (token >= fv_rope_tokens(&params.rope)) return;
    if (warp < q_warps) {
        rotate_of_warp(&params.rope.q, &params.q_copy, &params.rope, token, warp);
        copy_unrotated(&params, token, warp);
        return;
    }
    const int32_t head = (warp - q_warps) / 2;
    const bool is_value = (warp - q_warps) % 2 != 0;
    if (!is_value) {
        rotate_heads(&params.rope.k, &no_copy, &params.rope, token, head, 1);
        __syncwarp(); /* lanes read what others of the warp rotated */
    }
    int64_t block, slot;
    if (!find_slot(&block, &slot, &params.write, token)) return;
    write_head(&params.write, token, head, is_value, block, slot);
}

extern "C" fv_status fv_cuda_rope_kv_write(const fv_launch *launch, const fv_rope_kv_write_params *params)
{
    const int32_t warps_of_token = warps_of(&params->rope.q) + 2 * params->write.cache.num_kv_heads;
    const int64_t num_warps = (int64_t)params->rope.num_tokens * warps_of_token;
    return fv_cuda_launch_overlapped(launch, "rope_kv_write", rope_kv_write, dim3(fv_cuda_blocks(num_warps, WARPS)),
                                     WARPS * 32, 0, *params);
}
