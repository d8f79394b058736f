/* The products of one strip of 16, 32 or 48 rows over bf16 by pairs (bf16_pairs.h), nothing converted but the weights:
 *
 *   scores^T [key][row]  = pairs of K [key][d]  times  pairs of Q^T [d][row]     16 keys x 16 rows in registers, 8 x 32, 4 x 48
 *   sums     [row][col] += weights of two keys  times  their values, interleaved, 8 rows x 32 columns
 *
 * Sums have the columns of each 32 as fv_pairs_low and fv_pairs_high leave them. Lines are asked for as for fewer rows
 * (few_kernels.h). */
#ifndef FV_KERNELS_CPU_ONE_STRIP_PAIRS_H
#define FV_KERNELS_CPU_ONE_STRIP_PAIRS_H

#include "kernels/cpu/few_tile.h"
#include "kernels/cpu/many_pairs.h"

enum {
    FV_ONE_MOST_ROWS = FV_STRIP_ROWS,
    FV_ONE_STEP_KEYS = 16, /* at most */
    FV_ONE_STEP_ROWS = 8,
    FV_ONE_STEP_COLUMNS = 32,
    FV_ONE_STEP_DEPTH = 16,
    FV_ONE_ASKS = 2 /* for each line in order */
};

/* Fewer are groups of four, two where products are fast, three where they are what binds: empty lanes take as long as others. */
static inline int32_t fv_one_least_rows(const fv_attend_params *params) { return params->multiplies_pairs ? 5 : 13; }

static inline int32_t fv_one_takes_queries(fv_dtype q_dtype) { return q_dtype == FV_DTYPE_BF16; }

/* Where products are fast: many rows that way, of one KV head, read a part of each row of the cache. */
static inline int32_t fv_one_most_rows(const fv_attend_params *params)
{
    return params->multiplies_pairs ? FV_ONE_MOST_ROWS : FV_DECODE_ROWS;
}

/* The same of all calls. */
static inline int32_t fv_one_shared_rows(void)
{
#if !defined(FV_PAIRS_EMULATED)
    if (!fv_cpu_multiplies_pairs()) return FV_DECODE_ROWS;
#endif
    return FV_ONE_MOST_ROWS;
}

/* 1: more rows than few have one strip over such a cache. */
static inline int32_t fv_one_shares_heads(const fv_problem *problem)
{
    const int32_t of_bytes = fv_dtype_bytes(problem->kv_dtype) == 1 &&
                             problem->kv_scaling != FV_KV_SCALING_PER_TOKEN_HEAD;
    return problem->kv_dtype == FV_DTYPE_BF16 || of_bytes;
}

static inline int32_t fv_one_in_panels(const fv_attend_job *job) { return (void)job, 0; }

static inline int32_t fv_one_num_vectors(int32_t num_rows) { return fv_strip_num_vectors(num_rows); }

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

/* Elements 2i and 2i + 1. */
FV_ALWAYS_INLINE fv_words fv_one_pair(const char *from, const int32_t i, const int64_t piece_stride)
{
    uint32_t pair;
    memcpy(&pair, from + i / 4 * piece_stride + i % 4 * 4, sizeof(pair));
    return fv_pairs_splat(pair);
}

/* step_keys: those in registers, 4, 8 or 16; 8 elements of a key lie side by side, the next ones piece_stride bytes behind.
 * stored_bytes: of an element of the memory that is asked for. */
FV_ALWAYS_INLINE void fv_one_score_as(float *scores, const fv_row_strip *strip, const fv_key_rows *rows,
                                      const fv_strip_span *span, const int32_t num_vectors, const int32_t step_keys,
                                      const int64_t piece_stride, const int32_t stored_bytes,
                                      const fv_prefetch_order order)
{
    const int32_t head_size = span->job->params->head_size, pairs = FV_ONE_STEP_DEPTH / 2;
    const int32_t width = num_vectors * FV_STRIP_LANES;
    const int64_t step_bytes = FV_ONE_STEP_DEPTH * stored_bytes;
    fv_prefetch_cursor cursor = fv_prefetch_begin(rows->ahead, order);
    for (int32_t key = span->first; key < span->end; key += step_keys) {
        const char *k[FV_ONE_STEP_KEYS];
        fv_lanes acc[FV_ONE_STEP_KEYS];
        for (int32_t j = 0; j < step_keys; j++) k[j] = rows->k[fv_min_i32(key + j, span->end - 1)] + rows->k_offset;
        FV_UNROLL
        for (int32_t i = 0; i < step_keys * num_vectors; i++) acc[i] = fv_lanes_splat(0.0f);
        const fv_prefetch_portion ahead = fv_few_portion(&cursor, step_keys * head_size * stored_bytes);
        for (int32_t d = 0; d < head_size; d += FV_ONE_STEP_DEPTH) {
            const float *q = strip->q + d / 2 * width;
            const int64_t at = d / 8 * piece_stride;
            fv_words row[FV_ONE_STEP_DEPTH / 2];
            FV_UNROLL
            for (int32_t i = 0; i < pairs && num_vectors == 1; i++) row[i] = fv_words_load(q + i * width);
            FV_UNROLL
            for (int32_t j = 0; j < step_keys; j++) {
                if (j * step_bytes % FV_CACHE_LINE == 0)
                    fv_few_ask(&cursor, ahead, (d * step_keys + j * FV_ONE_STEP_DEPTH) * stored_bytes, FV_CACHE_LINE,
                               FV_ONE_ASKS);
                FV_UNROLL
                for (int32_t i = 0; i < pairs && num_vectors == 1; i++)
                    acc[j] = fv_pairs_dot(acc[j], fv_one_pair(k[j] + at, i, piece_stride), row[i]);
            }
            FV_UNROLL
            for (int32_t i = 0; i < pairs && num_vectors > 1; i++) {
                FV_UNROLL
                for (int32_t v = 0; v < num_vectors; v++) row[v] = fv_words_load(q + i * width + v * FV_STRIP_LANES);
                FV_UNROLL
                for (int32_t j = 0; j < step_keys; j++) {
                    const fv_words pair = fv_one_pair(k[j] + at, i, piece_stride);
                    FV_UNROLL
                    for (int32_t v = 0; v < num_vectors; v++)
                        acc[j * num_vectors + v] = fv_pairs_dot(acc[j * num_vectors + v], pair, row[v]);
                }
            }
        }
        FV_UNROLL
        for (int32_t i = 0; i < step_keys * num_vectors; i++)
            fv_lanes_store(scores + key * width + i * FV_STRIP_LANES, acc[i]);
    }
    fv_prefetch_end(&cursor);
}

/* Of the span's keys; the last step may have its last key again. */
static inline void fv_one_score(float *scores, const fv_row_strip *strip, const fv_key_rows *rows,
                                const fv_strip_span *span, fv_strip_ahead *ahead)
{
    (void)ahead;
#define SCORE(VECTORS, KEYS, STRIDE, BYTES) \
    fv_one_score_as(scores, strip, rows, span, VECTORS, KEYS, STRIDE, BYTES, order)
#define SCORE_ROWS(VECTORS, KEYS)                            \
    do {                                                     \
        if (rows->stored_bytes == 1)                         \
            SCORE(VECTORS, KEYS, FV_FEW_PIECE_BYTES, 1);     \
        else if (rows->k_piece_stride == FV_FEW_PIECE_BYTES) \
            SCORE(VECTORS, KEYS, FV_FEW_PIECE_BYTES, 2);     \
        else                                                 \
            SCORE(VECTORS, KEYS, rows->k_piece_stride, 2);   \
    } while (0)
#define SCORE_EACH(ORDER)                                    \
    do {                                                     \
        const fv_prefetch_order order = ORDER;               \
        switch (strip->num_vectors) {                        \
        case 1: SCORE_ROWS(1, FV_ONE_STEP_KEYS); break;      \
        case 2: SCORE_ROWS(2, FV_ONE_STEP_KEYS / 2); break;  \
        default: SCORE_ROWS(3, FV_ONE_STEP_KEYS / 4); break; \
        }                                                    \
    } while (0)
    FV_ONE_EACH_ORDER(rows->ahead, SCORE_EACH)
#undef SCORE_EACH
#undef SCORE_ROWS
#undef SCORE
}

/* --- sums += P V --------------------------------------------------------------------------------------------- */

/* 8 rows x 32 columns, which begin `offset` bytes behind rows->v, for some keys, whose weights are `width` apart. Asks for their
 * lines where `cursor` is not NULL, half of them where an element has one byte in memory. masked: a weight of 0 hides its value,
 * be it infinite or NaN. */
FV_ALWAYS_INLINE void fv_one_add_pairs(float *sums, int32_t num_columns, const float *weights, int32_t width,
                                       const float *rescale, const char *const *v, int64_t offset, int32_t first,
                                       int32_t end, const int32_t masked, const int32_t stored_bytes,
                                       fv_prefetch_cursor *cursor)
{
    fv_lanes acc[FV_ONE_STEP_ROWS][2];
    FV_UNROLL
    for (int32_t r = 0; r < FV_ONE_STEP_ROWS; r++) {
        FV_UNROLL
        for (int32_t u = 0; u < 2; u++) {
            acc[r][u] = fv_lanes_splat(0.0f);
        }
    }
    fv_prefetch_portion ahead = {0};
    const int64_t bytes_of_two = FV_CACHE_LINE * stored_bytes;
    if (cursor) ahead = fv_few_portion(cursor, (end - first) * bytes_of_two / 2);
    int64_t asked = 0;
    for (int32_t key = first / 2 * 2; key < end; key += 2, asked += bytes_of_two) {
        if (cursor) fv_few_ask(cursor, ahead, asked, bytes_of_two, FV_ONE_ASKS);
        const fv_words none = {0};
        const fv_words even = key < first ? none : fv_words_load(v[key] + offset);
        const fv_words odd = key + 1 >= end ? none : fv_words_load(v[key + 1] + offset);
        const fv_words values[2] = {fv_pairs_low(even, odd), fv_pairs_high(even, odd)};
        FV_UNROLL
        for (int32_t r = 0; r < FV_ONE_STEP_ROWS; r++) {
            uint32_t pair;
            memcpy(&pair, weights + key / 2 * width + r, sizeof(pair));
            const fv_words weight = fv_pairs_splat(pair), seen = masked ? fv_pairs_splat(fv_pairs_seen(pair)) : weight;
            FV_UNROLL
            for (int32_t u = 0; u < 2; u++)
                acc[r][u] = fv_pairs_dot(acc[r][u], masked ? values[u] & seen : values[u], weight);
        }
    }
    FV_UNROLL
    for (int32_t r = 0; r < FV_ONE_STEP_ROWS; r++) {
        FV_UNROLL
        for (int32_t u = 0; u < 2; u++) {
            float *at = sums + (int64_t)r * num_columns + u * FV_STRIP_LANES;
            fv_lanes_store(at, fv_lanes_load(at) * rescale[r] + acc[r][u]);
        }
    }
}

FV_ALWAYS_INLINE void fv_one_add_rows_as(const float *weights, const fv_row_strip *strip, const fv_key_rows *rows,
                                         const fv_strip_span *span, const int32_t masked, const int32_t stored_bytes,
                                         const fv_prefetch_order order)
{
    const int32_t size = span->job->params->v_head_size, num_rows = span->job->num_rows;
    const int32_t width = fv_row_strip_width(strip);
    fv_prefetch_cursor cursor = fv_prefetch_begin(rows->ahead, order);
    for (int32_t d = 0; d < size; d += FV_ONE_STEP_COLUMNS) {
        for (int32_t row = 0; row < num_rows; row += FV_ONE_STEP_ROWS)
            fv_one_add_pairs(strip->sums + (int64_t)row * size + d, size, weights + row, width, strip->rescale + row,
                             rows->v, rows->v_offset + d * 2, span->first, span->end, masked, stored_bytes,
                             row == 0 ? &cursor : NULL);
    }
    fv_prefetch_end(&cursor);
}

/* sums = sums * rescale + weights^T V, of pairs of weights. */
static inline void fv_one_add_rows(const float *weights, const fv_row_strip *strip, const fv_key_rows *rows,
                                   const fv_strip_span *span)
{
#define ADD(MASKED, BYTES) fv_one_add_rows_as(weights, strip, rows, span, MASKED, BYTES, order)
#define ADD_EACH(ORDER)                                          \
    do {                                                         \
        const fv_prefetch_order order = ORDER;                   \
        switch (2 * rows->stored_bytes + (span->is_edge != 0)) { \
        case 2: ADD(0, 1); break;                                \
        case 3: ADD(1, 1); break;                                \
        case 4: ADD(0, 2); break;                                \
        default: ADD(1, 2); break;                               \
        }                                                        \
    } while (0)
    FV_ONE_EACH_ORDER(rows->ahead, ADD_EACH)
#undef ADD_EACH
#undef ADD
}

/* A row of sums [row][col] in natural order. */
static inline void fv_one_unblock_row(float *natural, const float *sums, int32_t num_columns)
{
    for (int32_t d = 0; d < num_columns; d += FV_ONE_STEP_COLUMNS)
        fv_lanes_store_natural(natural + d, sums + d, sums + d + FV_STRIP_LANES);
}

#endif
