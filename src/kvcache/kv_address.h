/* From (block, head, slot, element) to bytes, for any layout: the formula of fv_kv_plane. */
#ifndef FV_KVCACHE_KV_ADDRESS_H
#define FV_KVCACHE_KV_ADDRESS_H

#include "core/compiler.h"
#include "fovea/view.h"

static inline int64_t fv_kv_slot_offset(const fv_kv_plane *plane, int64_t slot)
{
    if (plane->slot_chunk <= 0) return slot * plane->slot_stride;
    return slot / plane->slot_chunk * plane->slot_chunk_stride + slot % plane->slot_chunk * plane->slot_stride;
}

static inline int64_t fv_kv_element_offset(const fv_kv_plane *plane, int64_t element)
{
    if (plane->element_chunk <= 0) return element * plane->element_stride;
    return element / plane->element_chunk * plane->element_chunk_stride +
           element % plane->element_chunk * plane->element_stride;
}

/* Bytes from plane->data to element 0 of a row. */
static inline int64_t fv_kv_row_offset(const fv_kv_plane *plane, int64_t block, int64_t head, int64_t slot)
{
    return block * plane->block_stride + head * plane->head_stride + fv_kv_slot_offset(plane, slot);
}

static inline int64_t fv_kv_offset(const fv_kv_plane *plane, int64_t block, int64_t head, int64_t slot, int64_t element)
{
    return fv_kv_row_offset(plane, block, head, slot) + fv_kv_element_offset(plane, element);
}

/* Scale of one (block, slot, head); 1 where there are none. */
static inline float fv_scale_at(const fv_scale_plane *plane, int64_t block, int64_t slot, int64_t head)
{
    if (!plane->data) return 1.0f;
    const char *at = (const char *)plane->data + block * plane->block_stride + slot * plane->slot_stride +
                     head * plane->head_stride;
    float scale;
    __builtin_memcpy(&scale, at, sizeof(scale));
    return scale;
}

#endif
