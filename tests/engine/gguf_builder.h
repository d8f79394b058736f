/* Builds small GGUF files in memory, right ones and wrong ones, for the tests and the fuzzer's seeds.
 * Everything is written as told: nothing is checked. */
#ifndef FV_TESTS_GGUF_BUILDER_H
#define FV_TESTS_GGUF_BUILDER_H

#include <stdlib.h>
#include <string.h>

#include "engine/gguf.h"

/* malloc'd memory is aligned to 16, as fv_gguf_open_memory wants it. */
typedef struct gguf_builder {
    uint8_t *data;
    size_t bytes;
    size_t capacity;
} gguf_builder;

static inline void put_bytes(gguf_builder *out, const void *bytes, size_t num)
{
    while (out->bytes + num > out->capacity) {
        out->capacity = out->capacity ? 2 * out->capacity : 1024;
        out->data = realloc(out->data, out->capacity);
        if (!out->data) abort();
    }
    if (num > 0) memcpy(out->data + out->bytes, bytes, num);
    out->bytes += num;
}

static inline void put_u8(gguf_builder *out, uint8_t value) { put_bytes(out, &value, sizeof(value)); }
static inline void put_u32(gguf_builder *out, uint32_t value) { put_bytes(out, &value, sizeof(value)); }
static inline void put_u64(gguf_builder *out, uint64_t value) { put_bytes(out, &value, sizeof(value)); }
static inline void put_f32(gguf_builder *out, float value) { put_bytes(out, &value, sizeof(value)); }

static inline void put_string(gguf_builder *out, const char *text)
{
    put_u64(out, strlen(text));
    put_bytes(out, text, strlen(text));
}

static inline void put_header(gguf_builder *out, uint32_t version, uint64_t num_tensors, uint64_t num_keys)
{
    put_bytes(out, "GGUF", 4);
    put_u32(out, version);
    put_u64(out, num_tensors);
    put_u64(out, num_keys);
}

static inline void put_key(gguf_builder *out, const char *key, uint32_t type)
{
    put_string(out, key);
    put_u32(out, type);
}

static inline void put_u32_key(gguf_builder *out, const char *key, uint32_t value)
{
    put_key(out, key, FV_GGUF_VALUE_U32);
    put_u32(out, value);
}

static inline void put_bool_key(gguf_builder *out, const char *key, uint8_t value)
{
    put_key(out, key, FV_GGUF_VALUE_BOOL);
    put_u8(out, value);
}

static inline void put_string_key(gguf_builder *out, const char *key, const char *value)
{
    put_key(out, key, FV_GGUF_VALUE_STRING);
    put_string(out, value);
}

static inline void put_array_key(gguf_builder *out, const char *key, uint32_t element_type, uint64_t count)
{
    put_key(out, key, FV_GGUF_VALUE_ARRAY);
    put_u32(out, element_type);
    put_u64(out, count);
}

static inline void put_string_array_key(gguf_builder *out, const char *key, const char *const *texts, uint64_t count)
{
    put_array_key(out, key, FV_GGUF_VALUE_STRING, count);
    for (uint64_t i = 0; i < count; i++) put_string(out, texts[i]);
}

static inline void put_tensor_2d(gguf_builder *out, const char *name, uint64_t d0, uint64_t d1, uint32_t type,
                                 uint64_t offset)
{
    put_string(out, name);
    put_u32(out, 2);
    put_u64(out, d0);
    put_u64(out, d1);
    put_u32(out, type);
    put_u64(out, offset);
}

/* Zeros up to the next multiple of `alignment`, then `num` bytes that count up. */
static inline void put_tensor_data(gguf_builder *out, size_t alignment, size_t num)
{
    while (out->bytes % alignment != 0) put_u8(out, 0);
    for (size_t i = 0; i < num; i++) put_u8(out, (uint8_t)i);
}

/* A byte-level tokenizer of 9 tokens: <|endoftext|> a b ab c abc Ġ(space) <|im_end|> and `start`. */
enum { TINY_TOKENIZER_KEYS = 8 };

static inline void put_tiny_tokenizer_of_kinds(gguf_builder *out, const char *pre, const char *start, int32_t end_kind,
                                               int32_t start_kind)
{
    const char *const tokens[] = {"<|endoftext|>", "a", "b", "ab", "c", "abc", "\xc4\xa0", "<|im_end|>", start};
    static const char *const merges[] = {"a b", "ab c"};
    const int32_t kinds[] = {3, 1, 1, 1, 1, 1, 1, end_kind, start_kind};
    put_string_key(out, "tokenizer.ggml.model", "gpt2");
    put_string_key(out, "tokenizer.ggml.pre", pre);
    put_string_array_key(out, "tokenizer.ggml.tokens", tokens, 9);
    put_string_array_key(out, "tokenizer.ggml.merges", merges, 2);
    put_array_key(out, "tokenizer.ggml.token_type", FV_GGUF_VALUE_I32, 9);
    put_bytes(out, kinds, sizeof(kinds));
    put_u32_key(out, "tokenizer.ggml.bos_token_id", 0);
    put_u32_key(out, "tokenizer.ggml.eos_token_id", 7);
    put_bool_key(out, "tokenizer.ggml.add_bos_token", 1);
}

static inline void put_tiny_tokenizer(gguf_builder *out, const char *pre, const char *start)
{
    put_tiny_tokenizer_of_kinds(out, pre, start, 3, 3);
}

/* A SentencePiece tokenizer: 4 control tokens, the first num_bytes bytes, 15 others; scores fall with the
 * id. */
enum { SMALL_SENTENCEPIECE_KEYS = 7, SMALL_SENTENCEPIECE_OTHERS = 15 };

static inline void put_small_sentencepiece(gguf_builder *out, uint32_t num_bytes)
{
    static const char *const first[] = {"<pad>", "<eos>", "<bos>", "<unk>"};
    static const char *const last[] = {"<start_of_turn>",
                                       "<end_of_turn>",
                                       "\n",
                                       "\n\n",
                                       "  ",
                                       "\xe2\x96\x81h",
                                       "he",
                                       "llo",
                                       "ll",
                                       "\xe2\x96\x81",
                                       "h",
                                       "e",
                                       "l",
                                       "o",
                                       "\xc3\xa9"};
    static const uint32_t first_kinds[] = {3, 3, 3, 2};
    static const uint32_t last_kinds[] = {3, 3, 4, 4, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    static const char digits[] = "0123456789ABCDEF";
    const uint32_t num_tokens = 4 + num_bytes + SMALL_SENTENCEPIECE_OTHERS;
    put_string_key(out, "tokenizer.ggml.model", "llama");
    put_array_key(out, "tokenizer.ggml.tokens", FV_GGUF_VALUE_STRING, num_tokens);
    for (uint32_t i = 0; i < 4; i++) put_string(out, first[i]);
    for (uint32_t byte = 0; byte < num_bytes; byte++) {
        const char text[] = {'<', '0', 'x', digits[byte / 16], digits[byte % 16], '>', '\0'};
        put_string(out, text);
    }
    for (uint32_t i = 0; i < SMALL_SENTENCEPIECE_OTHERS; i++) put_string(out, last[i]);
    put_array_key(out, "tokenizer.ggml.scores", FV_GGUF_VALUE_F32, num_tokens);
    for (uint32_t i = 0; i < num_tokens; i++) put_f32(out, -(float)i);
    put_array_key(out, "tokenizer.ggml.token_type", FV_GGUF_VALUE_I32, num_tokens);
    put_bytes(out, first_kinds, sizeof(first_kinds));
    for (uint32_t i = 0; i < num_bytes; i++) put_u32(out, 6);
    put_bytes(out, last_kinds, sizeof(last_kinds));
    put_u32_key(out, "tokenizer.ggml.bos_token_id", 2);
    put_u32_key(out, "tokenizer.ggml.eos_token_id", 1);
    put_bool_key(out, "tokenizer.ggml.add_bos_token", 1);
}

/* A deepseek2 model of two elements a vector, without a tokenizer: all that the loader looks at, in 3 KB. One layer,
 * with experts; `is_split`: attn_k_b and attn_v_b in place of attn_kv_b. */
static inline void build_tiny_deepseek(gguf_builder *out, int is_split)
{
    static const struct {
        const char *name;
        uint32_t value;
    } counts[] = {
        {"deepseek2.block_count", 1},
        {"deepseek2.embedding_length", 2},
        {"deepseek2.attention.head_count", 1},
        {"deepseek2.feed_forward_length", 2},
        {"deepseek2.context_length", 8},
        {"deepseek2.attention.q_lora_rank", 2},
        {"deepseek2.attention.kv_lora_rank", 2},
        {"deepseek2.attention.key_length_mla", 4},
        {"deepseek2.attention.value_length_mla", 2},
        {"deepseek2.rope.dimension_count", 2},
        {"deepseek2.rope.scaling.original_context_length", 4},
        {"deepseek2.expert_count", 4},
        {"deepseek2.expert_used_count", 2},
        {"deepseek2.expert_shared_count", 1},
        {"deepseek2.expert_feed_forward_length", 2},
        {"deepseek2.expert_gating_func", 2},
        {"deepseek2.expert_group_count", 2},
        {"deepseek2.expert_group_used_count", 1},
    };
    static const struct {
        const char *name;
        uint64_t shape[3];
        int form; /* 0: of both, 1: of those with attn_kv_b, 2: of the others */
    } tensors[] = {
        {"token_embd.weight", {2, 1, 1}, 0},           {"output_norm.weight", {2, 1, 1}, 0},
        {"blk.0.attn_norm.weight", {2, 1, 1}, 0},      {"blk.0.attn_q_a.weight", {2, 2, 1}, 0},
        {"blk.0.attn_q_a_norm.weight", {2, 1, 1}, 0},  {"blk.0.attn_q_b.weight", {2, 4, 1}, 0},
        {"blk.0.attn_kv_a_mqa.weight", {2, 4, 1}, 0},  {"blk.0.attn_kv_a_norm.weight", {2, 1, 1}, 0},
        {"blk.0.attn_kv_b.weight", {2, 4, 1}, 1},      {"blk.0.attn_k_b.weight", {2, 2, 1}, 2},
        {"blk.0.attn_v_b.weight", {2, 2, 1}, 2},       {"blk.0.attn_output.weight", {2, 2, 1}, 0},
        {"blk.0.ffn_norm.weight", {2, 1, 1}, 0},       {"blk.0.ffn_gate_inp.weight", {2, 4, 1}, 0},
        {"blk.0.exp_probs_b.bias", {4, 1, 1}, 0},      {"blk.0.ffn_gate_exps.weight", {2, 2, 4}, 0},
        {"blk.0.ffn_up_exps.weight", {2, 2, 4}, 0},    {"blk.0.ffn_down_exps.weight", {2, 2, 4}, 0},
        {"blk.0.ffn_gate_shexp.weight", {2, 2, 1}, 0}, {"blk.0.ffn_up_shexp.weight", {2, 2, 1}, 0},
        {"blk.0.ffn_down_shexp.weight", {2, 2, 1}, 0},
    };
    enum { num_counts = sizeof(counts) / sizeof(counts[0]), num_tensors = sizeof(tensors) / sizeof(tensors[0]) };
    const int left_out = is_split ? 1 : 2;
    *out = (gguf_builder){0};
    put_header(out, 3, num_tensors - (is_split ? 1 : 2), num_counts + 5);
    put_string_key(out, "general.architecture", "deepseek2");
    put_string_key(out, "deepseek2.rope.scaling.type", "yarn");
    put_bool_key(out, "deepseek2.expert_weights_norm", 1);
    put_key(out, "deepseek2.rope.scaling.factor", FV_GGUF_VALUE_F32);
    put_f32(out, 2.0f);
    put_key(out, "deepseek2.attention.layer_norm_rms_epsilon", FV_GGUF_VALUE_F32);
    put_f32(out, 1e-6f);
    for (int i = 0; i < num_counts; i++) put_u32_key(out, counts[i].name, counts[i].value);
    uint64_t offset = 0;
    for (int i = 0; i < num_tensors; i++) {
        const uint64_t *shape = tensors[i].shape;
        if (tensors[i].form == left_out) continue;
        put_string(out, tensors[i].name);
        put_u32(out, 3);
        for (int d = 0; d < 3; d++) put_u64(out, shape[d]);
        put_u32(out, FV_GGUF_F32);
        put_u64(out, offset);
        offset = (offset + shape[0] * shape[1] * shape[2] * sizeof(float) + 31) / 32 * 32;
    }
    while (out->bytes % 32 != 0) put_u8(out, 0);
    for (uint64_t i = 0; i < offset / sizeof(float); i++) put_f32(out, 0.25f);
}

/* A whole gemma3 model in 22 KB, with a tokenizer and a chat template: of two layers, the second one full. */
static inline void build_tiny_gemma(gguf_builder *out)
{
    enum { hidden = 4, heads = 2, head_size = 32, ffn = 8, layers = 2, vocabulary = 275 };
    static const struct {
        const char *name;
        uint32_t value;
    } counts[] = {
        {"gemma3.block_count", layers},
        {"gemma3.embedding_length", hidden},
        {"gemma3.attention.head_count", heads},
        {"gemma3.attention.head_count_kv", 1},
        {"gemma3.attention.key_length", head_size},
        {"gemma3.attention.value_length", head_size},
        {"gemma3.feed_forward_length", ffn},
        {"gemma3.context_length", 200},
        {"gemma3.attention.sliding_window", 7},
        {"gemma3.attention.sliding_window_pattern", 2},
        {"gemma3.rope.dimension_count", head_size},
    };
    static const struct {
        const char *name;
        uint64_t columns, rows;
    } tensors[] = {
        {"token_embd.weight", hidden, vocabulary},
        {"output_norm.weight", hidden, 1},
        {"blk.%c.attn_norm.weight", hidden, 1},
        {"blk.%c.attn_q.weight", hidden, heads * head_size},
        {"blk.%c.attn_k.weight", hidden, head_size},
        {"blk.%c.attn_v.weight", hidden, head_size},
        {"blk.%c.attn_q_norm.weight", head_size, 1},
        {"blk.%c.attn_k_norm.weight", head_size, 1},
        {"blk.%c.attn_output.weight", heads * head_size, hidden},
        {"blk.%c.post_attention_norm.weight", hidden, 1},
        {"blk.%c.ffn_norm.weight", hidden, 1},
        {"blk.%c.ffn_gate.weight", hidden, ffn},
        {"blk.%c.ffn_up.weight", hidden, ffn},
        {"blk.%c.ffn_down.weight", ffn, hidden},
        {"blk.%c.post_ffw_norm.weight", hidden, 1},
    };
    enum { num_counts = sizeof(counts) / sizeof(counts[0]), num_tensors = sizeof(tensors) / sizeof(tensors[0]) };
    uint64_t offset = 0;
    *out = (gguf_builder){0};
    put_header(out, 3, 2 + layers * (num_tensors - 2), num_counts + 4 + SMALL_SENTENCEPIECE_KEYS);
    put_string_key(out, "general.architecture", "gemma3");
    for (int i = 0; i < num_counts; i++) put_u32_key(out, counts[i].name, counts[i].value);
    put_key(out, "gemma3.rope.freq_base", FV_GGUF_VALUE_F32);
    put_f32(out, 1e6f);
    put_key(out, "gemma3.attention.layer_norm_rms_epsilon", FV_GGUF_VALUE_F32);
    put_f32(out, 1e-6f);
    put_string_key(out, "tokenizer.chat_template", "<start_of_turn>");
    put_small_sentencepiece(out, 256);
    for (char layer = '0'; layer < '0' + layers; layer++) {
        for (int i = layer == '0' ? 0 : 2; i < num_tensors; i++) {
            char name[48];
            strcpy(name, tensors[i].name);
            if (strchr(name, '%')) memmove(strchr(name, '%') + 1, strchr(name, '%') + 2, strlen(strchr(name, '%') + 1));
            if (strchr(name, '%')) *strchr(name, '%') = layer;
            put_tensor_2d(out, name, tensors[i].columns, tensors[i].rows, FV_GGUF_F32, offset);
            offset = (offset + tensors[i].columns * tensors[i].rows * sizeof(float) + 31) / 32 * 32;
        }
    }
    while (out->bytes % 32 != 0) put_u8(out, 0);
    uint32_t seed = 11;
    for (uint64_t i = 0; i < offset / sizeof(float); i++) {
        seed = seed * 1664525u + 1013904223u;
        put_f32(out, (float)(int32_t)seed * 0x1p-31f);
    }
}

/* A valid file: every kind of metadata, a tokenizer, tensors of two types. */
static inline void build_valid_file(gguf_builder *out)
{
    *out = (gguf_builder){0};
    put_header(out, 3, 3, 10 + TINY_TOKENIZER_KEYS);
    put_string_key(out, "general.architecture", "llama");
    put_u32_key(out, "llama.block_count", 2);
    put_key(out, "llama.eps", FV_GGUF_VALUE_F32);
    put_f32(out, 1e-5f);
    put_key(out, "a.u8", FV_GGUF_VALUE_U8);
    put_u8(out, 200);
    put_key(out, "a.i8", FV_GGUF_VALUE_I8);
    put_u8(out, 0xff);
    put_key(out, "a.i64", FV_GGUF_VALUE_I64);
    put_u64(out, 7);
    put_key(out, "a.u64", FV_GGUF_VALUE_U64);
    put_u64(out, (uint64_t)1 << 40);
    put_array_key(out, "a.nested", FV_GGUF_VALUE_ARRAY, 1);
    put_u32(out, FV_GGUF_VALUE_U8);
    put_u64(out, 3);
    put_bytes(out, "xyz", 3);
    put_array_key(out, "a.empty", FV_GGUF_VALUE_STRING, 0);
    put_string_key(out, "tokenizer.chat_template", "<|im_start|>");
    put_tiny_tokenizer(out, "gpt-2", "<|im_start|>");
    put_tensor_2d(out, "weight.f32", 4, 2, FV_GGUF_F32, 0);
    put_tensor_2d(out, "weight.q8_0", 32, 2, FV_GGUF_Q8_0, 32);
    put_tensor_2d(out, "weight.q2_k", 256, 1, 10, 128); /* of a type that cannot be used */
    put_tensor_data(out, 32, 128 + 84);
}

#endif
