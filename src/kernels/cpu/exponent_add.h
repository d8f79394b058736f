/* Multiplication by a power of two as an integer addition: AMLA (arXiv 2509.25224), Lemma 3.1 and appendix A.
 *
 *   F = (-1)^S 2^(E - 127) (1 + M / 2^23)      bits of F, as an integer: S | E | M
 *
 *   bits + k 2^23                  F 2^k                     exact while 0 < E + k < 255
 *   bits + round(1.5 e 2^23)       about F (1 + e)           for a small e: right is e (2^23 + M), and M is
 *                                                            taken at its middle, 2^22; off by e / 2 at most
 *
 * The lemma leaves out what does not stay in range; here it is guarded. */
#ifndef FV_KERNELS_CPU_EXPONENT_ADD_H
#define FV_KERNELS_CPU_EXPONENT_ADD_H

#include "kernels/cpu/simd.h"

#define FV_EXPONENT_ONE 0x00800000      /* 1 in the exponent field; also the smallest normal number */
#define FV_EXPONENT_INFINITY 0x7f800000 /* the bits of infinity */

/* Adds `addend` to the bits of each lane. Signs stay. Below the smallest normal number the result is 0, above
 * the largest finite one it is infinite. 0 and denormal numbers, which have no exponent to add to, give 0;
 * infinity and NaN stay. Any addend. */
FV_ALWAYS_INLINE fv_f32x8 fv_exponent_add(fv_f32x8 value, int32_t addend)
{
    const fv_i32x8 sign = (fv_i32x8)value & INT32_MIN;
    const fv_i32x8 magnitude = (fv_i32x8)value & INT32_MAX;
    const fv_i32x8 added = fv_splat_i32(addend);

    const fv_i32x8 is_small = magnitude < FV_EXPONENT_ONE;
    const fv_i32x8 is_special = magnitude >= FV_EXPONENT_INFINITY;
    const fv_i32x8 is_under = added < FV_EXPONENT_ONE - magnitude;
    const fv_i32x8 is_over = added >= FV_EXPONENT_INFINITY - magnitude;

    fv_i32x8 sum = (fv_i32x8)((fv_u32x8)magnitude + (fv_u32x8)added);
    sum = (is_over & FV_EXPONENT_INFINITY) | (~is_over & sum);
    sum &= ~(is_small | is_under);
    sum = (is_special & magnitude) | (~is_special & sum);
    return (fv_f32x8)(sum | sign);
}

/* The addend that multiplies by 2^n (1 + error), n a whole number. Beyond what a float has exponents for n makes
 * no difference. NaN gives some addend. */
FV_ALWAYS_INLINE fv_i32x8 fv_exponent_addend(fv_f32x8 n, fv_f32x8 error)
{
    const fv_f32x8 power = fv_min(fv_max(n, fv_splat(-255.0f)), fv_splat(255.0f));
    const fv_f32x8 part = fv_min(fv_max(error, fv_splat(-0.5f)), fv_splat(0.5f)) * (1.5f * FV_EXPONENT_ONE);
    const fv_f32x8 nearest = part + fv_select((fv_i32x8)(part < 0.0f), fv_splat(-0.5f), fv_splat(0.5f));
    return __builtin_convertvector(power, fv_i32x8) * FV_EXPONENT_ONE + __builtin_convertvector(nearest, fv_i32x8);
}

#endif
