/* The symbols of a text are a linked list, the possible merges a heap ordered by the model and then by
 * position. A merge changes the list in place; candidates of the heap that it made stale are found out
 * when they are popped, because their two symbols no longer have the lengths they had.
 *
 *   h e l l o      heap: (l l), (h e), ...
 *   h e [ll] o     the pairs (e, ll) and (ll, o) are pushed, if they may merge
 */
#include "engine/bpe.h"

#include <stdlib.h>

typedef fv_bpe_symbol symbol;

typedef struct fv_bpe_candidate {
    double order;
    int32_t position; /* of the left symbol */
    int32_t left_length;
    int32_t right_length;
    int32_t merged;
} candidate;

enum { MAX_SYMBOLS = 1 << 30 };

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

void fv_bpe_deinit(fv_bpe *bpe)
{
    free(bpe->symbols);
    free(bpe->heap);
    *bpe = (fv_bpe){0};
}

fv_status fv_bpe_begin(fv_bpe *bpe, size_t max_symbols)
{
    bpe->num_symbols = 0;
    if (max_symbols <= bpe->capacity) return FV_OK;
    if (max_symbols > MAX_SYMBOLS) {
        return fv_fail(FV_ERR_INVALID, "a piece of %zu bytes; accepted: up to %d", max_symbols, MAX_SYMBOLS);
    }
    const size_t capacity = max_symbols < 64 ? 64 : max_symbols;
    fv_bpe_deinit(bpe);
    bpe->symbols = malloc(capacity * sizeof(*bpe->symbols));
    /* At first a candidate for each pair; each of at most n - 1 merges takes one and adds two. */
    bpe->heap = malloc(2 * capacity * sizeof(*bpe->heap));
    if (!bpe->symbols || !bpe->heap) {
        fv_bpe_deinit(bpe);
        return fv_fail(FV_ERR_NO_MEMORY, "no memory to tokenize a piece of %zu bytes", max_symbols);
    }
    bpe->capacity = capacity;
    return FV_OK;
}

void fv_bpe_append(fv_bpe *bpe, int32_t id, int32_t begin, int32_t length)
{
    const int32_t at = bpe->num_symbols++;
    if (at > 0) bpe->symbols[at - 1].next = at;
    bpe->symbols[at] = (symbol){.id = id, .begin = begin, .length = length, .previous = at - 1, .next = -1};
}

static bool is_before(const candidate *a, const candidate *b)
{
    return a->order != b->order ? a->order < b->order : a->position < b->position;
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

typedef struct merging {
    fv_bpe *bpe;
    size_t num_candidates;
    fv_bpe_find_pair *find;
    const void *model;
} merging;

/* The pair that begins at `position`, if both are there and may merge. */
static void push_pair(merging *run, int32_t position)
{
    const symbol *symbols = run->bpe->symbols;
    if (position < 0 || symbols[position].next < 0) return;
    const symbol *left = &symbols[position], *right = &symbols[left->next];
    fv_bpe_pair pair;
    if (!run->find(&pair, run->model, left, right)) return;
    const candidate added = {pair.order, position, left->length, right->length, pair.merged};
    heap_push(run->bpe->heap, &run->num_candidates, added);
}

void fv_bpe_merge(fv_bpe *bpe, fv_bpe_find_pair *find, const void *model)
{
    merging run = {.bpe = bpe, .find = find, .model = model};
    symbol *symbols = bpe->symbols;
    for (int32_t i = 0; i < bpe->num_symbols; i++) push_pair(&run, i);
    while (run.num_candidates > 0) {
        const candidate best = heap_pop(bpe->heap, &run.num_candidates);
        symbol *left = &symbols[best.position];
        if (left->length != best.left_length || left->next < 0) continue;
        symbol *right = &symbols[left->next];
        if (right->length != best.right_length) continue;
        left->id = best.merged;
        left->length += right->length;
        left->next = right->next;
        right->length = 0;
        if (left->next >= 0) symbols[left->next].previous = best.position;
        push_pair(&run, left->previous);
        push_pair(&run, best.position);
    }
}
