/* What is read from the metadata of a model, and what is refused by name. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "engine/gguf_builder.h"
#include "engine/model_config.h"

/* A key of the metadata; one that is given twice has the later value. */
typedef struct setting {
    const char *key;
    enum { U32, F32, TEXT } type;
    uint32_t number;
    float real;
    const char *text;
} setting;

static const setting gemma3[] = {
    {"general.architecture", TEXT, 0, 0, "gemma3"},
    {"gemma3.block_count", U32, 18, 0, NULL},
    {"gemma3.embedding_length", U32, 640, 0, NULL},
    {"gemma3.attention.head_count", U32, 4, 0, NULL},
    {"gemma3.attention.head_count_kv", U32, 1, 0, NULL},
    {"gemma3.attention.key_length", U32, 256, 0, NULL},
    {"gemma3.attention.value_length", U32, 256, 0, NULL},
    {"gemma3.feed_forward_length", U32, 2048, 0, NULL},
    {"gemma3.context_length", U32, 32768, 0, NULL},
    {"gemma3.attention.sliding_window", U32, 512, 0, NULL},
    {"gemma3.rope.freq_base", F32, 0, 1e6f, NULL},
    {"gemma3.attention.layer_norm_rms_epsilon", F32, 0, 1e-6f, NULL},
};

static const setting llama[] = {
    {"general.architecture", TEXT, 0, 0, "llama"},      {"llama.block_count", U32, 30, 0, NULL},
    {"llama.embedding_length", U32, 576, 0, NULL},      {"llama.attention.head_count", U32, 9, 0, NULL},
    {"llama.attention.head_count_kv", U32, 3, 0, NULL}, {"llama.feed_forward_length", U32, 1536, 0, NULL},
    {"llama.context_length", U32, 8192, 0, NULL},       {"llama.attention.layer_norm_rms_epsilon", F32, 0, 1e-5f, NULL},
};

static const setting deepseek2[] = {
    {"general.architecture", TEXT, 0, 0, "deepseek2"},
    {"deepseek2.block_count", U32, 61, 0, NULL},
    {"deepseek2.embedding_length", U32, 7168, 0, NULL},
    {"deepseek2.attention.head_count", U32, 128, 0, NULL},
    {"deepseek2.attention.head_count_kv", U32, 1, 0, NULL},
    {"deepseek2.attention.key_length", U32, 576, 0, NULL},
    {"deepseek2.attention.value_length", U32, 512, 0, NULL},
    {"deepseek2.attention.key_length_mla", U32, 192, 0, NULL},
    {"deepseek2.attention.value_length_mla", U32, 128, 0, NULL},
    {"deepseek2.attention.q_lora_rank", U32, 1536, 0, NULL},
    {"deepseek2.attention.kv_lora_rank", U32, 512, 0, NULL},
    {"deepseek2.rope.dimension_count", U32, 64, 0, NULL},
    {"deepseek2.rope.scaling.type", TEXT, 0, 0, "yarn"},
    {"deepseek2.rope.scaling.factor", F32, 0, 40.0f, NULL},
    {"deepseek2.rope.scaling.original_context_length", U32, 4096, 0, NULL},
    {"deepseek2.rope.scaling.yarn_log_multiplier", F32, 0, 0.1f, NULL},
    {"deepseek2.feed_forward_length", U32, 18432, 0, NULL},
    {"deepseek2.context_length", U32, 163840, 0, NULL},
    {"deepseek2.attention.layer_norm_rms_epsilon", F32, 0, 1e-6f, NULL},
    {"deepseek2.leading_dense_block_count", U32, 3, 0, NULL},
    {"deepseek2.expert_count", U32, 256, 0, NULL},
    {"deepseek2.expert_used_count", U32, 8, 0, NULL},
    {"deepseek2.expert_shared_count", U32, 1, 0, NULL},
    {"deepseek2.expert_feed_forward_length", U32, 2048, 0, NULL},
    {"deepseek2.expert_gating_func", U32, 2, 0, NULL},
    {"deepseek2.expert_group_count", U32, 8, 0, NULL},
    {"deepseek2.expert_group_used_count", U32, 4, 0, NULL},
    {"deepseek2.expert_weights_scale", F32, 0, 2.5f, NULL},
};

static void put_setting(gguf_builder *out, const setting *from)
{
    switch (from->type) {
    case U32: put_u32_key(out, from->key, from->number); return;
    case F32:
        put_key(out, from->key, FV_GGUF_VALUE_F32);
        put_f32(out, from->real);
        return;
    case TEXT: put_string_key(out, from->key, from->text); return;
    }
}

/* `base` with `more` (key NULL: nothing) and maybe an extra tensor. */
static fv_status read_config(fv_model_config *config, const setting *base, int32_t num_base, const setting *more,
                             const char *tensor)
{
    bool replaces = false;
    for (int32_t i = 0; i < num_base; i++) replaces |= more->key && strcmp(base[i].key, more->key) == 0;
    gguf_builder file = {0};
    put_header(&file, 3, tensor ? 2 : 1, (uint64_t)(num_base + (more->key && !replaces ? 1 : 0)));
    for (int32_t i = 0; i < num_base; i++) {
        const bool is_replaced = more->key && strcmp(base[i].key, more->key) == 0;
        put_setting(&file, is_replaced ? more : &base[i]);
    }
    if (more->key && !replaces) put_setting(&file, more);
    put_tensor_2d(&file, "token_embd.weight", 32, 100, FV_GGUF_F32, 0);
    if (tensor) put_tensor_2d(&file, tensor, 32, 1, FV_GGUF_F32, 32 * 100 * 4);
    put_tensor_data(&file, 32, 32 * 101 * 4);
    fv_gguf *gguf;
    if (fv_gguf_open_memory(&gguf, file.data, file.bytes) != FV_OK) fail_msg("%s", fv_last_error());
    const fv_status status = fv_model_config_read(config, gguf);
    fv_gguf_close(gguf);
    free(file.data);
    return status;
}

static const setting nothing = {NULL, U32, 0, 0, NULL};

static void test_gemma3(void **state)
{
    (void)state;
    fv_model_config config;
    assert_int_equal(read_config(&config, gemma3, FV_ARRAY_LEN(gemma3), &nothing, NULL), FV_OK);
    assert_string_equal(config.architecture, "gemma3");
    assert_int_equal(config.head_size, 256);
    assert_int_equal(config.rope_size, 256);
    assert_int_equal(config.rope_pairs, FV_ROPE_HALVES);
    assert_int_equal(config.activation, FV_ACTIVATION_GELU);
    assert_true(config.has_qk_norms && config.has_post_norms);
    assert_true(config.embedding_scale == sqrtf(640.0f));
    assert_true(config.attention_scale == 1.0f / 16.0f);
    assert_int_equal(config.num_groups, 2);
    assert_int_equal(config.groups[0].num_layers, 3);
    assert_int_equal(config.groups[0].window, 0);
    assert_true(config.groups[0].rope.base == 1e6f && config.groups[0].rope.factor == 1.0f);
    assert_int_equal(config.groups[1].num_layers, 15);
    assert_int_equal(config.groups[1].window, 512);
    assert_true(config.groups[1].rope.base == 1e4f && config.groups[1].rope.factor == 1.0f);
    int32_t num_full = 0;
    for (int32_t i = 0; i < 18; i++) num_full += fv_model_config_group_of(&config, i) == 0;
    assert_int_equal(num_full, 3);
    assert_int_equal(fv_model_config_group_of(&config, 5), 0);
    assert_int_equal(fv_model_config_group_of(&config, 6), 1);
}

static void test_llama(void **state)
{
    (void)state;
    fv_model_config config;
    assert_int_equal(read_config(&config, llama, FV_ARRAY_LEN(llama), &nothing, NULL), FV_OK);
    assert_int_equal(config.head_size, 64);
    assert_int_equal(config.rope_pairs, FV_ROPE_NEIGHBOURS);
    assert_int_equal(config.activation, FV_ACTIVATION_SILU);
    assert_false(config.has_qk_norms || config.has_post_norms);
    assert_true(config.embedding_scale == 1.0f && config.attention_scale == 0.125f);
    assert_int_equal(config.num_groups, 1);
    assert_int_equal(config.groups[0].num_layers, 30);
    assert_int_equal(config.groups[0].window, 0);
    for (int32_t i = 0; i < 30; i++) assert_int_equal(fv_model_config_group_of(&config, i), 0);
}

/* DeepSeek-V3 as its files describe it. */
static void test_deepseek2(void **state)
{
    (void)state;
    fv_model_config config;
    assert_int_equal(read_config(&config, deepseek2, FV_ARRAY_LEN(deepseek2), &nothing, NULL), FV_OK);
    assert_int_equal(config.attention, FV_ATTENTION_MLA);
    assert_int_equal(config.head_size, 192);
    assert_int_equal(config.mla.qk_nope_head_dim, 128);
    assert_int_equal(config.mla.v_head_dim, 128);
    assert_int_equal(config.q_lora_rank, 1536);
    assert_int_equal(fv_model_config_cache_head_size(&config), 576);
    assert_int_equal(fv_model_config_v_head_size(&config), 128);
    assert_int_equal(config.rope_size, 64);
    const float mscale = 1.0f + 0.1f * logf(40.0f);
    assert_true(fabsf(config.attention_scale * sqrtf(192.0f) / (mscale * mscale) - 1.0f) < 1e-6f);
    assert_true(config.groups[0].rope.is_yarn && config.groups[0].rope.magnitude == 1.0f);
    assert_true(config.groups[0].rope.beta_fast == 32.0f && config.groups[0].rope.beta_slow == 1.0f);
    assert_int_equal(config.experts.gating, FV_GATING_SIGMOID);
    assert_false(config.experts.normalises);
    assert_false(fv_model_config_has_experts(&config, 2));
    assert_true(fv_model_config_has_experts(&config, 3));
    assert_int_equal(fv_model_config_ffn_size(&config, 2), 18432);
    assert_int_equal(fv_model_config_ffn_size(&config, 3), 2048);

    /* Of files without the multiplier the rotated elements become longer, the scale stays. */
    const setting no_multiplier = {"deepseek2.rope.scaling.yarn_log_multiplier", F32, 0, 0.0f, NULL};
    assert_int_equal(read_config(&config, deepseek2, FV_ARRAY_LEN(deepseek2), &no_multiplier, NULL), FV_OK);
    assert_true(config.attention_scale == 1.0f / sqrtf(192.0f));
    assert_true(fabsf(config.groups[0].rope.magnitude - mscale) < 1e-6f);
}

/* Pairs that turn often stay as they are, those that turn seldom are stretched; with DeepSeek-V3's numbers
 * pairs 11 to 22 of 32 are in between. */
static void test_yarn_frequencies(void **state)
{
    (void)state;
    const fv_rope_scaling plain = {.base = 10000.0f, .factor = 1.0f}, linear = {.base = 10000.0f, .factor = 40.0f};
    fv_rope_scaling yarn = linear;
    yarn.is_yarn = true;
    yarn.original_context = 4096;
    yarn.beta_fast = 32.0f;
    yarn.beta_slow = 1.0f;
    double none[32], all[32], some[32];
    fv_rope_frequencies(none, 64, &plain);
    fv_rope_frequencies(all, 64, &linear);
    fv_rope_frequencies(some, 64, &yarn);
    for (int32_t i = 0; i < 32; i++) {
        assert_true(fabs(none[i] / pow(10000.0, -i / 32.0) - 1.0) < 1e-12);
        if (i <= 10) assert_true(some[i] == none[i]);
        if (i > 10 && i < 23) assert_true(some[i] < none[i] && some[i] > all[i]);
        if (i >= 23) assert_true(some[i] == all[i]);
    }
}

/* Keys that change what is read, one at a time. */
static void test_settings(void **state)
{
    (void)state;
    fv_model_config config;
    const setting scaled = {"gemma3.rope.scaling.factor", F32, 0, 8.0f, NULL};
    assert_int_equal(read_config(&config, gemma3, FV_ARRAY_LEN(gemma3), &scaled, NULL), FV_OK);
    assert_true(config.groups[0].rope.factor == 8.0f && config.groups[1].rope.factor == 1.0f);
    const setting pattern = {"gemma3.attention.sliding_window_pattern", U32, 2, 0, NULL};
    assert_int_equal(read_config(&config, gemma3, FV_ARRAY_LEN(gemma3), &pattern, NULL), FV_OK);
    assert_int_equal(config.groups[0].num_layers, 9);
    const setting short_model = {"gemma3.block_count", U32, 4, 0, NULL};
    assert_int_equal(read_config(&config, gemma3, FV_ARRAY_LEN(gemma3), &short_model, NULL), FV_OK);
    assert_int_equal(config.num_groups, 1); /* no layer is full */
    assert_int_equal(config.groups[0].window, 512);
    assert_int_equal(fv_model_config_group_of(&config, 3), 0);
    const setting whole = {"split.count", U32, 1, 0, NULL};
    assert_int_equal(read_config(&config, gemma3, FV_ARRAY_LEN(gemma3), &whole, NULL), FV_OK);
    const setting scale = {"gemma3.attention.scale", F32, 0, 0.25f, NULL};
    assert_int_equal(read_config(&config, gemma3, FV_ARRAY_LEN(gemma3), &scale, NULL), FV_OK);
    assert_true(config.attention_scale == 0.25f);
}

static void test_refuses(void **state)
{
    (void)state;
    static const struct {
        const setting *settings;
        int32_t count;
    } bases[] = {
        {llama, FV_ARRAY_LEN(llama)},
        {gemma3, FV_ARRAY_LEN(gemma3)},
        {deepseek2, FV_ARRAY_LEN(deepseek2)},
    };
    enum { of_llama, of_gemma3, of_deepseek2 };
    static const struct {
        setting more;
        const char *tensor;
        int32_t base;
        fv_status status;
        const char *cause;
    } cases[] = {
        {{"general.architecture", TEXT, 0, 0, "mamba"},
         NULL,
         of_llama,
         FV_ERR_UNSUPPORTED,
         "accepted: llama, gemma3, deepseek2"},
        {{"split.count", U32, 3, 0, NULL}, NULL, of_llama, FV_ERR_UNSUPPORTED, "file 1 of the 3 that its model"},
        {{"gemma3.final_logit_softcapping", F32, 0, 30.0f, NULL},
         NULL,
         of_gemma3,
         FV_ERR_UNSUPPORTED,
         "soft cap of its logits"},
        {{"gemma3.attn_logit_softcapping", F32, 0, 50.0f, NULL},
         NULL,
         of_gemma3,
         FV_ERR_UNSUPPORTED,
         "soft cap of its scores"},
        {{"gemma3.block_count", U32, 62, 0, NULL}, NULL, of_gemma3, FV_ERR_UNSUPPORTED, "62 layers needs the 27B"},
        {{"gemma3.rope.scaling.type", TEXT, 0, 0, "yarn"}, NULL, of_gemma3, FV_ERR_UNSUPPORTED, "'yarn' is not built"},
        {{"gemma3.rope.freq_base", F32, 0, 0.5f, NULL},
         NULL,
         of_gemma3,
         FV_ERR_IO,
         "freq_base is 0.5; accepted: above 1"},
        {{"gemma3.attention.value_length", U32, 128, 0, NULL}, NULL, of_gemma3, FV_ERR_UNSUPPORTED, "equal sizes"},
        {{"gemma3.attention.head_count", U32, 0, 0, NULL}, NULL, of_gemma3, FV_ERR_IO, "head_count is 0"},
        {{"llama.attention.sliding_window", U32, 4096, 0, NULL},
         NULL,
         of_llama,
         FV_ERR_UNSUPPORTED,
         "a sliding window"},
        {{"llama.expert_count", U32, 8, 0, NULL}, NULL, of_llama, FV_ERR_UNSUPPORTED, "a mixture of experts"},
        {{NULL, U32, 0, 0, NULL}, "blk.0.attn_q_norm.weight", of_llama, FV_ERR_UNSUPPORTED, "query and key norms"},
        {{NULL, U32, 0, 0, NULL}, "blk.0.attn_q.bias", of_gemma3, FV_ERR_UNSUPPORTED, "attention biases"},
        {{NULL, U32, 0, 0, NULL}, "blk.0.attn_q_a.bias", of_deepseek2, FV_ERR_UNSUPPORTED, "attention biases"},
        {{"deepseek2.nextn_predict_layers", U32, 1, 0, NULL}, NULL, of_deepseek2, FV_ERR_UNSUPPORTED, "several tokens"},
        {{"deepseek2.attention.temperature_scale", F32, 0, 0.1f, NULL},
         NULL,
         of_deepseek2,
         FV_ERR_UNSUPPORTED,
         "scale of its"},
        {{"deepseek2.rope.scaling.type", TEXT, 0, 0, "longrope"},
         NULL,
         of_deepseek2,
         FV_ERR_UNSUPPORTED,
         "none, linear, yarn"},
        {{"deepseek2.rope.scaling.yarn_attn_factor", F32, 0, 0.5f, NULL},
         NULL,
         of_deepseek2,
         FV_ERR_UNSUPPORTED,
         "is 0.5; accepted: 1"},
        {{"deepseek2.rope.scaling.yarn_beta_fast", F32, 0, 0.0f, NULL},
         NULL,
         of_deepseek2,
         FV_ERR_IO,
         "beta_fast is 0; accepted: above 0"},
        {{"deepseek2.expert_used_count", U32, 200, 0, NULL}, NULL, of_deepseek2, FV_ERR_IO, "200 experts of 4 groups"},
        {{"deepseek2.attention.kv_lora_rank", U32, 5000, 0, NULL},
         NULL,
         of_deepseek2,
         FV_ERR_IO,
         "kv_lora_rank is 5000"},
        {{"deepseek2.expert_weights_scale", F32, 0, -1.0f, NULL},
         NULL,
         of_deepseek2,
         FV_ERR_IO,
         "expert_weights_scale is -1"},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(cases); i++) {
        fv_model_config config;
        const fv_status status = read_config(&config, bases[cases[i].base].settings, bases[cases[i].base].count,
                                             &cases[i].more, cases[i].tensor);
        if (status == cases[i].status && strstr(fv_last_error(), cases[i].cause)) continue;
        fail_msg("case %d: %s with '%s', expected '%s'", i, fv_status_name(status), fv_last_error(), cases[i].cause);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gemma3),           cmocka_unit_test(test_llama),    cmocka_unit_test(test_deepseek2),
        cmocka_unit_test(test_yarn_frequencies), cmocka_unit_test(test_settings), cmocka_unit_test(test_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
