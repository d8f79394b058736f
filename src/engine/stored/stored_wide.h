/* Words of stripes taken apart with vectors of 512 bits: those of two neighbouring columns, lanes 0 to 7 being the rows of the
 * first, 8 to 15 of the second. Of a word's four values each becomes a number of 32 bits. */
#ifndef FV_ENGINE_STORED_STORED_WIDE_H
#define FV_ENGINE_STORED_STORED_WIDE_H

#include "engine/stored/stored_words.h"

typedef struct fv_stored_wide_format {
    const fv_stored_format *of;
    float offset; /* times the scale, of types without minima */
    void (*unpack)(__m512i *values, const uint8_t *words, int32_t part, int32_t column);
} fv_stored_wide_format;

/* a | (b & c) */
#define FV_STORED_OR_AND 0xf8

static inline __m512i fv_stored_wide_words(const uint8_t *words, int32_t index)
{
    return _mm512_loadu_si512(words + index * FV_STORED_WORD_BYTES);
}

/* Four bits of each byte, from bit `shift` on. */
FV_ALWAYS_INLINE void fv_stored_wide_nibbles(__m512i *values, __m512i words, const int32_t shift)
{
    FV_STORED_UNROLL
    for (int32_t i = 0; i < 4; i++)
        values[i] = _mm512_and_si512(_mm512_srli_epi32(words, (unsigned)(8 * i + shift)), _mm512_set1_epi32(15));
}

/* --- blocks of 32 --------------------------------------------------------------------------------- */

static inline void fv_stored_wide_q4(__m512i *values, const uint8_t *words, int32_t part, int32_t column)
{
    (void)part;
    fv_stored_wide_nibbles(values, fv_stored_wide_words(words, column % 4), column < 4 ? 0 : 4);
}

/* The fifth bit of value i is bit i of the first word. */
static inline void fv_stored_wide_q5(__m512i *values, const uint8_t *words, int32_t part, int32_t column)
{
    const __m512i bits = _mm512_broadcast_i64x4(fv_stored_load_words(words, 0));
    const __m512i of_column = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(4), 1);
    fv_stored_wide_q4(values, words + FV_STORED_WORD_BYTES, part, column);
    FV_STORED_UNROLL
    for (int32_t i = 0; i < 4; i++) {
        const __m512i count = _mm512_add_epi32(of_column, _mm512_set1_epi32(28 + 4 * column + i));
        values[i] = _mm512_ternarylogic_epi32(values[i], _mm512_rorv_epi32(bits, count), _mm512_set1_epi32(16),
                                              FV_STORED_OR_AND);
    }
}

static inline void fv_stored_wide_q8_0(__m512i *values, const uint8_t *words, int32_t part, int32_t column)
{
    (void)part;
    const __m512i bytes = fv_stored_wide_words(words, column);
    FV_STORED_UNROLL
    for (int32_t i = 0; i < 4; i++) values[i] = _mm512_srai_epi32(_mm512_slli_epi32(bytes, (unsigned)(24 - 8 * i)), 24);
}

/* --- blocks of 256 -------------------------------------------------------------------------------- */

static inline void fv_stored_wide_q4_k(__m512i *values, const uint8_t *words, int32_t part, int32_t column)
{
    const __m512i both = fv_stored_wide_words(words, 3 + part / 2 * FV_STORED_COLUMNS + column);
    fv_stored_wide_nibbles(values, _mm512_srlv_epi32(both, _mm512_set1_epi32(part % 2 * 4)), 0);
}

/* The fifth bits are bit `part` of the bytes. */
static inline void fv_stored_wide_q5_k(__m512i *values, const uint8_t *words, int32_t part, int32_t column)
{
    const __m512i bits = _mm512_rorv_epi32(fv_stored_wide_words(words, 3 + column), _mm512_set1_epi32(28 + part));
    const __m512i both = fv_stored_wide_words(words, 11 + part / 2 * FV_STORED_COLUMNS + column);
    fv_stored_wide_nibbles(values, _mm512_srlv_epi32(both, _mm512_set1_epi32(part % 2 * 4)), 0);
    FV_STORED_UNROLL
    for (int32_t i = 0; i < 4; i++)
        values[i] = _mm512_ternarylogic_epi32(values[i], _mm512_srli_epi32(bits, (unsigned)(8 * i)),
                                              _mm512_set1_epi32(16), FV_STORED_OR_AND);
}

/* Without the 32 that is taken off. */
static inline void fv_stored_wide_q6_k(__m512i *values, const uint8_t *words, int32_t part, int32_t column)
{
    const int32_t half = part / 4, p = part % 4;
    const __m512i low = fv_stored_wide_words(words, half * 16 + p % 2 * FV_STORED_COLUMNS + column);
    const __m512i pairs = fv_stored_wide_words(words, 32 + half * FV_STORED_COLUMNS + column);
    const __m512i nibbles = _mm512_and_si512(_mm512_srlv_epi32(low, _mm512_set1_epi32(p / 2 * 4)),
                                             _mm512_set1_epi8(0x0f));
    const __m512i bytes = _mm512_ternarylogic_epi32(nibbles, _mm512_rorv_epi32(pairs, _mm512_set1_epi32(28 + 2 * p)),
                                                    _mm512_set1_epi8(0x30), FV_STORED_OR_AND);
    FV_STORED_UNROLL
    for (int32_t i = 0; i < 4; i++)
        values[i] = _mm512_and_si512(_mm512_srli_epi32(bytes, (unsigned)(8 * i)), _mm512_set1_epi32(63));
}

/* --- floats --------------------------------------------------------------------------------------- */

/* The four values of the words as fp32. */
FV_ALWAYS_INLINE void fv_stored_wide_values(__m512 *values, const __m512i *integers, fv_stored_scale scale,
                                            const fv_stored_wide_format *format)
{
    const __m512 factor = _mm512_broadcast_f32x8(scale.scale);
    const __m512 minimum = format->of->has_minimum ? _mm512_broadcast_f32x8(scale.minimum)
                                                   : _mm512_mul_ps(factor, _mm512_set1_ps(format->offset));
    const bool is_multiple = !format->of->has_minimum && format->offset == 0;
    FV_STORED_UNROLL
    for (int32_t i = 0; i < 4; i++) {
        const __m512 integer = _mm512_cvtepi32_ps(integers[i]);
        values[i] = is_multiple ? _mm512_mul_ps(integer, factor) : _mm512_fmadd_ps(integer, factor, minimum);
    }
}

static const fv_stored_wide_format fv_stored_wide_of_q4_0 = {&fv_stored_q4_0, 0, fv_stored_wide_q4};
static const fv_stored_wide_format fv_stored_wide_of_q4_1 = {&fv_stored_q4_1, 0, fv_stored_wide_q4};
static const fv_stored_wide_format fv_stored_wide_of_q5_0 = {&fv_stored_q5_0, 0, fv_stored_wide_q5};
static const fv_stored_wide_format fv_stored_wide_of_q5_1 = {&fv_stored_q5_1, 0, fv_stored_wide_q5};
static const fv_stored_wide_format fv_stored_wide_of_q8_0 = {&fv_stored_q8_0, 0, fv_stored_wide_q8_0};
static const fv_stored_wide_format fv_stored_wide_of_q4_k = {&fv_stored_q4_k, 0, fv_stored_wide_q4_k};
static const fv_stored_wide_format fv_stored_wide_of_q5_k = {&fv_stored_q5_k, 0, fv_stored_wide_q5_k};
static const fv_stored_wide_format fv_stored_wide_of_q6_k = {&fv_stored_q6_k, -32, fv_stored_wide_q6_k};

#endif
