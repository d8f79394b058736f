/* Vectors of 64 bytes: AVX-512 where it is compiled for, else plain C that gives the same but for the last bits of
 * the exponential. For the AMX kernels they are what stands between two products: a row of a C tile is a vector of 16
 * floats, a row of an A or B tile one of 32 bf16. */
#ifndef FV_KERNELS_CPU_LANES_H
#define FV_KERNELS_CPU_LANES_H

#include <math.h>

#include "kernels/cpu/exponent_add.h"
#include "kernels/cpu/simd.h"

typedef float fv_lanes __attribute__((vector_size(64)));
typedef int32_t fv_lane_ints __attribute__((vector_size(64)));
typedef uint32_t fv_lane_bits __attribute__((vector_size(64)));
typedef uint16_t fv_words __attribute__((vector_size(64))); /* of 16 bits: bf16 */
typedef uint16_t fv_word_half __attribute__((vector_size(32)));

FV_ALWAYS_INLINE fv_lanes fv_lanes_load(const void *from)
{
    fv_lanes value;
    memcpy(&value, from, sizeof(value));
    return value;
}

FV_ALWAYS_INLINE void fv_lanes_store(void *to, fv_lanes value) { memcpy(to, &value, sizeof(value)); }

FV_ALWAYS_INLINE fv_lane_ints fv_lane_ints_load(const void *from)
{
    fv_lane_ints value;
    memcpy(&value, from, sizeof(value));
    return value;
}

FV_ALWAYS_INLINE fv_words fv_words_load(const void *from)
{
    fv_words words;
    memcpy(&words, from, sizeof(words));
    return words;
}

/* The first `num` words, zeros behind them; all from 32 on. */
FV_ALWAYS_INLINE fv_words fv_words_load_some(const void *from, int32_t num)
{
#if defined(__AVX512BW__)
    const __mmask32 mask = num < 32 ? (1u << num) - 1 : ~0u;
    return (fv_words)_mm512_maskz_loadu_epi16(mask, from);
#else
    fv_words words = {0};
    memcpy(&words, from, (size_t)(num < 32 ? num : 32) * sizeof(uint16_t));
    return words;
#endif
}

FV_ALWAYS_INLINE void fv_words_store(void *to, fv_words words) { memcpy(to, &words, sizeof(words)); }

FV_ALWAYS_INLINE fv_lanes fv_lanes_splat(float value) { return value - (fv_lanes){0}; }

/* A vector that is to stay in its register: the compiler would make a constant again and again. */
#if defined(__AVX512F__)
#define FV_LANES_KEEP(vector) __asm__("" : "+v"(vector))
#else
#define FV_LANES_KEEP(vector) ((void)0)
#endif

/* a where the mask is all ones, b where it is 0. */
FV_ALWAYS_INLINE fv_lanes fv_lanes_select(fv_lane_ints mask, fv_lanes a, fv_lanes b)
{
    return (fv_lanes)((mask & (fv_lane_ints)a) | (~mask & (fv_lane_ints)b));
}

/* a > b ? a : b. */
FV_ALWAYS_INLINE fv_lanes fv_lanes_max(fv_lanes a, fv_lanes b)
{
#if defined(__AVX512F__)
    return (fv_lanes)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return fv_lanes_select(a > b, a, b);
#endif
}

/* a < b ? a : b. */
FV_ALWAYS_INLINE fv_lanes fv_lanes_min(fv_lanes a, fv_lanes b)
{
#if defined(__AVX512F__)
    return (fv_lanes)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return fv_lanes_select(a < b, a, b);
#endif
}

FV_ALWAYS_INLINE fv_lanes fv_lanes_sqrt(fv_lanes x)
{
#if defined(__AVX512F__)
    return (fv_lanes)_mm512_sqrt_ps((__m512)x);
#else
    for (int32_t i = 0; i < 16; i++) x[i] = sqrtf(x[i]);
    return x;
#endif
}

/* 1: every lane is below `limit`, and a number. */
FV_ALWAYS_INLINE int32_t fv_lanes_all_below(fv_lanes value, float limit)
{
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)value, _mm512_set1_ps(limit), _CMP_LT_OQ) == 0xffff;
#else
    int32_t all = 1;
    for (int32_t i = 0; i < 16; i++) all &= value[i] < limit;
    return all;
#endif
}

/* fv_exp2_each of sixteen lanes, and its bits. */
FV_ALWAYS_INLINE void fv_lanes_exp2_each(fv_lanes *x, const int32_t num)
{
#if defined(__AVX512F__)
    fv_lanes n[4], f[4], p[4];
    FV_UNROLL
    for (int32_t i = 0; i < num; i++) {
#if defined(__AVX512DQ__) /* one operation on Intel's cores, where a rounding is two */
        f[i] = (fv_lanes)_mm512_reduce_ps((__m512)x[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        n[i] = x[i] - f[i];
#else
        n[i] = (fv_lanes)_mm512_roundscale_ps((__m512)x[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        f[i] = x[i] - n[i];
#endif
        p[i] = fv_lanes_splat(fv_exp2_terms[0]);
    }
    FV_UNROLL
    for (int32_t j = 1; j < FV_EXP2_TERMS; j++) {
        FV_UNROLL
        for (int32_t i = 0; i < num; i++) p[i] = p[i] * f[i] + fv_exp2_terms[j]; /* one rounding or two, as there */
    }
    FV_UNROLL
    for (int32_t i = 0; i < num; i++) {
        const __mmask16 is_seen = _mm512_cmp_ps_mask((__m512)x[i], _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
        x[i] = (fv_lanes)_mm512_maskz_scalef_ps(is_seen, (__m512)p[i], (__m512)n[i]);
    }
#else
    for (int32_t i = 0; i < num; i++) {
        fv_f32x8 halves[2];
        memcpy(halves, &x[i], sizeof(halves));
        fv_exp2_each(halves, 2);
        memcpy(&x[i], halves, sizeof(halves));
    }
#endif
}

/* 2^x of up to four vectors, in turns: a core's scheduler holds some hundred instructions, and one exponential after the
 * other leaves it waiting for each. Within 3 units in the last place; 0 for -inf, infinity from 128 on, NaN for NaN.
 * x = n + f with n = floor(x): a minimax polynomial in f (relative error 8.3e-8) with the constant 1, times 2^n. */
FV_ALWAYS_INLINE void fv_lanes_exp2_some(fv_lanes *x, const int32_t num)
{
    static const float terms[6] = {1.86713007e-3f, 9.01703032e-3f, 5.57999131e-2f,
                                   2.40164450e-1f, 6.93151312e-1f, 1.0f};
    fv_lanes f[4], p[4];
    FV_UNROLL
    for (int32_t i = 0; i < num; i++) {
#if defined(__AVX512DQ__)
        f[i] = (fv_lanes)_mm512_reduce_ps((__m512)x[i], 0x09); /* x - floor(x) */
#else
        const fv_lanes capped = fv_lanes_select(x[i] > 128.0f, fv_lanes_splat(128.0f), x[i]);
        const fv_lanes clamped = fv_lanes_select(x[i] < -200.0f, fv_lanes_splat(-200.0f), capped);
        const fv_lanes nearer = __builtin_convertvector(__builtin_convertvector(clamped, fv_lane_ints), fv_lanes);
        f[i] = clamped - (nearer + (fv_lanes)((fv_lane_ints)fv_lanes_splat(-1.0f) & (fv_lane_ints)(nearer > clamped)));
#endif
        p[i] = fv_lanes_splat(terms[0]);
    }
    FV_UNROLL
    for (int32_t j = 1; j < 6; j++) {
        FV_UNROLL
        for (int32_t i = 0; i < num; i++) p[i] = p[i] * f[i] + terms[j];
    }
    FV_UNROLL
    for (int32_t i = 0; i < num; i++) {
#if defined(__AVX512F__)
        x[i] = (fv_lanes)_mm512_scalef_ps((__m512)p[i], (__m512)x[i]);
#else
        const fv_lanes capped = fv_lanes_select(x[i] > 128.0f, fv_lanes_splat(128.0f), x[i]);
        const fv_lanes n = fv_lanes_select(x[i] < -200.0f, fv_lanes_splat(-200.0f), capped) - f[i];
        const fv_lane_bits power = (fv_lane_bits)(__builtin_convertvector(n, fv_lane_ints) + 127) << 23;
        x[i] = fv_lanes_select(x[i] < -126.0f, fv_lanes_splat(0.0f), p[i] * (fv_lanes)power);
#endif
    }
}

FV_ALWAYS_INLINE fv_lanes fv_lanes_exp2(fv_lanes x)
{
    fv_lanes_exp2_some(&x, 1);
    return x;
}

/* 1 / x, where x lies between 1 and 2^60; relative error below 2e-7. */
FV_ALWAYS_INLINE fv_lanes fv_lanes_reciprocal(fv_lanes x)
{
#if defined(__AVX512F__) /* a division takes as long as some 16 multiplications */
    const fv_lanes guess = (fv_lanes)_mm512_rcp14_ps((__m512)x);
    return guess + guess * (1.0f - x * guess);
#else
    return 1.0f / x;
#endif
}

/* tanh of up to four vectors, in turns as their exponentials, for any x: NaN for NaN; absolute error below 3e-7, 2e-7 where
 * multiply-adds round once. (fv_tanh, simd.h, has a relative one, for a third more.) */
FV_ALWAYS_INLINE void fv_lanes_tanh_some(fv_lanes *x, const int32_t num)
{
    FV_UNROLL
    for (int32_t i = 0; i < num; i++) {
        const fv_lanes twice = x[i] * (2.0f * FV_LOG2E);
#if defined(__AVX512F__)
        x[i] = (fv_lanes)_mm512_min_ps(_mm512_set1_ps(20.0f * FV_LOG2E), (__m512)twice);
#else
        x[i] = fv_lanes_select(twice > 20.0f * FV_LOG2E, fv_lanes_splat(20.0f * FV_LOG2E), twice);
#endif
    }
    fv_lanes_exp2_some(x, num);
    FV_UNROLL
    for (int32_t i = 0; i < num; i++) x[i] = 1.0f - 2.0f * fv_lanes_reciprocal(x[i] + 1.0f);
}

FV_ALWAYS_INLINE fv_lanes fv_lanes_tanh(fv_lanes x)
{
    fv_lanes_tanh_some(&x, 1);
    return x;
}

/* fv_exponent_add (exponent_add.h) of sixteen. */
FV_ALWAYS_INLINE fv_lanes fv_lanes_exponent_add(fv_lanes value, int32_t addend)
{
    const fv_lane_ints magnitude = (fv_lane_ints)value & INT32_MAX;
    const fv_lane_ints sum = (fv_lane_ints)((fv_lane_bits)magnitude + (uint32_t)addend);
    const fv_lane_ints is_special = magnitude >= FV_EXPONENT_INFINITY;
    fv_lane_ints kept;
    if (addend < 0) {
        kept = sum & (sum >= FV_EXPONENT_ONE); /* 0 and denormal numbers fall below it too */
    } else {
        const fv_lane_ints is_over = (fv_lane_bits)sum >= FV_EXPONENT_INFINITY;
        kept = ((is_over & FV_EXPONENT_INFINITY) | (~is_over & sum)) & (magnitude >= FV_EXPONENT_ONE);
    }
    kept = (is_special & magnitude) | (~is_special & kept);
    return (fv_lanes)(kept | ((fv_lane_ints)value & INT32_MIN));
}

/* --- bf16 ---------------------------------------------------------------------------------------------------- */

/* Words 0 to 15: `low` rounded to nearest even; 16 to 31: `high`. */
FV_ALWAYS_INLINE fv_words fv_words_of(fv_lanes low, fv_lanes high)
{
#if defined(__AVX512BF16__)
    return (fv_words)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
    fv_words words = {0};
    for (int32_t i = 0; i < 16; i++) {
        words[i] = fv_bf16_of_f32(low[i]);
        words[16 + i] = fv_bf16_of_f32(high[i]);
    }
    return words;
#endif
}

/* The bits of numbers as bf16, half a unit rounded away from 0; not for denormal numbers. */
FV_ALWAYS_INLINE fv_lane_bits fv_lanes_rounded(fv_lanes value) { return ((fv_lane_bits)value + 0x8000u) >> 16; }

/* The numbers that these are. */
FV_ALWAYS_INLINE fv_lanes fv_lanes_as_bf16(fv_lanes value) { return (fv_lanes)(fv_lanes_rounded(value) << 16); }

/* Two words for each number: `high` is near to it, what it is less to `low` is 8 bits more of it. Infinities and NaN may come
 * out as any words whose sum is no number. */
typedef struct fv_word_pieces {
    fv_words high, low;
} fv_word_pieces;

/* Words 0 to 15 of both are of `low`. */
FV_ALWAYS_INLINE fv_word_pieces fv_word_pieces_of(fv_lanes low, fv_lanes high)
{
    const fv_lane_bits low_bits = (fv_lane_bits)low + 0x8000u, high_bits = (fv_lane_bits)high + 0x8000u;
    const fv_lanes low_left = low - (fv_lanes)(low_bits & 0xffff0000u);
    const fv_lanes high_left = high - (fv_lanes)(high_bits & 0xffff0000u);
    fv_word_pieces pieces = {.low = fv_words_of(low_left, high_left)};
#if defined(__AVX512BW__)
    const fv_words odd = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                          33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    pieces.high = (fv_words)_mm512_permutex2var_epi16((__m512i)low_bits, (__m512i)odd, (__m512i)high_bits);
#else
    for (int32_t i = 0; i < 16; i++) {
        pieces.high[i] = (uint16_t)(low_bits[i] >> 16);
        pieces.high[16 + i] = (uint16_t)(high_bits[i] >> 16);
    }
#endif
    return pieces;
}

/* The same in turn: words 2 i are of low[i], words 2 i + 1 of high[i]. None of these instructions is a shuffle, for which a core
 * has one unit. */
FV_ALWAYS_INLINE fv_word_pieces fv_word_pieces_in_turn(fv_lanes low, fv_lanes high)
{
    const fv_lane_bits low_bits = (fv_lane_bits)low + 0x8000u;
    const fv_lane_bits high_bits = ((fv_lane_bits)high + 0x8000u) & 0xffff0000u;
    const fv_lanes low_left = low - (fv_lanes)(low_bits & 0xffff0000u), high_left = high - (fv_lanes)high_bits;
    return (fv_word_pieces){
        .high = (fv_words)(low_bits >> 16 | high_bits),
        .low = (fv_words)(fv_lanes_rounded(low_left) | (((fv_lane_bits)high_left + 0x8000u) & 0xffff0000u)),
    };
}

/* Words in order to those in turn. */
static inline void fv_words_take_turns(char *at)
{
    uint16_t words[32], turns[32];
    memcpy(words, at, sizeof(words));
    for (int32_t i = 0; i < 16; i++) {
        turns[2 * i] = words[i];
        turns[2 * i + 1] = words[16 + i];
    }
    memcpy(at, turns, sizeof(turns));
}

/* 32 fp16, each of which is the sum of its pieces. */
FV_ALWAYS_INLINE fv_word_pieces fv_word_pieces_of_f16(fv_words halves)
{
#if defined(__AVX512F__)
    const __m256i low = _mm512_castsi512_si256((__m512i)halves);
    const __m256i high = _mm512_extracti64x4_epi64((__m512i)halves, 1);
    return fv_word_pieces_of((fv_lanes)_mm512_cvtph_ps(low), (fv_lanes)_mm512_cvtph_ps(high));
#else
    fv_lanes wide[2];
    for (int32_t i = 0; i < 32; i++) wide[i / 16][i % 16] = fv_f32_of_f16(halves[i]);
    return fv_word_pieces_of(wide[0], wide[1]);
#endif
}

/* Bounded to 16 bits without a sign, in the order in which 32 bits are packed to 16: words 8 i to 8 i + 3 are low[4 i] to
 * low[4 i + 3], the next four are of `high`. */
FV_ALWAYS_INLINE fv_words fv_words_packed(fv_lane_bits low, fv_lane_bits high)
{
#if defined(__AVX512BW__)
    return (fv_words)_mm512_packus_epi32((__m512i)low, (__m512i)high);
#else
    fv_words words = {0};
    for (int32_t i = 0; i < 16; i++) {
        const int32_t at = i / 4 * 8 + i % 4, ends[2] = {(int32_t)low[i], (int32_t)high[i]};
        words[at] = (uint16_t)(ends[0] < 0 ? 0 : ends[0] > 0xffff ? 0xffff : ends[0]);
        words[at + 4] = (uint16_t)(ends[1] < 0 ? 0 : ends[1] > 0xffff ? 0xffff : ends[1]);
    }
    return words;
#endif
}

/* Words in order, low[0] to low[15] and then those of `high`, to the order above. */
static inline void fv_words_pack_order(char *at)
{
    uint64_t fours[8], packed[8];
    memcpy(fours, at, sizeof(fours));
    for (int32_t i = 0; i < 4; i++) {
        packed[2 * i] = fours[i];
        packed[2 * i + 1] = fours[4 + i];
    }
    memcpy(at, packed, sizeof(packed));
}

/* The first of the two keys, of 32, whose words make pair `pair` in that order; the second follows it. */
FV_ALWAYS_INLINE int32_t fv_words_packed_key(int32_t pair) { return pair / 2 % 2 * 16 + pair / 4 * 4 + pair % 2 * 2; }

/* What fv_words_exp2_of takes for 2^x is x + FV_FIXED_ONE, and what it takes is rounded to 2^-8 so. */
#define FV_FIXED_ZERO 0x1.8p15f
#define FV_FIXED_ONE (FV_FIXED_ZERO + 127.0f)

typedef struct fv_exp2_constants {
    fv_lane_bits zero;
    fv_words slope, bulge;
} fv_exp2_constants;

FV_ALWAYS_INLINE fv_exp2_constants fv_exp2_constants_make(void)
{
    fv_exp2_constants made = {
        .zero = (fv_lane_bits)fv_lanes_splat(FV_FIXED_ZERO),
        .slope = (fv_words){0} + 19,
        .bulge = (fv_words){0} + 78,
    };
    FV_LANES_KEEP(made.zero);
    FV_LANES_KEEP(made.slope);
    FV_LANES_KEEP(made.bulge);
    return made;
}

/* 2^x as bf16, packed: relative error at most 5.3e-3 and 1.84e-3 of standard deviation, where rounding alone has 3.9e-3
 * and 1.66e-3; a common factor is not counted. At least 2^128 or NaN, as words, from 128 on and where x + FV_FIXED_ONE is
 * between -FV_FIXED_ZERO and 0 (x of -98431 to -49279); 0 for all others of -127 and below. NaN may give anything.
 *
 * The bits of FV_FIXED_ONE + x are a fixed-point number, 8 bits of fraction f, which is the logarithm that bf16's bits
 * would be if 2^f were 1 + f. What it is less, f (1 - f) (0.305 + 0.074 f), is taken off, and the number halved: 13
 * instructions for 32 weights. */
FV_ALWAYS_INLINE fv_words fv_words_exp2_of(fv_lanes low, fv_lanes high, const fv_exp2_constants *constants)
{
    const fv_words fixed = fv_words_packed((fv_lane_bits)low - constants->zero, (fv_lane_bits)high - constants->zero);
#if defined(__AVX512BW__)
    const __m512i f = _mm512_slli_epi16((__m512i)fixed, 8);
    const __m512i bulge = _mm512_mulhi_epu16(f, (__m512i) - (fv_words)f);
    const __m512i slope = _mm512_mulhi_epu16(f, (__m512i)constants->slope);
    const __m512i less = _mm512_mulhi_epu16(bulge, _mm512_add_epi16(slope, (__m512i)constants->bulge));
    return (fv_words)_mm512_srli_epi16(_mm512_sub_epi16((__m512i)fixed, less), 1);
#else
    fv_words words = {0};
    for (int32_t i = 0; i < 32; i++) {
        const uint32_t f = ((uint32_t)fixed[i] << 8) & 0xffffu;
        const uint32_t bulge = f * ((0x10000u - f) & 0xffffu) >> 16;
        const uint32_t less = bulge * ((f * constants->slope[i] >> 16) + constants->bulge[i]) >> 16;
        words[i] = (uint16_t)((fixed[i] - less) >> 1);
    }
    return words;
#endif
}

/* Of 32 bf16, as words that are in their order. */
FV_ALWAYS_INLINE fv_words fv_words_magnitudes(const void *from) { return fv_words_load(from) & 0x7fff; }

FV_ALWAYS_INLINE fv_words fv_words_max(fv_words a, fv_words b)
{
#if defined(__AVX512BW__)
    return (fv_words)_mm512_max_epu16((__m512i)a, (__m512i)b);
#else
    const fv_words above = (fv_words)(a > b);
    return (a & above) | (b & ~above);
#endif
}

FV_ALWAYS_INLINE int32_t fv_words_all_below(fv_words words, uint16_t limit)
{
#if defined(__AVX512BW__)
    return _mm512_cmpge_epu16_mask((__m512i)words, _mm512_set1_epi16((int16_t)limit)) == 0;
#else
    int32_t all = 1;
    for (int32_t i = 0; i < 32; i++) all &= words[i] < limit;
    return all;
#endif
}

/* sums + words 2 i + words 2 i + 1, as bf16. */
FV_ALWAYS_INLINE fv_lanes fv_words_add_to(fv_lanes sums, fv_words words)
{
#if defined(__AVX512BF16__)
    return (fv_lanes)_mm512_dpbf16_ps((__m512)sums, (__m512bh)words, (__m512bh)_mm512_set1_epi16(0x3f80));
#else
    const fv_lane_bits pairs = (fv_lane_bits)words;
    return sums + ((fv_lanes)(pairs << 16) + (fv_lanes)(pairs & 0xffff0000u));
#endif
}

/* A tile of 16 rows x 32 keys, keys in order, from the keys' rows of 16. words[p] has key p % 8 + 16 (p / 8) and the
 * key 8 after it: 4 rounds of 16 shuffles, each of which takes one bit of the row's number out of the vectors and one
 * of the key's number in. */
FV_ALWAYS_INLINE void fv_words_store_transposed(char *tile, const fv_words words[16])
{
#if defined(__AVX512BW__)
    __m512i a[16], b[16];
    FV_UNROLL
    for (int32_t i = 0; i < 16; i += 2) { /* bit 2 of the row; bit 0 of the key */
        a[i] = _mm512_unpacklo_epi16((__m512i)words[i], (__m512i)words[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi16((__m512i)words[i], (__m512i)words[i + 1]);
    }
    FV_UNROLL
    for (int32_t i = 0; i < 16; i += 4) { /* bit 1 of both */
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi32(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi32(a[i + 1], a[i + 3]);
    }
    FV_UNROLL
    for (int32_t i = 0; i < 8; i++) { /* bit 0 of the row; bit 2 of the key */
        const int32_t from = i / 4 * 8 + i % 4;
        a[i / 4 * 8 + i % 4 * 2] = _mm512_unpacklo_epi64(b[from], b[from + 4]);
        a[i / 4 * 8 + i % 4 * 2 + 1] = _mm512_unpackhi_epi64(b[from], b[from + 4]);
    }
    FV_UNROLL
    for (int32_t i = 0; i < 8; i++) { /* bit 3 of the row; bit 4 of the key */
        _mm512_storeu_si512(tile + i * 64, _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88));
        _mm512_storeu_si512(tile + (i + 8) * 64, _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd));
    }
#else
    for (int32_t p = 0; p < 16; p++) {
        uint16_t of_rows[32];
        memcpy(of_rows, &words[p], sizeof(of_rows));
        for (int32_t i = 0; i < 32; i++) {
            const int32_t row = i % 16, key = p % 8 + 16 * (p / 8) + 8 * (i / 16);
            memcpy(tile + row * 64 + key * 2, &of_rows[i], 2);
        }
    }
#endif
}

/* The key of word 16 * half + row of words[p] above. */
FV_ALWAYS_INLINE int32_t fv_words_key(const int32_t p, const int32_t half) { return p % 8 + 16 * (p / 8) + 8 * half; }

/* Two rows of 32 elements to pairs, in two rows of 16: element 8 i + j makes pair 4 i + j of the low row for j < 4, and
 * pair 4 i + j - 4 of the high row for the others: a shuffle within 16 bytes. */
FV_ALWAYS_INLINE void fv_words_pair(fv_lane_bits rows[2], const char *even, const char *odd)
{
    const fv_words a = fv_words_load(even), b = fv_words_load(odd);
#if defined(__AVX512BW__)
    rows[0] = (fv_lane_bits)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
    rows[1] = (fv_lane_bits)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#else
    uint16_t pairs[2][32];
    for (int32_t i = 0; i < 32; i++) {
        const int32_t pair = i / 8 * 4 + i % 4;
        pairs[i / 4 % 2][2 * pair] = a[i];
        pairs[i / 4 % 2][2 * pair + 1] = b[i];
    }
    memcpy(rows, pairs, sizeof(pairs));
#endif
}

/* The same, stored. */
FV_ALWAYS_INLINE void fv_words_store_pairs(char *low, char *high, const char *even, const char *odd)
{
    fv_lane_bits rows[2];
    fv_words_pair(rows, even, odd);
    fv_lanes_store(low, (fv_lanes)rows[0]);
    fv_lanes_store(high, (fv_lanes)rows[1]);
}

/* The way back for sums of such columns: two vectors of 16 to 32 elements. */
FV_ALWAYS_INLINE void fv_lanes_in_order(fv_lanes ordered[2], fv_lanes low, fv_lanes high)
{
#if defined(__AVX512F__)
    const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    ordered[0] = (fv_lanes)_mm512_permutex2var_epi64((__m512i)low, first, (__m512i)high);
    ordered[1] = (fv_lanes)_mm512_permutex2var_epi64((__m512i)low, second, (__m512i)high);
#else
    for (int32_t i = 0; i < 4; i++) {
        memcpy((char *)ordered + 32 * i, (const char *)&low + 16 * i, 16);
        memcpy((char *)ordered + 32 * i + 16, (const char *)&high + 16 * i, 16);
    }
#endif
}

FV_ALWAYS_INLINE void fv_lanes_store_in_order(float *to, fv_lanes low, fv_lanes high)
{
    fv_lanes ordered[2];
    fv_lanes_in_order(ordered, low, high);
    fv_lanes_store(to, ordered[0]);
    fv_lanes_store(to + 16, ordered[1]);
}

/* Of two rows. */
FV_ALWAYS_INLINE void fv_lanes_store_natural(float *to, const float *low, const float *high)
{
    fv_lanes_store_in_order(to, fv_lanes_load(low), fv_lanes_load(high));
}

/* The same times `factor`. */
FV_ALWAYS_INLINE void fv_lanes_store_natural_times(float *to, const float *low, const float *high, fv_lanes factor)
{
    fv_lanes_store_in_order(to, fv_lanes_load(low) * factor, fv_lanes_load(high) * factor);
}

/* The same as bf16, times `factor`. */
FV_ALWAYS_INLINE fv_words fv_words_natural(const float *low, const float *high, fv_lanes factor)
{
    const fv_words words = fv_words_of(fv_lanes_load(low) * factor, fv_lanes_load(high) * factor);
#if defined(__AVX512F__)
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    return (fv_words)_mm512_permutexvar_epi64(order, (__m512i)words);
#else
    uint64_t fours[8], ordered[8];
    memcpy(fours, &words, sizeof(fours));
    for (int32_t i = 0; i < 4; i++) {
        ordered[2 * i] = fours[i];
        ordered[2 * i + 1] = fours[4 + i];
    }
    fv_words natural;
    memcpy(&natural, ordered, sizeof(natural));
    return natural;
#endif
}

/* The same as fp16. */
FV_ALWAYS_INLINE fv_words fv_halves_natural(const float *low, const float *high, fv_lanes factor)
{
    fv_lanes ordered[2];
    fv_lanes_in_order(ordered, fv_lanes_load(low) * factor, fv_lanes_load(high) * factor);
    fv_words words;
#if defined(__AVX512F__)
    enum { nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    words = (fv_words)_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph((__m512)ordered[0], nearest)),
                                         _mm512_cvtps_ph((__m512)ordered[1], nearest), 1);
#else
    for (int32_t i = 0; i < 32; i++) words[i] = fv_f16_of_f32(ordered[i / 16][i % 16]);
#endif
    return words;
}

/* 1: some of 32 bf16 is infinite or NaN. */
FV_ALWAYS_INLINE int32_t fv_words_not_finite(const char *from)
{
    fv_words words = {0};
    memcpy(&words, from, sizeof(words));
    words &= 0x7f80;
#if defined(__AVX512BW__)
    return _mm512_cmpeq_epi16_mask((__m512i)words, _mm512_set1_epi16(0x7f80)) != 0;
#else
    int32_t found = 0;
    for (int32_t i = 0; i < 32; i++) found |= words[i] == 0x7f80;
    return found;
#endif
}

/* Sixteen rows of 16 words of 32 bits change places with their columns. */
static inline void fv_lanes_store_transposed(char *tile, const char *const rows[16])
{
#if defined(__AVX512F__)
    __m512i a[16], b[16];
    for (int32_t i = 0; i < 16; i += 2) {
        const __m512i even = _mm512_loadu_si512(rows[i]), odd = _mm512_loadu_si512(rows[i + 1]);
        a[i] = _mm512_unpacklo_epi32(even, odd);
        a[i + 1] = _mm512_unpackhi_epi32(even, odd);
    }
    for (int32_t i = 0; i < 16; i += 4) { /* b[i + j] lane l: rows i to i + 3 of column 4 l + j */
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int32_t j = 0; j < 4; j++) {
        const __m512i even_low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
        const __m512i even_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
        const __m512i odd_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
        _mm512_storeu_si512(tile + j * 64, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
        _mm512_storeu_si512(tile + (4 + j) * 64, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
        _mm512_storeu_si512(tile + (8 + j) * 64, _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
        _mm512_storeu_si512(tile + (12 + j) * 64, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
    }
#else
    for (int32_t row = 0; row < 16; row++)
        for (int32_t column = 0; column < 16; column++) memcpy(tile + column * 64 + row * 4, rows[row] + column * 4, 4);
#endif
}

#endif
