/* libFuzzer target: everything that is read from a model file. Metadata, tensors, products with them as the file stores
 * them, tokenizer, chat template, and the model itself where the file is small.
 *
 *     fuzz_gguf -max_total_time=60
 *
 * It needs no corpus: the mutator begins with small valid files of its own, because random bytes
 * would seldom get past the header. */
#include <stdlib.h>
#include <string.h>

#include "../engine/gguf_builder.h"
#include "engine/chat_template.h"
#include "engine/dequantize.h"
#include "engine/model.h"
#include "engine/text_stream.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t bytes, size_t max_bytes, unsigned int seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t bytes, size_t max_bytes); /* of libFuzzer */

enum {
    MAX_ELEMENTS = 4096, /* of a tensor: more finds nothing new */
    MAX_ROWS = 17,       /* of X: enough for panels with the portable kernels */
};

static void read_metadata(const fv_gguf *gguf)
{
    static const fv_gguf_value_type element_types[] = {FV_GGUF_VALUE_STRING, FV_GGUF_VALUE_I32, FV_GGUF_VALUE_F32};
    for (int64_t i = 0; i < fv_gguf_num_keys(gguf); i++) {
        const fv_text name = fv_gguf_key(gguf, i);
        char *key = strndup(name.data, name.length);
        if (!key) return;
        uint32_t number;
        float real;
        bool flag;
        fv_text text;
        fv_gguf_find_u32(&number, gguf, key);
        fv_gguf_find_f32(&real, gguf, key);
        fv_gguf_find_bool(&flag, gguf, key);
        if (fv_gguf_find_string(&text, gguf, key) == FV_OK) free(strndup(text.data, text.length));
        for (int32_t t = 0; t < FV_ARRAY_LEN(element_types); t++) {
            fv_gguf_array array;
            int32_t element;
            if (fv_gguf_find_array(&array, gguf, key, element_types[t]) != FV_OK) continue;
            while (fv_gguf_array_next_string(&text, &array)) free(strndup(text.data, text.length));
            while (fv_gguf_array_next_i32(&element, &array)) continue;
            while (fv_gguf_array_next_f32(&real, &array)) continue;
        }
        free(key);
    }
}

static void read_tensors(const fv_gguf *gguf)
{
    static float out[MAX_ELEMENTS];
    static uint16_t out_bf16[MAX_ELEMENTS];
    for (int64_t i = 0; i < fv_gguf_num_tensors(gguf); i++) {
        const fv_gguf_tensor *tensor = fv_gguf_tensor_at(gguf, i);
        if (tensor->num_elements > MAX_ELEMENTS) continue;
        fv_dequantize_row(out, tensor->data, tensor->type, tensor->num_elements);
        fv_dequantize_row_bf16(out_bf16, tensor->data, tensor->type, tensor->num_elements);
    }
}

/* The library whose weights stay as stored, for the kernels of this CPU, or the portable ones; NULL without memory. */
static fv_gemm_library *find_gemm(bool is_portable)
{
    static fv_gemm_library *gemms[2];
    fv_context *context;
    const fv_context_options options = {
        .struct_size = sizeof(options), .num_threads = 1, .no_plugins = 1, .isa = is_portable ? "portable" : NULL};
    if (gemms[is_portable]) return gemms[is_portable];
    if (fv_context_create(&context, &options) != FV_OK) return NULL;
    if (fv_gemm_create(&gemms[is_portable], context, FV_DTYPE_NONE) != FV_OK) return NULL;
    return fv_gemm_reserve(gemms[is_portable], MAX_ROWS) == FV_OK ? gemms[is_portable] : NULL;
}

/* A weight of a tensor's rows, and one of them twice, times few and many rows of X. */
static void multiply_rows(fv_gemm_library *gemm, const fv_gguf_tensor *tensor)
{
    static float x[MAX_ROWS * MAX_ELEMENTS], y[MAX_ROWS * 2 * MAX_ELEMENTS];
    const int64_t in_features = tensor->shape[0], num_rows = tensor->num_elements / fv_max_i64(1, in_features);
    const fv_gemm_rows part = {tensor->data, tensor->type, num_rows}, parts[] = {part, part};
    for (int64_t i = 0; i < MAX_ROWS * in_features; i++) x[i] = (float)(i % 7 - 3);
    for (int32_t num_parts = 1; num_parts <= FV_ARRAY_LEN(parts); num_parts++) {
        fv_gemm_weight *weight;
        if (fv_gemm_weight_create_of_rows(&weight, gemm, in_features, parts, num_parts) != FV_OK) continue;
        fv_gemm_run(gemm, y, x, weight, 1 + 2 * num_parts, true);
        fv_gemm_run(gemm, y, x, weight, MAX_ROWS, false);
        fv_gemm_weight_destroy(weight);
    }
}

static void multiply_tensors(const fv_gguf *gguf)
{
    for (int32_t is_portable = 0; is_portable <= 1; is_portable++) {
        fv_gemm_library *gemm = find_gemm(is_portable);
        for (int64_t i = 0; gemm && i < fv_gguf_num_tensors(gguf); i++) {
            const fv_gguf_tensor *tensor = fv_gguf_tensor_at(gguf, i);
            if (tensor->num_elements <= MAX_ELEMENTS) multiply_rows(gemm, tensor);
        }
    }
}

static void use_tokenizer(const fv_gguf *gguf)
{
    static const char text[] = "abc ab  a\n<|im_start|> he<start_of_turn>llo\n\n42<|im_end|>\xc3\xa9\xff the";
    fv_tokenizer *tokenizer;
    if (fv_tokenizer_create(&tokenizer, gguf) != FV_OK) return;

    fv_token_list list = {0};
    fv_tokenizer_encode(&list, NULL, tokenizer, (fv_text){text, sizeof(text)}, FV_ENCODE_SPECIAL | FV_ENCODE_BEGIN);
    fv_chat_template chat_template;
    if (fv_chat_template_init(&chat_template, gguf, tokenizer) == FV_OK) {
        const fv_chat_message message = {"user", text};
        fv_chat_template_encode(&list, &chat_template, tokenizer, &message, 1, true);
        char *chat;
        if (fv_chat_template_format(&chat, &chat_template, &message, 1, true) == FV_OK) free(chat);
        fv_chat_template_deinit(&chat_template);
    }
    fv_text_stream stream;
    if (fv_text_stream_init(&stream, tokenizer, true) == FV_OK) {
        for (int64_t i = 0; i < list.num; i++) fv_text_stream_push(&stream, list.ids[i]);
        fv_text_stream_flush(&stream);
        fv_text_stream_deinit(&stream);
    }
    fv_token_list_deinit(&list);
    fv_tokenizer_destroy(tokenizer);
}

/* Loads the model. No shape in the metadata is believed before a tensor of it has been found, so that a small file
 * never makes a large model. */
static void load_model(const fv_gguf *gguf)
{
    fv_gemm_library *gemm = find_gemm(false);
    if (!gemm) return;
    fv_model *model;
    if (fv_model_load(&model, gguf, gemm, NULL, NULL) == FV_OK) fv_model_destroy(model);
}

static void build_tokenizer_only(gguf_builder *file, const char *pre, const char *chat_template)
{
    *file = (gguf_builder){0};
    put_header(file, 2, 0, TINY_TOKENIZER_KEYS + 1);
    put_tiny_tokenizer(file, pre, "<|im_start|>");
    put_string_key(file, "tokenizer.chat_template", chat_template);
}

static void build_sentencepiece_only(gguf_builder *file)
{
    *file = (gguf_builder){0};
    put_header(file, 3, 0, SMALL_SENTENCEPIECE_KEYS + 1);
    put_small_sentencepiece(file, 16);
    put_string_key(file, "tokenizer.chat_template", "{{ bos_token }}<start_of_turn>");
}

static void build_tensors_only(gguf_builder *file)
{
    static const uint32_t types[] = {FV_GGUF_F32,  FV_GGUF_F16,  FV_GGUF_BF16, FV_GGUF_Q4_0, FV_GGUF_Q4_1, FV_GGUF_Q5_0,
                                     FV_GGUF_Q5_1, FV_GGUF_Q8_0, FV_GGUF_Q4_K, FV_GGUF_Q5_K, FV_GGUF_Q6_K};
    uint64_t offset = 0;
    *file = (gguf_builder){0};
    put_header(file, 3, FV_ARRAY_LEN(types), 1);
    put_u32_key(file, "general.alignment", 64);
    for (int32_t i = 0; i < FV_ARRAY_LEN(types); i++) {
        const char name[] = {'t', (char)('a' + i), '\0'};
        const int64_t num = types[i] >= FV_GGUF_Q4_K && types[i] <= FV_GGUF_Q6_K ? 256 : 32;
        put_tensor_2d(file, name, (uint64_t)num, 1, types[i], offset);
        offset = (offset + fv_gguf_type_bytes((int32_t)types[i], num) + 63) / 64 * 64;
    }
    put_tensor_data(file, 64, offset);
}

static void build_seed(gguf_builder *file, unsigned int which)
{
    switch (which % 7) {
    case 0: build_valid_file(file); return;
    case 1: build_tensors_only(file); return;
    case 2: build_tokenizer_only(file, "smollm", "'<|im_start|>system\nBe brief.<|im_end|>\n'"); return;
    case 3: build_sentencepiece_only(file); return;
    case 4: build_tiny_deepseek(file, 0); return;
    case 5: build_tiny_deepseek(file, 1); return;
    default: build_tokenizer_only(file, "llama-bpe", "{{ '<|im_start|>system\\n' + x + '<|im_end|>' }}"); return;
    }
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t bytes, size_t max_bytes, unsigned int seed)
{
    const size_t header_bytes = 24;
    if (bytes < header_bytes || memcmp(data, "GGUF", 4) != 0) {
        gguf_builder file;
        build_seed(&file, seed);
        if (file.bytes <= max_bytes) {
            memcpy(data, file.data, file.bytes);
            bytes = file.bytes;
        }
        free(file.data);
    }
    return LLVMFuzzerMutate(data, bytes, max_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    /* A copy of the exact size: aligned, and a read past its end is seen. */
    uint8_t *copy = malloc(bytes ? bytes : 1);
    if (!copy) return 0;
    if (bytes > 0) memcpy(copy, data, bytes);
    fv_gguf *gguf;
    if (fv_gguf_open_memory(&gguf, copy, bytes) == FV_OK) {
        read_metadata(gguf);
        read_tensors(gguf);
        multiply_tensors(gguf);
        use_tokenizer(gguf);
        load_model(gguf);
        fv_gguf_close(gguf);
    }
    free(copy);
    return 0;
}
