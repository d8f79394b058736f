/* Scores of a step of a strip, as [row][key], before they are weighed (attend_many_tiles.c): soft caps and ALiBi go in, keys that
 * rows do not see are hidden, and rows that have none yet get a reference. */
#ifndef FV_KERNELS_CPU_AMX_ROW_SCORES_H
#define FV_KERNELS_CPU_AMX_ROW_SCORES_H

#include "kernels/cpu/amx/pair_work.h"

/* What hides a score: no row's maximum, weight 0, and no infinity in between. */
#define FV_HIDDEN_SCORE -0x1p120f

/* Up to here references keep eight bits behind the point when they go into exponents in fixed point. */
#define FV_MAX_REFERENCE 16000.0f

/* Logarithm of the least weight in fp32 with ALiBi: denormal numbers are slow. */
#define FV_LEAST_EXPONENT -100.0f

/* --- soft caps, ALiBi --------------------------------------------------------------------------------------------- */

static fv_lane_ints fv_key_positions(const fv_attend_job *job, int32_t first_key)
{
    fv_lane_ints positions;
    for (int32_t i = 0; i < FV_TILE_COLUMNS; i++)
        positions[i] = (int32_t)fv_key_position(&job->params->context_parallel, first_key + i);
    return positions;
}

/* The dot products of a step of 32 keys on their way to what scores are multiples of. */
typedef struct fv_row_scores {
    const fv_row_strip *rows;
    float *scores;
    fv_lanes factors[2]; /* of the halves of the step */
    fv_lane_ints positions[2];
    float unit; /* one over what scores are multiples of */
    fv_alibi alibi;
} fv_row_scores;

/* What ALiBi adds to scores of a row. stays_near: they stay near its reference, if it has one. */
FV_ALWAYS_INLINE void fv_row_scores_bias(fv_lanes x[2], const fv_row_scores *of, int32_t row, const int32_t stays_near)
{
    const fv_lanes slope = fv_lanes_splat(of->rows->slope[row] * of->unit);
    FV_UNROLL
    for (int32_t half = 0; half < 2; half++)
        x[half] += fv_lanes_alibi(slope, of->positions[half] - of->rows->position[row], of->alibi);
    if (!stays_near) return;
    const float max = of->rows->max[row], least = (max + FV_LEAST_EXPONENT) * of->unit;
    const fv_lanes bound = fv_lanes_splat(max <= FV_MAX_REFERENCE ? least : -INFINITY);
    FV_UNROLL
    for (int32_t half = 0; half < 2; half++) x[half] = fv_lanes_max(bound, x[half]);
}

FV_ALWAYS_INLINE void fv_row_scores_prepare_as(const fv_row_scores *of, const int32_t is_capped,
                                               const int32_t has_alibi, const int32_t stays_near)
{
    for (int32_t row = 0; row < FV_TILE_STRIP_ROWS; row += 2) {
        fv_lanes x[4];
        float *at[4];
        FV_UNROLL
        for (int32_t i = 0; i < 4; i++) {
            at[i] = of->scores + (row + i / 2) * FV_TILE_COLUMNS + i % 2 * FV_HALF_SCORES;
            x[i] = fv_lanes_load(at[i]) * of->factors[i % 2];
        }
        if (is_capped) fv_lanes_tanh_some(x, 4);
        FV_UNROLL
        for (int32_t i = 0; i < 2 && has_alibi; i++) fv_row_scores_bias(x + 2 * i, of, row + i, stays_near);
        FV_UNROLL
        for (int32_t i = 0; i < 4; i++) fv_lanes_store(at[i], x[i]);
    }
}

/* Dot products of a step with the keys from first_key on to what scores are multiples of, as fv_score_prepare.
 * k_scales: of the step's keys, or NULL. */
static void fv_row_scores_prepare(const fv_many_item *many, const fv_row_strip *rows, float *scores, int32_t first_key,
                                  const float *k_scales)
{
    const fv_attend_job *job = many->item->job;
    const int32_t is_capped = many->scale.cap > 0;
    fv_row_scores of = {rows, scores, .unit = 1.0f / many->multiple, .alibi = job->params->alibi};
    for (int32_t half = 0; half < 2; half++) {
        const int32_t first = half * FV_TILE_COLUMNS;
        of.factors[half] = fv_lanes_splat(is_capped ? many->scale.dot : 1.0f);
        if (k_scales) of.factors[half] *= fv_lanes_load(k_scales + first);
        if (of.alibi != FV_ALIBI_NONE) of.positions[half] = fv_key_positions(job, first_key + first);
    }
    if (of.alibi == FV_ALIBI_NONE)
        fv_row_scores_prepare_as(&of, 1, 0, 0);
    else if (is_capped)
        fv_row_scores_prepare_as(&of, 1, 1, 1);
    else if (many->is_fine)
        fv_row_scores_prepare_as(&of, 0, 1, 1);
    else
        fv_row_scores_prepare_as(&of, 0, 1, 0);
}

/* --- what rows see ------------------------------------------------------------------------------------------------ */

/* The keys that a tree mask lets a row see. */
static fv_lane_ints fv_row_tree_seen(const fv_row_strip *rows, const fv_attend_job *job, int32_t row, fv_lane_ints keys)
{
    fv_lane_ints seen = {0};
    for (int32_t i = 0; i < FV_TILE_COLUMNS; i++) {
        const int64_t position = fv_key_position(&job->params->context_parallel, keys[i]);
        seen[i] = -fv_tree_sees(rows->tree[row], position - job->context);
    }
    return seen;
}

/* Hides the keys of a step, from number first_key on, from the rows that do not see them. */
static void fv_row_scores_hide(const fv_row_strip *rows, const fv_attend_job *job, float *scores, int32_t first_key)
{
    const int32_t in_tree = first_key + FV_STEP_KEYS > fv_attend_tree_first(job);
    fv_lane_ints key;
    for (int32_t i = 0; i < FV_TILE_COLUMNS; i++) key[i] = first_key + i;
    for (int32_t half = 0; half < 2; half++, key += FV_TILE_COLUMNS) {
        for (int32_t row = 0; row < FV_TILE_STRIP_ROWS; row++) {
            float *at = scores + half * FV_HALF_SCORES + row * FV_TILE_COLUMNS;
            fv_lane_ints seen = (key >= rows->first[row]) & (key < rows->end[row]);
            if (in_tree) seen &= fv_row_tree_seen(rows, job, row, key);
            fv_lanes_store(at, fv_lanes_select(seen, fv_lanes_load(at), fv_lanes_splat(FV_HIDDEN_SCORE)));
        }
    }
}

/* --- references --------------------------------------------------------------------------------------------------- */

/* A strip's scores of a step as [key][row]. */
static void fv_row_scores_turn(float *to, const float *scores)
{
    const char *rows[FV_TILE_ROWS];
    for (int32_t half = 0; half < 2; half++) {
        for (int32_t i = 0; i < FV_TILE_ROWS; i++)
            rows[i] = (const char *)(scores + half * FV_HALF_SCORES + i * FV_TILE_COLUMNS);
        fv_lanes_store_transposed((char *)(to + half * FV_HALF_SCORES), rows);
    }
}

/* What ALiBi adds for one key of each row. */
static fv_lanes fv_rows_alibi(const fv_row_strip *rows, const fv_attend_params *params,
                              const int32_t keys[FV_STRIP_ROWS])
{
    fv_lane_ints positions;
    for (int32_t row = 0; row < FV_TILE_STRIP_ROWS; row++)
        positions[row] = (int32_t)fv_key_position(&params->context_parallel, keys[row]);
    return fv_lanes_alibi(fv_lanes_load(rows->slope), positions - fv_lane_ints_load(rows->position), params->alibi);
}

/* How much more ALiBi adds at the end of a row's keys that it favors than at that end of the keys of the step from first_key on:
 * by so much maxima still grow where keys are alike. */
static fv_lanes fv_rows_alibi_growth(const fv_row_strip *rows, const fv_attend_params *params, int32_t first_key)
{
    int32_t keys[4][FV_STRIP_ROWS]; /* the row's first and last, the step's */
    for (int32_t row = 0; row < FV_TILE_STRIP_ROWS; row++) {
        keys[0][row] = rows->first[row];
        keys[1][row] = rows->end[row] - 1;
        keys[2][row] = fv_max_i32(first_key, rows->first[row]);
        keys[3][row] = fv_min_i32(first_key + FV_STEP_KEYS, rows->end[row]) - 1;
    }
    return fv_lanes_max(fv_rows_alibi(rows, params, keys[0]), fv_rows_alibi(rows, params, keys[1])) -
           fv_lanes_max(fv_rows_alibi(rows, params, keys[2]), fv_rows_alibi(rows, params, keys[3]));
}

/* To 2^-8, which exponents in fixed point take in as it is. */
static fv_lanes fv_rounded_reference(fv_lanes max) { return (max + FV_FIXED_ZERO) - FV_FIXED_ZERO; }

/* The references of a strip's rows: of those that have none, the maximum of the step from first_key on, with ALiBi what it will
 * have grown to; in pieces as it is, so that a row of one key has a weight near 1. 0: some row sees no key there, or an overflow
 * is near. */
static int32_t fv_row_scores_refer(const fv_many_item *many, fv_row_strip *rows, const float *scores, int32_t first_key,
                                   const float *k_factors)
{
    const fv_attend_params *params = many->item->job->params;
    if (fv_strip_has_reference(rows)) return 1;
    float by_key[FV_STEP_SCORES];
    fv_row_scores_turn(by_key, scores);
    for (int32_t key = 0; key < FV_STEP_KEYS && k_factors; key++) {
        float *at = by_key + key * FV_TILE_STRIP_ROWS;
        fv_lanes_store(at, fv_lanes_load(at) * k_factors[key]);
    }
    const fv_lanes top = fv_max_of_keys(by_key, 0, FV_STEP_KEYS);
    fv_lanes max = k_factors ? top : top * fv_lanes_splat(many->multiple);
    if (params->alibi != FV_ALIBI_NONE) max += fv_rows_alibi_growth(rows, params, first_key);
    return fv_strip_take_reference(rows, top, many->item->pieces > 1 ? max : fv_rounded_reference(max));
}

#endif
