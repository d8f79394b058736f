/* mla_decode: attend_paged on latents; the reader knows their layouts and rotates. */
#include "core/error.h"
#include "reference/attend_paged.h"
#include "reference/reference.h"

static fv_status launch(const fv_launch *launch_at, const fv_attend_params *params)
{
    (void)launch_at;
    const fv_kv_view *cache = &params->cache;
    if (!fv_kv_layout_is_latent(cache->layout)) {
        return fv_fail(FV_ERR_INVALID, "cache layout is %s; mla_decode takes latent and latent_fp8_ds",
                       fv_kv_layout_name(cache->layout));
    }
    if (cache->layout == FV_KV_LAYOUT_LATENT_FP8_DS &&
        (cache->head_size != FV_DS_LATENT + FV_DS_ROPE || cache->v_head_size != FV_DS_LATENT)) {
        return fv_fail(FV_ERR_INVALID, "head sizes are %d and %d; latent_fp8_ds has 576 and 512", cache->head_size,
                       cache->v_head_size);
    }
    const fv_kv_reader reader = fv_kv_reader_of(params);
    return fv_reference_attend(params, &reader);
}

static const char *why_not(const fv_problem *problem)
{
    if (problem->kind != FV_ATTENTION_MLA) return "the kernel serves MLA";
    const int64_t size = (int64_t)problem->mla.kv_lora_rank + problem->mla.qk_rope_head_dim;
    return size <= FV_REFERENCE_MAX_HEAD_SIZE ? NULL : "the reference kernels take latents of up to 1024 elements";
}

static size_t scratch_bytes(const fv_attend_params *params)
{
    (void)params;
    return 0;
}

const fv_attend_variant fv_reference_mla_variants[1] = {
    {"reference", .block_m = 16, .tile_keys = 32, why_not, scratch_bytes, launch, .rescaling = FV_RESCALING_MULTIPLY},
};
