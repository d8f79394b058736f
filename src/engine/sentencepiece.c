/* Pairs are looked up by their text, not by their ids: a character that is no token may still be part
 * of one. */
#include "engine/sentencepiece.h"

#include <stdlib.h>
#include <string.h>

#include "engine/utf8.h"

fv_status fv_sentencepiece_normalize(char **out, size_t *length, fv_text text, bool add_space)
{
    const size_t space_length = strlen(FV_SENTENCEPIECE_SPACE);
    char *end = malloc(text.length + 1);
    *out = end;
    if (!end) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a text of %zu bytes", text.length);
    if (add_space) *end++ = ' ';
    while (text.length > 0) {
        const char *found = memmem(text.data, text.length, FV_SENTENCEPIECE_SPACE, space_length);
        const size_t before = found ? (size_t)(found - text.data) : text.length;
        memcpy(end, text.data, before);
        end += before;
        if (!found) break;
        *end++ = ' ';
        text = (fv_text){found + space_length, text.length - before - space_length};
    }
    *length = (size_t)(end - *out);
    return FV_OK;
}

typedef struct score_model {
    const fv_vocabulary *vocabulary;
    const char *text;
} score_model;

static bool find_pair(fv_bpe_pair *pair, const void *user, const fv_bpe_symbol *left, const fv_bpe_symbol *right)
{
    const score_model *model = user;
    const size_t length = (size_t)left->length + (size_t)right->length;
    if (length > model->vocabulary->max_token_bytes) return false;
    const int32_t id = fv_vocabulary_find(model->vocabulary, (fv_text){model->text + left->begin, length}, false);
    if (id == FV_NO_TOKEN) return false;
    *pair = (fv_bpe_pair){-(double)model->vocabulary->tokens[id].score, id};
    return true;
}

static void split_characters(fv_bpe *bpe, const fv_vocabulary *vocabulary, fv_text text)
{
    for (size_t i = 0; i < text.length;) {
        const int32_t sequence = fv_utf8_sequence(text.data + i, text.length - i);
        const int32_t length = sequence > 0 ? sequence : 1;
        const int32_t id = fv_vocabulary_find(vocabulary, (fv_text){text.data + i, (size_t)length}, false);
        fv_bpe_append(bpe, id, (int32_t)i, length);
        i += (size_t)length;
    }
}

static fv_status append_bytes(fv_token_list *list, int64_t *num_dropped, const fv_vocabulary *vocabulary, fv_text text)
{
    for (size_t i = 0; i < text.length; i++) {
        const int32_t id = vocabulary->byte_tokens[(unsigned char)text.data[i]];
        const fv_status status = id == FV_NO_TOKEN ? FV_OK : fv_token_list_append(list, id);
        if (status != FV_OK) return status;
        *num_dropped += id == FV_NO_TOKEN;
    }
    return FV_OK;
}

fv_status fv_sentencepiece_encode(fv_token_list *list, int64_t *num_dropped, fv_bpe *bpe,
                                  const fv_vocabulary *vocabulary, fv_text text)
{
    fv_status status = fv_bpe_begin(bpe, text.length);
    if (status != FV_OK) return status;
    split_characters(bpe, vocabulary, text);
    const score_model model = {vocabulary, text.data};
    fv_bpe_merge(bpe, find_pair, &model);
    for (int32_t i = bpe->num_symbols > 0 ? 0 : -1; i >= 0 && status == FV_OK; i = bpe->symbols[i].next) {
        const fv_bpe_symbol *symbol = &bpe->symbols[i];
        if (symbol->id != FV_NO_TOKEN) {
            status = fv_token_list_append(list, symbol->id);
        } else {
            const fv_text bytes = {text.data + symbol->begin, (size_t)symbol->length};
            status = append_bytes(list, num_dropped, vocabulary, bytes);
        }
    }
    return status;
}
