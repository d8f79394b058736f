/* Vocabularies have up to thousands of special tokens, and some of them begin with a space. So there is
 * no walk over all: those that begin `text` are the last one in the order that is not behind the text, if
 * it does, and the shorter ones that this one begins with.
 *
 *   <a>  <b>  <body>  <br>        "<bold>"  ->  behind <b>, before <body>:  <b>
 */
#include "engine/special_tokens.h"

#include <stdlib.h>
#include <string.h>

static bool begins_with(fv_text text, fv_text start)
{
    return start.length <= text.length && memcmp(text.data, start.data, start.length) == 0;
}

static int compare_texts(fv_text a, fv_text b)
{
    const int order = memcmp(a.data, b.data, a.length < b.length ? a.length : b.length);
    return order != 0 ? order : (a.length > b.length) - (a.length < b.length);
}

/* Of equal ones the first in the vocabulary comes last: it is the one that is found. */
static int compare_tokens(const void *a, const void *b)
{
    const fv_token *first = *(const fv_token *const *)a;
    const fv_token *second = *(const fv_token *const *)b;
    const int order = compare_texts(first->bytes, second->bytes);
    return order != 0 ? order : (first < second) - (first > second);
}

static fv_text bytes_at(const fv_special_tokens *specials, int32_t place)
{
    return specials->vocabulary->tokens[specials->ids[place]].bytes;
}

static void link_shorter(fv_special_tokens *specials)
{
    for (int32_t i = 0; i < specials->num; i++) {
        const fv_text bytes = bytes_at(specials, i);
        int32_t place = i - 1;
        while (place >= 0 && !begins_with(bytes, bytes_at(specials, place))) place = specials->shorter[place];
        specials->shorter[i] = place;
        specials->begins[(unsigned char)bytes.data[0]] = true;
    }
}

fv_status fv_special_tokens_init(fv_special_tokens *specials, const fv_vocabulary *vocabulary)
{
    *specials = (fv_special_tokens){.vocabulary = vocabulary};
    size_t num = 0;
    for (int32_t id = 0; id < vocabulary->num_tokens; id++) num += fv_token_is_special(&vocabulary->tokens[id]);
    const fv_token **order = malloc((num + 1) * sizeof(*order));
    specials->ids = malloc((num + 1) * sizeof(*specials->ids));
    specials->shorter = malloc((num + 1) * sizeof(*specials->shorter));
    if (!order || !specials->ids || !specials->shorter) {
        free(order);
        fv_special_tokens_deinit(specials);
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for %zu special tokens", num);
    }
    for (int32_t id = 0; id < vocabulary->num_tokens; id++) {
        const fv_token *token = &vocabulary->tokens[id];
        if (fv_token_is_special(token) && token->bytes.length > 0) order[specials->num++] = token;
    }
    qsort(order, (size_t)specials->num, sizeof(*order), compare_tokens);
    for (int32_t i = 0; i < specials->num; i++) specials->ids[i] = (int32_t)(order[i] - vocabulary->tokens);
    free(order);
    link_shorter(specials);
    return FV_OK;
}

void fv_special_tokens_deinit(fv_special_tokens *specials)
{
    free(specials->ids);
    free(specials->shorter);
    *specials = (fv_special_tokens){0};
}

int32_t fv_special_tokens_match(const fv_special_tokens *specials, fv_text text, bool with_control)
{
    if (!specials->begins[(unsigned char)text.data[0]]) return FV_NO_TOKEN;
    int32_t begin = 0, end = specials->num; /* those before `begin` are not behind the text, those from `end` on are */
    while (begin < end) {
        const int32_t middle = begin + (end - begin) / 2;
        if (compare_texts(bytes_at(specials, middle), text) <= 0) {
            begin = middle + 1;
        } else {
            end = middle;
        }
    }
    for (int32_t place = begin - 1; place >= 0; place = specials->shorter[place]) {
        const fv_token *token = &specials->vocabulary->tokens[specials->ids[place]];
        if (token->kind == FV_TOKEN_CONTROL && !with_control) continue;
        if (begins_with(text, token->bytes)) return specials->ids[place];
    }
    return FV_NO_TOKEN;
}
