/* The one question about UTF-8 that the tokenizer asks. */
#ifndef FV_ENGINE_UTF8_H
#define FV_ENGINE_UTF8_H

#include <stddef.h>
#include <stdint.h>

#define FV_UTF8_INCOMPLETE (-1)

/* Bytes of the UTF-8 sequence that begins at `text`, 1 to 4, of which `left` (at least 1) are there.
 * 0: the first byte begins no valid sequence (stray, overlong, surrogate, above U+10FFFF).
 * FV_UTF8_INCOMPLETE: valid so far, but the text ends inside the sequence. */
static inline int32_t fv_utf8_sequence(const char *text, size_t left)
{
    const unsigned char lead = (unsigned char)text[0];
    if (lead < 0x80) return 1;
    if (lead < 0xc2 || lead > 0xf4) return 0;
    const int32_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;

    /* The second byte carries the bounds that rule out overlong forms, surrogates and the top. */
    const unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    for (int32_t i = 1; i < length; i++) {
        if ((size_t)i >= left) return FV_UTF8_INCOMPLETE;
        const unsigned char next = (unsigned char)text[i];
        if (next < (i == 1 ? low : 0x80) || next > (i == 1 ? high : 0xbf)) return 0;
    }
    return length;
}

#endif
