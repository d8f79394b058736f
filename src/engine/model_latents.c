/* The weights that only models of the DeepSeek family have.
 *
 * Keys and values of a head are made of a latent by W_UK [P, L] and W_UV^T [V, L], kept in fp32 as fv_layer.kv_up wants
 * them, one head after the other. Older files have just that (attn_kv_b); newer ones have two tensors, in which
 * W_UK lies transposed, ready to be multiplied with queries:
 *
 *   attn_k_b [H, L, P]    attn_v_b [H, V, L]
 *
 * The rotated elements of a head are neighbours, as in the checkpoints: nothing is permuted. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model_loader.h"

/* Head `head` of kv_up from its matrices k_b [L, P] and v_b [V, L]. */
static void join_head(float *kv_up, const float *k_b, const float *v_b, const fv_mla_shape *mla)
{
    const int32_t latent = mla->kv_lora_rank, nope = mla->qk_nope_head_dim;
    for (int32_t p = 0; p < nope; p++) {
        for (int32_t l = 0; l < latent; l++) kv_up[p * latent + l] = k_b[l * nope + p];
    }
    memcpy(kv_up + nope * latent, v_b, (size_t)mla->v_head_dim * (size_t)latent * sizeof(float));
}

static fv_status load_split_kv_up(fv_model_layer *layer, fv_model_loader *from, int32_t index)
{
    const fv_mla_shape *mla = &from->model->config.mla;
    const int64_t k_size = (int64_t)mla->kv_lora_rank * mla->qk_nope_head_dim;
    const int64_t v_size = (int64_t)mla->kv_lora_rank * mla->v_head_dim;
    const fv_gguf_tensor *k_tensor, *v_tensor;
    float *k_b = NULL, *v_b = NULL;
    fv_status status = fv_model_find_tensor(&k_tensor, from, index, "attn_k_b.weight", mla->qk_nope_head_dim,
                                            mla->kv_lora_rank, mla->num_heads);
    if (status == FV_OK) {
        status = fv_model_find_tensor(&v_tensor, from, index, "attn_v_b.weight", mla->kv_lora_rank, mla->v_head_dim,
                                      mla->num_heads);
    }
    if (status == FV_OK) status = fv_model_load_floats(&k_b, from, k_tensor);
    if (status == FV_OK) status = fv_model_load_floats(&v_b, from, v_tensor);
    if (status != FV_OK) goto done;
    layer->kv_up = malloc((size_t)(mla->num_heads * (k_size + v_size)) * sizeof(float));
    if (!layer->kv_up) {
        status = fv_fail(FV_ERR_NO_MEMORY, "no memory for blk.%d.attn_kv_b", index);
        goto done;
    }
    for (int64_t head = 0; head < mla->num_heads; head++) {
        join_head(layer->kv_up + head * (k_size + v_size), k_b + head * k_size, v_b + head * v_size, mla);
    }

done:
    free(k_b);
    free(v_b);
    return status;
}

static fv_status load_kv_up(fv_model_layer *layer, fv_model_loader *from, int32_t index)
{
    const fv_mla_shape *mla = &from->model->config.mla;
    const int64_t rows = (int64_t)mla->num_heads * (mla->qk_nope_head_dim + mla->v_head_dim);
    fv_status status;
    if (fv_model_has_tensor(from, index, "attn_kv_b.weight")) {
        const fv_gguf_tensor *tensor;
        status = fv_model_find_tensor(&tensor, from, index, "attn_kv_b.weight", mla->kv_lora_rank, rows, 1);
        if (status == FV_OK) status = fv_model_load_floats(&layer->kv_up, from, tensor);
    } else {
        status = load_split_kv_up(layer, from, index);
    }
    if (status == FV_OK) from->model->weight_bytes += (size_t)(rows * mla->kv_lora_rank) * sizeof(float);
    return status;
}

fv_status fv_model_load_latents(fv_model_layer *layer, fv_model_loader *from, int32_t index)
{
    const fv_model_config *config = &from->model->config;
    const int64_t hidden = config->hidden_size, q_size = (int64_t)config->num_heads * config->head_size;
    const int64_t entry = fv_model_config_cache_head_size(config);
    const bool has_q_latent = config->q_lora_rank > 0;
    const fv_weight_part down[] = {
        {.suffix = has_q_latent ? "attn_q_a.weight" : "attn_q.weight",
         .rows = has_q_latent ? config->q_lora_rank : q_size},
        {.suffix = "attn_kv_a_mqa.weight", .rows = entry},
    };
    const fv_weight_part q_up[] = {{.suffix = "attn_q_b.weight", .rows = q_size}};
    fv_status status = fv_model_load_vector(&layer->k_norm, from, index, "attn_kv_a_norm.weight",
                                            config->mla.kv_lora_rank);
    if (status == FV_OK && has_q_latent) {
        status = fv_model_load_vector(&layer->q_norm, from, index, "attn_q_a_norm.weight", config->q_lora_rank);
    }
    if (status == FV_OK) status = fv_model_load_weight(&layer->qkv, from, index, hidden, down, 2);
    if (status == FV_OK && has_q_latent) {
        status = fv_model_load_weight(&layer->q_up, from, index, config->q_lora_rank, q_up, 1);
    }
    return status == FV_OK ? load_kv_up(layer, from, index) : status;
}

static fv_status load_router(fv_model_layer *layer, fv_model_loader *from, int32_t index)
{
    const fv_model_config *config = &from->model->config;
    const int32_t num_experts = config->experts.num_experts;
    const fv_gguf_tensor *tensor;
    fv_status status = fv_model_find_tensor(&tensor, from, index, "ffn_gate_inp.weight", config->hidden_size,
                                            num_experts, 1);
    if (status == FV_OK) status = fv_model_load_floats(&layer->router, from, tensor);
    if (status != FV_OK) return status;
    from->model->weight_bytes += (size_t)tensor->num_elements * sizeof(float);
    if (!fv_model_has_tensor(from, index, "exp_probs_b.bias")) return FV_OK;
    status = fv_model_load_vector(&layer->router_bias, from, index, "exp_probs_b.bias", num_experts);
    for (int32_t i = 0; i < num_experts && status == FV_OK; i++) {
        const float bias = layer->router_bias[i];
        if (!isfinite(bias))
            status = fv_fail(FV_ERR_IO, "blk.%d.exp_probs_b.bias[%d] is %g; accepted: finite numbers", index, i,
                             (double)bias);
    }
    return status;
}

fv_status fv_model_load_experts(fv_model_layer *layer, fv_model_loader *from, int32_t index)
{
    const fv_model_config *config = &from->model->config;
    const int64_t hidden = config->hidden_size, ffn = config->experts.ffn_size;
    const int32_t num_experts = config->experts.num_experts;
    layer->experts_gate_up = calloc((size_t)num_experts, sizeof(*layer->experts_gate_up));
    layer->experts_down = calloc((size_t)num_experts, sizeof(*layer->experts_down));
    if (!layer->experts_gate_up || !layer->experts_down) {
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d experts", num_experts);
    }
    fv_status status = load_router(layer, from, index);
    for (int32_t i = 0; i < num_experts && status == FV_OK; i++) {
        const fv_weight_part gate_up[] = {{"ffn_gate_exps.weight", ffn, i, num_experts},
                                          {"ffn_up_exps.weight", ffn, i, num_experts}};
        const fv_weight_part down[] = {{"ffn_down_exps.weight", hidden, i, num_experts}};
        status = fv_model_load_weight(&layer->experts_gate_up[i], from, index, hidden, gate_up, 2);
        if (status == FV_OK) status = fv_model_load_weight(&layer->experts_down[i], from, index, ffn, down, 1);
    }
    return status;
}
