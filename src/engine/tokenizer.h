/* The tokenizer of a model as its GGUF file stores it. There are two kinds, both byte-pair encoding:
 *
 *   tokenizer.ggml.model   gpt2: byte-level                 llama: SentencePiece
 *   "Hi<|im_end|> you"     "Hi" [<|im_end|>] " you"         the same     special tokens (special_tokens.h)
 *   text between           pieces that no token crosses     one piece    pre-tokenizer (pre_tokenizer.h)
 *   a piece                merges by rank, from bytes       merges by score, from characters
 *                          (merge_table.h)                  (sentencepiece.h)
 *
 * Text is bytes; it needs not be valid UTF-8, and decoding gives back the bytes that were encoded, with
 * two exceptions. Bytes that the vocabulary has no token for are left out and counted: in byte-level
 * ones some control characters and bytes that no UTF-8 text contains, as Hugging Face's tokenizers do.
 * And to SentencePiece the character U+2581 is a space. */
#ifndef FV_ENGINE_TOKENIZER_H
#define FV_ENGINE_TOKENIZER_H

#include "engine/bpe.h"

typedef struct fv_tokenizer fv_tokenizer;

/* Copies what it needs; the file may be closed after. FV_ERR_IO when a key is missing or wrong,
 * FV_ERR_UNSUPPORTED for another tokenizer model, pre-tokenizer or normalizer, with those accepted. */
fv_status fv_tokenizer_create(fv_tokenizer **tokenizer, const fv_gguf *gguf);

/* Takes NULL. */
void fv_tokenizer_destroy(fv_tokenizer *tokenizer);

/* All tokens with this text of a special token become control tokens: text is never read as one of them, and they are
 * not shown. For markers that a file calls user-defined. Before anything else uses the tokenizer. */
void fv_tokenizer_make_control(fv_tokenizer *tokenizer, const char *text);

/* After that a tokenizer does not change: any number of threads may use it at once. */

int32_t fv_tokenizer_num_tokens(const fv_tokenizer *tokenizer);

/* FV_NO_TOKEN where the file names none. */
int32_t fv_tokenizer_bos(const fv_tokenizer *tokenizer);
int32_t fv_tokenizer_eos(const fv_tokenizer *tokenizer);
int32_t fv_tokenizer_eot(const fv_tokenizer *tokenizer); /* end of a turn of a chat */

/* Whether the model wants the BOS token before a text. */
bool fv_tokenizer_adds_bos(const fv_tokenizer *tokenizer);

/* True for the tokens at which generation stops: EOS, end of turn, <|endoftext|>. */
bool fv_tokenizer_is_end(const fv_tokenizer *tokenizer, int32_t id);

/* The id of the special token with this text, or FV_NO_TOKEN. */
int32_t fv_tokenizer_find_special(const fv_tokenizer *tokenizer, const char *text);

/* What a token stands for. Bytes, not always whole characters; empty for an id outside the
 * vocabulary. Belongs to the tokenizer. */
fv_text fv_tokenizer_token_bytes(const fv_tokenizer *tokenizer, int32_t id);
size_t fv_tokenizer_max_token_bytes(const fv_tokenizer *tokenizer);
bool fv_tokenizer_is_control(const fv_tokenizer *tokenizer, int32_t id);

typedef enum fv_encode_flags {
    FV_ENCODE_PLAIN = 0,
    FV_ENCODE_SPECIAL = 1, /* control tokens written in the text, such as <|im_end|>, become that token;
                              never for text from users. User-defined tokens are always found. */
    FV_ENCODE_BEGIN = 2,   /* the text begins a document: BOS and a space come before it, each if the model
                              wants it */
} fv_encode_flags;

/* Appends the tokens of `text` to `list`. `flags`: fv_encode_flags. `num_dropped` (may be NULL) is how many
 * bytes had no token.
 * On failure the list may hold part of the tokens. */
fv_status fv_tokenizer_encode(fv_token_list *list, int64_t *num_dropped, const fv_tokenizer *tokenizer, fv_text text,
                              uint32_t flags);

/* The text of a document, without the space that FV_ENCODE_BEGIN put before it. Nothing for control
 * tokens unless `with_control`. *text is zero-terminated memory of `length` bytes and one more, which the
 * caller frees. */
fv_status fv_tokenizer_decode(char **text, size_t *length, const fv_tokenizer *tokenizer, const int32_t *ids,
                              int64_t num, bool with_control);

#endif
