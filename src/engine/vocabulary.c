/* Tokens live in one array, their bytes in one block of memory; a hash table finds ids by bytes. */
#include "engine/vocabulary.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/utf8.h"

/* GPT-2's mapping: printable Latin-1 bytes stand for themselves, the other 68 are moved, in order,
 * to the code points from U+0100. */
enum { MOVED = 0x100, NUM_MOVED = 68 };

static uint32_t code_point_of_byte(uint32_t byte)
{
    if (byte <= 0x20) return MOVED + byte;
    if (byte < 0x7f) return byte;
    if (byte <= 0xa0) return MOVED + 0x21 + byte - 0x7f;
    return byte == 0xad ? MOVED + NUM_MOVED - 1 : byte;
}

/* -1 for a code point that stands for no byte. */
static int32_t byte_of_code_point(uint32_t code_point)
{
    if (code_point < MOVED) return code_point_of_byte(code_point) == code_point ? (int32_t)code_point : -1;
    const uint32_t moved = code_point - MOVED;
    if (moved >= NUM_MOVED) return -1;
    if (moved <= 0x20) return (int32_t)moved;
    return moved == NUM_MOVED - 1 ? 0xad : (int32_t)(moved - 0x21 + 0x7f);
}

size_t fv_vocabulary_unmap(char *out, fv_text text)
{
    size_t length = 0;
    for (size_t i = 0; i < text.length;) {
        const int32_t step = fv_utf8_sequence(text.data + i, text.length - i);
        if (step != 1 && step != 2) return 0;
        uint32_t code_point = (unsigned char)text.data[i];
        if (step == 2) code_point = (code_point & 0x1fu) << 6 | ((unsigned char)text.data[i + 1] & 0x3fu);
        const int32_t byte = byte_of_code_point(code_point);
        if (byte < 0) return 0;
        out[length++] = (char)byte;
        i += (size_t)step;
    }
    return length;
}

static uint32_t hash_bytes(fv_text bytes, bool special)
{
    uint64_t hash = special ? 0x84222325cbf29ce4u : 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes.length; i++) hash = (hash ^ (unsigned char)bytes.data[i]) * 0x100000001b3u;
    return (uint32_t)(hash ^ hash >> 32);
}

static bool is_same(const fv_token *token, fv_text bytes, bool special)
{
    return token->bytes.length == bytes.length && fv_token_is_special(token) == special &&
           memcmp(token->bytes.data, bytes.data, bytes.length) == 0;
}

bool fv_token_is_special(const fv_token *token)
{
    return token->kind == FV_TOKEN_CONTROL || token->kind == FV_TOKEN_USER_DEFINED;
}

/* The slot that holds the token, or the empty one where it belongs. */
static uint32_t find_slot(const fv_vocabulary *vocabulary, fv_text bytes, bool special)
{
    uint32_t slot = hash_bytes(bytes, special) & vocabulary->slot_mask;
    while (vocabulary->slots[slot] != FV_NO_TOKEN &&
           !is_same(&vocabulary->tokens[vocabulary->slots[slot]], bytes, special)) {
        slot = (slot + 1) & vocabulary->slot_mask;
    }
    return slot;
}

int32_t fv_vocabulary_find(const fv_vocabulary *vocabulary, fv_text bytes, bool special)
{
    return vocabulary->slots[find_slot(vocabulary, bytes, special)];
}

static fv_status allocate(fv_vocabulary *vocabulary, int64_t num_tokens, size_t text_bytes)
{
    uint32_t num_slots = 16;
    while (num_slots < 2 * (uint64_t)num_tokens) num_slots *= 2;
    vocabulary->num_tokens = (int32_t)num_tokens;
    vocabulary->slot_mask = num_slots - 1;
    vocabulary->tokens = calloc((size_t)num_tokens, sizeof(*vocabulary->tokens));
    vocabulary->slots = malloc(num_slots * sizeof(*vocabulary->slots));
    vocabulary->texts = malloc(text_bytes + 1); /* bytes are never longer than the stored texts */
    if (!vocabulary->tokens || !vocabulary->slots || !vocabulary->texts) {
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for a vocabulary of %lld tokens", (long long)num_tokens);
    }
    for (uint32_t i = 0; i < num_slots; i++) vocabulary->slots[i] = FV_NO_TOKEN;
    return FV_OK;
}

/* A token's bytes, written to `out`: at most text.length. Returns how many; 0: not in this spelling. */
static size_t undo_byte_level(char *out, fv_text text, fv_token_kind kind)
{
    const bool is_special = kind == FV_TOKEN_CONTROL || kind == FV_TOKEN_USER_DEFINED;
    return is_special ? 0 : fv_vocabulary_unmap(out, text);
}

static int32_t hex_digit(char digit)
{
    if (digit >= '0' && digit <= '9') return digit - '0';
    if (digit >= 'A' && digit <= 'F') return digit - 'A' + 10;
    return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

static size_t undo_byte_token(char *out, fv_text text)
{
    if (text.length != 6 || memcmp(text.data, "<0x", 3) != 0 || text.data[5] != '>') return 0;
    const int32_t high = hex_digit(text.data[3]), low = hex_digit(text.data[4]);
    if (high < 0 || low < 0) return 0;
    *out = (char)(high << 4 | low);
    return 1;
}

static size_t undo_sentencepiece(char *out, fv_text text, fv_token_kind kind)
{
    if (kind == FV_TOKEN_CONTROL) return 0;
    if (kind == FV_TOKEN_BYTE) return undo_byte_token(out, text);
    const size_t space_length = strlen(FV_SENTENCEPIECE_SPACE);
    size_t length = 0;
    for (size_t i = 0; i < text.length;) {
        const bool is_space = text.length - i >= space_length &&
                              memcmp(text.data + i, FV_SENTENCEPIECE_SPACE, space_length) == 0;
        out[length++] = is_space ? ' ' : text.data[i];
        i += is_space ? space_length : 1;
    }
    return length;
}

/* Writes the bytes of a token to `end`, the free part of the texts, and returns the new end. */
static char *store_token(fv_token *token, char *end, fv_text text, fv_token_kind kind, fv_spelling spelling)
{
    size_t length = spelling == FV_SPELLING_BYTE_LEVEL ? undo_byte_level(end, text, kind)
                                                       : undo_sentencepiece(end, text, kind);
    if (length == 0 && text.length > 0) { /* taken as it is */
        memcpy(end, text.data, text.length);
        length = text.length;
    }
    token->kind = kind;
    token->bytes = (fv_text){end, length};
    return end + length;
}

/* Whether text can become this token. */
static bool is_text(const fv_token *token, fv_spelling spelling)
{
    if (spelling == FV_SPELLING_BYTE_LEVEL) return true;
    return token->kind == FV_TOKEN_NORMAL || fv_token_is_special(token);
}

/* The arrays of the file that describe tokens; the last two may be empty. */
typedef struct token_arrays {
    fv_gguf_array texts, kinds, scores;
} token_arrays;

static fv_status fill(fv_vocabulary *vocabulary, token_arrays from, const fv_gguf *gguf, fv_spelling spelling)
{
    fv_text text;
    char *end = vocabulary->texts;
    for (int32_t id = 0; id < vocabulary->num_tokens && fv_gguf_array_next_string(&text, &from.texts); id++) {
        fv_token *token = &vocabulary->tokens[id];
        int32_t kind = FV_TOKEN_NORMAL;
        fv_gguf_array_next_i32(&kind, &from.kinds);
        if (kind < 0 || kind > FV_TOKEN_BYTE) {
            return fv_fail(FV_ERR_IO, "%s: token %d has kind %d; accepted: 0 to %d", fv_gguf_path(gguf), id, kind,
                           FV_TOKEN_BYTE);
        }
        fv_gguf_array_next_f32(&token->score, &from.scores);
        if (!isfinite(token->score)) {
            return fv_fail(FV_ERR_IO, "%s: the score of token %d is no number", fv_gguf_path(gguf), id);
        }
        end = store_token(token, end, text, (fv_token_kind)kind, spelling);
        if (token->bytes.length > vocabulary->max_token_bytes) vocabulary->max_token_bytes = token->bytes.length;
        if (!is_text(token, spelling)) continue;
        const uint32_t slot = find_slot(vocabulary, token->bytes, fv_token_is_special(token));
        if (vocabulary->slots[slot] == FV_NO_TOKEN) vocabulary->slots[slot] = id; /* of equal ones the first */
    }
    return FV_OK;
}

static void list_byte_tokens(fv_vocabulary *vocabulary, fv_spelling spelling)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        const char single = (char)byte;
        vocabulary->byte_tokens[byte] = FV_NO_TOKEN;
        if (spelling == FV_SPELLING_SENTENCEPIECE) continue;
        vocabulary->byte_tokens[byte] = fv_vocabulary_find(vocabulary, (fv_text){&single, 1}, false);
    }
    for (int32_t id = 0; spelling == FV_SPELLING_SENTENCEPIECE && id < vocabulary->num_tokens; id++) {
        const fv_token *token = &vocabulary->tokens[id];
        if (token->kind != FV_TOKEN_BYTE || token->bytes.length != 1) continue;
        vocabulary->byte_tokens[(unsigned char)token->bytes.data[0]] = id;
    }
}

/* An optional array with an element for each token. */
static fv_status find_optional(fv_gguf_array *array, const fv_gguf *gguf, const char *key, fv_gguf_value_type type,
                               int64_t num_tokens)
{
    *array = (fv_gguf_array){0};
    if (!fv_gguf_has(gguf, key)) return FV_OK;
    const fv_status status = fv_gguf_find_array(array, gguf, key, type);
    if (status != FV_OK || array->count == num_tokens || array->count == 0) return status;
    return fv_fail(FV_ERR_IO, "%s: %s has %lld elements for %lld tokens", fv_gguf_path(gguf), key,
                   (long long)array->count, (long long)num_tokens);
}

fv_status fv_vocabulary_init(fv_vocabulary *vocabulary, const fv_gguf *gguf, fv_spelling spelling)
{
    *vocabulary = (fv_vocabulary){0};
    token_arrays from = {0};
    fv_status status = fv_gguf_find_array(&from.texts, gguf, "tokenizer.ggml.tokens", FV_GGUF_VALUE_STRING);
    if (status != FV_OK) return status;
    const int64_t num_tokens = from.texts.count;
    if (num_tokens < 1 || num_tokens > INT32_MAX / 4) {
        return fv_fail(FV_ERR_IO, "%s: a vocabulary of %lld tokens; accepted: 1 to %d", fv_gguf_path(gguf),
                       (long long)num_tokens, INT32_MAX / 4);
    }
    status = find_optional(&from.kinds, gguf, "tokenizer.ggml.token_type", FV_GGUF_VALUE_I32, num_tokens);
    if (status == FV_OK && spelling == FV_SPELLING_SENTENCEPIECE) {
        status = find_optional(&from.scores, gguf, "tokenizer.ggml.scores", FV_GGUF_VALUE_F32, num_tokens);
        if (status == FV_OK && from.scores.count == 0) {
            status = fv_fail(FV_ERR_IO, "%s: tokenizer.ggml.scores is missing or empty", fv_gguf_path(gguf));
        }
    }
    if (status == FV_OK) status = allocate(vocabulary, num_tokens, from.texts.bytes);
    if (status == FV_OK) status = fill(vocabulary, from, gguf, spelling);
    if (status != FV_OK) {
        fv_vocabulary_deinit(vocabulary);
        return status;
    }
    list_byte_tokens(vocabulary, spelling);
    return FV_OK;
}

void fv_vocabulary_deinit(fv_vocabulary *vocabulary)
{
    free(vocabulary->tokens);
    free(vocabulary->slots);
    free(vocabulary->texts);
    *vocabulary = (fv_vocabulary){0};
}
