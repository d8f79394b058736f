/* The two products of attention over fp32 rows, for strips of 24, 16 or 8 query rows, one to a lane:
 *
 *   scores^T [key][row]  = K [key][d]     times  Q^T [d][row]     4 keys x 24 rows in registers
 *   sums     [row][col] += P^T [key][row] times  V [key][col]     6 rows x 16 columns in registers
 *
 * The left factor is broadcast an element at a time, the right one is read in vectors. K and V are the same
 * rows, `stride` floats apart: latents. A row's arithmetic is the same in any strip and lane. */
#ifndef FV_KERNELS_CPU_STRIP_PRODUCT_H
#define FV_KERNELS_CPU_STRIP_PRODUCT_H

#include "kernels/cpu/simd.h"

enum {
    FV_STRIP_VECTORS = 3, /* of a full strip */
    FV_STRIP_ROWS = FV_STRIP_VECTORS * FV_LANES,
    FV_STRIP_KEYS = 8,   /* scores are computed for whole multiples of this many keys */
    FV_STRIP_DEPTH = 96, /* elements of Q^T that stay in L1 while a run of keys passes: 9 KiB */
    FV_STRIP_PANEL = 16, /* columns of V in registers */
};

FV_ALWAYS_INLINE void fv_strip_scores_as(float *scores, const float *keys, int32_t stride, const float *q,
                                         int32_t first, int32_t end, int32_t first_d, int32_t end_d,
                                         const int32_t num_keys, const int32_t num_vectors)
{
    const int32_t width = num_vectors * FV_LANES;
    for (int32_t key = first; key < end; key += num_keys) {
        const float *k = keys + (int64_t)key * stride;
        float *to = scores + (int64_t)key * width;
        fv_f32x8 acc[FV_STRIP_KEYS * FV_STRIP_VECTORS];
        FV_UNROLL
        for (int32_t i = 0; i < num_keys * num_vectors; i++) {
            acc[i] = first_d == 0 ? fv_splat(0.0f) : fv_load_f32(to + i * FV_LANES);
        }
        for (int32_t d = first_d; d < end_d; d++) {
            fv_f32x8 row[FV_STRIP_VECTORS];
            FV_UNROLL
            for (int32_t v = 0; v < num_vectors; v++) row[v] = fv_load_f32(q + d * width + v * FV_LANES);
            FV_UNROLL
            for (int32_t j = 0; j < num_keys; j++) {
                const fv_f32x8 element = fv_splat(k[j * stride + d]);
                FV_UNROLL
                for (int32_t v = 0; v < num_vectors; v++) {
                    acc[j * num_vectors + v] = fv_fma(element, row[v], acc[j * num_vectors + v]);
                }
            }
        }
        FV_UNROLL
        for (int32_t i = 0; i < num_keys * num_vectors; i++) fv_store_f32(to + i * FV_LANES, acc[i]);
    }
}

/* The elements [first_d, end_d) of the dot products; from 0 on the scores are set, then added to. `first` is a
 * multiple of 8. */
static inline void fv_strip_scores_part(float *scores, const float *keys, int32_t stride, const float *q, int32_t first,
                                        int32_t end, int32_t first_d, int32_t end_d, int32_t num_vectors)
{
    switch (num_vectors) {
    case 3: fv_strip_scores_as(scores, keys, stride, q, first, end, first_d, end_d, 4, 3); break;
    case 2: fv_strip_scores_as(scores, keys, stride, q, first, end, first_d, end_d, 4, 2); break;
    default: fv_strip_scores_as(scores, keys, stride, q, first, end, first_d, end_d, 8, 1); break;
    }
}

/* Dot products of the keys [first, end), and of those that fill up multiples of 8, with the strip's queries
 * q [head_size][8 num_vectors]. */
static inline void fv_strip_scores(float *scores, const float *keys, int32_t stride, const float *q, int32_t first,
                                   int32_t end, int32_t head_size, int32_t num_vectors)
{
    first = first / FV_STRIP_KEYS * FV_STRIP_KEYS;
    for (int32_t d = 0; d < head_size; d += FV_STRIP_DEPTH) {
        fv_strip_scores_part(scores, keys, stride, q, first, end, d, fv_min_i32(d + FV_STRIP_DEPTH, head_size),
                             num_vectors);
    }
}

FV_ALWAYS_INLINE void fv_strip_accumulate_as(float *sums, int32_t num_columns, const float *weights,
                                             const float *values, int32_t stride, int32_t first, int32_t end,
                                             const int32_t width, const int32_t num_rows, const int32_t masked)
{
    for (int32_t d = 0; d < num_columns; d += FV_STRIP_PANEL) {
        for (int32_t row = 0; row < width; row += num_rows) {
            float *to = sums + (int64_t)row * num_columns + d;
            fv_f32x8 acc[6][2];
            FV_UNROLL
            for (int32_t r = 0; r < num_rows; r++) {
                acc[r][0] = fv_load_f32(to + r * num_columns);
                acc[r][1] = fv_load_f32(to + r * num_columns + 8);
            }
            for (int32_t key = first; key < end; key++) {
                const fv_f32x8 a = fv_load_f32(values + (int64_t)key * stride + d);
                const fv_f32x8 b = fv_load_f32(values + (int64_t)key * stride + d + 8);
                FV_UNROLL
                for (int32_t r = 0; r < num_rows; r++) {
                    const fv_f32x8 weight = fv_splat(weights[key * width + row + r]);
                    const fv_i32x8 seen = (fv_i32x8)(weight != 0.0f);
                    acc[r][0] = fv_fma(weight, masked ? (fv_f32x8)((fv_i32x8)a & seen) : a, acc[r][0]);
                    acc[r][1] = fv_fma(weight, masked ? (fv_f32x8)((fv_i32x8)b & seen) : b, acc[r][1]);
                }
            }
            FV_UNROLL
            for (int32_t r = 0; r < num_rows; r++) {
                fv_store_f32(to + r * num_columns, acc[r][0]);
                fv_store_f32(to + r * num_columns + 8, acc[r][1]);
            }
        }
    }
}

/* sums [8 num_vectors][num_columns] += weights^T V over the keys [first, end); num_columns is a multiple of 16,
 * stride at least as large. masked: a weight of 0 hides its value, be it infinite or NaN. */
static inline void fv_strip_accumulate(float *sums, int32_t num_columns, const float *weights, const float *values,
                                       int32_t stride, int32_t first, int32_t end, int32_t num_vectors, int32_t masked)
{
#define ACCUMULATE(VECTORS, ROWS, MASKED) \
    fv_strip_accumulate_as(sums, num_columns, weights, values, stride, first, end, VECTORS *FV_LANES, ROWS, MASKED)
    switch (num_vectors * 2 + masked) {
    case 2: ACCUMULATE(1, 4, 0); break;
    case 3: ACCUMULATE(1, 4, 1); break;
    case 4: ACCUMULATE(2, 4, 0); break;
    case 5: ACCUMULATE(2, 4, 1); break;
    case 6: ACCUMULATE(3, 6, 0); break;
    default: ACCUMULATE(3, 6, 1); break;
    }
#undef ACCUMULATE
}

#endif
