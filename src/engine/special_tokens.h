/* The tokens that are found in a text before anything else: control tokens (structure, never found in
 * the text of a user) and user-defined ones (always found). Of several at one place the longest wins. */
#ifndef FV_ENGINE_SPECIAL_TOKENS_H
#define FV_ENGINE_SPECIAL_TOKENS_H

#include "engine/vocabulary.h"

typedef struct fv_special_tokens {
    const fv_vocabulary *vocabulary; /* borrowed */
    int32_t *ids;                    /* in the order of their bytes */
    int32_t *shorter;                /* place in `ids` of the longest other one that it begins with, or -1 */
    int32_t num;
    bool begins[256]; /* whether one begins with this byte */
} fv_special_tokens;

fv_status fv_special_tokens_init(fv_special_tokens *specials, const fv_vocabulary *vocabulary);
void fv_special_tokens_deinit(fv_special_tokens *specials);

/* The longest one at the beginning of `text`, which is not empty, or FV_NO_TOKEN. */
int32_t fv_special_tokens_match(const fv_special_tokens *specials, fv_text text, bool with_control);

#endif
