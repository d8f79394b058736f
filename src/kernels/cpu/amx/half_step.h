/* A step of a pair of strips in pieces (half_pieces.h): its scores beside the weights of the step before, as pair_step.h. */
#ifndef FV_KERNELS_CPU_AMX_HALF_STEP_H
#define FV_KERNELS_CPU_AMX_HALF_STEP_H

#include "kernels/cpu/amx/pair_work.h"

/* The tile of a strip's scores that is of half of the keys += tiles a and b. */
#define FV_SCORE_DOT(tiles, strip, half, a, b) \
    do {                                       \
        if ((strip) == 0 && (half) == 0)       \
            fv_tile_dot(tiles, 0, a, b);       \
        else if ((strip) == 0)                 \
            fv_tile_dot(tiles, 1, a, b);       \
        else if ((half) == 0)                  \
            fv_tile_dot(tiles, 2, a, b);       \
        else                                   \
            fv_tile_dot(tiles, 3, a, b);       \
    } while (0)

/* Product `at` of the 4 * kv_pieces of 32 elements from d * 32 on: high queries and low ones in turn for each tile of K. */
FV_ALWAYS_INLINE void fv_half_score_product(fv_tile_item *item, const fv_score_operands *of, const int32_t strip,
                                            int32_t d, const int32_t at, const int32_t depth)
{
    fv_tiles *tiles = &item->tiles;
    const int32_t half = at / 2 % 2, piece = at / 4;
    const char *q = of->q[strip] + d * FV_TILE_BYTES;
    const char *k = of->k + ((2 * half + piece) * depth + d) * FV_TILE_BYTES;
    if (at == 0) fv_tile_load(tiles, 4, q, FV_TILE_ROW_BYTES);
    if (at == 1) fv_tile_load(tiles, 5, q + depth * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    if (at % 4 == 0) fv_tile_load(tiles, 6, k, FV_TILE_ROW_BYTES);
    if (at % 4 == 2) fv_tile_load(tiles, 7, k, FV_TILE_ROW_BYTES);
    if (at % 4 == 0) FV_SCORE_DOT(tiles, strip, 0, 4, 6);
    if (at % 4 == 1) FV_SCORE_DOT(tiles, strip, 0, 5, 6);
    if (at % 4 == 2) FV_SCORE_DOT(tiles, strip, 1, 4, 7);
    if (at % 4 == 3) FV_SCORE_DOT(tiles, strip, 1, 5, 7);
}

/* Weights of two rows and a step, in turn (fv_word_pieces_in_turn), the low ones `piece_bytes` behind. */
FV_BETWEEN_PRODUCTS void fv_half_weigh_rows(fv_row_weigher *weigh, char *weights, int64_t piece_bytes,
                                            const float *scores, int32_t row, const fv_key_factors *factors)
{
    fv_lanes x[4];
    FV_UNROLL
    for (int32_t i = 0; i < 4; i++)
        x[i] = fv_lanes_load(scores + (row + i / 2) * FV_TILE_COLUMNS + i % 2 * FV_HALF_SCORES) *
                   fv_key_factors_of(factors, i % 2) +
               fv_lanes_splat(weigh->base[row + i / 2]);
    fv_lanes_exp2_some(x, 4);
    FV_UNROLL
    for (int32_t i = 0; i < 2; i++) {
        char *to = weights + (row + i) * FV_TILE_ROW_BYTES;
        weigh->fine_sums[row + i] += x[2 * i] + x[2 * i + 1];
        fv_weights_scale(x + 2 * i, factors);
        const fv_word_pieces pieces = fv_word_pieces_in_turn(x[2 * i], x[2 * i + 1]);
        fv_words_store(to, pieces.high);
        fv_words_store(to + piece_bytes, pieces.low);
    }
}

/* What stands beside each other: the scores of a step and the weights of the one before; either may be none. */
typedef struct fv_half_pass {
    fv_tile_item *item;
    fv_score_operands of;
    fv_row_weigher *weigh; /* [2], of the last step's strips */
    char *weights[2];
    int64_t piece_bytes;
    float *scores;
    fv_key_factors factors;
    int32_t is_in_tiles; /* the last's second strip's scores are */
    int32_t has_next, weighs;
} fv_half_pass;

/* How far a pass is with a strip. */
typedef struct fv_half_place {
    int32_t product, two, due; /* two: rows; due: shares of those that a product is to bring */
} fv_half_place;

/* Products of a strip with 32 elements of the next keys, number i of `depth`, between them the last step's weights, two rows at a
 * time. Stores as fv_step_pass_product. */
FV_ALWAYS_INLINE void fv_half_pass_elements(fv_half_pass *pass, fv_half_place *place, const int32_t strip, int32_t i,
                                            int32_t depth, const int32_t kv_pieces)
{
    const int32_t products = 4 * kv_pieces * depth, twos = FV_TILE_ROWS / 2;
    const int32_t d = strip == 0 ? (i + depth / 2) % depth : i; /* fv_score_product */
    FV_UNROLL
    for (int32_t at = 0; at < 4 * kv_pieces; at++) {
        const int32_t p = place->product++, half = p >= products / 2;
        if (pass->has_next) fv_half_score_product(pass->item, &pass->of, strip, d, at, depth);
        if (p == products / 2 - 1 || p == products / 2 + products / 8) {
            if (strip == 0 && pass->is_in_tiles) fv_score_store_half(pass->item, pass->scores, 1, half);
            if (strip == 1 && pass->has_next) fv_score_store_half(pass->item, pass->scores, 0, half);
        }
        if (!pass->weighs) continue;
        for (place->due += twos; place->due >= products; place->due -= products)
            fv_half_weigh_rows(&pass->weigh[strip], pass->weights[strip], pass->piece_bytes,
                               pass->scores + strip * FV_STEP_SCORES, 2 * place->two++, &pass->factors);
    }
    if (pass->has_next && strip == 1) fv_tile_call_ahead(pass->item);
}

/* is_constant: the depth is known when this is compiled. */
FV_ALWAYS_INLINE void fv_half_pass_strip(fv_half_pass *pass, const int32_t strip, const int32_t depth,
                                         const int32_t kv_pieces, const int32_t is_constant)
{
    fv_half_place place = {0};
    if (pass->has_next) fv_score_begin(pass->item, strip);
    if (is_constant) {
        FV_UNROLL
        for (int32_t i = 0; i < depth; i++) fv_half_pass_elements(pass, &place, strip, i, depth, kv_pieces);
        return;
    }
    for (int32_t i = 0; i < depth; i++) fv_half_pass_elements(pass, &place, strip, i, depth, kv_pieces);
}

FV_ALWAYS_INLINE void fv_half_step_as(const fv_many_item *many, const fv_pair_step *next, const fv_pair_step *last,
                                      const int32_t depth, const int32_t kv_pieces, const int32_t scores,
                                      const int32_t weighs, const int32_t is_scaled)
{
    fv_half_pass pass = {
        .item = many->item,
        .scores = many->scores,
        .is_in_tiles = last->is_in_tiles,
        .has_next = scores,
        .weighs = weighs,
    };
    if (scores) pass.of = fv_score_operands_of(many, next, depth);
    if (weighs) {
        pass.factors = fv_key_factors_at(many, last->step, is_scaled);
        pass.piece_bytes = fv_weight_piece_bytes(many->item);
        pass.weigh = last->work->weigh;
        for (int32_t i = 0; i < 2; i++) pass.weights[i] = last->work->pair.weights[i] + last->step * FV_TILE_BYTES;
    }
    fv_half_pass_strip(&pass, 0, depth, kv_pieces, __builtin_constant_p(depth));
    fv_half_pass_strip(&pass, 1, depth, kv_pieces, __builtin_constant_p(depth));
}

static void fv_half_step_score(const fv_many_item *many, const fv_pair_step *next, const fv_pair_step *last)
{
    const int32_t depth = many->item->job->params->head_size / FV_TILE_DEPTH;
    if (many->item->kv_pieces == 2)
        fv_half_step_as(many, next, last, depth, 2, 1, 0, 0);
    else
        fv_half_step_as(many, next, last, depth, 1, 1, 0, 0);
}

/* No products: the depth is any. */
static void fv_half_step_weigh(const fv_many_item *many, const fv_pair_step *last)
{
    if (many->k_factors)
        fv_half_step_as(many, NULL, last, 2, 1, 0, 1, 1);
    else
        fv_half_step_as(many, NULL, last, 2, 1, 0, 1, 0);
}

/* Keys with scales are of a byte as a rule. */
static void fv_half_step_score_and_weigh_scaled(const fv_many_item *many, const fv_pair_step *next,
                                                const fv_pair_step *last)
{
    const int32_t depth = many->item->job->params->head_size / FV_TILE_DEPTH, kv_pieces = many->item->kv_pieces;
    if (depth == 4 && kv_pieces == 1)
        fv_half_step_as(many, next, last, 4, 1, 1, 1, 1);
    else if (kv_pieces == 1)
        fv_half_step_as(many, next, last, depth, 1, 1, 1, 1);
    else
        fv_half_step_as(many, next, last, depth, 2, 1, 1, 1);
}

static void fv_half_step_score_and_weigh(const fv_many_item *many, const fv_pair_step *next, const fv_pair_step *last)
{
    const int32_t depth = many->item->job->params->head_size / FV_TILE_DEPTH, kv_pieces = many->item->kv_pieces;
    if (many->k_factors)
        fv_half_step_score_and_weigh_scaled(many, next, last);
    else if (depth == 4 && kv_pieces == 2)
        fv_half_step_as(many, next, last, 4, 2, 1, 1, 0);
    else if (depth == 2 && kv_pieces == 2)
        fv_half_step_as(many, next, last, 2, 2, 1, 1, 0);
    else if (kv_pieces == 2)
        fv_half_step_as(many, next, last, depth, 2, 1, 1, 0);
    else
        fv_half_step_as(many, next, last, depth, 1, 1, 1, 0);
}

#endif
