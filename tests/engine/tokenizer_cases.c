#include "engine/tokenizer_cases.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "engine/gguf_builder.h"
#include "engine/text_stream.h"

#ifndef FV_TEST_DATA_DIR
#define FV_TEST_DATA_DIR "tests"
#endif

tokenizer_model *tokenizer_model_open(const char *variable)
{
    static tokenizer_model opened;
    const char *path = getenv(variable);
    if (!path || !*path) {
        print_message("%s is not set: the test on a real model file is skipped\n", variable);
        skip();
    }
    if (fv_gguf_open(&opened.gguf, path) != FV_OK) fail_msg("%s", fv_last_error());
    if (fv_tokenizer_create(&opened.tokenizer, opened.gguf) != FV_OK) fail_msg("%s", fv_last_error());
    return &opened;
}

void tokenizer_model_close(tokenizer_model *opened)
{
    fv_tokenizer_destroy(opened->tokenizer);
    fv_gguf_close(opened->gguf);
}

cJSON *read_json(const char *name)
{
    char path[1024];
    snprintf(path, sizeof(path), "%s/recordings/%s", FV_TEST_DATA_DIR, name);
    FILE *file = fopen(path, "rb");
    if (!file) fail_msg("cannot open %s", path);
    gguf_builder text = {0};
    char chunk[4096];
    for (size_t got; (got = fread(chunk, 1, sizeof(chunk), file)) > 0;) put_bytes(&text, chunk, got);
    fclose(file);
    cJSON *json = cJSON_ParseWithLength((const char *)text.data, text.bytes);
    free(text.data);
    if (!json) fail_msg("%s is not JSON", path);
    return json;
}

size_t parse_hex(char *out, const char *hex)
{
    const size_t length = strlen(hex) / 2;
    for (size_t i = 0; i < length; i++) {
        unsigned value = 0;
        assert_int_equal(sscanf(hex + 2 * i, "%2x", &value), 1);
        out[i] = (char)value;
    }
    return length;
}

fv_text case_text(const cJSON *item, char *buffer)
{
    const cJSON *hex = cJSON_GetObjectItem(item, "hex");
    if (hex) return (fv_text){buffer, parse_hex(buffer, hex->valuestring)};
    const char *text = cJSON_GetObjectItem(item, "text")->valuestring;
    return (fv_text){text, strlen(text)};
}

void assert_ids(const fv_token_list *list, const cJSON *ids, const char *what)
{
    int64_t i = 0;
    const cJSON *id;
    cJSON_ArrayForEach(id, ids)
    {
        if (i >= list->num || list->ids[i] != id->valueint) {
            fail_msg("'%s': token %lld is %d, recorded %d", what, (long long)i, i < list->num ? list->ids[i] : -1,
                     id->valueint);
        }
        i++;
    }
    if (i != list->num) fail_msg("'%s': %lld tokens, recorded %lld", what, (long long)list->num, (long long)i);
}

void assert_decodes_to(const fv_tokenizer *tokenizer, const fv_token_list *list, fv_text text)
{
    char *decoded;
    size_t length;
    assert_int_equal(fv_tokenizer_decode(&decoded, &length, tokenizer, list->ids, list->num, true), FV_OK);
    assert_int_equal(length, text.length);
    assert_memory_equal(decoded, text.data, length);
    free(decoded);

    fv_text_stream stream;
    assert_int_equal(fv_text_stream_init(&stream, tokenizer, true), FV_OK);
    size_t at = 0;
    for (int64_t i = 0; i <= list->num; i++) {
        const fv_text part = i < list->num ? fv_text_stream_push(&stream, list->ids[i]) : fv_text_stream_flush(&stream);
        assert_true(part.length <= text.length - at);
        assert_memory_equal(part.data, text.data + at, part.length);
        at += part.length;
        const bool inside_character = at < text.length && ((unsigned char)text.data[at] & 0xc0) == 0x80;
        if (i < list->num && inside_character) fail_msg("the stream cut a character at byte %zu", at);
    }
    assert_int_equal(at, text.length);
    fv_text_stream_deinit(&stream);
}

/* What SentencePiece makes of a text: U+2581 is a space to it. */
static fv_text with_spaces(const tokenizer_model *opened, fv_text text, char *copy)
{
    fv_text model;
    assert_int_equal(fv_gguf_find_string(&model, opened->gguf, "tokenizer.ggml.model"), FV_OK);
    if (model.length != 5 || memcmp(model.data, "llama", 5) != 0) return text;
    size_t length = 0;
    for (size_t i = 0; i < text.length;) {
        const bool is_space = text.length - i >= 3 && memcmp(text.data + i, "\xe2\x96\x81", 3) == 0;
        copy[length++] = is_space ? ' ' : text.data[i];
        i += is_space ? 3 : 1;
    }
    return (fv_text){copy, length};
}

void check_recorded_texts(const char *variable, const char *name)
{
    tokenizer_model *opened = tokenizer_model_open(variable);
    cJSON *json = read_json(name);
    const cJSON *item;
    int32_t num = 0;
    cJSON_ArrayForEach(item, cJSON_GetObjectItem(json, "cases"))
    {
        char buffer[256], spaced[8192];
        const fv_text text = case_text(item, buffer);
        assert_true(text.length <= sizeof(spaced));
        for (int32_t special = 0; special < 2; special++) {
            const cJSON *ids = cJSON_GetObjectItem(item, special ? "ids" : "plain_ids");
            if (!ids) continue;
            fv_token_list list = {0};
            int64_t num_dropped;
            assert_int_equal(fv_tokenizer_encode(&list, &num_dropped, opened->tokenizer, text,
                                                 special ? FV_ENCODE_SPECIAL : FV_ENCODE_PLAIN),
                             FV_OK);
            assert_ids(&list, ids, text.data);
            if (num_dropped == 0) assert_decodes_to(opened->tokenizer, &list, with_spaces(opened, text, spaced));
            fv_token_list_deinit(&list);
        }
        num++;
    }
    assert_true(num >= 200);
    cJSON_Delete(json);
    tokenizer_model_close(opened);
}

void check_long_texts(const char *variable, size_t length, const char *const *fillings, int32_t num_fillings)
{
    tokenizer_model *opened = tokenizer_model_open(variable);
    char *text = malloc(length);
    assert_non_null(text);
    for (int32_t f = 0; f < num_fillings; f++) {
        for (size_t i = 0; i < length; i++) text[i] = fillings[f][i % strlen(fillings[f])];
        const clock_t begin = clock();
        fv_token_list list = {0};
        int64_t num_dropped;
        assert_int_equal(
            fv_tokenizer_encode(&list, &num_dropped, opened->tokenizer, (fv_text){text, length}, FV_ENCODE_SPECIAL),
            FV_OK);
        if (num_dropped == 0) assert_decodes_to(opened->tokenizer, &list, (fv_text){text, length});
        fv_token_list_deinit(&list);
        const double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
        if (!(seconds < 30.0)) fail_msg("filling '%s' took %.1f s", fillings[f], seconds); /* generous: sanitizers */
    }
    free(text);
    tokenizer_model_close(opened);
}
