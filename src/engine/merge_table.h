/* The merges of a byte-level model: a piece of text starts as one token per byte, and the pair of
 * neighbours whose merge was learned first becomes one token, until no pair has a merge. */
#ifndef FV_ENGINE_MERGE_TABLE_H
#define FV_ENGINE_MERGE_TABLE_H

#include "engine/bpe.h"

/* A pair of tokens and what they become. `rank` is the place in the list of merges: lower first. */
typedef struct fv_merge {
    uint64_t pair; /* left id in the upper half; FV_MERGE_EMPTY in an unused slot */
    int32_t rank;
    int32_t merged;
} fv_merge;

#define FV_MERGE_EMPTY UINT64_MAX

typedef struct fv_merge_table {
    fv_merge *slots; /* open addressing */
    uint64_t slot_mask;
} fv_merge_table;

/* Reads tokenizer.ggml.merges: "left right" in the stored form. FV_ERR_IO when one is malformed or
 * names a token that the vocabulary lacks. On failure nothing is left to free. */
fv_status fv_merge_table_init(fv_merge_table *merges, const fv_gguf *gguf, const fv_vocabulary *vocabulary);
void fv_merge_table_deinit(fv_merge_table *merges);

/* Appends the tokens of `piece`. Bytes without a token in the vocabulary are left out and added to
 * *num_dropped. */
fv_status fv_merge_table_encode(fv_token_list *list, int64_t *num_dropped, fv_bpe *bpe, const fv_merge_table *merges,
                                const fv_vocabulary *vocabulary, fv_text piece);

#endif
