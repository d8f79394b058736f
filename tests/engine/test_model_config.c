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
    assert_true(config.groups[0].rope_base == 1e6f && config.groups[0].rope_scale == 1.0f);
    assert_int_equal(config.groups[1].num_layers, 15);
    assert_int_equal(config.groups[1].window, 512);
    assert_true(config.groups[1].rope_base == 1e4f && config.groups[1].rope_scale == 1.0f);
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

/* Keys that change what is read, one at a time. */
static void test_settings(void **state)
{
    (void)state;
    fv_model_config config;
    const setting scaled = {"gemma3.rope.scaling.factor", F32, 0, 8.0f, NULL};
    assert_int_equal(read_config(&config, gemma3, FV_ARRAY_LEN(gemma3), &scaled, NULL), FV_OK);
    assert_true(config.groups[0].rope_scale == 8.0f && config.groups[1].rope_scale == 1.0f);
    const setting pattern = {"gemma3.attention.sliding_window_pattern", U32, 2, 0, NULL};
    assert_int_equal(read_config(&config, gemma3, FV_ARRAY_LEN(gemma3), &pattern, NULL), FV_OK);
    assert_int_equal(config.groups[0].num_layers, 9);
    const setting short_model = {"gemma3.block_count", U32, 4, 0, NULL};
    assert_int_equal(read_config(&config, gemma3, FV_ARRAY_LEN(gemma3), &short_model, NULL), FV_OK);
    assert_int_equal(config.num_groups, 1); /* no layer is full */
    assert_int_equal(config.groups[0].window, 512);
    assert_int_equal(fv_model_config_group_of(&config, 3), 0);
    const setting scale = {"gemma3.attention.scale", F32, 0, 0.25f, NULL};
    assert_int_equal(read_config(&config, gemma3, FV_ARRAY_LEN(gemma3), &scale, NULL), FV_OK);
    assert_true(config.attention_scale == 0.25f);
}

static void test_refuses(void **state)
{
    (void)state;
    static const struct {
        setting more;
        const char *tensor;
        bool is_llama;
        fv_status status;
        const char *cause;
    } cases[] = {
        {{"general.architecture", TEXT, 0, 0, "mamba"}, NULL, true, FV_ERR_UNSUPPORTED, "accepted: llama, gemma3"},
        {{"gemma3.final_logit_softcapping", F32, 0, 30.0f, NULL},
         NULL,
         false,
         FV_ERR_UNSUPPORTED,
         "soft cap of its logits"},
        {{"gemma3.attn_logit_softcapping", F32, 0, 50.0f, NULL},
         NULL,
         false,
         FV_ERR_UNSUPPORTED,
         "soft cap of its scores"},
        {{"gemma3.block_count", U32, 62, 0, NULL}, NULL, false, FV_ERR_UNSUPPORTED, "62 layers needs the 27B"},
        {{"gemma3.rope.scaling.type", TEXT, 0, 0, "yarn"}, NULL, false, FV_ERR_UNSUPPORTED, "'yarn' is not built"},
        {{"gemma3.rope.freq_base", F32, 0, 0.5f, NULL}, NULL, false, FV_ERR_IO, "freq_base is 0.5; accepted: above 1"},
        {{"gemma3.attention.value_length", U32, 128, 0, NULL}, NULL, false, FV_ERR_UNSUPPORTED, "equal sizes"},
        {{"gemma3.attention.head_count", U32, 0, 0, NULL}, NULL, false, FV_ERR_IO, "head_count is 0"},
        {{"llama.attention.sliding_window", U32, 4096, 0, NULL}, NULL, true, FV_ERR_UNSUPPORTED, "a sliding window"},
        {{"llama.expert_count", U32, 8, 0, NULL}, NULL, true, FV_ERR_UNSUPPORTED, "a mixture of experts"},
        {{NULL, U32, 0, 0, NULL}, "blk.0.attn_q_norm.weight", true, FV_ERR_UNSUPPORTED, "query and key norms"},
        {{NULL, U32, 0, 0, NULL}, "blk.0.attn_q.bias", false, FV_ERR_UNSUPPORTED, "attention biases"},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(cases); i++) {
        fv_model_config config;
        const setting *base = cases[i].is_llama ? llama : gemma3;
        const int32_t num_base = cases[i].is_llama ? FV_ARRAY_LEN(llama) : FV_ARRAY_LEN(gemma3);
        const fv_status status = read_config(&config, base, num_base, &cases[i].more, cases[i].tensor);
        if (status == cases[i].status && strstr(fv_last_error(), cases[i].cause)) continue;
        fail_msg("case %d: %s with '%s', expected '%s'", i, fv_status_name(status), fv_last_error(), cases[i].cause);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gemma3),
        cmocka_unit_test(test_llama),
        cmocka_unit_test(test_settings),
        cmocka_unit_test(test_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
