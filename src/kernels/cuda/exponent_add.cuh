/* Multiplication by a power of two as an integer addition, and the scale of a row that lives by it: AMLA
 * (arXiv 2509.25224, Lemma 3.1 and appendix A). The same numbers as kernels/cpu/exponent_add.h and amla.c.
 *
 *   m exact, in base 2     n = -round(m), r = 2^(m + n), s = r as the queries' dtype holds it, gamma = r / s
 *   P^ = s P, rounded      O's bits += round((n - n_before + 1.5 (gamma_before / gamma - 1)) 2^23)
 *   the end                O / (s l)
 */
#ifndef FV_KERNELS_CUDA_EXPONENT_ADD_CUH
#define FV_KERNELS_CUDA_EXPONENT_ADD_CUH

#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"
#include "ops/attend_paged.h"

#define FV_EXPONENT_ONE 0x00800000      /* 1 in the exponent field; also the smallest normal number */
#define FV_EXPONENT_INFINITY 0x7f800000 /* the bits of infinity */

/* Adds to the bits. The sign stays. Below the smallest normal number the result is 0, above the largest finite one
 * infinite; 0 and denormal numbers give 0, infinity and NaN stay. */
static __device__ __forceinline__ float exponent_add(float value, int32_t addend)
{
    const int32_t bits = __float_as_int(value), magnitude = bits & 0x7fffffff;
    int32_t sum = magnitude + addend;
    sum = addend >= FV_EXPONENT_INFINITY - magnitude ? FV_EXPONENT_INFINITY : sum;
    sum = magnitude < FV_EXPONENT_ONE || addend < FV_EXPONENT_ONE - magnitude ? 0 : sum;
    sum = magnitude >= FV_EXPONENT_INFINITY ? magnitude : sum;
    return __int_as_float(sum | (bits & (int32_t)0x80000000));
}

/* The addend that multiplies by 2^n (1 + error), n a whole number. */
static __device__ __forceinline__ int32_t exponent_addend(float n, float error)
{
    const float power = fminf(fmaxf(n, -255.0f), 255.0f);
    const float part = fminf(fmaxf(error, -0.5f), 0.5f) * (1.5f * FV_EXPONENT_ONE);
    return (int32_t)power * FV_EXPONENT_ONE + __float2int_rn(part);
}

/* What the scale of a row's output hangs on; n is a float, for a score may exceed any integer. */
typedef struct amla_scale {
    float power; /* n */
    float scale; /* s */
    float gamma;
} amla_scale;

static __device__ __forceinline__ amla_scale amla_scale_at_first(void)
{
    const amla_scale scale = {0, 1, 1};
    return scale;
}

/* s as the queries' dtype holds it; fp32 is not rounded. */
static __device__ __forceinline__ float amla_round(float value, fv_dtype dtype)
{
    if (dtype == FV_DTYPE_BF16) return __bfloat162float(__float2bfloat16_rn(value));
    return dtype == FV_DTYPE_F16 ? __half2float(__float2half_rn(value)) : value;
}

/* The scale for a row's new maximum, and what has to be added to the bits of its output: 0 where the maximum stayed, or
 * where the row had no key before. */
static __device__ __forceinline__ int32_t amla_move_scale(amla_scale *row, float max, float max_before, fv_dtype dtype,
                                                          fv_rescaling rescaling)
{
    if (max == max_before || max == -INFINITY) return 0;
    const float n = -rintf(max), r = ptx_ex2(max + n);
    const float s = rescaling == FV_RESCALING_ADD ? amla_round(r, dtype) : r;
    const float gamma = r / s;
    const int32_t addend = exponent_addend(n - row->power, row->gamma / gamma - 1.0f);
    row->power = n;
    row->scale = s;
    row->gamma = gamma;
    return max_before == -INFINITY ? 0 : addend;
}

#endif
