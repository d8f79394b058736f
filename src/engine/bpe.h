/* Byte-pair encoding: a text starts as small symbols, and of all pairs of neighbours that may become one
 * symbol the first in the model's order does, until no pair may. Which pairs these are and what their
 * order is, is the model's: the list of merges of a byte-level model (merge_table.h), or the scores of
 * the tokens of a SentencePiece model (sentencepiece.h). */
#ifndef FV_ENGINE_BPE_H
#define FV_ENGINE_BPE_H

#include "engine/vocabulary.h"

/* A list of token ids that grows. Zero-initialised is empty; fv_token_list_deinit frees it. */
typedef struct fv_token_list {
    int32_t *ids;
    int64_t num;
    int64_t capacity;
} fv_token_list;

fv_status fv_token_list_append(fv_token_list *list, int32_t id);
void fv_token_list_deinit(fv_token_list *list);

/* Some bytes of the text, one after the other. */
typedef struct fv_bpe_symbol {
    int32_t id;     /* FV_NO_TOKEN: bytes that are no token */
    int32_t begin;  /* in the text */
    int32_t length; /* 0: merged into the symbol on its left */
    int32_t previous;
    int32_t next; /* -1 at the ends */
} fv_bpe_symbol;

/* What two neighbours may become. */
typedef struct fv_bpe_pair {
    double order; /* the lowest goes first, of equal ones the leftmost */
    int32_t merged;
} fv_bpe_pair;

/* False: they stay two. `model` is that of fv_bpe_merge. */
typedef bool fv_bpe_find_pair(fv_bpe_pair *pair, const void *model, const fv_bpe_symbol *left,
                              const fv_bpe_symbol *right);

/* The symbols of one text at a time; memory grows to the longest. Zero-initialised is empty. */
typedef struct fv_bpe {
    fv_bpe_symbol *symbols;
    int32_t num_symbols;
    struct fv_bpe_candidate *heap;
    size_t capacity; /* symbols */
} fv_bpe;

void fv_bpe_deinit(fv_bpe *bpe);

/* Starts a text of up to max_symbols symbols, then takes them from left to right. */
fv_status fv_bpe_begin(fv_bpe *bpe, size_t max_symbols);
void fv_bpe_append(fv_bpe *bpe, int32_t id, int32_t begin, int32_t length);

/* Merges to the end. The symbols left are those from the first one along `next`. Time grows as
 * n log n with the number of symbols. */
void fv_bpe_merge(fv_bpe *bpe, fv_bpe_find_pair *find, const void *model);

#endif
