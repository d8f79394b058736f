/* mla_decode with tiles: the values of a latent are the first of its elements. Rotation at reading, scales of single
 * latents and the 656-byte entry for results of more than bf16 go to the level below.
 *
 * Variants differ in how sums are rescaled (tile_scale.h): "tiles128" multiplies the rows whose maximum or reference moves,
 * "amla" adds to their bits, "amla_multiply" multiplies all rows at each block. */
#include "kernels/cpu/amx/item_loop.h"

#define BASE(i) (&FV_BASE_SYMBOL(fv_mla_decode)[i])

static int32_t attend_item(const fv_attend_params *params, const fv_work_item *item, void *scratch,
                           fv_rescaling rescaling, fv_key_shares *shares)
{
    fv_attend_job job = fv_attend_job_of(params, item);
    job.cache.v = job.cache.k;
    job.cache.v_in_place = job.cache.k_in_place;
    job.v_head_scale = job.k_head_scale;
    const int32_t query_len = params->query_start[item->seq + 1] - params->query_start[item->seq];
    const int64_t num_rows = (int64_t)fv_max_i32(query_len, item->num_tokens) * job.group;
    return fv_item_loop_tiles(&job, num_rows, scratch, rescaling, shares);
}

static int32_t serves(const fv_attend_params *params)
{
    if (params->rotation.cos || params->cache.k_scales.data) return 0;
    if (!fv_has_latent_parts(params)) return params->cache.layout == FV_KV_LAYOUT_LATENT;
    return params->q_dtype == FV_DTYPE_BF16 && params->out_dtype == FV_DTYPE_BF16;
}

static fv_status launch(const fv_launch *launch_at, const fv_attend_params *params, const fv_attend_variant *base,
                        fv_rescaling rescaling)
{
    if (!serves(params)) return base->launch(launch_at, params);
    return fv_item_loop_run(&(fv_item_loop){launch_at, params, base, attend_item, rescaling, NULL});
}

static const char *why_not(const fv_problem *problem, const fv_attend_variant *base)
{
#if defined(FV_TILES_EMULATED)
    if (problem->kv_layout == FV_KV_LAYOUT_LATENT_FP8_DS && problem->q_dtype != FV_DTYPE_BF16)
        return "tiles take the 656-byte entry for queries of bf16";
    if (problem->kv_scaling == FV_KV_SCALING_PER_TOKEN_HEAD) return "tiles take no scales of single latents";
#endif
    return fv_item_loop_why_not(problem, base);
}

/* Variant `i`, which has that of the base to fall back to. */
#define VARIANT(i, rescaling)                                                                                   \
    static fv_status launch_##i(const fv_launch *launch_at, const fv_attend_params *params)                     \
    {                                                                                                           \
        return launch(launch_at, params, BASE(i), rescaling);                                                   \
    }                                                                                                           \
    static size_t scratch_##i(const fv_attend_params *params) { return fv_item_loop_scratch(params, BASE(i)); } \
    static const char *why_not_##i(const fv_problem *problem) { return why_not(problem, BASE(i)); }
VARIANT(0, FV_RESCALING_MULTIPLY)
VARIANT(1, FV_RESCALING_ADD)
VARIANT(2, FV_RESCALING_ADD_UNCOMPENSATED)
VARIANT(3, FV_RESCALING_MULTIPLY_BF16)
#undef VARIANT

const fv_attend_variant FV_ISA_SYMBOL(fv_mla_decode)[FV_NUM_VARIANTS_mla_decode] = {
    {"tiles128", 128, 64, why_not_0, scratch_0, launch_0, .rescaling = FV_RESCALING_MULTIPLY},
    {"amla", 128, 256, why_not_1, scratch_1, launch_1, .rescaling = FV_RESCALING_ADD},
    {"amla_uncompensated", 128, 256, why_not_2, scratch_2, launch_2, .rescaling = FV_RESCALING_ADD_UNCOMPENSATED},
    {"amla_multiply", 128, 256, why_not_3, scratch_3, launch_3, .rescaling = FV_RESCALING_MULTIPLY_BF16},
};
