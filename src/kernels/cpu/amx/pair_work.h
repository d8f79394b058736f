/* What the orders of a step of a pair of strips work on, where there are many (attend_many_tiles.c): in bf16 (pair_step.h) and
 * in pieces (half_step.h). */
#ifndef FV_KERNELS_CPU_AMX_PAIR_WORK_H
#define FV_KERNELS_CPU_AMX_PAIR_WORK_H

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
    fv_words top;     /* of both strips' weights, but in pieces */
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
    float multiple;   /* what scores are multiples of when they are weighed */
    int32_t prepares; /* soft caps or ALiBi make them that (row_scores.h) */
    int32_t is_fine;  /* sums of weights leave the item, or divide it: exponentials and sums in fp32 */
    int32_t has_huge_queries;
    /* Where keys have scales of their own, [block_keys] of the block at hand: what scores are multiplied by when they are
     * weighed, and weights once they are summed. NULL: they have none. */
    const float *k_factors, *v_scales;
    int32_t has_odd_scales; /* some key's is so far from 1 that weights need the block's maxima */
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
        .k = many->keys->k + (int64_t)2 * at->step * many->item->pieces * depth * FV_TILE_BYTES,
        .q = {at->work->pair.strips[0]->q, at->work->pair.strips[1]->q},
    };
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

/* Stores what is left of a step's scores. */
static void fv_step_store_scores(const fv_many_item *many, fv_pair_step *last)
{
    if (!last->is_in_tiles) return;
    fv_score_store_half(many->item, many->scores, 1, 0);
    fv_score_store_half(many->item, many->scores, 1, 1);
    last->is_in_tiles = 0;
}

/* --- weights --------------------------------------------------------------------------------------------------- */

/* What a step's scores are multiplied by, and its weights: one number, or one for each of its keys. */
typedef struct fv_key_factors {
    fv_lanes factor;
    const float *k_factors, *v_scales; /* [32] */
    int32_t is_scaled;                 /* known when it is compiled: by k_factors */
} fv_key_factors;

FV_ALWAYS_INLINE fv_key_factors fv_key_factors_at(const fv_many_item *many, int32_t step, const int32_t is_scaled)
{
    fv_key_factors factors = {.factor = fv_lanes_splat(many->multiple), .is_scaled = is_scaled};
    if (!is_scaled) return factors;
    factors.k_factors = many->k_factors + step * FV_STEP_KEYS;
    factors.v_scales = many->v_scales + step * FV_STEP_KEYS;
    return factors;
}

/* Of half of the keys. */
FV_ALWAYS_INLINE fv_lanes fv_key_factors_of(const fv_key_factors *factors, const int32_t half)
{
    return factors->is_scaled ? fv_lanes_load(factors->k_factors + half * FV_TILE_COLUMNS) : factors->factor;
}

/* Weights of a row and a step times the scales of their values. */
FV_ALWAYS_INLINE void fv_weights_scale(fv_lanes weights[2], const fv_key_factors *factors)
{
    if (!factors->is_scaled) return;
    FV_UNROLL
    for (int32_t half = 0; half < 2; half++)
        weights[half] = fv_weight_scaled(weights[half], fv_lanes_load(factors->v_scales + half * FV_TILE_COLUMNS));
}

#endif
