/* Numbers of any format as vectors of 64 bytes of fp32 (AVX-512). */
#ifndef FV_KERNELS_CPU_WIDE_LOAD_H
#define FV_KERNELS_CPU_WIDE_LOAD_H

#include "kernels/cpu/few_kernels.h"
#include "kernels/cpu/lanes.h"

/* Sixteen elements in lane order, times 1 / fv_few_factor. */
FV_ALWAYS_INLINE fv_lanes fv_wide_load16(const void *from, const fv_dtype dtype)
{
    if (dtype == FV_DTYPE_F32) return fv_lanes_load(from);
    if (dtype == FV_DTYPE_BF16) { /* even elements, odd elements, each in the upper half of its lane */
        const __m512i order = _mm512_set_epi32(15 << 16, 13 << 16, 11 << 16, 9 << 16, 7 << 16, 5 << 16, 3 << 16,
                                               1 << 16, 14 << 16, 12 << 16, 10 << 16, 8 << 16, 6 << 16, 4 << 16,
                                               2 << 16, 0);
        const __m512i stored = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)from));
        return (fv_lanes)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, order, stored);
    }
    if (dtype == FV_DTYPE_I8)
        return (fv_lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
    __m256i half;
    if (dtype == FV_DTYPE_F16) {
        half = _mm256_loadu_si256((const __m256i *)from);
    } else if (dtype == FV_DTYPE_F8_E5M2) { /* the upper byte of an fp16 */
        half = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from)), 8);
    } else { /* as fv_load16_e4m3_small */
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
        const __m256i moved = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((int16_t)0xbf80));
        const __m256i top = _mm256_set1_epi16(0x3f80);
        const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(moved, top), top);
        half = _mm256_mask_blend_epi16(is_nan, moved, _mm256_set1_epi16(-1));
    }
    return (fv_lanes)_mm512_cvtph_ps(half);
}

/* The same of 8 elements; the rest are zeros. */
FV_ALWAYS_INLINE fv_lanes fv_wide_load8(const void *from, const fv_dtype dtype)
{
    return (fv_lanes)_mm512_zextps256_ps512((__m256)fv_few_load8(from, dtype));
}

#endif
