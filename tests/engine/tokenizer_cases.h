/* Tokenizers of real models against recorded cases, for the tests of both kinds of tokenizer. */
#ifndef FV_TESTS_TOKENIZER_CASES_H
#define FV_TESTS_TOKENIZER_CASES_H

#include <cjson/cJSON.h>

#include "engine/tokenizer.h"

typedef struct tokenizer_model {
    fv_gguf *gguf;
    fv_tokenizer *tokenizer;
} tokenizer_model;

/* The model file that an environment variable names; skips the test where it is not set. One at a time. */
tokenizer_model *tokenizer_model_open(const char *variable);
void tokenizer_model_close(tokenizer_model *opened);

/* A file of tests/recordings. The caller frees it with cJSON_Delete. */
cJSON *read_json(const char *name);

/* Writes the bytes of pairs of hexadecimal digits and returns how many. */
size_t parse_hex(char *out, const char *hex);

/* The text of a case; `buffer` is used for those in hex. */
fv_text case_text(const cJSON *item, char *buffer);

void assert_ids(const fv_token_list *list, const cJSON *ids, const char *what);

/* At once and through the stream, which must never hand out half a character of valid text. */
void assert_decodes_to(const fv_tokenizer *tokenizer, const fv_token_list *list, fv_text text);

/* All cases of a recording, with and without reading control tokens, and back to text. */
void check_recorded_texts(const char *variable, const char *name);

/* `length` bytes of each filling: n log n takes about a second for a megabyte, n squared would take hours. */
void check_long_texts(const char *variable, size_t length, const char *const *fillings, int32_t num_fillings);

#endif
