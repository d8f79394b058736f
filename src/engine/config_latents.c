/* What only models of the DeepSeek family have: heads made of latents, and experts.
 *
 * Files say the sizes of heads in two ways. Older ones, which hold the weights that make keys and values of
 * latents as one tensor (attn_kv_b), have them as key_length and value_length. Newer ones, which hold two tensors
 * (attn_k_b, attn_v_b), call them key_length_mla and value_length_mla; the keys without _mla are then of a cache entry. */
#include "engine/config_reader.h"

#include "core/compiler.h"

fv_status fv_config_read_latent_heads(fv_model_config *config, const fv_config_reader *from)
{
    fv_mla_shape *mla = &config->mla;
    const bool is_newer = fv_config_has(from, "attention.key_length_mla");
    const struct {
        int32_t *value;
        const char *name;
    } sizes[] = {
        {&mla->kv_lora_rank, "attention.kv_lora_rank"},
        {&mla->qk_rope_head_dim, "rope.dimension_count"},
        {&config->head_size, is_newer ? "attention.key_length_mla" : "attention.key_length"},
        {&mla->v_head_dim, is_newer ? "attention.value_length_mla" : "attention.value_length"},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(sizes); i++) {
        const fv_status status = fv_config_read_count(sizes[i].value, from, sizes[i].name, 4096);
        if (status != FV_OK) return status;
    }
    if (mla->qk_rope_head_dim % 2 != 0 || mla->qk_rope_head_dim >= config->head_size) {
        return fv_fail(FV_ERR_IO, "%s: %s is %d; accepted: even, below the head size %d", from->path,
                       fv_config_key_of(from, "rope.dimension_count").text, mla->qk_rope_head_dim, config->head_size);
    }
    mla->num_heads = config->num_heads;
    mla->qk_nope_head_dim = config->head_size - mla->qk_rope_head_dim;
    config->num_kv_heads = 1;
    config->rope_size = mla->qk_rope_head_dim;
    return fv_config_read_optional_count(&config->q_lora_rank, from, "attention.q_lora_rank", 1 << 20, 0);
}

static fv_status check_groups(const fv_expert_config *experts, const fv_config_reader *from)
{
    const int32_t group_size = experts->num_experts / experts->num_groups;
    if (experts->num_experts % experts->num_groups != 0) {
        return fv_fail(FV_ERR_IO, "%s: %d experts do not divide into %d groups", from->path, experts->num_experts,
                       experts->num_groups);
    }
    if (experts->num_groups > 1 && experts->gating == FV_GATING_SIGMOID && group_size < 2) {
        return fv_fail(FV_ERR_IO, "%s: groups of %d expert; accepted with sigmoid gating: 2 or more", from->path,
                       group_size);
    }
    if (experts->num_used_groups > experts->num_groups || experts->num_used > experts->num_used_groups * group_size) {
        return fv_fail(FV_ERR_IO, "%s: %d experts of %d groups for a token; there are %d groups of %d", from->path,
                       experts->num_used, experts->num_used_groups, experts->num_groups, group_size);
    }
    return FV_OK;
}

static fv_status read_gating(fv_expert_config *experts, const fv_config_reader *from)
{
    const fv_config_key key = fv_config_key_of(from, "expert_gating_func");
    uint32_t gating = FV_GATING_SOFTMAX; /* older files do not say */
    if (fv_gguf_has(from->gguf, key.text)) {
        const fv_status status = fv_gguf_find_u32(&gating, from->gguf, key.text);
        if (status != FV_OK) return status;
    }
    if (gating != FV_GATING_SOFTMAX && gating != FV_GATING_SIGMOID) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: %s is %u; accepted: 1 (softmax), 2 (sigmoid)", from->path, key.text,
                       gating);
    }
    experts->gating = (fv_gating)gating;
    return FV_OK;
}

fv_status fv_config_read_experts(fv_model_config *config, const fv_config_reader *from)
{
    fv_expert_config *experts = &config->experts;
    uint32_t dense = 0, shared = 0;
    const fv_config_key dense_key = fv_config_key_of(from, "leading_dense_block_count");
    const fv_config_key shared_key = fv_config_key_of(from, "expert_shared_count");
    fv_status status = FV_OK;
    if (!fv_config_has(from, "expert_count")) return FV_OK;
    if (fv_gguf_has(from->gguf, dense_key.text)) status = fv_gguf_find_u32(&dense, from->gguf, dense_key.text);
    if (status == FV_OK && fv_gguf_has(from->gguf, shared_key.text)) {
        status = fv_gguf_find_u32(&shared, from->gguf, shared_key.text);
    }
    if (status == FV_OK && shared > 64) {
        status = fv_fail(FV_ERR_IO, "%s: %s is %u; accepted: 0 to 64", from->path, shared_key.text, shared);
    }
    if (status != FV_OK) return status;
    experts->first_layer = (int32_t)(dense < (uint32_t)config->num_layers ? dense : (uint32_t)config->num_layers);
    experts->num_shared = (int32_t)shared;

    const struct {
        int32_t *value;
        const char *name;
        uint32_t max;
        int32_t absent; /* 0: the key must be there */
    } counts[] = {
        {&experts->num_experts, "expert_count", 4096, 0},
        {&experts->num_used, "expert_used_count", 4096, 0},
        {&experts->ffn_size, "expert_feed_forward_length", 1 << 22, 0},
        {&experts->num_groups, "expert_group_count", FV_MAX_EXPERT_GROUPS, 1},
        {&experts->num_used_groups, "expert_group_used_count", FV_MAX_EXPERT_GROUPS, 1},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(counts) && status == FV_OK; i++) {
        status = counts[i].absent == 0 ? fv_config_read_count(counts[i].value, from, counts[i].name, counts[i].max)
                                       : fv_config_read_optional_count(counts[i].value, from, counts[i].name,
                                                                       counts[i].max, counts[i].absent);
    }
    if (status == FV_OK) status = read_gating(experts, from);
    if (status == FV_OK) status = fv_config_read_optional_flag(&experts->normalises, from, "expert_weights_norm");
    if (status == FV_OK) {
        status = fv_config_read_optional_number(&experts->weights_scale, from, "expert_weights_scale", 0.0f, 1.0f);
    }
    return status == FV_OK ? check_groups(experts, from) : status;
}
