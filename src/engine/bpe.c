/* The symbols of a piece are a linked list, the possible merges a heap ordered by rank and then by
 * position. A merge changes the list in place; candidates of the heap that it made stale are found
 * out when they are popped, because their two tokens are no longer there.
 *
 *   h e l l o      heap: (l l), (h e), ...
 *   h e [ll] o     the pairs (e, ll) and (ll, o) are pushed, if they have a merge
 */
#include "engine/bpe.h"

#include <stdlib.h>
#include <string.h>

typedef struct fv_bpe_symbol {
    int32_t id; /* FV_NO_TOKEN once merged into the one on its left */
    int32_t previous;
    int32_t next; /* -1 at the ends */
} symbol;

typedef struct fv_bpe_candidate {
    int32_t rank;
    int32_t position; /* of the left symbol */
    int32_t left_id;
    int32_t right_id;
    int32_t merged;
} candidate;

enum { MAX_PIECE_BYTES = 1 << 30 };

fv_status fv_token_list_append(fv_token_list *list, int32_t id)
{
    if (list->num == list->capacity) {
        const int64_t capacity = list->capacity ? 2 * list->capacity : 64;
        int32_t *ids = realloc(list->ids, (size_t)capacity * sizeof(*ids));
        if (!ids) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %lld tokens", (long long)capacity);
        list->ids = ids;
        list->capacity = capacity;
    }
    list->ids[list->num++] = id;
    return FV_OK;
}

void fv_token_list_deinit(fv_token_list *list)
{
    free(list->ids);
    *list = (fv_token_list){0};
}

/* --- the merges ---------------------------------------------------------------------------------- */

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

/* --- merging one piece --------------------------------------------------------------------------- */

static fv_status reserve(fv_bpe_scratch *scratch, size_t length)
{
    if (length <= scratch->capacity) return FV_OK;
    if (length > MAX_PIECE_BYTES) {
        return fv_fail(FV_ERR_INVALID, "a piece of %zu bytes; accepted: up to %d", length, MAX_PIECE_BYTES);
    }
    const size_t capacity = length < 64 ? 64 : length;
    fv_bpe_scratch_deinit(scratch);
    scratch->symbols = malloc(capacity * sizeof(*scratch->symbols));
    /* At first a candidate for each pair; each of at most length - 1 merges takes one and adds two. */
    scratch->heap = malloc(2 * capacity * sizeof(*scratch->heap));
    if (!scratch->symbols || !scratch->heap) {
        fv_bpe_scratch_deinit(scratch);
        return fv_fail(FV_ERR_NO_MEMORY, "no memory to tokenize a piece of %zu bytes", length);
    }
    scratch->capacity = capacity;
    return FV_OK;
}

void fv_bpe_scratch_deinit(fv_bpe_scratch *scratch)
{
    free(scratch->symbols);
    free(scratch->heap);
    *scratch = (fv_bpe_scratch){0};
}

static bool is_before(const candidate *a, const candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->position < b->position;
}

static void heap_push(candidate *heap, size_t *num, candidate added)
{
    size_t at = (*num)++;
    while (at > 0 && is_before(&added, &heap[(at - 1) / 2])) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = added;
}

static candidate heap_pop(candidate *heap, size_t *num)
{
    const candidate first = heap[0];
    const candidate last = heap[--*num];
    size_t at = 0;
    for (size_t child = 1; child < *num; child = 2 * at + 1) {
        if (child + 1 < *num && is_before(&heap[child + 1], &heap[child])) child++;
        if (!is_before(&heap[child], &last)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return first;
}

/* Adds the pair that begins at `left`, if both are there and have a merge. */
static void push_pair(fv_bpe_scratch *scratch, size_t *num, const fv_merge_table *merges, int32_t left)
{
    if (left < 0 || scratch->symbols[left].next < 0) return;
    const int32_t left_id = scratch->symbols[left].id;
    const int32_t right_id = scratch->symbols[scratch->symbols[left].next].id;
    const fv_merge *merge = find_merge_slot(merges, pair_of(left_id, right_id));
    if (merge->pair == FV_MERGE_EMPTY) return;
    heap_push(scratch->heap, num, (candidate){merge->rank, left, left_id, right_id, merge->merged});
}

/* One symbol per byte that has a token; the number of symbols. */
static int32_t link_bytes(fv_bpe_scratch *scratch, const fv_vocabulary *vocabulary, fv_text piece)
{
    int32_t num = 0;
    for (size_t i = 0; i < piece.length; i++) {
        const int32_t id = vocabulary->byte_tokens[(unsigned char)piece.data[i]];
        if (id == FV_NO_TOKEN) continue;
        scratch->symbols[num] = (symbol){id, num - 1, num + 1};
        num++;
    }
    if (num > 0) scratch->symbols[num - 1].next = -1;
    return num;
}

fv_status fv_bpe_encode(fv_token_list *list, int64_t *num_dropped, fv_bpe_scratch *scratch,
                        const fv_merge_table *merges, const fv_vocabulary *vocabulary, fv_text piece)
{
    fv_status status = reserve(scratch, piece.length);
    if (status != FV_OK) return status;
    symbol *symbols = scratch->symbols;
    const int32_t num_symbols = link_bytes(scratch, vocabulary, piece);
    *num_dropped += (int64_t)piece.length - num_symbols;

    size_t num_candidates = 0;
    for (int32_t i = 0; i < num_symbols; i++) push_pair(scratch, &num_candidates, merges, i);
    while (num_candidates > 0) {
        const candidate best = heap_pop(scratch->heap, &num_candidates);
        symbol *left = &symbols[best.position];
        if (left->id != best.left_id || left->next < 0 || symbols[left->next].id != best.right_id) continue;
        symbol *right = &symbols[left->next];
        left->id = best.merged;
        left->next = right->next;
        right->id = FV_NO_TOKEN;
        if (left->next >= 0) symbols[left->next].previous = best.position;
        push_pair(scratch, &num_candidates, merges, left->previous);
        push_pair(scratch, &num_candidates, merges, best.position);
    }
    for (int32_t i = num_symbols > 0 ? 0 : -1; i >= 0 && status == FV_OK; i = symbols[i].next) {
        status = fv_token_list_append(list, symbols[i].id);
    }
    return status;
}
