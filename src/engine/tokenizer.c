/* The three stages of the header in the order in which text meets them: special tokens here, then
 * pre_tokenizer.c, then bpe.c. */
#include "engine/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "engine/pre_tokenizer.h"
#include "engine/utf8.h"

struct fv_tokenizer {
    fv_vocabulary vocabulary;
    fv_merge_table merges;
    fv_pre_tokenizer *pre_tokenizer;
    int32_t *specials; /* ids of control and user-defined tokens, longest text first */
    int32_t num_specials;
    bool begins_special[256]; /* whether a special token begins with this byte */
    int32_t bos;
    int32_t eos;
    int32_t eot;
    int32_t end_of_text;
    bool adds_bos;
};

/* --- creation ------------------------------------------------------------------------------------ */

static fv_status require_byte_level(const fv_gguf *gguf)
{
    static const char accepted[] = "gpt2";
    fv_text model;
    const fv_status status = fv_gguf_find_string(&model, gguf, "tokenizer.ggml.model");
    if (status != FV_OK) return status;
    if (model.length == strlen(accepted) && memcmp(model.data, accepted, model.length) == 0) return FV_OK;
    return fv_fail(FV_ERR_UNSUPPORTED, "%s: tokenizer model '%s'; accepted: %s (byte-level BPE)", fv_gguf_path(gguf),
                   fv_text_printable(model).text, accepted);
}

/* An optional id that has to be in the vocabulary. */
static fv_status read_id(int32_t *id, const fv_tokenizer *tokenizer, const fv_gguf *gguf, const char *key)
{
    *id = FV_NO_TOKEN;
    if (!fv_gguf_has(gguf, key)) return FV_OK;
    uint32_t value;
    const fv_status status = fv_gguf_find_u32(&value, gguf, key);
    if (status != FV_OK) return status;
    if (value >= (uint32_t)tokenizer->vocabulary.num_tokens) {
        return fv_fail(FV_ERR_IO, "%s: %s is %u; accepted: below the %d tokens of the vocabulary", fv_gguf_path(gguf),
                       key, value, tokenizer->vocabulary.num_tokens);
    }
    *id = (int32_t)value;
    return FV_OK;
}

/* Older files do not name the end of a turn: the first of the usual tokens that is there. */
static int32_t guess_eot(const fv_tokenizer *tokenizer)
{
    static const char *const usual[] = {"<|im_end|>", "<|eot_id|>", "<|end|>"};
    int32_t id = FV_NO_TOKEN;
    for (int32_t i = 0; i < FV_ARRAY_LEN(usual) && id == FV_NO_TOKEN; i++) {
        id = fv_tokenizer_find_special(tokenizer, usual[i]);
    }
    return id;
}

static fv_status read_roles(fv_tokenizer *tokenizer, const fv_gguf *gguf)
{
    fv_status status = read_id(&tokenizer->bos, tokenizer, gguf, "tokenizer.ggml.bos_token_id");
    if (status == FV_OK) status = read_id(&tokenizer->eos, tokenizer, gguf, "tokenizer.ggml.eos_token_id");
    if (status == FV_OK) status = read_id(&tokenizer->eot, tokenizer, gguf, "tokenizer.ggml.eot_token_id");
    if (status != FV_OK) return status;
    if (tokenizer->eot == FV_NO_TOKEN) tokenizer->eot = guess_eot(tokenizer);
    tokenizer->end_of_text = fv_tokenizer_find_special(tokenizer, "<|endoftext|>");

    tokenizer->adds_bos = fv_pre_tokenizer_adds_bos(tokenizer->pre_tokenizer);
    if (fv_gguf_has(gguf, "tokenizer.ggml.add_bos_token")) {
        status = fv_gguf_find_bool(&tokenizer->adds_bos, gguf, "tokenizer.ggml.add_bos_token");
    }
    if (tokenizer->bos == FV_NO_TOKEN) tokenizer->adds_bos = false;
    return status;
}

static int compare_lengths(const void *a, const void *b)
{
    const fv_token *first = *(const fv_token *const *)a;
    const fv_token *second = *(const fv_token *const *)b;
    if (first->bytes.length != second->bytes.length) return first->bytes.length > second->bytes.length ? -1 : 1;
    return first < second ? -1 : first > second;
}

static fv_status list_specials(fv_tokenizer *tokenizer)
{
    const fv_vocabulary *vocabulary = &tokenizer->vocabulary;
    int32_t num = 0;
    for (int32_t id = 0; id < vocabulary->num_tokens; id++) num += fv_token_is_special(&vocabulary->tokens[id]);
    const fv_token **order = malloc(((size_t)num + 1) * sizeof(*order));
    tokenizer->specials = malloc(((size_t)num + 1) * sizeof(*tokenizer->specials));
    if (!order || !tokenizer->specials) {
        free(order);
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d special tokens", num);
    }
    num = 0;
    for (int32_t id = 0; id < vocabulary->num_tokens; id++) {
        const fv_token *token = &vocabulary->tokens[id];
        if (!fv_token_is_special(token) || token->bytes.length == 0) continue;
        tokenizer->begins_special[(unsigned char)token->bytes.data[0]] = true;
        order[num++] = token;
    }
    qsort(order, (size_t)num, sizeof(*order), compare_lengths);
    for (int32_t i = 0; i < num; i++) tokenizer->specials[i] = (int32_t)(order[i] - vocabulary->tokens);
    tokenizer->num_specials = num;
    free(order);
    return FV_OK;
}

fv_status fv_tokenizer_create(fv_tokenizer **tokenizer, const fv_gguf *gguf)
{
    *tokenizer = NULL;
    fv_text pre;
    fv_status status = require_byte_level(gguf);
    if (status == FV_OK) status = fv_gguf_find_string(&pre, gguf, "tokenizer.ggml.pre");
    if (status != FV_OK) return status;

    fv_tokenizer *created = calloc(1, sizeof(*created));
    if (!created) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a tokenizer");
    status = fv_pre_tokenizer_create(&created->pre_tokenizer, pre);
    if (status == FV_OK) status = fv_vocabulary_init(&created->vocabulary, gguf);
    if (status == FV_OK) status = fv_merge_table_init(&created->merges, gguf, &created->vocabulary);
    if (status == FV_OK) status = list_specials(created);
    if (status == FV_OK) status = read_roles(created, gguf);
    if (status != FV_OK) {
        fv_tokenizer_destroy(created);
        return status;
    }
    *tokenizer = created;
    return FV_OK;
}

void fv_tokenizer_destroy(fv_tokenizer *tokenizer)
{
    if (!tokenizer) return;
    fv_pre_tokenizer_destroy(tokenizer->pre_tokenizer);
    fv_merge_table_deinit(&tokenizer->merges);
    fv_vocabulary_deinit(&tokenizer->vocabulary);
    free(tokenizer->specials);
    free(tokenizer);
}

/* --- facts --------------------------------------------------------------------------------------- */

int32_t fv_tokenizer_num_tokens(const fv_tokenizer *tokenizer) { return tokenizer->vocabulary.num_tokens; }

int32_t fv_tokenizer_bos(const fv_tokenizer *tokenizer) { return tokenizer->bos; }

int32_t fv_tokenizer_eos(const fv_tokenizer *tokenizer) { return tokenizer->eos; }

int32_t fv_tokenizer_eot(const fv_tokenizer *tokenizer) { return tokenizer->eot; }

bool fv_tokenizer_adds_bos(const fv_tokenizer *tokenizer) { return tokenizer->adds_bos; }

bool fv_tokenizer_is_end(const fv_tokenizer *tokenizer, int32_t id)
{
    return id >= 0 && (id == tokenizer->eos || id == tokenizer->eot || id == tokenizer->end_of_text);
}

int32_t fv_tokenizer_find_special(const fv_tokenizer *tokenizer, const char *text)
{
    return fv_vocabulary_find(&tokenizer->vocabulary, (fv_text){text, strlen(text)}, true);
}

fv_text fv_tokenizer_token_bytes(const fv_tokenizer *tokenizer, int32_t id)
{
    if (id < 0 || id >= tokenizer->vocabulary.num_tokens) return (fv_text){"", 0};
    return tokenizer->vocabulary.tokens[id].bytes;
}

bool fv_tokenizer_is_control(const fv_tokenizer *tokenizer, int32_t id)
{
    return id >= 0 && id < tokenizer->vocabulary.num_tokens &&
           tokenizer->vocabulary.tokens[id].kind == FV_TOKEN_CONTROL;
}

/* --- encoding ------------------------------------------------------------------------------------ */

/* One call of fv_tokenizer_encode. */
typedef struct encoding {
    const fv_tokenizer *tokenizer;
    fv_token_list *list;
    int64_t num_dropped;
    fv_bpe_scratch scratch;
} encoding;

static fv_status encode_piece(void *context, const char *piece, size_t length)
{
    encoding *call = context;
    const fv_tokenizer *tokenizer = call->tokenizer;
    const fv_text text = {piece, length};
    if (fv_pre_tokenizer_ignores_merges(tokenizer->pre_tokenizer)) {
        const int32_t whole = fv_vocabulary_find(&tokenizer->vocabulary, text, false);
        if (whole != FV_NO_TOKEN) return fv_token_list_append(call->list, whole);
    }
    return fv_bpe_encode(call->list, &call->num_dropped, &call->scratch, &tokenizer->merges, &tokenizer->vocabulary,
                         text);
}

/* The longest special token at the beginning of `text`, or FV_NO_TOKEN. */
static int32_t match_special(const fv_tokenizer *tokenizer, const char *text, size_t length, bool with_control)
{
    if (!tokenizer->begins_special[(unsigned char)text[0]]) return FV_NO_TOKEN;
    for (int32_t i = 0; i < tokenizer->num_specials; i++) {
        const fv_token *token = &tokenizer->vocabulary.tokens[tokenizer->specials[i]];
        if (token->kind == FV_TOKEN_CONTROL && !with_control) continue;
        if (token->bytes.length > length || memcmp(token->bytes.data, text, token->bytes.length) != 0) continue;
        return tokenizer->specials[i];
    }
    return FV_NO_TOKEN;
}

static fv_status encode_text(encoding *call, fv_text text, bool with_control)
{
    const fv_tokenizer *tokenizer = call->tokenizer;
    size_t begin = 0; /* of the plain text not yet encoded */
    for (size_t at = 0; at < text.length;) {
        const int32_t special = match_special(tokenizer, text.data + at, text.length - at, with_control);
        if (special == FV_NO_TOKEN) {
            at++;
            continue;
        }
        fv_status status = fv_pre_tokenizer_split(tokenizer->pre_tokenizer, text.data + begin, at - begin, encode_piece,
                                                  call);
        if (status == FV_OK) status = fv_token_list_append(call->list, special);
        if (status != FV_OK) return status;
        at += tokenizer->vocabulary.tokens[special].bytes.length;
        begin = at;
    }
    return fv_pre_tokenizer_split(tokenizer->pre_tokenizer, text.data + begin, text.length - begin, encode_piece, call);
}

fv_status fv_tokenizer_encode(fv_token_list *list, int64_t *num_dropped, const fv_tokenizer *tokenizer, fv_text text,
                              uint32_t flags)
{
    encoding call = {.tokenizer = tokenizer, .list = list};
    fv_status status = FV_OK;
    if ((flags & FV_ENCODE_BOS) && tokenizer->adds_bos) status = fv_token_list_append(list, tokenizer->bos);
    if (status == FV_OK && text.length > 0) status = encode_text(&call, text, (flags & FV_ENCODE_SPECIAL) != 0);
    fv_bpe_scratch_deinit(&call.scratch);
    if (num_dropped) *num_dropped = call.num_dropped;
    return status;
}

/* --- decoding ------------------------------------------------------------------------------------ */

static fv_text shown_bytes(const fv_tokenizer *tokenizer, int32_t id, bool with_control)
{
    if (!with_control && fv_tokenizer_is_control(tokenizer, id)) return (fv_text){"", 0};
    return fv_tokenizer_token_bytes(tokenizer, id);
}

fv_status fv_tokenizer_decode(char **text, size_t *length, const fv_tokenizer *tokenizer, const int32_t *ids,
                              int64_t num, bool with_control)
{
    size_t total = 0;
    for (int64_t i = 0; i < num; i++) total += shown_bytes(tokenizer, ids[i], with_control).length;
    *text = malloc(total + 1);
    if (!*text) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a text of %zu bytes", total);
    *length = 0;
    for (int64_t i = 0; i < num; i++) {
        const fv_text bytes = shown_bytes(tokenizer, ids[i], with_control);
        memcpy(*text + *length, bytes.data, bytes.length);
        *length += bytes.length;
    }
    (*text)[total] = '\0';
    return FV_OK;
}

enum { MAX_HELD = 3 }; /* of a UTF-8 character of 4 bytes */

fv_status fv_text_stream_init(fv_text_stream *stream, const fv_tokenizer *tokenizer, bool with_control)
{
    *stream = (fv_text_stream){.tokenizer = tokenizer, .with_control = with_control};
    stream->buffer = malloc(MAX_HELD + tokenizer->vocabulary.max_token_bytes);
    if (!stream->buffer) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a text stream");
    return FV_OK;
}

void fv_text_stream_deinit(fv_text_stream *stream)
{
    free(stream->buffer);
    *stream = (fv_text_stream){0};
}

/* Bytes at the end of `text` that begin a character and do not finish it. */
static size_t unfinished_bytes(const char *text, size_t length)
{
    for (size_t back = 1; back <= MAX_HELD && back <= length; back++) {
        const char *tail = text + length - back;
        if (((unsigned char)*tail & 0xc0) == 0x80) continue; /* inside a character: look further back */
        return fv_utf8_sequence(tail, back) == FV_UTF8_INCOMPLETE ? back : 0;
    }
    return 0;
}

fv_text fv_text_stream_push(fv_text_stream *stream, int32_t id)
{
    memmove(stream->buffer, stream->buffer + stream->num_shown, stream->num_held);
    const fv_text bytes = shown_bytes(stream->tokenizer, id, stream->with_control);
    memcpy(stream->buffer + stream->num_held, bytes.data, bytes.length);
    const size_t length = stream->num_held + bytes.length;
    stream->num_held = unfinished_bytes(stream->buffer, length);
    stream->num_shown = length - stream->num_held;
    return (fv_text){stream->buffer, stream->num_shown};
}

fv_text fv_text_stream_flush(fv_text_stream *stream)
{
    const fv_text rest = {stream->buffer + stream->num_shown, stream->num_held};
    stream->num_held = 0;
    return rest;
}
