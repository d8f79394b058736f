/* Top to bottom in the order of the pass. */
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "engine/clock.h"
#include "engine/forward_private.h"
#include "engine/rows.h"

enum { rows_of_task = 8, alignment = 64 };

static int32_t q_size(const fv_model_config *config) { return config->num_heads * config->head_size; }
static int32_t kv_size(const fv_model_config *config) { return config->num_kv_heads * config->head_size; }
static int32_t qkv_size(const fv_model_config *config) { return q_size(config) + 2 * kv_size(config); }

/* Columns of fv_forward.qkv. */
static int32_t qkv_columns(const fv_model_config *config)
{
    if (config->attention == FV_ATTENTION_MHA) return qkv_size(config);
    const int32_t queries = config->q_lora_rank > 0 ? config->q_lora_rank : q_size(config);
    return queries + fv_model_config_cache_head_size(config);
}

/* Columns of fv_forward.narrow_qkv. */
static int32_t narrow_columns(const fv_model_config *config)
{
    if (config->attention == FV_ATTENTION_MHA) return qkv_size(config);
    return q_size(config) + fv_model_config_cache_head_size(config);
}

static int32_t attended_size(const fv_model_config *config)
{
    return config->num_heads * fv_model_config_v_head_size(config);
}

static int32_t largest_ffn_size(const fv_model_config *config)
{
    const int32_t shared = config->experts.num_shared * config->experts.ffn_size;
    return fv_max_i32(fv_max_i32(config->ffn_size, shared), config->experts.ffn_size);
}

static fv_status create_frequencies(fv_forward *forward)
{
    const fv_model_config *config = &forward->model->config;
    const int32_t num_pairs = config->rope_size / 2;
    forward->frequencies = calloc((size_t)(config->num_groups * num_pairs), sizeof(*forward->frequencies));
    if (!forward->frequencies) return fv_fail(FV_ERR_NO_MEMORY, "no memory for the frequencies of RoPE");
    for (int32_t i = 0; i < config->num_groups; i++) {
        fv_rope_frequencies(forward->frequencies + i * num_pairs, config->rope_size, &config->groups[i].rope);
    }
    return FV_OK;
}

static fv_status create_activations(fv_forward *forward, size_t tokens, size_t logit_rows)
{
    const fv_model_config *config = &forward->model->config;
    const size_t angles = (size_t)config->num_groups * (size_t)config->rope_size / 2;
    const size_t num_experts = (size_t)config->experts.num_experts;
    const size_t routed_size = num_experts > 0 ? (size_t)config->hidden_size : 0;
    const size_t q_latent_size = (size_t)config->q_lora_rank;
    const size_t narrow_tokens = forward->attention_dtype == FV_DTYPE_F32 ? 0 : tokens;
    const bool is_mla = config->attention == FV_ATTENTION_MLA;
    const fv_mla_shape *mla = &config->mla;
    const int32_t max_k = fv_max_i32(mla->kv_lora_rank, fv_max_i32(mla->qk_nope_head_dim, mla->v_head_dim));
    const size_t num_workers = (size_t)fv_context_num_workers(forward->context);
    float *narrow_qkv, *narrow_attended;
    fv_forward_experts *experts = &forward->experts;
    const struct {
        float **buffer;
        size_t rows, columns;
    } buffers[] = {
        {&forward->hidden, tokens, (size_t)config->hidden_size},
        {&forward->normed, tokens, (size_t)config->hidden_size},
        {&forward->qkv, tokens, (size_t)qkv_columns(config)},
        {&forward->q_latent, tokens, q_latent_size},
        {&forward->q, tokens, q_latent_size > 0 ? (size_t)q_size(config) : 0},
        {&forward->attended, tokens, (size_t)attended_size(config)},
        {&narrow_qkv, narrow_tokens, ((size_t)narrow_columns(config) + 1) / 2},
        {&narrow_attended, narrow_tokens, ((size_t)attended_size(config) + 1) / 2},
        {&forward->matrices.scratch, is_mla && narrow_tokens > 0 ? num_workers : 0, fv_gemm_matrices_scratch(max_k)},
        {&forward->projected, tokens, (size_t)config->hidden_size},
        {&forward->gate_up, tokens, 2 * (size_t)largest_ffn_size(config)},
        {&forward->activated, tokens, (size_t)largest_ffn_size(config)},
        {&forward->cosines, tokens, angles},
        {&forward->sines, tokens, angles},
        {&forward->logit_hidden, logit_rows, (size_t)config->hidden_size},
        {&forward->logits, logit_rows, (size_t)config->vocabulary_size},
        {&experts->logits, tokens, num_experts},
        {&experts->scratch, tokens, num_experts},
        {&experts->gathered, tokens, routed_size},
        {&experts->out, tokens, routed_size},
    };
    size_t offsets[FV_ARRAY_LEN(buffers)];
    size_t bytes = 0;
    for (int32_t i = 0; i < FV_ARRAY_LEN(buffers); i++) {
        offsets[i] = bytes;
        bytes += (size_t)fv_round_up((int64_t)(buffers[i].rows * buffers[i].columns * sizeof(float)), alignment);
    }
    forward->memory = aligned_alloc(alignment, bytes);
    if (!forward->memory) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %zu bytes of activations", bytes);
    for (int32_t i = 0; i < FV_ARRAY_LEN(buffers); i++)
        *buffers[i].buffer = forward->memory + offsets[i] / sizeof(float);
    forward->memory_bytes = bytes;
    forward->matrices.context = forward->context;
    forward->matrices.max_k = max_k;
    if (narrow_tokens == 0) {
        forward->matrices.scratch = NULL;
        return FV_OK;
    }
    forward->narrow_qkv = (void *)narrow_qkv;
    forward->narrow_attended = (void *)narrow_attended;
    return FV_OK;
}

fv_status fv_forward_init(fv_forward *forward, const fv_model *model, fv_context *context, fv_gemm_library *gemm,
                          int32_t max_tokens, int32_t max_logit_rows, fv_dtype attention_dtype)
{
    *forward = (fv_forward){
        .model = model,
        .context = context,
        .gemm = gemm,
        .max_tokens = max_tokens,
        .max_logit_rows = max_logit_rows,
        .attention_dtype = attention_dtype,
    };
    fv_status status = create_frequencies(forward);
    if (status == FV_OK) status = create_activations(forward, (size_t)max_tokens, (size_t)max_logit_rows);
    if (status == FV_OK) status = fv_gemm_reserve(gemm, fv_max_i32(max_tokens, max_logit_rows));
    if (status == FV_OK && model->config.experts.num_experts > 0) {
        status = fv_forward_experts_init(&forward->experts, &model->config, max_tokens);
    }
    if (status != FV_OK) fv_forward_deinit(forward);
    return status;
}

void fv_forward_deinit(fv_forward *forward)
{
    fv_forward_experts_deinit(&forward->experts);
    free(forward->frequencies);
    free(forward->memory);
    memset(forward, 0, sizeof(*forward));
}

typedef struct row_loop {
    const fv_pass *pass;
    int64_t num_rows;
} row_loop;

static void run_rows(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const row_loop *loop = user;
    const int64_t end = fv_min_i64(loop->num_rows, (index + 1) * rows_of_task);
    for (int64_t row = index * rows_of_task; row < end; row++) loop->pass->row(loop->pass, row);
}

void fv_pass_for_rows(fv_pass *on, int64_t num_rows, void (*row)(const fv_pass *pass, int64_t row))
{
    on->row = row;
    row_loop loop = {on, num_rows};
    fv_context_parallel_for(on->forward->context, fv_ceil_div(num_rows, rows_of_task), run_rows, &loop);
}

/* For the rows of the step. */
static void for_rows(fv_pass *on, void (*row)(const fv_pass *, int64_t)) { fv_pass_for_rows(on, on->num_rows, row); }

int64_t fv_pass_angles_at(const fv_pass *on, int32_t group, int64_t row)
{
    return (group * (int64_t)on->forward->max_tokens + row) * (on->forward->model->config.rope_size / 2);
}

static void angles_row(const fv_pass *on, int64_t row)
{
    const fv_forward *forward = on->forward;
    const fv_model_config *config = &forward->model->config;
    const int32_t num_pairs = config->rope_size / 2;
    for (int32_t i = 0; i < config->num_groups; i++) {
        const int64_t at = fv_pass_angles_at(on, i, row);
        fv_rope_angles(forward->cosines + at, forward->sines + at, on->step->positions[row],
                       forward->frequencies + i * num_pairs, num_pairs, config->groups[i].rope.magnitude);
    }
}

static void norm_row(const fv_pass *on, int64_t row)
{
    const fv_forward *forward = on->forward;
    const fv_model_config *config = &forward->model->config;
    const int64_t at = row * config->hidden_size;
    fv_rms_norm_row(forward->normed + at, forward->hidden + at, on->norm, config->hidden_size, config->rms_epsilon);
}

static void add_row(const fv_pass *on, int64_t row)
{
    const fv_forward *forward = on->forward;
    const fv_model_config *config = &forward->model->config;
    const int32_t size = config->hidden_size;
    float *projected = forward->projected + row * size;
    if (on->post_norm) fv_rms_norm_row(projected, projected, on->post_norm, size, config->rms_epsilon);
    fv_add_row(forward->hidden + row * size, projected, size);
}

static void add_and_norm_row(const fv_pass *on, int64_t row)
{
    add_row(on, row);
    norm_row(on, row);
}

static void norm_heads(float *heads, const float *weight, int32_t num_heads, const fv_model_config *config)
{
    for (int32_t i = 0; i < num_heads; i++, heads += config->head_size) {
        fv_rms_norm_row(heads, heads, weight, config->head_size, config->rms_epsilon);
    }
}

static void rope_row(const fv_pass *on, int64_t row)
{
    const fv_forward *forward = on->forward;
    const fv_model_config *config = &forward->model->config;
    float *heads = forward->qkv + row * qkv_size(config);
    if (config->has_qk_norms) {
        norm_heads(heads, on->layer->q_norm, config->num_heads, config);
        norm_heads(heads + q_size(config), on->layer->k_norm, config->num_kv_heads, config);
    }
    /* q and k lie side by side and turn alike. */
    const int64_t angles = fv_pass_angles_at(on, on->group, row);
    const int32_t num_heads = config->num_heads + config->num_kv_heads;
    if (config->rope_pairs == FV_ROPE_HALVES) {
        fv_rope_row_halves(heads, forward->cosines + angles, forward->sines + angles, num_heads, config->head_size,
                           config->rope_size);
    } else {
        fv_rope_row_neighbours(heads, forward->cosines + angles, forward->sines + angles, num_heads, config->head_size,
                               config->rope_size);
    }
    if (forward->narrow_qkv)
        fv_narrow_row(forward->narrow_qkv + row * qkv_size(config), forward->qkv + row * qkv_size(config),
                      qkv_size(config), forward->attention_dtype);
}

static void widen_row(const fv_pass *on, int64_t row)
{
    const fv_forward *forward = on->forward;
    const int32_t size = attended_size(&forward->model->config);
    fv_widen_row(forward->attended + row * size, forward->narrow_attended + row * size, size, forward->attention_dtype);
}

static void activation_row(const fv_pass *on, int64_t row)
{
    const fv_forward *forward = on->forward;
    const int32_t size = on->ffn_size;
    float *out = forward->activated + row * size;
    const float *gate_up = forward->gate_up + row * 2 * size;
    if (forward->model->config.activation == FV_ACTIVATION_GELU) {
        fv_geglu_row(out, gate_up, size);
    } else {
        fv_swiglu_row(out, gate_up, size);
    }
}

static fv_status multiply(fv_forward *forward, float *y, const float *x, const fv_gemm_weight *weight, int64_t num_rows,
                          bool batch_invariant)
{
    const double start = fv_clock_seconds();
    const fv_status status = fv_gemm_run(forward->gemm, y, x, weight, num_rows, batch_invariant);
    forward->profile.gemm += fv_clock_seconds() - start;
    return status;
}

fv_status fv_pass_multiply(const fv_pass *on, float *y, const float *x, const fv_gemm_weight *weight, int64_t num_rows)
{
    return multiply(on->forward, y, x, weight, num_rows, on->step->batch_invariant);
}

fv_status fv_pass_feed_forward(fv_pass *on, float *out, const float *x, const fv_gemm_weight *gate_up,
                               const fv_gemm_weight *down, int64_t num_rows)
{
    fv_forward *forward = on->forward;
    const fv_status status = fv_pass_multiply(on, forward->gate_up, x, gate_up, num_rows);
    if (status != FV_OK) return status;
    fv_pass_for_rows(on, num_rows, activation_row);
    return fv_pass_multiply(on, out, forward->activated, down, num_rows);
}

fv_tensor fv_pass_attended(const fv_pass *on, int64_t num_rows)
{
    const fv_forward *forward = on->forward;
    const fv_model_config *config = &forward->model->config;
    void *rows = forward->narrow_attended ? (void *)forward->narrow_attended : (void *)forward->attended;
    return fv_tensor_3d(rows, forward->attention_dtype, num_rows, config->num_heads,
                        fv_model_config_v_head_size(config));
}

fv_status fv_pass_attend(fv_pass *on, const fv_layer *tensors)
{
    const double start = fv_clock_seconds();
    const fv_status status = fv_plan_run(on->step->plans[on->group], tensors, on->step->workspace, NULL);
    on->forward->profile.attention += fv_clock_seconds() - start;
    if (status == FV_OK && on->forward->narrow_attended) for_rows(on, widen_row);
    return status;
}

/* [T, num_heads, D] inside rows of qkv. */
static fv_tensor heads_of_qkv(const fv_forward *forward, int32_t num_tokens, int32_t first_head, int32_t num_heads)
{
    const fv_model_config *config = &forward->model->config;
    const fv_dtype dtype = forward->attention_dtype;
    char *qkv = forward->narrow_qkv ? (char *)forward->narrow_qkv : (char *)forward->qkv;
    const int64_t bytes = (int64_t)fv_dtype_bytes(dtype);
    fv_tensor heads = fv_tensor_3d(qkv + first_head * config->head_size * bytes, dtype, num_tokens, num_heads,
                                   config->head_size);
    heads.stride_bytes[0] = qkv_size(config) * bytes;
    return heads;
}

static fv_status attend_heads(fv_pass *on)
{
    const fv_forward *forward = on->forward;
    const fv_model_config *config = &forward->model->config;
    const int32_t q_heads = config->num_heads, kv_heads = config->num_kv_heads, rows = on->step->num_tokens;
    for_rows(on, rope_row);
    const fv_layer tensors = {
        .struct_size = sizeof(tensors),
        .q = heads_of_qkv(forward, rows, 0, q_heads),
        .k = heads_of_qkv(forward, rows, q_heads, kv_heads),
        .v = heads_of_qkv(forward, rows, q_heads + kv_heads, kv_heads),
        .kv_cache = on->step->caches[on->index],
        .out = fv_pass_attended(on, rows),
    };
    return fv_pass_attend(on, &tensors);
}

/* `normed` to `projected`. */
static fv_status run_feed_forward(fv_pass *on)
{
    fv_forward *forward = on->forward;
    const fv_model_config *config = &forward->model->config;
    const int64_t rows = on->num_rows;
    fv_status status = FV_OK;
    on->ffn_size = fv_model_config_ffn_size(config, on->index);
    if (on->ffn_size > 0) {
        status = fv_pass_feed_forward(on, forward->projected, forward->normed, on->layer->gate_up, on->layer->down,
                                      rows);
    } else {
        memset(forward->projected, 0, (size_t)rows * (size_t)config->hidden_size * sizeof(float));
    }
    if (status != FV_OK || !fv_model_config_has_experts(config, on->index)) return status;
    return fv_pass_add_experts(on);
}

static fv_status run_layer(fv_pass *on, int32_t index)
{
    fv_forward *forward = on->forward;
    const fv_model_config *config = &forward->model->config;
    const fv_model_layer *layer = &forward->model->layers[index];
    const int64_t rows = on->num_rows;
    on->layer = layer;
    on->index = index;
    on->group = fv_model_config_group_of(config, index);

    on->norm = layer->attention_norm;
    for_rows(on, index == 0 ? norm_row : add_and_norm_row); /* adds what the layer before left */
    fv_status status = fv_pass_multiply(on, forward->qkv, forward->normed, layer->qkv, rows);
    if (status != FV_OK) return status;
    status = config->attention == FV_ATTENTION_MLA ? fv_pass_attend_latents(on) : attend_heads(on);
    if (status != FV_OK) return status;
    status = fv_pass_multiply(on, forward->projected, forward->attended, layer->output, rows);
    if (status != FV_OK) return status;

    on->norm = layer->ffn_norm;
    on->post_norm = layer->post_attention_norm;
    for_rows(on, add_and_norm_row);
    on->post_norm = layer->post_ffn_norm;
    return run_feed_forward(on);
}

fv_status fv_forward_run(fv_forward *forward, const fv_forward_step *step)
{
    const fv_model_config *config = &forward->model->config;
    if (step->num_tokens < 1 || step->num_tokens > forward->max_tokens) {
        return fv_fail(FV_ERR_INVALID, "a step of %d tokens; accepted: 1 to %d", step->num_tokens, forward->max_tokens);
    }
    for (int32_t i = 0; i < step->num_tokens; i++) {
        const fv_status status = fv_model_embed(forward->hidden + (int64_t)i * config->hidden_size, forward->model,
                                                step->tokens[i]);
        if (status != FV_OK) return status;
    }
    fv_pass on = {.forward = forward, .step = step, .num_rows = step->num_tokens};
    for_rows(&on, angles_row);
    for (int32_t layer = 0; layer < config->num_layers; layer++) {
        const fv_status status = run_layer(&on, layer);
        if (status != FV_OK) return status;
    }
    for_rows(&on, add_row);
    return FV_OK;
}

fv_status fv_forward_compute_logits(fv_forward *forward, const int32_t *rows, int32_t num_rows, bool batch_invariant)
{
    const fv_model *model = forward->model;
    const int32_t size = model->config.hidden_size;
    if (num_rows > forward->max_logit_rows) {
        return fv_fail(FV_ERR_INVALID, "logits of %d rows; accepted: up to %d", num_rows, forward->max_logit_rows);
    }
    for (int32_t i = 0; i < num_rows; i++) {
        fv_rms_norm_row(forward->logit_hidden + (int64_t)i * size, forward->hidden + (int64_t)rows[i] * size,
                        model->output_norm, size, model->config.rms_epsilon);
    }
    return multiply(forward, forward->logits, forward->logit_hidden, model->head, num_rows, batch_invariant);
}
