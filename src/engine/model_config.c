/* Which keys are read, what they may be, and what is refused. */
#include "engine/model_config.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/compiler.h"

static const char *const architectures[] = {"llama"};

static bool text_is(fv_text text, const char *expected)
{
    return text.length == strlen(expected) && memcmp(text.data, expected, text.length) == 0;
}

static fv_status check_architecture(const fv_gguf *gguf)
{
    fv_text name;
    const fv_status status = fv_gguf_find_string(&name, gguf, "general.architecture");
    if (status != FV_OK) return status;
    char accepted[128] = "";
    for (int32_t i = 0; i < FV_ARRAY_LEN(architectures); i++) {
        if (text_is(name, architectures[i])) return FV_OK;
        const size_t used = strlen(accepted);
        snprintf(accepted + used, sizeof(accepted) - used, "%s%s", i > 0 ? ", " : "", architectures[i]);
    }
    const int shown = name.length < 64 ? (int)name.length : 64;
    return fv_fail(FV_ERR_UNSUPPORTED, "%s: architecture '%.*s' is not known; accepted: %s", fv_gguf_path(gguf), shown,
                   name.data, accepted);
}

/* A count in [1, max]. */
static fv_status read_count(int32_t *value, const fv_gguf *gguf, const char *key, uint32_t max)
{
    uint32_t read;
    const fv_status status = fv_gguf_find_u32(&read, gguf, key);
    if (status != FV_OK) return status;
    if (read < 1 || read > max) {
        return fv_fail(FV_ERR_IO, "%s: %s is %u; accepted: 1 to %u", fv_gguf_path(gguf), key, read, max);
    }
    *value = (int32_t)read;
    return FV_OK;
}

/* The same where a missing key means `absent`. */
static fv_status read_optional_count(int32_t *value, const fv_gguf *gguf, const char *key, uint32_t max, int32_t absent)
{
    *value = absent;
    return fv_gguf_has(gguf, key) ? read_count(value, gguf, key, max) : FV_OK;
}

static fv_status read_counts(fv_model_config *config, const fv_gguf *gguf)
{
    const struct {
        int32_t *value;
        const char *key;
        uint32_t max; /* far above any model; keeps products within 64 bits */
    } counts[] = {
        {&config->num_layers, "llama.block_count", 4096},
        {&config->hidden_size, "llama.embedding_length", 1 << 20},
        {&config->num_heads, "llama.attention.head_count", 4096},
        {&config->ffn_size, "llama.feed_forward_length", 1 << 22},
        {&config->context_length, "llama.context_length", 1 << 28},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(counts); i++) {
        const fv_status status = read_count(counts[i].value, gguf, counts[i].key, counts[i].max);
        if (status != FV_OK) return status;
    }
    return FV_OK;
}

static fv_status read_heads(fv_model_config *config, const fv_gguf *gguf)
{
    const char *path = fv_gguf_path(gguf);
    fv_status status = read_optional_count(&config->num_kv_heads, gguf, "llama.attention.head_count_kv", 4096,
                                           config->num_heads);
    if (status != FV_OK) return status;
    if (config->num_heads % config->num_kv_heads != 0) {
        return fv_fail(FV_ERR_IO, "%s: %d query heads do not divide among %d KV heads", path, config->num_heads,
                       config->num_kv_heads);
    }
    status = read_optional_count(&config->head_size, gguf, "llama.attention.key_length", 4096,
                                 config->hidden_size / config->num_heads);
    if (status != FV_OK) return status;
    int32_t value_size;
    status = read_optional_count(&value_size, gguf, "llama.attention.value_length", 4096, config->head_size);
    if (status != FV_OK) return status;
    if (value_size != config->head_size) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: heads of %d (keys) and %d (values); accepted: equal sizes", path,
                       config->head_size, value_size);
    }
    status = read_optional_count(&config->rope_size, gguf, "llama.rope.dimension_count", 4096, config->head_size);
    if (status != FV_OK) return status;
    if (config->rope_size % 2 != 0 || config->rope_size > config->head_size) {
        return fv_fail(FV_ERR_IO, "%s: llama.rope.dimension_count is %d; accepted: even, up to the head size %d", path,
                       config->rope_size, config->head_size);
    }
    return FV_OK;
}

static fv_status read_floats(fv_model_config *config, const fv_gguf *gguf)
{
    const char *path = fv_gguf_path(gguf);
    fv_status status = fv_gguf_find_f32(&config->rms_epsilon, gguf, "llama.attention.layer_norm_rms_epsilon");
    if (status != FV_OK) return status;
    if (!(config->rms_epsilon > 0.0f && config->rms_epsilon < 1.0f)) {
        return fv_fail(FV_ERR_IO, "%s: llama.attention.layer_norm_rms_epsilon is %g; accepted: between 0 and 1", path,
                       (double)config->rms_epsilon);
    }
    config->rope_base = 10000.0f;
    if (fv_gguf_has(gguf, "llama.rope.freq_base")) {
        status = fv_gguf_find_f32(&config->rope_base, gguf, "llama.rope.freq_base");
        if (status != FV_OK) return status;
    }
    if (!(config->rope_base > 1.0f) || !isfinite(config->rope_base)) {
        return fv_fail(FV_ERR_IO, "%s: llama.rope.freq_base is %g; accepted: above 1", path, (double)config->rope_base);
    }
    return FV_OK;
}

/* Features whose presence would change the result and that are not built. */
static fv_status refuse_features(const fv_gguf *gguf)
{
    static const struct {
        const char *key;
        const char *what;
    } keys[] = {
        {"llama.expert_count", "a mixture of experts"},
        {"llama.rope.scale_linear", "linear RoPE scaling"},
        {"llama.attention.sliding_window", "a sliding window"},
    };
    static const struct {
        const char *tensor;
        const char *what;
    } tensors[] = {
        {"rope_freqs.weight", "RoPE frequency factors"},     {"blk.0.attn_q.bias", "attention biases"},
        {"blk.0.attn_output.bias", "attention biases"},      {"blk.0.ffn_up.bias", "feed-forward biases"},
        {"blk.0.attn_q_norm.weight", "query and key norms"},
    };
    const char *path = fv_gguf_path(gguf);
    fv_text scaling;
    if (fv_gguf_has(gguf, "llama.rope.scaling.type")) {
        const fv_status status = fv_gguf_find_string(&scaling, gguf, "llama.rope.scaling.type");
        if (status != FV_OK) return status;
        if (!text_is(scaling, "none")) {
            const int shown = scaling.length < 64 ? (int)scaling.length : 64;
            return fv_fail(FV_ERR_UNSUPPORTED, "%s: RoPE scaling of type '%.*s' is not built; accepted: none", path,
                           shown, scaling.data);
        }
    }
    for (int32_t i = 0; i < FV_ARRAY_LEN(keys); i++) {
        uint32_t count;
        float number;
        if (!fv_gguf_has(gguf, keys[i].key)) continue;
        if (fv_gguf_find_u32(&count, gguf, keys[i].key) == FV_OK && count == 0) continue;
        if (fv_gguf_find_f32(&number, gguf, keys[i].key) == FV_OK && number == 1.0f) continue;
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: the model has %s (%s), which is not built", path, keys[i].what,
                       keys[i].key);
    }
    for (int32_t i = 0; i < FV_ARRAY_LEN(tensors); i++) {
        const fv_gguf_tensor *tensor;
        if (fv_gguf_find_tensor(&tensor, gguf, tensors[i].tensor) == FV_ERR_IO) continue; /* not there */
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: the model has %s (%s), which are not built", path, tensors[i].what,
                       tensors[i].tensor);
    }
    return FV_OK;
}

/* The rows of the embedding are the vocabulary. */
static fv_status read_vocabulary_size(fv_model_config *config, const fv_gguf *gguf)
{
    const fv_gguf_tensor *embedding;
    const fv_status status = fv_gguf_find_tensor(&embedding, gguf, "token_embd.weight");
    if (status != FV_OK) return status;
    if (embedding->shape[1] < 1 || embedding->shape[1] > 1 << 24) {
        return fv_fail(FV_ERR_IO, "%s: token_embd.weight has %lld rows; accepted: 1 to %d", fv_gguf_path(gguf),
                       (long long)embedding->shape[1], 1 << 24);
    }
    config->vocabulary_size = (int32_t)embedding->shape[1];
    return FV_OK;
}

fv_status fv_model_config_read(fv_model_config *config, const fv_gguf *gguf)
{
    memset(config, 0, sizeof(*config));
    fv_status status = check_architecture(gguf);
    if (status == FV_OK) status = refuse_features(gguf);
    if (status == FV_OK) status = read_counts(config, gguf);
    if (status == FV_OK) status = read_heads(config, gguf);
    if (status == FV_OK) status = read_floats(config, gguf);
    if (status == FV_OK) status = read_vocabulary_size(config, gguf);
    return status;
}
