/* Scores of strips that share a block, beside the weights of others. */
#ifndef FV_KERNELS_CPU_AMX_SHARED_SCORES_H
#define FV_KERNELS_CPU_AMX_SHARED_SCORES_H

#include "kernels/cpu/amx/shared_pairs.h"
#include "kernels/cpu/amx/weigher.h"

enum {
    FV_SHARED_WEIGHED = 16, /* the times four products that have weights between them */
};

/* What is to be weighed between four products. */
typedef struct fv_due_weights {
    fv_weigher *weigh; /* NULL: nothing */
    fv_words *words;   /* two: four keys */
    const float *scores;
} fv_due_weights;

/* Four products of a pair's scores; of the first elements: tile after tile is taken over from the pair before. */
FV_ALWAYS_INLINE void fv_shared_score_products(fv_shared_item *shared, const fv_shared_step *next,
                                               const fv_step_keys *keys, int32_t d, const int32_t is_first,
                                               const int32_t num, fv_due_weights due, const int32_t has_parts)
{
    fv_tile_item *item = shared->item;
    fv_tiles *tiles = &item->tiles;
    const fv_held_tiles *held = &shared->held, *scores = &next->scores;
    const fv_strip_pair *pair = &next->work->pair;
    const int64_t slice_bytes = shared->pairs.slice_bytes, low_bytes = shared->pairs.low_bytes;
    const fv_pair_place place = fv_pair_maker_take(&shared->pairs, has_parts);
    fv_tile_load_past(tiles, 6, pair->strips[0]->q + d * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 4, keys->tiles[0] + d * keys->depths[0], keys->strides[0]);
    if (is_first) FV_SWITCH_TILE(tiles, 0, held, scores, 1);
    fv_tile_dot(tiles, 0, 4, 6);
    fv_pair_place_make(&place, slice_bytes, low_bytes, 0, has_parts);
    fv_tile_load(tiles, 5, keys->tiles[1] + d * keys->depths[1], keys->strides[1]);
    if (is_first) FV_SWITCH_TILE(tiles, 1, held, scores, 1);
    fv_tile_dot(tiles, 1, 5, 6);
    if (due.weigh) due.words[0] = fv_weigher_words(due.weigh, due.scores, 1);
    if (num == 2) {
        fv_tile_load_past(tiles, 7, pair->strips[1]->q + d * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
        if (is_first) FV_SWITCH_TILE(tiles, 2, held, scores, 1);
        fv_tile_dot(tiles, 2, 4, 7);
    }
    fv_pair_place_make(&place, slice_bytes, low_bytes, 1, has_parts);
    if (num == 2) {
        if (is_first) FV_SWITCH_TILE(tiles, 3, held, scores, 1);
        fv_tile_dot(tiles, 3, 5, 7);
    }
    if (is_first) shared->held = *scores;
    for (int32_t i = place.even ? 1 : 0; i < shared->pairs.share; i++) fv_pair_maker_run(&shared->pairs, has_parts);
    fv_tile_call_ahead(item);
    if (due.weigh) due.words[1] = fv_weigher_words(due.weigh, due.scores + FV_TILE_STRIP_ROWS, 1);
}

static char *fv_shared_weights_of(const fv_shared_step *at, int32_t i)
{
    return at->work->pair.weights[i] + at->step * FV_TILE_BYTES;
}

/* The scores of two strips and, from the second four products on, the weights of two others. */
static void fv_shared_score_and_weigh_pairs(fv_shared_item *shared, const fv_shared_step *next,
                                            const fv_shared_step *last, const fv_step_keys *keys, int32_t depth)
{
    const fv_due_weights none = {0};
    int32_t d = 0;
    fv_shared_score_products(shared, next, keys, d++, 1, 2, none, 0);
    FV_ROLLED
    for (int32_t strip = 0; strip < 2; strip++) {
        fv_weigher weigh = last->work->weigh[strip];
        fv_words words[16];
        FV_ROLLED
        for (int32_t p = 0; p < 16; p += 2, d++) {
            const float *scores = last->scores.at[2 * strip] + fv_words_key(p, 0) * FV_TILE_STRIP_ROWS;
            fv_shared_score_products(shared, next, keys, d, 0, 2, (fv_due_weights){&weigh, words + p, scores}, 0);
        }
        fv_words_store_transposed(fv_shared_weights_of(last, strip), words);
        fv_weigher_end_step(&weigh);
        last->work->weigh[strip] = weigh;
    }
    for (; d < depth; d++) fv_shared_score_products(shared, next, keys, d, 0, 2, none, 0);
}

static void fv_shared_weigh(const fv_shared_step *last)
{
    for (int32_t i = 0; i < last->work->pair.num; i++)
        fv_weigher_step(&last->work->weigh[i], fv_shared_weights_of(last, i), last->scores.at[2 * i], NULL, 1);
}

/* Weights in the making between products, two words at a time: those of one strip, then of the other. */
typedef struct fv_weight_cursor {
    const fv_shared_step *of; /* NULL: none */
    fv_weigher weigh;
    fv_words words[16];
    int32_t strip, p;
} fv_weight_cursor;

FV_ALWAYS_INLINE fv_due_weights fv_weight_cursor_take(fv_weight_cursor *at)
{
    if (!at->of || at->strip == 2) return (fv_due_weights){0};
    if (at->p == 0) at->weigh = at->of->work->weigh[at->strip];
    const float *scores = at->of->scores.at[2 * at->strip] + fv_words_key(at->p, 0) * FV_TILE_STRIP_ROWS;
    return (fv_due_weights){&at->weigh, at->words + at->p, scores};
}

FV_ALWAYS_INLINE void fv_weight_cursor_end(fv_weight_cursor *at)
{
    if (!at->of || at->strip == 2) return;
    at->p += 2;
    if (at->p < 16) return;
    fv_words_store_transposed(fv_shared_weights_of(at->of, at->strip), at->words);
    fv_weigher_end_step(&at->weigh);
    at->of->work->weigh[at->strip++] = at->weigh;
    at->p = 0;
}

/* Adds a quarter of the products of a part to the scores of the pair's step. */
FV_ALWAYS_INLINE void fv_shared_add_part(const fv_shared_item *shared, const fv_shared_step *next,
                                         const fv_held_tiles *products, int32_t part, int32_t quarter)
{
    if (quarter >= next->scores.num) return;
    const float *scales = shared->pairs.scales->of_keys[part] + next->step * FV_STEP_KEYS + quarter % 2 * FV_TILE_ROWS;
    fv_latent_part_add(next->scores.at[quarter], products->at[quarter], scales);
}

/* The scores of a pair, those of the rope first, then part by part, each added while the products of the next one are made; and
 * the weights of another, of two strips between products. */
FV_ALWAYS_INLINE void fv_shared_score_parts(fv_shared_item *shared, const fv_shared_step *next,
                                            const fv_step_keys *keys, fv_weight_cursor *weights, const int32_t num)
{
    const fv_due_weights none = {0};
    const fv_held_tiles products = fv_shared_part_products(shared, num);
    fv_shared_step to = *next;
    int32_t d = FV_LATENT_PARTS * FV_PART_TILES;
    fv_shared_score_products(shared, &to, keys, d, 1, num, none, 1);
    for (int32_t i = 1; i < FV_ROPE_TILES; i++) {
        fv_shared_score_products(shared, &to, keys, d + i, 0, num, fv_weight_cursor_take(weights), 1);
        fv_weight_cursor_end(weights);
    }
    to.scores = products;
    d = 0;
    FV_ROLLED
    for (int32_t part = 0; part < FV_LATENT_PARTS; part++) {
        fv_shared_score_products(shared, &to, keys, d++, 1, num, fv_weight_cursor_take(weights), 1);
        fv_weight_cursor_end(weights);
        if (part > 0) fv_shared_add_part(shared, next, &products, part - 1, 0);
        FV_ROLLED
        for (int32_t i = 1; i < FV_PART_TILES; i++) {
            fv_shared_score_products(shared, &to, keys, d++, 0, num, fv_weight_cursor_take(weights), 1);
            fv_weight_cursor_end(weights);
            if (part > 0) fv_shared_add_part(shared, next, &products, part - 1, i);
        }
    }
    fv_shared_store_held(shared);
    for (int32_t i = 0; i < FV_PART_TILES; i++) fv_shared_add_part(shared, next, &products, FV_LATENT_PARTS - 1, i);
}

static void fv_shared_score_parts_and_weigh(fv_shared_item *shared, const fv_shared_step *next,
                                            const fv_shared_step *last)
{
    const fv_step_keys keys = fv_step_keys_of(&shared->item->scratch, next->step);
    fv_weight_cursor weights = {0};
    if (shared->held.num > 2 * next->work->pair.num) fv_shared_store_held(shared);
    if (next->work->pair.num == 1) {
        fv_shared_score_parts(shared, next, &keys, &weights, 1);
        if (last->work) fv_shared_weigh(last);
        return;
    }
    if (last->work && last->work->pair.num == 2) weights.of = last;
    fv_shared_score_parts(shared, next, &keys, &weights, 2);
    if (last->work && !weights.of) fv_shared_weigh(last);
}

/* `last` is none where it is not to be weighed. */
static void fv_shared_score_and_weigh(fv_shared_item *shared, const fv_shared_step *next, const fv_shared_step *last)
{
    if (shared->has_parts) {
        fv_shared_score_parts_and_weigh(shared, next, last);
        return;
    }
    const fv_step_keys keys = fv_step_keys_of(&shared->item->scratch, next->step);
    const int32_t depth = shared->item->job->params->head_size / FV_TILE_DEPTH, num = next->work->pair.num;
    if (depth > FV_SHARED_WEIGHED && num == 2 && last->work && last->work->pair.num == 2) {
        fv_shared_score_and_weigh_pairs(shared, next, last, &keys, depth);
        return;
    }
    const fv_due_weights none = {0};
    if (shared->held.num > 2 * num) fv_shared_store_held(shared);
    for (int32_t d = 0; d < depth; d++) {
        if (num == 2 && d == 0)
            fv_shared_score_products(shared, next, &keys, d, 1, 2, none, 0);
        else if (num == 2)
            fv_shared_score_products(shared, next, &keys, d, 0, 2, none, 0);
        else if (d == 0)
            fv_shared_score_products(shared, next, &keys, d, 1, 1, none, 0);
        else
            fv_shared_score_products(shared, next, &keys, d, 0, 1, none, 0);
    }
    if (last->work) fv_shared_weigh(last);
}

#endif
