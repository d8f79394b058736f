/* Top to bottom in the order of the pass. */
#include "engine/llama.h"

#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "engine/clock.h"
#include "engine/rows.h"

enum { rows_of_task = 8, alignment = 64 };

/* What the row functions of a step see. */
typedef struct pass {
    fv_llama *llama;
    const fv_llama_step *step;
    const fv_model_layer *layer;
    const float *norm;
    int64_t num_rows;
    void (*row)(const struct pass *pass, int64_t row);
} pass;

static int32_t q_size(const fv_model_config *config) { return config->num_heads * config->head_size; }
static int32_t kv_size(const fv_model_config *config) { return config->num_kv_heads * config->head_size; }
static int32_t qkv_size(const fv_model_config *config) { return q_size(config) + 2 * kv_size(config); }

fv_status fv_llama_init(fv_llama *llama, const fv_model *model, fv_context *context, fv_gemm *gemm, int32_t max_tokens,
                        int32_t max_logit_rows)
{
    memset(llama, 0, sizeof(*llama));
    const fv_model_config *config = &model->config;
    const size_t tokens = (size_t)max_tokens, logit_rows = (size_t)max_logit_rows;
    const size_t half_rope = (size_t)config->rope_size / 2;
    const struct {
        float **buffer;
        size_t rows, columns;
    } buffers[] = {
        {&llama->hidden, tokens, (size_t)config->hidden_size},
        {&llama->normed, tokens, (size_t)config->hidden_size},
        {&llama->qkv, tokens, (size_t)qkv_size(config)},
        {&llama->attended, tokens, (size_t)q_size(config)},
        {&llama->projected, tokens, (size_t)config->hidden_size},
        {&llama->gate_up, tokens, 2 * (size_t)config->ffn_size},
        {&llama->activated, tokens, (size_t)config->ffn_size},
        {&llama->cosines, tokens, half_rope},
        {&llama->sines, tokens, half_rope},
        {&llama->logit_hidden, logit_rows, (size_t)config->hidden_size},
        {&llama->logits, logit_rows, (size_t)config->vocabulary_size},
    };
    size_t offsets[FV_ARRAY_LEN(buffers)];
    size_t bytes = 0;
    for (int32_t i = 0; i < FV_ARRAY_LEN(buffers); i++) {
        offsets[i] = bytes;
        bytes += (size_t)fv_round_up((int64_t)(buffers[i].rows * buffers[i].columns * sizeof(float)), alignment);
    }
    llama->memory = aligned_alloc(alignment, bytes);
    if (!llama->memory) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %zu bytes of activations", bytes);
    for (int32_t i = 0; i < FV_ARRAY_LEN(buffers); i++) *buffers[i].buffer = llama->memory + offsets[i] / sizeof(float);
    llama->model = model;
    llama->context = context;
    llama->gemm = gemm;
    llama->max_tokens = max_tokens;
    llama->max_logit_rows = max_logit_rows;
    llama->memory_bytes = bytes;
    const fv_status status = fv_gemm_reserve(gemm, fv_max_i32(max_tokens, max_logit_rows));
    if (status != FV_OK) fv_llama_deinit(llama);
    return status;
}

void fv_llama_deinit(fv_llama *llama)
{
    free(llama->memory);
    memset(llama, 0, sizeof(*llama));
}

static void run_rows(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const pass *on = user;
    const int64_t end = fv_min_i64(on->num_rows, (index + 1) * rows_of_task);
    for (int64_t row = index * rows_of_task; row < end; row++) on->row(on, row);
}

/* A few rows are done sooner than another thread is awake: a loop of one task stays in this one. */
static void for_rows(pass *on, void (*row)(const pass *, int64_t))
{
    on->row = row;
    fv_context_parallel_for(on->llama->context, fv_ceil_div(on->num_rows, rows_of_task), run_rows, on);
}

static void angles_row(const pass *on, int64_t row)
{
    fv_llama *llama = on->llama;
    const fv_model_config *config = &llama->model->config;
    const int64_t at = row * (config->rope_size / 2);
    fv_rope_angles(llama->cosines + at, llama->sines + at, on->step->positions[row], config->rope_size,
                   config->rope_base);
}

static void norm_row(const pass *on, int64_t row)
{
    const fv_llama *llama = on->llama;
    const fv_model_config *config = &llama->model->config;
    const int64_t at = row * config->hidden_size;
    fv_rms_norm_row(llama->normed + at, llama->hidden + at, on->norm, config->hidden_size, config->rms_epsilon);
}

static void add_row(const pass *on, int64_t row)
{
    const fv_llama *llama = on->llama;
    const int32_t size = llama->model->config.hidden_size;
    fv_add_row(llama->hidden + row * size, llama->projected + row * size, size);
}

static void add_and_norm_row(const pass *on, int64_t row)
{
    add_row(on, row);
    norm_row(on, row);
}

static void rope_row(const pass *on, int64_t row)
{
    const fv_llama *llama = on->llama;
    const fv_model_config *config = &llama->model->config;
    const int64_t angles = row * (config->rope_size / 2);
    /* q and k lie side by side and turn alike. */
    fv_rope_row(llama->qkv + row * qkv_size(config), llama->cosines + angles, llama->sines + angles,
                config->num_heads + config->num_kv_heads, config->head_size, config->rope_size);
}

static void swiglu_row(const pass *on, int64_t row)
{
    const fv_llama *llama = on->llama;
    const int32_t size = llama->model->config.ffn_size;
    fv_swiglu_row(llama->activated + row * size, llama->gate_up + row * 2 * size, size);
}

static fv_status multiply(fv_llama *llama, float *y, const float *x, const fv_gemm_weight *weight, int64_t num_rows,
                          bool batch_invariant)
{
    const double start = fv_clock_seconds();
    const fv_status status = fv_gemm_run(llama->gemm, y, x, weight, num_rows, batch_invariant);
    llama->profile.gemm += fv_clock_seconds() - start;
    return status;
}

/* [T, num_heads, D] inside rows of qkv. */
static fv_tensor heads_of_qkv(const fv_llama *llama, int32_t num_tokens, int32_t first_head, int32_t num_heads)
{
    const fv_model_config *config = &llama->model->config;
    fv_tensor heads = fv_tensor_3d(llama->qkv + first_head * config->head_size, FV_DTYPE_F32, num_tokens, num_heads,
                                   config->head_size);
    heads.stride_bytes[0] = (int64_t)qkv_size(config) * (int64_t)sizeof(float);
    return heads;
}

static fv_status attend(const pass *on, int32_t layer)
{
    fv_llama *llama = on->llama;
    const fv_llama_step *step = on->step;
    const fv_model_config *config = &llama->model->config;
    const int32_t q_heads = config->num_heads, kv_heads = config->num_kv_heads, rows = step->num_tokens;
    const fv_layer tensors = {
        .struct_size = sizeof(tensors),
        .q = heads_of_qkv(llama, rows, 0, q_heads),
        .k = heads_of_qkv(llama, rows, q_heads, kv_heads),
        .v = heads_of_qkv(llama, rows, q_heads + kv_heads, kv_heads),
        .kv_cache = step->caches[layer],
        .out = fv_tensor_3d(llama->attended, FV_DTYPE_F32, rows, q_heads, config->head_size),
    };
    const double start = fv_clock_seconds();
    const fv_status status = fv_plan_run(step->plan, &tensors, step->workspace, NULL);
    llama->profile.attention += fv_clock_seconds() - start;
    return status;
}

static fv_status run_layer(pass *on, int32_t index)
{
    fv_llama *llama = on->llama;
    const fv_model_layer *layer = &llama->model->layers[index];
    const int64_t rows = on->num_rows;
    const bool invariant = on->step->batch_invariant;

    on->norm = layer->attention_norm;
    for_rows(on, index == 0 ? norm_row : add_and_norm_row); /* adds what the layer before left */
    fv_status status = multiply(llama, llama->qkv, llama->normed, layer->qkv, rows, invariant);
    if (status != FV_OK) return status;
    for_rows(on, rope_row);
    status = attend(on, index);
    if (status != FV_OK) return status;
    status = multiply(llama, llama->projected, llama->attended, layer->output, rows, invariant);
    if (status != FV_OK) return status;

    on->norm = layer->ffn_norm;
    for_rows(on, add_and_norm_row);
    status = multiply(llama, llama->gate_up, llama->normed, layer->gate_up, rows, invariant);
    if (status != FV_OK) return status;
    for_rows(on, swiglu_row);
    return multiply(llama, llama->projected, llama->activated, layer->down, rows, invariant);
}

fv_status fv_llama_forward(fv_llama *llama, const fv_llama_step *step)
{
    const fv_model_config *config = &llama->model->config;
    if (step->num_tokens < 1 || step->num_tokens > llama->max_tokens) {
        return fv_fail(FV_ERR_INVALID, "a step of %d tokens; accepted: 1 to %d", step->num_tokens, llama->max_tokens);
    }
    for (int32_t i = 0; i < step->num_tokens; i++) {
        const fv_status status = fv_model_embed(llama->hidden + (int64_t)i * config->hidden_size, llama->model,
                                                step->tokens[i]);
        if (status != FV_OK) return status;
    }
    pass on = {.llama = llama, .step = step, .num_rows = step->num_tokens};
    for_rows(&on, angles_row);
    for (int32_t layer = 0; layer < config->num_layers; layer++) {
        const fv_status status = run_layer(&on, layer);
        if (status != FV_OK) return status;
    }
    for_rows(&on, add_row);
    return FV_OK;
}

fv_status fv_llama_compute_logits(fv_llama *llama, const int32_t *rows, int32_t num_rows, bool batch_invariant)
{
    const fv_model *model = llama->model;
    const int32_t size = model->config.hidden_size;
    if (num_rows > llama->max_logit_rows) {
        return fv_fail(FV_ERR_INVALID, "logits of %d rows; accepted: up to %d", num_rows, llama->max_logit_rows);
    }
    for (int32_t i = 0; i < num_rows; i++) {
        fv_rms_norm_row(llama->logit_hidden + (int64_t)i * size, llama->hidden + (int64_t)rows[i] * size,
                        model->output_norm, size, model->config.rms_epsilon);
    }
    return multiply(llama, llama->logits, llama->logit_hidden, model->head, num_rows, batch_invariant);
}
