/* Open addressing by the pair of ids. */
#include "engine/merge_table.h"

#include <stdlib.h>
#include <string.h>

static uint64_t pair_of(int32_t left, int32_t right) { return (uint64_t)(uint32_t)left << 32 | (uint32_t)right; }

static fv_merge *find_merge_slot(const fv_merge_table *merges, uint64_t pair)
{
    uint64_t hash = pair * 0x9e3779b97f4a7c15u;
    uint64_t slot = (hash ^ hash >> 32) & merges->slot_mask;
    while (merges->slots[slot].pair != FV_MERGE_EMPTY && merges->slots[slot].pair != pair) {
        slot = (slot + 1) & merges->slot_mask;
    }
    return &merges->slots[slot];
}

/* `bytes` has room for the text. */
static fv_status add_merge(fv_merge_table *merges, const fv_vocabulary *vocabulary, fv_text text, int32_t rank,
                           char *bytes)
{
    /* A space ends the left side; it is mapped inside tokens, so there is one. */
    const char *space = text.length > 0 ? memchr(text.data, ' ', text.length) : NULL;
    if (!space) return fv_fail(FV_ERR_IO, "tokenizer.ggml.merges: merge %d is not two tokens", rank);
    const size_t left_stored = (size_t)(space - text.data);
    const fv_text right_stored = {space + 1, text.length - left_stored - 1};
    const size_t left = fv_vocabulary_unmap(bytes, (fv_text){text.data, left_stored});
    const size_t right = fv_vocabulary_unmap(bytes + left, right_stored);
    if (left == 0 || right == 0) return fv_fail(FV_ERR_IO, "tokenizer.ggml.merges: merge %d is not two tokens", rank);

    const int32_t left_id = fv_vocabulary_find(vocabulary, (fv_text){bytes, left}, false);
    const int32_t right_id = fv_vocabulary_find(vocabulary, (fv_text){bytes + left, right}, false);
    const int32_t merged = fv_vocabulary_find(vocabulary, (fv_text){bytes, left + right}, false);
    if (left_id == FV_NO_TOKEN || right_id == FV_NO_TOKEN || merged == FV_NO_TOKEN) {
        return fv_fail(FV_ERR_IO, "tokenizer.ggml.merges: merge %d uses a token that tokenizer.ggml.tokens lacks",
                       rank);
    }
    fv_merge *slot = find_merge_slot(merges, pair_of(left_id, right_id));
    if (slot->pair == FV_MERGE_EMPTY) *slot = (fv_merge){pair_of(left_id, right_id), rank, merged};
    return FV_OK;
}

fv_status fv_merge_table_init(fv_merge_table *merges, const fv_gguf *gguf, const fv_vocabulary *vocabulary)
{
    *merges = (fv_merge_table){0};
    fv_gguf_array texts;
    fv_status status = fv_gguf_find_array(&texts, gguf, "tokenizer.ggml.merges", FV_GGUF_VALUE_STRING);
    if (status != FV_OK) return status;
    if (texts.count > INT32_MAX / 4) {
        return fv_fail(FV_ERR_IO, "%s: %lld merges; accepted: up to %d", fv_gguf_path(gguf), (long long)texts.count,
                       INT32_MAX / 4);
    }
    uint64_t num_slots = 16;
    while (num_slots < 2 * (uint64_t)texts.count) num_slots *= 2;
    merges->slot_mask = num_slots - 1;
    merges->slots = malloc(num_slots * sizeof(*merges->slots));
    char *bytes = malloc(texts.bytes + 1); /* longer than the longest merge */
    if (!merges->slots || !bytes) {
        status = fv_fail(FV_ERR_NO_MEMORY, "no memory for %lld merges", (long long)texts.count);
        goto done;
    }
    for (uint64_t i = 0; i < num_slots; i++) merges->slots[i].pair = FV_MERGE_EMPTY;
    fv_text text;
    for (int32_t rank = 0; status == FV_OK && fv_gguf_array_next_string(&text, &texts); rank++) {
        status = add_merge(merges, vocabulary, text, rank, bytes);
    }
done:
    free(bytes);
    if (status != FV_OK) fv_merge_table_deinit(merges);
    return status;
}

void fv_merge_table_deinit(fv_merge_table *merges)
{
    free(merges->slots);
    *merges = (fv_merge_table){0};
}

static bool find_pair(fv_bpe_pair *pair, const void *model, const fv_bpe_symbol *left, const fv_bpe_symbol *right)
{
    const fv_merge_table *merges = model;
    const fv_merge *merge = find_merge_slot(merges, pair_of(left->id, right->id));
    if (merge->pair == FV_MERGE_EMPTY) return false;
    *pair = (fv_bpe_pair){(double)merge->rank, merge->merged};
    return true;
}

fv_status fv_merge_table_encode(fv_token_list *list, int64_t *num_dropped, fv_bpe *bpe, const fv_merge_table *merges,
                                const fv_vocabulary *vocabulary, fv_text piece)
{
    fv_status status = fv_bpe_begin(bpe, piece.length);
    if (status != FV_OK) return status;
    for (size_t i = 0; i < piece.length; i++) {
        const int32_t id = vocabulary->byte_tokens[(unsigned char)piece.data[i]];
        if (id != FV_NO_TOKEN) fv_bpe_append(bpe, id, (int32_t)i, 1);
    }
    *num_dropped += (int64_t)piece.length - bpe->num_symbols;
    fv_bpe_merge(bpe, find_pair, merges);
    for (int32_t i = bpe->num_symbols > 0 ? 0 : -1; i >= 0 && status == FV_OK; i = bpe->symbols[i].next) {
        status = fv_token_list_append(list, bpe->symbols[i].id);
    }
    return status;
}
