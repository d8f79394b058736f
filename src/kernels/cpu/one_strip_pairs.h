/* The products of one strip of 16 rows over bf16 by pairs (bf16_pairs.h), nothing converted but the weights:
 *
 *   scores^T [key][row]  = pairs of K [key][d]  times  pairs of Q^T [d][row]     16 keys in registers
 *   sums     [row][col] += weights of two keys  times  their values, interleaved, 8 rows x 32 columns
 *
 * Sums have the columns of each 32 as fv_pairs_low and fv_pairs_high leave them. Lines are asked for as for fewer rows
 * (few_kernels.h). */
#ifndef FV_KERNELS_CPU_ONE_STRIP_PAIRS_H
#define FV_KERNELS_CPU_ONE_STRIP_PAIRS_H

#include "kernels/cpu/few_tile.h"
#include "kernels/cpu/many_pairs.h"

enum {
    FV_ONE_VECTORS = FV_DECODE_ROWS / FV_STRIP_LANES,
    FV_ONE_STEP_KEYS = 16,
    FV_ONE_STEP_ROWS = 8,
    FV_ONE_STEP_COLUMNS = 32,
    FV_ONE_STEP_DEPTH = 16,
    FV_ONE_ASKS = 2 /* for each line in order */
};

/* Fewer are groups of four, two where products are fast, three where they are what binds: empty lanes take as long as others. */
static inline int32_t fv_one_least_rows(const fv_attend_params *params) { return params->multiplies_pairs ? 5 : 13; }

static inline int32_t fv_one_takes_queries(fv_dtype q_dtype) { return q_dtype == FV_DTYPE_BF16; }

/* Calls FORM(order) with the order of a stream, known when it is compiled. */
#define FV_ONE_EACH_ORDER(stream, FORM)                             \
    switch ((stream)->order) {                                      \
    case FV_PREFETCH_IN_TRACKS: FORM(FV_PREFETCH_IN_TRACKS); break; \
    case FV_PREFETCH_NEAR: FORM(FV_PREFETCH_NEAR); break;           \
    default: FORM(FV_PREFETCH_IN_ORDER); break;                     \
    }

/* Nothing: the products have cursors of their own. */
static inline fv_strip_ahead fv_one_ahead(const fv_key_rows *rows, const fv_attend_params *params, int32_t num_keys)
{
    return (void)params, (void)num_keys, (fv_strip_ahead){rows->ahead, 0};
}

/* --- scores = K Q^T ------------------------------------------------------------------------------------------ */

FV_ALWAYS_INLINE void fv_one_score_as(float *scores, const fv_row_strip *strip, const fv_key_rows *rows,
                                      const fv_strip_span *span, const fv_prefetch_order order)
{
    const int32_t head_size = span->job->params->head_size, pairs = FV_ONE_STEP_DEPTH / 2;
    const int64_t step_bytes = FV_ONE_STEP_DEPTH * 2;
    fv_prefetch_cursor cursor = fv_prefetch_begin(rows->ahead, order);
    for (int32_t key = span->first; key < span->end; key += FV_ONE_STEP_KEYS) {
        const char *k[FV_ONE_STEP_KEYS];
        fv_lanes acc[FV_ONE_STEP_KEYS];
        for (int32_t j = 0; j < FV_ONE_STEP_KEYS; j++)
            k[j] = rows->k[fv_min_i32(key + j, span->end - 1)] + rows->k_offset;
        FV_UNROLL
        for (int32_t j = 0; j < FV_ONE_STEP_KEYS; j++) acc[j] = fv_lanes_splat(0.0f);
        const fv_prefetch_portion ahead = fv_few_portion(&cursor, FV_ONE_STEP_KEYS * head_size * 2);
        for (int32_t d = 0; d < head_size; d += FV_ONE_STEP_DEPTH) {
            fv_words q[FV_ONE_STEP_DEPTH / 2];
            FV_UNROLL
            for (int32_t i = 0; i < pairs; i++) q[i] = fv_words_load(strip->q + (d / 2 + i) * FV_DECODE_ROWS);
            FV_UNROLL
            for (int32_t j = 0; j < FV_ONE_STEP_KEYS; j++) {
                if (j * step_bytes % FV_CACHE_LINE == 0)
                    fv_few_ask(&cursor, ahead, (d * FV_ONE_STEP_KEYS + j * FV_ONE_STEP_DEPTH) * 2, FV_CACHE_LINE,
                               FV_ONE_ASKS);
                const char *from = k[j] + d * 2;
                FV_UNROLL
                for (int32_t i = 0; i < pairs; i++) {
                    uint32_t pair;
                    memcpy(&pair, from + i * 4, sizeof(pair));
                    acc[j] = fv_pairs_dot(acc[j], fv_pairs_splat(pair), q[i]);
                }
            }
        }
        FV_UNROLL
        for (int32_t j = 0; j < FV_ONE_STEP_KEYS; j++) fv_lanes_store(scores + (key + j) * FV_DECODE_ROWS, acc[j]);
    }
    fv_prefetch_end(&cursor);
}

/* Of the span's keys; the last step may have its last key again. */
static inline void fv_one_score(float *scores, const fv_row_strip *strip, const fv_key_rows *rows,
                                const fv_strip_span *span, fv_strip_ahead *ahead)
{
    (void)ahead;
#define SCORE(ORDER) fv_one_score_as(scores, strip, rows, span, ORDER)
    FV_ONE_EACH_ORDER(rows->ahead, SCORE)
#undef SCORE
}

/* --- sums += P V --------------------------------------------------------------------------------------------- */

/* 8 rows x 32 columns, which begin `offset` bytes behind rows->v, for some keys; `asks` for their lines where `cursor` is not NULL.
 * masked: a weight of 0 hides its value, be it infinite or NaN. */
FV_ALWAYS_INLINE void fv_one_add_pairs(float *sums, int32_t num_columns, const float *weights, const float *rescale,
                                       const char *const *v, int64_t offset, int32_t first, int32_t end,
                                       const int32_t masked, fv_prefetch_cursor *cursor)
{
    fv_lanes acc[FV_ONE_STEP_ROWS][2];
    FV_UNROLL
    for (int32_t r = 0; r < FV_ONE_STEP_ROWS; r++) {
        FV_UNROLL
        for (int32_t u = 0; u < 2; u++) {
            acc[r][u] = fv_lanes_load(sums + (int64_t)r * num_columns + u * FV_STRIP_LANES);
            acc[r][u] *= rescale[r];
        }
    }
    fv_prefetch_portion ahead = {0};
    if (cursor) ahead = fv_few_portion(cursor, (end - first) * FV_CACHE_LINE);
    int64_t asked = 0;
    for (int32_t key = first / 2 * 2; key < end; key += 2, asked += 2 * FV_CACHE_LINE) {
        if (cursor) fv_few_ask(cursor, ahead, asked, 2 * FV_CACHE_LINE, FV_ONE_ASKS);
        const fv_words none = {0};
        const fv_words even = key < first ? none : fv_words_load(v[key] + offset);
        const fv_words odd = key + 1 >= end ? none : fv_words_load(v[key + 1] + offset);
        const fv_words values[2] = {fv_pairs_low(even, odd), fv_pairs_high(even, odd)};
        FV_UNROLL
        for (int32_t r = 0; r < FV_ONE_STEP_ROWS; r++) {
            uint32_t pair;
            memcpy(&pair, weights + key / 2 * FV_DECODE_ROWS + r, sizeof(pair));
            const fv_words weight = fv_pairs_splat(pair), seen = masked ? fv_pairs_splat(fv_pairs_seen(pair)) : weight;
            FV_UNROLL
            for (int32_t u = 0; u < 2; u++)
                acc[r][u] = fv_pairs_dot(acc[r][u], masked ? values[u] & seen : values[u], weight);
        }
    }
    FV_UNROLL
    for (int32_t r = 0; r < FV_ONE_STEP_ROWS; r++) {
        FV_UNROLL
        for (int32_t u = 0; u < 2; u++) fv_lanes_store(sums + (int64_t)r * num_columns + u * FV_STRIP_LANES, acc[r][u]);
    }
}

FV_ALWAYS_INLINE void fv_one_accumulate_as(const float *weights, const fv_row_strip *strip, const fv_key_rows *rows,
                                           const fv_strip_span *span, const int32_t masked,
                                           const fv_prefetch_order order)
{
    const int32_t size = span->job->params->v_head_size, num_rows = span->job->num_rows;
    fv_prefetch_cursor cursor = fv_prefetch_begin(rows->ahead, order);
    for (int32_t d = 0; d < size; d += FV_ONE_STEP_COLUMNS) {
        for (int32_t row = 0; row < num_rows; row += FV_ONE_STEP_ROWS)
            fv_one_add_pairs(strip->sums + (int64_t)row * size + d, size, weights + row, strip->rescale + row, rows->v,
                             rows->v_offset + d * 2, span->first, span->end, masked, row == 0 ? &cursor : NULL);
    }
    fv_prefetch_end(&cursor);
}

/* sums = sums * rescale + weights^T V; the weights become pairs in place. */
static inline void fv_one_accumulate(float *weights, const fv_row_strip *strip, const fv_key_rows *rows,
                                     const fv_strip_span *span, fv_strip_ahead *ahead)
{
    (void)ahead;
    fv_many_pack_weights(weights, span->first, span->end, FV_DECODE_ROWS);
#define ADD(ORDER) fv_one_accumulate_as(weights, strip, rows, span, 0, ORDER)
#define ADD_MASKED(ORDER) fv_one_accumulate_as(weights, strip, rows, span, 1, ORDER)
    if (span->is_edge) {
        FV_ONE_EACH_ORDER(rows->ahead, ADD_MASKED)
    } else {
        FV_ONE_EACH_ORDER(rows->ahead, ADD)
    }
#undef ADD
#undef ADD_MASKED
}

/* A row of sums in the lane order of bf16; `copy` has room for it. */
static inline const float *fv_one_sums_in_lanes(float *copy, const float *sums, int32_t num_columns)
{
    for (int32_t d = 0; d < num_columns; d += FV_ONE_STEP_COLUMNS) {
        float natural[FV_ONE_STEP_COLUMNS];
        fv_lanes_store_natural(natural, sums + d, sums + d + FV_STRIP_LANES);
        fv_row_load_lanes(copy + d, (const char *)natural, FV_ONE_STEP_COLUMNS, FV_DTYPE_F32, FV_DTYPE_BF16);
    }
    return copy;
}

#endif
