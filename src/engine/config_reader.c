/* Every failure names the key, its value and what is accepted. */
#include "engine/config_reader.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/compiler.h"

fv_config_key fv_config_key_of(const fv_config_reader *from, const char *name)
{
    fv_config_key key;
    snprintf(key.text, sizeof(key.text), "%s.%s", from->architecture, name);
    return key;
}

bool fv_config_has(const fv_config_reader *from, const char *name)
{
    return fv_gguf_has(from->gguf, fv_config_key_of(from, name).text);
}

bool fv_config_text_is(fv_text text, const char *expected)
{
    return text.length == strlen(expected) && memcmp(text.data, expected, text.length) == 0;
}

fv_status fv_config_read_count(int32_t *value, const fv_config_reader *from, const char *name, uint32_t max)
{
    const fv_config_key key = fv_config_key_of(from, name);
    uint32_t read;
    const fv_status status = fv_gguf_find_u32(&read, from->gguf, key.text);
    if (status != FV_OK) return status;
    if (read < 1 || read > max) {
        return fv_fail(FV_ERR_IO, "%s: %s is %u; accepted: 1 to %u", from->path, key.text, read, max);
    }
    *value = (int32_t)read;
    return FV_OK;
}

fv_status fv_config_read_optional_count(int32_t *value, const fv_config_reader *from, const char *name, uint32_t max,
                                        int32_t absent)
{
    *value = absent;
    return fv_config_has(from, name) ? fv_config_read_count(value, from, name, max) : FV_OK;
}

fv_status fv_config_read_optional_number(float *value, const fv_config_reader *from, const char *name, float min,
                                         float absent)
{
    const fv_config_key key = fv_config_key_of(from, name);
    *value = absent;
    if (!fv_gguf_has(from->gguf, key.text)) return FV_OK;
    const fv_status status = fv_gguf_find_f32(value, from->gguf, key.text);
    if (status != FV_OK) return status;
    if (*value > min && isfinite(*value)) return FV_OK;
    return fv_fail(FV_ERR_IO, "%s: %s is %g; accepted: above %g", from->path, key.text, (double)*value, (double)min);
}

fv_status fv_config_read_optional_flag(bool *value, const fv_config_reader *from, const char *name)
{
    const fv_config_key key = fv_config_key_of(from, name);
    *value = false;
    return fv_gguf_has(from->gguf, key.text) ? fv_gguf_find_bool(value, from->gguf, key.text) : FV_OK;
}

/* Keys of YaRN that are fixed here: other values are of no model that the engine knows. */
static fv_status check_yarn_factors(const fv_config_reader *from)
{
    static const char *const names[] = {"rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor",
                                        "rope.scaling.attn_factor"};
    for (int32_t i = 0; i < FV_ARRAY_LEN(names); i++) {
        float value;
        const fv_status status = fv_config_read_optional_number(&value, from, names[i], -INFINITY, 1.0f);
        if (status != FV_OK) return status;
        if (value == 1.0f) continue;
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: %s is %g; accepted: 1", from->path,
                       fv_config_key_of(from, names[i]).text, (double)value);
    }
    return FV_OK;
}

/* YaRN sharpens the softmax as if queries and keys were both longer by 1 + 0.1 ln(factor). DeepSeek does so by
 * the scale of all scores, with a multiplier in place of the 0.1 that its files hold; without one the
 * rotated elements alone are made longer. */
static fv_status read_yarn(fv_rope_scaling *scaling, float *score_factor, const fv_config_reader *from)
{
    float log_multiplier = 0.0f;
    fv_status status = fv_config_read_count(&scaling->original_context, from, "rope.scaling.original_context_length",
                                            1 << 28);
    if (status == FV_OK) {
        status = fv_config_read_optional_number(&scaling->beta_fast, from, "rope.scaling.yarn_beta_fast", 0.0f, 32.0f);
    }
    if (status == FV_OK) {
        status = fv_config_read_optional_number(&scaling->beta_slow, from, "rope.scaling.yarn_beta_slow", 0.0f, 1.0f);
    }
    if (status == FV_OK) {
        status = fv_config_read_optional_number(&log_multiplier, from, "rope.scaling.yarn_log_multiplier", -1e-6f,
                                                0.0f);
    }
    if (status == FV_OK) status = check_yarn_factors(from);
    if (status != FV_OK) return status;
    scaling->is_yarn = true;
    const float log_factor = scaling->factor > 1.0f ? logf(scaling->factor) : 0.0f;
    if (log_multiplier > 0.0f) {
        *score_factor = (1.0f + log_multiplier * log_factor) * (1.0f + log_multiplier * log_factor);
    } else {
        scaling->magnitude = 1.0f + 0.1f * log_factor;
    }
    return FV_OK;
}

fv_status fv_config_read_rope_scaling(fv_rope_scaling *scaling, float *score_factor, const fv_config_reader *from,
                                      bool takes_yarn)
{
    const fv_config_key key = fv_config_key_of(from, "rope.scaling.type");
    fv_text type = {"linear", 6};
    *score_factor = 1.0f;
    *scaling = (fv_rope_scaling){.factor = 1.0f, .magnitude = 1.0f};
    fv_status status = fv_config_read_optional_number(&scaling->base, from, "rope.freq_base", 1.0f, 10000.0f);
    if (status == FV_OK && fv_gguf_has(from->gguf, key.text)) {
        status = fv_gguf_find_string(&type, from->gguf, key.text);
    }
    if (status != FV_OK || fv_config_text_is(type, "none")) return status;
    const bool is_yarn = takes_yarn && fv_config_text_is(type, "yarn");
    if (!is_yarn && !fv_config_text_is(type, "linear")) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: RoPE scaling of type '%s' is not built; accepted: none, linear%s",
                       from->path, fv_text_printable(type).text, takes_yarn ? ", yarn" : "");
    }
    float older; /* the name of the key in older files */
    status = fv_config_read_optional_number(&older, from, "rope.scale_linear", 0.0f, 1.0f);
    if (status == FV_OK) {
        status = fv_config_read_optional_number(&scaling->factor, from, "rope.scaling.factor", 0.0f, older);
    }
    return status == FV_OK && is_yarn ? read_yarn(scaling, score_factor, from) : status;
}
