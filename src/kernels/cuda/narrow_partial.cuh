/* Partial results in 16 bits: of each row [v_head_size] multiples of a scale of each half of the row, and then the
 * scales, maximum and sum (narrow_tail). One row follows the other, so that rows of one token are one run of bytes. An
 * element is within half a step of what it was: 2^-16 of the largest one of its half. */
#ifndef FV_KERNELS_CUDA_NARROW_PARTIAL_CUH
#define FV_KERNELS_CUDA_NARROW_PARTIAL_CUH

#include "kernels/cuda/number.cuh"
#include "ops/attend_paged.h"

#define FV_NARROW_MOST 32767.0f   /* of a multiple */
#define FV_NARROW_LEAST 0x1p-100f /* of the largest element of a half row, for scales to be normal numbers */

/* Are they written by a kernel that can? An output of fp32 would show it. */
static __host__ __device__ __forceinline__ bool narrows_partials(const fv_attend_params *params)
{
    return params->out_dtype != FV_DTYPE_F32;
}

/* The end of a row. */
typedef struct alignas(16) narrow_tail {
    float scale[2]; /* of its halves */
    float max, sum; /* as in partial_max and partial_sum */
} narrow_tail;

static __device__ __forceinline__ int32_t narrow_row_bytes(int32_t size)
{
    return size * (int32_t)sizeof(int16_t) + (int32_t)sizeof(narrow_tail);
}

/* Where row `row` begins. */
static __device__ __forceinline__ char *narrow_row(const float *partial_out, int64_t row, int32_t size)
{
    return (char *)partial_out + row * narrow_row_bytes(size);
}

/* The scale of a half of a row whose largest element is `largest`, where all have to be multiplied by `factor`. NaN
 * where one is NaN or near infinity, for multiples of it mean nothing. Factor 0, of a row without a key: 0, whatever
 * the elements are. */
static __device__ __forceinline__ float narrow_scale_of(float largest, float factor)
{
    return factor == 0 ? 0.0f : largest * (1 / FV_NARROW_MOST) * factor + (largest * 8 - largest * 8);
}

/* What elements are multiplied by to be multiples of that scale. */
static __device__ __forceinline__ float narrow_inverse_of(float largest) { return __fdividef(FV_NARROW_MOST, largest); }

/* A number of this size has no bits for less than 1: a multiple that is added to it is its low 16 bits, less 2^15. */
#define FV_NARROW_BASE (0x1p23f + 0x1p15f)

/* Two elements as multiples, to nearest. */
static __device__ __forceinline__ uint32_t narrow_pair(float low, float high, float inverse)
{
    return __byte_perm(__float_as_uint(fmaf(low, inverse, FV_NARROW_BASE)),
                       __float_as_uint(fmaf(high, inverse, FV_NARROW_BASE)), 0x5410);
}

/* The multiples of two elements. */
static __device__ __forceinline__ float2 narrow_multiples(uint32_t stored)
{
    const uint32_t high_bits = 0x4b00; /* of FV_NARROW_BASE */
    return make_float2(__uint_as_float(__byte_perm(stored, high_bits, 0x5410)) - FV_NARROW_BASE,
                       __uint_as_float(__byte_perm(stored, high_bits, 0x5432)) - FV_NARROW_BASE);
}

#endif
