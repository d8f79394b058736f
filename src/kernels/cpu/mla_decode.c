/* mla_decode on the CPU: one task of the executor for each work item, or cell of the static grid. A variant
 * is a strategy for the rows of an item: mla_decode_rows.h, or AMLA's, see amla.c. */
#include <assert.h>

#include "core/error.h"
#include "core/executor.h"
#include "kernels/cpu/amla.h"
#include "kernels/cpu/attend_one_strip.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/latent_rows.h"
#include "kernels/cpu/mla_decode_rows.h"

typedef void (*rows_fn)(const fv_attend_job *job, void *scratch);

typedef struct decode_call {
    const fv_attend_params *params;
    rows_fn rows;
} decode_call;

static void decode_item(const decode_call *call, const fv_work_item *item, int32_t worker)
{
    const fv_attend_params *params = call->params;
    const fv_attend_job job = fv_attend_job_of(params, item);
    call->rows(&job, (char *)params->scratch + (size_t)worker * params->scratch_bytes);
}

static void list_task(void *user, int64_t index, int32_t worker)
{
    const decode_call *call = user;
    decode_item(call, &call->params->items[index], worker);
}

static void grid_task(void *user, int64_t index, int32_t worker)
{
    const decode_call *call = user;
    const int32_t num_segments = call->params->num_segments;
    fv_work_item item;
    if (!fv_grid_item(&item, call->params, (int32_t)(index / num_segments), 0, (int32_t)(index % num_segments))) return;
    decode_item(call, &item, worker);
}

static fv_status launch(const fv_launch *launch_at, const fv_attend_params *params, rows_fn rows)
{
    const fv_kv_view *cache = &params->cache;
    if (!fv_kv_layout_is_latent(cache->layout)) {
        return fv_fail(FV_ERR_INVALID, "cache layout is %s; mla_decode takes latent and latent_fp8_ds",
                       fv_kv_layout_name(cache->layout));
    }
    if (cache->layout == FV_KV_LAYOUT_LATENT_FP8_DS &&
        (params->head_size != FV_DS_LATENT + FV_DS_ROPE || params->v_head_size != FV_DS_LATENT)) {
        return fv_fail(FV_ERR_INVALID, "head sizes are %d and %d; latent_fp8_ds has 576 and 512", params->head_size,
                       params->v_head_size);
    }
    if (params->tile_keys <= 0 || params->tile_keys % FV_LANES != 0) {
        return fv_fail(FV_ERR_INVALID, "tile_keys is %d; accepted: a multiple of 8 from 8", params->tile_keys);
    }
    assert(params->scratch && params->num_kv_heads == 1);

    decode_call call = {params, rows};
    if (params->items)
        fv_executor_run(launch_at->executor, params->num_items, list_task, &call);
    else
        fv_executor_run(launch_at->executor, (int64_t)params->num_q_blocks * params->num_segments, grid_task, &call);
    return FV_OK;
}

static const char *why_not(const fv_problem *problem)
{
    if (problem->kind != FV_ATTENTION_MLA) return "the kernel serves MLA";
    if (problem->mla.kv_lora_rank % 8 != 0) return "kv_lora_rank is not a multiple of 8";
    if (problem->mla.qk_rope_head_dim % 8 != 0) return "qk_rope_head_dim is not a multiple of 8";
    return NULL;
}

#if FV_HAS_ONE_STRIP
/* The job with latents as keys and values of one head. Returns 0 where they are not: rotated when they are read, or times scales
 * of their own. */
static int32_t as_heads(fv_attend_job *job, const fv_attend_job *of_item)
{
    const fv_attend_params *params = of_item->params;
    const fv_kv_view *cache = &params->cache;
    if (cache->layout != FV_KV_LAYOUT_LATENT || cache->k_scales.data || params->rotation.cos) return 0;
    *job = *of_item;
    job->cache.v = job->cache.k;
    job->cache.v_in_place = job->cache.k_in_place;
    job->v_head_scale = job->k_head_scale;
    return 1;
}

/* By the kernels of heads; 0: they do not serve the item. `num_rows` are those of its query. */
static int32_t rows_as_heads(const fv_attend_job *of_item, int64_t num_rows, void *scratch)
{
    const fv_attend_job none = {0};
    fv_attend_job job;
    if (!as_heads(&job, of_item)) return 0;
    if (FV_ISA_SYMBOL(fv_attend_one_strip_serves)(&job, num_rows)) {
        FV_ISA_SYMBOL(fv_attend_one_strip)(&job, &none, scratch);
        return 1;
    }
#if defined(FV_HAS_PAIRS)
    if (num_rows > FV_BASE_SYMBOL(fv_mla_few_limit)(job.params) && FV_ISA_SYMBOL(fv_attend_many_serves)(&job)) {
        FV_ISA_SYMBOL(fv_attend_many_rows)(&job, scratch);
        return 1;
    }
#endif
    return 0;
}

static size_t heads_scratch(const fv_attend_params *params)
{
    const size_t strip = FV_ISA_SYMBOL(fv_attend_one_strip_scratch)(params);
#if defined(FV_HAS_PAIRS)
    const size_t many = FV_ISA_SYMBOL(fv_attend_many_scratch)(params);
    if (many > strip) return many;
#endif
    return strip;
}
#else
static int32_t rows_as_heads(const fv_attend_job *of_item, int64_t num_rows, void *scratch)
{
    return (void)of_item, (void)num_rows, (void)scratch, 0;
}

static size_t heads_scratch(const fv_attend_params *params) { return (void)params, 0; }
#endif

static size_t rows_scratch(const fv_attend_params *params)
{
    const size_t few = FV_BASE_SYMBOL(fv_mla_few_scratch)(params), many = FV_BASE_SYMBOL(fv_mla_many_scratch)(params);
    const size_t heads = heads_scratch(params), most = few > many ? few : many;
    return (size_t)fv_round_up((int64_t)(most > heads ? most : heads), FV_CACHE_LINE);
}

/* By the query length of the item's sequence, so that a row's result does not depend on its batch mates. */
static void few_or_many_rows(const fv_attend_job *job, void *scratch)
{
    const fv_work_item *item = job->item;
    const int32_t query_len = job->params->query_start[item->seq + 1] - job->params->query_start[item->seq];
    const int64_t num_rows = (int64_t)fv_max_i32(query_len, item->num_tokens) * job->group;
    if (rows_as_heads(job, num_rows, scratch)) return;
    if (num_rows <= FV_BASE_SYMBOL(fv_mla_few_limit)(job->params))
        FV_BASE_SYMBOL(fv_mla_few_rows)(job, scratch);
    else
        FV_BASE_SYMBOL(fv_mla_many_rows)(job, scratch);
}

static fv_status launch_rows(const fv_launch *launch_at, const fv_attend_params *params)
{
    return launch(launch_at, params, few_or_many_rows);
}

/* The compensation is as good as q_dtype: a wider output shows what it misses. */
static const char *amla_why_not(const fv_problem *problem)
{
    const fv_dtype out_dtype = problem->out_dtype ? problem->out_dtype : problem->q_dtype;
    if (problem->q_dtype != FV_DTYPE_F32 && out_dtype == FV_DTYPE_F32)
        return "AMLA compensates to the precision of q_dtype, and out_dtype float32 is wider";
    return why_not(problem);
}

static size_t amla_scratch(const fv_attend_params *params)
{
    return (size_t)fv_round_up((int64_t)FV_BASE_SYMBOL(fv_amla_scratch)(params), FV_CACHE_LINE);
}

static void amla_add(const fv_attend_job *job, void *scratch)
{
    FV_BASE_SYMBOL(fv_amla_rows)(job, scratch, FV_RESCALING_ADD);
}

static void amla_uncompensated(const fv_attend_job *job, void *scratch)
{
    FV_BASE_SYMBOL(fv_amla_rows)(job, scratch, FV_RESCALING_ADD_UNCOMPENSATED);
}

static void amla_multiply(const fv_attend_job *job, void *scratch)
{
    FV_BASE_SYMBOL(fv_amla_rows)(job, scratch, FV_RESCALING_MULTIPLY);
}

static fv_status launch_amla(const fv_launch *launch_at, const fv_attend_params *params)
{
    return launch(launch_at, params, amla_add);
}

static fv_status launch_amla_uncompensated(const fv_launch *launch_at, const fv_attend_params *params)
{
    return launch(launch_at, params, amla_uncompensated);
}

static fv_status launch_amla_multiply(const fv_launch *launch_at, const fv_attend_params *params)
{
    return launch(launch_at, params, amla_multiply);
}

/* "amla_multiply" is the paper's Base, the same loop that multiplies: to compare with, chosen by name only. */
const fv_attend_variant FV_ISA_SYMBOL(fv_mla_decode)[FV_NUM_VARIANTS_mla_decode] = {
    {"rows128_keys64", 128, 64, why_not, rows_scratch, launch_rows, .rescaling = FV_RESCALING_MULTIPLY},
    {"amla", 128, 512, amla_why_not, amla_scratch, launch_amla, .rescaling = FV_RESCALING_ADD},
    {"amla_uncompensated", 128, 512, amla_why_not, amla_scratch, launch_amla_uncompensated,
     .rescaling = FV_RESCALING_ADD_UNCOMPENSATED},
    {"amla_multiply", 128, 512, why_not, amla_scratch, launch_amla_multiply, .rescaling = FV_RESCALING_MULTIPLY_BF16},
};
