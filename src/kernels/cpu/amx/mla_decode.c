/* mla_decode with tiles: the values of a latent are the first of its elements. The 656-byte entry, rotation
 * at reading and AMLA's variants go to the level below. */
#include "kernels/cpu/amx/item_loop.h"

#define BASE(i) (&FV_BASE_SYMBOL(fv_mla_decode)[i])

static int32_t attend_item(const fv_attend_params *params, const fv_work_item *item, void *scratch)
{
    fv_attend_job job = fv_attend_job_of(params, item);
    job.cache.v = job.cache.k;
    job.cache.v_in_place = job.cache.k_in_place;
    job.v_head_scale = job.k_head_scale;
    const int32_t query_len = params->query_start[item->seq + 1] - params->query_start[item->seq];
    return fv_item_loop_tiles(&job, (int64_t)fv_max_i32(query_len, item->num_tokens) * job.group, scratch);
}

static fv_status launch(const fv_launch *launch_at, const fv_attend_params *params)
{
    if (params->cache.layout != FV_KV_LAYOUT_LATENT || params->rotation.cos) return BASE(0)->launch(launch_at, params);
    return fv_item_loop_run(&(fv_item_loop){launch_at, params, BASE(0), attend_item});
}

static size_t scratch_bytes(const fv_attend_params *params) { return fv_item_loop_scratch(params, BASE(0)); }

static const char *why_not(const fv_problem *problem)
{
#if defined(FV_TILES_EMULATED)
    if (problem->kv_layout == FV_KV_LAYOUT_LATENT_FP8_DS) return "tiles are of bf16";
#endif
    return fv_item_loop_why_not(problem, BASE(0));
}

/* The base's variant `i` as it is. */
#define VARIANT_OF_BASE(i)                                                                               \
    static fv_status launch_##i(const fv_launch *launch_at, const fv_attend_params *params)              \
    {                                                                                                    \
        return BASE(i)->launch(launch_at, params);                                                       \
    }                                                                                                    \
    static size_t scratch_##i(const fv_attend_params *params) { return BASE(i)->scratch_bytes(params); } \
    static const char *why_not_##i(const fv_problem *problem) { return BASE(i)->why_not(problem); }
VARIANT_OF_BASE(1)
VARIANT_OF_BASE(2)
VARIANT_OF_BASE(3)
#undef VARIANT_OF_BASE

const fv_attend_variant FV_ISA_SYMBOL(fv_mla_decode)[FV_NUM_VARIANTS_mla_decode] = {
    {"tiles128", 128, 64, why_not, scratch_bytes, launch, FV_RESCALING_MULTIPLY, 0},
    {"amla", 128, 512, why_not_1, scratch_1, launch_1, FV_RESCALING_ADD, 0},
    {"amla_uncompensated", 128, 512, why_not_2, scratch_2, launch_2, FV_RESCALING_ADD_UNCOMPENSATED, 0},
    {"amla_multiply", 128, 512, why_not_3, scratch_3, launch_3, FV_RESCALING_MULTIPLY_BF16, 0},
};
