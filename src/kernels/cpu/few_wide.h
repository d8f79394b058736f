/* The products of few rows with vectors of 512 bits, otherwise as few_rows.h: sixteen dot products (R rows x 16 / R
 * keys, or 8 keys of one row) are reduced together, and 16 vectors of sums stay in registers (8 of one row). Of 3 rows
 * there are 12 of either.
 *
 * Queries and sums lie in units of 16 elements in lane order, R rows side by side; a rest of 8 elements is half a unit,
 * the other half zeros. With half the instructions the core's window spans twice the memory, and there is time to ask
 * for each line twice (prefetch_stream.h).
 *
 * With FV_WIDE_LOOKS_UP keys and values are fp8, looked up by the line of 64 as bf16 (byte_words.h), whose bits are the upper
 * half of an fp32: four units, in the columns of fv_words_of_bytes. Head sizes are multiples of 64 then. */
#ifndef FV_KERNELS_CPU_FEW_WIDE_H
#define FV_KERNELS_CPU_FEW_WIDE_H

#include "kernels/cpu/few_kernels.h"
#include "kernels/cpu/few_lanes.h"

#ifndef FV_WIDE_LOOKS_UP
#define FV_WIDE_LOOKS_UP 0
#endif
#if FV_WIDE_LOOKS_UP
#include "kernels/cpu/byte_words.h"
#else
#include "kernels/cpu/wide_load.h"
#endif

/* sum + a * b in the sum's own register, see fv_fma_onto. */
FV_ALWAYS_INLINE fv_lanes fv_wide_fma_onto(fv_lanes sum, fv_lanes a, fv_lanes b)
{
#if defined(__AVX512F__)
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#else
    return sum + a * b;
#endif
}

#define FV_FEW_UNIT 16

/* --- what is read of a key or value at a time: a unit, or four --------------------------------------------- */

#if FV_WIDE_LOOKS_UP

enum { FV_WIDE_UNITS = 4 };

typedef struct fv_wide_read {
    fv_words words[2];
} fv_wide_read;

FV_ALWAYS_INLINE void fv_wide_read_from(fv_wide_read *read, const char *from, const fv_dtype dtype,
                                        const int32_t is_half)
{
    (void)is_half;
    fv_words_of_bytes(read->words, from, dtype);
}

/* Even words of words[0], odd ones, the same of words[1]. */
FV_ALWAYS_INLINE fv_lanes fv_wide_unit(const fv_wide_read *read, const int32_t unit)
{
    const fv_lane_bits pairs = (fv_lane_bits)read->words[unit / 2];
    return (fv_lanes)(unit % 2 ? pairs & 0xffff0000u : pairs << 16);
}

/* The columns of a line to its units, `stride` floats from each to the next. */
static inline void fv_wide_columns_to_units(float *units, int64_t stride, const float *columns)
{
    for (int32_t i = 0; i < 8; i++) {
        float *even = units + i % 2 * 2 * stride + i / 2 * 4, *odd = even + stride;
        for (int32_t j = 0; j < 4; j++) {
            even[j] = columns[i * 8 + 2 * j];
            odd[j] = columns[i * 8 + 2 * j + 1];
        }
    }
}

static inline void fv_wide_units_to_columns(float *columns, const float *units, int64_t stride)
{
    for (int32_t i = 0; i < 8; i++) {
        const float *even = units + i % 2 * 2 * stride + i / 2 * 4, *odd = even + stride;
        for (int32_t j = 0; j < 4; j++) {
            columns[i * 8 + 2 * j] = even[j];
            columns[i * 8 + 2 * j + 1] = odd[j];
        }
    }
}

#else

enum { FV_WIDE_UNITS = 1 };

typedef struct fv_wide_read {
    fv_lanes unit;
} fv_wide_read;

FV_ALWAYS_INLINE void fv_wide_read_from(fv_wide_read *read, const char *from, const fv_dtype dtype,
                                        const int32_t is_half)
{
    read->unit = is_half ? fv_wide_load8(from, dtype) : fv_wide_load16(from, dtype);
}

FV_ALWAYS_INLINE fv_lanes fv_wide_unit(const fv_wide_read *read, const int32_t unit)
{
    (void)unit;
    return read->unit;
}

#endif

enum { FV_WIDE_COLUMNS = FV_WIDE_UNITS * FV_FEW_UNIT };

/* --- scores = K q ----------------------------------------------------------------------------------- */

/* Row `row` of a group's queries, from `lanes`, whose order is that of fv_few_query_order. */
static inline void fv_few_pack_query(float *q, const float *lanes, int32_t row, int32_t head_size, int32_t num_rows,
                                     fv_dtype dtype)
{
    (void)dtype;
    q += row * FV_FEW_UNIT;
    for (int32_t d = 0; d < head_size; d += FV_WIDE_COLUMNS, q += FV_WIDE_COLUMNS * num_rows) {
#if FV_WIDE_LOOKS_UP
        fv_wide_columns_to_units(q, num_rows * FV_FEW_UNIT, lanes + d);
#else
        const int32_t num = fv_min_i32(FV_FEW_UNIT, head_size - d);
        memset(q, 0, FV_FEW_UNIT * sizeof(float));
        memcpy(q, lanes + d, (size_t)num * sizeof(float));
#endif
    }
}

FV_ALWAYS_INLINE fv_dtype fv_few_query_order(fv_dtype lane_dtype)
{
    return FV_WIDE_LOOKS_UP ? FV_DTYPE_F32 : lane_dtype;
}

FV_ALWAYS_INLINE void fv_few_dot_units(fv_lanes sums[16], const float *q, const char *const k[FV_LANES], int64_t offset,
                                       const int32_t num_rows, const int32_t num_keys, const fv_dtype dtype,
                                       const int32_t is_half, fv_prefetch_cursor *cursor, fv_prefetch_portion ahead,
                                       int64_t asked, const int64_t ahead_bytes)
{
    const int64_t key_bytes = ahead_bytes / num_keys;
    fv_wide_read keys[FV_LANES];
    FV_UNROLL
    for (int32_t unit = 0; unit < FV_WIDE_UNITS; unit++, q += num_rows * FV_FEW_UNIT) {
        fv_lanes rows[4];
        FV_UNROLL
        for (int32_t r = 0; r < num_rows; r++) rows[r] = fv_lanes_load(q + r * FV_FEW_UNIT);
        FV_UNROLL
        for (int32_t j = 0; j < num_keys; j++) {
            if (unit == 0) {
                if (j * key_bytes % FV_CACHE_LINE == 0)
                    fv_few_ask(cursor, ahead, asked + j * key_bytes, FV_CACHE_LINE, 2);
                fv_wide_read_from(&keys[j], k[j] + offset, dtype, is_half);
            }
            const fv_lanes key = fv_wide_unit(&keys[j], unit);
            FV_UNROLL
            for (int32_t r = 0; r < num_rows; r++)
                sums[j * num_rows + r] = fv_wide_fma_onto(sums[j * num_rows + r], key, rows[r]);
        }
    }
}

/* Scores of the keys [first, end), and of those that share a vector with them. */
FV_ALWAYS_INLINE void fv_few_dot(float *scores, const float *q, const fv_key_rows *rows, int32_t first, int32_t end,
                                 int32_t head_size, const int32_t num_rows, const fv_dtype dtype,
                                 const fv_prefetch_order order)
{
    const int32_t num_keys = num_rows >= 3 ? 4 : 8;
    const int64_t bytes = fv_few_element_bytes(dtype);
    const int64_t read_bytes = FV_WIDE_COLUMNS * num_keys * bytes;
    fv_prefetch_cursor cursor = fv_prefetch_begin(rows->ahead, order);
    for (int32_t key = first / num_keys * num_keys; key < end; key += num_keys) {
        const char *k[FV_LANES];
        fv_lanes sums[16];
        FV_UNROLL
        for (int32_t j = 0; j < num_keys; j++) k[j] = rows->k[key + j] + rows->k_offset;
        FV_UNROLL
        for (int32_t i = 0; i < num_keys * num_rows; i++) sums[i] = fv_lanes_splat(0.0f);

        const fv_prefetch_portion ahead = fv_few_portion(&cursor, head_size * num_keys * bytes);
        const float *of_rows = q;
        int32_t d = 0;
        int64_t asked = 0;
        for (; d + FV_WIDE_COLUMNS <= head_size;
             d += FV_WIDE_COLUMNS, of_rows += FV_WIDE_COLUMNS * num_rows, asked += read_bytes) {
            fv_few_dot_units(sums, of_rows, k, d * bytes, num_rows, num_keys, dtype, 0, &cursor, ahead, asked,
                             read_bytes);
        }
        if (!FV_WIDE_LOOKS_UP && d < head_size)
            fv_few_dot_units(sums, of_rows, k, d * bytes, num_rows, num_keys, dtype, 1, &cursor, ahead, asked,
                             read_bytes / 2);
        fv_few_store_dots(scores + key * fv_few_scores_of_key(num_rows), sums, num_keys, num_rows);
    }
    fv_prefetch_end(&cursor);
}

/* --- sums = sums * rescale + weights V ---------------------------------------------------------------- */

/* The keys [first, end) for `num_units` units of columns, which start `from` bytes into a row of V. masked: a key of
 * weight 0 adds nothing, whatever its value. */
FV_ALWAYS_INLINE void fv_few_accumulate_units(float *sums, const float *weights, const fv_key_rows *rows, int32_t first,
                                              int32_t end, int64_t from, const int32_t num_units,
                                              const int32_t num_rows, const fv_dtype dtype, const int32_t masked,
                                              const int32_t is_half, const fv_prefetch_order order)
{
    const int64_t offset = rows->v_offset + from;
    const int64_t bytes = fv_few_element_bytes(dtype);
    const int64_t key_bytes = num_units * (is_half ? 8 : 16) * bytes;
    fv_prefetch_cursor cursor = fv_prefetch_begin(rows->ahead, order);
    const fv_prefetch_portion ahead = fv_few_portion(&cursor, (end - first) * key_bytes);
    fv_lanes acc[16];
    FV_UNROLL
    for (int32_t i = 0; i < num_units * num_rows; i++) acc[i] = fv_lanes_splat(0.0f);
    int64_t asked = 0;
    for (int32_t key = first; key < end; key++, asked += key_bytes) {
        const char *row = rows->v[key] + offset;
        if (key_bytes < FV_CACHE_LINE && asked % FV_CACHE_LINE == 0)
            fv_few_ask(&cursor, ahead, asked, FV_CACHE_LINE, 2);
        fv_lanes weight[4];
        FV_UNROLL
        for (int32_t r = 0; r < num_rows; r++)
            weight[r] = fv_lanes_splat(weights[key * fv_few_scores_of_key(num_rows) + r]);
        fv_wide_read values;
        FV_UNROLL
        for (int32_t u = 0; u < num_units; u++) {
            const int64_t of_unit = u * key_bytes / num_units;
            if (key_bytes >= FV_CACHE_LINE && of_unit % FV_CACHE_LINE == 0)
                fv_few_ask(&cursor, ahead, asked + of_unit, FV_CACHE_LINE, 2);
            if (u % FV_WIDE_UNITS == 0) fv_wide_read_from(&values, row + u * 16 * bytes, dtype, is_half);
            const fv_lanes value = fv_wide_unit(&values, u % FV_WIDE_UNITS);
            FV_UNROLL
            for (int32_t r = 0; r < num_rows; r++) {
                const fv_lane_ints seen = masked ? weight[r] != 0.0f : (fv_lane_ints){0};
                const fv_lanes of_row = masked ? (fv_lanes)((fv_lane_ints)value & seen) : value;
                acc[u * num_rows + r] = fv_wide_fma_onto(acc[u * num_rows + r], weight[r], of_row);
            }
        }
    }
    FV_UNROLL
    for (int32_t i = 0; i < num_units * num_rows; i++)
        fv_lanes_store(sums + i * FV_FEW_UNIT, fv_lanes_load(sums + i * FV_FEW_UNIT) + acc[i]);
    fv_prefetch_end(&cursor);
}

/* Few keys at a time, see few_rows.h; rescale NULL: sums stay as they are. */
FV_ALWAYS_INLINE void fv_few_accumulate(float *sums, const float *weights, const float *rescale,
                                        const fv_key_rows *rows, int32_t first, int32_t end, int32_t v_head_size,
                                        const int32_t num_rows, const fv_dtype dtype, const int32_t masked,
                                        const fv_prefetch_order order)
{
    const int64_t bytes = fv_few_element_bytes(dtype);
    if (rescale) fv_few_rescale(sums, rescale, v_head_size, num_rows, FV_FEW_UNIT);
    for (int32_t key = first, end_key; key < end; key = end_key) {
        end_key = fv_few_end_of_run(key, end);
        float *to = sums;
        int32_t d = 0;
        for (; num_rows < 3 && d + 128 <= v_head_size; d += 128, to += 128 * num_rows)
            fv_few_accumulate_units(to, weights, rows, key, end_key, d * bytes, 8, num_rows, dtype, masked, 0, order);
        for (; d + 64 <= v_head_size; d += 64, to += 64 * num_rows)
            fv_few_accumulate_units(to, weights, rows, key, end_key, d * bytes, 4, num_rows, dtype, masked, 0, order);
        for (; !FV_WIDE_LOOKS_UP && d + 16 <= v_head_size; d += 16, to += 16 * num_rows)
            fv_few_accumulate_units(to, weights, rows, key, end_key, d * bytes, 1, num_rows, dtype, masked, 0, order);
        if (!FV_WIDE_LOOKS_UP && d < v_head_size)
            fv_few_accumulate_units(to, weights, rows, key, end_key, d * bytes, 1, num_rows, dtype, masked, 1, order);
    }
}

/* One row of a group's sums, in the lane order of `lane_dtype`. */
static inline void fv_few_unblock_row(float *to, const float *sums, int32_t row, int32_t num_rows, int32_t v_head_size,
                                      fv_dtype dtype)
{
    (void)dtype;
    sums += row * FV_FEW_UNIT;
    for (int32_t d = 0; d < v_head_size; d += FV_WIDE_COLUMNS, sums += FV_WIDE_COLUMNS * num_rows) {
#if FV_WIDE_LOOKS_UP
        fv_wide_units_to_columns(to + d, sums, num_rows * FV_FEW_UNIT);
#else
        memcpy(to + d, sums, (size_t)fv_min_i32(FV_FEW_UNIT, v_head_size - d) * sizeof(float));
#endif
    }
}

#endif
