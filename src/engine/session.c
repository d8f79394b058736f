/* Caches, plans and buffers of a session. */
#include "engine/session.h"

#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"

enum {
    default_block_size = 16,
    default_batched_tokens = 512,
    default_num_seqs = 16,
    min_logit_rows = 32, /* room to score several positions of a prompt in one GEMM */
    max_block_size = 1 << 16,
};

static fv_status apply_defaults(fv_session_options *out, const fv_session_options *options, const fv_engine *engine)
{
    memset(out, 0, sizeof(*out));
    if (options && options->struct_size != sizeof(*options)) {
        return fv_fail(FV_ERR_INVALID, "fv_session_options.struct_size is %u; this library knows %zu",
                       options->struct_size, sizeof(*options));
    }
    if (options) *out = *options;
    const struct {
        const char *name;
        int32_t *value;
        int32_t fallback, max;
    } checked[] = {
        {"block_size", &out->block_size, default_block_size, max_block_size},
        {"cache_tokens", &out->cache_tokens, engine->model->config.context_length, 1 << 30},
        {"max_batched_tokens", &out->max_batched_tokens, default_batched_tokens, 1 << 20},
        {"max_num_seqs", &out->max_num_seqs, default_num_seqs, 1 << 16},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(checked); i++) {
        if (*checked[i].value == 0) *checked[i].value = checked[i].fallback;
        if (*checked[i].value < 1 || *checked[i].value > checked[i].max) {
            return fv_fail(FV_ERR_INVALID, "%s is %d; accepted: 1 to %d", checked[i].name, *checked[i].value,
                           checked[i].max);
        }
    }
    /* Half of what a decode reads in fp32. On SmolLM2 logits move by 2e-3 on average (fp32 cache: 1e-5);
     * bf16 keeps 3 bits less. */
    if (out->kv_cache_dtype == FV_DTYPE_NONE) out->kv_cache_dtype = FV_DTYPE_F16;
    return FV_OK;
}

static fv_status create_plan(fv_plan **plan, const fv_session *session, const fv_session_options *options,
                             int32_t window)
{
    const fv_model_config *config = &session->engine->model->config;
    const fv_problem problem = {
        .struct_size = sizeof(problem),
        .kind = config->attention,
        .mla = config->mla,
        .mha = {.num_heads = config->num_heads, .num_kv_heads = config->num_kv_heads, .head_size = config->head_size},
        .q_dtype = FV_DTYPE_F32,
        .kv_dtype = options->kv_cache_dtype,
        .out_dtype = FV_DTYPE_F32,
        .kv_layout_any = 1,
        .block_size = options->block_size,
        .scale = config->attention_scale,
        .window = window,
    };
    const fv_bounds bounds = {
        .struct_size = sizeof(bounds),
        .max_num_seqs = session->scheduler.limits.max_num_seqs,
        .max_num_tokens = options->max_batched_tokens,
        .max_seq_len = session->max_sequence_tokens,
    };
    const fv_plan_options plan_options = {
        .struct_size = sizeof(plan_options),
        .device = session->device,
        .backend = options->attention_backend,
        .kernels = options->kernels,
        .batch_invariant = options->batch_invariant,
        .max_workspace_bytes = options->attention_workspace_bytes,
    };
    return fv_plan_create(plan, session->engine->context, &problem, &bounds, &plan_options);
}

/* A plan for each group, and one workspace that is enough for each. */
static fv_status create_plans(fv_session *session, const fv_session_options *options)
{
    size_t workspace_bytes = 0;
    for (int32_t i = 0; i < session->num_groups; i++) {
        fv_plan **plan = &session->groups[i].plan;
        const fv_status status = create_plan(plan, session, options, session->scheduler.limits.groups[i].window);
        if (status != FV_OK) return status;
        const size_t bytes = fv_plan_workspace_bytes(*plan);
        if (bytes > workspace_bytes) workspace_bytes = bytes;
    }
    session->stats.activation_bytes = workspace_bytes;
    return fv_device_alloc(&session->workspace, session->device, workspace_bytes);
}

static fv_status create_group_cache(fv_session *session, int32_t index, const fv_session_options *options)
{
    const fv_model_config *config = &session->engine->model->config;
    fv_session_group *group = &session->groups[index];
    const int32_t num_layers = config->groups[index].num_layers;
    const fv_kv_layout layout = fv_plan_kv_layout(group->plan);
    const int64_t num_blocks = (int64_t)session->scheduler.limits.groups[index].num_blocks + 1; /* and the null block */
    size_t layer_bytes = 0, bytes = 0;
    const int32_t head_size = fv_model_config_cache_head_size(config);
    fv_status status = fv_kv_view_bytes(&layer_bytes, layout, options->kv_cache_dtype, num_blocks, options->block_size,
                                        config->num_kv_heads, head_size);
    if (status != FV_OK) return status;
    layer_bytes = (size_t)fv_round_up((int64_t)layer_bytes, FV_CACHE_LINE);
    if (__builtin_mul_overflow(layer_bytes, (size_t)num_layers, &bytes) ||
        fv_device_alloc(&group->cache, session->device, bytes) != FV_OK) {
        return fv_fail(FV_ERR_NO_MEMORY,
                       "no memory for a KV cache of %lld blocks of %d tokens (%d layers of %zu bytes)",
                       (long long)num_blocks, options->block_size, num_layers, layer_bytes);
    }
    session->stats.cache_bytes += bytes;
    session->stats.groups[index].cache_bytes = bytes;
    uint8_t *next = group->cache;
    for (int32_t i = 0; i < config->num_layers && status == FV_OK; i++) {
        if (fv_model_config_group_of(config, i) != index) continue;
        status = fv_kv_view_init(&session->cache_views[i], next, layout, options->kv_cache_dtype, num_blocks,
                                 options->block_size, config->num_kv_heads, head_size);
        if (config->attention == FV_ATTENTION_MLA) session->cache_views[i].v_head_size = config->mla.kv_lora_rank;
        next += layer_bytes;
    }
    return status;
}

static fv_status create_caches(fv_session *session, const fv_session_options *options)
{
    const int32_t num_layers = session->engine->model->config.num_layers;
    session->cache_views = calloc((size_t)num_layers, sizeof(*session->cache_views));
    if (!session->cache_views) return fv_fail(FV_ERR_NO_MEMORY, "no memory for the views of %d layers", num_layers);
    fv_status status = FV_OK;
    for (int32_t i = 0; i < session->num_groups && status == FV_OK; i++) {
        status = create_group_cache(session, i, options);
    }
    return status;
}

static fv_status create_group_arrays(fv_session *session, size_t tokens, size_t seqs)
{
    for (int32_t i = 0; i < session->num_groups; i++) {
        fv_session_group *group = &session->groups[i];
        group->slots = calloc(tokens, sizeof(*group->slots));
        group->block_table = calloc(seqs * (size_t)session->step.table_width, sizeof(*group->block_table));
        if (!group->slots || !group->block_table) {
            return fv_fail(FV_ERR_NO_MEMORY, "no memory for a block table of %zu x %d entries", seqs,
                           session->step.table_width);
        }
    }
    return FV_OK;
}

static fv_status create_arrays(fv_session *session, const fv_session_options *options)
{
    fv_step_arrays *step = &session->step;
    const size_t tokens = (size_t)options->max_batched_tokens, seqs = (size_t)session->scheduler.limits.max_num_seqs;
    step->table_width = (int32_t)fv_ceil_div(session->max_sequence_tokens, options->block_size);
    step->tokens = calloc(tokens, sizeof(*step->tokens));
    step->positions = calloc(tokens, sizeof(*step->positions));
    step->query_start = calloc(seqs + 1, sizeof(*step->query_start));
    step->seq_lens = calloc(seqs, sizeof(*step->seq_lens));
    step->logit_rows = calloc(tokens, sizeof(*step->logit_rows));
    step->logit_parts = calloc(tokens, sizeof(*step->logit_parts));
    step->parts = calloc(seqs, sizeof(*step->parts));
    session->sampler_scratch = malloc(fv_sampler_scratch_bytes(session->engine->model->config.vocabulary_size));
    if (step->tokens && step->positions && step->query_start && step->seq_lens && step->logit_rows &&
        step->logit_parts && step->parts && session->sampler_scratch) {
        return create_group_arrays(session, tokens, seqs);
    }
    return fv_fail(FV_ERR_NO_MEMORY, "no memory for steps of %zu tokens of %zu requests", tokens, seqs);
}

/* Layers with a window get blocks for as many requests as run at once, if that is less. */
static fv_scheduler_limits limits_of(const fv_session *session, const fv_session_options *options)
{
    const fv_model_config *config = &session->engine->model->config;
    const int64_t all_blocks = fv_ceil_div(options->cache_tokens, options->block_size);
    fv_scheduler_limits limits = {
        .block_size = options->block_size,
        .max_num_seqs = fv_min_i32(options->max_num_seqs, options->max_batched_tokens),
        .max_batched_tokens = options->max_batched_tokens,
        .num_groups = config->num_groups,
    };
    /* The last bits of a prompt's rows depend on where it is cut. */
    if (session->batch_invariant) limits.chunk_tokens = limits.max_batched_tokens - limits.max_num_seqs + 1;
    for (int32_t i = 0; i < config->num_groups; i++) {
        const int32_t window = config->groups[i].window;
        const int64_t at_once = fv_scheduler_blocks_at_once(&limits, window, session->max_sequence_tokens);
        limits.groups[i].window = window;
        limits.groups[i].num_blocks = (int32_t)all_blocks;
        if (window == 0) continue;
        limits.groups[i].num_blocks = (int32_t)fv_min_i64(all_blocks, at_once * limits.max_num_seqs);
    }
    return limits;
}

static void begin_stats(fv_session *session, const fv_session_options *options)
{
    const fv_model_config *config = &session->engine->model->config;
    fv_session_stats *stats = &session->stats;
    stats->block_size = options->block_size;
    stats->cache_tokens = fv_round_up(options->cache_tokens, options->block_size);
    stats->kv_cache_dtype = options->kv_cache_dtype;
    stats->num_groups = config->num_groups;
    for (int32_t i = 0; i < config->num_groups; i++) {
        stats->groups[i].num_layers = config->groups[i].num_layers;
        stats->groups[i].window = config->groups[i].window;
        stats->groups[i].num_blocks = session->scheduler.limits.groups[i].num_blocks;
    }
}

static fv_status init_session(fv_session *session, const fv_session_options *options)
{
    const fv_model_config *config = &session->engine->model->config;
    session->batch_invariant = options->batch_invariant != 0;
    session->num_groups = config->num_groups;
    session->max_sequence_tokens = (int32_t)fv_min_i64(config->context_length,
                                                       fv_round_up(options->cache_tokens, options->block_size));
    const fv_scheduler_limits limits = limits_of(session, options);
    fv_status status = fv_device_find(&session->device, session->engine->context, "cpu");
    if (status == FV_OK) status = fv_scheduler_init(&session->scheduler, &limits);
    if (status != FV_OK) return status;
    begin_stats(session, options);
    status = create_plans(session, options);
    if (status == FV_OK) status = create_caches(session, options);
    if (status == FV_OK) status = create_arrays(session, options);
    if (status != FV_OK) return status;
    const int32_t logit_rows = fv_max_i32(session->scheduler.limits.max_num_seqs, min_logit_rows);
    status = fv_forward_init(&session->forward, session->engine->model, session->engine->context, session->engine->gemm,
                             options->max_batched_tokens, logit_rows);
    session->stats.activation_bytes += session->forward.memory_bytes;
    return status;
}

fv_status fv_session_create(fv_session **session, fv_engine *engine, const fv_session_options *options)
{
    if (!session || !engine) return fv_fail(FV_ERR_INVALID, "session or engine is NULL");
    *session = NULL;
    fv_session_options complete;
    fv_status status = apply_defaults(&complete, options, engine);
    if (status != FV_OK) return status;
    fv_session *made = calloc(1, sizeof(*made));
    if (!made) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a session");
    made->engine = engine;
    status = init_session(made, &complete);
    if (status != FV_OK) {
        fv_session_destroy(made);
        return status;
    }
    *session = made;
    return FV_OK;
}

void fv_session_destroy(fv_session *session)
{
    if (!session) return;
    while (session->requests) fv_session_finish_request(session, session->requests);
    fv_step_arrays *step = &session->step;
    free(step->tokens);
    free(step->positions);
    free(step->query_start);
    free(step->seq_lens);
    free(step->logit_rows);
    free(step->logit_parts);
    free(step->parts);
    free(session->sampler_scratch);
    fv_forward_deinit(&session->forward);
    free(session->cache_views);
    for (int32_t i = 0; i < session->num_groups; i++) {
        fv_session_group *group = &session->groups[i];
        free(group->slots);
        free(group->block_table);
        if (session->device) fv_device_free(session->device, group->cache);
        fv_plan_destroy(group->plan);
    }
    if (session->device) fv_device_free(session->device, session->workspace);
    fv_scheduler_deinit(&session->scheduler);
    free(session);
}

fv_status fv_session_get_stats(fv_session_stats *stats, const fv_session *session)
{
    if (!stats || stats->struct_size != sizeof(*stats)) {
        return fv_fail(FV_ERR_INVALID, "fv_session_stats is NULL or its struct_size is not %zu", sizeof(*stats));
    }
    *stats = session->stats;
    stats->struct_size = sizeof(*stats);
    stats->num_waiting = session->scheduler.num_waiting;
    stats->num_running = session->scheduler.num_running;
    for (int32_t i = 0; i < session->num_groups; i++) {
        const fv_block_pool *pool = &session->scheduler.groups[i].pool;
        stats->groups[i].num_used_blocks = pool->num_blocks - pool->num_free;
        stats->groups[i].max_used_blocks = pool->max_used;
    }
    return FV_OK;
}

const char *fv_session_describe(fv_session *session, int32_t group)
{
    if (group < 0 || group >= session->num_groups) return NULL;
    return fv_plan_describe(session->groups[group].plan);
}
