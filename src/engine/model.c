/* Finding tensors by name, checking their shapes, handing their rows to the GEMM. */
#include "engine/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "engine/dequantize.h"
#include "engine/rows.h"

enum { max_parts = 3 };

/* A weight made of the rows of several tensors, one after the other. */
typedef struct stacked_rows {
    const fv_gguf_tensor *parts[max_parts];
    int32_t num_parts;
} stacked_rows;

typedef struct loader {
    const fv_gguf *gguf;
    fv_gemm *gemm;
    fv_model *model;
    fv_model_progress_fn progress;
    void *progress_user;
    int32_t num_done;
} loader;

/* A part of a weight: tensor "blk.<layer>.<suffix>" of `rows` rows. */
typedef struct part_name {
    const char *suffix;
    int64_t rows;
} part_name;

static const uint8_t *row_data(const fv_gguf_tensor *tensor, int64_t row)
{
    return (const uint8_t *)tensor->data + (size_t)row * fv_gguf_type_bytes(tensor->type, tensor->shape[0]);
}

static fv_status read_stacked_rows(float *rows, void *user, int64_t first_row, int64_t num_rows)
{
    const stacked_rows *stack = user;
    for (int32_t i = 0; i < stack->num_parts && num_rows > 0; i++) {
        const fv_gguf_tensor *part = stack->parts[i];
        const int64_t part_rows = part->shape[1];
        const int64_t count = fv_min_i64(num_rows, part_rows - first_row);
        if (count > 0) {
            /* Rows lie one after the other: many are read as one. */
            const fv_status status = fv_dequantize_row(rows, row_data(part, first_row), part->type,
                                                       count * part->shape[0]);
            if (status != FV_OK) return status;
            rows += count * part->shape[0];
            first_row += count;
            num_rows -= count;
        }
        first_row -= part_rows;
    }
    return FV_OK;
}

static fv_status find_tensor(const fv_gguf_tensor **tensor, const loader *from, const char *name, int64_t columns,
                             int64_t rows)
{
    const fv_status status = fv_gguf_find_tensor(tensor, from->gguf, name);
    if (status != FV_OK) return status;
    const int64_t *shape = (*tensor)->shape;
    if (shape[0] == columns && shape[1] == rows && shape[2] == 1 && shape[3] == 1) return FV_OK;
    return fv_fail(FV_ERR_IO, "%s: tensor %s is %lld x %lld x %lld x %lld, the metadata says %lld x %lld",
                   fv_gguf_path(from->gguf), name, (long long)shape[0], (long long)shape[1], (long long)shape[2],
                   (long long)shape[3], (long long)columns, (long long)rows);
}

static void tell_progress(loader *from)
{
    enum { weights_of_layer = 4, weights_beside = 1 };
    from->num_done++;
    if (!from->progress) return;
    from->progress(from->progress_user, from->num_done,
                   from->model->config.num_layers * weights_of_layer + weights_beside);
}

static fv_status load_vector(float **vector, loader *from, const char *name, int32_t length)
{
    const fv_gguf_tensor *tensor;
    fv_status status = find_tensor(&tensor, from, name, length, 1);
    if (status != FV_OK) return status;
    *vector = malloc((size_t)length * sizeof(float));
    if (!*vector) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %s", name);
    return fv_dequantize_row(*vector, tensor->data, tensor->type, length);
}

static fv_status load_stack(fv_gemm_weight **weight, loader *from, const stacked_rows *stack)
{
    int64_t num_rows = 0;
    for (int32_t i = 0; i < stack->num_parts; i++) num_rows += stack->parts[i]->shape[1];
    const fv_status status = fv_gemm_weight_create(weight, from->gemm, num_rows, stack->parts[0]->shape[0],
                                                   read_stacked_rows, (void *)(uintptr_t)stack);
    if (status != FV_OK) return status;
    from->model->weight_bytes += fv_gemm_weight_bytes(*weight);
    for (int32_t i = 0; i < stack->num_parts; i++) fv_gguf_release_tensor(from->gguf, stack->parts[i]);
    tell_progress(from);
    return FV_OK;
}

static fv_status load_weight(fv_gemm_weight **weight, loader *from, int32_t layer, int64_t columns,
                             const part_name *parts, int32_t num_parts)
{
    stacked_rows stack = {.num_parts = num_parts};
    for (int32_t i = 0; i < num_parts; i++) {
        char name[64];
        snprintf(name, sizeof(name), "blk.%d.%s", layer, parts[i].suffix);
        const fv_status status = find_tensor(&stack.parts[i], from, name, columns, parts[i].rows);
        if (status != FV_OK) return status;
    }
    return load_stack(weight, from, &stack);
}

static fv_status load_norms(fv_model_layer *layer, loader *from, int32_t index)
{
    const fv_model_config *config = &from->model->config;
    const struct {
        float **vector;
        const char *suffix;
        int32_t length;
        bool is_there;
    } norms[] = {
        {&layer->attention_norm, "attn_norm", config->hidden_size, true},
        {&layer->q_norm, "attn_q_norm", config->head_size, config->has_qk_norms},
        {&layer->k_norm, "attn_k_norm", config->head_size, config->has_qk_norms},
        {&layer->post_attention_norm, "post_attention_norm", config->hidden_size, config->has_post_norms},
        {&layer->ffn_norm, "ffn_norm", config->hidden_size, true},
        {&layer->post_ffn_norm, "post_ffw_norm", config->hidden_size, config->has_post_norms},
    };
    fv_status status = FV_OK;
    for (int32_t i = 0; i < FV_ARRAY_LEN(norms) && status == FV_OK; i++) {
        char name[64];
        snprintf(name, sizeof(name), "blk.%d.%s.weight", index, norms[i].suffix);
        if (norms[i].is_there) status = load_vector(norms[i].vector, from, name, norms[i].length);
    }
    return status;
}

static fv_status load_layer(fv_model_layer *layer, loader *from, int32_t index)
{
    const fv_model_config *config = &from->model->config;
    const int64_t hidden = config->hidden_size, ffn = config->ffn_size;
    const int64_t q_size = (int64_t)config->num_heads * config->head_size;
    const int64_t kv_size = (int64_t)config->num_kv_heads * config->head_size;
    const part_name qkv[] = {{"attn_q.weight", q_size}, {"attn_k.weight", kv_size}, {"attn_v.weight", kv_size}};
    const part_name output[] = {{"attn_output.weight", hidden}};
    const part_name gate_up[] = {{"ffn_gate.weight", ffn}, {"ffn_up.weight", ffn}};
    const part_name down[] = {{"ffn_down.weight", hidden}};

    fv_status status = load_norms(layer, from, index);
    if (status == FV_OK) status = load_weight(&layer->qkv, from, index, hidden, qkv, 3);
    if (status == FV_OK) status = load_weight(&layer->output, from, index, q_size, output, 1);
    if (status == FV_OK) status = load_weight(&layer->gate_up, from, index, hidden, gate_up, 2);
    if (status == FV_OK) status = load_weight(&layer->down, from, index, ffn, down, 1);
    return status;
}

static fv_status load_embedding_and_head(loader *from)
{
    fv_model *model = from->model;
    const int64_t hidden = model->config.hidden_size, rows = model->config.vocabulary_size;
    fv_status status = find_tensor(&model->embedding, from, "token_embd.weight", hidden, rows);
    if (status != FV_OK) return status;

    stacked_rows stack = {.parts = {model->embedding}, .num_parts = 1};
    const fv_gguf_tensor *head;
    if (fv_gguf_find_tensor(&head, from->gguf, "output.weight") != FV_ERR_IO) { /* it is there, so not tied */
        status = find_tensor(&stack.parts[0], from, "output.weight", hidden, rows);
        if (status != FV_OK) return status;
    }
    return load_stack(&model->head, from, &stack);
}

fv_status fv_model_load(fv_model **model, const fv_gguf *gguf, fv_gemm *gemm, fv_model_progress_fn progress,
                        void *progress_user)
{
    *model = NULL;
    fv_model *made = calloc(1, sizeof(*made));
    if (!made) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a model");
    loader from = {
        .gguf = gguf,
        .gemm = gemm,
        .model = made,
        .progress = progress,
        .progress_user = progress_user,
    };
    fv_status status = fv_model_config_read(&made->config, gguf);
    if (status != FV_OK) goto fail;
    made->layers = calloc((size_t)made->config.num_layers, sizeof(*made->layers));
    if (!made->layers) {
        status = fv_fail(FV_ERR_NO_MEMORY, "no memory for %d layers", made->config.num_layers);
        goto fail;
    }
    for (int32_t i = 0; i < made->config.num_layers && status == FV_OK; i++) {
        status = load_layer(&made->layers[i], &from, i);
    }
    if (status == FV_OK) {
        status = load_vector(&made->output_norm, &from, "output_norm.weight", made->config.hidden_size);
    }
    if (status == FV_OK) status = load_embedding_and_head(&from);
    if (status != FV_OK) goto fail;
    *model = made;
    return FV_OK;

fail:
    fv_model_destroy(made);
    return status;
}

void fv_model_destroy(fv_model *model)
{
    if (!model) return;
    for (int32_t i = 0; model->layers && i < model->config.num_layers; i++) {
        fv_model_layer *layer = &model->layers[i];
        free(layer->attention_norm);
        free(layer->q_norm);
        free(layer->k_norm);
        free(layer->post_attention_norm);
        free(layer->ffn_norm);
        free(layer->post_ffn_norm);
        fv_gemm_weight_destroy(layer->qkv);
        fv_gemm_weight_destroy(layer->output);
        fv_gemm_weight_destroy(layer->gate_up);
        fv_gemm_weight_destroy(layer->down);
    }
    free(model->layers);
    free(model->output_norm);
    fv_gemm_weight_destroy(model->head);
    free(model);
}

fv_status fv_model_embed(float *out, const fv_model *model, int32_t token)
{
    const fv_model_config *config = &model->config;
    const fv_status status = fv_dequantize_row(out, row_data(model->embedding, token), model->embedding->type,
                                               config->hidden_size);
    if (status == FV_OK && config->embedding_scale != 1.0f) {
        fv_scale_row(out, config->embedding_scale, config->hidden_size);
    }
    return status;
}
