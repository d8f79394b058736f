/* Kernels of 256 bits: a lane is a row of W. vpmaddwd multiplies two 16-bit values with two of X and adds both products: even and
 * odd ones of a word (stored_words.h) meet x0 x2 and x1 x3 in all lanes. VNNI's vpdpwssd adds the sum so far, too.
 *
 * For 8 rows and 32 values that is 16 vpmaddwd and 16 additions for each row of X, or 16 vpdpwssd, then one conversion and
 * one FMA; taking words apart costs 24 to 80 instructions, once for all rows of X. Sums stay below 2^31: the largest product
 * is 128 x 32767, of which 32 are added. So both forms give the same bits.
 *
 * A file that includes this is compiled for its instructions, and makes a table of it. It defines from how many rows of X on there
 * are panels: FV_STORED_MIN_INTEGERS, and with vectors of 512 bits FV_STORED_MIN_FLOATS; those of 256 have no panels of floats, which
 * few rows take nearly as fast. */
#ifndef FV_ENGINE_STORED_STORED_KERNELS_H
#define FV_ENGINE_STORED_STORED_KERNELS_H

#include "core/float.h"
#include "engine/gguf.h"
#include "engine/stored/stored_panel.h"
#include "engine/stored/stored_panel_floats.h"
#include "engine/stored/stored_words.h"

/* Sums grow one by one: as a tree they would not fit the registers. */
#define KEEP_ORDER(vector) __asm__("" : "+v"(vector))

enum { max_width = 2 };

static inline __m256i splat_pair(const int16_t *pair)
{
    int32_t both;
    memcpy(&both, pair, sizeof(both));
    return _mm256_set1_epi32(both);
}

/* --- products ------------------------------------------------------------------------------------- */

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
FV_ALWAYS_INLINE __m256i products(fv_stored_pair w, __m256i even, __m256i odd)
{
    return _mm256_dpwssd_epi32(_mm256_madd_epi16(w.even, even), w.odd, odd);
}

/* In one chain where there are others beside it: vpdpwssd takes five cycles, an addition one. */
FV_ALWAYS_INLINE __m256i add_products(__m256i sum, fv_stored_pair w, __m256i even, __m256i odd, const bool in_chain)
{
    if (in_chain) return _mm256_dpwssd_epi32(_mm256_dpwssd_epi32(sum, w.even, even), w.odd, odd);
    return _mm256_add_epi32(sum, products(w, even, odd));
}
#else
FV_ALWAYS_INLINE __m256i products(fv_stored_pair w, __m256i even, __m256i odd)
{
    return _mm256_add_epi32(_mm256_madd_epi16(w.even, even), _mm256_madd_epi16(w.odd, odd));
}

FV_ALWAYS_INLINE __m256i add_products(__m256i sum, fv_stored_pair w, __m256i even, __m256i odd, const bool in_chain)
{
    (void)in_chain;
    return _mm256_add_epi32(sum, products(w, even, odd));
}
#endif

/* --- stripes -------------------------------------------------------------------------------------- */

/* Up to four sums of 8 rows; y has room for those rows that are there. */
FV_ALWAYS_INLINE void store_sums(float *y, int64_t y_stride, const __m256 *sums, int32_t num_x, int64_t num_rows)
{
    for (int32_t i = 0; i < num_x; i++, y += y_stride) {
        if (num_rows >= FV_STORED_ROWS) {
            _mm256_storeu_ps(y, sums[i]);
            continue;
        }
        float values[FV_STORED_ROWS];
        _mm256_storeu_ps(values, sums[i]);
        memcpy(y, values, (size_t)num_rows * sizeof(*y));
    }
}

/* 32 values of the rows of `width` stripes, `stripe_bytes` apart; `block` is that of X. */
FV_ALWAYS_INLINE void add_part(__m256 sums[][FV_STORED_MAX_X], const fv_stored_x *x, int32_t num_x, int64_t block,
                               const uint8_t *stripes, size_t stripe_bytes, int32_t width, int32_t part,
                               const fv_stored_format *of)
{
    FV_STORED_UNROLL
    for (int32_t first = 0; first < FV_STORED_COLUMNS; first += of->scale_columns) {
        __m256i dots[max_width][FV_STORED_MAX_X];
        FV_STORED_UNROLL
        for (int32_t column = first; column < first + of->scale_columns; column++) {
            fv_stored_pair w[max_width];
            FV_STORED_UNROLL
            for (int32_t j = 0; j < width; j++) {
                w[j] = of->unpack(stripes + (size_t)j * stripe_bytes + of->scales_bytes, part, column);
            }
            FV_STORED_UNROLL
            for (int32_t i = 0; i < num_x; i++) {
                const int16_t *integers = x[i].integers + block * FV_STORED_X_BLOCK + column * 4;
                const __m256i even = splat_pair(integers), odd = splat_pair(integers + 2);
                FV_STORED_UNROLL
                for (int32_t j = 0; j < width; j++) {
                    dots[j][i] = column == first ? products(w[j], even, odd)
                                                 : add_products(dots[j][i], w[j], even, odd, num_x > 1);
                    KEEP_ORDER(dots[j][i]);
                }
            }
        }
        FV_STORED_UNROLL
        for (int32_t j = 0; j < width; j++) {
            const uint8_t *scales = stripes + (size_t)j * stripe_bytes;
            const fv_stored_scale scale = of->scale(scales, scales + of->scales_bytes, part, first / 4);
            FV_STORED_UNROLL
            for (int32_t i = 0; i < num_x; i++) {
                const __m256 factor = _mm256_mul_ps(scale.scale, _mm256_broadcast_ss(x[i].scales + block));
                sums[j][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[j][i]), factor, sums[j][i]);
                if (!of->has_minimum) continue;
                sums[j][i] = _mm256_fmadd_ps(scale.minimum, _mm256_broadcast_ss(x[i].sums + block), sums[j][i]);
            }
        }
    }
}

/* Asks for what comes after byte `at` of stripes side by side, and behind their end for what lies there in the next ones. */
FV_ALWAYS_INLINE void prefetch_stripes(const uint8_t *stripes, size_t at, size_t stripe_bytes, int32_t width,
                                       int32_t bytes)
{
    if (at + FV_STORED_AHEAD_BYTES >= stripe_bytes) at += (size_t)(width - 1) * stripe_bytes;
    for (int32_t j = 0; j < width; j++, at += stripe_bytes) fv_stored_prefetch(stripes + at, bytes);
}

FV_ALWAYS_INLINE void multiply_width(float *y, int64_t y_stride, const fv_stored_x *x, int32_t num_x,
                                     const fv_stored_rows *w, int64_t row, int32_t width, const fv_stored_format *of)
{
    const int64_t num_blocks = w->in_features / (of->num_parts * FV_STORED_X_BLOCK);
    const size_t stripe_bytes = (size_t)(num_blocks * of->block_bytes);
    const uint8_t *stripes = w->stripes + (size_t)(row / FV_STORED_ROWS) * stripe_bytes;
    const int32_t part_bytes = of->block_bytes / of->num_parts;
    __m256 sums[max_width][FV_STORED_MAX_X];
    FV_STORED_UNROLL
    for (int32_t j = 0; j < width; j++) {
        FV_STORED_UNROLL
        for (int32_t i = 0; i < num_x; i++) sums[j][i] = _mm256_setzero_ps();
    }
    for (int64_t block = 0; block < num_blocks; block++) {
        const size_t at = (size_t)(block * of->block_bytes);
        if (width == 1) fv_stored_prefetch(stripes + at, of->block_bytes);
        for (int32_t part = 0; part < of->num_parts; part++) {
            if (width > 1) prefetch_stripes(stripes, at + (size_t)(part * part_bytes), stripe_bytes, width, part_bytes);
            add_part(sums, x, num_x, block * of->num_parts + part, stripes + at, stripe_bytes, width, part, of);
        }
    }
    FV_STORED_UNROLL
    for (int32_t j = 0; j < width; j++) {
        store_sums(y + row + j * FV_STORED_ROWS, y_stride, sums[j], num_x, w->num_rows - row - j * FV_STORED_ROWS);
    }
}

/* One stripe at a time for one row of X, which goes through memory in order as fast as that delivers; two for several,
 * as then each load of X serves both. */
FV_ALWAYS_INLINE void multiply_stripes(float *y, int64_t y_stride, const fv_stored_x *x, int32_t num_x,
                                       const fv_stored_rows *w, const fv_stored_format *of)
{
    const int32_t width = num_x == 1 ? 1 : max_width;
    int64_t row = 0;
    for (; row + (width - 1) * FV_STORED_ROWS < w->num_rows; row += width * FV_STORED_ROWS) {
        multiply_width(y, y_stride, x, num_x, w, row, width, of);
    }
    if (row < w->num_rows) multiply_width(y, y_stride, x, num_x, w, row, 1, of);
}

/* Values k and k + 1, in chains of their own: an FMA need not wait for the one before it. */
FV_ALWAYS_INLINE void add_two_floats(__m256 sums[][2], const fv_stored_x *x, int32_t num_x, int64_t k,
                                     const uint8_t *stripe, __m256 (*load)(const uint8_t *stripe))
{
    const __m256 first = load(stripe), second = load(stripe + FV_STORED_SCALE_BYTES);
    FV_STORED_UNROLL
    for (int32_t i = 0; i < num_x; i++) {
        sums[i][0] = _mm256_fmadd_ps(first, _mm256_broadcast_ss(x[i].values + k), sums[i][0]);
        sums[i][1] = _mm256_fmadd_ps(second, _mm256_broadcast_ss(x[i].values + k + 1), sums[i][1]);
    }
}

FV_ALWAYS_INLINE void multiply_floats(float *y, int64_t y_stride, const fv_stored_x *x, int32_t num_x,
                                      const fv_stored_rows *w, __m256 (*load)(const uint8_t *stripe))
{
    const uint8_t *stripe = w->stripes;
    for (int64_t row = 0; row < w->num_rows; row += FV_STORED_ROWS) {
        __m256 sums[FV_STORED_MAX_X][2];
        FV_STORED_UNROLL
        for (int32_t i = 0; i < num_x; i++) sums[i][0] = sums[i][1] = _mm256_setzero_ps();
        int64_t k = 0;
        for (; k + FV_STORED_LINE_FLOATS <= w->in_features; k += FV_STORED_LINE_FLOATS, stripe += FV_CACHE_LINE) {
            fv_stored_prefetch(stripe, FV_CACHE_LINE);
            add_two_floats(sums, x, num_x, k, stripe, load);
            add_two_floats(sums, x, num_x, k + 2, stripe + 2 * FV_STORED_SCALE_BYTES, load);
        }
        for (; k + 2 <= w->in_features; k += 2, stripe += 2 * FV_STORED_SCALE_BYTES)
            add_two_floats(sums, x, num_x, k, stripe, load);
        __m256 totals[FV_STORED_MAX_X];
        FV_STORED_UNROLL
        for (int32_t i = 0; i < num_x; i++) {
            totals[i] = _mm256_add_ps(sums[i][0], sums[i][1]);
            if (k == w->in_features) continue;
            totals[i] = _mm256_fmadd_ps(load(stripe), _mm256_broadcast_ss(x[i].values + k), totals[i]);
        }
        if (k < w->in_features) stripe += FV_STORED_SCALE_BYTES;
        store_sums(y + row, y_stride, totals, num_x, w->num_rows - row);
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
        if (num_x == 3) multiply_##kind(y, y_stride, x, 3, w, how);                              \
        if (num_x == 4) multiply_##kind(y, y_stride, x, 4, w, how);                              \
    }

#define DEFINE_STRIPES(name)                         \
    DEFINE_KERNELS(name, stripes, &fv_stored_##name) \
    FV_STORED_DEFINE_MANY(name, fv_stored_multiply_panels, &fv_stored_##name)
#if defined(__AVX512F__)
#define DEFINE_FLOATS(name)                             \
    DEFINE_KERNELS(name, floats, fv_stored_load_##name) \
    FV_STORED_DEFINE_MANY(name, fv_stored_multiply_float_panels, fv_stored_load_##name)
#define FLOATS(TYPE, name) KERNEL(TYPE, name, multiply_many_##name, FV_STORED_MIN_FLOATS)
#else
#define DEFINE_FLOATS(name) DEFINE_KERNELS(name, floats, fv_stored_load_##name)
#define FLOATS(TYPE, name) KERNEL(TYPE, name, NULL, 0)
#endif
#define STRIPES(TYPE, name) KERNEL(TYPE, name, multiply_many_##name, FV_STORED_MIN_INTEGERS)
#define KERNEL(TYPE, name, many, min_many_x)              \
    {                                                     \
        FV_GGUF_##TYPE, multiply_##name, many, min_many_x \
    }

DEFINE_STRIPES(q4_0)
DEFINE_STRIPES(q4_1)
DEFINE_STRIPES(q5_0)
DEFINE_STRIPES(q5_1)
DEFINE_STRIPES(q8_0)
DEFINE_STRIPES(q4_k)
DEFINE_STRIPES(q5_k)
DEFINE_STRIPES(q6_k)
DEFINE_FLOATS(f16)
DEFINE_FLOATS(bf16)

/* --- X -------------------------------------------------------------------------------------------- */

static inline float max_magnitude(const float *x)
{
    /* As integers: NaN is the largest. */
    const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
    __m256i largest = _mm256_setzero_si256();
    for (int32_t i = 0; i < FV_STORED_X_BLOCK; i += FV_STORED_ROWS) {
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
    for (int32_t i = 0; i < FV_STORED_X_BLOCK; i += 2 * FV_STORED_ROWS) {
        const __m256i mixed = _mm256_packs_epi32(round_8(values + i, factor),
                                                 round_8(values + i + FV_STORED_ROWS, factor));
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
    FLOATS(F16, f16),    FLOATS(BF16, bf16),  STRIPES(Q4_0, q4_0), STRIPES(Q4_1, q4_1), STRIPES(Q5_0, q5_0),
    STRIPES(Q5_1, q5_1), STRIPES(Q8_0, q8_0), STRIPES(Q4_K, q4_k), STRIPES(Q5_K, q5_k), STRIPES(Q6_K, q6_k),
};
#undef FLOATS
#undef STRIPES
#undef KERNEL

/* Of a call for many rows. */
typedef union many_memory {
    fv_stored_many integers;
    fv_stored_many_floats floats;
} many_memory;

#endif
