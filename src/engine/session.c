/* Cache, plan and buffers of a session. */
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

static fv_status create_plan(fv_session *session, const fv_session_options *options)
{
    const fv_model_config *config = &session->engine->model->config;
    const fv_problem problem = {
        .struct_size = sizeof(problem),
        .kind = FV_ATTENTION_MHA,
        .mha = {.num_heads = config->num_heads, .num_kv_heads = config->num_kv_heads, .head_size = config->head_size},
        .q_dtype = FV_DTYPE_F32,
        .kv_dtype = options->kv_cache_dtype,
        .out_dtype = FV_DTYPE_F32,
        .kv_layout_any = 1,
        .block_size = options->block_size,
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
    };
    fv_status status = fv_plan_create(&session->plan, session->engine->context, &problem, &bounds, &plan_options);
    if (status != FV_OK) return status;
    status = fv_device_alloc(&session->workspace, session->device, fv_plan_workspace_bytes(session->plan));
    session->stats.activation_bytes = fv_plan_workspace_bytes(session->plan);
    return status;
}

static fv_status create_cache(fv_session *session, const fv_session_options *options)
{
    const fv_model_config *config = &session->engine->model->config;
    const fv_kv_layout layout = fv_plan_kv_layout(session->plan);
    const int64_t num_blocks = (int64_t)session->scheduler.pool.num_blocks + 1; /* and the null block */
    size_t layer_bytes = 0, bytes = 0;
    fv_status status = fv_kv_view_bytes(&layer_bytes, layout, options->kv_cache_dtype, num_blocks, options->block_size,
                                        config->num_kv_heads, config->head_size);
    if (status != FV_OK) return status;
    layer_bytes = (size_t)fv_round_up((int64_t)layer_bytes, FV_CACHE_LINE);
    if (__builtin_mul_overflow(layer_bytes, (size_t)config->num_layers, &bytes) ||
        fv_device_alloc(&session->cache, session->device, bytes) != FV_OK) {
        return fv_fail(FV_ERR_NO_MEMORY,
                       "no memory for a KV cache of %lld blocks of %d tokens (%d layers of %zu bytes)",
                       (long long)num_blocks, options->block_size, config->num_layers, layer_bytes);
    }
    session->stats.cache_bytes = bytes;
    session->cache_views = calloc((size_t)config->num_layers, sizeof(*session->cache_views));
    if (!session->cache_views)
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for the views of %d layers", config->num_layers);
    for (int32_t i = 0; i < config->num_layers && status == FV_OK; i++) {
        status = fv_kv_view_init(&session->cache_views[i], (uint8_t *)session->cache + (size_t)i * layer_bytes, layout,
                                 options->kv_cache_dtype, num_blocks, options->block_size, config->num_kv_heads,
                                 config->head_size);
    }
    return status;
}

static fv_status create_arrays(fv_session *session, const fv_session_options *options)
{
    fv_step_arrays *step = &session->step;
    const size_t tokens = (size_t)options->max_batched_tokens, seqs = (size_t)session->scheduler.limits.max_num_seqs;
    step->table_width = (int32_t)fv_ceil_div(session->max_sequence_tokens, options->block_size);
    step->tokens = calloc(tokens, sizeof(*step->tokens));
    step->positions = calloc(tokens, sizeof(*step->positions));
    step->slots = calloc(tokens, sizeof(*step->slots));
    step->query_start = calloc(seqs + 1, sizeof(*step->query_start));
    step->seq_lens = calloc(seqs, sizeof(*step->seq_lens));
    step->block_table = calloc(seqs * (size_t)step->table_width, sizeof(*step->block_table));
    step->logit_rows = calloc(tokens, sizeof(*step->logit_rows));
    step->logit_parts = calloc(tokens, sizeof(*step->logit_parts));
    step->parts = calloc(seqs, sizeof(*step->parts));
    session->sampler_scratch = malloc(fv_sampler_scratch_bytes(session->engine->model->config.vocabulary_size));
    if (step->tokens && step->positions && step->slots && step->query_start && step->seq_lens && step->block_table &&
        step->logit_rows && step->logit_parts && step->parts && session->sampler_scratch) {
        return FV_OK;
    }
    return fv_fail(FV_ERR_NO_MEMORY, "no memory for steps of %zu tokens of %zu requests", tokens, seqs);
}

static fv_status init_session(fv_session *session, const fv_session_options *options)
{
    const fv_model_config *config = &session->engine->model->config;
    const int64_t num_blocks = fv_ceil_div(options->cache_tokens, options->block_size);
    const fv_scheduler_limits limits = {
        .block_size = options->block_size,
        .num_blocks = (int32_t)num_blocks,
        .max_num_seqs = options->max_num_seqs,
        .max_batched_tokens = options->max_batched_tokens,
    };
    session->batch_invariant = options->batch_invariant != 0;
    session->max_sequence_tokens = (int32_t)fv_min_i64(config->context_length,
                                                       num_blocks * (int64_t)options->block_size);
    session->stats.block_size = options->block_size;
    session->stats.num_blocks = limits.num_blocks;
    session->stats.cache_tokens = num_blocks * options->block_size;
    session->stats.kv_cache_dtype = options->kv_cache_dtype;

    fv_status status = fv_device_find(&session->device, session->engine->context, "cpu");
    if (status == FV_OK) status = fv_scheduler_init(&session->scheduler, &limits);
    if (status == FV_OK) status = create_plan(session, options);
    if (status == FV_OK) status = create_cache(session, options);
    if (status == FV_OK) status = create_arrays(session, options);
    if (status != FV_OK) return status;
    const int32_t logit_rows = fv_max_i32(session->scheduler.limits.max_num_seqs, min_logit_rows);
    status = fv_llama_init(&session->llama, session->engine->model, session->engine->context, session->engine->gemm,
                           options->max_batched_tokens, logit_rows);
    session->stats.activation_bytes += session->llama.memory_bytes;
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
    free(step->slots);
    free(step->query_start);
    free(step->seq_lens);
    free(step->block_table);
    free(step->logit_rows);
    free(step->logit_parts);
    free(step->parts);
    free(session->sampler_scratch);
    fv_llama_deinit(&session->llama);
    free(session->cache_views);
    if (session->device) {
        fv_device_free(session->device, session->cache);
        fv_device_free(session->device, session->workspace);
    }
    fv_plan_destroy(session->plan);
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
    stats->max_cache_tokens_used = (int64_t)session->scheduler.pool.max_used * stats->block_size;
    return FV_OK;
}

const char *fv_session_describe(fv_session *session) { return fv_plan_describe(session->plan); }
