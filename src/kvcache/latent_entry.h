/* The 656-byte entry of FV_KV_LAYOUT_LATENT_FP8_DS: 512 e4m3, 4 fp32 scales, 64 bf16. */
#ifndef FV_KVCACHE_LATENT_ENTRY_H
#define FV_KVCACHE_LATENT_ENTRY_H

#include "core/compiler.h"
#include "fovea/view.h"

enum {
    FV_DS_LATENT = 512,
    FV_DS_TILE = 128, /* elements that share a scale */
    FV_DS_ROPE = 64,
    FV_DS_SCALES_AT = 512, /* byte offsets in the entry */
    FV_DS_ROPE_AT = 528,
    FV_DS_ENTRY_BYTES = 656,
};

/* Is this one of the MLA layouts, in which the value is a part of the key? */
FV_SHARED_INLINE int32_t fv_kv_layout_is_latent(fv_kv_layout layout)
{
    return layout == FV_KV_LAYOUT_LATENT || layout == FV_KV_LAYOUT_LATENT_FP8_DS;
}

#endif
