/* Which keys are read, what they may be, and what is refused. */
#include "engine/model_config.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/compiler.h"

/* What an architecture does that its files do not say. */
typedef struct architecture {
    const char *name;
    fv_activation activation;
    fv_rope_pairs rope_pairs;
    bool has_qk_norms;
    bool has_post_norms;
    bool scales_embedding;
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
};

/* A file, and whose keys are read: "block_count" is "<architecture>.block_count". */
typedef struct reader {
    const fv_gguf *gguf;
    const char *path;
    const architecture *of;
} reader;

typedef struct key_text {
    char text[96];
} key_text;

static key_text key_of(const reader *from, const char *name)
{
    key_text key;
    snprintf(key.text, sizeof(key.text), "%s.%s", from->of->name, name);
    return key;
}

static bool has(const reader *from, const char *name) { return fv_gguf_has(from->gguf, key_of(from, name).text); }

static bool text_is(fv_text text, const char *expected)
{
    return text.length == strlen(expected) && memcmp(text.data, expected, text.length) == 0;
}

static fv_status find_architecture(reader *from)
{
    fv_text name;
    const fv_status status = fv_gguf_find_string(&name, from->gguf, "general.architecture");
    if (status != FV_OK) return status;
    char accepted[128] = "";
    for (int32_t i = 0; i < FV_ARRAY_LEN(architectures); i++) {
        from->of = &architectures[i];
        if (text_is(name, architectures[i].name)) return FV_OK;
        const size_t used = strlen(accepted);
        snprintf(accepted + used, sizeof(accepted) - used, "%s%s", i > 0 ? ", " : "", architectures[i].name);
    }
    return fv_fail(FV_ERR_UNSUPPORTED, "%s: architecture '%s' is not known; accepted: %s", from->path,
                   fv_text_printable(name).text, accepted);
}

/* A count in [1, max]. */
static fv_status read_count(int32_t *value, const reader *from, const char *name, uint32_t max)
{
    const key_text key = key_of(from, name);
    uint32_t read;
    const fv_status status = fv_gguf_find_u32(&read, from->gguf, key.text);
    if (status != FV_OK) return status;
    if (read < 1 || read > max) {
        return fv_fail(FV_ERR_IO, "%s: %s is %u; accepted: 1 to %u", from->path, key.text, read, max);
    }
    *value = (int32_t)read;
    return FV_OK;
}

/* The same where a missing key means `absent`. */
static fv_status read_optional_count(int32_t *value, const reader *from, const char *name, uint32_t max, int32_t absent)
{
    *value = absent;
    return has(from, name) ? read_count(value, from, name, max) : FV_OK;
}

/* A number above `min`; `absent` where the key is missing. */
static fv_status read_optional_number(float *value, const reader *from, const char *name, float min, float absent)
{
    const key_text key = key_of(from, name);
    *value = absent;
    if (!fv_gguf_has(from->gguf, key.text)) return FV_OK;
    const fv_status status = fv_gguf_find_f32(value, from->gguf, key.text);
    if (status != FV_OK) return status;
    if (*value > min && isfinite(*value)) return FV_OK;
    return fv_fail(FV_ERR_IO, "%s: %s is %g; accepted: above %g", from->path, key.text, (double)*value, (double)min);
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
        const fv_status status = read_count(counts[i].value, from, counts[i].name, counts[i].max);
        if (status != FV_OK) return status;
    }
    if (from->of->refused_layers != config->num_layers) return FV_OK;
    return fv_fail(FV_ERR_UNSUPPORTED, "%s: %s of %d layers needs %s, which is not built", from->path, from->of->name,
                   config->num_layers, from->of->refused_for);
}

static fv_status read_heads(fv_model_config *config, const reader *from)
{
    fv_status status = read_optional_count(&config->num_kv_heads, from, "attention.head_count_kv", 4096,
                                           config->num_heads);
    if (status != FV_OK) return status;
    if (config->num_heads % config->num_kv_heads != 0) {
        return fv_fail(FV_ERR_IO, "%s: %d query heads do not divide among %d KV heads", from->path, config->num_heads,
                       config->num_kv_heads);
    }
    int32_t value_size = 0;
    status = read_optional_count(&config->head_size, from, "attention.key_length", 4096,
                                 config->hidden_size / config->num_heads);
    if (status == FV_OK) {
        status = read_optional_count(&value_size, from, "attention.value_length", 4096, config->head_size);
    }
    if (status != FV_OK) return status;
    if (value_size != config->head_size) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: heads of %d (keys) and %d (values); accepted: equal sizes", from->path,
                       config->head_size, value_size);
    }
    status = read_optional_count(&config->rope_size, from, "rope.dimension_count", 4096, config->head_size);
    if (status != FV_OK) return status;
    if (config->rope_size % 2 != 0 || config->rope_size > config->head_size) {
        return fv_fail(FV_ERR_IO, "%s: %s is %d; accepted: even, up to the head size %d", from->path,
                       key_of(from, "rope.dimension_count").text, config->rope_size, config->head_size);
    }
    return FV_OK;
}

static fv_status read_scales(fv_model_config *config, const reader *from)
{
    const key_text key = key_of(from, "attention.layer_norm_rms_epsilon");
    const fv_status status = fv_gguf_find_f32(&config->rms_epsilon, from->gguf, key.text);
    if (status != FV_OK) return status;
    if (!(config->rms_epsilon > 0.0f && config->rms_epsilon < 1.0f)) {
        return fv_fail(FV_ERR_IO, "%s: %s is %g; accepted: between 0 and 1", from->path, key.text,
                       (double)config->rms_epsilon);
    }
    config->embedding_scale = from->of->scales_embedding ? sqrtf((float)config->hidden_size) : 1.0f;
    return read_optional_number(&config->attention_scale, from, "attention.scale", 0.0f,
                                1.0f / sqrtf((float)config->head_size));
}

/* How far the positions of full layers are scaled: not, or linearly (Chen et al., arXiv 2306.15595). */
static fv_status read_rope_scale(float *scale, const reader *from)
{
    const key_text key = key_of(from, "rope.scaling.type");
    fv_text type = {"linear", 6};
    if (fv_gguf_has(from->gguf, key.text)) {
        const fv_status status = fv_gguf_find_string(&type, from->gguf, key.text);
        if (status != FV_OK) return status;
    }
    *scale = 1.0f;
    if (text_is(type, "none")) return FV_OK;
    if (!text_is(type, "linear")) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: RoPE scaling of type '%s' is not built; accepted: none, linear",
                       from->path, fv_text_printable(type).text);
    }
    float older; /* the name of the key in older files */
    const fv_status status = read_optional_number(&older, from, "rope.scale_linear", 0.0f, 1.0f);
    return status == FV_OK ? read_optional_number(scale, from, "rope.scaling.factor", 0.0f, older) : status;
}

static void add_group(fv_model_config *config, fv_layer_group group)
{
    if (group.num_layers > 0) config->groups[config->num_groups++] = group;
}

static fv_status read_groups(fv_model_config *config, const reader *from)
{
    fv_layer_group full = {0}, sliding = {.rope_scale = 1.0f};
    fv_status status = read_rope_scale(&full.rope_scale, from);
    if (status == FV_OK) status = read_optional_number(&full.rope_base, from, "rope.freq_base", 1.0f, 10000.0f);
    if (status != FV_OK) return status;
    config->full_every = 1;
    if (from->of->full_every > 0 && has(from, "attention.sliding_window")) {
        status = read_count(&sliding.window, from, "attention.sliding_window", 1 << 28);
        if (status == FV_OK) {
            status = read_optional_count(&config->full_every, from, "attention.sliding_window_pattern", 4096,
                                         from->of->full_every);
        }
        if (status == FV_OK) {
            status = read_optional_number(&sliding.rope_base, from, "rope.freq_base_swa", 1.0f,
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
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(keys); i++) {
        const key_text key = key_of(from, keys[i].name);
        uint32_t count;
        float number;
        bool flag;
        if (!fv_gguf_has(from->gguf, key.text)) continue;
        if (from->of->full_every > 0 && strcmp(keys[i].name, "attention.sliding_window") == 0) continue;
        if (fv_gguf_find_u32(&count, from->gguf, key.text) == FV_OK && count == 0) continue;
        if (fv_gguf_find_f32(&number, from->gguf, key.text) == FV_OK && number == 0.0f) continue;
        if (fv_gguf_find_bool(&flag, from->gguf, key.text) == FV_OK && flag) continue; /* causal, as all */
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: the model has %s (%s), which is not built", from->path, keys[i].what,
                       key.text);
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
        {"blk.0.attn_output.bias", "attention biases"},
        {"blk.0.ffn_up.bias", "feed-forward biases"},
        {"blk.0.attn_q_norm.weight", "query and key norms"},
        {"blk.0.post_attention_norm.weight", "norms after attention"},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(tensors); i++) {
        const fv_gguf_tensor *tensor;
        if (from->of->has_qk_norms && strcmp(tensors[i].tensor, "blk.0.attn_q_norm.weight") == 0) continue;
        if (from->of->has_post_norms && strcmp(tensors[i].tensor, "blk.0.post_attention_norm.weight") == 0) continue;
        if (fv_gguf_find_tensor(&tensor, from->gguf, tensors[i].tensor) == FV_ERR_IO) continue; /* not there */
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: the model has %s (%s), which are not built", from->path,
                       tensors[i].what, tensors[i].tensor);
    }
    return FV_OK;
}

/* The rows of the embedding are the vocabulary. */
static fv_status read_vocabulary_size(fv_model_config *config, const reader *from)
{
    const fv_gguf_tensor *embedding;
    const fv_status status = fv_gguf_find_tensor(&embedding, from->gguf, "token_embd.weight");
    if (status != FV_OK) return status;
    if (embedding->shape[1] < 1 || embedding->shape[1] > 1 << 24) {
        return fv_fail(FV_ERR_IO, "%s: token_embd.weight has %lld rows; accepted: 1 to %d", from->path,
                       (long long)embedding->shape[1], 1 << 24);
    }
    config->vocabulary_size = (int32_t)embedding->shape[1];
    return FV_OK;
}

fv_status fv_model_config_read(fv_model_config *config, const fv_gguf *gguf)
{
    memset(config, 0, sizeof(*config));
    reader from = {.gguf = gguf, .path = fv_gguf_path(gguf)};
    fv_status status = find_architecture(&from);
    if (status != FV_OK) return status;
    config->architecture = from.of->name;
    config->activation = from.of->activation;
    config->rope_pairs = from.of->rope_pairs;
    config->has_qk_norms = from.of->has_qk_norms;
    config->has_post_norms = from.of->has_post_norms;
    status = refuse_keys(&from);
    if (status == FV_OK) status = refuse_tensors(&from);
    if (status == FV_OK) status = read_counts(config, &from);
    if (status == FV_OK) status = read_heads(config, &from);
    if (status == FV_OK) status = read_scales(config, &from);
    if (status == FV_OK) status = read_groups(config, &from);
    if (status == FV_OK) status = read_vocabulary_size(config, &from);
    return status;
}
