/* A tile of keys and values for many rows, pairs of bf16 to an element (strip_product.h): otherwise as many_floats.h, in natural
 * order. What is stored is exact in bf16; weights are rounded to it, their sums are not. */
#ifndef FV_KERNELS_CPU_MANY_PAIRS_H
#define FV_KERNELS_CPU_MANY_PAIRS_H

#include "kernels/cpu/byte_words.h"
#include "kernels/cpu/row_strip.h"

/* Sixteen numbers that bf16 has exactly. */
FV_ALWAYS_INLINE fv_word_half fv_many_load_words(const char *from, const fv_dtype dtype)
{
    fv_word_half half;
    if (dtype == FV_DTYPE_BF16) {
        memcpy(&half, from, sizeof(half));
        return half;
    }
    const fv_f32x16 value = fv_load16(from, dtype);
    fv_lanes lanes;
    memcpy(&lanes, &value, sizeof(lanes));
    const fv_words words = fv_words_of(lanes, lanes);
    memcpy(&half, &words, sizeof(half));
    return half;
}

/* num_numbers of them, a multiple of 16. */
FV_ALWAYS_INLINE void fv_many_convert_row(uint16_t *to, const char *from, int32_t num_numbers, const fv_dtype dtype)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(dtype);
    int32_t d = 0;
    for (; bytes == 1 && d + 64 <= num_numbers; d += 64) {
        fv_words words[2];
        fv_words_of_line(words, from + d, dtype);
        fv_words_store(to + d, words[0]);
        fv_words_store(to + d + 32, words[1]);
    }
    for (; d < num_numbers; d += 16) {
        const fv_word_half words = fv_many_load_words(from + d * bytes, dtype);
        memcpy(to + d, &words, sizeof(words));
    }
}

/* num_numbers of each row to rows of `keys`, which are head_size numbers apart. */
FV_ALWAYS_INLINE void fv_many_convert_keys(float *keys, const char *const *rows, int32_t first, int32_t end,
                                           int32_t head_size, int32_t num_numbers, const fv_dtype dtype)
{
    for (int32_t key = first; key < end; key++)
        fv_many_convert_row((uint16_t *)keys + (int64_t)key * head_size, rows[key], num_numbers, dtype);
}

/* Sixteen values of an even key and the next, either of which may be NULL: it keeps its place as it is. */
FV_ALWAYS_INLINE void fv_many_store_pair(float *to, const void *even, const void *odd, fv_words *not_finite)
{
    fv_word_half a, b;
    if (even && odd) {
        memcpy(&a, even, sizeof(a));
        memcpy(&b, odd, sizeof(b));
    } else { /* the border of a tile or of a source */
        const fv_words kept = fv_words_load(to);
        a = __builtin_shufflevector(kept, kept, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        b = __builtin_shufflevector(kept, kept, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        if (even) memcpy(&a, even, sizeof(a));
        if (odd) memcpy(&b, odd, sizeof(b));
    }
    const fv_words pairs = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24,
                                                   9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    *not_finite |= (fv_words)((pairs & 0x7f80) == 0x7f80);
    fv_words_store(to, pairs);
}

/* Values to [panel][tile_keys / 2][16]. Returns 1 if some value is infinite or NaN. */
FV_ALWAYS_INLINE int32_t fv_many_convert_values(float *values, const char *const *rows, int32_t first, int32_t end,
                                                int32_t tile_keys, int32_t v_head_size, const fv_dtype dtype)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(dtype);
    fv_words not_finite = {0};
    for (int32_t key = first / 2 * 2; key < end; key += 2) {
        float *to = values + (int64_t)key / 2 * FV_STRIP_PANEL;
        for (int32_t from = 0, num; from < v_head_size; from += num) {
            uint16_t words[2][64];
            const void *at[2] = {NULL, NULL};
            num = fv_min_i32(v_head_size - from, 64);
            for (int32_t i = 0; i < 2; i++) {
                if (key + i < first || key + i >= end) continue;
                at[i] = rows[key + i] + from * bytes;
                if (dtype == FV_DTYPE_BF16) continue;
                fv_many_convert_row(words[i], at[i], num, dtype);
                at[i] = words[i];
            }
            for (int32_t d = 0; d < num; d += FV_STRIP_PANEL, to += tile_keys / 2 * FV_STRIP_PANEL) {
                const uint16_t *even = at[0], *odd = at[1];
                fv_many_store_pair(to, even ? even + d : NULL, odd ? odd + d : NULL, &not_finite);
            }
        }
    }
    for (int32_t i = 0; i < 32; i++) {
        if (not_finite[i]) return 1;
    }
    return 0;
}

/* Before the values of the keys [first, end) of a tile are converted: a pair with one of them has zeros for the other. */
static inline void fv_many_begin_values(float *values, int32_t first, int32_t end, int32_t tile_keys,
                                        int32_t num_columns)
{
    for (int32_t panel = 0; panel < num_columns / FV_STRIP_PANEL; panel++) {
        float *to = values + (int64_t)panel * (tile_keys / 2) * FV_STRIP_PANEL;
        if (first % 2 != 0) memset(to + first / 2 * FV_STRIP_PANEL, 0, FV_STRIP_PANEL * sizeof(float));
        if (end % 2 != 0) memset(to + end / 2 * FV_STRIP_PANEL, 0, FV_STRIP_PANEL * sizeof(float));
    }
}

/* Weights [key][width] of the keys [first, end) to pairs [key / 2][width], in place. */
static inline void fv_many_pack_weights(float *weights, int32_t first, int32_t end, int32_t width)
{
    const fv_lanes none = fv_lanes_splat(0.0f);
    for (int32_t key = first / 2 * 2; key < end; key += 2) {
        const float *from = weights + key * width;
        float *to = weights + key / 2 * width;
        for (int32_t i = 0; i < width; i += FV_STRIP_LANES) {
            const fv_lanes even = key < first ? none : fv_lanes_load(from + i);
            const fv_lanes odd = key + 1 >= end ? none : fv_lanes_load(from + width + i);
            fv_words_store(to + i, fv_pairs_of(even, odd));
        }
    }
}

/* A row of sums in lane order; `copy` has room for it. */
static inline const float *fv_many_sums_in_lanes(float *copy, const float *sums, int32_t num_columns,
                                                 fv_dtype lane_dtype)
{
    fv_row_load_lanes(copy, (const char *)sums, num_columns, FV_DTYPE_F32, lane_dtype);
    return copy;
}

#endif
