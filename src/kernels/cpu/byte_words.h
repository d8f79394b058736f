/* Numbers of one byte as bf16, which has them all exactly: e4m3, e5m2, int8.
 *
 * The sign is the byte's own, the magnitude (7 bits) is looked up: AVX512_VBMI has instructions that take 64 bytes from a
 * table of 128, one for each half of the bf16. */
#ifndef FV_KERNELS_CPU_BYTE_WORDS_H
#define FV_KERNELS_CPU_BYTE_WORDS_H

#include "kernels/cpu/lanes.h"

/* A magnitude of n bits above its highest, which is worth 2^exponent. */
#define FV_BYTE_NORMAL(m, n, exponent) ((uint32_t)(127 + (exponent)) << 7 | ((uint32_t)(m) - (1u << (n))) << (7 - (n)))

/* An integer of up to 7 bits, times 2^exponent. */
#define FV_BYTE_INTEGER(m, exponent)                   \
    ((m) == 0   ? 0u                                   \
     : (m) < 2  ? FV_BYTE_NORMAL(m, 0, exponent)       \
     : (m) < 4  ? FV_BYTE_NORMAL(m, 1, (exponent) + 1) \
     : (m) < 8  ? FV_BYTE_NORMAL(m, 2, (exponent) + 2) \
     : (m) < 16 ? FV_BYTE_NORMAL(m, 3, (exponent) + 3) \
     : (m) < 32 ? FV_BYTE_NORMAL(m, 4, (exponent) + 4) \
     : (m) < 64 ? FV_BYTE_NORMAL(m, 5, (exponent) + 5) \
                : FV_BYTE_NORMAL(m, 6, (exponent) + 6))

/* The bf16 of a magnitude: denormal numbers are integers. */
#define FV_BYTE_I8(m) FV_BYTE_INTEGER(m, 0)
#define FV_BYTE_E4M3(m) ((m) == 127 ? 0x7fc0u : (m) < 8 ? FV_BYTE_INTEGER(m, -9) : ((uint32_t)(m) + (120u << 3)) << 4)
#define FV_BYTE_E5M2(m)                     \
    ((m) > 124    ? 0x7fc0u                 \
     : (m) == 124 ? 0x7f80u                 \
     : (m) < 4    ? FV_BYTE_INTEGER(m, -16) \
                  : ((uint32_t)(m) + (112u << 2)) << 5)

#define FV_BYTE_LOW(OF, m) (uint8_t)(OF(m) & 0xffu)
#define FV_BYTE_HIGH(OF, m) (uint8_t)(OF(m) >> 8)
#define FV_BYTE_4(HALF, OF, m) HALF(OF, m), HALF(OF, (m) + 1), HALF(OF, (m) + 2), HALF(OF, (m) + 3)
#define FV_BYTE_16(HALF, OF, m) \
    FV_BYTE_4(HALF, OF, m), FV_BYTE_4(HALF, OF, (m) + 4), FV_BYTE_4(HALF, OF, (m) + 8), FV_BYTE_4(HALF, OF, (m) + 12)
#define FV_BYTE_64(HALF, OF, m)                                                              \
    FV_BYTE_16(HALF, OF, m), FV_BYTE_16(HALF, OF, (m) + 16), FV_BYTE_16(HALF, OF, (m) + 32), \
        FV_BYTE_16(HALF, OF, (m) + 48)
#define FV_BYTE_TABLE(OF)                                                        \
    {                                                                            \
        {FV_BYTE_64(FV_BYTE_LOW, OF, 0), FV_BYTE_64(FV_BYTE_LOW, OF, 64)},       \
            {FV_BYTE_64(FV_BYTE_HIGH, OF, 0), FV_BYTE_64(FV_BYTE_HIGH, OF, 64)}, \
    }

/* [low and high byte of the bf16][magnitude] */
typedef struct fv_byte_table {
    _Alignas(64) uint8_t low[128], high[128];
} fv_byte_table;

static const fv_byte_table fv_byte_table_e4m3 = FV_BYTE_TABLE(FV_BYTE_E4M3);
static const fv_byte_table fv_byte_table_e5m2 = FV_BYTE_TABLE(FV_BYTE_E5M2);
static const fv_byte_table fv_byte_table_i8 = FV_BYTE_TABLE(FV_BYTE_I8);

FV_ALWAYS_INLINE const fv_byte_table *fv_byte_table_of(const fv_dtype dtype)
{
    if (dtype == FV_DTYPE_F8_E4M3) return &fv_byte_table_e4m3;
    return dtype == FV_DTYPE_F8_E5M2 ? &fv_byte_table_e5m2 : &fv_byte_table_i8;
}

/* Where column `column` of a line is: in 16 words[0], then words[1]. */
FV_ALWAYS_INLINE int32_t fv_byte_word_place(int32_t column)
{
    return column % 16 / 8 * 32 + column / 16 * 8 + column % 8;
}

#if !defined(__AVX512VBMI__)
/* Out of line: inlined it is hundreds of statements in each kernel. */
static __attribute__((noinline, unused)) void fv_words_of_bytes_plain(uint16_t *words, const uint8_t *bytes,
                                                                      const fv_byte_table *table, int32_t is_i8)
{
    FV_ROLLED
    for (int32_t i = 0; i < 64; i++) {
        const uint32_t sign = bytes[i] & 0x80u, magnitude = is_i8 && sign ? 256u - bytes[i] : bytes[i] & 0x7fu;
        const uint32_t bits = magnitude == 128 ? 0x4300u
                                               : table->low[magnitude] | (uint32_t)table->high[magnitude] << 8;
        words[fv_byte_word_place(i)] = (uint16_t)(bits | sign << 8);
    }
}
#endif

#if defined(__AVX512VBMI__)
/* The bytes of words[0] are the lower halves of the 16 bytes each of `stored`, those of words[1] the upper ones. */
FV_ALWAYS_INLINE void fv_words_of_stored(fv_words words[2], __m512i stored, const fv_dtype dtype)
{
    const fv_byte_table *table = fv_byte_table_of(dtype);
    const __m512i magnitude = dtype == FV_DTYPE_I8 ? _mm512_abs_epi8(stored) : stored; /* bit 7 is not looked at */
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(table->low), magnitude,
                                                 _mm512_load_si512(table->low + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(table->high), magnitude,
                                            _mm512_load_si512(table->high + 64));
    if (dtype == FV_DTYPE_I8) /* -128, whose magnitude has bit 7 */
        high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(magnitude), _mm512_set1_epi8(0x43));
    high = _mm512_ternarylogic_epi64(high, stored, _mm512_set1_epi8((char)0x80), 0xf8); /* a | (b & c) */
    words[0] = (fv_words)_mm512_unpacklo_epi8(low, high);
    words[1] = (fv_words)_mm512_unpackhi_epi8(low, high);
}
#endif

/* The 64 columns of a line as two vectors: of each 16 columns the first 8 are in words[0], the others in words[1]. */
FV_ALWAYS_INLINE void fv_words_of_bytes(fv_words words[2], const void *from, const fv_dtype dtype)
{
#if defined(__AVX512VBMI__)
    fv_words_of_stored(words, _mm512_loadu_si512(from), dtype);
#else
    uint16_t plain[64];
    fv_words_of_bytes_plain(plain, from, fv_byte_table_of(dtype), dtype == FV_DTYPE_I8);
    words[0] = fv_words_load(plain);
    words[1] = fv_words_load(plain + 32);
#endif
}

/* The same in their order: columns 0 to 31, 32 to 63. */
FV_ALWAYS_INLINE void fv_words_of_line(fv_words words[2], const void *from, const fv_dtype dtype)
{
#if defined(__AVX512VBMI__)
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    fv_words_of_stored(words, _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from)), dtype);
#else
    uint16_t plain[64], line[64];
    fv_words_of_bytes_plain(plain, from, fv_byte_table_of(dtype), dtype == FV_DTYPE_I8);
    for (int32_t i = 0; i < 64; i++) line[i] = plain[fv_byte_word_place(i)];
    words[0] = fv_words_load(line);
    words[1] = fv_words_load(line + 32);
#endif
}

#endif
