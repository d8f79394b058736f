/* A step of a pair of strips, where there are many (attend_many_tiles.c): its scores beside the weights of the step
 * before. */
#ifndef FV_KERNELS_CPU_AMX_PAIR_STEP_H
#define FV_KERNELS_CPU_AMX_PAIR_STEP_H

#include "kernels/cpu/amx/key_tiles.h"
#include "kernels/cpu/amx/tile_products.h"

enum { FV_HALF_SCORES = FV_STEP_SCORES / 2 }; /* of 16 keys: a C tile */

/* What turns a strip's scores into weights 2^(dot * factor - base). */
typedef struct fv_row_weigher {
    fv_lanes fine_sums[FV_TILE_STRIP_ROWS]; /* of each row's weights in fp32, in 16 parts, where they are asked for */
    float base[FV_TILE_STRIP_ROWS];         /* is_fine; else what makes the exponents that fv_words_exp2_of takes */
} fv_row_weigher;

/* A pair and a block. A strip that has no other makes a pair with itself. */
typedef struct fv_pair_work {
    fv_strip_pair pair;
    fv_row_weigher weigh[2];
    fv_words top;     /* of both strips' weights */
    int32_t is_exact; /* the weights need the block's maxima */
} fv_pair_work;

typedef struct fv_pair_step {
    fv_pair_work *work; /* NULL: none */
    int32_t step;
    int32_t is_in_tiles; /* the second strip's are */
} fv_pair_step;

typedef struct fv_many_item {
    fv_tile_item *item;
    const fv_key_tiles *keys;
    fv_key_tiles *next_keys;
    fv_score_scale scale;
    int32_t is_fine; /* sums of weights leave the item: exponentials and sums in fp32 */
    int32_t has_huge_queries;
    float *scores; /* of a pair and a step: [2][2][16 rows][16 keys]; weights have been made of them when those of the
                    * next one are stored */
} fv_many_item;

/* --- scores --------------------------------------------------------------------------------------------------- */

/* What the scores of a step are products of. */
typedef struct fv_score_operands {
    const char *k, *q[2];
} fv_score_operands;

FV_ALWAYS_INLINE fv_score_operands fv_score_operands_of(const fv_many_item *many, const fv_pair_step *at,
                                                        const int32_t depth)
{
    return (fv_score_operands){
        .k = many->keys->k + (int64_t)2 * at->step * depth * FV_TILE_BYTES,
        .q = {at->work->pair.strips[0]->q, at->work->pair.strips[1]->q},
    };
}

/* Product p of a strip's scores: 16 keys and 32 elements. The strips of a pair have two tiles of sums each.
 *
 * A load waits for stores under way whose addresses agree with its own in the lower twelve bits. Queries, K and scores
 * lie on pages alike, the scores of the first strip in the lower half of one; those of a strip are stored beside the
 * products of the next. So each begins with the half of the elements that was not just stored to. */
FV_ALWAYS_INLINE void fv_score_product(fv_tile_item *item, const fv_score_operands *of, const int32_t strip, int32_t p,
                                       const int32_t depth)
{
    fv_tiles *tiles = &item->tiles;
    const int32_t d = (p / 2 + (strip == 0 ? depth / 2 : 0)) % depth;
    const char *k = of->k + d * FV_TILE_BYTES;
    if (p % 2 == 0) {
        fv_tile_load(tiles, 4, of->q[strip] + d * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
        fv_tile_load(tiles, 6, k, FV_TILE_ROW_BYTES);
        if (strip == 0)
            fv_tile_dot(tiles, 0, 4, 6);
        else
            fv_tile_dot(tiles, 2, 4, 6);
    } else {
        fv_tile_load(tiles, 7, k + depth * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
        if (strip == 0)
            fv_tile_dot(tiles, 1, 4, 7);
        else
            fv_tile_dot(tiles, 3, 4, 7);
        if (strip == 1) fv_tile_call_ahead(item);
    }
}

FV_ALWAYS_INLINE void fv_score_begin(fv_tile_item *item, const int32_t strip)
{
    if (strip == 0) {
        fv_tile_zero(&item->tiles, 0);
        fv_tile_zero(&item->tiles, 1);
    } else {
        fv_tile_zero(&item->tiles, 2);
        fv_tile_zero(&item->tiles, 3);
    }
}

/* Half of a strip's scores, of 16 keys. */
FV_ALWAYS_INLINE void fv_score_store_half(fv_tile_item *item, float *scores, const int32_t strip, const int32_t half)
{
    float *at = scores + strip * FV_STEP_SCORES + half * FV_HALF_SCORES;
    FV_TILE_OF_FOUR(fv_tile_store, &item->tiles, 2 * strip + half, at, FV_TILE_ROW_BYTES);
}

/* --- scores beside weights ------------------------------------------------------------------------------------- */

/* Weights of a row and a step, packed, which it also returns. */
FV_ALWAYS_INLINE fv_words fv_row_weigh(fv_row_weigher *weigh, char *weights, const float *scores, int32_t row,
                                       fv_lanes factor, const fv_exp2_constants *constants, const int32_t is_fine)
{
    const fv_lanes base = fv_lanes_splat(weigh->base[row]);
    const float *at = scores + row * FV_TILE_COLUMNS;
    const fv_lanes low = fv_lanes_load(at) * factor + base, high = fv_lanes_load(at + FV_HALF_SCORES) * factor + base;
    fv_words words;
    if (is_fine) {
        const fv_lanes fine_low = fv_lanes_exp2(low), fine_high = fv_lanes_exp2(high);
        weigh->fine_sums[row] += fine_low + fine_high;
        words = fv_words_packed(fv_lanes_rounded(fine_low), fv_lanes_rounded(fine_high));
    } else {
        words = fv_words_exp2_of(low, high, constants);
    }
    memcpy(weights + row * FV_TILE_ROW_BYTES, &words, sizeof(words));
    return words;
}

/* What stands beside each other: the scores of a step and the weights of the one before; either may be none. */
typedef struct fv_step_pass {
    fv_tile_item *item;
    fv_score_operands of;
    fv_row_weigher *weigh; /* [2], of the last step's strips */
    char *weights[2];
    float *scores; /* of both steps: those of the last are read before those of the next are stored */
    fv_lanes factor;
    fv_exp2_constants constants;
    fv_words top;
    int32_t is_in_tiles; /* the last's second strip's scores are */
    int32_t depth, has_next, weighs, is_fine;
} fv_step_pass;

FV_ALWAYS_INLINE fv_step_pass fv_step_pass_of(const fv_many_item *many, const fv_pair_step *next,
                                              const fv_pair_step *last, int32_t depth, const int32_t scores,
                                              const int32_t weighs, const int32_t is_fine)
{
    fv_step_pass pass = {
        .item = many->item,
        .scores = many->scores,
        .is_in_tiles = last->is_in_tiles,
        .depth = depth,
        .has_next = scores,
        .weighs = weighs,
        .is_fine = is_fine,
    };
    if (scores) pass.of = fv_score_operands_of(many, next, depth);
    if (!weighs) return pass;
    pass.factor = fv_lanes_splat(many->scale.dot);
    pass.constants = fv_exp2_constants_make();
    pass.top = last->work->top;
    pass.weigh = last->work->weigh;
    for (int32_t i = 0; i < 2; i++) pass.weights[i] = last->work->pair.weights[i] + last->step * FV_TILE_BYTES;
    return pass;
}

/* Product p of a strip, and its share of the weights. A strip's scores leave their tiles beside the products of the
 * next strip, so those of the last's second strip are still there. */
FV_ALWAYS_INLINE void fv_step_pass_product(fv_step_pass *pass, const int32_t strip, int32_t p)
{
    const int32_t depth = pass->depth, products = 2 * depth;
    if (pass->has_next) {
        if (p == 0) fv_score_begin(pass->item, strip);
        fv_score_product(pass->item, &pass->of, strip, p, depth);
    }
    if (p == depth - 1 || p == depth + depth / 4) {
        const int32_t half = p != depth - 1;
        if (strip == 0 && pass->is_in_tiles) fv_score_store_half(pass->item, pass->scores, 1, half);
        if (strip == 1 && pass->has_next) fv_score_store_half(pass->item, pass->scores, 0, half);
    }
    if (!pass->weighs) return;
    for (int32_t row = p * FV_TILE_ROWS / products; row < (p + 1) * FV_TILE_ROWS / products; row++) {
        const fv_words words = fv_row_weigh(&pass->weigh[strip], pass->weights[strip],
                                            pass->scores + strip * FV_STEP_SCORES, row, pass->factor, &pass->constants,
                                            pass->is_fine);
        pass->top = fv_words_max(pass->top, words);
    }
}

FV_ALWAYS_INLINE void fv_step_pass_end(const fv_step_pass *pass, const fv_pair_step *last)
{
    if (pass->weighs) last->work->top = pass->top;
}

FV_ALWAYS_INLINE void fv_step_score_and_weigh_as(const fv_many_item *many, const fv_pair_step *next,
                                                 const fv_pair_step *last, const int32_t depth, const int32_t is_fine)
{
    fv_step_pass pass = fv_step_pass_of(many, next, last, depth, 1, 1, is_fine);
    FV_UNROLL
    for (int32_t p = 0; p < 2 * depth; p++) fv_step_pass_product(&pass, 0, p);
    FV_UNROLL
    for (int32_t p = 0; p < 2 * depth; p++) fv_step_pass_product(&pass, 1, p);
    fv_step_pass_end(&pass, last);
}

/* For any depth; the scores or the weights may be none. */
FV_ALWAYS_INLINE void fv_step_score_and_weigh_any(const fv_many_item *many, const fv_pair_step *next,
                                                  const fv_pair_step *last, const int32_t scores, const int32_t weighs,
                                                  const int32_t is_fine)
{
    const int32_t depth = many->item->job->params->head_size / FV_TILE_DEPTH;
    fv_step_pass pass = fv_step_pass_of(many, next, last, depth, scores, weighs, is_fine);
    for (int32_t p = 0; p < 2 * depth; p++) fv_step_pass_product(&pass, 0, p);
    for (int32_t p = 0; p < 2 * depth; p++) fv_step_pass_product(&pass, 1, p);
    fv_step_pass_end(&pass, last);
}

/* Stores what is left of a step's scores. */
static void fv_step_store_scores(const fv_many_item *many, fv_pair_step *last)
{
    if (!last->is_in_tiles) return;
    fv_score_store_half(many->item, many->scores, 1, 0);
    fv_score_store_half(many->item, many->scores, 1, 1);
    last->is_in_tiles = 0;
}

static void fv_step_score(const fv_many_item *many, const fv_pair_step *next, fv_pair_step *last)
{
    fv_step_store_scores(many, last);
    fv_step_score_and_weigh_any(many, next, last, 1, 0, 0);
}

static void fv_step_weigh(const fv_many_item *many, fv_pair_step *last)
{
    fv_step_store_scores(many, last);
    if (many->is_fine)
        fv_step_score_and_weigh_any(many, NULL, last, 0, 1, 1);
    else
        fv_step_score_and_weigh_any(many, NULL, last, 0, 1, 0);
}

static void fv_step_score_and_weigh_fine(const fv_many_item *many, const fv_pair_step *next, fv_pair_step *last)
{
    if (many->item->job->params->head_size == 4 * FV_TILE_DEPTH)
        fv_step_score_and_weigh_as(many, next, last, 4, 1);
    else
        fv_step_score_and_weigh_any(many, next, last, 1, 1, 1);
}

static void fv_step_score_and_weigh(const fv_many_item *many, const fv_pair_step *next, fv_pair_step *last)
{
    const int32_t depth = many->item->job->params->head_size / FV_TILE_DEPTH;
    if (many->is_fine)
        fv_step_score_and_weigh_fine(many, next, last);
    else if (depth == 4)
        fv_step_score_and_weigh_as(many, next, last, 4, 0);
    else if (depth == 2)
        fv_step_score_and_weigh_as(many, next, last, 2, 0);
    else
        fv_step_score_and_weigh_any(many, next, last, 1, 1, 0);
}

#endif
