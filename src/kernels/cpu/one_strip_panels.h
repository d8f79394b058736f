/* The products of one strip over any format:
 *
 *   keys, then values       a tile of a KV head, to panels of 16 elements in fp32, once for all rows
 *   scores^T [key][row]  =  K [key][d]     times  Q^T [d][row]     16 keys x 16 rows in registers, 8 x 32
 *   sums     [row][col] +=  P^T [key][row] times  V [key][col]     8 rows x 32 columns
 *
 * with vectors of 16 lanes; of 8 it is 4 keys x 16 or 24 rows, and up to 6 rows x 16 columns. So a multiply-add takes its left
 * factor from memory, one element for all lanes, and is all that there is to do for it. Values take the place of the keys: both
 * would not stay in L1. */
#ifndef FV_KERNELS_CPU_ONE_STRIP_PANELS_H
#define FV_KERNELS_CPU_ONE_STRIP_PANELS_H

#include "kernels/cpu/few_tile.h"
#include "kernels/cpu/row_strip.h"

#if FV_STRIP_WIDE
#include "kernels/cpu/wide_load.h"

enum {
    FV_PANELS_MOST_VECTORS = 2, /* of rows: more are as fast as many */
    FV_PANELS_STEP_KEYS = 16,   /* at most */
    FV_PANELS_STEP_ROWS = 8,
    FV_PANELS_STEP_COLUMNS = 2 * FV_STRIP_LANES,
};
#else
enum {
    FV_PANELS_MOST_VECTORS = 3,
    FV_PANELS_STEP_KEYS = 4,
    FV_PANELS_STEP_ROWS = 6,
    FV_PANELS_STEP_COLUMNS = 2 * FV_STRIP_LANES,
};
#endif

enum {
    FV_PANELS_MOST_ROWS = FV_PANELS_MOST_VECTORS * FV_STRIP_LANES,
    FV_PANELS_ASK_DEPTH = 4, /* elements of keys between two requests for memory */
    FV_PANELS_ASK_KEYS = 4   /* the same of values, keys */
};

/* The keys or values of a tile and a KV head in fp32: [D / 16][tile_keys][16], lane order. */
typedef struct fv_panels {
    float *at;
    int32_t tile_keys;
} fv_panels;

static inline int32_t fv_panels_take_source(const fv_key_source *source)
{
    return source->k_in_place && source->v_in_place && source->shared_size == 0;
}

/* 1: all keys and values lie in rows; latents, of which fp32 would leave no room in L1, are others'. */
static inline int32_t fv_panels_serve(const fv_attend_job *job)
{
    const fv_attend_params *params = job->params;
    if (params->cache.dtype != FV_DTYPE_NONE) {
        if (!fv_panels_take_source(&job->cache) || job->cache.k.data == job->cache.v.data) return 0;
    }
    return !params->dense.k || fv_panels_take_source(&job->dense);
}

/* As which tiles are cut: in fp32 they are to stay in L1, however few bytes they have in memory. */
static inline fv_dtype fv_panels_tile_dtype(const fv_attend_job *job)
{
    return fv_dtype_bytes(job->lane_dtype) == 1 ? FV_DTYPE_BF16 : job->lane_dtype;
}

/* --- what all levels of panels have alike, those of pairs not --------------------------------------------------------- */

/* Intel's cores, which ask for lines in tracks, have more than few rows that way as fast with few of them at work, and 1.2 times
 * slower with all. */
static inline int32_t fv_one_most_rows(const fv_attend_params *params)
{
    return params->ahead_tracks > 1 ? FV_DECODE_ROWS : FV_PANELS_MOST_ROWS;
}

/* The same of all calls. */
static inline int32_t fv_one_shared_rows(void)
{
    return fv_cpu_ahead_tracks() > 1 ? FV_DECODE_ROWS : FV_PANELS_MOST_ROWS;
}

/* 1: more rows than few have one strip over such a cache. */
static inline int32_t fv_one_shares_heads(const fv_problem *problem)
{
    return problem->kv_layout != FV_KV_LAYOUT_X_PACKED && problem->kv_layout != FV_KV_LAYOUT_SHUFFLED;
}

/* They become fp32. */
static inline int32_t fv_one_takes_queries(fv_dtype q_dtype) { return q_dtype != FV_DTYPE_NONE; }

static inline int32_t fv_one_reads_pieces(const fv_attend_job *job) { return (void)job, 0; }

/* A row of sums in lane order. */
static inline const float *fv_one_sums_in_lanes(float *copy, const fv_row_strip *strip, int32_t row,
                                                int32_t num_columns, fv_dtype lane_dtype, int32_t in_pieces)
{
    (void)copy, (void)lane_dtype, (void)in_pieces;
    return strip->sums + (int64_t)row * num_columns;
}

/* --- panels ------------------------------------------------------------------------------------------------------ */

/* A panel's elements of a key, times 1 / fv_few_factor. */
FV_ALWAYS_INLINE void fv_panels_convert(float *to, const char *from, const fv_dtype dtype)
{
    const float factor = fv_few_factor(dtype);
#if FV_STRIP_WIDE
    const fv_lanes value = fv_wide_load16(from, dtype);
    fv_lanes_store(to, factor == 1.0f ? value : value * factor);
#else
    const fv_f32x16 value = fv_few_load16(from, dtype);
    fv_store_f32(to, factor == 1.0f ? value.a : value.a * factor);
    fv_store_f32(to + FV_LANES, factor == 1.0f ? value.b : value.b * factor);
#endif
}

FV_ALWAYS_INLINE void fv_panels_make_as(const fv_panels *panels, const char *const *rows, int64_t offset,
                                        const fv_strip_span *span, int32_t size, const fv_dtype dtype)
{
    const int64_t panel = (int64_t)panels->tile_keys * FV_STRIP_PANEL, bytes = fv_few_element_bytes(dtype);
    for (int32_t key = span->first; key < span->end; key++) {
        const char *from = rows[key] + offset;
        float *to = panels->at + (int64_t)key * FV_STRIP_PANEL;
        for (int32_t d = 0; d < size; d += FV_STRIP_PANEL, to += panel) fv_panels_convert(to, from + d * bytes, dtype);
    }
}

static inline void fv_panels_make(const fv_panels *panels, const char *const *rows, int64_t offset,
                                  const fv_strip_span *span, int32_t size, fv_dtype dtype)
{
#define MAKE(DTYPE)                                             \
    fv_panels_make_as(panels, rows, offset, span, size, DTYPE); \
    break
    switch (dtype) {
    case FV_DTYPE_F32: MAKE(FV_DTYPE_F32);
    case FV_DTYPE_F16: MAKE(FV_DTYPE_F16);
    case FV_DTYPE_BF16: MAKE(FV_DTYPE_BF16);
    case FV_DTYPE_F8_E4M3: MAKE(FV_DTYPE_F8_E4M3);
    case FV_DTYPE_F8_E5M2: MAKE(FV_DTYPE_F8_E5M2);
    case FV_DTYPE_I8: MAKE(FV_DTYPE_I8);
    case FV_DTYPE_NONE: break;
    }
#undef MAKE
}

/* --- lines of the next tile ---------------------------------------------------------------------------------------- */

/* Lines for each request, so that those of all heads have asked for all of it: it is as long as this one. */
static inline fv_strip_ahead fv_panels_ahead(const fv_key_rows *rows, const fv_attend_params *params, int32_t num_keys,
                                             int32_t num_rows)
{
    const int64_t bytes = (int64_t)num_keys * (params->head_size + params->v_head_size) * rows->stored_bytes;
    const int64_t of_scores = fv_ceil_div(num_keys, FV_PANELS_STEP_KEYS) * (params->head_size / FV_PANELS_ASK_DEPTH);
    const int64_t of_sums = fv_ceil_div(num_keys, FV_PANELS_ASK_KEYS) * fv_ceil_div(num_rows, FV_PANELS_STEP_ROWS) *
                            (params->v_head_size / FV_PANELS_STEP_COLUMNS);
    return (fv_strip_ahead){rows->ahead, (int32_t)fv_ceil_div(bytes, FV_CACHE_LINE * (of_scores + of_sums))};
}

/* --- scores = K Q^T ------------------------------------------------------------------------------------------------ */

FV_ALWAYS_INLINE void fv_panels_score_as(float *scores, const fv_row_strip *strip, const fv_panels *panels,
                                         const fv_strip_span *span, fv_strip_ahead *ahead, const int32_t num_vectors,
                                         const int32_t step_keys)
{
    const int32_t head_size = span->job->params->head_size, width = num_vectors * FV_STRIP_LANES;
    const int64_t panel = (int64_t)panels->tile_keys * FV_STRIP_PANEL;
    for (int32_t key = span->first / step_keys * step_keys; key < span->end; key += step_keys) {
        const float *k = panels->at + (int64_t)key * FV_STRIP_PANEL, *q = strip->q;
        fv_strip_lanes acc[16];
        FV_UNROLL
        for (int32_t i = 0; i < step_keys * num_vectors; i++) acc[i] = fv_strip_splat(0.0f);
        for (int32_t d = 0; d < head_size; d += FV_STRIP_PANEL, k += panel - FV_STRIP_PANEL) {
            for (int32_t i = 0; i < FV_STRIP_PANEL; i += FV_PANELS_ASK_DEPTH, k += FV_PANELS_ASK_DEPTH) {
                fv_strip_ahead_ask(ahead, 1);
                FV_UNROLL
                for (int32_t e = 0; e < FV_PANELS_ASK_DEPTH; e++, q += width) {
                    fv_strip_lanes row[FV_STRIP_VECTORS];
                    FV_UNROLL
                    for (int32_t v = 0; v < num_vectors; v++) row[v] = fv_strip_load(q + v * FV_STRIP_LANES);
                    FV_UNROLL
                    for (int32_t j = 0; j < step_keys; j++) {
                        FV_UNROLL
                        for (int32_t v = 0; v < num_vectors; v++)
                            acc[j * num_vectors + v] = fv_strip_add_product(acc[j * num_vectors + v],
                                                                            k + j * FV_STRIP_PANEL + e, row[v]);
                    }
                }
            }
        }
        FV_UNROLL
        for (int32_t i = 0; i < step_keys * num_vectors; i++)
            fv_strip_store(scores + key * width + i * FV_STRIP_LANES, acc[i]);
    }
}

/* Of the span's keys, and of those that fill up steps. */
static inline void fv_panels_score(float *scores, const fv_row_strip *strip, const fv_panels *panels,
                                   const fv_strip_span *span, fv_strip_ahead *ahead)
{
#define SCORE(VECTORS, KEYS) fv_panels_score_as(scores, strip, panels, span, ahead, VECTORS, KEYS)
#if FV_STRIP_WIDE
    if (strip->num_vectors == 1)
        SCORE(1, FV_PANELS_STEP_KEYS);
    else
        SCORE(2, FV_PANELS_STEP_KEYS / 2);
#else
    if (strip->num_vectors == 2)
        SCORE(2, FV_PANELS_STEP_KEYS);
    else
        SCORE(3, FV_PANELS_STEP_KEYS);
#endif
#undef SCORE
}

/* --- sums += P V ----------------------------------------------------------------------------------------------------- */

/* num_rows rows x num_units vectors of columns; masked: a weight of 0 hides its value, be it infinite or NaN. */
FV_ALWAYS_INLINE void fv_panels_add_columns(float *sums, int32_t num_columns, const float *weights, int32_t width,
                                            const float *rescale, const float *values, int64_t panel, int32_t first,
                                            int32_t end, const int32_t num_rows, const int32_t num_units,
                                            const int32_t masked, fv_strip_ahead *ahead)
{
    fv_strip_lanes acc[FV_PANELS_STEP_ROWS][2];
    FV_UNROLL
    for (int32_t r = 0; r < num_rows; r++) {
        FV_UNROLL
        for (int32_t u = 0; u < num_units; u++) acc[r][u] = fv_strip_splat(0.0f);
    }
    for (int32_t key = first; key < end;) {
        fv_strip_ahead_ask(ahead, 1);
        for (const int32_t stop = fv_min_i32(key + FV_PANELS_ASK_KEYS, end); key < stop; key++) {
            fv_strip_lanes value[2];
            FV_UNROLL
            for (int32_t u = 0; u < num_units; u++) {
                const int32_t column = u * FV_STRIP_LANES;
                value[u] = fv_strip_load(values + column / FV_STRIP_PANEL * panel + key * FV_STRIP_PANEL +
                                         column % FV_STRIP_PANEL);
            }
            FV_UNROLL
            for (int32_t r = 0; r < num_rows; r++) {
                const float *weight = &weights[key * width + r];
                FV_UNROLL
                for (int32_t u = 0; u < num_units; u++)
                    acc[r][u] = fv_strip_add_product(acc[r][u], weight,
                                                     masked ? fv_strip_seen_by(weight, value[u]) : value[u]);
            }
        }
    }
    FV_UNROLL
    for (int32_t r = 0; r < num_rows; r++) {
        FV_UNROLL
        for (int32_t u = 0; u < num_units; u++) {
            float *at = sums + (int64_t)r * num_columns + u * FV_STRIP_LANES;
            fv_strip_store(at, fv_strip_load(at) * rescale[r] + acc[r][u]);
        }
    }
}

FV_ALWAYS_INLINE void fv_panels_add_as(const float *weights, const fv_row_strip *strip, const fv_panels *panels,
                                       const fv_strip_span *span, fv_strip_ahead *ahead, const int32_t masked)
{
    const int32_t size = span->job->params->v_head_size, num_rows = span->job->num_rows;
    const int64_t panel = (int64_t)panels->tile_keys * FV_STRIP_PANEL;
    const int32_t width = fv_row_strip_width(strip);
#define ADD(ROWS, UNITS)                                                                                               \
    fv_panels_add_columns(strip->sums + (int64_t)row * size + d, size, weights + row, width, strip->rescale + row,     \
                          panels->at + d / FV_STRIP_PANEL * panel, panel, span->first, span->end, ROWS, UNITS, masked, \
                          ahead)
    for (int32_t d = 0; d < size; d += FV_PANELS_STEP_COLUMNS) {
#if FV_STRIP_WIDE
        for (int32_t row = 0; row < num_rows; row += FV_PANELS_STEP_ROWS) {
            if (d + FV_STRIP_LANES < size)
                ADD(FV_PANELS_STEP_ROWS, 2);
            else
                ADD(FV_PANELS_STEP_ROWS, 1);
        }
#else /* 16 rows are 6, 5 and 5 */
        for (int32_t row = 0, num; row < num_rows; row += num) {
            num = row > 0 && width == 2 * FV_STRIP_LANES ? FV_PANELS_STEP_ROWS - 1 : FV_PANELS_STEP_ROWS;
            if (num == FV_PANELS_STEP_ROWS)
                ADD(FV_PANELS_STEP_ROWS, 2);
            else
                ADD(FV_PANELS_STEP_ROWS - 1, 2);
        }
#endif
    }
#undef ADD
}

/* sums = sums * rescale + weights^T V. */
static inline void fv_panels_add(const float *weights, const fv_row_strip *strip, const fv_panels *panels,
                                 const fv_strip_span *span, fv_strip_ahead *ahead)
{
    if (span->is_edge)
        fv_panels_add_as(weights, strip, panels, span, ahead, 1);
    else
        fv_panels_add_as(weights, strip, panels, span, ahead, 0);
}

#endif
