/* Weights as stored to tiles: W of stored_tiles.h. With AVX512_BF16 words are taken apart by vectors of 512 bits, and two
 * vectors are rounded at once; else, for tests, by those of 256, and one number after the other. */
#ifndef FV_ENGINE_STORED_TILES_EXPAND_H
#define FV_ENGINE_STORED_TILES_EXPAND_H

#include "core/float.h"
#include "engine/gguf.h"
#include "engine/stored/stored_tiles.h"
#include "engine/stored/stored_words.h"
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include "engine/stored/stored_wide.h"
#endif

enum { FV_STORED_TILE_ROW_BYTES = 64 };

/* Elements k and k + 1 of eight rows. */
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
FV_ALWAYS_INLINE void fv_stored_store_pairs(uint8_t *to, __m256 first, __m256 second)
{
    const __m256i in_turn = _mm256_setr_epi16(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    const __m256i words = (__m256i)_mm256_cvtne2ps_pbh(second, first);
    _mm256_storeu_si256((__m256i *)(void *)to, _mm256_permutexvar_epi16(in_turn, words));
}
#else
FV_ALWAYS_INLINE void fv_stored_store_pairs(uint8_t *to, __m256 first, __m256 second)
{
    float low[FV_STORED_ROWS], high[FV_STORED_ROWS];
    uint16_t pairs[FV_STORED_ROWS][2];
    _mm256_storeu_ps(low, first);
    _mm256_storeu_ps(high, second);
    for (int32_t i = 0; i < FV_STORED_ROWS; i++) {
        pairs[i][0] = fv_bf16_of_f32(low[i]);
        pairs[i][1] = fv_bf16_of_f32(high[i]);
    }
    memcpy(to, pairs, sizeof(pairs));
}
#endif

/* Where the pairs of a stripe begin: a tile's rows have those of two. */
static inline uint8_t *fv_stored_pairs_of_stripe(uint8_t *tiles, int64_t row, int64_t count)
{
    return tiles + (size_t)(row / FV_STORED_TILE_ROWS) * fv_stored_tiles_bytes(1, count) +
           (size_t)(row % FV_STORED_TILE_ROWS) * sizeof(uint32_t);
}

/* Where the features of a stripe begin. */
static inline const uint8_t *fv_stored_features_at(const fv_stored_rows *w, int64_t row, int64_t first)
{
    return w->stripes + (size_t)(row / FV_STORED_ROWS) * fv_stored_stripe_bytes(w->layout, w->in_features) +
           fv_stored_stripe_bytes(w->layout, first);
}

/* Columns of a part to their rows of tiles: as many at once as the vectors hold. */
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
enum { FV_STORED_COLUMNS_AT_ONCE = 2 };
typedef fv_stored_wide_format fv_stored_tile_format;
#define FV_STORED_TILE_FORMAT(name) (&fv_stored_wide_of_##name)

static inline const fv_stored_format *fv_stored_format_of(const fv_stored_tile_format *format) { return format->of; }

/* Elements k and k + 1 of the rows of two columns. */
FV_ALWAYS_INLINE void fv_stored_store_wide_pairs(uint8_t *to, __m512 first, __m512 second)
{
    const __m512i in_turn = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                             21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i words = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    const __m512i pairs = _mm512_permutexvar_epi16(in_turn, words);
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_castsi512_si256(pairs));
    _mm256_storeu_si256((__m256i *)(void *)(to + 2 * FV_STORED_TILE_ROW_BYTES), _mm512_extracti64x4_epi64(pairs, 1));
}

FV_ALWAYS_INLINE void fv_stored_expand_columns(uint8_t *to, const uint8_t *words, int32_t part, int32_t column,
                                               fv_stored_scale scale, const fv_stored_tile_format *format)
{
    __m512i integers[4];
    __m512 values[4];
    format->unpack(integers, words, part, column);
    fv_stored_wide_values(values, integers, scale, format);
    fv_stored_store_wide_pairs(to, values[0], values[1]);
    fv_stored_store_wide_pairs(to + FV_STORED_TILE_ROW_BYTES, values[2], values[3]);
}
#else
enum { FV_STORED_COLUMNS_AT_ONCE = 1 };
typedef fv_stored_format fv_stored_tile_format;
#define FV_STORED_TILE_FORMAT(name) (&fv_stored_##name)

static inline const fv_stored_format *fv_stored_format_of(const fv_stored_tile_format *format) { return format; }

FV_ALWAYS_INLINE void fv_stored_expand_columns(uint8_t *to, const uint8_t *words, int32_t part, int32_t column,
                                               fv_stored_scale scale, const fv_stored_tile_format *format)
{
    __m256 values[4];
    fv_stored_values_of_word(values, format->unpack(words, part, column), scale, format->has_minimum);
    fv_stored_store_pairs(to, values[0], values[1]);
    fv_stored_store_pairs(to + FV_STORED_TILE_ROW_BYTES, values[2], values[3]);
}
#endif

FV_ALWAYS_INLINE void fv_stored_expand_words(uint8_t *tiles, const fv_stored_rows *w, int64_t first, int64_t count,
                                             const fv_stored_tile_format *format)
{
    const fv_stored_format *of = fv_stored_format_of(format);
    const int64_t num_blocks = count / (of->num_parts * FV_STORED_X_BLOCK);
    const int32_t part_bytes = of->block_bytes / of->num_parts;
    for (int64_t row = 0; row < w->num_rows; row += FV_STORED_ROWS) {
        uint8_t *to = fv_stored_pairs_of_stripe(tiles, row, count);
        const uint8_t *stripe = fv_stored_features_at(w, row, first);
        for (int64_t block = 0; block < num_blocks; block++, stripe += of->block_bytes) {
            const uint8_t *words = stripe + of->scales_bytes;
            for (int32_t part = 0; part < of->num_parts; part++) {
                fv_stored_prefetch(stripe + part * part_bytes, part_bytes);
                FV_STORED_UNROLL
                for (int32_t column = 0; column < FV_STORED_COLUMNS; column += FV_STORED_COLUMNS_AT_ONCE) {
                    fv_stored_expand_columns(to, words, part, column, of->scale(stripe, words, part, column / 4),
                                             format);
                    to += FV_STORED_COLUMNS_AT_ONCE * 2 * FV_STORED_TILE_ROW_BYTES;
                }
            }
        }
    }
}

FV_ALWAYS_INLINE void fv_stored_expand_floats(uint8_t *tiles, const fv_stored_rows *w, int64_t first, int64_t count,
                                              __m256 (*load)(const uint8_t *stripe))
{
    const int64_t padded = fv_stored_tile_depth(count) * FV_STORED_TILE_DEPTH;
    for (int64_t row = 0; row < w->num_rows; row += FV_STORED_ROWS) {
        uint8_t *to = fv_stored_pairs_of_stripe(tiles, row, count);
        const uint8_t *stripe = fv_stored_features_at(w, row, first);
        for (int64_t k = 0; k < padded; k += 2, to += FV_STORED_TILE_ROW_BYTES) {
            const __m256 zero = _mm256_setzero_ps();
            fv_stored_store_pairs(to, k < count ? load(stripe + k * FV_STORED_SCALE_BYTES) : zero,
                                  k + 1 < count ? load(stripe + (k + 1) * FV_STORED_SCALE_BYTES) : zero);
        }
    }
}

/* Rows of W in any layout, from the first of a group on. */
static void fv_stored_expand_tiles(void *tiles, const fv_stored_rows *w, int64_t first, int64_t count)
{
    switch (w->layout->type) {
    case FV_GGUF_F16: fv_stored_expand_floats(tiles, w, first, count, fv_stored_load_f16); break;
    case FV_GGUF_BF16: fv_stored_expand_floats(tiles, w, first, count, fv_stored_load_bf16); break;
    case FV_GGUF_Q4_0: fv_stored_expand_words(tiles, w, first, count, FV_STORED_TILE_FORMAT(q4_0)); break;
    case FV_GGUF_Q4_1: fv_stored_expand_words(tiles, w, first, count, FV_STORED_TILE_FORMAT(q4_1)); break;
    case FV_GGUF_Q5_0: fv_stored_expand_words(tiles, w, first, count, FV_STORED_TILE_FORMAT(q5_0)); break;
    case FV_GGUF_Q5_1: fv_stored_expand_words(tiles, w, first, count, FV_STORED_TILE_FORMAT(q5_1)); break;
    case FV_GGUF_Q8_0: fv_stored_expand_words(tiles, w, first, count, FV_STORED_TILE_FORMAT(q8_0)); break;
    case FV_GGUF_Q4_K: fv_stored_expand_words(tiles, w, first, count, FV_STORED_TILE_FORMAT(q4_k)); break;
    case FV_GGUF_Q5_K: fv_stored_expand_words(tiles, w, first, count, FV_STORED_TILE_FORMAT(q5_k)); break;
    default: fv_stored_expand_words(tiles, w, first, count, FV_STORED_TILE_FORMAT(q6_k)); break;
    }
}

#endif
