/* Layer by layer, then what is beside them. */
#include "engine/model.h"

#include <stdlib.h>

#include "core/compiler.h"
#include "engine/dequantize.h"
#include "engine/model_loader.h"
#include "engine/rows.h"

static fv_status load_norms(fv_model_layer *layer, fv_model_loader *from, int32_t index)
{
    const fv_model_config *config = &from->model->config;
    const struct {
        float **vector;
        const char *suffix;
        int32_t length;
        bool is_there;
    } norms[] = {
        {&layer->attention_norm, "attn_norm.weight", config->hidden_size, true},
        {&layer->q_norm, "attn_q_norm.weight", config->head_size, config->has_qk_norms},
        {&layer->k_norm, "attn_k_norm.weight", config->head_size, config->has_qk_norms},
        {&layer->post_attention_norm, "post_attention_norm.weight", config->hidden_size, config->has_post_norms},
        {&layer->ffn_norm, "ffn_norm.weight", config->hidden_size, true},
        {&layer->post_ffn_norm, "post_ffw_norm.weight", config->hidden_size, config->has_post_norms},
    };
    fv_status status = FV_OK;
    for (int32_t i = 0; i < FV_ARRAY_LEN(norms) && status == FV_OK; i++) {
        if (!norms[i].is_there) continue;
        status = fv_model_load_vector(norms[i].vector, from, index, norms[i].suffix, norms[i].length);
    }
    return status;
}

static fv_status load_qkv(fv_model_layer *layer, fv_model_loader *from, int32_t index)
{
    const fv_model_config *config = &from->model->config;
    const int64_t q_size = (int64_t)config->num_heads * config->head_size;
    const int64_t kv_size = (int64_t)config->num_kv_heads * config->head_size;
    const fv_weight_part qkv[] = {{.suffix = "attn_q.weight", .rows = q_size},
                                  {.suffix = "attn_k.weight", .rows = kv_size},
                                  {.suffix = "attn_v.weight", .rows = kv_size}};
    return fv_model_load_weight(&layer->qkv, from, index, config->hidden_size, qkv, 3);
}

/* The part that all tokens take; that of layers with experts has names of its own. */
static fv_status load_feed_forward(fv_model_layer *layer, fv_model_loader *from, int32_t index)
{
    const fv_model_config *config = &from->model->config;
    const int64_t hidden = config->hidden_size, ffn = fv_model_config_ffn_size(config, index);
    const bool is_shared = fv_model_config_has_experts(config, index);
    const fv_weight_part gate_up[] = {{.suffix = is_shared ? "ffn_gate_shexp.weight" : "ffn_gate.weight", .rows = ffn},
                                      {.suffix = is_shared ? "ffn_up_shexp.weight" : "ffn_up.weight", .rows = ffn}};
    const fv_weight_part down[] = {{.suffix = is_shared ? "ffn_down_shexp.weight" : "ffn_down.weight", .rows = hidden}};
    if (ffn == 0) return FV_OK;
    const fv_status status = fv_model_load_weight(&layer->gate_up, from, index, hidden, gate_up, 2);
    return status == FV_OK ? fv_model_load_weight(&layer->down, from, index, ffn, down, 1) : status;
}

static fv_status load_layer(fv_model_layer *layer, fv_model_loader *from, int32_t index)
{
    const fv_model_config *config = &from->model->config;
    const int64_t attended = (int64_t)config->num_heads * fv_model_config_v_head_size(config);
    const fv_weight_part output[] = {{.suffix = "attn_output.weight", .rows = config->hidden_size}};
    fv_status status = load_norms(layer, from, index);
    if (status == FV_OK) {
        status = config->attention == FV_ATTENTION_MLA ? fv_model_load_latents(layer, from, index)
                                                       : load_qkv(layer, from, index);
    }
    if (status == FV_OK) status = fv_model_load_weight(&layer->output, from, index, attended, output, 1);
    if (status == FV_OK) status = load_feed_forward(layer, from, index);
    if (status == FV_OK && fv_model_config_has_experts(config, index)) {
        status = fv_model_load_experts(layer, from, index);
    }
    return status;
}

static fv_status load_embedding_and_head(fv_model_loader *from)
{
    fv_model *model = from->model;
    const int64_t hidden = model->config.hidden_size, rows = model->config.vocabulary_size;
    const bool is_tied = !fv_model_has_tensor(from, -1, "output.weight");
    const fv_weight_part head[] = {{.suffix = is_tied ? "token_embd.weight" : "output.weight", .rows = rows}};
    const fv_weight_part embedding[] = {{.suffix = "token_embd.weight", .rows = rows}};
    fv_status status = fv_model_find_tensor(&model->embedding, from, -1, "token_embd.weight", hidden, rows, 1);
    if (status == FV_OK) status = fv_model_load_weight(&model->head, from, -1, hidden, head, 1);
    if (status != FV_OK || is_tied || !fv_gemm_is_on_device(from->gemm)) return status;
    return fv_model_load_weight(&model->embedding_rows, from, -1, hidden, embedding, 1);
}

/* GEMM weights, for the progress. */
static int32_t count_weights(const fv_model_config *config, const fv_model_loader *from)
{
    int32_t count = 1; /* the head */
    if (fv_gemm_is_on_device(from->gemm) && fv_model_has_tensor(from, -1, "output.weight")) count++;
    for (int32_t i = 0; i < config->num_layers; i++) {
        count += 2 + (config->q_lora_rank > 0 ? 1 : 0);
        count += fv_model_config_ffn_size(config, i) > 0 ? 2 : 0;
        count += fv_model_config_has_experts(config, i) ? 2 * config->experts.num_experts : 0;
    }
    return count;
}

fv_status fv_model_load(fv_model **model, const fv_gguf *gguf, fv_gemm_library *gemm, fv_model_progress_fn progress,
                        void *progress_user)
{
    *model = NULL;
    fv_model *made = calloc(1, sizeof(*made));
    if (!made) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a model");
    fv_model_loader from = {
        .gguf = gguf,
        .gemm = gemm,
        .model = made,
        .progress = progress,
        .progress_user = progress_user,
    };
    fv_status status = fv_model_config_read(&made->config, gguf);
    if (status != FV_OK) goto fail;
    from.num_weights = count_weights(&made->config, &from);
    made->layers = calloc((size_t)made->config.num_layers, sizeof(*made->layers));
    if (!made->layers) {
        status = fv_fail(FV_ERR_NO_MEMORY, "no memory for %d layers", made->config.num_layers);
        goto fail;
    }
    for (int32_t i = 0; i < made->config.num_layers && status == FV_OK; i++) {
        status = load_layer(&made->layers[i], &from, i);
    }
    if (status == FV_OK) {
        status = fv_model_load_vector(&made->output_norm, &from, -1, "output_norm.weight", made->config.hidden_size);
    }
    if (status == FV_OK) status = load_embedding_and_head(&from);
    if (status != FV_OK) goto fail;
    *model = made;
    return FV_OK;

fail:
    fv_model_destroy(made);
    return status;
}

static void destroy_layer(fv_model_layer *layer, int32_t num_experts)
{
    free(layer->attention_norm);
    free(layer->q_norm);
    free(layer->k_norm);
    free(layer->post_attention_norm);
    free(layer->ffn_norm);
    free(layer->post_ffn_norm);
    free(layer->kv_up);
    free(layer->router);
    free(layer->router_bias);
    fv_gemm_weight_destroy(layer->qkv);
    fv_gemm_weight_destroy(layer->q_up);
    fv_gemm_weight_destroy(layer->output);
    fv_gemm_weight_destroy(layer->gate_up);
    fv_gemm_weight_destroy(layer->down);
    for (int32_t i = 0; i < num_experts; i++) {
        if (layer->experts_gate_up) fv_gemm_weight_destroy(layer->experts_gate_up[i]);
        if (layer->experts_down) fv_gemm_weight_destroy(layer->experts_down[i]);
    }
    free(layer->experts_gate_up);
    free(layer->experts_down);
}

void fv_model_destroy(fv_model *model)
{
    if (!model) return;
    for (int32_t i = 0; model->layers && i < model->config.num_layers; i++) {
        destroy_layer(&model->layers[i], model->config.experts.num_experts);
    }
    free(model->layers);
    free(model->output_norm);
    fv_gemm_weight_destroy(model->head);
    fv_gemm_weight_destroy(model->embedding_rows);
    free(model);
}

static uint64_t bytes_of(const fv_gemm_weight *weight) { return weight ? fv_gemm_weight_bytes(weight) : 0; }

/* [Hq, P + V, L]; 0 without MLA. */
static uint64_t kv_up_elements(const fv_model_config *config)
{
    const fv_mla_shape *mla = &config->mla;
    return (uint64_t)mla->num_heads * (uint64_t)(mla->qk_nope_head_dim + mla->v_head_dim) * (uint64_t)mla->kv_lora_rank;
}

uint64_t fv_model_decode_bytes(const fv_model *model, bool is_on_device)
{
    const fv_model_config *config = &model->config;
    const uint64_t num_used = (uint64_t)config->experts.num_used, hidden = (uint64_t)config->hidden_size;
    const uint64_t kv_up_bytes = kv_up_elements(config) * (is_on_device ? sizeof(uint16_t) : sizeof(float));
    uint64_t bytes = bytes_of(model->head);
    for (int32_t i = 0; i < config->num_layers; i++) {
        const fv_model_layer *layer = &model->layers[i];
        bytes += bytes_of(layer->qkv) + bytes_of(layer->q_up) + bytes_of(layer->output) + bytes_of(layer->gate_up) +
                 bytes_of(layer->down) + kv_up_bytes;
        if (!fv_model_config_has_experts(config, i)) continue;
        bytes += num_used * (bytes_of(layer->experts_gate_up[0]) + bytes_of(layer->experts_down[0]));
        bytes += (uint64_t)config->experts.num_experts * hidden * sizeof(float);
    }
    return bytes;
}

uint64_t fv_model_config_bf16_bytes(const fv_model_config *config, bool has_head)
{
    const uint64_t hidden = (uint64_t)config->hidden_size, heads = (uint64_t)config->num_heads;
    const uint64_t q_size = heads * (uint64_t)config->head_size, q_lora = (uint64_t)config->q_lora_rank;
    const uint64_t cached = config->attention == FV_ATTENTION_MLA
                                ? (uint64_t)fv_model_config_cache_head_size(config)
                                : 2 * (uint64_t)config->num_kv_heads * (uint64_t)config->head_size;
    const uint64_t queries = q_lora > 0 ? hidden * q_lora + q_lora * q_size : hidden * q_size;
    const uint64_t output = hidden * heads * (uint64_t)fv_model_config_v_head_size(config);
    uint64_t elements = (has_head ? 2 : 1) * hidden * (uint64_t)config->vocabulary_size;
    for (int32_t i = 0; i < config->num_layers; i++) {
        elements += queries + hidden * cached + output + kv_up_elements(config);
        elements += 3 * hidden * (uint64_t)fv_model_config_ffn_size(config, i);
        if (!fv_model_config_has_experts(config, i)) continue;
        elements += (uint64_t)config->experts.num_experts * hidden * (3 * (uint64_t)config->experts.ffn_size + 2);
    }
    return 2 * elements;
}

fv_status fv_model_embed(float *out, const fv_model *model, int32_t token)
{
    const fv_model_config *config = &model->config;
    const fv_gguf_tensor *rows = model->embedding;
    if (!rows) {
        fv_gemm_random_rows(out, model->embedding_seed, config->hidden_size, token, 1);
        return FV_OK;
    }
    const uint8_t *row = (const uint8_t *)rows->data + (size_t)token * fv_gguf_type_bytes(rows->type, rows->shape[0]);
    const fv_status status = fv_dequantize_row(out, row, rows->type, config->hidden_size);
    if (status == FV_OK && config->embedding_scale != 1.0f) {
        fv_scale_row(out, config->embedding_scale, config->hidden_size);
    }
    return status;
}
