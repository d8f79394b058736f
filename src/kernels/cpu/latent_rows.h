/* Latents of the paged cache as rows of fp32 in natural order: layout, dtype, scales and the rotation at
 * reading are dealt with here, once for all rows that look at a tile. */
#ifndef FV_KERNELS_CPU_LATENT_ROWS_H
#define FV_KERNELS_CPU_LATENT_ROWS_H

#include "kernels/cpu/attend_item.h"
#include "kvcache/latent_entry.h"

/* All of these return 1 in some lane where a value is infinite or NaN. */

FV_ALWAYS_INLINE fv_i32x8 fv_latent_convert_as(float *to, const char *from, int32_t num_elements, float scale,
                                               const fv_dtype dtype)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(dtype);
    fv_i32x8 odd = fv_splat_i32(0);
    int32_t d = 0;
    for (; d + 16 <= num_elements; d += 16) {
        const char *at = from + d * bytes;
        fv_f32x16 value;
        if (dtype == FV_DTYPE_BF16) /* whose lane order is not the natural one */
            value = (fv_f32x16){fv_load8(at, dtype), fv_load8(at + 8 * bytes, dtype)};
        else
            value = fv_load16(at, dtype);
        value.a *= scale;
        value.b *= scale;
        fv_store_f32(to + d, value.a);
        fv_store_f32(to + d + 8, value.b);
        odd |= (fv_i32x8)(value.a - value.a) | (fv_i32x8)(value.b - value.b);
    }
    if (d < num_elements) {
        const fv_f32x8 value = fv_load8(from + d * bytes, dtype) * scale;
        fv_store_f32(to + d, value);
        odd |= (fv_i32x8)(value - value);
    }
    return odd;
}

static inline fv_i32x8 fv_latent_convert(float *to, const char *from, int32_t num_elements, float scale, fv_dtype dtype)
{
    switch (dtype) {
    case FV_DTYPE_F32: return fv_latent_convert_as(to, from, num_elements, scale, FV_DTYPE_F32);
    case FV_DTYPE_F16: return fv_latent_convert_as(to, from, num_elements, scale, FV_DTYPE_F16);
    case FV_DTYPE_BF16: return fv_latent_convert_as(to, from, num_elements, scale, FV_DTYPE_BF16);
    case FV_DTYPE_F8_E4M3: return fv_latent_convert_as(to, from, num_elements, scale, FV_DTYPE_F8_E4M3);
    case FV_DTYPE_F8_E5M2: return fv_latent_convert_as(to, from, num_elements, scale, FV_DTYPE_F8_E5M2);
    case FV_DTYPE_I8: return fv_latent_convert_as(to, from, num_elements, scale, FV_DTYPE_I8);
    case FV_DTYPE_NONE: break;
    }
    return fv_splat_i32(0);
}

static inline fv_i32x8 fv_latent_convert_ds(float *to, const char *entry)
{
    fv_i32x8 odd = fv_splat_i32(0);
    for (int32_t d = 0; d < FV_DS_LATENT; d += FV_DS_TILE) {
        float scale;
        memcpy(&scale, entry + FV_DS_SCALES_AT + d / FV_DS_TILE * 4, sizeof(scale));
        odd |= fv_latent_convert_as(to + d, entry + d, FV_DS_TILE, scale, FV_DTYPE_F8_E4M3);
    }
    return odd | fv_latent_convert_as(to + FV_DS_LATENT, entry + FV_DS_ROPE_AT, FV_DS_ROPE, 1.0f, FV_DTYPE_BF16);
}

/* Half rotation: element i pairs with i + half. */
static inline void fv_latent_rotate(float *rope, int32_t half, const float *cos, const float *sin)
{
    for (int32_t i = 0; i < half; i++) {
        const float low = rope[i], high = rope[i + half];
        rope[i] = low * cos[i] - high * sin[i];
        rope[i + half] = high * cos[i] + low * sin[i];
    }
}

/* Row of key first + i at to + i * stride (head_size elements). `rows` [end - first] and `copy` [head_size] are
 * scratch. Returns 1 if some element is infinite or NaN, so that weight 0 has to be kept from it. */
static inline int32_t fv_latents_load(float *to, int32_t stride, const char **rows, float *copy,
                                      const fv_attend_job *job, int32_t first, int32_t end)
{
    const fv_attend_params *params = job->params;
    const fv_kv_view *cache = &params->cache;
    const fv_key_rotation *rotation = &params->rotation;
    const int32_t head_size = params->head_size, half = rotation->rope_dim / 2;
    const float scale_of_all = fv_head_scale_of(params->k_scale, params->num_kv_scales, 0);
    const int32_t is_dense = fv_plane_is_dense(&cache->k, (int64_t)fv_dtype_bytes(cache->dtype));
    fv_i32x8 odd = fv_splat_i32(0);

    fv_attend_find_rows(rows, job, &cache->k, first, end);
    for (int32_t key = first; key < end; key++, to += stride, rows++) {
        if (cache->layout == FV_KV_LAYOUT_LATENT_FP8_DS) {
            odd |= fv_latent_convert_ds(to, *rows);
        } else {
            const char *row = *rows;
            float scale = scale_of_all;
            if (cache->k_scales.data) {
                scale *= fv_scale_at(&cache->k_scales, job->table[key / cache->block_size], key % cache->block_size, 0);
            }
            if (!is_dense) {
                fv_row_gather((char *)copy, row, &cache->k, 0, head_size, fv_dtype_bytes(cache->dtype));
                row = (const char *)copy;
            }
            odd |= fv_latent_convert(to, row, head_size, scale, cache->dtype);
        }
        if (!rotation->cos) continue;
        const int64_t at = fv_key_position(&params->context_parallel, key) * half;
        fv_latent_rotate(to + head_size - rotation->rope_dim, half, rotation->cos + at, rotation->sin + at);
    }
    return fv_any(odd);
}

#endif
