/* kv_copy: blocks from one view to another, element by element. */
#include <string.h>

#include "kvcache/kv_address.h"
#include "kvcache/latent_entry.h"
#include "reference/kv_reader.h"
#include "reference/reference.h"

static void copy_row(const fv_kv_copy_params *params, const fv_kv_plane *dst, const fv_kv_plane *src, int32_t size,
                     int64_t pair, int32_t head, int32_t slot)
{
    const size_t bytes = fv_dtype_bytes(params->dst.dtype);
    for (int32_t d = 0; d < size; d++)
        memmove((char *)dst->data + fv_kv_offset(dst, params->dst_blocks[pair], head, slot, d),
                (const char *)src->data + fv_kv_offset(src, params->src_blocks[pair], head, slot, d), bytes);
}

static void copy_scale(const fv_kv_copy_params *params, const fv_scale_plane *dst, const fv_scale_plane *src,
                       int64_t pair, int32_t head, int32_t slot)
{
    if (!dst->data) return;
    const float scale = fv_scale_at(src, params->src_blocks[pair], slot, head);
    memcpy(fv_scale_address(dst, params->dst_blocks[pair], slot, head), &scale, sizeof(scale));
}

static void copy_ds_entry(const fv_kv_copy_params *params, int64_t pair, int32_t slot)
{
    const fv_kv_plane *dst = &params->dst.k, *src = &params->src.k;
    memmove((char *)dst->data + fv_kv_row_offset(dst, params->dst_blocks[pair], 0, slot),
            (const char *)src->data + fv_kv_row_offset(src, params->src_blocks[pair], 0, slot), FV_DS_ENTRY_BYTES);
}

static void copy_entry(const fv_kv_copy_params *params, int64_t pair, int32_t head, int32_t slot)
{
    const fv_kv_view *dst = &params->dst, *src = &params->src;
    if (dst->layout == FV_KV_LAYOUT_LATENT_FP8_DS) {
        copy_ds_entry(params, pair, slot);
        return;
    }
    copy_row(params, &dst->k, &src->k, dst->head_size, pair, head, slot);
    copy_scale(params, &dst->k_scales, &src->k_scales, pair, head, slot);
    if (fv_kv_layout_is_latent(dst->layout)) return; /* the value is the start of the key */
    copy_row(params, &dst->v, &src->v, dst->v_head_size, pair, head, slot);
    copy_scale(params, &dst->v_scales, &src->v_scales, pair, head, slot);
}

fv_status fv_reference_kv_copy(const fv_launch *launch, const fv_kv_copy_params *params)
{
    (void)launch;
    for (int64_t pair = 0; pair < params->num_pairs; pair++) {
        if (!fv_kv_copy_pair_valid(params, pair)) continue;
        for (int32_t head = 0; head < params->dst.num_kv_heads; head++)
            for (int32_t slot = 0; slot < params->dst.block_size; slot++) copy_entry(params, pair, head, slot);
    }
    return FV_OK;
}
