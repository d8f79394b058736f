/* Rotation of a token's heads by a warp: the code of rope, rope_kv_write and mla_query. One expression rotates in all of
 * them, so that they agree bit for bit. */
#ifndef FV_KERNELS_CUDA_ROPE_TOKEN_CUH
#define FV_KERNELS_CUDA_ROPE_TOKEN_CUH

#include "kernels/cuda/number.cuh"
#include "ops/rope.h"

enum { FV_ROPE_HEADS = 8 /* of a warp at most: it asks for all of them at once */ };

/* (a, b) of a pair by its angle. */
static __device__ __forceinline__ void rotate_pair(float *a, float *b, float c, float s)
{
    const float first = __fmaf_rn(*a, c, -__fmul_rn(*b, s));
    *b = __fmaf_rn(*b, c, __fmul_rn(*a, s));
    *a = first;
}

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
        float a[FV_ROPE_HEADS], b[FV_ROPE_HEADS];
#pragma unroll
        for (int h = 0; h < FV_ROPE_HEADS; h++) {
            if (h >= num) continue;
            a[h] = fv_element_load(row + h * rows->head_stride + low, DTYPE);
            b[h] = fv_element_load(row + h * rows->head_stride + high, DTYPE);
        }
        const int64_t position = fv_rope_position(params, token);
        if (position < 0) return;
        const float c = params->cos[position * params->row_stride + i];
        const float s = params->sin[position * params->row_stride + i];
#pragma unroll
        for (int h = 0; h < FV_ROPE_HEADS; h++) {
            if (h >= num) continue;
            rotate_pair(&a[h], &b[h], c, s);
            fv_element_store(row + h * rows->head_stride + low, a[h], DTYPE);
            fv_element_store(row + h * rows->head_stride + high, b[h], DTYPE);
            if (!to) continue;
            fv_element_store(to + h * copy->head_stride + low, a[h], DTYPE);
            fv_element_store(to + h * copy->head_stride + high, b[h], DTYPE);
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

#endif
