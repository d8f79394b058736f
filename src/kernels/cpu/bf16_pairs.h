/* Products of pairs of bf16, AVX-512's VDPBF16PS: each of 16 fp32 lanes adds two products of bf16.
 *
 * Natively it is one instruction. Compiled with FV_PAIRS_EMULATED it is plain C with the arithmetic of the instruction
 * (Intel's manual): the product of the odd elements is added first, then that of the even ones, each sum is rounded to
 * nearest even, denormal numbers count as 0 and become 0, MXCSR is not asked. Only a product out of fp32's range may
 * differ. */
#ifndef FV_KERNELS_CPU_BF16_PAIRS_H
#define FV_KERNELS_CPU_BF16_PAIRS_H

#include "kernels/cpu/lanes.h"

#if !defined(FV_PAIRS_EMULATED)

FV_ALWAYS_INLINE fv_lanes fv_pairs_dot(fv_lanes sum, fv_words a, fv_words b)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

#else

/* Denormal numbers become 0. */
FV_ALWAYS_INLINE fv_lanes fv_pairs_flush(fv_lanes value)
{
    const fv_lane_bits bits = (fv_lane_bits)value;
    return (fv_lanes)(bits & (fv_lane_bits)((bits & 0x7f800000u) != 0));
}

/* Out of line: a kernel has hundreds. */
static __attribute__((noinline, unused)) fv_lanes fv_pairs_dot(fv_lanes sum, fv_words a, fv_words b)
{
    const fv_lane_bits x = (fv_lane_bits)a, y = (fv_lane_bits)b;
    const fv_lanes odd = fv_pairs_flush((fv_lanes)(x & 0xffff0000u)) * fv_pairs_flush((fv_lanes)(y & 0xffff0000u));
    const fv_lanes even = fv_pairs_flush((fv_lanes)(x << 16)) * fv_pairs_flush((fv_lanes)(y << 16));
    return fv_pairs_flush(fv_pairs_flush(fv_pairs_flush(sum) + odd) + even);
}

#endif

/* Pairs of the elements of two rows, in columns 8 i + (0 .. 3) and 8 i + (4 .. 7) of 32: a shuffle within 16 bytes. */
FV_ALWAYS_INLINE fv_words fv_pairs_low(fv_words a, fv_words b)
{
    return __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17, 49, 18,
                                   50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59);
}

FV_ALWAYS_INLINE fv_words fv_pairs_high(fv_words a, fv_words b)
{
    return __builtin_shufflevector(a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52, 21, 53, 22,
                                   54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63);
}

/* Pairs of the lanes of two vectors, rounded to nearest even. */
FV_ALWAYS_INLINE fv_words fv_pairs_of(fv_lanes even, fv_lanes odd)
{
    const fv_words words = fv_words_of(even, odd);
    return __builtin_shufflevector(words, words, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25,
                                   10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

/* The bits of a pair's numbers that are not 0. */
FV_ALWAYS_INLINE uint32_t fv_pairs_seen(uint32_t pair)
{
    return ((pair & 0x7fffu) != 0 ? 0xffffu : 0) | ((pair & 0x7fff0000u) != 0 ? 0xffff0000u : 0);
}

/* The same of a pair in each lane. */
FV_ALWAYS_INLINE fv_words fv_pairs_seen_each(fv_words pairs)
{
    const fv_lane_bits bits = (fv_lane_bits)pairs;
    return (fv_words)(((fv_lane_bits)((bits & 0x7fffu) != 0) & 0xffffu) |
                      ((fv_lane_bits)((bits & 0x7fff0000u) != 0) & 0xffff0000u));
}

/* The same pair in all lanes. */
FV_ALWAYS_INLINE fv_words fv_pairs_splat(uint32_t pair) { return (fv_words)((fv_lane_bits){0} + pair); }

#endif
