/* The tokens of a model: their bytes, their kinds, and the way back from text to id. Files store tokens in
 * a spelling that is undone once, at loading, so that everything else handles plain bytes. */
#ifndef FV_ENGINE_VOCABULARY_H
#define FV_ENGINE_VOCABULARY_H

#include "engine/gguf.h"

/* Kinds of tokens; the values are those of the file. */
typedef enum fv_token_kind {
    FV_TOKEN_NORMAL = 1,
    FV_TOKEN_UNKNOWN = 2,
    FV_TOKEN_CONTROL = 3,      /* structure, such as <|im_end|>: never the text of a user */
    FV_TOKEN_USER_DEFINED = 4, /* text that is one token wherever it appears */
    FV_TOKEN_UNUSED = 5,
    FV_TOKEN_BYTE = 6,
} fv_token_kind;

#define FV_NO_TOKEN (-1)

typedef enum fv_spelling {
    FV_SPELLING_BYTE_LEVEL = 0, /* each byte is a printable character, by GPT-2's mapping */
    FV_SPELLING_SENTENCEPIECE,  /* a space is U+2581; tokens of kind BYTE are written <0x0A> */
} fv_spelling;

#define FV_SENTENCEPIECE_SPACE "\xe2\x96\x81" /* U+2581 */

typedef struct fv_token {
    fv_text bytes; /* what it stands for */
    fv_token_kind kind;
    float score; /* SentencePiece: of two merges the higher one goes first */
} fv_token;

typedef struct fv_vocabulary {
    fv_token *tokens;
    int32_t num_tokens;
    size_t max_token_bytes;
    int32_t byte_tokens[256]; /* the token of a single byte, or FV_NO_TOKEN */
    char *texts;              /* what the tokens point into */
    int32_t *slots;           /* hash table of ids by bytes, open addressing */
    uint32_t slot_mask;
} fv_vocabulary;

/* Copies tokenizer.ggml.tokens and tokenizer.ggml.token_type, and for SentencePiece
 * tokenizer.ggml.scores; the file may be closed after. On failure nothing is left to free. */
fv_status fv_vocabulary_init(fv_vocabulary *vocabulary, const fv_gguf *gguf, fv_spelling spelling);
void fv_vocabulary_deinit(fv_vocabulary *vocabulary);

/* The id of the token with these bytes, or FV_NO_TOKEN. Special tokens (control and user-defined) and
 * the others are apart: the letters of "<|im_end|>" may be text, too. SentencePiece's tokens for bytes
 * and for unknown text are not found: no text is merged into them. */
int32_t fv_vocabulary_find(const fv_vocabulary *vocabulary, fv_text bytes, bool special);

bool fv_token_is_special(const fv_token *token);

/* Undoes the mapping of a text as stored in the file: writes its bytes, at most text.length, to `out`
 * and returns how many; 0 when a character is outside the mapping. */
size_t fv_vocabulary_unmap(char *out, fv_text text);

#endif
