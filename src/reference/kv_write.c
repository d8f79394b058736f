/* kv_write: new keys and values into the cache, element by element. The division by the scale is the
 * correctly rounded one of fp32, so that other kernels can give the same bits. */
#include <float.h>
#include <math.h>

#include "core/error.h"
#include "core/float.h"
#include "kvcache/kv_address.h"
#include "reference/kv_reader.h"
#include "reference/reference.h"

/* Elements that lie together, from a multiple of so many on. */
static int32_t run_of(const fv_kv_plane *plane, int32_t size)
{
    return plane->element_chunk > 0 ? fv_min_i32(plane->element_chunk, size) : size;
}

/* Bits are copied where the dtypes agree and there is no scale: a NaN keeps its payload. */
static void write_row(const fv_kv_view *cache, const fv_kv_plane *plane, int32_t size, const char *from,
                      fv_dtype src_dtype, float scale, int64_t block, int32_t head, int64_t slot)
{
    const size_t bytes = fv_dtype_bytes(src_dtype);
    char *base = (char *)plane->data + fv_kv_row_offset(plane, block, head, slot);
    const int32_t are_bits = src_dtype == cache->dtype && scale == 1.0f;
    const int32_t run = are_bits && plane->element_stride == (int64_t)bytes ? run_of(plane, size) : 1;
    for (int32_t d = 0; d < size; d += run) {
        char *to = base + fv_kv_element_offset(plane, d);
        const char *element = from + (size_t)d * bytes;
        if (are_bits)
            memcpy(to, element, (size_t)fv_min_i32(run, size - d) * bytes);
        else
            fv_float_store(to, fv_float_load(element, src_dtype) / scale, cache->dtype);
    }
}

/* The 656-byte entry: a scale for each 128 latent elements, chosen so that the largest becomes 448. */
static void write_ds_entry(char *entry, const char *from, fv_dtype src_dtype)
{
    const size_t bytes = fv_dtype_bytes(src_dtype);
    for (int32_t tile = 0; tile < FV_DS_LATENT / FV_DS_TILE; tile++) {
        float largest = 0;
        for (int32_t d = tile * FV_DS_TILE; d < (tile + 1) * FV_DS_TILE; d++)
            largest = fmaxf(largest, fabsf(fv_float_load(from + (size_t)d * bytes, src_dtype)));
        const float scale = fmaxf(largest / 448.0f, FLT_MIN);
        memcpy(entry + FV_DS_SCALES_AT + tile * 4, &scale, sizeof(scale));
        for (int32_t d = tile * FV_DS_TILE; d < (tile + 1) * FV_DS_TILE; d++)
            fv_float_store(entry + d, fv_float_load(from + (size_t)d * bytes, src_dtype) / scale, FV_DTYPE_F8_E4M3);
    }
    for (int32_t d = 0; d < FV_DS_ROPE; d++)
        fv_float_store(entry + FV_DS_ROPE_AT + d * 2,
                       fv_float_load(from + (size_t)(FV_DS_LATENT + d) * bytes, src_dtype), FV_DTYPE_BF16);
}

/* What the row `from` is divided by: the scale given for its head, times, where the cache keeps a scale
 * for each token and head, the row's own, which is stored. Only finite elements count for it. */
static float find_scale(const fv_scale_plane *plane, const fv_kv_write_params *params, const float *head_scales,
                        const char *from, int32_t size, int64_t block, int32_t head, int64_t slot)
{
    const float head_scale = fv_head_scale(head_scales, params->num_kv_scales, head);
    if (!plane->data) return head_scale;
    const size_t bytes = fv_dtype_bytes(params->src_dtype);
    float largest = 0;
    for (int32_t d = 0; d < size; d++) {
        const float magnitude = fabsf(fv_float_load(from + (size_t)d * bytes, params->src_dtype));
        if (isfinite(magnitude)) largest = fmaxf(largest, magnitude);
    }
    const float scale = fv_scale_of_largest(largest / head_scale, params->cache.dtype);
    memcpy(fv_scale_address(plane, block, slot, head), &scale, sizeof(scale));
    return head_scale * scale;
}

static void write_token(const fv_kv_write_params *params, int32_t token, int64_t block, int64_t slot)
{
    const fv_kv_view *cache = &params->cache;
    const char *k = (const char *)params->k + token * params->k_token_stride;
    if (cache->layout == FV_KV_LAYOUT_LATENT_FP8_DS) {
        write_ds_entry((char *)cache->k.data + fv_kv_row_offset(&cache->k, block, 0, slot), k, params->src_dtype);
        return;
    }
    for (int32_t head = 0; head < cache->num_kv_heads; head++) {
        const char *k_row = k + head * params->k_head_stride;
        const float k_scale = find_scale(&cache->k_scales, params, params->k_scale, k_row, cache->head_size, block,
                                         head, slot);
        write_row(cache, &cache->k, cache->head_size, k_row, params->src_dtype, k_scale, block, head, slot);
        if (fv_kv_layout_is_latent(cache->layout)) continue; /* the value is the start of the key */
        const char *v = (const char *)params->v + token * params->v_token_stride + head * params->v_head_stride;
        const float v_scale = find_scale(&cache->v_scales, params, params->v_scale, v, cache->v_head_size, block, head,
                                         slot);
        write_row(cache, &cache->v, cache->v_head_size, v, params->src_dtype, v_scale, block, head, slot);
    }
}

fv_status fv_reference_kv_write(const fv_launch *launch, const fv_kv_write_params *params)
{
    (void)launch;
    const int64_t num_slots = params->cache.num_blocks * params->cache.block_size;
    const int32_t num_tokens = fv_kv_write_tokens(params);
    for (int32_t token = 0; token < num_tokens; token++) {
        const int64_t slot = params->slot_mapping[token];
        if (slot < 0 || slot >= num_slots) continue;
        write_token(params, token, slot / params->cache.block_size, slot % params->cache.block_size);
    }
    return FV_OK;
}
