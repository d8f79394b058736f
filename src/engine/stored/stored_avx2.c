/* AVX2: a lane is a row of W. A word of a row holds four neighbouring values as bytes, or nibbles; vpmaddwd multiplies
 * two 16-bit values with two of X and adds both products, so a word is taken apart into its even and its odd ones:
 *
 *   word   v0 v1 v2 v3     even   v0 .. v2 ..     odd   v1 .. v3 ..     X   x0 x2, x1 x3 in all lanes
 *
 * For 8 rows and 32 values that is 16 vpmaddwd and 16 additions for each row of X, then one conversion and one FMA;
 * taking words apart costs 24 to 80 instructions, once for all rows of X. Sums stay below 2^31: the largest product
 * is 128 x 32767, of which 32 are added.
 *
 * On Zen 3 (3.1 GHz) 32 weights of Q4_1 take one row of X 0.8 to 1 ns, about what their 20 bytes take from memory. */
#include "engine/stored/stored.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>
#include <string.h>

#include "core/compiler.h"
#include "core/float.h"
#include "engine/gguf.h"

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

/* Sums grow one by one: as a tree they would not fit the registers. */
#define KEEP_ORDER(vector) __asm__("" : "+x"(vector))

enum {
    lanes = 8,
    columns = 8,
    word_bytes = 32,
    scale_bytes = 16,
    max_width = 2,
    prefetch_distance = 2048
}; /* a column is a word of each row */

typedef struct word_pair {
    __m256i even, odd;
} word_pair;

/* Of 32 values, or of 16 where a type has scales for so few. */
typedef struct part_scale {
    __m256 scale, minimum;
} part_scale;

typedef struct format {
    int32_t scales_bytes;  /* of a stripe's block, in front of its words */
    int32_t block_bytes;   /* of a stripe's block */
    int32_t num_parts;     /* of 32 values in a block */
    int32_t scale_columns; /* that share a scale: 8, or 4 */
    bool has_minimum;
    part_scale (*scale)(const uint8_t *scales, const uint8_t *words, int32_t part, int32_t half);
    word_pair (*unpack)(const uint8_t *words, int32_t part, int32_t column);
} format;

/* --- loads ---------------------------------------------------------------------------------------- */

static inline __m256i load_words(const uint8_t *words, int32_t index)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)(words + index * word_bytes));
}

static inline __m256 load_scales(const uint8_t *scales, int32_t index)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(scales + index * scale_bytes)));
}

static inline __m256i splat_pair(const int16_t *pair)
{
    int32_t both;
    memcpy(&both, pair, sizeof(both));
    return _mm256_set1_epi32(both);
}

static inline __m256i shift_right(__m256i words, int32_t count)
{
    return _mm256_srl_epi32(words, _mm_cvtsi32_si128(count));
}

static inline __m256i shift_left(__m256i words, int32_t count)
{
    return _mm256_sll_epi32(words, _mm_cvtsi32_si128(count));
}

static inline word_pair pair_of_unsigned(__m256i bytes)
{
    return (word_pair){_mm256_and_si256(bytes, _mm256_set1_epi16(0x00ff)), _mm256_srli_epi16(bytes, 8)};
}

static inline word_pair pair_of_signed(__m256i bytes)
{
    return (word_pair){_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
}

static inline __m256i low_nibbles(__m256i words) { return _mm256_and_si256(words, _mm256_set1_epi8(0x0f)); }

/* --- blocks of 32 --------------------------------------------------------------------------------- */

static inline part_scale scale_q4_0(const uint8_t *scales, const uint8_t *words, int32_t part, int32_t half)
{
    (void)words, (void)part, (void)half;
    const __m256 scale = load_scales(scales, 0);
    return (part_scale){scale, _mm256_mul_ps(scale, _mm256_set1_ps(-8.0f))};
}

static inline part_scale scale_q5_0(const uint8_t *scales, const uint8_t *words, int32_t part, int32_t half)
{
    (void)words, (void)part, (void)half;
    const __m256 scale = load_scales(scales, 0);
    return (part_scale){scale, _mm256_mul_ps(scale, _mm256_set1_ps(-16.0f))};
}

static inline part_scale scale_and_minimum(const uint8_t *scales, const uint8_t *words, int32_t part, int32_t half)
{
    (void)words, (void)part, (void)half;
    return (part_scale){load_scales(scales, 0), load_scales(scales, 1)};
}

static inline part_scale scale_q8_0(const uint8_t *scales, const uint8_t *words, int32_t part, int32_t half)
{
    (void)words, (void)part, (void)half;
    return (part_scale){load_scales(scales, 0), _mm256_setzero_ps()};
}

/* Low nibbles are the first four columns, high nibbles the others. */
static inline __m256i nibbles_of_block(const uint8_t *words, int32_t column)
{
    const __m256i both = load_words(words, column % 4);
    return low_nibbles(column < 4 ? both : _mm256_srli_epi32(both, 4));
}

static inline word_pair unpack_nibbles(const uint8_t *words, int32_t part, int32_t column)
{
    (void)part;
    const __m256i both = load_words(words, column % 4), mask = _mm256_set1_epi16(0x000f);
    if (column < 4)
        return (word_pair){_mm256_and_si256(both, mask), _mm256_and_si256(_mm256_srli_epi16(both, 8), mask)};
    return (word_pair){_mm256_and_si256(_mm256_srli_epi16(both, 4), mask), _mm256_srli_epi16(both, 12)};
}

/* Bit i of the first word is the fifth bit of value i. */
static inline word_pair unpack_q5(const uint8_t *words, int32_t part, int32_t column)
{
    (void)part;
    const char at = (char)(column / 2);
    const __m256i byte_of = _mm256_setr_epi8(at, at, at, at, at + 4, at + 4, at + 4, at + 4, at + 8, at + 8, at + 8,
                                             at + 8, at + 12, at + 12, at + 12, at + 12, at, at, at, at, at + 4, at + 4,
                                             at + 4, at + 4, at + 8, at + 8, at + 8, at + 8, at + 12, at + 12, at + 12,
                                             at + 12);
    const __m256i bit_of = _mm256_set1_epi32(column % 2 ? (int32_t)0x80402010u : 0x08040201);
    const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(load_words(words, 0), byte_of), bit_of);
    const __m256i fifth = _mm256_and_si256(_mm256_cmpeq_epi8(bits, bit_of), _mm256_set1_epi8(0x10));
    return pair_of_unsigned(_mm256_or_si256(nibbles_of_block(words + word_bytes, column), fifth));
}

static inline word_pair unpack_q8_0(const uint8_t *words, int32_t part, int32_t column)
{
    (void)part;
    return pair_of_signed(load_words(words, column));
}

/* --- blocks of 256: 8 parts of 32 ----------------------------------------------------------------- */

/* Byte `index` of each word. */
static inline __m256i byte_of_words(__m256i words, int32_t index, int32_t mask)
{
    return _mm256_and_si256(shift_right(words, 8 * index), _mm256_set1_epi32(mask));
}

/* Scale and minimum of 6 bits, as dequantize.c's part_scale has them; 4 of their bytes are a word. */
static inline part_scale scale_of_part(const uint8_t *scales, const uint8_t *words, int32_t part, int32_t half)
{
    (void)half;
    const __m256i a = load_words(words, 0), b = load_words(words, 1), c = load_words(words, 2);
    __m256i scale, minimum;
    if (part < 4) {
        scale = byte_of_words(a, part, 63);
        minimum = byte_of_words(b, part, 63);
    } else {
        const __m256i low = byte_of_words(c, part - 4, 255);
        scale = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(15)),
                                _mm256_srli_epi32(byte_of_words(a, part - 4, 0xc0), 2));
        minimum = _mm256_or_si256(_mm256_srli_epi32(low, 4), _mm256_srli_epi32(byte_of_words(b, part - 4, 0xc0), 2));
    }
    const __m256 no_sign = _mm256_set1_ps(-0.0f);
    return (part_scale){_mm256_mul_ps(load_scales(scales, 0), _mm256_cvtepi32_ps(scale)),
                        _mm256_mul_ps(_mm256_xor_ps(load_scales(scales, 1), no_sign), _mm256_cvtepi32_ps(minimum))};
}

/* Two parts share 8 columns: one has the low nibbles, the next the high ones. */
static inline __m256i nibbles_of_part(const uint8_t *words, int32_t part, int32_t column)
{
    return low_nibbles(shift_right(load_words(words, part / 2 * columns + column), part % 2 * 4));
}

static inline word_pair unpack_q4_k(const uint8_t *words, int32_t part, int32_t column)
{
    return pair_of_unsigned(nibbles_of_part(words + 3 * word_bytes, part, column));
}

static inline word_pair unpack_q5_k(const uint8_t *words, int32_t part, int32_t column)
{
    const __m256i bits = shift_left(shift_right(load_words(words, 3 + column), part), 4);
    const __m256i fifth = _mm256_and_si256(bits, _mm256_set1_epi8(0x10));
    return pair_of_unsigned(_mm256_or_si256(nibbles_of_part(words + 11 * word_bytes, part, column), fifth));
}

/* 16 scales of 8 bits behind the 48 words of values. */
static inline part_scale scale_q6_k(const uint8_t *scales, const uint8_t *words, int32_t part, int32_t half)
{
    const __m256i bytes = load_words(words, 48 + part / 2);
    const __m256i scale = _mm256_srai_epi32(shift_left(bytes, 24 - 8 * (part % 2 * 2 + half)), 24);
    return (part_scale){_mm256_mul_ps(load_scales(scales, 0), _mm256_cvtepi32_ps(scale)), _mm256_setzero_ps()};
}

static inline word_pair unpack_q6_k(const uint8_t *words, int32_t part, int32_t column)
{
    const int32_t half = part / 4, p = part % 4;
    const __m256i low = low_nibbles(shift_right(load_words(words, half * 16 + p % 2 * columns + column), p / 2 * 4));
    const __m256i pairs = shift_right(load_words(words, 32 + half * columns + column), 2 * p);
    const __m256i high = _mm256_slli_epi32(_mm256_and_si256(pairs, _mm256_set1_epi8(3)), 4);
    return pair_of_signed(_mm256_sub_epi8(_mm256_or_si256(low, high), _mm256_set1_epi8(32)));
}

/* --- stripes -------------------------------------------------------------------------------------- */

/* Up to four sums of 8 rows; y has room for those rows that are there. */
FV_ALWAYS_INLINE void store_sums(float *y, int64_t y_stride, const __m256 *sums, int32_t num_x, int64_t num_rows)
{
    for (int32_t i = 0; i < num_x; i++, y += y_stride) {
        if (num_rows >= lanes) {
            _mm256_storeu_ps(y, sums[i]);
            continue;
        }
        float values[lanes];
        _mm256_storeu_ps(values, sums[i]);
        memcpy(y, values, (size_t)num_rows * sizeof(*y));
    }
}

/* 32 values of the rows of `width` stripes, `stripe_bytes` apart; `block` is that of X. */
FV_ALWAYS_INLINE void add_part(__m256 sums[][FV_STORED_MAX_X], const fv_stored_x *x, int32_t num_x, int64_t block,
                               const uint8_t *stripes, size_t stripe_bytes, int32_t width, int32_t part,
                               const format *of)
{
    UNROLL
    for (int32_t first = 0; first < columns; first += of->scale_columns) {
        __m256i dots[max_width][FV_STORED_MAX_X];
        UNROLL
        for (int32_t column = first; column < first + of->scale_columns; column++) {
            word_pair w[max_width];
            UNROLL
            for (int32_t j = 0; j < width; j++) {
                w[j] = of->unpack(stripes + (size_t)j * stripe_bytes + of->scales_bytes, part, column);
            }
            UNROLL
            for (int32_t i = 0; i < num_x; i++) {
                const int16_t *integers = x[i].integers + block * FV_STORED_X_BLOCK + column * 4;
                const __m256i even = splat_pair(integers), odd = splat_pair(integers + 2);
                UNROLL
                for (int32_t j = 0; j < width; j++) {
                    const __m256i both = _mm256_add_epi32(_mm256_madd_epi16(w[j].even, even),
                                                          _mm256_madd_epi16(w[j].odd, odd));
                    dots[j][i] = column == first ? both : _mm256_add_epi32(dots[j][i], both);
                    KEEP_ORDER(dots[j][i]);
                }
            }
        }
        UNROLL
        for (int32_t j = 0; j < width; j++) {
            const uint8_t *scales = stripes + (size_t)j * stripe_bytes;
            const part_scale scale = of->scale(scales, scales + of->scales_bytes, part, first / 4);
            UNROLL
            for (int32_t i = 0; i < num_x; i++) {
                const __m256 factor = _mm256_mul_ps(scale.scale, _mm256_broadcast_ss(x[i].scales + block));
                sums[j][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[j][i]), factor, sums[j][i]);
                if (!of->has_minimum) continue;
                sums[j][i] = _mm256_fmadd_ps(scale.minimum, _mm256_broadcast_ss(x[i].sums + block), sums[j][i]);
            }
        }
    }
}

/* Reads further ahead than the hardware does by itself: 1.3 times as fast from memory with one thread. */
FV_ALWAYS_INLINE void prefetch_block(const uint8_t *block, int32_t bytes)
{
    for (int32_t at = 0; at < bytes; at += FV_CACHE_LINE) {
        _mm_prefetch((const char *)block + prefetch_distance + at, _MM_HINT_T0);
    }
}

FV_ALWAYS_INLINE void multiply_width(float *y, int64_t y_stride, const fv_stored_x *x, int32_t num_x,
                                     const fv_stored_rows *w, int64_t row, int32_t width, const format *of)
{
    const int64_t num_blocks = w->in_features / (of->num_parts * FV_STORED_X_BLOCK);
    const size_t stripe_bytes = (size_t)(num_blocks * of->block_bytes);
    const uint8_t *stripes = w->stripes + (size_t)(row / lanes) * stripe_bytes;
    __m256 sums[max_width][FV_STORED_MAX_X];
    UNROLL
    for (int32_t j = 0; j < width; j++) {
        UNROLL
        for (int32_t i = 0; i < num_x; i++) sums[j][i] = _mm256_setzero_ps();
    }
    for (int64_t block = 0; block < num_blocks; block++, stripes += of->block_bytes) {
        if (width == 1) prefetch_block(stripes, of->block_bytes);
        for (int32_t part = 0; part < of->num_parts; part++) {
            add_part(sums, x, num_x, block * of->num_parts + part, stripes, stripe_bytes, width, part, of);
        }
    }
    UNROLL
    for (int32_t j = 0; j < width; j++) {
        store_sums(y + row + j * lanes, y_stride, sums[j], num_x, w->num_rows - row - j * lanes);
    }
}

/* One stripe at a time for one row of X, which goes through memory in order as fast as that delivers; two for several,
 * as then each load of X serves both. */
FV_ALWAYS_INLINE void multiply_stripes(float *y, int64_t y_stride, const fv_stored_x *x, int32_t num_x,
                                       const fv_stored_rows *w, const format *of)
{
    const int32_t width = num_x == 1 ? 1 : max_width;
    int64_t row = 0;
    for (; row + (width - 1) * lanes < w->num_rows; row += width * lanes) {
        multiply_width(y, y_stride, x, num_x, w, row, width, of);
    }
    if (row < w->num_rows) multiply_width(y, y_stride, x, num_x, w, row, 1, of);
}

FV_ALWAYS_INLINE void multiply_floats(float *y, int64_t y_stride, const fv_stored_x *x, int32_t num_x,
                                      const fv_stored_rows *w, __m256 (*load)(const uint8_t *stripe))
{
    const uint8_t *stripe = w->stripes;
    for (int64_t row = 0; row < w->num_rows; row += lanes) {
        __m256 sums[FV_STORED_MAX_X][2]; /* two chains: an FMA need not wait for the one before it */
        UNROLL
        for (int32_t i = 0; i < num_x; i++) sums[i][0] = sums[i][1] = _mm256_setzero_ps();
        int64_t k = 0;
        for (; k + 2 <= w->in_features; k += 2, stripe += 2 * scale_bytes) {
            const __m256 first = load(stripe), second = load(stripe + scale_bytes);
            UNROLL
            for (int32_t i = 0; i < num_x; i++) {
                sums[i][0] = _mm256_fmadd_ps(first, _mm256_broadcast_ss(x[i].values + k), sums[i][0]);
                sums[i][1] = _mm256_fmadd_ps(second, _mm256_broadcast_ss(x[i].values + k + 1), sums[i][1]);
            }
        }
        __m256 totals[FV_STORED_MAX_X];
        UNROLL
        for (int32_t i = 0; i < num_x; i++) {
            totals[i] = _mm256_add_ps(sums[i][0], sums[i][1]);
            if (k == w->in_features) continue;
            totals[i] = _mm256_fmadd_ps(load(stripe), _mm256_broadcast_ss(x[i].values + k), totals[i]);
        }
        if (k < w->in_features) stripe += scale_bytes;
        store_sums(y + row, y_stride, totals, num_x, w->num_rows - row);
    }
}

static inline __m256 load_f16(const uint8_t *stripe) { return load_scales(stripe, 0); }

static inline __m256 load_bf16(const uint8_t *stripe)
{
    const __m128i stored = _mm_loadu_si128((const __m128i *)(const void *)stripe);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(stored), 16));
}

/* --- expanding ------------------------------------------------------------------------------------- */

/* Rows become columns. */
FV_ALWAYS_INLINE void transpose(__m256 *m)
{
    __m256 pairs[lanes], quads[lanes];
    UNROLL
    for (int32_t i = 0; i < lanes; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(m[i], m[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(m[i], m[i + 1]);
    }
    UNROLL
    for (int32_t i = 0; i < lanes; i += 4) {
        quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], _MM_SHUFFLE(1, 0, 1, 0));
        quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], _MM_SHUFFLE(3, 2, 3, 2));
        quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], _MM_SHUFFLE(1, 0, 1, 0));
        quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], _MM_SHUFFLE(3, 2, 3, 2));
    }
    UNROLL
    for (int32_t i = 0; i < 4; i++) {
        m[i] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
        m[i + 4] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
    }
}

/* Eight values of each of eight rows; those rows that are there. */
FV_ALWAYS_INLINE void store_transposed(float *out, int64_t row_stride, __m256 *values, int64_t num_rows)
{
    transpose(values);
    for (int64_t row = 0; row < fv_min_i64(num_rows, lanes); row++) {
        _mm256_storeu_ps(out + row * row_stride, values[row]);
    }
}

/* Four values of a word. */
FV_ALWAYS_INLINE void values_of_word(__m256 *values, word_pair w, part_scale scale, bool has_minimum)
{
    const __m256i integers[4] = {
        _mm256_srai_epi32(_mm256_slli_epi32(w.even, 16), 16),
        _mm256_srai_epi32(_mm256_slli_epi32(w.odd, 16), 16),
        _mm256_srai_epi32(w.even, 16),
        _mm256_srai_epi32(w.odd, 16),
    };
    UNROLL
    for (int32_t i = 0; i < 4; i++) {
        values[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(integers[i]), scale.scale);
        if (has_minimum) values[i] = _mm256_add_ps(values[i], scale.minimum);
    }
}

FV_ALWAYS_INLINE void expand_stripes(float *out, const fv_stored_rows *w, const format *of)
{
    const int64_t block_values = of->num_parts * FV_STORED_X_BLOCK;
    const uint8_t *stripe = w->stripes;
    for (int64_t row = 0; row < w->num_rows; row += lanes, out += lanes * w->in_features) {
        for (int64_t first = 0; first < w->in_features; first += block_values, stripe += of->block_bytes) {
            for (int32_t part = 0; part < of->num_parts; part++) {
                float *to = out + first + part * FV_STORED_X_BLOCK;
                UNROLL
                for (int32_t column = 0; column < columns; column += 2, to += lanes) {
                    const uint8_t *words = stripe + of->scales_bytes;
                    const part_scale scale = of->scale(stripe, words, part, column / 4);
                    __m256 values[lanes];
                    values_of_word(values, of->unpack(words, part, column), scale, of->has_minimum);
                    values_of_word(values + 4, of->unpack(words, part, column + 1), scale, of->has_minimum);
                    store_transposed(to, w->in_features, values, w->num_rows - row);
                }
            }
        }
    }
}

FV_ALWAYS_INLINE void expand_floats(float *out, const fv_stored_rows *w, __m256 (*load)(const uint8_t *stripe))
{
    const uint8_t *stripe = w->stripes;
    for (int64_t row = 0; row < w->num_rows; row += lanes, out += lanes * w->in_features) {
        int64_t k = 0;
        for (; k + lanes <= w->in_features; k += lanes, stripe += lanes * scale_bytes) {
            __m256 values[lanes];
            UNROLL
            for (int32_t i = 0; i < lanes; i++) values[i] = load(stripe + i * scale_bytes);
            store_transposed(out + k, w->in_features, values, w->num_rows - row);
        }
        for (; k < w->in_features; k++, stripe += scale_bytes) {
            float values[lanes];
            _mm256_storeu_ps(values, load(stripe));
            for (int64_t i = 0; i < fv_min_i64(lanes, w->num_rows - row); i++) out[i * w->in_features + k] = values[i];
        }
    }
}

/* --- the formats ----------------------------------------------------------------------------------- */

/* A function for each number of rows of X: with all numbers constant, sums and words stay in registers. */
#define DEFINE_KERNELS(name, kind, how)                                                          \
    static void multiply_##name(float *y, int64_t y_stride, const fv_stored_x *x, int32_t num_x, \
                                const fv_stored_rows *w)                                         \
    {                                                                                            \
        if (num_x == 1) multiply_##kind(y, y_stride, x, 1, w, how);                              \
        if (num_x == 2) multiply_##kind(y, y_stride, x, 2, w, how);                              \
        if (num_x == 4) multiply_##kind(y, y_stride, x, 4, w, how);                              \
    }                                                                                            \
    static void expand_##name(float *out, const fv_stored_rows *w) { expand_##kind(out, w, how); }

static const format q4_0 = {16, 8 * 18, 1, 8, true, scale_q4_0, unpack_nibbles};
static const format q4_1 = {32, 8 * 20, 1, 8, true, scale_and_minimum, unpack_nibbles};
static const format q5_0 = {16, 8 * 22, 1, 8, true, scale_q5_0, unpack_q5};
static const format q5_1 = {32, 8 * 24, 1, 8, true, scale_and_minimum, unpack_q5};
static const format q8_0 = {16, 8 * 34, 1, 8, false, scale_q8_0, unpack_q8_0};
static const format q4_k = {32, 8 * 144, 8, 8, true, scale_of_part, unpack_q4_k};
static const format q5_k = {32, 8 * 176, 8, 8, true, scale_of_part, unpack_q5_k};
static const format q6_k = {16, 8 * 210, 8, 4, false, scale_q6_k, unpack_q6_k};

DEFINE_KERNELS(q4_0, stripes, &q4_0)
DEFINE_KERNELS(q4_1, stripes, &q4_1)
DEFINE_KERNELS(q5_0, stripes, &q5_0)
DEFINE_KERNELS(q5_1, stripes, &q5_1)
DEFINE_KERNELS(q8_0, stripes, &q8_0)
DEFINE_KERNELS(q4_k, stripes, &q4_k)
DEFINE_KERNELS(q5_k, stripes, &q5_k)
DEFINE_KERNELS(q6_k, stripes, &q6_k)
DEFINE_KERNELS(f16, floats, load_f16)
DEFINE_KERNELS(bf16, floats, load_bf16)

/* --- X -------------------------------------------------------------------------------------------- */

static inline float max_magnitude(const float *x)
{
    /* As integers: NaN is the largest. */
    const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
    __m256i largest = _mm256_setzero_si256();
    for (int32_t i = 0; i < FV_STORED_X_BLOCK; i += lanes) {
        const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + i));
        largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, no_sign));
    }
    __m128i rest = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    rest = _mm_max_epi32(rest, _mm_shuffle_epi32(rest, _MM_SHUFFLE(1, 0, 3, 2)));
    rest = _mm_max_epi32(rest, _mm_shuffle_epi32(rest, _MM_SHUFFLE(2, 3, 0, 1)));
    return fv_f32_of_bits((uint32_t)_mm_cvtsi128_si32(rest));
}

static inline int32_t sum_integers(__m256i of)
{
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(of), _mm256_extracti128_si256(of, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(1, 0, 3, 2)));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(2, 3, 0, 1)));
    return _mm_cvtsi128_si32(sum);
}

static inline __m256i round_8(const float *from, __m256 factor)
{
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from), factor));
}

static void load_block(const fv_stored_x *x, int64_t block)
{
    const float *values = x->values + block * FV_STORED_X_BLOCK;
    int16_t *to = x->integers + block * FV_STORED_X_BLOCK;
    const float largest = max_magnitude(values);
    const bool is_tiny = largest < 0x1p-100f; /* 32767 / largest might overflow: the block is 0 */
    const float scale = is_tiny ? 0.0f : largest / 32767.0f;
    const __m256 factor = _mm256_set1_ps(is_tiny ? 0.0f : 32767.0f / largest);
    const __m256i even_first = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3,
                                                6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    __m256i sums = _mm256_setzero_si256();
    for (int32_t i = 0; i < FV_STORED_X_BLOCK; i += 2 * lanes) {
        const __m256i mixed = _mm256_packs_epi32(round_8(values + i, factor), round_8(values + i + lanes, factor));
        const __m256i words = _mm256_permute4x64_epi64(mixed, _MM_SHUFFLE(3, 1, 2, 0));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
        _mm256_storeu_si256((__m256i *)(void *)(to + i), _mm256_shuffle_epi8(words, even_first));
    }
    x->scales[block] = scale;
    x->sums[block] = scale * (float)sum_integers(sums);
}

static void load_x(const fv_stored_x *x, int64_t in_features)
{
    for (int64_t block = 0; block < in_features / FV_STORED_X_BLOCK; block++) load_block(x, block);
}

static const fv_stored_kernel kernels[] = {
    {FV_GGUF_F16, multiply_f16, expand_f16},    {FV_GGUF_BF16, multiply_bf16, expand_bf16},
    {FV_GGUF_Q4_0, multiply_q4_0, expand_q4_0}, {FV_GGUF_Q4_1, multiply_q4_1, expand_q4_1},
    {FV_GGUF_Q5_0, multiply_q5_0, expand_q5_0}, {FV_GGUF_Q5_1, multiply_q5_1, expand_q5_1},
    {FV_GGUF_Q8_0, multiply_q8_0, expand_q8_0}, {FV_GGUF_Q4_K, multiply_q4_k, expand_q4_k},
    {FV_GGUF_Q5_K, multiply_q5_k, expand_q5_k}, {FV_GGUF_Q6_K, multiply_q6_k, expand_q6_k},
};

const fv_stored_table fv_stored_table_avx2 = {FV_ISA_AVX2, "avx2", true, load_x, kernels, FV_ARRAY_LEN(kernels)};

#endif
