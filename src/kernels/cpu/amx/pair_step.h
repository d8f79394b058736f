/* A step of a pair of strips, where there are many (attend_many_tiles.c): its scores beside the weights of the step
 * before, in bf16; in pieces by half_step.h. */
#ifndef FV_KERNELS_CPU_AMX_PAIR_STEP_H
#define FV_KERNELS_CPU_AMX_PAIR_STEP_H

#include "kernels/cpu/amx/half_step.h"

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

/* --- scores beside weights ------------------------------------------------------------------------------------- */

/* Weights of a row and a step, packed, which it also returns. */
FV_BETWEEN_PRODUCTS fv_words fv_row_weigh(fv_row_weigher *weigh, char *weights, const float *scores, int32_t row,
                                          const fv_key_factors *factors, const fv_exp2_constants *constants,
                                          const int32_t is_fine)
{
    const fv_lanes base = fv_lanes_splat(weigh->base[row]);
    const float *at = scores + row * FV_TILE_COLUMNS;
    const fv_lanes low = fv_lanes_load(at) * fv_key_factors_of(factors, 0) + base;
    const fv_lanes high = fv_lanes_load(at + FV_HALF_SCORES) * fv_key_factors_of(factors, 1) + base;
    fv_words words;
    if (is_fine) {
        fv_lanes fine[2] = {low, high};
        fv_lanes_exp2_some(fine, 2);
        weigh->fine_sums[row] += fine[0] + fine[1];
        fv_weights_scale(fine, factors);
        words = fv_words_packed(fv_lanes_rounded(fine[0]), fv_lanes_rounded(fine[1]));
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
    fv_key_factors factors;
    fv_exp2_constants constants;
    fv_words top;
    int32_t is_in_tiles; /* the last's second strip's scores are */
    int32_t depth, has_next, weighs, is_fine;
} fv_step_pass;

FV_ALWAYS_INLINE fv_step_pass fv_step_pass_of(const fv_many_item *many, const fv_pair_step *next,
                                              const fv_pair_step *last, int32_t depth, const int32_t scores,
                                              const int32_t weighs, const int32_t is_fine, const int32_t is_scaled)
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
    pass.factors = fv_key_factors_at(many, last->step, is_scaled);
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
                                            pass->scores + strip * FV_STEP_SCORES, row, &pass->factors,
                                            &pass->constants, pass->is_fine);
        pass->top = fv_words_max(pass->top, words);
    }
}

FV_ALWAYS_INLINE void fv_step_pass_end(const fv_step_pass *pass, const fv_pair_step *last)
{
    if (pass->weighs) last->work->top = pass->top;
}

FV_ALWAYS_INLINE void fv_step_score_and_weigh_as(const fv_many_item *many, const fv_pair_step *next,
                                                 const fv_pair_step *last, const int32_t depth, const int32_t is_fine,
                                                 const int32_t is_scaled)
{
    fv_step_pass pass = fv_step_pass_of(many, next, last, depth, 1, 1, is_fine, is_scaled);
    FV_UNROLL
    for (int32_t p = 0; p < 2 * depth; p++) fv_step_pass_product(&pass, 0, p);
    FV_UNROLL
    for (int32_t p = 0; p < 2 * depth; p++) fv_step_pass_product(&pass, 1, p);
    fv_step_pass_end(&pass, last);
}

/* For any depth; the scores or the weights may be none. */
FV_ALWAYS_INLINE void fv_step_score_and_weigh_any(const fv_many_item *many, const fv_pair_step *next,
                                                  const fv_pair_step *last, const int32_t scores, const int32_t weighs,
                                                  const int32_t is_fine, const int32_t is_scaled)
{
    const int32_t depth = many->item->job->params->head_size / FV_TILE_DEPTH;
    fv_step_pass pass = fv_step_pass_of(many, next, last, depth, scores, weighs, is_fine, is_scaled);
    for (int32_t p = 0; p < 2 * depth; p++) fv_step_pass_product(&pass, 0, p);
    for (int32_t p = 0; p < 2 * depth; p++) fv_step_pass_product(&pass, 1, p);
    fv_step_pass_end(&pass, last);
}

static void fv_step_score(const fv_many_item *many, const fv_pair_step *next, fv_pair_step *last)
{
    fv_step_store_scores(many, last);
    if (many->item->pieces > 1)
        fv_half_step_score(many, next, last);
    else
        fv_step_score_and_weigh_any(many, next, last, 1, 0, 0, 0);
}

static void fv_step_weigh(const fv_many_item *many, fv_pair_step *last)
{
    fv_step_store_scores(many, last);
    if (many->item->pieces > 1)
        fv_half_step_weigh(many, last);
    else if (many->k_factors)
        fv_step_score_and_weigh_any(many, NULL, last, 0, 1, 1, 1);
    else if (many->is_fine)
        fv_step_score_and_weigh_any(many, NULL, last, 0, 1, 1, 0);
    else
        fv_step_score_and_weigh_any(many, NULL, last, 0, 1, 0, 0);
}

static void fv_step_score_and_weigh_fine(const fv_many_item *many, const fv_pair_step *next, fv_pair_step *last)
{
    const int32_t depth = many->item->job->params->head_size / FV_TILE_DEPTH;
    if (depth == 4 && many->k_factors)
        fv_step_score_and_weigh_as(many, next, last, 4, 1, 1);
    else if (many->k_factors)
        fv_step_score_and_weigh_any(many, next, last, 1, 1, 1, 1);
    else if (depth == 4)
        fv_step_score_and_weigh_as(many, next, last, 4, 1, 0);
    else
        fv_step_score_and_weigh_any(many, next, last, 1, 1, 1, 0);
}

/* Out of line: in the loops around it its own have too few registers. */
static __attribute__((noinline)) void fv_step_score_and_weigh(const fv_many_item *many, const fv_pair_step *next,
                                                              fv_pair_step *last)
{
    const int32_t depth = many->item->job->params->head_size / FV_TILE_DEPTH;
    if (many->item->pieces > 1)
        fv_half_step_score_and_weigh(many, next, last);
    else if (many->is_fine)
        fv_step_score_and_weigh_fine(many, next, last);
    else if (depth == 4)
        fv_step_score_and_weigh_as(many, next, last, 4, 0, 0);
    else if (depth == 2)
        fv_step_score_and_weigh_as(many, next, last, 2, 0, 0);
    else
        fv_step_score_and_weigh_any(many, next, last, 1, 1, 0, 0);
}

#endif
