/* One row of K or V into the cache, by a warp: the code of kv_write and rope_kv_write. The arithmetic is
 * that of reference/kv_write.c, so that all kernels give the same bits. */
#ifndef FV_KERNELS_CUDA_KV_WRITE_TOKEN_CUH
#define FV_KERNELS_CUDA_KV_WRITE_TOKEN_CUH

#include <float.h>

#include "kernels/cuda/copy_bytes.cuh"
#include "kernels/cuda/number.cuh"
#include "kvcache/kv_address.h"
#include "kvcache/latent_entry.h"
#include "ops/kv_write.h"

/* Largest magnitude of a row; `finite_only`: of its finite elements. */
static __device__ __forceinline__ float largest_of_row(const char *from, fv_dtype dtype, int32_t first, int32_t end,
                                                       bool finite_only)
{
    const int32_t bytes = fv_element_bytes(dtype);
    float largest = 0;
    for (int32_t d = first + (int32_t)(threadIdx.x % 32); d < end; d += 32) {
        const float magnitude = fabsf(fv_element_load(from + (int64_t)d * bytes, dtype));
        if (!finite_only || magnitude <= FLT_MAX) largest = fmaxf(largest, magnitude);
    }
    return fv_warp_max(largest);
}

/* What the row is divided by; its own scale is stored where the cache keeps one. */
static __device__ __forceinline__ float find_row_scale(const fv_scale_plane *plane, const fv_kv_write_params *params,
                                                       const float *head_scales, const char *from, int32_t size,
                                                       int64_t block, int32_t head, int64_t slot)
{
    const float head_scale = fv_scale_of_head(head_scales, params->num_kv_scales, head);
    if (!plane->data) return head_scale;
    const float largest = largest_of_row(from, params->src_dtype, 0, size, true);
    const float scale = fv_scale_of_largest(__fdiv_rn(largest, head_scale), params->cache.dtype);
    if (threadIdx.x % 32 == 0) { /* at any alignment: it may lie inside the block */
        const uint32_t bits = __float_as_uint(scale);
        uint8_t *to = (uint8_t *)fv_scale_address(plane, block, slot, head);
        for (int32_t byte = 0; byte < 4; byte++) to[byte] = (uint8_t)(bits >> 8 * byte);
    }
    return __fmul_rn(head_scale, scale);
}

static __device__ __forceinline__ void write_row(const fv_kv_view *cache, const fv_kv_plane *plane, int32_t size,
                                                 const char *from, fv_dtype src_dtype, float scale, int64_t block,
                                                 int32_t head, int64_t slot)
{
    const int32_t bytes = fv_element_bytes(src_dtype);
    const bool copies = src_dtype == cache->dtype && scale == 1.0f; /* bits: a NaN keeps its payload */
    char *base = (char *)plane->data + fv_kv_row_offset(plane, block, head, slot);
    if (copies && plane->element_chunk <= 0 && plane->element_stride == bytes) {
        copy_bytes(base, from, (int64_t)size * bytes);
        return;
    }
    for (int32_t d = threadIdx.x % 32; d < size; d += 32) {
        char *to = base + fv_kv_element_offset(plane, d);
        const char *element = from + (int64_t)d * bytes;
        if (!copies)
            fv_element_store(to, __fdiv_rn(fv_element_load(element, src_dtype), scale), cache->dtype);
        else if (bytes == 2)
            *(uint16_t *)to = *(const uint16_t *)element;
        else
            *(uint32_t *)to = *(const uint32_t *)element;
    }
}

/* The 656-byte entry: a scale for each 128 latent elements, chosen so that the largest becomes 448. */
static __device__ __forceinline__ void write_ds_entry(char *entry, const char *from, fv_dtype src_dtype)
{
    const int32_t bytes = fv_element_bytes(src_dtype), lane = threadIdx.x % 32;
    for (int32_t tile = 0; tile < FV_DS_LATENT / FV_DS_TILE; tile++) {
        const int32_t first = tile * FV_DS_TILE, end = first + FV_DS_TILE;
        const float largest = largest_of_row(from, src_dtype, first, end, false);
        const float scale = fmaxf(__fdiv_rn(largest, 448.0f), FLT_MIN);
        if (lane == 0) *(float *)(entry + FV_DS_SCALES_AT + tile * 4) = scale;
        for (int32_t d = first + lane; d < end; d += 32)
            fv_element_store(entry + d, __fdiv_rn(fv_element_load(from + (int64_t)d * bytes, src_dtype), scale),
                             FV_DTYPE_F8_E4M3);
    }
    for (int32_t d = lane; d < FV_DS_ROPE; d += 32)
        fv_element_store(entry + FV_DS_ROPE_AT + d * 2,
                         fv_element_load(from + (int64_t)(FV_DS_LATENT + d) * bytes, src_dtype), FV_DTYPE_BF16);
}

/* The slot of a token as block and slot of the block; false: it is not written. */
static __device__ __forceinline__ bool find_slot(int64_t *block, int64_t *slot, const fv_kv_write_params *params,
                                                 int32_t token)
{
    const int64_t at = params->slot_mapping[token];
    if (at < 0 || at >= params->cache.num_blocks * params->cache.block_size) return false;
    *block = at / params->cache.block_size;
    *slot = at - *block * params->cache.block_size;
    return true;
}

/* Row `head` of K, or with `is_value` of V, of a token. Nothing where the value is the start of the key. */
static __device__ __forceinline__ void write_head(const fv_kv_write_params *params, int32_t token, int32_t head,
                                                  bool is_value, int64_t block, int64_t slot)
{
    const fv_kv_view *cache = &params->cache;
    if (is_value && fv_kv_layout_is_latent(cache->layout)) return;
    const char *from = (const char *)(is_value ? params->v : params->k) +
                       token * (is_value ? params->v_token_stride : params->k_token_stride) +
                       head * (is_value ? params->v_head_stride : params->k_head_stride);
    if (cache->layout == FV_KV_LAYOUT_LATENT_FP8_DS) {
        write_ds_entry((char *)cache->k.data + fv_kv_row_offset(&cache->k, block, 0, slot), from, params->src_dtype);
        return;
    }
    const fv_kv_plane *plane = is_value ? &cache->v : &cache->k;
    const int32_t size = is_value ? cache->v_head_size : cache->head_size;
    const float scale = find_row_scale(is_value ? &cache->v_scales : &cache->k_scales, params,
                                       is_value ? params->v_scale : params->k_scale, from, size, block, head, slot);
    write_row(cache, plane, size, from, params->src_dtype, scale, block, head, slot);
}

#endif
