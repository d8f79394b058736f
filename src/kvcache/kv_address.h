/* From (block, head, slot, element) to bytes, for any layout: the formula of fv_kv_plane. */
#ifndef FV_KVCACHE_KV_ADDRESS_H
#define FV_KVCACHE_KV_ADDRESS_H

#include "core/compiler.h"
#include "fovea/view.h"

FV_SHARED_INLINE int64_t fv_kv_slot_offset(const fv_kv_plane *plane, int64_t slot)
{
    if (plane->slot_chunk <= 0) return slot * plane->slot_stride;
    return slot / plane->slot_chunk * plane->slot_chunk_stride + slot % plane->slot_chunk * plane->slot_stride;
}

FV_SHARED_INLINE int64_t fv_kv_element_offset(const fv_kv_plane *plane, int64_t element)
{
    if (plane->element_chunk <= 0) return element * plane->element_stride;
    return element / plane->element_chunk * plane->element_chunk_stride +
           element % plane->element_chunk * plane->element_stride;
}

/* Bytes from plane->data to element 0 of a row. */
FV_SHARED_INLINE int64_t fv_kv_row_offset(const fv_kv_plane *plane, int64_t block, int64_t head, int64_t slot)
{
    return block * plane->block_stride + head * plane->head_stride + fv_kv_slot_offset(plane, slot);
}

FV_SHARED_INLINE int64_t fv_kv_offset(const fv_kv_plane *plane, int64_t block, int64_t head, int64_t slot,
                                      int64_t element)
{
    return fv_kv_row_offset(plane, block, head, slot) + fv_kv_element_offset(plane, element);
}

FV_SHARED_INLINE void *fv_scale_address(const fv_scale_plane *plane, int64_t block, int64_t slot, int64_t head)
{
    return (char *)plane->data + block * plane->block_stride + slot * plane->slot_stride + head * plane->head_stride;
}

/* Scale of one (block, slot, head); 1 where there are none. */
FV_SHARED_INLINE float fv_scale_at(const fv_scale_plane *plane, int64_t block, int64_t slot, int64_t head)
{
    if (!plane->data) return 1.0f;
    float scale;
    __builtin_memcpy(&scale, fv_scale_address(plane, block, slot, head), sizeof(scale));
    return scale;
}

/* The scale of a row whose largest finite magnitude is `largest`, so that it becomes the largest number
 * of the entry's type (int8 127, e4m3 448, e5m2 57344). Rows of zeros, and tiny ones, get 1e-6; the
 * types that need no scale get 1. */
FV_SHARED_INLINE float fv_scale_of_largest(float largest, fv_dtype dtype)
{
    const float limit = dtype == FV_DTYPE_I8        ? 127.0f
                        : dtype == FV_DTYPE_F8_E4M3 ? 448.0f
                        : dtype == FV_DTYPE_F8_E5M2 ? 57344.0f
                                                    : 0.0f;
    if (limit == 0.0f) return 1.0f;
    const float scale = largest / limit;
    return scale > 1e-6f ? scale : 1e-6f;
}

#endif
