/* Caches, plans and buffers of a session. */
#include <stdlib.h>
#include <string.h>

#include "core/context.h"
#include "core/device.h"
#include "engine/runner.h"
#include "fovea/mla.h"

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
    if (options) {
        const fv_status status = fv_check_struct_size("fv_session_options", options->struct_size, sizeof(*options));
        if (status != FV_OK) return status;
        *out = *options;
    }
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
            return fv_fail(FV_ERR_INVALID, "%s is %d; accepted: 0 (the default), or 1 to %d", checked[i].name,
                           *checked[i].value, checked[i].max);
        }
    }
    if (out->kv_cache_dtype == FV_DTYPE_NONE || fv_dtype_bytes(out->kv_cache_dtype) > 0) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "kv_cache_dtype is %d; accepted: 0 (the default), or a value of fv_dtype",
                   (int)out->kv_cache_dtype);
}

/* fp16 queries over an fp16 cache move logits by a third more than fp32 ones, and tiles serve them; over one of a byte they
 * show even less. */
static bool is_for_tiles(const fv_session_options *options, const fv_engine *engine)
{
    const fv_dtype cache = options->kv_cache_dtype;
    if (engine->context->isa < FV_ISA_AMX || options->kernels || options->batch_invariant) return false;
    return cache == FV_DTYPE_NONE || cache == FV_DTYPE_F16 || fv_dtype_bytes(cache) == 1;
}

/* What is left to the session. */
static fv_status choose_dtypes(fv_session_options *options, const fv_runner *runner, const fv_engine *engine)
{
    const fv_dtype given = options->attention_dtype;
    const bool is_cpu = runner == &fv_cpu_runner, is_narrow = given == FV_DTYPE_F16 || given == FV_DTYPE_BF16;
    if (given != FV_DTYPE_NONE && given != FV_DTYPE_BF16 && !(is_cpu && (is_narrow || given == FV_DTYPE_F32)))
        return fv_fail(FV_ERR_INVALID, "attention_dtype is %s (%d); accepted: %s", fv_dtype_name(given), (int)given,
                       is_cpu ? "float32, float16, bfloat16" : "bfloat16, on a GPU");
    if (given == FV_DTYPE_NONE)
        options->attention_dtype = is_cpu && is_for_tiles(options, engine) ? FV_DTYPE_F16 : runner->activation_dtype;
    if (options->kv_cache_dtype == FV_DTYPE_NONE)
        options->kv_cache_dtype = given == FV_DTYPE_BF16 ? FV_DTYPE_BF16 : runner->default_kv_dtype;
    return FV_OK;
}

/* Integers need scales: kv_write computes one for each token and head. */
static fv_kv_scaling cache_scaling(const fv_session_options *options)
{
    return options->kv_cache_dtype == FV_DTYPE_I8 ? FV_KV_SCALING_PER_TOKEN_HEAD : FV_KV_SCALING_NONE;
}

/* A plan names its own field where it refuses the one that a session passes on under another name. */
static fv_status fail_plan(fv_status status)
{
    static const char name[] = "max_workspace_bytes";
    const char *text = fv_last_error();
    if (strncmp(text, name, strlen(name)) != 0) return status;
    return fv_fail(status, "attention_workspace_bytes%s", text + strlen(name));
}

/* A row's bits by tiles depend on which others of its sequence are in the step, and so on where others cut a prompt. */
static const char *choose_kernels(const fv_session *session, const fv_session_options *options)
{
    const bool is_cpu = session->runner == &fv_cpu_runner, has_tiles = session->engine->context->isa >= FV_ISA_AMX;
    if (options->kernels || !options->batch_invariant || !is_cpu || !has_tiles) return options->kernels;
    return options->attention_dtype == FV_DTYPE_F32 ? NULL : "avx512";
}

fv_status fv_session_create_plan(fv_plan **plan, fv_session *session, int32_t group, const fv_plan_size *size,
                                 const fv_session_options *options)
{
    const fv_model_config *config = &session->engine->model->config;
    const fv_problem problem = {
        .struct_size = sizeof(problem),
        .kind = config->attention,
        .mla = config->mla,
        .mha = {.num_heads = config->num_heads, .num_kv_heads = config->num_kv_heads, .head_size = config->head_size},
        .q_dtype = options->attention_dtype,
        .kv_dtype = options->kv_cache_dtype,
        .out_dtype = options->attention_dtype,
        .kv_layout_any = 1,
        .block_size = options->block_size,
        .scale = config->attention_scale,
        .window = config->groups[group].window,
        .kv_scaling = cache_scaling(options),
    };
    const fv_bounds bounds = {
        .struct_size = sizeof(bounds),
        .max_num_seqs = size->max_num_seqs,
        .max_num_tokens = size->max_num_tokens,
        .max_query_len = size->is_graph ? 1 : 0,
        .max_seq_len = session->max_sequence_tokens,
    };
    const fv_plan_options plan_options = {
        .struct_size = sizeof(plan_options),
        .device = session->device,
        .backend = options->attention_backend,
        .kernels = choose_kernels(session, options),
        .batch_invariant = options->batch_invariant,
        .static_grid = size->is_graph,
        .static_list = size->is_graph,
        .max_workspace_bytes = options->attention_workspace_bytes,
    };
    const fv_status status = fv_plan_create(plan, session->engine->context, &problem, &bounds, &plan_options);
    if (status != FV_OK) return fail_plan(status);
    const size_t bytes = config->attention == FV_ATTENTION_MLA && session->runner == &fv_device_runner
                             ? fv_mla_workspace_bytes(*plan, config->q_lora_rank)
                             : fv_plan_workspace_bytes(*plan);
    if (bytes > session->workspace_bytes) session->workspace_bytes = bytes;
    return FV_OK;
}

int32_t fv_session_graph_seqs(int32_t num_seqs)
{
    int32_t seqs = 1;
    while (seqs < num_seqs && seqs < 8) seqs *= 2;
    return seqs >= num_seqs ? seqs : (int32_t)fv_round_up(num_seqs, 8);
}

int32_t fv_runner_logit_rows(const fv_session *session)
{
    return fv_max_i32(fv_session_graph_seqs(session->scheduler.limits.max_num_seqs), min_logit_rows);
}

static fv_status create_plans(fv_session *session, const fv_session_options *options)
{
    const fv_plan_size size = {session->scheduler.limits.max_num_seqs, options->max_batched_tokens, false};
    fv_status status = FV_OK;
    for (int32_t i = 0; i < session->num_groups && status == FV_OK; i++) {
        status = fv_session_create_plan(&session->groups[i].plan, session, i, &size, options);
    }
    return status;
}

/* How the layers of a group share its memory. On a device one after the other; on a CPU block by block, so that what a prompt
 * touches is what its tokens need, not a huge page of each layer's:
 *
 *   device   | layer 0: block 0, 1, 2 ... | layer 1: block 0, 1, 2 ... |
 *   CPU      | block 0: layer 0, 1 ... | block 1: layer 0, 1 ... | */
typedef struct cache_order {
    int64_t num_blocks;
    int64_t blocks_together; /* of a layer: all of them, or one */
    int64_t kv_bytes;        /* of so many blocks: K and V, */
    int64_t scale_bytes;     /* scales of K, and as many of V; 0: there are none */
    int64_t layer_stride;
    int64_t block_stride; /* of one together, else 0 */
    int64_t bytes;        /* of all layers and blocks */
} cache_order;

/* From a block to the next: so that those of a layer do not all meet in the same sets of a cache. */
enum { BLOCK_SETS_BYTES = 32 << 10, BLOCK_PAD_BYTES = 4 << 10 };

/* FV_ERR_NO_MEMORY where the bytes do not fit their type. */
static fv_status order_cache(cache_order *order, const fv_session *session, int32_t index,
                             const fv_session_options *options)
{
    const fv_model_config *config = &session->engine->model->config;
    const int32_t num_layers = config->groups[index].num_layers;
    const bool is_by_block = session->device->host_is_device;
    *order = (cache_order){.num_blocks = (int64_t)session->scheduler.limits.groups[index].num_blocks + 1};
    order->blocks_together = is_by_block ? 1 : order->num_blocks; /* the null block is one of them */
    size_t kv_bytes = 0;
    const fv_status status = fv_kv_view_bytes(&kv_bytes, fv_plan_kv_layout(session->groups[index].plan),
                                              options->kv_cache_dtype, order->blocks_together, options->block_size,
                                              config->num_kv_heads, fv_model_config_cache_head_size(config));
    if (status != FV_OK) return status;
    order->kv_bytes = fv_round_up((int64_t)kv_bytes, FV_CACHE_LINE);
    if (cache_scaling(options) != FV_KV_SCALING_NONE) {
        const int64_t num_scales = order->blocks_together * options->block_size * config->num_kv_heads;
        order->scale_bytes = fv_round_up(num_scales * (int64_t)sizeof(float), FV_CACHE_LINE);
    }
    order->layer_stride = order->kv_bytes + 2 * order->scale_bytes;
    bool is_too_large = __builtin_mul_overflow(order->layer_stride, num_layers, &order->bytes);
    if (is_by_block && !is_too_large) {
        order->block_stride = order->bytes + (order->bytes % BLOCK_SETS_BYTES == 0 ? BLOCK_PAD_BYTES : 0);
        is_too_large = __builtin_mul_overflow(order->block_stride, order->num_blocks, &order->bytes);
    }
    if (!is_too_large) return FV_OK;
    return fv_fail(FV_ERR_NO_MEMORY, "no memory for a KV cache of %lld blocks of %d tokens in %d layers",
                   (long long)order->num_blocks, options->block_size, num_layers);
}

/* Scales [block_size, Hkv] of each block of a layer's K, or of its V. */
static fv_scale_plane scale_plane(void *data, const cache_order *order, const fv_model_config *config,
                                  const fv_session_options *options)
{
    if (order->scale_bytes == 0) return (fv_scale_plane){0};
    const int64_t slot_stride = config->num_kv_heads * (int64_t)sizeof(float);
    const int64_t dense_stride = slot_stride * options->block_size;
    return (fv_scale_plane){data, order->block_stride ? order->block_stride : dense_stride, slot_stride, sizeof(float)};
}

/* A layer's view of K and V at `data`, and of the scales behind them. */
static fv_status view_layer(fv_kv_view *view, uint8_t *data, const cache_order *order, fv_kv_layout layout,
                            const fv_model_config *config, const fv_session_options *options)
{
    const fv_status status = fv_kv_view_init(view, data, layout, options->kv_cache_dtype, order->blocks_together,
                                             options->block_size, config->num_kv_heads,
                                             fv_model_config_cache_head_size(config));
    if (config->attention == FV_ATTENTION_MLA) view->v_head_size = config->mla.kv_lora_rank;
    view->num_blocks = order->num_blocks;
    if (order->block_stride) view->k.block_stride = view->v.block_stride = order->block_stride;
    view->k_scales = scale_plane(data + order->kv_bytes, order, config, options);
    view->v_scales = scale_plane(data + order->kv_bytes + order->scale_bytes, order, config, options);
    return status;
}

static fv_status create_group_cache(fv_session *session, int32_t index, const fv_session_options *options)
{
    const fv_model_config *config = &session->engine->model->config;
    fv_session_group *group = &session->groups[index];
    cache_order order;
    fv_status status = order_cache(&order, session, index, options);
    if (status != FV_OK) return status;
    if (fv_device_alloc(&group->cache, session->device, (size_t)order.bytes) != FV_OK) {
        return fv_fail(
            FV_ERR_NO_MEMORY, "no memory for a KV cache of %lld blocks of %d tokens in %d layers, %lld bytes",
            (long long)order.num_blocks, options->block_size, config->groups[index].num_layers, (long long)order.bytes);
    }
    session->stats.cache_bytes += (size_t)order.bytes;
    session->stats.groups[index].cache_bytes = (size_t)order.bytes;
    uint8_t *next = group->cache;
    for (int32_t i = 0; i < config->num_layers && status == FV_OK; i++) {
        if (fv_model_config_group_of(config, i) != index) continue;
        status = view_layer(&session->cache_views[i], next, &order, fv_plan_kv_layout(group->plan), config, options);
        next += order.layer_stride;
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

/* Room for `count` elements of `bytes` at the end of the memory; NULL while that is only measured. */
static void *take(fv_step_arrays *step, size_t count, size_t bytes)
{
    const size_t offset = step->memory_bytes;
    step->memory_bytes = (size_t)fv_round_up((int64_t)(offset + count * bytes), FV_CACHE_LINE);
    return step->memory ? (char *)step->memory + offset : NULL;
}

static void lay_out_arrays(fv_session *session)
{
    fv_step_arrays *step = &session->step;
    const size_t tokens = (size_t)step->max_tokens, seqs = (size_t)session->scheduler.limits.max_num_seqs;
    step->memory_bytes = 0;
    step->tokens = take(step, tokens, sizeof(*step->tokens));
    step->positions = take(step, tokens, sizeof(*step->positions));
    step->query_start = take(step, seqs + 1, sizeof(*step->query_start));
    step->seq_lens = take(step, seqs, sizeof(*step->seq_lens));
    step->logit_rows = take(step, tokens, sizeof(*step->logit_rows));
    for (int32_t i = 0; i < session->num_groups; i++) {
        session->groups[i].slots = take(step, tokens, sizeof(*session->groups[i].slots));
    }
    step->table_offset = step->memory_bytes;
    for (int32_t i = 0; i < session->num_groups; i++) {
        session->groups[i].block_table = take(step, seqs * (size_t)step->table_width,
                                              sizeof(*session->groups[i].block_table));
    }
}

static fv_status create_arrays(fv_session *session, const fv_session_options *options)
{
    fv_step_arrays *step = &session->step;
    const int32_t max_num_seqs = session->scheduler.limits.max_num_seqs;
    step->max_tokens = fv_max_i32(options->max_batched_tokens, fv_session_graph_seqs(max_num_seqs));
    step->table_width = (int32_t)fv_ceil_div(session->max_sequence_tokens, options->block_size);
    lay_out_arrays(session);
    const fv_status status = fv_device_alloc_host(&step->memory, session->device, step->memory_bytes);
    if (status != FV_OK) return status;
    memset(step->memory, 0, step->table_offset); /* tables may be gigabytes, of which a step fills what it is to read */
    lay_out_arrays(session);
    step->logit_parts = calloc((size_t)step->max_tokens, sizeof(*step->logit_parts));
    step->parts = calloc((size_t)max_num_seqs, sizeof(*step->parts));
    step->next_tokens = calloc((size_t)fv_runner_logit_rows(session), sizeof(*step->next_tokens));
    session->sampler_bytes = (size_t)fv_round_up(
        (int64_t)fv_sampler_scratch_bytes(session->engine->model->config.vocabulary_size), FV_CACHE_LINE);
    session->sampler_scratch = malloc((size_t)fv_context_num_workers(session->engine->context) *
                                      session->sampler_bytes);
    if (step->logit_parts && step->next_tokens && step->parts && session->sampler_scratch) return FV_OK;
    return fv_fail(FV_ERR_NO_MEMORY, "no memory for steps of %d tokens of %d requests", step->max_tokens, max_num_seqs);
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
        .max_sequence_tokens = session->max_sequence_tokens,
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
    stats->attention_dtype = options->attention_dtype;
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
    fv_status status = fv_scheduler_init(&session->scheduler, &limits);
    if (status != FV_OK) return status;
    begin_stats(session, options);
    status = create_plans(session, options);
    if (status == FV_OK) status = create_caches(session, options);
    if (status == FV_OK) status = create_arrays(session, options);
    return status == FV_OK ? session->runner->create(session, options) : status;
}

fv_status fv_session_create(fv_session **session, fv_engine *engine, const fv_session_options *options)
{
    if (!session || !engine) return fv_fail(FV_ERR_INVALID, "session or engine is NULL");
    *session = NULL;
    fv_session_options complete;
    const fv_runner *runner = engine->device->host_is_device ? &fv_cpu_runner : &fv_device_runner;
    fv_status status = apply_defaults(&complete, options, engine);
    if (status == FV_OK) status = choose_dtypes(&complete, runner, engine);
    if (status != FV_OK) return status;
    fv_session *made = calloc(1, sizeof(*made));
    if (!made) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a session");
    made->engine = engine;
    made->device = engine->device;
    made->runner = runner;
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
    for (int32_t i = 0; i < session->num_groups; i++) fv_plan_destroy(session->groups[i].plan);
    session->runner->destroy(session); /* the stream, which plans wait for when they end */
    free(session->step.logit_parts);
    free(session->step.next_tokens);
    free(session->step.parts);
    free(session->sampler_scratch);
    free(session->cache_views);
    fv_device_free_host(session->device, session->step.memory);
    for (int32_t i = 0; i < session->num_groups; i++) fv_device_free(session->device, session->groups[i].cache);
    fv_device_free(session->device, session->workspace);
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
    fv_session_group *of = &session->groups[group];
    return fv_plan_describe(of->last_plan ? of->last_plan : of->plan);
}
