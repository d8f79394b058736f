/* Rows of the cache, that is the elements of one token and head, and rows of tensors. */
#ifndef FV_KERNELS_CPU_KV_ROW_H
#define FV_KERNELS_CPU_KV_ROW_H

#include "kernels/cpu/isa.h"
#include "kernels/cpu/simd.h"
#include "kvcache/kv_address.h"

/* Scale of a KV head: scales[0] where there is one for all, 1 where there is none. */
static inline float fv_head_scale_of(const float *scales, int32_t num_scales, int32_t kv_head)
{
    if (!scales || num_scales == 0) return 1.0f;
    return scales[num_scales == 1 ? 0 : kv_head];
}

/* 1: the elements of a row lie side by side. */
static inline int32_t fv_plane_is_dense(const fv_kv_plane *plane, int64_t element_bytes)
{
    if (plane->element_stride != element_bytes) return 0;
    return plane->element_chunk <= 0 || plane->element_chunk_stride == plane->element_chunk * element_bytes;
}

/* Copies elements from `first` on of a cache row whose elements do not lie side by side. */
static inline void fv_row_gather(char *to, const char *row, const fv_kv_plane *plane, int32_t first,
                                 int32_t num_elements, size_t element_bytes)
{
    if (plane->element_chunk > 0 && plane->element_stride == (int64_t)element_bytes) {
        for (int32_t d = first, end = first + num_elements; d < end;) {
            const int32_t num = fv_min_i32(plane->element_chunk - d % plane->element_chunk, end - d);
            memcpy(to, row + fv_kv_element_offset(plane, d), (size_t)num * element_bytes);
            to += (size_t)num * element_bytes;
            d += num;
        }
        return;
    }
    for (int32_t i = 0; i < num_elements; i++) {
        const char *from = row + fv_kv_element_offset(plane, first + i);
        switch (element_bytes) { /* constant sizes: one load and one store */
        case 1: to[i] = *from; break;
        case 2: memcpy(to + 2 * i, from, 2); break;
        default: memcpy(to + 4 * i, from, 4); break;
        }
    }
}

/* Spreads the elements from `first` on over a cache row whose elements do not lie side by side. */
static inline void fv_row_scatter(char *row, const char *from, const fv_kv_plane *plane, int32_t first,
                                  int32_t num_elements, size_t element_bytes)
{
    for (int32_t i = 0; i < num_elements; i++) {
        memcpy(row + fv_kv_element_offset(plane, first + i), from + (size_t)i * element_bytes, element_bytes);
    }
}

/* Natural order to the lane order of `lane_dtype`, in fp32. */
static inline void fv_row_load_lanes(float *to, const void *row, int32_t num_elements, fv_dtype dtype,
                                     fv_dtype lane_dtype)
{
    const size_t bytes = fv_dtype_bytes(dtype);
    const char *at = (const char *)row;
    int32_t d = 0;
    for (; d + 16 <= num_elements; d += 16, at += 16 * bytes) {
        const fv_f32x16 natural = {fv_load8(at, dtype), fv_load8(at + 8 * bytes, dtype)};
        const fv_f32x16 lanes = fv_lanes_of_natural(natural, lane_dtype);
        fv_store_f32(to + d, lanes.a);
        fv_store_f32(to + d + 8, lanes.b);
    }
    if (d < num_elements) fv_store_f32(to + d, fv_load8(at, dtype));
}

/* Lane order to natural order, times `factor`, to `dtype`. */
static inline void fv_row_store_lanes(void *to, const float *lanes, float factor, int32_t num_elements, fv_dtype dtype,
                                      fv_dtype lane_dtype)
{
    const size_t bytes = fv_dtype_bytes(dtype);
    char *at = (char *)to;
    int32_t d = 0;
    for (; d + 16 <= num_elements; d += 16, at += 16 * bytes) {
        const fv_f32x16 value = fv_natural_of_lanes((fv_f32x16){fv_load_f32(lanes + d), fv_load_f32(lanes + d + 8)},
                                                    lane_dtype);
        fv_store8(at, value.a * factor, dtype);
        fv_store8(at + 8 * bytes, value.b * factor, dtype);
    }
    if (d < num_elements) fv_store8(at, fv_load_f32(lanes + d) * factor, dtype);
}

#endif
