/* What the two kinds of tokenizers share, and a table of what they do not. */
#include "engine/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "engine/merge_table.h"
#include "engine/pre_tokenizer.h"
#include "engine/sentencepiece.h"
#include "engine/special_tokens.h"

/* One call of fv_tokenizer_encode. */
typedef struct encoding {
    const fv_tokenizer *tokenizer;
    fv_token_list *list;
    int64_t num_dropped;
    fv_bpe bpe;
} encoding;

/* What differs. */
typedef struct tokenizer_kind {
    const char *model; /* tokenizer.ggml.model */
    fv_spelling spelling;
    fv_status (*read)(fv_tokenizer *tokenizer, const fv_gguf *gguf); /* after the vocabulary */
    fv_status (*encode)(encoding *call, fv_text text);               /* text without special tokens */
} tokenizer_kind;

struct fv_tokenizer {
    const tokenizer_kind *kind;
    fv_vocabulary vocabulary;
    fv_special_tokens specials;
    fv_merge_table merges;           /* byte-level */
    fv_pre_tokenizer *pre_tokenizer; /* byte-level */
    bool adds_space;                 /* SentencePiece: a document begins with a space of its own */
    int32_t bos;
    int32_t eos;
    int32_t eot;
    int32_t end_of_text;
    bool adds_bos;
};

/* --- the two kinds ------------------------------------------------------------------------------- */

static fv_status read_byte_level(fv_tokenizer *tokenizer, const fv_gguf *gguf)
{
    fv_text pre;
    fv_status status = fv_gguf_find_string(&pre, gguf, "tokenizer.ggml.pre");
    if (status == FV_OK) status = fv_pre_tokenizer_create(&tokenizer->pre_tokenizer, pre);
    if (status == FV_OK) status = fv_merge_table_init(&tokenizer->merges, gguf, &tokenizer->vocabulary);
    if (status == FV_OK) tokenizer->adds_bos = fv_pre_tokenizer_adds_bos(tokenizer->pre_tokenizer);
    return status;
}

static fv_status encode_piece(void *context, const char *piece, size_t length)
{
    encoding *call = context;
    const fv_tokenizer *tokenizer = call->tokenizer;
    const fv_text text = {piece, length};
    if (fv_pre_tokenizer_ignores_merges(tokenizer->pre_tokenizer)) {
        const int32_t whole = fv_vocabulary_find(&tokenizer->vocabulary, text, false);
        if (whole != FV_NO_TOKEN) return fv_token_list_append(call->list, whole);
    }
    return fv_merge_table_encode(call->list, &call->num_dropped, &call->bpe, &tokenizer->merges, &tokenizer->vocabulary,
                                 text);
}

static fv_status encode_byte_level(encoding *call, fv_text text)
{
    return fv_pre_tokenizer_split(call->tokenizer->pre_tokenizer, text.data, text.length, encode_piece, call);
}

static fv_status read_sentencepiece(fv_tokenizer *tokenizer, const fv_gguf *gguf)
{
    static const char space_key[] = "tokenizer.ggml.add_space_prefix";
    static const char trim_key[] = "tokenizer.ggml.remove_extra_whitespaces";
    tokenizer->adds_bos = true;
    tokenizer->adds_space = true;
    bool trims = false;
    fv_status status = FV_OK;
    if (fv_gguf_has(gguf, space_key)) status = fv_gguf_find_bool(&tokenizer->adds_space, gguf, space_key);
    if (status == FV_OK && fv_gguf_has(gguf, trim_key)) status = fv_gguf_find_bool(&trims, gguf, trim_key);
    if (status == FV_OK && trims) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: %s is true; accepted: false", fv_gguf_path(gguf), trim_key);
    }
    return status;
}

static fv_status encode_sentencepiece(encoding *call, fv_text text)
{
    return fv_sentencepiece_encode(call->list, &call->num_dropped, &call->bpe, &call->tokenizer->vocabulary, text);
}

static const tokenizer_kind kinds[] = {
    {"gpt2", FV_SPELLING_BYTE_LEVEL, read_byte_level, encode_byte_level},
    {"llama", FV_SPELLING_SENTENCEPIECE, read_sentencepiece, encode_sentencepiece},
};

static fv_status find_kind(const tokenizer_kind **kind, const fv_gguf *gguf)
{
    fv_text model;
    const fv_status status = fv_gguf_find_string(&model, gguf, "tokenizer.ggml.model");
    if (status != FV_OK) return status;
    for (int32_t i = 0; i < FV_ARRAY_LEN(kinds); i++) {
        *kind = &kinds[i];
        if (model.length == strlen(kinds[i].model) && memcmp(model.data, kinds[i].model, model.length) == 0)
            return FV_OK;
    }
    return fv_fail(FV_ERR_UNSUPPORTED,
                   "%s: tokenizer model '%s'; accepted: gpt2 (byte-level BPE), llama (SentencePiece BPE)",
                   fv_gguf_path(gguf), fv_text_printable(model).text);
}

/* --- creation ------------------------------------------------------------------------------------ */

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
    static const char *const usual[] = {"<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>"};
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

    if (fv_gguf_has(gguf, "tokenizer.ggml.add_bos_token")) {
        status = fv_gguf_find_bool(&tokenizer->adds_bos, gguf, "tokenizer.ggml.add_bos_token");
    }
    if (tokenizer->bos == FV_NO_TOKEN) tokenizer->adds_bos = false;
    return status;
}

fv_status fv_tokenizer_create(fv_tokenizer **tokenizer, const fv_gguf *gguf)
{
    *tokenizer = NULL;
    const tokenizer_kind *kind = NULL;
    fv_status status = find_kind(&kind, gguf);
    if (status != FV_OK) return status;

    fv_tokenizer *created = calloc(1, sizeof(*created));
    if (!created) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a tokenizer");
    created->kind = kind;
    status = fv_vocabulary_init(&created->vocabulary, gguf, kind->spelling);
    if (status == FV_OK) status = fv_special_tokens_init(&created->specials, &created->vocabulary);
    if (status == FV_OK) status = kind->read(created, gguf);
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
    fv_special_tokens_deinit(&tokenizer->specials);
    fv_vocabulary_deinit(&tokenizer->vocabulary);
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

void fv_tokenizer_make_control(fv_tokenizer *tokenizer, const char *text)
{
    const size_t length = strlen(text);
    for (int32_t id = 0; id < tokenizer->vocabulary.num_tokens; id++) {
        fv_token *token = &tokenizer->vocabulary.tokens[id];
        if (!fv_token_is_special(token) || token->bytes.length != length) continue;
        if (memcmp(token->bytes.data, text, length) == 0) token->kind = FV_TOKEN_CONTROL;
    }
}

fv_text fv_tokenizer_token_bytes(const fv_tokenizer *tokenizer, int32_t id)
{
    if (id < 0 || id >= tokenizer->vocabulary.num_tokens) return (fv_text){"", 0};
    return tokenizer->vocabulary.tokens[id].bytes;
}

size_t fv_tokenizer_max_token_bytes(const fv_tokenizer *tokenizer) { return tokenizer->vocabulary.max_token_bytes; }

bool fv_tokenizer_is_control(const fv_tokenizer *tokenizer, int32_t id)
{
    return id >= 0 && id < tokenizer->vocabulary.num_tokens &&
           tokenizer->vocabulary.tokens[id].kind == FV_TOKEN_CONTROL;
}

/* --- encoding ------------------------------------------------------------------------------------ */

static fv_status encode_text(encoding *call, fv_text text, bool with_control)
{
    const fv_tokenizer *tokenizer = call->tokenizer;
    size_t begin = 0; /* of the plain text not yet encoded */
    for (size_t at = 0; at < text.length;) {
        const fv_text rest = {text.data + at, text.length - at};
        const int32_t special = fv_special_tokens_match(&tokenizer->specials, rest, with_control);
        if (special == FV_NO_TOKEN) {
            at++;
            continue;
        }
        fv_status status = tokenizer->kind->encode(call, (fv_text){text.data + begin, at - begin});
        if (status == FV_OK) status = fv_token_list_append(call->list, special);
        if (status != FV_OK) return status;
        at += tokenizer->vocabulary.tokens[special].bytes.length;
        begin = at;
    }
    return tokenizer->kind->encode(call, (fv_text){text.data + begin, text.length - begin});
}

fv_status fv_tokenizer_encode(fv_token_list *list, int64_t *num_dropped, const fv_tokenizer *tokenizer, fv_text text,
                              uint32_t flags)
{
    encoding call = {.tokenizer = tokenizer, .list = list};
    const bool begins = (flags & FV_ENCODE_BEGIN) != 0, with_control = (flags & FV_ENCODE_SPECIAL) != 0;
    fv_status status = FV_OK;
    char *normal = NULL;
    if (begins && tokenizer->adds_bos) status = fv_token_list_append(list, tokenizer->bos);
    if (status == FV_OK && text.length > 0 && tokenizer->kind->spelling == FV_SPELLING_SENTENCEPIECE) {
        status = fv_sentencepiece_normalize(&normal, &text.length, text, begins && tokenizer->adds_space);
        text.data = normal;
    }
    if (status == FV_OK && text.length > 0) status = encode_text(&call, text, with_control);
    free(normal);
    fv_bpe_deinit(&call.bpe);
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
    bool has_space = tokenizer->adds_space;
    for (int64_t i = 0; i < num; i++) {
        fv_text bytes = shown_bytes(tokenizer, ids[i], with_control);
        if (has_space && bytes.length > 0) {
            has_space = false;
            if (bytes.data[0] == ' ') bytes = (fv_text){bytes.data + 1, bytes.length - 1};
        }
        memcpy(*text + *length, bytes.data, bytes.length);
        *length += bytes.length;
    }
    (*text)[*length] = '\0';
    return FV_OK;
}
