/* SentencePiece's byte-pair encoding (Kudo and Richardson, arXiv 1808.06226): a text starts as one symbol
 * per character, spaces included, and the two neighbours that together are the token with the highest
 * score become that token. Characters that are no token are written as the tokens of their bytes. */
#ifndef FV_ENGINE_SENTENCEPIECE_H
#define FV_ENGINE_SENTENCEPIECE_H

#include "engine/bpe.h"

/* The text that is tokenized: each U+2581 is the space that it stands for in the spelling of tokens; with
 * `add_space` a space more comes first. *out is `length` bytes that the caller frees. */
fv_status fv_sentencepiece_normalize(char **out, size_t *length, fv_text text, bool add_space);

/* Appends the tokens of `text`, which is normalized. Bytes without a token are left out and added to
 * *num_dropped. Bytes that are not UTF-8 are characters of their own. */
fv_status fv_sentencepiece_encode(fv_token_list *list, int64_t *num_dropped, fv_bpe *bpe,
                                  const fv_vocabulary *vocabulary, fv_text text);

#endif
