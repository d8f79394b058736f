/* Words of stripes taken apart with AVX2: a lane is a row of W. A word of a row holds four neighbouring values as bytes,
 * or nibbles, of which vpmaddwd multiplies two 16-bit values at a time:
 *
 *   word   v0 v1 v2 v3     even   v0 .. v2 ..     odd   v1 .. v3 .. */
#ifndef FV_ENGINE_STORED_WORDS_H
#define FV_ENGINE_STORED_WORDS_H

#include <immintrin.h>
#include <string.h>

#include "core/compiler.h"
#include "engine/stored/stored.h"
#include "engine/stored/stored_unroll.h"

enum {
    FV_STORED_COLUMNS = 8, /* a column is a word of each row */
    FV_STORED_WORD_BYTES = 32,
    FV_STORED_SCALE_BYTES = 16, /* of a number of 16 bits of each row */
    FV_STORED_LINE_FLOATS = FV_CACHE_LINE / FV_STORED_SCALE_BYTES,
    FV_STORED_AHEAD_BYTES = 2048,
};

typedef struct fv_stored_pair {
    __m256i even, odd;
} fv_stored_pair;

/* Of 32 values, or of 16 where a type has scales for so few. */
typedef struct fv_stored_scale {
    __m256 scale, minimum;
} fv_stored_scale;

typedef struct fv_stored_format {
    int32_t scales_bytes;  /* of a stripe's block, in front of its words */
    int32_t block_bytes;   /* of a stripe's block */
    int32_t num_parts;     /* of 32 values in a block */
    int32_t scale_columns; /* that share a scale: 8, or 4 */
    bool has_minimum;
    fv_stored_scale (*scale)(const uint8_t *scales, const uint8_t *words, int32_t part, int32_t half);
    fv_stored_pair (*unpack)(const uint8_t *words, int32_t part, int32_t column);
} fv_stored_format;

/* Asks for `bytes` of what comes after `from`, further ahead than the hardware does by itself: with one thread 1.3 times as fast
 * from memory. */
FV_ALWAYS_INLINE void fv_stored_prefetch(const uint8_t *from, int32_t bytes)
{
    const char *ahead = (const char *)from + FV_STORED_AHEAD_BYTES;
    for (int32_t at = 0; at < bytes; at += FV_CACHE_LINE) _mm_prefetch(ahead + at, _MM_HINT_T0);
}

/* --- loads ---------------------------------------------------------------------------------------- */

static inline __m256i fv_stored_load_words(const uint8_t *words, int32_t index)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)(words + index * FV_STORED_WORD_BYTES));
}

static inline __m256 fv_stored_load_scales(const uint8_t *scales, int32_t index)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(scales + index * FV_STORED_SCALE_BYTES)));
}

static inline __m256i fv_stored_shift_right(__m256i words, int32_t count)
{
    return _mm256_srlv_epi32(words, _mm256_set1_epi32(count));
}

static inline __m256i fv_stored_shift_left(__m256i words, int32_t count)
{
    return _mm256_sllv_epi32(words, _mm256_set1_epi32(count));
}

static inline fv_stored_pair fv_stored_pair_of_unsigned(__m256i bytes)
{
    return (fv_stored_pair){_mm256_and_si256(bytes, _mm256_set1_epi16(0x00ff)), _mm256_srli_epi16(bytes, 8)};
}

static inline fv_stored_pair fv_stored_pair_of_signed(__m256i bytes)
{
    return (fv_stored_pair){_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
}

static inline __m256i fv_stored_low_nibbles(__m256i words) { return _mm256_and_si256(words, _mm256_set1_epi8(0x0f)); }

/* The lower nibbles of bytes. */
static inline fv_stored_pair fv_stored_pair_of_nibbles(__m256i bytes)
{
    const __m256i mask = _mm256_set1_epi16(0x000f);
    return (fv_stored_pair){_mm256_and_si256(bytes, mask), _mm256_and_si256(_mm256_srli_epi16(bytes, 8), mask)};
}

/* --- blocks of 32 --------------------------------------------------------------------------------- */

static inline fv_stored_scale fv_stored_scale_q4_0(const uint8_t *scales, const uint8_t *words, int32_t part,
                                                   int32_t half)
{
    (void)words, (void)part, (void)half;
    const __m256 scale = fv_stored_load_scales(scales, 0);
    return (fv_stored_scale){scale, _mm256_mul_ps(scale, _mm256_set1_ps(-8.0f))};
}

static inline fv_stored_scale fv_stored_scale_q5_0(const uint8_t *scales, const uint8_t *words, int32_t part,
                                                   int32_t half)
{
    (void)words, (void)part, (void)half;
    const __m256 scale = fv_stored_load_scales(scales, 0);
    return (fv_stored_scale){scale, _mm256_mul_ps(scale, _mm256_set1_ps(-16.0f))};
}

static inline fv_stored_scale fv_stored_scale_and_minimum(const uint8_t *scales, const uint8_t *words, int32_t part,
                                                          int32_t half)
{
    (void)words, (void)part, (void)half;
    return (fv_stored_scale){fv_stored_load_scales(scales, 0), fv_stored_load_scales(scales, 1)};
}

static inline fv_stored_scale fv_stored_scale_q8_0(const uint8_t *scales, const uint8_t *words, int32_t part,
                                                   int32_t half)
{
    (void)words, (void)part, (void)half;
    return (fv_stored_scale){fv_stored_load_scales(scales, 0), _mm256_setzero_ps()};
}

/* Low nibbles are the first four columns, high nibbles the others. */
static inline __m256i fv_stored_nibbles_of_block(const uint8_t *words, int32_t column)
{
    const __m256i both = fv_stored_load_words(words, column % 4);
    return fv_stored_low_nibbles(column < 4 ? both : _mm256_srli_epi32(both, 4));
}

static inline fv_stored_pair fv_stored_unpack_nibbles(const uint8_t *words, int32_t part, int32_t column)
{
    (void)part;
    const __m256i both = fv_stored_load_words(words, column % 4);
    if (column < 4) return fv_stored_pair_of_nibbles(both);
    return (fv_stored_pair){_mm256_and_si256(_mm256_srli_epi16(both, 4), _mm256_set1_epi16(0x000f)),
                            _mm256_srli_epi16(both, 12)};
}

/* Bit i of the first word is the fifth bit of value i. */
static inline fv_stored_pair fv_stored_unpack_q5(const uint8_t *words, int32_t part, int32_t column)
{
    (void)part;
    const char at = (char)(column / 2);
    const __m256i byte_of = _mm256_setr_epi8(at, at, at, at, at + 4, at + 4, at + 4, at + 4, at + 8, at + 8, at + 8,
                                             at + 8, at + 12, at + 12, at + 12, at + 12, at, at, at, at, at + 4, at + 4,
                                             at + 4, at + 4, at + 8, at + 8, at + 8, at + 8, at + 12, at + 12, at + 12,
                                             at + 12);
    const __m256i bit_of = _mm256_set1_epi32(column % 2 ? (int32_t)0x80402010u : 0x08040201);
    const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(fv_stored_load_words(words, 0), byte_of), bit_of);
    const __m256i fifth = _mm256_and_si256(_mm256_cmpeq_epi8(bits, bit_of), _mm256_set1_epi8(0x10));
    return fv_stored_pair_of_unsigned(
        _mm256_or_si256(fv_stored_nibbles_of_block(words + FV_STORED_WORD_BYTES, column), fifth));
}

static inline fv_stored_pair fv_stored_unpack_q8_0(const uint8_t *words, int32_t part, int32_t column)
{
    (void)part;
    return fv_stored_pair_of_signed(fv_stored_load_words(words, column));
}

/* --- blocks of 256: 8 parts of 32 ----------------------------------------------------------------- */

/* Byte `index` of each word. */
static inline __m256i fv_stored_byte_of_words(__m256i words, int32_t index, int32_t mask)
{
    return _mm256_and_si256(fv_stored_shift_right(words, 8 * index), _mm256_set1_epi32(mask));
}

/* Scale and minimum of 6 bits, as dequantize.c's part_scale has them; 4 of their bytes are a word. */
static inline fv_stored_scale fv_stored_scale_of_part(const uint8_t *scales, const uint8_t *words, int32_t part,
                                                      int32_t half)
{
    (void)half;
    const __m256i a = fv_stored_load_words(words, 0), b = fv_stored_load_words(words, 1),
                  c = fv_stored_load_words(words, 2);
    __m256i scale, minimum;
    if (part < 4) {
        scale = fv_stored_byte_of_words(a, part, 63);
        minimum = fv_stored_byte_of_words(b, part, 63);
    } else {
        const __m256i low = fv_stored_byte_of_words(c, part - 4, 255);
        scale = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(15)),
                                _mm256_srli_epi32(fv_stored_byte_of_words(a, part - 4, 0xc0), 2));
        minimum = _mm256_or_si256(_mm256_srli_epi32(low, 4),
                                  _mm256_srli_epi32(fv_stored_byte_of_words(b, part - 4, 0xc0), 2));
    }
    const __m256 no_sign = _mm256_set1_ps(-0.0f);
    return (fv_stored_scale){
        _mm256_mul_ps(fv_stored_load_scales(scales, 0), _mm256_cvtepi32_ps(scale)),
        _mm256_mul_ps(_mm256_xor_ps(fv_stored_load_scales(scales, 1), no_sign), _mm256_cvtepi32_ps(minimum))};
}

/* Two parts share 8 columns: one has the low nibbles, the next the high ones. */
static inline __m256i fv_stored_nibbles_of_part(const uint8_t *words, int32_t part, int32_t column)
{
    return fv_stored_low_nibbles(
        fv_stored_shift_right(fv_stored_load_words(words, part / 2 * FV_STORED_COLUMNS + column), part % 2 * 4));
}

static inline fv_stored_pair fv_stored_unpack_q4_k(const uint8_t *words, int32_t part, int32_t column)
{
    const __m256i both = fv_stored_load_words(words, 3 + part / 2 * FV_STORED_COLUMNS + column);
    return fv_stored_pair_of_nibbles(fv_stored_shift_right(both, part % 2 * 4));
}

static inline fv_stored_pair fv_stored_unpack_q5_k(const uint8_t *words, int32_t part, int32_t column)
{
    const __m256i bits = fv_stored_shift_left(fv_stored_shift_right(fv_stored_load_words(words, 3 + column), part), 4);
    const __m256i fifth = _mm256_and_si256(bits, _mm256_set1_epi8(0x10));
    return fv_stored_pair_of_unsigned(
        _mm256_or_si256(fv_stored_nibbles_of_part(words + 11 * FV_STORED_WORD_BYTES, part, column), fifth));
}

/* 16 scales of 8 bits behind the 48 words of values. */
static inline fv_stored_scale fv_stored_scale_q6_k(const uint8_t *scales, const uint8_t *words, int32_t part,
                                                   int32_t half)
{
    const __m256i bytes = fv_stored_load_words(words, 48 + part / 2);
    const __m256i scale = _mm256_srai_epi32(fv_stored_shift_left(bytes, 24 - 8 * (part % 2 * 2 + half)), 24);
    return (fv_stored_scale){_mm256_mul_ps(fv_stored_load_scales(scales, 0), _mm256_cvtepi32_ps(scale)),
                             _mm256_setzero_ps()};
}

static inline fv_stored_pair fv_stored_unpack_q6_k(const uint8_t *words, int32_t part, int32_t column)
{
    const int32_t half = part / 4, p = part % 4;
    const __m256i low = fv_stored_low_nibbles(
        fv_stored_shift_right(fv_stored_load_words(words, half * 16 + p % 2 * FV_STORED_COLUMNS + column), p / 2 * 4));
    const __m256i pairs = fv_stored_shift_right(fv_stored_load_words(words, 32 + half * FV_STORED_COLUMNS + column),
                                                2 * p);
    const __m256i high = _mm256_slli_epi32(_mm256_and_si256(pairs, _mm256_set1_epi8(3)), 4);
    return fv_stored_pair_of_signed(_mm256_sub_epi8(_mm256_or_si256(low, high), _mm256_set1_epi8(32)));
}

/* Four values of a word. */
FV_ALWAYS_INLINE void fv_stored_values_of_word(__m256 *values, fv_stored_pair w, fv_stored_scale scale,
                                               bool has_minimum)
{
    const __m256i integers[4] = {
        _mm256_srai_epi32(_mm256_slli_epi32(w.even, 16), 16),
        _mm256_srai_epi32(_mm256_slli_epi32(w.odd, 16), 16),
        _mm256_srai_epi32(w.even, 16),
        _mm256_srai_epi32(w.odd, 16),
    };
    FV_STORED_UNROLL
    for (int32_t i = 0; i < 4; i++) {
        values[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(integers[i]), scale.scale);
        if (has_minimum) values[i] = _mm256_add_ps(values[i], scale.minimum);
    }
}

/* --- floats ------------------------------------------------------------------------------------------ */

static inline __m256 fv_stored_load_f16(const uint8_t *stripe) { return fv_stored_load_scales(stripe, 0); }

static inline __m256 fv_stored_load_bf16(const uint8_t *stripe)
{
    const __m128i stored = _mm_loadu_si128((const __m128i *)(const void *)stripe);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(stored), 16));
}

/* --- the formats ------------------------------------------------------------------------------------- */

static const fv_stored_format fv_stored_q4_0 = {16, 8 * 18, 1, 8, true, fv_stored_scale_q4_0, fv_stored_unpack_nibbles};
static const fv_stored_format fv_stored_q4_1 = {
    32, 8 * 20, 1, 8, true, fv_stored_scale_and_minimum, fv_stored_unpack_nibbles};
static const fv_stored_format fv_stored_q5_0 = {16, 8 * 22, 1, 8, true, fv_stored_scale_q5_0, fv_stored_unpack_q5};
static const fv_stored_format fv_stored_q5_1 = {
    32, 8 * 24, 1, 8, true, fv_stored_scale_and_minimum, fv_stored_unpack_q5};
static const fv_stored_format fv_stored_q8_0 = {16, 8 * 34, 1, 8, false, fv_stored_scale_q8_0, fv_stored_unpack_q8_0};
static const fv_stored_format fv_stored_q4_k = {
    32, 8 * 144, 8, 8, true, fv_stored_scale_of_part, fv_stored_unpack_q4_k};
static const fv_stored_format fv_stored_q5_k = {
    32, 8 * 176, 8, 8, true, fv_stored_scale_of_part, fv_stored_unpack_q5_k};
static const fv_stored_format fv_stored_q6_k = {16, 8 * 210, 8, 4, false, fv_stored_scale_q6_k, fv_stored_unpack_q6_k};

#endif
