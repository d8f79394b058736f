/* Byte-pair encoding: a piece of text starts as one token per byte, and the pair of neighbours whose
 * merge was learned first becomes one token, until no pair has a merge. */
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

/* Memory for one piece at a time; grows to the longest. Zero-initialised is empty. */
typedef struct fv_bpe_scratch {
    struct fv_bpe_symbol *symbols;
    struct fv_bpe_candidate *heap;
    size_t capacity; /* bytes of text that both have room for */
} fv_bpe_scratch;

void fv_bpe_scratch_deinit(fv_bpe_scratch *scratch);

/* Appends the tokens of `piece`. Bytes without a token in the vocabulary are left out and added to
 * *num_dropped. Time grows as n log n with the length of the piece. */
fv_status fv_bpe_encode(fv_token_list *list, int64_t *num_dropped, fv_bpe_scratch *scratch,
                        const fv_merge_table *merges, const fv_vocabulary *vocabulary, fv_text piece);

#endif
