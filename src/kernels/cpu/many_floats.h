/* A tile of keys and values for many rows, each number as fp32 (strip_product.h): what attend_many_rows.c makes of the rows of a
 * KV head. many_pairs.h has the same of pairs of bf16. */
#ifndef FV_KERNELS_CPU_MANY_FLOATS_H
#define FV_KERNELS_CPU_MANY_FLOATS_H

#include "kernels/cpu/row_strip.h"

/* num_numbers of each row to rows of `keys`, which are head_size apart. */
FV_ALWAYS_INLINE void fv_many_convert_keys(float *keys, const char *const *rows, int32_t first, int32_t end,
                                           int32_t head_size, int32_t num_numbers, const fv_dtype dtype)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(dtype);
    for (int32_t key = first; key < end; key++) {
        float *to = keys + (int64_t)key * head_size;
        const char *from = rows[key];
        int32_t d = 0;
        for (; d + 16 <= num_numbers; d += 16) {
            const fv_f32x16 value = fv_load16(from + d * bytes, dtype);
            fv_store_f32(to + d, value.a);
            fv_store_f32(to + d + 8, value.b);
        }
        if (d < num_numbers) fv_store_f32(to + d, fv_load8(from + d * bytes, dtype));
    }
}

/* Values to [panel][tile_keys][16]. Returns 1 if some value is infinite or NaN. Columns past Dv become 0. */
FV_ALWAYS_INLINE int32_t fv_many_convert_values(float *values, const char *const *rows, int32_t first, int32_t end,
                                                int32_t tile_keys, int32_t v_head_size, const fv_dtype dtype)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(dtype);
    fv_i32x8 odd = fv_splat_i32(0);
    for (int32_t key = first; key < end; key++) {
        const char *from = rows[key];
        for (int32_t d = 0; d < v_head_size; d += FV_STRIP_PANEL) {
            float *to = values + ((int64_t)(d / FV_STRIP_PANEL) * tile_keys + key) * FV_STRIP_PANEL;
            fv_f32x16 value = {fv_splat(0.0f), fv_splat(0.0f)};
            if (d + FV_STRIP_PANEL <= v_head_size)
                value = fv_load16(from + d * bytes, dtype);
            else
                value.a = fv_load8(from + d * bytes, dtype);
            fv_store_f32(to, value.a);
            fv_store_f32(to + 8, value.b);
            odd |= (fv_i32x8)(value.a - value.a) | (fv_i32x8)(value.b - value.b);
        }
    }
    return fv_any(odd);
}

/* Before the values of the keys [first, end) of a tile are converted. */
static inline void fv_many_begin_values(float *values, int32_t first, int32_t end, int32_t tile_keys,
                                        int32_t num_columns)
{
    (void)values, (void)first, (void)end, (void)tile_keys, (void)num_columns;
}

/* Weights of the keys [first, end), as the softmax leaves them, to elements. */
static inline void fv_many_pack_weights(float *weights, int32_t first, int32_t end, int32_t width)
{
    (void)weights, (void)first, (void)end, (void)width;
}

/* A row of sums in lane order; `copy` has room for it. */
static inline const float *fv_many_sums_in_lanes(float *copy, const float *sums, int32_t num_columns,
                                                 fv_dtype lane_dtype)
{
    (void)copy, (void)num_columns, (void)lane_dtype;
    return sums;
}

#endif
