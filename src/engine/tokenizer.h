/* Byte-level BPE tokenizer as a GGUF file stores it: vocabulary, merges, kinds of tokens, name of the
 * pre-tokenizer. Text goes through three stages:
 *
 *   "Hi<|im_end|> you"  --special tokens-->  "Hi" [<|im_end|>] " you"
 *                       --pre-tokenizer-->   pieces that no token crosses
 *                       --BPE-->             tokens
 *
 * Text is bytes; it needs not be valid UTF-8, and decoding gives back the bytes that were encoded,
 * except those that the vocabulary has no token for (some control characters and bytes that no
 * UTF-8 text contains: they are left out, as Hugging Face's tokenizers do, and counted). */
#ifndef FV_ENGINE_TOKENIZER_H
#define FV_ENGINE_TOKENIZER_H

#include "engine/bpe.h"

typedef struct fv_tokenizer fv_tokenizer;

/* Copies what it needs; the file may be closed after. FV_ERR_IO when a key is missing or wrong,
 * FV_ERR_UNSUPPORTED for another tokenizer model or pre-tokenizer, with those accepted. */
fv_status fv_tokenizer_create(fv_tokenizer **tokenizer, const fv_gguf *gguf);

/* Takes NULL. */
void fv_tokenizer_destroy(fv_tokenizer *tokenizer);

/* After creation a tokenizer does not change: any number of threads may use it at once. */

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
bool fv_tokenizer_is_control(const fv_tokenizer *tokenizer, int32_t id);

typedef enum fv_encode_flags {
    FV_ENCODE_PLAIN = 0,
    FV_ENCODE_SPECIAL = 1, /* control tokens written in the text, such as <|im_end|>, become that token;
                              never for text from users. User-defined tokens are always found. */
    FV_ENCODE_BOS = 2,     /* begin with BOS if the model wants it */
} fv_encode_flags;

/* Appends the tokens of `text` to `list`. `num_dropped` (may be NULL) is how many bytes had no token.
 * On failure the list may hold part of the tokens. */
fv_status fv_tokenizer_encode(fv_token_list *list, int64_t *num_dropped, const fv_tokenizer *tokenizer, fv_text text,
                              uint32_t flags);

/* Appends nothing for control tokens unless `with_control`. *text is zero-terminated memory of
 * `length` bytes and one more, which the caller frees. */
fv_status fv_tokenizer_decode(char **text, size_t *length, const fv_tokenizer *tokenizer, const int32_t *ids,
                              int64_t num, bool with_control);

/* Decodes token by token for a display that takes whole UTF-8 characters only: an unfinished character
 * at the end of a token is held back until the next one. Bytes that can never become valid UTF-8
 * pass through. */
typedef struct fv_text_stream {
    const fv_tokenizer *tokenizer; /* borrowed */
    bool with_control;
    char *buffer; /* what is held back, then the next token */
    size_t num_held;
    size_t num_shown; /* bytes at the front of the buffer that the caller has seen */
} fv_text_stream;

fv_status fv_text_stream_init(fv_text_stream *stream, const fv_tokenizer *tokenizer, bool with_control);
void fv_text_stream_deinit(fv_text_stream *stream);

/* The text that is complete now, maybe empty; valid until the next call on this stream. */
fv_text fv_text_stream_push(fv_text_stream *stream, int32_t id);

/* What is still held back: the text has ended inside a character. */
fv_text fv_text_stream_flush(fv_text_stream *stream);

#endif
