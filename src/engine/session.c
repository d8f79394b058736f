/* A session: the paged cache, the attention plan, and the requests that a step works on.
 *
 *   scheduler: parts  ->  batch arrays  ->  fv_plan_update  ->  forward  ->  logits  ->  sampler  ->  caller */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "engine/clock.h"
#include "engine/engine.h"
#include "engine/llama.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"

enum {
    default_block_size = 16,
    default_batched_tokens = 512,
    default_num_seqs = 16,
    min_logit_rows = 32, /* room to score several positions of a prompt in one GEMM */
    max_block_size = 1 << 16,
};

/* A request and its sequence; the sequence comes first, so that one leads to the other. */
typedef struct request {
    fv_sequence sequence;
    int32_t id;
    int32_t *tokens; /* prompt, then what was written */
    int32_t num_prompt;
    int32_t num_written;
    int32_t max_written;
    int32_t *forced;
    int32_t num_forced;
    bool ignore_eos;
    fv_sampler sampler;
    fv_text_stream text;
    fv_token_fn on_token;
    fv_logits_fn on_logits;
    void *user;
    struct request *next; /* of those that are not done, in order of arrival */
} request;

/* The arrays of a step, [max_batched_tokens] or [max_num_seqs]. */
typedef struct step_arrays {
    int32_t *tokens;
    int32_t *positions;
    int64_t *slots;
    int32_t *query_start; /* [max_num_seqs + 1] */
    int32_t *seq_lens;
    int32_t *block_table; /* [max_num_seqs, table_width] */
    int32_t *logit_rows;  /* rows of the step whose logits are wanted */
    int32_t *logit_parts; /* the part of each */
    fv_step_part *parts;
    int32_t num_parts;
    int32_t num_tokens;
    int32_t table_width;
} step_arrays;

struct fv_session {
    fv_engine *engine;
    fv_device *device;
    fv_scheduler scheduler;
    int32_t max_sequence_tokens; /* the context, or the cache if that is smaller */
    bool batch_invariant;
    fv_plan *plan;
    void *workspace;
    void *cache;
    fv_kv_view *cache_views; /* [num_layers] */
    fv_llama llama;
    void *sampler_scratch;
    step_arrays step;
    request *requests;
    int32_t num_unfinished;
    int32_t next_id;
    fv_status failure; /* of a step: the cache is in an unknown state */
    fv_session_stats stats;
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
    /* Half of what a decode reads in fp32. On SmolLM2 logits move by 2e-3 on average (fp32 cache: 1e-5),
     * bf16 with its 3 bits less by 8 times that. */
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
    step_arrays *step = &session->step;
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

static void destroy_request(request *finished)
{
    fv_text_stream_deinit(&finished->text);
    free(finished->tokens);
    free(finished->forced);
    free(finished);
}

void fv_session_destroy(fv_session *session)
{
    if (!session) return;
    while (session->requests) {
        request *next = session->requests->next;
        fv_scheduler_finish(&session->scheduler, &session->requests->sequence);
        destroy_request(session->requests);
        session->requests = next;
    }
    step_arrays *step = &session->step;
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

/* --- requests ------------------------------------------------------------------------------------ */

static fv_status check_tokens(const fv_session *session, const char *name, const int32_t *tokens, int32_t num_tokens)
{
    const int32_t vocabulary_size = session->engine->model->config.vocabulary_size;
    for (int32_t i = 0; i < num_tokens; i++) {
        if (tokens[i] >= 0 && tokens[i] < vocabulary_size) continue;
        return fv_fail(FV_ERR_INVALID, "%s[%d] is %d; accepted: 0 to %d", name, i, tokens[i], vocabulary_size - 1);
    }
    return FV_OK;
}

static fv_status check_request(const fv_session *session, const fv_request *asked)
{
    const int32_t context_length = session->engine->model->config.context_length;
    if (!asked || asked->struct_size != sizeof(*asked)) {
        return fv_fail(FV_ERR_INVALID, "fv_request is NULL or its struct_size is not %zu", sizeof(*asked));
    }
    if (asked->num_prompt_tokens < 1 || asked->max_tokens < 0 || asked->num_forced < 0) {
        return fv_fail(FV_ERR_INVALID,
                       "num_prompt_tokens is %d, max_tokens %d, num_forced %d; accepted: at least 1, 0 and 0",
                       asked->num_prompt_tokens, asked->max_tokens, asked->num_forced);
    }
    if (asked->num_prompt_tokens > context_length) {
        return fv_fail(FV_ERR_INVALID, "the prompt has %d tokens, more than the model's context length of %d",
                       asked->num_prompt_tokens, context_length);
    }
    const fv_status status = check_tokens(session, "prompt", asked->prompt, asked->num_prompt_tokens);
    return status == FV_OK ? check_tokens(session, "forced", asked->forced, asked->num_forced) : status;
}

/* How many tokens it may write. The last one is not computed, so it takes no room in the cache. */
static int32_t limit_written(const fv_session *session, const fv_request *asked)
{
    const int32_t context_length = session->engine->model->config.context_length;
    if (asked->max_tokens > 0) return fv_min_i32(asked->max_tokens, context_length - asked->num_prompt_tokens + 1);
    return fv_max_i32(session->max_sequence_tokens - asked->num_prompt_tokens + 1, 1);
}

static int32_t *copy_tokens(const int32_t *tokens, int32_t num_tokens, int32_t capacity)
{
    int32_t *copy = malloc((size_t)capacity * sizeof(*copy));
    if (copy && num_tokens > 0) memcpy(copy, tokens, (size_t)num_tokens * sizeof(*copy));
    return copy;
}

static fv_status create_request(request **out, const fv_session *session, const fv_request *asked)
{
    request *made = calloc(1, sizeof(*made));
    if (!made) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a request");
    made->num_prompt = asked->num_prompt_tokens;
    made->max_written = limit_written(session, asked);
    made->num_forced = asked->num_forced;
    made->ignore_eos = asked->ignore_eos != 0;
    made->on_token = asked->on_token;
    made->on_logits = asked->on_logits;
    made->user = asked->user;
    made->tokens = copy_tokens(asked->prompt, asked->num_prompt_tokens, made->num_prompt + made->max_written);
    made->forced = copy_tokens(asked->forced, asked->num_forced, asked->num_forced + 1);
    fv_status status = FV_OK;
    if (!made->tokens || !made->forced) status = fv_fail(FV_ERR_NO_MEMORY, "no memory for the tokens of a request");
    if (status == FV_OK) {
        status = fv_sampler_init(&made->sampler, asked->temperature, asked->top_k, asked->top_p, asked->seed);
    }
    if (status == FV_OK) status = fv_text_stream_init(&made->text, session->engine->tokenizer, false);
    if (status != FV_OK) {
        destroy_request(made);
        return status;
    }
    *out = made;
    return FV_OK;
}

fv_status fv_session_add(int32_t *id, fv_session *session, const fv_request *asked)
{
    fv_status status = check_request(session, asked);
    if (status != FV_OK) return status;
    request *made = NULL;
    status = create_request(&made, session, asked);
    if (status != FV_OK) return status;
    status = fv_scheduler_add(&session->scheduler, &made->sequence, made->num_prompt,
                              made->num_prompt + made->max_written - 1);
    if (status != FV_OK) {
        destroy_request(made);
        return status;
    }
    made->id = session->next_id++;
    request **last = &session->requests;
    while (*last) last = &(*last)->next;
    *last = made;
    session->num_unfinished++;
    session->stats.prompt_tokens_total += made->num_prompt;
    if (id) *id = made->id;
    return FV_OK;
}

static void finish_request(fv_session *session, request *finished)
{
    request **at = &session->requests;
    while (*at != finished) at = &(*at)->next;
    *at = finished->next;
    fv_scheduler_finish(&session->scheduler, &finished->sequence);
    destroy_request(finished);
    session->num_unfinished--;
}

/* --- a step -------------------------------------------------------------------------------------- */

/* The part's tokens at the end of the step's arrays. */
static void append_part(fv_session *session, int32_t index)
{
    step_arrays *step = &session->step;
    const fv_step_part *part = &step->parts[index];
    const request *from = (const request *)part->sequence;
    const int32_t block_size = session->scheduler.limits.block_size;
    const int32_t seq_len = part->first_token + part->num_tokens;
    for (int32_t position = part->first_token; position < seq_len; position++) {
        const int32_t row = step->num_tokens++;
        step->tokens[row] = from->tokens[position];
        step->positions[row] = position;
        step->slots[row] = (int64_t)part->sequence->blocks[position / block_size] * block_size + position % block_size;
    }
    step->seq_lens[index] = seq_len;
    step->query_start[index + 1] = step->num_tokens;
    memcpy(step->block_table + (size_t)index * (size_t)step->table_width, part->sequence->blocks,
           (size_t)fv_ceil_div(seq_len, block_size) * sizeof(int32_t));
}

/* Returns whether the step has a part of a prompt. */
static bool fill_step(fv_session *session)
{
    step_arrays *step = &session->step;
    bool has_prefill = false;
    step->num_tokens = 0;
    step->query_start[0] = 0;
    for (int32_t i = 0; i < step->num_parts; i++) {
        append_part(session, i);
        const request *from = (const request *)step->parts[i].sequence;
        const int32_t prompt_tokens = fv_min_i32(step->parts[i].num_tokens,
                                                 from->num_prompt - step->parts[i].first_token);
        if (prompt_tokens <= 0) continue;
        has_prefill = true;
        session->stats.prompt_tokens_done += prompt_tokens;
    }
    return has_prefill;
}

static fv_status run_forward(fv_session *session)
{
    const step_arrays *step = &session->step;
    const fv_batch batch = {
        .struct_size = sizeof(batch),
        .num_seqs = step->num_parts,
        .num_tokens = step->num_tokens,
        .query_start = step->query_start,
        .seq_lens = step->seq_lens,
        .block_table = step->block_table,
        .block_table_stride = step->table_width,
        .block_table_width = step->table_width,
        .slot_mapping = step->slots,
    };
    const fv_status status = fv_plan_update(session->plan, &batch, NULL);
    if (status == FV_NEEDS_PLAN)
        return fv_fail(FV_ERR_INTERNAL, "a step of %d tokens outside its plan", step->num_tokens);
    if (status != FV_OK) return status;
    const fv_llama_step forward = {
        .tokens = step->tokens,
        .positions = step->positions,
        .num_tokens = step->num_tokens,
        .plan = session->plan,
        .workspace = session->workspace,
        .caches = session->cache_views,
        .batch_invariant = session->batch_invariant,
    };
    return fv_llama_forward(&session->llama, &forward);
}

/* Lists the rows whose logits are wanted: the last of a part that ends at the last known token, all
 * where the request asks for them. Returns how many. */
static int32_t list_logit_rows(fv_session *session)
{
    step_arrays *step = &session->step;
    int32_t count = 0;
    for (int32_t i = 0; i < step->num_parts; i++) {
        const request *from = (const request *)step->parts[i].sequence;
        const int32_t end = step->query_start[i + 1];
        const int32_t last = step->parts[i].is_last ? end - 1 : end;
        for (int32_t row = from->on_logits ? step->query_start[i] : last; row < end; row++) {
            step->logit_rows[count] = row;
            step->logit_parts[count++] = i;
        }
    }
    return count;
}

static void tell_token(request *of, int32_t token, bool is_end, fv_finish finish)
{
    fv_text text = {NULL, 0};
    if (!is_end) text = fv_text_stream_push(&of->text, token);
    if (finish != FV_FINISH_NONE) { /* the text may end inside a character: those bytes follow in the stream */
        const fv_text rest = fv_text_stream_flush(&of->text);
        assert(is_end || rest.data == text.data + text.length);
        text = (fv_text){is_end ? rest.data : text.data, text.length + rest.length};
    }
    const fv_token_event event = {
        .request = of->id,
        .token = token,
        .text = text.data,
        .text_bytes = text.length,
        .finish = finish,
    };
    if (of->on_token) of->on_token(of->user, &event);
}

/* Samples the token after the last one, tells it, and ends the request or lets it go on. */
static fv_status write_token(fv_session *session, request *to, const float *logits)
{
    const fv_engine *engine = session->engine;
    int32_t token;
    const fv_status status = fv_sampler_next(&token, &to->sampler, logits, engine->model->config.vocabulary_size,
                                             session->sampler_scratch);
    if (status != FV_OK) return status;
    if (to->num_written < to->num_forced) token = to->forced[to->num_written];
    to->tokens[to->num_prompt + to->num_written++] = token;

    const bool is_end = fv_tokenizer_is_end(engine->tokenizer, token);
    fv_finish finish = FV_FINISH_NONE;
    if (to->num_written == to->max_written) finish = FV_FINISH_LENGTH;
    if (is_end && !to->ignore_eos) finish = FV_FINISH_STOP;
    tell_token(to, token, is_end, finish);
    if (finish == FV_FINISH_NONE) {
        fv_scheduler_append(&to->sequence);
    } else {
        finish_request(session, to);
    }
    return FV_OK;
}

/* Logits of the wanted rows, as many at a time as there is room for. */
static fv_status write_tokens(fv_session *session)
{
    const step_arrays *step = &session->step;
    const int32_t vocabulary_size = session->engine->model->config.vocabulary_size;
    const int32_t num_rows = list_logit_rows(session);
    for (int32_t first = 0; first < num_rows; first += session->llama.max_logit_rows) {
        const int32_t count = fv_min_i32(session->llama.max_logit_rows, num_rows - first);
        fv_status status = fv_llama_compute_logits(&session->llama, step->logit_rows + first, count,
                                                   session->batch_invariant);
        for (int32_t i = 0; i < count && status == FV_OK; i++) {
            const int32_t row = step->logit_rows[first + i], index = step->logit_parts[first + i];
            const float *logits = session->llama.logits + (int64_t)i * vocabulary_size;
            request *to = (request *)step->parts[index].sequence;
            if (to->on_logits) to->on_logits(to->user, to->id, step->positions[row], logits, vocabulary_size);
            const bool is_last = step->parts[index].is_last && row == step->query_start[index + 1] - 1;
            if (is_last) status = write_token(session, to, logits);
        }
        if (status != FV_OK) return status;
    }
    return FV_OK;
}

static void count_step(fv_session *session, bool has_prefill, double seconds, const fv_llama_profile *before)
{
    fv_session_stats *stats = &session->stats;
    const double gemm = session->llama.profile.gemm - before->gemm;
    const double attention = session->llama.profile.attention - before->attention;
    stats->num_steps++;
    if (has_prefill) {
        stats->prefill_tokens += session->step.num_tokens;
        stats->prefill_seconds += seconds;
        stats->prefill_gemm_seconds += gemm;
        stats->prefill_attention_seconds += attention;
    } else {
        stats->decode_tokens += session->step.num_tokens;
        stats->decode_seconds += seconds;
        stats->decode_gemm_seconds += gemm;
        stats->decode_attention_seconds += attention;
    }
}

fv_status fv_session_step(int32_t *num_unfinished, fv_session *session)
{
    if (session->failure != FV_OK) return fv_fail(session->failure, "an earlier step of this session has failed");
    const double start = fv_clock_seconds();
    const fv_llama_profile before = session->llama.profile;
    session->step.num_parts = fv_scheduler_next(session->step.parts, &session->scheduler);
    session->stats.max_running = fv_max_i32(session->stats.max_running, session->scheduler.num_running);
    if (session->step.num_parts > 0) {
        const bool has_prefill = fill_step(session);
        fv_status status = run_forward(session);
        if (status == FV_OK) {
            fv_scheduler_commit(session->step.parts, session->step.num_parts);
            status = write_tokens(session);
        }
        session->failure = status;
        if (status != FV_OK) return status;
        count_step(session, has_prefill, fv_clock_seconds() - start, &before);
    }
    if (num_unfinished) *num_unfinished = session->num_unfinished;
    return FV_OK;
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
