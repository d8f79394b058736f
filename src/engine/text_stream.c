/* The buffer holds what the caller has seen, then what is held back, which moves to the front. */
#include "engine/text_stream.h"

#include <stdlib.h>
#include <string.h>

#include "engine/utf8.h"

enum { MAX_HELD = 3 }; /* of a UTF-8 character of 4 bytes */

fv_status fv_text_stream_init(fv_text_stream *stream, const fv_tokenizer *tokenizer, bool with_control)
{
    *stream = (fv_text_stream){.tokenizer = tokenizer, .with_control = with_control};
    stream->buffer = malloc(MAX_HELD + fv_tokenizer_max_token_bytes(tokenizer));
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
    fv_text bytes = fv_tokenizer_token_bytes(stream->tokenizer, id);
    if (!stream->with_control && fv_tokenizer_is_control(stream->tokenizer, id)) bytes.length = 0;
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
