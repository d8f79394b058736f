/* The products of few rows over caches of bf16, and of one byte, by pairs of bf16 (bf16_pairs.h, byte_words.h), otherwise as
 * few_wide.h: of bf16 nothing is converted but the weights, which are rounded to bf16, and an instruction has twice the
 * multiply-adds.
 *
 *   scores   the 32 columns of a unit of a key, times those of a query
 *   sums     the values of keys 2i and 2i + 1, interleaved, times the weights of both
 *
 * Pairs of keys depend on the keys' places in the tile alone; a key of a pair that the span does not have counts as
 * zeros. Queries lie in units of 32 bf16, sums in units of 32 floats, R rows side by side, the columns of a unit as
 * fv_pairs_low and fv_pairs_high leave them. Head sizes are multiples of 32; of one byte of 64, a line, which is two units,
 * with the columns of fv_words_of_bytes. */
#ifndef FV_KERNELS_CPU_FEW_PAIRS_H
#define FV_KERNELS_CPU_FEW_PAIRS_H

#include "kernels/cpu/bf16_pairs.h"
#include "kernels/cpu/byte_words.h"
#include "kernels/cpu/few_kernels.h"
#include "kernels/cpu/few_lanes.h"

#define FV_FEW_UNIT 32
#define FV_FEW_UNIT_BYTES 64

FV_ALWAYS_INLINE int32_t fv_few_is_byte(const fv_dtype dtype) { return dtype != FV_DTYPE_BF16; }

/* Units of a line. */
FV_ALWAYS_INLINE int32_t fv_few_units_of_line(const fv_dtype dtype) { return fv_few_is_byte(dtype) ? 2 : 1; }

FV_ALWAYS_INLINE void fv_few_load_line(fv_words words[2], const char *from, const fv_dtype dtype)
{
    if (fv_few_is_byte(dtype))
        fv_words_of_bytes(words, from, dtype);
    else
        words[0] = fv_words_load(from);
}

/* One or two rows leave more time. */
FV_ALWAYS_INLINE int32_t fv_few_asks(const int32_t num_rows) { return num_rows >= 3 ? 2 : 3; }

/* --- scores = K q ----------------------------------------------------------------------------------- */

FV_ALWAYS_INLINE fv_dtype fv_few_query_order(fv_dtype lane_dtype) { return (void)lane_dtype, FV_DTYPE_F32; }

/* Row `row` of a group's queries, bf16 numbers all, in natural order; `dtype` is that of the keys. */
static inline void fv_few_pack_query(float *q, const float *natural, int32_t row, int32_t head_size, int32_t num_rows,
                                     fv_dtype dtype)
{
    const int32_t width = FV_FEW_UNIT * fv_few_units_of_line(dtype);
    char *to = (char *)q + row * FV_FEW_UNIT_BYTES;
    for (int32_t d = 0; d < head_size; d += width) {
        float line[2 * FV_FEW_UNIT];
        for (int32_t i = 0; i < width; i++) line[fv_few_is_byte(dtype) ? fv_byte_word_place(i) : i] = natural[d + i];
        for (int32_t i = 0; i < width; i += FV_FEW_UNIT, to += num_rows * FV_FEW_UNIT_BYTES)
            fv_words_store(to, fv_words_of(fv_lanes_load(line + i), fv_lanes_load(line + i + 16)));
    }
}

/* Scores of the keys [first, end), and of those that share a vector with them. */
FV_ALWAYS_INLINE void fv_few_dot(float *scores, const float *q, const fv_key_rows *rows, int32_t first, int32_t end,
                                 int32_t head_size, const int32_t num_rows, const fv_dtype dtype,
                                 const fv_prefetch_order order)
{
    const int32_t num_keys = num_rows >= 3 ? 4 : 8, num_units = fv_few_units_of_line(dtype);
    const int32_t element_bytes = (int32_t)fv_few_element_bytes(dtype);
    fv_prefetch_cursor cursor = fv_prefetch_begin(rows->ahead, order);
    for (int32_t key = first / num_keys * num_keys; key < end; key += num_keys) {
        const char *k[FV_LANES];
        fv_lanes sums[16];
        FV_UNROLL
        for (int32_t j = 0; j < num_keys; j++) k[j] = rows->k[key + j] + rows->k_offset;
        FV_UNROLL
        for (int32_t i = 0; i < num_keys * num_rows; i++) sums[i] = fv_lanes_splat(0.0f);

        const fv_prefetch_portion ahead = fv_few_portion(&cursor, head_size * num_keys * element_bytes);
        const char *of_rows = (const char *)q;
        for (int64_t at = 0; at < head_size * element_bytes;
             at += FV_CACHE_LINE, of_rows += num_units * num_rows * FV_FEW_UNIT_BYTES) {
            fv_words row[2][4];
            FV_UNROLL
            for (int32_t u = 0; u < num_units; u++) {
                FV_UNROLL
                for (int32_t r = 0; r < num_rows; r++)
                    row[u][r] = fv_words_load(of_rows + (u * num_rows + r) * FV_FEW_UNIT_BYTES);
            }
            FV_UNROLL
            for (int32_t j = 0; j < num_keys; j++) {
                fv_few_ask(&cursor, ahead, at * num_keys + j * FV_CACHE_LINE, FV_CACHE_LINE, fv_few_asks(num_rows));
                fv_words of_key[2];
                fv_few_load_line(of_key, k[j] + at, dtype);
                FV_UNROLL
                for (int32_t u = 0; u < num_units; u++) {
                    FV_UNROLL
                    for (int32_t r = 0; r < num_rows; r++)
                        sums[j * num_rows + r] = fv_pairs_dot(sums[j * num_rows + r], of_key[u], row[u][r]);
                }
            }
        }
        fv_few_store_dots(scores + key * fv_few_scores_of_key(num_rows), sums, num_keys, num_rows);
    }
    fv_prefetch_end(&cursor);
}

/* --- sums = sums * rescale + weights V ---------------------------------------------------------------- */

/* 32 weights [key][num] to 16 pairs [key / 2][num]. */
FV_ALWAYS_INLINE fv_words fv_few_pair_weights(const float *weights, const int32_t num)
{
    const fv_lanes a = fv_lanes_load(weights), b = fv_lanes_load(weights + 16);
    if (num == 4) {
        return fv_pairs_of(__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
    }
    if (num == 2) {
        return fv_pairs_of(__builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
                           __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31));
    }
    return fv_pairs_of(__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                       __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
}

/* Adds a pair of rows of values, either of which may be NULL, times the pair of weights of each row. */
FV_ALWAYS_INLINE void fv_few_add_pair(fv_lanes *acc, const char *even, const char *odd, const uint32_t *pairs,
                                      const int32_t num_units, const int32_t num_rows, const fv_dtype dtype,
                                      const int32_t masked, fv_prefetch_cursor *cursor, fv_prefetch_portion ahead,
                                      int64_t asked)
{
    const int32_t units_of_line = fv_few_units_of_line(dtype);
    const int64_t unit_bytes = FV_CACHE_LINE / units_of_line; /* of a row */
    fv_words weight[4], seen[4], values[8];
    FV_UNROLL
    for (int32_t r = 0; r < num_rows; r++) {
        weight[r] = fv_pairs_splat(pairs[r]);
        seen[r] = masked ? fv_pairs_splat(fv_pairs_seen(pairs[r])) : weight[r];
    }
    FV_UNROLL
    for (int32_t u = 0; u < num_units; u += units_of_line) {
        fv_words a[2] = {{0}, {0}}, b[2] = {{0}, {0}};
        if (even) fv_few_load_line(a, even + u * unit_bytes, dtype);
        if (odd) fv_few_load_line(b, odd + u * unit_bytes, dtype);
        FV_UNROLL
        for (int32_t i = 0; i < units_of_line; i++) {
            values[2 * (u + i)] = fv_pairs_low(a[i], b[i]);
            values[2 * (u + i) + 1] = fv_pairs_high(a[i], b[i]);
        }
    }
    FV_UNROLL
    for (int32_t u = 0; u < num_units; u++) {
        fv_few_ask(cursor, ahead, asked + u * 2 * unit_bytes, 2 * unit_bytes, fv_few_asks(num_rows));
        FV_UNROLL
        for (int32_t r = 0; r < num_rows; r++) {
            FV_UNROLL
            for (int32_t half = 0; half < 2; half++) {
                fv_lanes *sum = &acc[(u * num_rows + r) * 2 + half];
                const fv_words value = values[2 * u + half];
                *sum = fv_pairs_dot(*sum, masked ? value & seen[r] : value, weight[r]);
            }
        }
    }
}

/* The keys [first, end) for `num_units` units of columns, which start `from` bytes into a row of V. `pairs` are from
 * the even key of the first pair on. masked: a key of weight 0 adds nothing, whatever its value. */
FV_ALWAYS_INLINE void fv_few_accumulate_units(float *sums, const uint32_t *pairs, const fv_key_rows *rows,
                                              int32_t first, int32_t end, int64_t from, const int32_t num_units,
                                              const int32_t num_rows, const fv_dtype dtype, const int32_t masked,
                                              const fv_prefetch_order order)
{
    const int64_t offset = rows->v_offset + from;
    const int64_t key_bytes = num_units * FV_FEW_UNIT * fv_few_element_bytes(dtype);
    fv_prefetch_cursor cursor = fv_prefetch_begin(rows->ahead, order);
    const fv_prefetch_portion ahead = fv_few_portion(&cursor, (end - first) * key_bytes);
    const char *const *v = rows->v;
    fv_lanes acc[16];
    FV_UNROLL
    for (int32_t i = 0; i < num_units * num_rows * 2; i++) acc[i] = fv_lanes_splat(0.0f);
    int32_t key = first;
    int64_t asked = 0;
    if (key % 2 != 0) {
        fv_few_add_pair(acc, NULL, v[key] + offset, pairs, num_units, num_rows, dtype, masked, &cursor, ahead, asked);
        key++;
        pairs += fv_few_scores_of_key(num_rows);
    }
    for (; key + 2 <= end; key += 2, pairs += fv_few_scores_of_key(num_rows), asked += 2 * key_bytes) {
        fv_few_add_pair(acc, v[key] + offset, v[key + 1] + offset, pairs, num_units, num_rows, dtype, masked, &cursor,
                        ahead, asked);
    }
    if (key < end)
        fv_few_add_pair(acc, v[key] + offset, NULL, pairs, num_units, num_rows, dtype, masked, &cursor, ahead, asked);
    fv_prefetch_end(&cursor);
    FV_UNROLL
    for (int32_t i = 0; i < num_units * num_rows * 2; i++)
        fv_lanes_store(sums + i * 16, fv_lanes_load(sums + i * 16) + acc[i]);
}

/* Few keys at a time, see few_rows.h; rescale NULL: sums stay as they are. */
FV_ALWAYS_INLINE void fv_few_accumulate(float *sums, const float *weights, const float *rescale,
                                        const fv_key_rows *rows, int32_t first, int32_t end, int32_t v_head_size,
                                        const int32_t num_rows, const fv_dtype dtype, const int32_t masked,
                                        const fv_prefetch_order order)
{
    const int64_t bytes = fv_few_element_bytes(dtype);
    const int32_t num_scores = fv_few_scores_of_key(num_rows), num_pairs = FV_FEW_ACCUMULATE_KEYS / 2 * num_scores;
    if (rescale) fv_few_rescale(sums, rescale, v_head_size, num_rows, FV_FEW_UNIT);
    for (int32_t key = first, end_key; key < end; key = end_key) {
        const int32_t even_key = key / 2 * 2;
        end_key = fv_few_end_of_run(key, end);
        uint32_t pairs[FV_FEW_ACCUMULATE_KEYS / 2 * 4];
        FV_UNROLL
        for (int32_t i = 0; i < num_pairs; i += 16)
            fv_words_store(pairs + i, fv_few_pair_weights(weights + even_key * num_scores + 2 * i, num_scores));

        float *to = sums;
        int32_t d = 0;
        for (; num_rows < 3 && d + 128 <= v_head_size; d += 128, to += 128 * num_rows)
            fv_few_accumulate_units(to, pairs, rows, key, end_key, d * bytes, 4, num_rows, dtype, masked, order);
        for (; d + 64 <= v_head_size; d += 64, to += 64 * num_rows)
            fv_few_accumulate_units(to, pairs, rows, key, end_key, d * bytes, 2, num_rows, dtype, masked, order);
        if (!fv_few_is_byte(dtype) && d < v_head_size)
            fv_few_accumulate_units(to, pairs, rows, key, end_key, d * bytes, 1, num_rows, dtype, masked, order);
    }
}

/* Of a line of one byte a column: 16 columns are the parts of four vectors. */
static inline void fv_few_unblock_line(float *to, const float *sums, int32_t unit_stride)
{
    for (int32_t i = 0; i < 4; i++)
        for (int32_t d = 0; d < 16; d++) to[d / 4 * 16 + i * 4 + d % 4] = sums[i / 2 * unit_stride + i % 2 * 16 + d];
}

/* One row of a group's sums, in lane order of `dtype`, that of the values. */
static inline void fv_few_unblock_row(float *to, const float *sums, int32_t row, int32_t num_rows, int32_t v_head_size,
                                      fv_dtype dtype)
{
    const int32_t num_units = fv_few_units_of_line(dtype), unit_stride = num_rows * FV_FEW_UNIT;
    sums += row * FV_FEW_UNIT;
    for (int32_t d = 0; d < v_head_size; d += num_units * FV_FEW_UNIT, sums += num_units * unit_stride) {
        if (fv_few_is_byte(dtype)) {
            fv_few_unblock_line(to + d, sums, unit_stride);
            continue;
        }
        float natural[FV_FEW_UNIT];
        fv_lanes_store_natural(natural, sums, sums + 16);
        fv_row_load_lanes(to + d, natural, FV_FEW_UNIT, FV_DTYPE_F32, FV_DTYPE_BF16);
    }
}

#endif
