/* libFuzzer target: any bytes as the text of a user, through each pre-tokenizer and through SentencePiece. All that has
 * tokens comes back from them, at once and token by token.
 *
 *     fuzz_text -max_total_time=60 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../engine/gguf_builder.h"
#include "core/compiler.h"
#include "engine/sentencepiece.h"
#include "engine/text_stream.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* A token for each byte, by GPT-2's mapping, some merges, and special tokens. */
static void build_byte_level(gguf_builder *file, const char *pre)
{
    static const char spaced_a[] = {'\xc4', '\xa0', 'a', '\0'};
    static const char *const merges[] = {"\xc4\xa0 a", "a b", "ab c", "' s", "1 2", "\xc4\x8a \xc4\x8a"};
    static const char *const others[] = {spaced_a, "ab", "abc", "'s", "12", "\xc4\x8a\xc4\x8a", "<|end|>", "<tab>"};
    enum { num_others = FV_ARRAY_LEN(others), num_specials = 2, num_tokens = 256 + num_others };
    *file = (gguf_builder){0};
    put_header(file, 3, 0, 5);
    put_string_key(file, "tokenizer.ggml.model", "gpt2");
    put_string_key(file, "tokenizer.ggml.pre", pre);
    put_array_key(file, "tokenizer.ggml.tokens", FV_GGUF_VALUE_STRING, num_tokens);
    uint32_t moved = 0x100;
    for (uint32_t byte = 0; byte < 256; byte++) {
        const bool is_moved = byte <= 0x20 || (byte >= 0x7f && byte <= 0xa0) || byte == 0xad;
        const uint32_t point = is_moved ? moved++ : byte;
        const char two[] = {(char)(0xc0 | point >> 6), (char)(0x80 | (point & 0x3f)), '\0'};
        const char one[] = {(char)point, '\0'};
        put_string(file, point < 0x80 ? one : two);
    }
    for (int32_t i = 0; i < num_others; i++) put_string(file, others[i]);
    put_string_array_key(file, "tokenizer.ggml.merges", merges, FV_ARRAY_LEN(merges));
    put_array_key(file, "tokenizer.ggml.token_type", FV_GGUF_VALUE_I32, num_tokens);
    for (int32_t i = 0; i < num_tokens - num_specials; i++) put_u32(file, FV_TOKEN_NORMAL);
    put_u32(file, FV_TOKEN_CONTROL);
    put_u32(file, FV_TOKEN_USER_DEFINED);
}

static void build_sentencepiece(gguf_builder *file)
{
    *file = (gguf_builder){0};
    put_header(file, 3, 0, SMALL_SENTENCEPIECE_KEYS);
    put_small_sentencepiece(file, 256);
}

enum { num_tokenizers = 6 };

static fv_tokenizer *find_tokenizer(int32_t which)
{
    static const char *const pre_tokenizers[num_tokenizers - 1] = {"smollm", "gpt-2", "llama-bpe", "deepseek-v3",
                                                                   "deepseek-llm"};
    static fv_tokenizer *tokenizers[num_tokenizers];
    if (tokenizers[which]) return tokenizers[which];
    gguf_builder file;
    fv_gguf *gguf;
    if (which == num_tokenizers - 1) {
        build_sentencepiece(&file);
    } else {
        build_byte_level(&file, pre_tokenizers[which]);
    }
    if (fv_gguf_open_memory(&gguf, file.data, file.bytes) != FV_OK ||
        fv_tokenizer_create(&tokenizers[which], gguf) != FV_OK) {
        fprintf(stderr, "%s\n", fv_last_error());
        abort();
    }
    fv_gguf_close(gguf);
    free(file.data);
    return tokenizers[which];
}

static void expect_text(fv_text got, fv_text expected, const char *what)
{
    if (got.length == expected.length && memcmp(got.data, expected.data, got.length) == 0) return;
    fprintf(stderr, "%s: %zu bytes came back as %zu\n", what, expected.length, got.length);
    abort();
}

static void check_stream(const fv_tokenizer *tokenizer, const fv_token_list *list, fv_text expected)
{
    fv_text_stream stream;
    size_t length = 0;
    char *all = malloc(expected.length + 1);
    if (!all || fv_text_stream_init(&stream, tokenizer, true) != FV_OK) abort();
    for (int64_t i = 0; i <= list->num; i++) {
        const fv_text part = i < list->num ? fv_text_stream_push(&stream, list->ids[i]) : fv_text_stream_flush(&stream);
        if (part.length > expected.length - length) abort();
        memcpy(all + length, part.data, part.length);
        length += part.length;
    }
    expect_text((fv_text){all, length}, expected, "stream");
    fv_text_stream_deinit(&stream);
    free(all);
}

static void check_text(int32_t which, fv_text text, uint32_t flags)
{
    const fv_tokenizer *tokenizer = find_tokenizer(which);
    const bool is_sentencepiece = which == num_tokenizers - 1, begins = is_sentencepiece && flags & FV_ENCODE_BEGIN;
    fv_token_list list = {0};
    int64_t num_dropped;
    if (fv_tokenizer_encode(&list, &num_dropped, tokenizer, text, flags) != FV_OK || num_dropped != 0) abort();
    char *expected = NULL, *decoded;
    size_t decoded_length;
    fv_text without_bos = text;
    if (is_sentencepiece && fv_sentencepiece_normalize(&expected, &without_bos.length, text, begins) != FV_OK) abort();
    if (expected) without_bos.data = expected;
    if (begins && text.length == 0) without_bos.length = 0; /* no space before nothing */

    const bool has_bos = begins && list.num > 0;
    const fv_token_list rest = {has_bos ? list.ids + 1 : list.ids, list.num - has_bos, 0};
    check_stream(tokenizer, &rest, without_bos);
    if (fv_tokenizer_decode(&decoded, &decoded_length, tokenizer, rest.ids, rest.num, true) != FV_OK) abort();
    if (is_sentencepiece && without_bos.length > 0 && without_bos.data[0] == ' ') {
        without_bos = (fv_text){without_bos.data + 1, without_bos.length - 1}; /* of a document */
    }
    expect_text((fv_text){decoded, decoded_length}, without_bos, "decode");
    free(decoded);
    free(expected);
    fv_token_list_deinit(&list);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static const uint32_t flags[] = {FV_ENCODE_PLAIN, FV_ENCODE_SPECIAL, FV_ENCODE_BEGIN};
    char *copy = malloc(bytes ? bytes : 1); /* of the exact size: a read past its end is seen */
    if (!copy) return 0;
    if (bytes > 0) memcpy(copy, data, bytes);
    for (int32_t which = 0; which < num_tokenizers; which++) {
        for (int32_t i = 0; i < FV_ARRAY_LEN(flags); i++) check_text(which, (fv_text){copy, bytes}, flags[i]);
    }
    free(copy);
    return 0;
}
