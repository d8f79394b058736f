/* What the products of few rows with vectors of 64 bytes share (few_wide.h, few_pairs.h). */
#ifndef FV_KERNELS_CPU_FEW_LANES_H
#define FV_KERNELS_CPU_FEW_LANES_H

#include "kernels/cpu/lanes.h"

/* Lane i / 4 * 4 + (0 .. 3) of the result: four sums of parts of the lanes of sums[i] for each i. */
FV_ALWAYS_INLINE fv_lanes fv_few_reduce4(const fv_lanes sums[4])
{
    fv_lanes pair[2];
    FV_UNROLL
    for (int32_t i = 0; i < 2; i++) {
        const fv_lanes a = sums[2 * i], b = sums[2 * i + 1];
        pair[i] = __builtin_shufflevector(a, b, 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31) +
                  __builtin_shufflevector(a, b, 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29);
    }
    const fv_lanes a = pair[0], b = pair[1];
    return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}

/* Stores the sum of the lanes of each of `num` vectors, 8 or 16, in order. */
FV_ALWAYS_INLINE void fv_few_store_sums(float *to, const fv_lanes *sums, const int32_t num)
{
    fv_lanes quad[4], half[2];
    FV_UNROLL
    for (int32_t i = 0; i < num / 4; i++) quad[i] = fv_few_reduce4(sums + 4 * i);
    FV_UNROLL
    for (int32_t i = 0; i < num / 8; i++) {
        const fv_lanes a = quad[2 * i], b = quad[2 * i + 1];
        half[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                  __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    const fv_lanes a = half[0], b = half[num / 8 - 1];
    const fv_lanes sum = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    memcpy(to, &sum, (size_t)num * sizeof(float));
}

/* The same of num_keys x R vectors, as scores: of 3 rows four a key, the last twice. */
FV_ALWAYS_INLINE void fv_few_store_dots(float *scores, const fv_lanes *sums, const int32_t num_keys,
                                        const int32_t num_rows)
{
    if (num_rows != 3) {
        fv_few_store_sums(scores, sums, num_keys * num_rows);
        return;
    }
    fv_lanes of_scores[16];
    FV_UNROLL
    for (int32_t i = 0; i < 4 * num_keys; i++) of_scores[i] = sums[i / 4 * 3 + fv_min_i32(i % 4, 2)];
    fv_few_store_sums(scores, of_scores, 4 * num_keys);
}

/* sums *= rescale[row], units of some floats for each row of the group in turn. */
FV_ALWAYS_INLINE void fv_few_rescale(float *sums, const float *rescale, int32_t v_head_size, const int32_t num_rows,
                                     const int32_t unit)
{
    for (int32_t d = 0; d < v_head_size; d += unit) {
        for (int32_t r = 0; r < num_rows; r++) {
            for (int32_t i = 0; i < unit; i += 16, sums += 16) fv_lanes_store(sums, fv_lanes_load(sums) * rescale[r]);
        }
    }
}

#endif
