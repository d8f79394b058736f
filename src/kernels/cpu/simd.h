/* Vectors of 8 floats for the CPU kernels, by the compiler's vector extension: one source for every
 * ISA level and machine. x86 intrinsics stand only where the compiler does not find the instruction.
 *
 * Lane order: 16 stored elements become a pair of vectors in the order that costs least:
 *
 *   bf16    even elements | odd elements    one shift and one mask, no shuffle
 *   others  first eight   | last eight
 *
 * A dot product does not care, as long as both operands have it; an accumulated output is put back
 * once at its end. A rest of 8 elements is always in natural order. */
#ifndef FV_KERNELS_CPU_SIMD_H
#define FV_KERNELS_CPU_SIMD_H

#include <string.h>

#include "core/compiler.h"
#include "core/float.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define FV_LANES 8

/* Before a loop of few, constant steps over an array of vectors that is to live in registers. */
#if defined(__clang__)
#define FV_UNROLL _Pragma("clang loop unroll(full)")
#define FV_ROLLED _Pragma("clang loop unroll(disable)")
#else
#define FV_UNROLL _Pragma("GCC unroll 16")
#define FV_ROLLED _Pragma("GCC unroll 1") /* before a loop whose body is long enough as it is */
#endif

typedef float fv_f32x8 __attribute__((vector_size(32)));
typedef int32_t fv_i32x8 __attribute__((vector_size(32)));
typedef uint32_t fv_u32x8 __attribute__((vector_size(32)));
typedef uint16_t fv_u16x8 __attribute__((vector_size(16)));
typedef uint8_t fv_u8x8 __attribute__((vector_size(8)));
typedef float fv_f32x4 __attribute__((vector_size(16)));

typedef struct fv_f32x16 {
    fv_f32x8 a;
    fv_f32x8 b;
} fv_f32x16;

/* --- plain loads and stores, any alignment ------------------------------------------------------ */

FV_ALWAYS_INLINE fv_f32x8 fv_load_f32(const float *from)
{
    fv_f32x8 value;
    memcpy(&value, from, sizeof(value));
    return value;
}

FV_ALWAYS_INLINE void fv_store_f32(float *to, fv_f32x8 value) { memcpy(to, &value, sizeof(value)); }

FV_ALWAYS_INLINE fv_i32x8 fv_load_i32(const int32_t *from)
{
    fv_i32x8 value;
    memcpy(&value, from, sizeof(value));
    return value;
}

FV_ALWAYS_INLINE fv_f32x8 fv_splat(float value)
{
    return (fv_f32x8){value, value, value, value, value, value, value, value};
}

FV_ALWAYS_INLINE fv_i32x8 fv_splat_i32(int32_t value)
{
    return (fv_i32x8){value, value, value, value, value, value, value, value};
}

FV_ALWAYS_INLINE fv_f32x8 fv_fma(fv_f32x8 a, fv_f32x8 b, fv_f32x8 c)
{
#if defined(__FMA__)
    return (fv_f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* --- selection ----------------------------------------------------------------------------------- */

/* a where the mask is all ones, b where it is 0. */
FV_ALWAYS_INLINE fv_f32x8 fv_select(fv_i32x8 mask, fv_f32x8 a, fv_f32x8 b)
{
#if defined(__AVX2__)
    return (fv_f32x8)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
#else
    return (fv_f32x8)((mask & (fv_i32x8)a) | (~mask & (fv_i32x8)b));
#endif
}

/* a > b ? a : b and a < b ? a : b: a NaN in b stays, one in a does not. */
FV_ALWAYS_INLINE fv_f32x8 fv_max(fv_f32x8 a, fv_f32x8 b)
{
#if defined(__AVX2__)
    return (fv_f32x8)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return fv_select((fv_i32x8)(a > b), a, b);
#endif
}

FV_ALWAYS_INLINE fv_f32x8 fv_min(fv_f32x8 a, fv_f32x8 b)
{
#if defined(__AVX2__)
    return (fv_f32x8)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return fv_select((fv_i32x8)(a < b), a, b);
#endif
}

FV_ALWAYS_INLINE fv_f32x8 fv_abs(fv_f32x8 value) { return (fv_f32x8)((fv_i32x8)value & 0x7fffffff); }

/* 1: some lane of the mask is set. */
FV_ALWAYS_INLINE int32_t fv_any(fv_i32x8 mask)
{
#if defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    int32_t any = 0;
    for (int32_t i = 0; i < FV_LANES; i++) any |= mask[i];
    return any != 0;
#endif
}

/* --- decoding ------------------------------------------------------------------------------------ */

FV_ALWAYS_INLINE fv_u32x8 fv_widen_u16(const void *from)
{
    fv_u16x8 stored;
    memcpy(&stored, from, sizeof(stored));
#if defined(__AVX2__)
    return (fv_u32x8)_mm256_cvtepu16_epi32((__m128i)stored);
#else
    return __builtin_convertvector(stored, fv_u32x8);
#endif
}

FV_ALWAYS_INLINE fv_u32x8 fv_widen_u8(const void *from)
{
#if defined(__AVX2__)
    return (fv_u32x8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    fv_u8x8 stored;
    memcpy(&stored, from, sizeof(stored));
    return __builtin_convertvector(stored, fv_u32x8);
#endif
}

/* Eight fp16 as 32-bit integers. The exponent is moved into place and rebased by a multiplication,
 * which also makes subnormals right; infinity and NaN get the top exponent back. */
FV_ALWAYS_INLINE fv_f32x8 fv_f32_of_f16_bits(fv_u32x8 stored)
{
    const fv_u32x8 magnitude = (stored & 0x7fffu) << 13;
    const fv_u32x8 special = (fv_u32x8)((stored & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    const fv_u32x8 value = (fv_u32x8)((fv_f32x8)magnitude * 0x1p112f) | special;
    return (fv_f32x8)(value | (stored & 0x8000u) << 16);
}

FV_ALWAYS_INLINE fv_f32x8 fv_load8_f16(const void *from)
{
#if defined(__F16C__)
    return (fv_f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    return fv_f32_of_f16_bits(fv_widen_u16(from));
#endif
}

FV_ALWAYS_INLINE fv_f32x8 fv_load8_bf16(const void *from) { return (fv_f32x8)(fv_widen_u16(from) << 16); }

FV_ALWAYS_INLINE fv_f32x8 fv_load8_e4m3(const void *from)
{
    const fv_u32x8 stored = fv_widen_u8(from);
    const fv_u32x8 magnitude = stored & 0x7fu;
    const fv_u32x8 nan = (fv_u32x8)(magnitude == 0x7fu) & 0x7fc00000u;
    const fv_u32x8 value = (fv_u32x8)((fv_f32x8)(magnitude << 20) * 0x1p120f) | nan;
    return (fv_f32x8)(value | (stored & 0x80u) << 24);
}

FV_ALWAYS_INLINE fv_f32x8 fv_load8_e5m2(const void *from) { return fv_f32_of_f16_bits(fv_widen_u8(from) << 8); }

FV_ALWAYS_INLINE fv_f32x8 fv_load8_i8(const void *from)
{
#if defined(__AVX2__)
    const fv_i32x8 stored = (fv_i32x8)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    const fv_i32x8 stored = (fv_i32x8)(fv_widen_u8(from) << 24) >> 24;
#endif
    return __builtin_convertvector(stored, fv_f32x8);
}

/* Eight elements in natural order, any alignment. */
FV_ALWAYS_INLINE fv_f32x8 fv_load8(const void *from, fv_dtype dtype)
{
    switch (dtype) {
    case FV_DTYPE_F32: return fv_load_f32((const float *)from);
    case FV_DTYPE_F16: return fv_load8_f16(from);
    case FV_DTYPE_BF16: return fv_load8_bf16(from);
    case FV_DTYPE_F8_E4M3: return fv_load8_e4m3(from);
    case FV_DTYPE_F8_E5M2: return fv_load8_e5m2(from);
    case FV_DTYPE_I8: return fv_load8_i8(from);
    case FV_DTYPE_NONE: break;
    }
    return fv_splat(0.0f);
}

#if defined(__AVX2__) && defined(__F16C__)
/* fp8 through fp16, 16 elements in 16-bit lanes: e5m2 is the upper byte of an fp16; e4m3 has fp16's
 * exponent range less 8, so its bits moved into place are the value times 2^-8. */
FV_ALWAYS_INLINE fv_f32x16 fv_f32_of_16_f16(__m256i stored)
{
    return (fv_f32x16){
        (fv_f32x8)_mm256_cvtph_ps(_mm256_castsi256_si128(stored)),
        (fv_f32x8)_mm256_cvtph_ps(_mm256_extracti128_si256(stored, 1)),
    };
}

FV_ALWAYS_INLINE fv_f32x16 fv_load16_e4m3(const void *from)
{
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((int16_t)0xbf80));
    const __m256i magnitude = _mm256_and_si256(half, _mm256_set1_epi16(0x3f80));
    const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80)),
                                         _mm256_set1_epi16(0x7c00));
    const fv_f32x16 scaled = fv_f32_of_16_f16(_mm256_or_si256(half, nan));
    return (fv_f32x16){scaled.a * 256.0f, scaled.b * 256.0f};
}

FV_ALWAYS_INLINE __m256i fv_f16_of_16_e5m2(const void *from)
{
    return _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from)), 8);
}

FV_ALWAYS_INLINE fv_f32x16 fv_load16_e5m2(const void *from) { return fv_f32_of_16_f16(fv_f16_of_16_e5m2(from)); }
#endif

/* In the lane order of bf16: even elements, then odd ones. */
FV_ALWAYS_INLINE fv_f32x16 fv_f32_of_16_bf16(fv_u32x8 pairs)
{
    return (fv_f32x16){(fv_f32x8)(pairs << 16), (fv_f32x8)(pairs & 0xffff0000u)};
}

/* Sixteen elements in lane order, any alignment. */
FV_ALWAYS_INLINE fv_f32x16 fv_load16(const void *from, fv_dtype dtype)
{
    if (dtype == FV_DTYPE_BF16) {
        fv_u32x8 pairs;
        memcpy(&pairs, from, sizeof(pairs));
        return fv_f32_of_16_bf16(pairs);
    }
#if defined(__AVX2__) && defined(__F16C__)
    if (dtype == FV_DTYPE_F8_E4M3) return fv_load16_e4m3(from);
    if (dtype == FV_DTYPE_F8_E5M2) return fv_load16_e5m2(from);
#endif
    const size_t half_bytes = dtype == FV_DTYPE_F32 ? 32 : dtype == FV_DTYPE_F16 ? 16 : 8;
    return (fv_f32x16){fv_load8(from, dtype), fv_load8((const char *)from + half_bytes, dtype)};
}

/* From natural order to the lane order of `dtype`. */
FV_ALWAYS_INLINE fv_f32x16 fv_lanes_of_natural(fv_f32x16 value, fv_dtype dtype)
{
    if (dtype != FV_DTYPE_BF16) return value;
    return (fv_f32x16){__builtin_shufflevector(value.a, value.b, 0, 2, 4, 6, 8, 10, 12, 14),
                       __builtin_shufflevector(value.a, value.b, 1, 3, 5, 7, 9, 11, 13, 15)};
}

/* And back. */
FV_ALWAYS_INLINE fv_f32x16 fv_natural_of_lanes(fv_f32x16 value, fv_dtype dtype)
{
    if (dtype != FV_DTYPE_BF16) return value;
    return (fv_f32x16){__builtin_shufflevector(value.a, value.b, 0, 8, 1, 9, 2, 10, 3, 11),
                       __builtin_shufflevector(value.a, value.b, 4, 12, 5, 13, 6, 14, 7, 15)};
}

/* --- encoding, round to nearest even --------------------------------------------------------------- */

FV_ALWAYS_INLINE void fv_store_u16(void *to, fv_u32x8 value)
{
#if defined(__AVX2__)
    const __m256i packed = _mm256_packus_epi32((__m256i)value, (__m256i)value);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
    const fv_u16x8 narrow = __builtin_convertvector(value, fv_u16x8);
    memcpy(to, &narrow, sizeof(narrow));
#endif
}

FV_ALWAYS_INLINE void fv_store_u8(void *to, fv_u32x8 value)
{
    const fv_u8x8 narrow = __builtin_convertvector(value, fv_u8x8);
    memcpy(to, &narrow, sizeof(narrow));
}

FV_ALWAYS_INLINE void fv_store8_bf16(void *to, fv_f32x8 value)
{
    const fv_u32x8 bits = (fv_u32x8)value;
    const fv_u32x8 rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const fv_i32x8 nan = (fv_i32x8)(value != value);
    fv_store_u16(to, (fv_u32x8)fv_select(nan, (fv_f32x8)(bits >> 16 | 0x40u), (fv_f32x8)rounded));
}

/* A narrow format with its sign at bit `width`. Normal results: round the mantissa in place, then
 * rebase the exponent. Subnormal ones: adding 2^(23 - bias - mantissa_bits + 1) leaves the rounded
 * count of units in the low bits. Above the largest finite value: `overflow`; NaN: all ones. */
FV_ALWAYS_INLINE fv_u32x8 fv_narrow_bits(fv_f32x8 value, const int32_t mantissa_bits, const int32_t exponent_bits,
                                         const int32_t bias, const uint32_t max_finite, const uint32_t overflow)
{
    const int32_t shift = 23 - mantissa_bits;
    const int32_t width = mantissa_bits + exponent_bits;
    const fv_u32x8 magnitude = (fv_u32x8)value & 0x7fffffffu;
    const fv_u32x8 sign = ((fv_u32x8)value & 0x80000000u) >> (31 - width);

    const uint32_t half_less_one = (1u << (shift - 1)) - 1u;
    const fv_u32x8 normal = ((magnitude + half_less_one + (magnitude >> shift & 1u)) >> shift) -
                            ((uint32_t)(127 - bias) << mantissa_bits);
    const uint32_t unit_bits = (uint32_t)(127 + 23 + 1 - bias - mantissa_bits) << 23;
    const float unit = fv_f32_of_bits(unit_bits);
    const fv_u32x8 subnormal = (fv_u32x8)((fv_f32x8)magnitude + unit) - unit_bits;

    const uint32_t min_normal = (uint32_t)(127 + 1 - bias) << 23;
    const fv_i32x8 is_small = (fv_i32x8)((fv_i32x8)magnitude < (int32_t)min_normal);
    fv_u32x8 stored = (fv_u32x8)fv_select(is_small, (fv_f32x8)subnormal, (fv_f32x8)normal);
    const fv_i32x8 is_over = (fv_i32x8)((fv_i32x8)stored > (int32_t)max_finite);
    stored = (fv_u32x8)fv_select(is_over, (fv_f32x8)((fv_u32x8)fv_splat_i32((int32_t)overflow)), (fv_f32x8)stored);
    stored |= (fv_u32x8)((fv_i32x8)magnitude > 0x7f800000) & ((1u << width) - 1u);
    return stored | sign;
}

FV_ALWAYS_INLINE void fv_store8_f16(void *to, fv_f32x8 value)
{
#if defined(__F16C__)
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    fv_store_u16(to, fv_narrow_bits(value, 10, 5, 15, 0x7bff, 0x7c00));
#endif
}

/* Eight elements in natural order, any alignment. */
FV_ALWAYS_INLINE void fv_store8(void *to, fv_f32x8 value, fv_dtype dtype)
{
    switch (dtype) {
    case FV_DTYPE_F32: fv_store_f32((float *)to, value); return;
    case FV_DTYPE_F16: fv_store8_f16(to, value); return;
    case FV_DTYPE_BF16: fv_store8_bf16(to, value); return;
    case FV_DTYPE_F8_E4M3: fv_store_u8(to, fv_narrow_bits(value, 3, 4, 7, 0x7e, 0x7e)); return;
    case FV_DTYPE_F8_E5M2: fv_store_u8(to, fv_narrow_bits(value, 2, 5, 15, 0x7b, 0x7b)); return;
    case FV_DTYPE_I8:
        for (int32_t i = 0; i < FV_LANES; i++) fv_float_store((char *)to + i, value[i], FV_DTYPE_I8);
        return;
    case FV_DTYPE_NONE: return;
    }
}

/* --- reductions ---------------------------------------------------------------------------------- */

/* In each 128 bits: lanes 0 + 2 and 1 + 3 of a, then of b. One operand is a blend, which more ports do than shuffles. */
FV_ALWAYS_INLINE fv_f32x8 fv_add_pairs(fv_f32x8 a, fv_f32x8 b)
{
    return __builtin_shufflevector(a, b, 0, 1, 10, 11, 4, 5, 14, 15) +
           __builtin_shufflevector(a, b, 2, 3, 8, 9, 6, 7, 12, 13);
}

/* The two halves of a, then of b, added. */
FV_ALWAYS_INLINE fv_f32x8 fv_add_halves(fv_f32x8 a, fv_f32x8 b)
{
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 12, 13, 14, 15) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 8, 9, 10, 11);
}

/* Lane i of the result is the sum of the lanes of sums[i]. */
FV_ALWAYS_INLINE fv_f32x8 fv_reduce8(const fv_f32x8 sums[8])
{
#if defined(__AVX2__)
    fv_f32x8 quad[2];
    FV_UNROLL
    for (int32_t i = 0; i < 2; i++) {
        const fv_f32x8 a = fv_add_pairs(sums[4 * i], sums[4 * i + 1]);
        const fv_f32x8 b = fv_add_pairs(sums[4 * i + 2], sums[4 * i + 3]);
        quad[i] = __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
                  __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
    }
    return fv_add_halves(quad[0], quad[1]);
#else
    /* The same with vectors of four, which every baseline has shuffles for. */
    fv_f32x4 quad[2];
    for (int32_t i = 0; i < 2; i++) {
        fv_f32x4 row[4];
        for (int32_t j = 0; j < 4; j++) {
            const fv_f32x8 sum = sums[4 * i + j];
            row[j] = __builtin_shufflevector(sum, sum, 0, 1, 2, 3) + __builtin_shufflevector(sum, sum, 4, 5, 6, 7);
        }
        const fv_f32x4 a = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5) +
                           __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
        const fv_f32x4 b = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5) +
                           __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
        quad[i] = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
    }
    return __builtin_shufflevector(quad[0], quad[1], 0, 1, 2, 3, 4, 5, 6, 7);
#endif
}

/* Of six sums: those of sums[0 .. 2] and of sums[3 .. 5], the last of either twice. */
FV_ALWAYS_INLINE fv_f32x8 fv_reduce6(const fv_f32x8 sums[6])
{
    const fv_f32x8 a = fv_add_pairs(sums[0], sums[1]), b = fv_add_pairs(sums[3], sums[4]);
    const fv_f32x8 c = fv_add_pairs(sums[2], sums[5]);
    return fv_add_halves(__builtin_shufflevector(a, c, 0, 2, 8, 8, 4, 6, 12, 12) +
                             __builtin_shufflevector(a, c, 1, 3, 9, 9, 5, 7, 13, 13),
                         __builtin_shufflevector(b, c, 0, 2, 10, 10, 4, 6, 14, 14) +
                             __builtin_shufflevector(b, c, 1, 3, 11, 11, 5, 7, 15, 15));
}

/* The lanes hold 8 / period values of each of `period` rows, lane i of row i % period. Every lane of
 * the result is its row's maximum, or sum. period: 1, 2, 4 or 8. */
FV_ALWAYS_INLINE fv_f32x8 fv_max_by_period(fv_f32x8 value, const int32_t period)
{
    if (period <= 4) value = fv_max(value, __builtin_shufflevector(value, value, 4, 5, 6, 7, 0, 1, 2, 3));
    if (period <= 2) value = fv_max(value, __builtin_shufflevector(value, value, 2, 3, 0, 1, 6, 7, 4, 5));
    if (period <= 1) value = fv_max(value, __builtin_shufflevector(value, value, 1, 0, 3, 2, 5, 4, 7, 6));
    return value;
}

FV_ALWAYS_INLINE fv_f32x8 fv_sum_by_period(fv_f32x8 value, const int32_t period)
{
    if (period <= 4) value += __builtin_shufflevector(value, value, 4, 5, 6, 7, 0, 1, 2, 3);
    if (period <= 2) value += __builtin_shufflevector(value, value, 2, 3, 0, 1, 6, 7, 4, 5);
    if (period <= 1) value += __builtin_shufflevector(value, value, 1, 0, 3, 2, 5, 4, 7, 6);
    return value;
}

/* Lane j of rows[i] and lane i of rows[j] change places. */
FV_ALWAYS_INLINE void fv_transpose8(fv_f32x8 rows[8])
{
    fv_f32x8 pair[8], quad[8];
    FV_UNROLL
    for (int32_t i = 0; i < 8; i += 2) {
        pair[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        pair[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    FV_UNROLL
    for (int32_t i = 0; i < 8; i++) {
        const fv_f32x8 a = pair[i / 4 * 4 + i % 4 / 2], b = pair[i / 4 * 4 + i % 4 / 2 + 2];
        quad[i] = i % 2 == 0 ? __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
                             : __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    FV_UNROLL
    for (int32_t i = 0; i < 4; i++) {
        rows[i] = __builtin_shufflevector(quad[i], quad[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        rows[i + 4] = __builtin_shufflevector(quad[i], quad[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* --- functions ----------------------------------------------------------------------------------- */

#define FV_LOG2E 1.44269504088896340736f
#define FV_LN2 0.69314718055994530942f

/* The polynomial of fv_exp2_each, highest power first. */
enum { FV_EXP2_TERMS = 7 };
static const float fv_exp2_terms[FV_EXP2_TERMS] = {
    1.53533585e-4f, 1.33988748e-3f, 9.61843737e-3f, 5.55033247e-2f, 2.40226479e-1f, 6.93147203e-1f, 1.0f};

/* 2^x for x <= 127, within 2 units in the last place; 0 below -126 (so for -inf), NaN for NaN.
 * x = n + f with n the nearest integer: a minimax polynomial in f (relative error 2e-9), its
 * constant 1 so that 2^0 is exact, times 2^n, which is n in the exponent field.
 *
 * Of up to 4 vectors, step by step for all: one after the other they are chains of 40 cycles, of which a core's
 * schedulers have room for two. */
FV_ALWAYS_INLINE void fv_exp2_each(fv_f32x8 *x, const int32_t num)
{
    fv_f32x8 f[4], p[4];
    fv_i32x8 power[4], is_tiny[4];
    FV_UNROLL
    for (int32_t i = 0; i < num; i++) {
        const fv_f32x8 clamped = fv_max(fv_splat(-126.0f), x[i]);
        const fv_f32x8 shifted = clamped + 0x1.8p23f; /* rounds to an integer, kept in the low bits */
        f[i] = clamped - (shifted - 0x1.8p23f);
        power[i] = (fv_i32x8)(((fv_u32x8)shifted << 23) + 0x3f800000u); /* a NaN may overflow */
        is_tiny[i] = (fv_i32x8)(x[i] < -126.0f);
        p[i] = fv_splat(fv_exp2_terms[0]);
    }
    FV_UNROLL
    for (int32_t j = 1; j < FV_EXP2_TERMS; j++) {
        FV_UNROLL
        for (int32_t i = 0; i < num; i++) p[i] = p[i] * f[i] + fv_exp2_terms[j];
    }
    FV_UNROLL
    for (int32_t i = 0; i < num; i++) x[i] = (fv_f32x8)((fv_i32x8)(p[i] * (fv_f32x8)power[i]) & ~is_tiny[i]);
}

FV_ALWAYS_INLINE fv_f32x8 fv_exp2(fv_f32x8 x)
{
    fv_exp2_each(&x, 1);
    return x;
}

/* tanh for any x: 1 beyond 10, NaN for NaN; absolute error below 2e-7, and relative error as well
 * near 0, where an odd polynomial serves. */
FV_ALWAYS_INLINE fv_f32x8 fv_tanh(fv_f32x8 x)
{
    const fv_f32x8 magnitude = fv_abs(x);
    const fv_f32x8 square = x * x;
    fv_f32x8 p = fv_splat(-5.72437350e-3f);
    p = p * square + 2.06556646e-2f;
    p = p * square - 5.37445447e-2f;
    p = p * square + 1.33314968e-1f;
    p = p * square - 3.33332838e-1f;
    const fv_f32x8 near = x + x * square * p;

    const fv_f32x8 power = fv_exp2(fv_min(fv_splat(10.0f), magnitude) * (2.0f * FV_LOG2E));
    const fv_f32x8 far = 1.0f - 2.0f / (power + 1.0f);
    const fv_i32x8 sign = (fv_i32x8)x & INT32_MIN;
    return fv_select((fv_i32x8)(magnitude < 0.625f), near, (fv_f32x8)((fv_i32x8)far | sign));
}

#if defined(__AVX2__) && defined(__F16C__)
/* 16 e4m3 with their magnitudes moved up by `shift` in words, below their signs: by 7 as fp16, 2^-8 of each, by 4 as bf16, 2^-120 of
 * each (subnormal numbers are subnormal). Where all bits but the sign are set the word becomes all ones: NaN. */
FV_ALWAYS_INLINE __m256i fv_words_of_16_e4m3(const void *from, const int32_t shift)
{
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
    const __m256i top = _mm256_set1_epi16((int16_t)(0x7f << shift));
    const __m256i sign_and_top = _mm256_set1_epi16((int16_t)(0x8000 | 0x7f << shift));
    const __m256i words = _mm256_and_si256(_mm256_slli_epi16(wide, shift), sign_and_top);
    return _mm256_or_si256(words, _mm256_cmpeq_epi16(_mm256_and_si256(words, top), top));
}

FV_ALWAYS_INLINE __m256i fv_f16_of_16_e4m3_small(const void *from) { return fv_words_of_16_e4m3(from, 7); }
FV_ALWAYS_INLINE __m256i fv_bf16_of_16_e4m3_tiny(const void *from) { return fv_words_of_16_e4m3(from, 4); }

/* As fv_load16_e4m3, but 2^-8 of the values. */
FV_ALWAYS_INLINE fv_f32x16 fv_load16_e4m3_small(const void *from)
{
    return fv_f32_of_16_f16(fv_f16_of_16_e4m3_small(from));
}

/* 2^-120 of the values, in the lane order of bf16. */
FV_ALWAYS_INLINE fv_f32x16 fv_load16_e4m3_tiny(const void *from)
{
    return fv_f32_of_16_bf16((fv_u32x8)fv_bf16_of_16_e4m3_tiny(from));
}
#endif

/* --- for loops that count instructions ------------------------------------------------------------------ */

/* The value in a register from here on: where it is used twice, the compiler would rather load it twice. */
FV_ALWAYS_INLINE fv_f32x8 fv_in_register(fv_f32x8 value)
{
#if defined(__AVX2__)
    __asm__("" : "+x"(value));
#endif
    return value;
}

#if defined(__AVX2__)
/* A broadcast of its own for each use, where registers are short: the compiler would keep the first. */
FV_ALWAYS_INLINE fv_f32x8 fv_splat_again(const float *from)
{
    fv_f32x8 value;
    __asm__ volatile("vbroadcastss %1, %0" : "=x"(value) : "m"(*from));
    return value;
}
#endif

/* sum + a * b in the sum's own register: from fv_fma GCC makes forms that end in moves between registers. */
FV_ALWAYS_INLINE fv_f32x8 fv_fma_onto(fv_f32x8 sum, fv_f32x8 a, fv_f32x8 b)
{
#if defined(__FMA__) && defined(__AVX2__)
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
#else
    return fv_fma(a, b, sum);
#endif
}

/* The same with b from memory, in one instruction. */
FV_ALWAYS_INLINE fv_f32x8 fv_fma_load_onto(fv_f32x8 sum, fv_f32x8 a, const float *b)
{
#if defined(__FMA__) && defined(__AVX2__)
    typedef float unaligned __attribute__((vector_size(32), aligned(4), may_alias));
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "m"(*(const unaligned *)b));
    return sum;
#else
    return fv_fma(a, fv_load_f32(b), sum);
#endif
}

#endif
