/* One strip with vectors of 8 lanes. Of other formats than bf16, and of 17 to 24 rows, over panels (one_strip_panels.h); of 16 rows
 * over bf16, converted to fp32 in registers, by units that multiply nothing:
 *
 *   scores^T [key][row]  = K [key][d]     times  Q^T [d][row]     4 keys x 16 rows in registers
 *   sums     [row][col] += P^T [key][row] times  V [key][col]     up to 6 rows x 16 columns
 *
 * one_strip_pairs.h has those of pairs of bf16. */
#ifndef FV_KERNELS_CPU_ONE_STRIP_FLOATS_H
#define FV_KERNELS_CPU_ONE_STRIP_FLOATS_H

#include "kernels/cpu/one_strip_panels.h"

enum {
    FV_ONE_MOST_ROWS = FV_PANELS_MOST_ROWS,
    FV_ONE_VECTORS = FV_DECODE_ROWS / FV_LANES,
    FV_ONE_STEP_KEYS = 4,
    FV_ONE_STEP_ROWS = 6, /* at most */
    FV_ONE_STEP_COLUMNS = 16,
    FV_ONE_STEP_DEPTH = 16 /* elements of keys between two requests for memory */
};

/* Fewer leave too many lanes empty. */
static inline int32_t fv_one_least_rows(const fv_attend_params *params) { return (void)params, 13; }

static inline int32_t fv_one_num_vectors(int32_t num_rows)
{
    return fv_max_i32(FV_ONE_VECTORS, fv_strip_num_vectors(num_rows));
}

/* 1: products in registers, of latents too. */
static inline int32_t fv_one_in_registers(const fv_attend_job *job, int64_t num_rows)
{
    return num_rows <= FV_DECODE_ROWS && fv_few_reads_bf16(job);
}

static inline int32_t fv_one_serves(const fv_attend_job *job, int64_t num_rows)
{
    const fv_attend_params *params = job->params;
    if (fv_one_in_registers(job, num_rows)) return 1;
    /* Intel's cores have groups of four 1.2 to 1.4 times as fast, but for what takes long to convert. */
    if (params->ahead_tracks > 1 && params->cache.dtype != FV_DTYPE_F8_E4M3) return 0;
    return fv_panels_serve(job);
}

/* Lines of the next tile for each request, so that the requests of all heads have asked for all of it: it is as long as this. */
static inline int32_t fv_one_lines_of_request(const fv_attend_params *params, int32_t num_keys)
{
    const int64_t bytes = num_keys * (params->head_size + params->v_head_size) * fv_few_element_bytes(FV_DTYPE_BF16);
    const int64_t num_requests = fv_ceil_div(num_keys, FV_ONE_STEP_KEYS) * (params->head_size / FV_ONE_STEP_DEPTH) +
                                 fv_ceil_div(FV_DECODE_ROWS, FV_ONE_STEP_ROWS) *
                                     (params->v_head_size / FV_ONE_STEP_COLUMNS);
    return (int32_t)fv_ceil_div(bytes, FV_CACHE_LINE * num_requests);
}

static inline fv_strip_ahead fv_one_ahead(const fv_key_rows *rows, const fv_attend_params *params, int32_t num_keys)
{
    return (fv_strip_ahead){rows->ahead, fv_one_lines_of_request(params, num_keys)};
}

/* --- scores = K Q^T ------------------------------------------------------------------------------------------ */

/* The elements in pairs of bf16 from k[j] on, each a word of `bytes`, with those of the strip's queries: in lane order the even
 * ones of 16, then the odd ones. */
FV_ALWAYS_INLINE void fv_one_score_depth(fv_f32x8 acc[FV_ONE_STEP_KEYS * FV_ONE_VECTORS],
                                         const char *const k[FV_ONE_STEP_KEYS], int64_t bytes, const float *q)
{
    for (int32_t i = 0; i < FV_ONE_STEP_DEPTH / 2; i++, bytes += 4, q += FV_DECODE_ROWS) {
        fv_u32x8 pairs[FV_ONE_STEP_KEYS];
        FV_UNROLL
        for (int32_t j = 0; j < FV_ONE_STEP_KEYS; j++) {
            float pair;
            memcpy(&pair, k[j] + bytes, sizeof(pair));
            pairs[j] = (fv_u32x8)fv_in_register(fv_splat(pair));
        }
        FV_UNROLL
        for (int32_t half = 0; half < 2; half++) {
            fv_f32x8 rows[FV_ONE_VECTORS];
            FV_UNROLL
            for (int32_t v = 0; v < FV_ONE_VECTORS; v++)
                rows[v] = fv_in_register(fv_load_f32(q + half * FV_LANES * FV_DECODE_ROWS + v * FV_LANES));
            FV_UNROLL
            for (int32_t j = 0; j < FV_ONE_STEP_KEYS; j++) {
                const fv_f32x8 element = (fv_f32x8)(half ? pairs[j] & 0xffff0000u : pairs[j] << 16);
                FV_UNROLL
                for (int32_t v = 0; v < FV_ONE_VECTORS; v++)
                    acc[j * FV_ONE_VECTORS + v] = fv_fma_onto(acc[j * FV_ONE_VECTORS + v], element, rows[v]);
            }
        }
    }
}

/* Of the span's keys; the last step may have its last key again. A question for the order between the products would cost them
 * their registers (1.2 times the time on Zen 5): is_near is known when it is compiled. */
FV_ALWAYS_INLINE void fv_one_score_as(float *all_scores, const fv_row_strip *strip, const fv_key_rows *rows,
                                      const fv_strip_span *span, fv_strip_ahead *ahead, const int32_t is_near)
{
    const int32_t head_size = span->job->params->head_size;
    for (int32_t key = span->first; key < span->end; key += FV_ONE_STEP_KEYS) {
        float *scores = all_scores + key * FV_DECODE_ROWS;
        const char *k[FV_ONE_STEP_KEYS];
        fv_f32x8 acc[FV_ONE_STEP_KEYS * FV_ONE_VECTORS];
        for (int32_t j = 0; j < FV_ONE_STEP_KEYS; j++)
            k[j] = rows->k[fv_min_i32(key + j, span->end - 1)] + rows->k_offset;
        FV_UNROLL
        for (int32_t i = 0; i < FV_ONE_STEP_KEYS * FV_ONE_VECTORS; i++) acc[i] = fv_splat(0.0f);
        for (int32_t d = 0; d < head_size; d += FV_ONE_STEP_DEPTH) {
            fv_strip_ahead_ask_as(ahead, 1, is_near);
            fv_one_score_depth(acc, k, d * fv_few_element_bytes(FV_DTYPE_BF16), strip->q + d * FV_DECODE_ROWS);
        }
        FV_UNROLL
        for (int32_t i = 0; i < FV_ONE_STEP_KEYS * FV_ONE_VECTORS; i++) fv_store_f32(scores + i * FV_LANES, acc[i]);
    }
}

static inline void fv_one_score(float *scores, const fv_row_strip *strip, const fv_key_rows *rows,
                                const fv_strip_span *span, fv_strip_ahead *ahead)
{
    if (ahead->stream->order == FV_PREFETCH_NEAR)
        fv_one_score_as(scores, strip, rows, span, ahead, 1);
    else
        fv_one_score_as(scores, strip, rows, span, ahead, 0);
}

/* --- sums += P V --------------------------------------------------------------------------------------------- */

/* num_rows rows x 16 columns, which begin `offset` bytes behind rows->v; masked: a weight of 0 hides its value, be it infinite
 * or NaN. */
FV_ALWAYS_INLINE void fv_one_add_rows(float *sums, int32_t num_columns, const float *weights, const float *rescale,
                                      const fv_key_rows *rows, int64_t offset, int32_t first, int32_t end,
                                      const int32_t num_rows, const int32_t masked)
{
    fv_f32x8 acc[FV_ONE_STEP_ROWS][2];
    FV_UNROLL
    for (int32_t r = 0; r < num_rows; r++) {
        FV_UNROLL
        for (int32_t u = 0; u < 2; u++) {
            acc[r][u] = fv_splat(0.0f);
        }
    }
    for (int32_t key = first; key < end; key++) {
        const fv_f32x16 value = fv_load16(rows->v[key] + offset, FV_DTYPE_BF16);
        FV_UNROLL
        for (int32_t r = 0; r < num_rows; r++) {
            const fv_f32x8 weight = fv_splat(weights[key * FV_DECODE_ROWS + r]);
            acc[r][0] = fv_fma(weight, masked ? fv_strip_seen(value.a, weight) : value.a, acc[r][0]);
            acc[r][1] = fv_fma(weight, masked ? fv_strip_seen(value.b, weight) : value.b, acc[r][1]);
        }
    }
    FV_UNROLL
    for (int32_t r = 0; r < num_rows; r++) {
        FV_UNROLL
        for (int32_t u = 0; u < 2; u++) {
            float *at = sums + r * num_columns + u * FV_LANES;
            const fv_f32x8 sum = fv_load_f32(at);
            fv_store_f32(at, rescale ? sum * rescale[r] + acc[r][u] : sum + acc[r][u]);
        }
    }
}

static inline int32_t fv_one_keeps_sums(const fv_row_strip *strip)
{
    for (int32_t i = 0; i < FV_DECODE_ROWS; i++)
        if (strip->rescale[i] != 1.0f) return 0;
    return 1;
}

/* 16 rows are 6, 5 and 5. */
static inline void fv_one_accumulate(float *weights, const fv_row_strip *strip, const fv_key_rows *rows,
                                     const fv_strip_span *span, fv_strip_ahead *ahead)
{
    const int32_t size = span->job->params->v_head_size, keeps = fv_one_keeps_sums(strip);
    for (int32_t d = 0; d < size; d += FV_ONE_STEP_COLUMNS) {
        const int64_t offset = rows->v_offset + d * fv_few_element_bytes(FV_DTYPE_BF16);
        for (int32_t row = 0, num; row < FV_DECODE_ROWS; row += num) {
            num = row == 0 ? FV_ONE_STEP_ROWS : FV_ONE_STEP_ROWS - 1;
            fv_strip_ahead_ask(ahead, 1);
#define ADD(ROWS, MASKED)                                                                                            \
    fv_one_add_rows(strip->sums + (int64_t)row * size + d, size, weights + row, keeps ? NULL : strip->rescale + row, \
                    rows, offset, span->first, span->end, ROWS, MASKED)
            switch (2 * num + span->is_edge) {
            case 2 * FV_ONE_STEP_ROWS: ADD(FV_ONE_STEP_ROWS, 0); break;
            case 2 * FV_ONE_STEP_ROWS + 1: ADD(FV_ONE_STEP_ROWS, 1); break;
            case 2 * FV_ONE_STEP_ROWS - 2: ADD(FV_ONE_STEP_ROWS - 1, 0); break;
            default: ADD(FV_ONE_STEP_ROWS - 1, 1); break;
            }
#undef ADD
        }
    }
}

static inline int32_t fv_one_in_panels(const fv_attend_job *job) { return !fv_one_in_registers(job, job->num_rows); }

#endif
