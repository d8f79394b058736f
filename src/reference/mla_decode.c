/* mla_decode: attend_paged on latents, with keys rotated at reading where the cache holds them plain. */
#include "core/error.h"
#include "reference/attend_paged.h"
#include "reference/reference.h"

fv_status fv_reference_mla_decode(const fv_launch *launch, const fv_mla_decode_params *params)
{
    (void)launch;
    const fv_attend_params *attend = &params->attend;
    const fv_kv_view *cache = &attend->cache;
    if (!fv_kv_layout_is_latent(cache->layout))
        return fv_fail(FV_ERR_INVALID, "cache layout is %s; mla_decode takes latent and latent_fp8_ds",
                       fv_kv_layout_name(cache->layout));
    if (cache->layout == FV_KV_LAYOUT_LATENT_FP8_DS &&
        (cache->head_size != FV_DS_LATENT + FV_DS_ROPE || cache->v_head_size != FV_DS_LATENT))
        return fv_fail(FV_ERR_INVALID, "head sizes are %d and %d; latent_fp8_ds has 576 and 512", cache->head_size,
                       cache->v_head_size);

    fv_kv_reader reader = fv_kv_reader_of(attend);
    if (params->cos) {
        reader.rope_dim = params->rope_dim;
        reader.cos = params->cos;
        reader.sin = params->sin;
    }
    return fv_reference_attend(attend, &reader);
}
