/* The two products of attention over fp32 rows, for strips of query rows, one to a lane:
 *
 *   scores^T [key][row]  = K [key][d]     times  Q^T [d][row]     4 keys x 24 rows in registers
 *   sums     [row][col] += P^T [key][row] times  V [key][col]     6 rows x 16 columns in registers
 *
 * with vectors of 8 lanes; with 16 (AVX-512, or FV_STRIP_WIDE=1 in plain C) 4 keys x 48 rows and 12 rows x 32 columns.
 * The left factor is broadcast an element at a time, the right one is read in vectors. A row's arithmetic is the same in
 * any strip and lane.
 *
 * Of pairs of bf16 (FV_HAS_PAIRS, bf16_pairs.h) an element has two numbers: elements 2i and 2i + 1 of K and Q, the weights
 * of keys 2i and 2i + 1, and their values. Depths and keys of sums count pairs then, and pointers to float mean elements. */
#ifndef FV_KERNELS_CPU_STRIP_PRODUCT_H
#define FV_KERNELS_CPU_STRIP_PRODUCT_H

#include "kernels/cpu/lanes.h"
#include "kernels/cpu/strip_ahead.h"

#if defined(FV_HAS_PAIRS)
#include "kernels/cpu/bf16_pairs.h"
#endif

#if defined(__AVX512F__) || defined(FV_HAS_PAIRS)
#define FV_STRIP_WIDE 1
#endif

#if FV_STRIP_WIDE
typedef fv_lanes fv_strip_lanes;
typedef fv_lane_ints fv_strip_mask;
enum { FV_STRIP_LANES = 16, FV_STRIP_STEP_ROWS = 12 };
#else
typedef fv_f32x8 fv_strip_lanes;
typedef fv_i32x8 fv_strip_mask;
enum { FV_STRIP_LANES = FV_LANES, FV_STRIP_STEP_ROWS = 6 };
#endif

enum {
    FV_STRIP_STEP_KEYS = 4, /* for which lines are asked for at a time */
    FV_STRIP_VECTORS = 3,   /* of a full strip, of FV_STRIP_LANES rows each */
    FV_STRIP_ROWS = FV_STRIP_VECTORS * FV_STRIP_LANES,
    FV_STRIP_KEYS = 8,   /* scores are computed for whole multiples of this many keys */
    FV_STRIP_DEPTH = 96, /* elements of Q^T that stay in L1 while a run of keys passes */
    FV_STRIP_PANEL = 16, /* columns of V that lie together */
#if defined(FV_HAS_PAIRS)
    FV_STRIP_NUMBERS = 2,                /* of an element */
    FV_STRIP_SCORE_KEYS = FV_STRIP_KEYS, /* of a full strip at a time: pairs take longer to add up */
#else
    FV_STRIP_NUMBERS = 1,
    FV_STRIP_SCORE_KEYS = FV_STRIP_STEP_KEYS,
#endif
};

/* Vectors of a strip that has `num_rows`. */
static inline int32_t fv_strip_num_vectors(int32_t num_rows) { return (int32_t)fv_ceil_div(num_rows, FV_STRIP_LANES); }

FV_ALWAYS_INLINE fv_strip_lanes fv_strip_load(const float *from)
{
    fv_strip_lanes value;
    memcpy(&value, from, sizeof(value));
    return value;
}

FV_ALWAYS_INLINE void fv_strip_store(float *to, fv_strip_lanes value) { memcpy(to, &value, sizeof(value)); }

FV_ALWAYS_INLINE fv_strip_lanes fv_strip_splat(float value) { return value - (fv_strip_lanes){0}; }

/* a > b ? a : b and a < b ? a : b: a NaN in b stays, one in a does not. */
FV_ALWAYS_INLINE fv_strip_lanes fv_strip_max(fv_strip_lanes a, fv_strip_lanes b)
{
#if FV_STRIP_WIDE
    return fv_lanes_max(a, b);
#else
    return fv_max(a, b);
#endif
}

FV_ALWAYS_INLINE fv_strip_lanes fv_strip_min(fv_strip_lanes a, fv_strip_lanes b)
{
#if FV_STRIP_WIDE
    return fv_lanes_min(a, b);
#else
    return fv_min(a, b);
#endif
}

/* a where the mask is all ones, b where it is 0. */
FV_ALWAYS_INLINE fv_strip_lanes fv_strip_select(fv_strip_mask mask, fv_strip_lanes a, fv_strip_lanes b)
{
#if FV_STRIP_WIDE
    return fv_lanes_select(mask, a, b);
#else
    return fv_select(mask, a, b);
#endif
}

FV_ALWAYS_INLINE void fv_strip_exp2_each(fv_strip_lanes *x, const int32_t num)
{
#if FV_STRIP_WIDE
    fv_lanes_exp2_each(x, num);
#else
    fv_exp2_each(x, num);
#endif
}

FV_ALWAYS_INLINE fv_strip_lanes fv_strip_fma(fv_strip_lanes a, fv_strip_lanes b, fv_strip_lanes c)
{
#if defined(__AVX512F__)
    return (fv_strip_lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif FV_STRIP_WIDE
    return a * b + c;
#else
    return fv_fma(a, b, c);
#endif
}

/* acc + element * vector, the element that lies at `element` for all lanes. */
FV_ALWAYS_INLINE fv_strip_lanes fv_strip_add_product(fv_strip_lanes acc, const float *element, fv_strip_lanes vector)
{
#if defined(FV_HAS_PAIRS)
    uint32_t pair;
    memcpy(&pair, element, sizeof(pair));
    return fv_pairs_dot(acc, fv_pairs_splat(pair), (fv_words)vector);
#else
    return fv_strip_fma(fv_strip_splat(*element), vector, acc);
#endif
}

/* `value` where the lane of `weight` is not 0, else 0. */
FV_ALWAYS_INLINE fv_strip_lanes fv_strip_seen(fv_strip_lanes value, fv_strip_lanes weight)
{
    return (fv_strip_lanes)((fv_strip_mask)value & (fv_strip_mask)(weight != 0.0f));
}

/* `value` where the element at `weight` is not 0, else 0. */
FV_ALWAYS_INLINE fv_strip_lanes fv_strip_seen_by(const float *weight, fv_strip_lanes value)
{
#if defined(FV_HAS_PAIRS)
    uint32_t pair;
    memcpy(&pair, weight, sizeof(pair));
    return (fv_strip_lanes)((fv_words)value & fv_pairs_splat(fv_pairs_seen(pair)));
#else
    return fv_strip_seen(value, fv_strip_splat(*weight));
#endif
}

/* --- scores = K Q^T ------------------------------------------------------------------------------------------ */

FV_ALWAYS_INLINE void fv_strip_scores_as(float *scores, const float *keys, int32_t stride, const float *q,
                                         int32_t first, int32_t end, int32_t first_d, int32_t end_d,
                                         fv_strip_ahead *ahead, const int32_t num_keys, const int32_t num_vectors)
{
    const int32_t width = num_vectors * FV_STRIP_LANES;
    for (int32_t key = first; key < end; key += num_keys) {
        const float *k = keys + (int64_t)key * stride;
        float *to = scores + (int64_t)key * width;
        fv_strip_ahead_ask_as(ahead, num_keys / FV_STRIP_STEP_KEYS, 0);
        fv_strip_lanes acc[FV_STRIP_KEYS * FV_STRIP_VECTORS];
        FV_UNROLL
        for (int32_t j = 0; j < num_keys; j++) {
            FV_UNROLL
            for (int32_t v = 0; v < num_vectors; v++) {
                const int32_t i = j * num_vectors + v;
                acc[i] = first_d == 0 ? fv_strip_splat(0.0f) : fv_strip_load(to + i * FV_STRIP_LANES);
            }
        }
        for (int32_t d = first_d; d < end_d; d++) {
            fv_strip_lanes row[FV_STRIP_VECTORS];
            FV_UNROLL
            for (int32_t v = 0; v < num_vectors; v++) row[v] = fv_strip_load(q + d * width + v * FV_STRIP_LANES);
            FV_UNROLL
            for (int32_t j = 0; j < num_keys; j++) {
                FV_UNROLL
                for (int32_t v = 0; v < num_vectors; v++) {
                    acc[j * num_vectors + v] = fv_strip_add_product(acc[j * num_vectors + v], &k[j * stride + d],
                                                                    row[v]);
                }
            }
        }
        FV_UNROLL
        for (int32_t j = 0; j < num_keys; j++) {
            FV_UNROLL
            for (int32_t v = 0; v < num_vectors; v++)
                fv_strip_store(to + (j * num_vectors + v) * FV_STRIP_LANES, acc[j * num_vectors + v]);
        }
    }
}

/* The elements [first_d, end_d) of the dot products; from 0 on the scores are set, then added to. `first` is a
 * multiple of 8. Out of line, as GCC has it by itself in some of its callers: in the others it took 6% longer. */
static __attribute__((noinline)) void fv_strip_scores_part(float *scores, const float *keys, int32_t stride,
                                                           const float *q, int32_t first, int32_t end, int32_t first_d,
                                                           int32_t end_d, int32_t num_vectors, fv_strip_ahead *ahead)
{
#define SCORES(KEYS, VECTORS) \
    fv_strip_scores_as(scores, keys, stride, q, first, end, first_d, end_d, ahead, KEYS, VECTORS)
    switch (num_vectors) {
    case 3: SCORES(FV_STRIP_SCORE_KEYS, 3); break;
    case 2: SCORES(FV_STRIP_SCORE_KEYS, 2); break;
    default: SCORES(FV_STRIP_KEYS, 1); break;
    }
#undef SCORES
}

/* Dot products of the keys [first, end), and of those that fill up multiples of 8, with the strip's queries
 * q [head_size][num_vectors * FV_STRIP_LANES], `depth` elements at a time: so much of Q^T stays in L1 while the keys
 * pass. Between them they ask for lines of `ahead`. */
static inline void fv_strip_scores(float *scores, const float *keys, int32_t stride, const float *q, int32_t first,
                                   int32_t end, int32_t head_size, int32_t depth, int32_t num_vectors,
                                   fv_strip_ahead *ahead)
{
    first = first / FV_STRIP_KEYS * FV_STRIP_KEYS;
    for (int32_t d = 0; d < head_size; d += depth) {
        const int32_t end_d = fv_min_i32(d + depth, head_size);
        fv_strip_scores_part(scores, keys, stride, q, first, end, d, end_d, num_vectors, ahead);
    }
}

/* Steps in which all strips go through a tile: so often they ask for lines. */
static inline int64_t fv_strip_num_steps(int32_t num_rows, int32_t tile_keys, int32_t head_size, int32_t depth)
{
    return fv_ceil_div(num_rows, FV_STRIP_ROWS) * fv_ceil_div(head_size, depth) *
           fv_ceil_div(tile_keys, FV_STRIP_STEP_KEYS);
}

/* --- sums += P V --------------------------------------------------------------------------------------------- */

/* Values: element d of a key is d % 16 after element 0 of its panel d / 16. */
typedef struct fv_strip_values {
    const float *at;
    int32_t stride;       /* from a key to the next */
    int32_t panel_stride; /* from a panel to the next */
} fv_strip_values;

/* Values whose rows lie whole, `stride` apart. */
static inline fv_strip_values fv_strip_values_of_rows(const float *at, int32_t stride)
{
    return (fv_strip_values){at, stride, FV_STRIP_PANEL};
}

FV_ALWAYS_INLINE const float *fv_strip_values_at(const fv_strip_values *values, int32_t key, int32_t d)
{
    return values->at + (int64_t)(d / FV_STRIP_PANEL) * values->panel_stride + (int64_t)key * values->stride +
           d % FV_STRIP_PANEL;
}

/* num_units vectors of columns from d on, of num_rows rows; `rescale`: of the rows, or NULL. */
FV_ALWAYS_INLINE void fv_strip_accumulate_step(float *sums, int32_t num_columns, const float *weights,
                                               const float *rescale, const fv_strip_values *values, int32_t d,
                                               int32_t first, int32_t end, const int32_t width, const int32_t num_rows,
                                               const int32_t num_units, const int32_t masked)
{
    fv_strip_lanes acc[FV_STRIP_STEP_ROWS][2];
    const float *from[2];
    FV_UNROLL
    for (int32_t u = 0; u < num_units; u++) from[u] = fv_strip_values_at(values, first, d + u * FV_STRIP_LANES);
    FV_UNROLL
    for (int32_t r = 0; r < num_rows; r++) {
        FV_UNROLL
        for (int32_t u = 0; u < num_units; u++) {
            acc[r][u] = fv_strip_splat(0.0f);
        }
    }
    for (int32_t key = first; key < end; key++) {
        fv_strip_lanes value[2];
        FV_UNROLL
        for (int32_t u = 0; u < num_units; u++) {
            value[u] = fv_strip_load(from[u]);
            from[u] += values->stride;
        }
        FV_UNROLL
        for (int32_t r = 0; r < num_rows; r++) {
            const float *weight = &weights[key * width + r];
            FV_UNROLL
            for (int32_t u = 0; u < num_units; u++) {
                const fv_strip_lanes seen = masked ? fv_strip_seen_by(weight, value[u]) : value[u];
                acc[r][u] = fv_strip_add_product(acc[r][u], weight, seen);
            }
        }
    }
    FV_UNROLL
    for (int32_t r = 0; r < num_rows; r++) {
        FV_UNROLL
        for (int32_t u = 0; u < num_units; u++) {
            float *at = sums + (int64_t)r * num_columns + u * FV_STRIP_LANES;
            const fv_strip_lanes sum = fv_strip_load(at);
            fv_strip_store(at, rescale ? sum * rescale[r] + acc[r][u] : sum + acc[r][u]);
        }
    }
}

FV_ALWAYS_INLINE void fv_strip_accumulate_as(float *sums, int32_t num_columns, const float *weights,
                                             const float *rescale, const fv_strip_values *values, int32_t first,
                                             int32_t end, const int32_t width, const int32_t num_rows,
                                             const int32_t masked)
{
#define STEP(UNITS)                                                                             \
    for (int32_t row = 0; row < width; row += num_rows)                                         \
    fv_strip_accumulate_step(sums + (int64_t)row * num_columns + d, num_columns, weights + row, \
                             rescale ? rescale + row : NULL, values, d, first, end, width, num_rows, UNITS, masked)
    int32_t d = 0;
    for (; d + 2 * FV_STRIP_LANES <= num_columns; d += 2 * FV_STRIP_LANES) STEP(2);
    if (d < num_columns) STEP(1);
#undef STEP
}

/* sums [num_vectors * FV_STRIP_LANES][num_columns] = sums * rescale + weights^T V over the keys [first, end); num_columns
 * is a multiple of 16, rescale NULL where sums stay. masked: a weight of 0 hides its value, be it infinite or NaN. */
static inline void fv_strip_accumulate(float *sums, int32_t num_columns, const float *weights, const float *rescale,
                                       const fv_strip_values *values, int32_t first, int32_t end, int32_t num_vectors,
                                       int32_t masked)
{
#define ACCUMULATE(VECTORS, ROWS, MASKED)                                                                          \
    fv_strip_accumulate_as(sums, num_columns, weights, rescale, values, first, end, VECTORS *FV_STRIP_LANES, ROWS, \
                           MASKED)
    switch (2 * num_vectors + masked) {
    case 2: ACCUMULATE(1, FV_STRIP_LANES / 2, 0); break;
    case 3: ACCUMULATE(1, FV_STRIP_LANES / 2, 1); break;
    case 4: ACCUMULATE(2, FV_STRIP_STEP_ROWS * 2 / 3, 0); break;
    case 5: ACCUMULATE(2, FV_STRIP_STEP_ROWS * 2 / 3, 1); break;
    case 6: ACCUMULATE(3, FV_STRIP_STEP_ROWS, 0); break;
    default: ACCUMULATE(3, FV_STRIP_STEP_ROWS, 1); break;
    }
#undef ACCUMULATE
}

#endif
