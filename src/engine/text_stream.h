/* Decodes token by token for a display that takes whole UTF-8 characters only: an unfinished character
 * at the end of a token is held back until the next one. Bytes that can never become valid UTF-8
 * pass through. The stream continues a text: a space at its beginning stays. */
#ifndef FV_ENGINE_TEXT_STREAM_H
#define FV_ENGINE_TEXT_STREAM_H

#include "engine/tokenizer.h"

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
