/* Which keys are read, what they may be, and what is refused. */
#include "engine/model_config.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/compiler.h"
#include "engine/config_reader.h"

/* What an architecture does that its files do not say. */
typedef struct architecture {
    const char *name;
    fv_activation activation;
    fv_rope_pairs rope_pairs;
    bool has_qk_norms;
    bool has_post_norms;
    bool scales_embedding;
    bool has_latents;   /* MLA, experts, and YaRN */
    int32_t full_every; /* 0: no layer has a window */
    float sliding_rope_base;
    int32_t refused_layers; /* the size of the model that needs what is not built; 0 = none */
    const char *refused_for;
} architecture;

static const architecture architectures[] = {
    {.name = "llama"},
    {
        .name = "gemma3",
        .activation = FV_ACTIVATION_GELU,
        .rope_pairs = FV_ROPE_HALVES,
        .has_qk_norms = true,
        .has_post_norms = true,
        .scales_embedding = true,
        .full_every = 6,
        .sliding_rope_base = 10000.0f,
        .refused_layers = 62,
        .refused_for = "the 27B model's own scale of the scores",
    },
    {.name = "deepseek2", .has_latents = true},
};

/* A file, and what its architecture does. */
typedef struct reader {
    fv_config_reader file;
    const architecture *of;
} reader;

/* Large models come as several files, each of which lists its own tensors only. */
static fv_status refuse_split(const reader *from)
{
    uint32_t count, index = 0;
    if (!fv_gguf_has(from->file.gguf, "split.count")) return FV_OK;
    fv_status status = fv_gguf_find_u32(&count, from->file.gguf, "split.count");
    if (status == FV_OK && fv_gguf_has(from->file.gguf, "split.no")) {
        status = fv_gguf_find_u32(&index, from->file.gguf, "split.no");
    }
    if (status != FV_OK || count <= 1) return status;
    return fv_fail(FV_ERR_UNSUPPORTED,
                   "%s: file %u of the %u that its model is split into; accepted: a model in one file "
                   "(llama-gguf-split --merge makes one)",
                   from->file.path, index + 1, count);
}

static fv_status find_architecture(reader *from)
{
    fv_text name;
    const fv_status status = fv_gguf_find_string(&name, from->file.gguf, "general.architecture");
    if (status != FV_OK) return status;
    char accepted[128] = "";
    for (int32_t i = 0; i < FV_ARRAY_LEN(architectures); i++) {
        from->of = &architectures[i];
        from->file.architecture = architectures[i].name;
        if (fv_config_text_is(name, architectures[i].name)) return FV_OK;
        const size_t used = strlen(accepted);
        snprintf(accepted + used, sizeof(accepted) - used, "%s%s", i > 0 ? ", " : "", architectures[i].name);
    }
    return fv_fail(FV_ERR_UNSUPPORTED, "%s: architecture '%s' is not known; accepted: %s", from->file.path,
                   fv_text_printable(name).text, accepted);
}

static fv_status read_counts(fv_model_config *config, const reader *from)
{
    const struct {
        int32_t *value;
        const char *name;
        uint32_t max; /* far above any model; keeps products within 64 bits */
    } counts[] = {
        {&config->num_layers, "block_count", 4096},           {&config->hidden_size, "embedding_length", 1 << 20},
        {&config->num_heads, "attention.head_count", 4096},   {&config->ffn_size, "feed_forward_length", 1 << 22},
        {&config->context_length, "context_length", 1 << 28},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(counts); i++) {
        const fv_status status = fv_config_read_count(counts[i].value, &from->file, counts[i].name, counts[i].max);
        if (status != FV_OK) return status;
    }
    if (from->of->refused_layers != config->num_layers) return FV_OK;
    return fv_fail(FV_ERR_UNSUPPORTED, "%s: %s of %d layers needs %s, which is not built", from->file.path,
                   from->of->name, config->num_layers, from->of->refused_for);
}

static fv_status read_heads(fv_model_config *config, const reader *from)
{
    fv_status status = fv_config_read_optional_count(&config->num_kv_heads, &from->file, "attention.head_count_kv",
                                                     4096, config->num_heads);
    if (status != FV_OK) return status;
    if (config->num_heads % config->num_kv_heads != 0) {
        return fv_fail(FV_ERR_IO, "%s: %d query heads do not divide among %d KV heads", from->file.path,
                       config->num_heads, config->num_kv_heads);
    }
    int32_t value_size = 0;
    status = fv_config_read_optional_count(&config->head_size, &from->file, "attention.key_length", 4096,
                                           config->hidden_size / config->num_heads);
    if (status == FV_OK) {
        status = fv_config_read_optional_count(&value_size, &from->file, "attention.value_length", 4096,
                                               config->head_size);
    }
    if (status != FV_OK) return status;
    if (value_size != config->head_size) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: heads of %d (keys) and %d (values); accepted: equal sizes",
                       from->file.path, config->head_size, value_size);
    }
    status = fv_config_read_optional_count(&config->rope_size, &from->file, "rope.dimension_count", 4096,
                                           config->head_size);
    if (status != FV_OK) return status;
    if (config->rope_size % 2 != 0 || config->rope_size > config->head_size) {
        return fv_fail(FV_ERR_IO, "%s: %s is %d; accepted: even, up to the head size %d", from->file.path,
                       fv_config_key_of(&from->file, "rope.dimension_count").text, config->rope_size,
                       config->head_size);
    }
    return FV_OK;
}

static fv_status read_scales(fv_model_config *config, const reader *from)
{
    const fv_config_key key = fv_config_key_of(&from->file, "attention.layer_norm_rms_epsilon");
    const fv_status status = fv_gguf_find_f32(&config->rms_epsilon, from->file.gguf, key.text);
    if (status != FV_OK) return status;
    if (!(config->rms_epsilon > 0.0f && config->rms_epsilon < 1.0f)) {
        return fv_fail(FV_ERR_IO, "%s: %s is %g; accepted: between 0 and 1", from->file.path, key.text,
                       (double)config->rms_epsilon);
    }
    config->embedding_scale = from->of->scales_embedding ? sqrtf((float)config->hidden_size) : 1.0f;
    return fv_config_read_optional_number(&config->attention_scale, &from->file, "attention.scale", 0.0f,
                                          1.0f / sqrtf((float)config->head_size));
}

static void add_group(fv_model_config *config, fv_layer_group group)
{
    if (group.num_layers > 0) config->groups[config->num_groups++] = group;
}

static fv_status read_groups(fv_model_config *config, const reader *from)
{
    fv_layer_group full = {0}, sliding = {.rope = {.factor = 1.0f, .magnitude = 1.0f}};
    float score_factor;
    fv_status status = fv_config_read_rope_scaling(&full.rope, &score_factor, &from->file, from->of->has_latents);
    if (status != FV_OK) return status;
    config->attention_scale *= score_factor;
    config->full_every = 1;
    if (from->of->full_every > 0 && fv_config_has(&from->file, "attention.sliding_window")) {
        status = fv_config_read_count(&sliding.window, &from->file, "attention.sliding_window", 1 << 28);
        if (status == FV_OK) {
            status = fv_config_read_optional_count(&config->full_every, &from->file, "attention.sliding_window_pattern",
                                                   4096, from->of->full_every);
        }
        if (status == FV_OK) {
            status = fv_config_read_optional_number(&sliding.rope.base, &from->file, "rope.freq_base_swa", 1.0f,
                                                    from->of->sliding_rope_base);
        }
    }
    if (status != FV_OK) return status;
    full.num_layers = config->num_layers / config->full_every;
    sliding.num_layers = config->num_layers - full.num_layers;
    add_group(config, full);
    add_group(config, sliding);
    return FV_OK;
}

int32_t fv_model_config_group_of(const fv_model_config *config, int32_t layer)
{
    if (config->num_groups == 1) return 0;
    return (layer + 1) % config->full_every == 0 ? 0 : 1;
}

int32_t fv_model_config_cache_head_size(const fv_model_config *config)
{
    if (config->attention == FV_ATTENTION_MHA) return config->head_size;
    return config->mla.kv_lora_rank + config->mla.qk_rope_head_dim;
}

int32_t fv_model_config_v_head_size(const fv_model_config *config)
{
    return config->attention == FV_ATTENTION_MHA ? config->head_size : config->mla.v_head_dim;
}

bool fv_model_config_has_experts(const fv_model_config *config, int32_t layer)
{
    return config->experts.num_experts > 0 && layer >= config->experts.first_layer;
}

int32_t fv_model_config_ffn_size(const fv_model_config *config, int32_t layer)
{
    if (!fv_model_config_has_experts(config, layer)) return config->ffn_size;
    return config->experts.num_shared * config->experts.ffn_size;
}

/* Features whose presence would change the result and that are not built. */
static fv_status refuse_keys(const reader *from)
{
    static const struct {
        const char *name;
        const char *what;
    } keys[] = {
        {"expert_count", "a mixture of experts"},
        {"attention.sliding_window", "a sliding window"},
        {"attn_logit_softcapping", "a soft cap of its scores"},
        {"final_logit_softcapping", "a soft cap of its logits"},
        {"attention.causal", "a mask that is not causal"},
        {"attention.temperature_scale", "a scale of its scores that grows with the position"},
        {"nextn_predict_layers", "layers that predict several tokens"},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(keys); i++) {
        const fv_config_key key = fv_config_key_of(&from->file, keys[i].name);
        uint32_t count;
        float number;
        bool flag;
        if (!fv_gguf_has(from->file.gguf, key.text)) continue;
        if (from->of->full_every > 0 && strcmp(keys[i].name, "attention.sliding_window") == 0) continue;
        if (from->of->has_latents && strcmp(keys[i].name, "expert_count") == 0) continue;
        if (fv_gguf_find_u32(&count, from->file.gguf, key.text) == FV_OK && count == 0) continue;
        if (fv_gguf_find_f32(&number, from->file.gguf, key.text) == FV_OK && number == 0.0f) continue;
        if (fv_gguf_find_bool(&flag, from->file.gguf, key.text) == FV_OK && flag) continue; /* causal, as all */
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: the model has %s (%s), which is not built", from->file.path,
                       keys[i].what, key.text);
    }
    return FV_OK;
}

static fv_status refuse_tensors(const reader *from)
{
    static const struct {
        const char *tensor;
        const char *what;
    } tensors[] = {
        {"rope_freqs.weight", "RoPE frequency factors"},
        {"blk.0.attn_q.bias", "attention biases"},
        {"blk.0.attn_q_a.bias", "attention biases"},
        {"blk.0.attn_kv_a_mqa.bias", "attention biases"},
        {"blk.0.attn_output.bias", "attention biases"},
        {"blk.0.ffn_up.bias", "feed-forward biases"},
        {"blk.0.attn_q_norm.weight", "query and key norms"},
        {"blk.0.post_attention_norm.weight", "norms after attention"},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(tensors); i++) {
        const fv_gguf_tensor *tensor;
        if (from->of->has_qk_norms && strcmp(tensors[i].tensor, "blk.0.attn_q_norm.weight") == 0) continue;
        if (from->of->has_post_norms && strcmp(tensors[i].tensor, "blk.0.post_attention_norm.weight") == 0) continue;
        if (fv_gguf_find_tensor(&tensor, from->file.gguf, tensors[i].tensor) == FV_ERR_IO) continue; /* not there */
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: the model has %s (%s), which are not built", from->file.path,
                       tensors[i].what, tensors[i].tensor);
    }
    return FV_OK;
}

/* The rows of the embedding are the vocabulary. */
static fv_status read_vocabulary_size(fv_model_config *config, const reader *from)
{
    const fv_gguf_tensor *embedding;
    const fv_status status = fv_gguf_find_tensor(&embedding, from->file.gguf, "token_embd.weight");
    if (status != FV_OK) return status;
    if (embedding->shape[1] < 1 || embedding->shape[1] > 1 << 24) {
        return fv_fail(FV_ERR_IO, "%s: token_embd.weight has %lld rows; accepted: 1 to %d", from->file.path,
                       (long long)embedding->shape[1], 1 << 24);
    }
    config->vocabulary_size = (int32_t)embedding->shape[1];
    return FV_OK;
}

fv_status fv_model_config_read(fv_model_config *config, const fv_gguf *gguf)
{
    memset(config, 0, sizeof(*config));
    reader from = {.file = {.gguf = gguf, .path = fv_gguf_path(gguf)}};
    fv_status status = refuse_split(&from);
    if (status == FV_OK) status = find_architecture(&from);
    if (status != FV_OK) return status;
    config->architecture = from.of->name;
    config->activation = from.of->activation;
    config->rope_pairs = from.of->rope_pairs;
    config->has_qk_norms = from.of->has_qk_norms;
    config->has_post_norms = from.of->has_post_norms;
    config->attention = from.of->has_latents ? FV_ATTENTION_MLA : FV_ATTENTION_MHA;
    status = refuse_keys(&from);
    if (status == FV_OK) status = refuse_tensors(&from);
    if (status == FV_OK) status = read_counts(config, &from);
    if (status == FV_OK && from.of->has_latents) {
        status = fv_config_read_latent_heads(config, &from.file);
        if (status == FV_OK) status = fv_config_read_experts(config, &from.file);
    } else if (status == FV_OK) {
        status = read_heads(config, &from);
    }
    if (status == FV_OK) status = read_scales(config, &from);
    if (status == FV_OK) status = read_groups(config, &from);
    if (status == FV_OK) status = read_vocabulary_size(config, &from);
    return status;
}
