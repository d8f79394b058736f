/* The products of few rows, read from keys and values where they lie and converted in registers: R = 1, 2 or 4
 * rows share each converted key (row_group.h). Eight dot products (R rows x 8 / R keys) are reduced together,
 * which leaves the scores in the order of the softmax.
 *
 * 3 rows have products of their own on AVX2: 12 sums, of 4 keys each or of 32 columns. Scores and softmax are those of 4
 * rows, the last twice, and so are the bits of the results.
 *
 * Between the arithmetic the memory of the next tile is prefetched, a line for each line that is worked on, FV_PREFETCH_ASKS
 * times. */
#ifndef FV_KERNELS_CPU_FEW_ROWS_H
#define FV_KERNELS_CPU_FEW_ROWS_H

#include "kernels/cpu/few_kernels.h"

/* Columns of a block of sums: 8 vectors, of 3 rows 12. */
FV_ALWAYS_INLINE int32_t fv_few_block_width(const int32_t num_rows)
{
    return num_rows == 3 ? 32 : FV_LANES * FV_LANES / num_rows;
}

#define FV_FEW_MAX_SUMS 12

/* The lane order of the queries that fv_few_pack_query takes, and of sums. */
FV_ALWAYS_INLINE fv_dtype fv_few_query_order(fv_dtype dtype)
{
    return dtype == FV_FEW_E4M3_BITS ? FV_DTYPE_BF16 : dtype;
}

/* --- scores = K q ----------------------------------------------------------------------------------- */

/* Queries of a group, times fv_few_rest, in the order of their use: for each 16 elements in lane order the first 8 of each
 * row, then the second 8; a rest of 8 likewise. `lanes` is row `row`. */
static inline void fv_few_pack_query(float *q, const float *lanes, int32_t row, int32_t head_size, int32_t num_rows,
                                     fv_dtype dtype)
{
    const float factor = fv_few_rest(dtype);
    int32_t d = 0;
    for (; d + 16 <= head_size; d += 16, q += 16 * num_rows) {
        fv_store_f32(q + row * FV_LANES, fv_load_f32(lanes + d) * factor);
        fv_store_f32(q + (num_rows + row) * FV_LANES, fv_load_f32(lanes + d + FV_LANES) * factor);
    }
    if (d < head_size) fv_store_f32(q + row * FV_LANES, fv_load_f32(lanes + d) * factor);
}

#if FV_FEW_HAS_3_ROWS
/* The first or the last 8 of 16 elements in lane order, as fv_few_load16 has them; of fp8 `halves` are their fp16 or bf16. */
FV_ALWAYS_INLINE fv_f32x8 fv_few_load_half(const char *from, const __m256i *halves, const int32_t is_last,
                                           const fv_dtype dtype)
{
    if (fv_few_is_fp8(dtype)) return fv_load8_f16((const char *)halves + is_last * 16);
    if (dtype == FV_FEW_E4M3_BITS)
        from = (const char *)halves;
    else if (dtype != FV_DTYPE_BF16)
        return fv_load8(from + is_last * FV_LANES * fv_few_element_bytes(dtype), dtype);
    if (!is_last) return fv_load16(from, FV_DTYPE_BF16).a;
    typedef float unaligned __attribute__((vector_size(32), aligned(4), may_alias));
    static const uint32_t upper[FV_LANES] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                             0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
    /* No register for the mask, and none for the load to wait in from the first half. */
    fv_f32x8 value;
    __asm__("vmovups %1, %0\n\tvandps %2, %0, %0"
            : "=x"(value)
            : "m"(*(const unaligned *)(const void *)from), "m"(*(const unaligned *)(const void *)upper));
    return value;
}

/* 16 elements of 4 keys and 3 rows: 12 sums leave registers for two queries, a key and what decodes it. fp8 becomes
 * fp16 or bf16 in memory: from there a conversion is one operation, from a register two or three. */
FV_ALWAYS_INLINE void fv_few_dot_step_of_3(fv_f32x8 *sums, const float *q, const char *const k[FV_LANES],
                                           int64_t offset, const fv_dtype dtype)
{
    __m256i halves[4];
    if (fv_few_is_fp8(dtype) || dtype == FV_FEW_E4M3_BITS) {
        FV_UNROLL
        for (int32_t j = 0; j < 4; j++) {
            halves[j] = dtype == FV_FEW_E4M3_BITS   ? fv_bf16_of_16_e4m3_tiny(k[j] + offset)
                        : dtype == FV_DTYPE_F8_E4M3 ? fv_f16_of_16_e4m3_small(k[j] + offset)
                                                    : fv_f16_of_16_e5m2(k[j] + offset);
        }
        __asm__("" : "+m"(halves));
    }
    FV_UNROLL
    for (int32_t i = 0; i < 2; i++, q += 3 * FV_LANES) {
        const fv_f32x8 a = fv_in_register(fv_load_f32(q)), b = fv_in_register(fv_load_f32(q + FV_LANES));
        FV_UNROLL
        for (int32_t j = 0; j < 4; j++) {
            const fv_f32x8 key = fv_in_register(fv_few_load_half(k[j] + offset, &halves[j], i, dtype));
            sums[j * 3] = fv_fma_onto(sums[j * 3], key, a);
            sums[j * 3 + 1] = fv_fma_onto(sums[j * 3 + 1], key, b);
            sums[j * 3 + 2] = fv_fma_load_onto(sums[j * 3 + 2], key, q + 2 * FV_LANES);
        }
    }
}
#endif

/* 16 elements of 8 / R keys and R rows: 16 multiply-adds. A vector of queries serves all the keys from a register.
 * With R = 4, where each has two uses only, some are read twice as operands instead: that leaves as many loads and
 * as many instructions as a core takes at a time. Where more than a shift and a mask decodes a key, all are. */
FV_ALWAYS_INLINE void fv_few_dot_step(fv_f32x8 *sums, const float *q, const char *const k[FV_LANES], int64_t offset,
                                      const int32_t num_rows, const fv_dtype dtype)
{
#if FV_FEW_HAS_3_ROWS
    if (num_rows == 3) {
        fv_few_dot_step_of_3(sums, q, k, offset, dtype);
        return;
    }
#endif
    const int32_t num_keys = FV_LANES / num_rows;
    fv_f32x16 keys[FV_LANES];
    FV_UNROLL
    for (int32_t j = 0; j < num_keys; j++) keys[j] = fv_few_load16(k[j] + offset, dtype);
    FV_UNROLL
    for (int32_t i = 0; i < 2 * num_rows; i++) {
        const int32_t r = i % num_rows, is_operand = num_rows == 4 && (dtype != FV_DTYPE_BF16 || i % 3 == 2);
        const float *at = q + i * FV_LANES;
        const fv_f32x8 row = is_operand ? fv_splat(0.0f) : fv_in_register(fv_load_f32(at));
        FV_UNROLL
        for (int32_t j = 0; j < num_keys; j++) {
            const fv_f32x8 key = i < num_rows ? keys[j].a : keys[j].b;
            fv_f32x8 *sum = &sums[j * num_rows + r];
            *sum = is_operand ? fv_fma_load_onto(*sum, key, at) : fv_fma_onto(*sum, key, row);
        }
    }
}

/* Stores the sums of the lanes of num_keys x R vectors, as scores. */
FV_ALWAYS_INLINE void fv_few_store_dots(float *scores, const fv_f32x8 *sums, const int32_t num_keys,
                                        const int32_t num_rows)
{
    if (num_rows != 3) {
        fv_store_f32(scores, fv_reduce8(sums));
        return;
    }
    FV_UNROLL
    for (int32_t j = 0; j < num_keys; j += 2) fv_store_f32(scores + j * 4, fv_reduce6(sums + j * 3));
}

/* Scores of the keys [first, end), and of those that share a vector with them. */
FV_ALWAYS_INLINE void fv_few_dot(float *scores, const float *q, const fv_key_rows *rows, int32_t first, int32_t end,
                                 int32_t head_size, const int32_t num_rows, const fv_dtype dtype,
                                 const fv_prefetch_order order)
{
    const int32_t num_keys = num_rows == 3 ? 4 : FV_LANES / num_rows, num_sums = num_keys * num_rows;
    const int64_t bytes = fv_few_element_bytes(dtype);
    fv_prefetch_cursor cursor = fv_prefetch_begin(rows->ahead, order);
    for (int32_t key = first / num_keys * num_keys; key < end; key += num_keys) {
        const char *k[FV_LANES];
        fv_f32x8 sums[FV_FEW_MAX_SUMS];
        FV_UNROLL
        for (int32_t j = 0; j < num_keys; j++) k[j] = rows->k[key + j] + rows->k_offset;
        FV_UNROLL
        for (int32_t i = 0; i < num_sums; i++) sums[i] = fv_splat(0.0f);

        const fv_prefetch_portion ahead = fv_few_portion(&cursor, head_size * num_keys * bytes);
        const float *of_rows = q;
        int32_t d = 0;
        for (; d + 16 <= head_size; d += 16, of_rows += 16 * num_rows) {
            fv_few_ask(&cursor, ahead, d * num_keys * bytes, 16 * num_keys * bytes, FV_PREFETCH_ASKS);
            fv_few_dot_step(sums, of_rows, k, d * bytes, num_rows, dtype);
        }
        if (d < head_size) {
            FV_UNROLL
            for (int32_t j = 0; j < num_keys; j++) {
                const fv_f32x8 one = fv_few_load8(k[j] + d * bytes, dtype);
                FV_UNROLL
                for (int32_t r = 0; r < num_rows; r++) {
                    fv_f32x8 *sum = &sums[j * num_rows + r];
                    *sum = fv_fma(fv_load_f32(of_rows + r * FV_LANES), one, *sum);
                }
            }
        }
        fv_few_store_dots(scores + key * fv_few_scores_of_key(num_rows), sums, num_keys, num_rows);
    }
    fv_prefetch_end(&cursor);
}

/* --- sums = sums * rescale + weights V ---------------------------------------------------------------- */

#if FV_FEW_HAS_3_ROWS
/* As fv_few_add_key, for 3 rows and 4 vectors: 12 sums, so two values and one weight at a time. */
FV_ALWAYS_INLINE void fv_few_add_key_of_3(fv_f32x8 *acc, const char *row, const float *weights, const fv_dtype dtype)
{
    const int64_t bytes = fv_few_element_bytes(dtype);
    FV_UNROLL
    for (int32_t c = 0; c < 4; c += 2) {
        const fv_f32x16 values = fv_few_load16(row + c * FV_LANES * bytes, dtype);
        FV_UNROLL
        for (int32_t r = 0; r < 3; r++) {
            const fv_f32x8 weight = fv_splat_again(&weights[r]);
            acc[r * 4 + c] = fv_fma_onto(acc[r * 4 + c], weight, values.a);
            acc[r * 4 + c + 1] = fv_fma_onto(acc[r * 4 + c + 1], weight, values.b);
        }
    }
}
#endif

/* Adds a key's values, times the weight of each row. */
FV_ALWAYS_INLINE void fv_few_add_key(fv_f32x8 *acc, const char *row, const float *weights, const int32_t num_vectors,
                                     const int32_t num_rows, const fv_dtype dtype, const int32_t masked)
{
#if FV_FEW_HAS_3_ROWS
    if (num_rows == 3 && num_vectors == 4 && !masked) {
        fv_few_add_key_of_3(acc, row, weights, dtype);
        return;
    }
#endif
    const int64_t bytes = fv_few_element_bytes(dtype);
    fv_f32x8 values[FV_LANES];
    if (num_vectors == 1) values[0] = fv_few_load8(row, dtype);
    FV_UNROLL
    for (int32_t c = 0; c + 1 < num_vectors; c += 2) {
        const fv_f32x16 pair = fv_few_load16(row + c * FV_LANES * bytes, dtype);
        values[c] = pair.a;
        values[c + 1] = pair.b;
    }
    FV_UNROLL
    for (int32_t r = 0; r < num_rows; r++) {
        const fv_f32x8 weight = fv_splat(weights[r]);
        const fv_i32x8 seen = (fv_i32x8)(weight != 0.0f);
        FV_UNROLL
        for (int32_t c = 0; c < num_vectors; c++) {
            const fv_f32x8 value = masked ? (fv_f32x8)((fv_i32x8)values[c] & seen) : values[c];
            acc[r * num_vectors + c] = fv_fma_onto(acc[r * num_vectors + c], weight, value);
        }
    }
}

/* A run's sums join those of a row. */
FV_ALWAYS_INLINE void fv_few_join(float *sums, const fv_f32x8 *acc, const int32_t num, const fv_dtype dtype)
{
    const float factor = fv_few_rest(dtype);
    FV_UNROLL
    for (int32_t i = 0; i < num; i++) {
        const fv_f32x8 sum = fv_load_f32(sums + i * FV_LANES);
        fv_store_f32(sums + i * FV_LANES, factor == 1.0f ? sum + acc[i] : fv_fma(acc[i], fv_splat(factor), sum));
    }
}

/* One block of columns: `num_vectors` vectors for each row of the group, side by side in `sums`. `from` is the byte
 * offset of the columns in a row of V. masked: a key of weight 0 adds nothing, whatever its value. */
FV_ALWAYS_INLINE void fv_few_accumulate_block(float *sums, const float *weights, const fv_key_rows *rows, int32_t first,
                                              int32_t end, int64_t from, const int32_t num_vectors,
                                              const int32_t num_rows, const fv_dtype dtype, const int32_t masked,
                                              const fv_prefetch_order order)
{
    const int64_t offset = rows->v_offset + from;
    const int64_t key_bytes = num_vectors * FV_LANES * fv_few_element_bytes(dtype);
    fv_prefetch_cursor cursor = fv_prefetch_begin(rows->ahead, order);
    const fv_prefetch_portion ahead = fv_few_portion(&cursor, (end - first) * key_bytes);
    fv_f32x8 acc[FV_FEW_MAX_SUMS];
    FV_UNROLL
    for (int32_t i = 0; i < num_rows * num_vectors; i++) acc[i] = fv_splat(0.0f);
    int32_t key = first;
    for (; key + 2 <= end; key += 2) {
        fv_few_ask(&cursor, ahead, (key - first) * key_bytes, 2 * key_bytes, FV_PREFETCH_ASKS);
        fv_few_add_key(acc, rows->v[key] + offset, weights + key * fv_few_scores_of_key(num_rows), num_vectors,
                       num_rows, dtype, masked);
        fv_few_add_key(acc, rows->v[key + 1] + offset, weights + (key + 1) * fv_few_scores_of_key(num_rows),
                       num_vectors, num_rows, dtype, masked);
    }
    if (key < end)
        fv_few_add_key(acc, rows->v[key] + offset, weights + key * fv_few_scores_of_key(num_rows), num_vectors,
                       num_rows, dtype, masked);
    fv_prefetch_end(&cursor);
    fv_few_join(sums, acc, num_rows * num_vectors, dtype);
}

/* The same for FV_FEW_ACCUMULATE_KEYS keys whose rows are `stride` apart, and which need no addresses therefore. */
FV_ALWAYS_INLINE void fv_few_accumulate_even(float *sums, const float *weights, const char *row, int64_t stride,
                                             fv_prefetch_cursor *cursor, const int32_t num_vectors,
                                             const int32_t num_rows, const fv_dtype dtype)
{
    const int64_t key_bytes = num_vectors * FV_LANES * fv_few_element_bytes(dtype);
    const fv_prefetch_portion ahead = fv_few_portion(cursor, FV_FEW_ACCUMULATE_KEYS * key_bytes);
    fv_f32x8 acc[FV_FEW_MAX_SUMS];
    FV_UNROLL
    for (int32_t i = 0; i < num_rows * num_vectors; i++) acc[i] = fv_splat(0.0f);
    for (int32_t key = 0; key < FV_FEW_ACCUMULATE_KEYS; key += 4, row += 4 * stride) {
        FV_UNROLL
        for (int32_t i = 0; i < 4; i++) {
            if (i % 2 == 0) fv_few_ask(cursor, ahead, (key + i) * key_bytes, 2 * key_bytes, FV_PREFETCH_ASKS);
            fv_few_add_key(acc, row + i * stride, weights + (key + i) * fv_few_scores_of_key(num_rows), num_vectors,
                           num_rows, dtype, 0);
        }
    }
    fv_few_join(sums, acc, num_rows * num_vectors, dtype);
}

/* The blocks of 64 / R columns of full groups of keys. Returns the columns done. */
FV_ALWAYS_INLINE int32_t fv_few_accumulate_wide(float *sums, const float *weights, const fv_key_rows *rows,
                                                int32_t first, int32_t v_head_size, const int32_t num_rows,
                                                const fv_dtype dtype, const fv_prefetch_order order)
{
    const int32_t width = fv_few_block_width(num_rows);
    const char *row = rows->v[first] + rows->v_offset;
    const int64_t stride = rows->v_stride;
    fv_prefetch_cursor cursor = fv_prefetch_begin(rows->ahead, order);
    weights += first * fv_few_scores_of_key(num_rows);
    int32_t d = 0;
    for (; d + width <= v_head_size; d += width, row += width * fv_few_element_bytes(dtype), sums += width * num_rows) {
        fv_few_accumulate_even(sums, weights, row, stride, &cursor, width / FV_LANES, num_rows, dtype);
    }
    fv_prefetch_end(&cursor);
    return d;
}

FV_ALWAYS_INLINE void fv_few_rescale(float *sums, const float *rescale, int32_t v_head_size, const int32_t num_rows)
{
    const int32_t width = fv_few_block_width(num_rows);
    for (int32_t d = 0, block; d < v_head_size; d += block) {
        block = d + width <= v_head_size ? width : d + 16 <= v_head_size ? 16 : 8;
        for (int32_t r = 0; r < num_rows; r++) {
            for (int32_t c = 0; c < block; c += FV_LANES, sums += FV_LANES) {
                fv_store_f32(sums, fv_load_f32(sums) * rescale[r]);
            }
        }
    }
}

/* Eight accumulators at a time, as in fv_few_dot: blocks of 64 / R columns, then of 16, then of 8. Few keys at a
 * time, for where the heads of a token lie side by side, the rows of one head are so far apart that a
 * tile's fall into a few sets of the L1 cache, and the next columns would find the keys evicted. rescale NULL: sums
 * stay as they are. */
FV_ALWAYS_INLINE void fv_few_accumulate(float *sums, const float *weights, const float *rescale,
                                        const fv_key_rows *rows, int32_t first, int32_t end, int32_t v_head_size,
                                        const int32_t num_rows, const fv_dtype dtype, const int32_t masked,
                                        const fv_prefetch_order order)
{
    const int64_t bytes = fv_few_element_bytes(dtype);
    const int32_t width = fv_few_block_width(num_rows);
    if (rescale) fv_few_rescale(sums, rescale, v_head_size, num_rows);
    for (int32_t key = first, end_key; key < end; key = end_key) {
        end_key = fv_few_end_of_run(key, end);
        int32_t d = 0;
        if (!masked && rows->v_stride && end_key - key == FV_FEW_ACCUMULATE_KEYS)
            d = fv_few_accumulate_wide(sums, weights, rows, key, v_head_size, num_rows, dtype, order);
        for (; d + width <= v_head_size; d += width) {
            fv_few_accumulate_block(sums + d * num_rows, weights, rows, key, end_key, d * bytes, width / FV_LANES,
                                    num_rows, dtype, masked, order);
        }
        for (; d + 16 <= v_head_size; d += 16) {
            fv_few_accumulate_block(sums + d * num_rows, weights, rows, key, end_key, d * bytes, 2, num_rows, dtype,
                                    masked, order);
        }
        if (d < v_head_size) {
            fv_few_accumulate_block(sums + d * num_rows, weights, rows, key, end_key, d * bytes, 1, num_rows, dtype,
                                    masked, order);
        }
    }
}

/* One row of a group's sums, side by side, in the lane order of the rows that `dtype` is of. */
static inline void fv_few_unblock_row(float *to, const float *sums, int32_t row, int32_t num_rows, int32_t v_head_size,
                                      fv_dtype dtype)
{
    for (int32_t d = 0; d < v_head_size;) {
        int32_t width = fv_few_block_width(num_rows);
        if (d + width > v_head_size) width = d + 16 > v_head_size ? 8 : 16;
        memcpy(to + d, sums + d * num_rows + row * width, (size_t)width * sizeof(float));
        d += width;
    }
    if (dtype == FV_FEW_E4M3_BITS) fv_row_store_lanes(to, to, 1.0f, v_head_size, FV_DTYPE_F32, FV_DTYPE_BF16);
}

#endif
