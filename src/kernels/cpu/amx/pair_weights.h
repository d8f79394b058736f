/* Weights of the pairs of a group and a block (attend_many_tiles.c): against references as the scores come, or by the
 * maxima of the block where references do not serve. */
#ifndef FV_KERNELS_CPU_AMX_PAIR_WEIGHTS_H
#define FV_KERNELS_CPU_AMX_PAIR_WEIGHTS_H

#include "kernels/cpu/amx/pair_step.h"
#include "kernels/cpu/amx/row_scores.h"
#include "kernels/cpu/amx/weigher.h"
#include "kernels/cpu/amx/weight_sums.h"

/* 2^10 as bf16, above which no weight may be: references stay near to maxima, far from overflow. */
#define FV_MAX_WEIGHT_WORD 0x4480

/* In pieces, of weights of a block that were summed in one lane. */
#define FV_MAX_WEIGHT_SUM 0x1p10f

/* --- references --------------------------------------------------------------------------------------------------- */

/* Sums of a strip to the maxima that have just moved. */
static void fv_strip_rescale_all(const fv_tile_item *item, const fv_tile_strip *strip)
{
    if (strip->has_sums) fv_strip_rescale_sums(strip, item->job->params->v_head_size, item->rescaling);
    float *weight_sums = fv_weight_sums_of(item, strip);
    for (int32_t row = 0; row < FV_TILE_STRIP_ROWS; row++)
        fv_tile_rescale_row(weight_sums + row * FV_TILE_COLUMNS, 0, 1, strip, row, item->rescaling);
}

/* Moves references to numbers that exponents in fixed point take in; maxima of exact weights are none. 0: too large. */
static int32_t fv_strip_fit_references(const fv_tile_item *item, fv_tile_strip *strip)
{
    const fv_lanes max = fv_lanes_load(strip->rows.max), moved = fv_rounded_reference(max), less = max - moved;
    const float least = 0x1p-60f;
    if (!fv_lanes_all_below(max, FV_MAX_REFERENCE) || !fv_lanes_all_below(-max, FV_MAX_REFERENCE)) return 0;
    if (fv_lanes_all_below(less, least) && fv_lanes_all_below(-less, least)) return 1;
    fv_lanes_store(strip->rows.max, moved);
    fv_lanes_store(strip->rows.rescale, fv_lanes_exp2(less));
    fv_strip_rescale_all(item, strip);
    return 1;
}

/* --- as scores come ----------------------------------------------------------------------------------------------- */

/* Scores of a step are there: readies them and the weigher. 0: no weights. */
static int32_t fv_step_begin_weights(const fv_many_item *many, fv_pair_step *at)
{
    fv_pair_work *work = at->work;
    if (!work || work->is_exact) return 0;
    const fv_attend_job *job = many->item->job;
    const int32_t first = at->step * FV_STEP_KEYS, local = many->keys->block.first_key + first;
    const float *k_scales = many->item->k_scales ? many->item->k_scales + first : NULL;
    const float *k_factors = many->k_factors ? many->k_factors + first : NULL;
    for (int32_t i = 0; i < 2; i++) {
        fv_row_strip *rows = &work->pair.strips[i]->rows;
        float *scores = many->scores + i * FV_STEP_SCORES;
        const int32_t is_edge = local < rows->all.first || local + FV_STEP_KEYS > rows->all.end;
        if (many->prepares || is_edge || !fv_strip_has_reference(rows)) fv_step_store_scores(many, at);
        if (many->prepares) fv_row_scores_prepare(many, rows, scores, local, k_scales);
        if (is_edge) fv_row_scores_hide(rows, job, scores, local);
        if (at->step > work->pair.first_step) continue;
        fv_row_weigher *weigh = &work->weigh[i];
        if (many->is_fine) memset(weigh->fine_sums, 0, sizeof(weigh->fine_sums));
        if (!fv_row_scores_refer(many, rows, scores, local, k_factors) ||
            (!many->is_fine && !fv_strip_fit_references(many->item, work->pair.strips[i])))
            work->is_exact = 1;
        fv_lanes_store(weigh->base, fv_lanes_splat(many->is_fine ? 0 : FV_FIXED_ONE) - fv_lanes_load(rows->max));
    }
    return !work->is_exact;
}

/* Weights of a group of pairs. */
static void fv_group_weigh(const fv_many_item *many, fv_pair_work *works, int32_t num)
{
    int32_t first = INT32_MAX, end = 0;
    for (int32_t p = 0; p < num; p++) {
        if (works[p].pair.first_step >= works[p].pair.end_step) continue;
        first = fv_min_i32(first, works[p].pair.first_step);
        end = fv_max_i32(end, works[p].pair.end_step);
    }
    fv_pair_step last = {0};
    for (int32_t step = first; step < end; step++) {
        for (int32_t p = 0; p < num; p++) {
            fv_pair_work *work = &works[p];
            if (step < work->pair.first_step || step >= work->pair.end_step || work->is_exact) continue;
            const fv_pair_step next = {work, step, 1};
            if (fv_step_begin_weights(many, &last))
                fv_step_score_and_weigh(many, &next, &last);
            else
                fv_step_score(many, &next, &last);
            last = next;
        }
    }
    if (fv_step_begin_weights(many, &last)) fv_step_weigh(many, &last);
}

/* --- by the maxima of the block ---------------------------------------------------------------------------------- */

/* A pair's scores of the block, as [key][row]. */
static void fv_pair_score_block(const fv_many_item *many, fv_pair_work *work)
{
    const fv_strip_pair *pair = &work->pair;
    for (int32_t step = pair->first_step; step < pair->end_step; step++) {
        fv_pair_step none = {0}, at = {work, step, 1};
        fv_step_score(many, &at, &none);
        fv_step_store_scores(many, &at);
        for (int32_t i = 0; i < pair->num; i++)
            fv_row_scores_turn(pair->scores[i] + step * FV_STEP_SCORES, many->scores + i * FV_STEP_SCORES);
    }
}

/* A strip's weights of a block with keys in order to the order of fv_row_weigh, or of fv_half_weigh_rows. */
static void fv_pair_pack_ordered(const fv_tile_item *item, const fv_strip_pair *pair, int32_t i)
{
    char *at = pair->weights[i] + pair->first_step * FV_TILE_BYTES;
    for (int32_t row = 0; row < (pair->end_step - pair->first_step) * FV_TILE_ROWS; row++, at += FV_TILE_ROW_BYTES) {
        if (item->pieces == 1) fv_words_pack_order(at);
        for (int32_t piece = 0; piece < 2 && item->pieces > 1; piece++)
            fv_words_take_turns(at + piece * fv_weight_piece_bytes(item));
    }
}

/* Weights of strip i by its maxima over the block, in pieces. */
static void fv_pair_weigh_pieces(const fv_many_item *many, const fv_strip_pair *pair, int32_t i)
{
    fv_tile_item *item = many->item;
    fv_weigher weigher;
    if (!fv_strip_weigh_begin(&weigher, item, pair, i, &many->keys->block, many->scale)) return;
    for (int32_t step = pair->first_step; step < pair->end_step; step++) {
        char *to = pair->weights[i] + step * FV_TILE_BYTES;
        fv_words words[16], low_words[16];
        for (int32_t quarter = 0; quarter < 4; quarter++)
            fv_weigher_quarter_pieces(&weigher, words, low_words, pair->scores[i] + step * FV_STEP_SCORES,
                                      fv_tile_step_scales(item, step), quarter);
        fv_words_store_transposed(to, words);
        fv_words_store_transposed(to + fv_weight_piece_bytes(item), low_words);
        fv_weigher_end_step(&weigher);
    }
    fv_weigher_end(&weigher, pair->strips[i]);
}

/* A pair's weights by its maxima over the block. */
static void fv_pair_weigh_exactly(const fv_many_item *many, fv_pair_work *work)
{
    fv_tile_item *item = many->item;
    fv_strip_pair *pair = &work->pair;
    fv_pair_score_block(many, work);
    for (int32_t i = 0; i < pair->num; i++) {
        if (many->is_fine) fv_row_sums_gather(item, pair->strips[i]);
        if (item->pieces > 1)
            fv_pair_weigh_pieces(many, pair, i);
        else
            fv_strip_weigh(item, pair, i, &many->keys->block, many->scale);
        fv_strip_rescale_all(item, pair->strips[i]);
        fv_pair_pack_ordered(item, pair, i);
    }
}

/* Are the sums of a pair's weights of the block all below a limit, and numbers? */
static int32_t fv_pair_sums_below(const fv_pair_work *work, float limit)
{
    for (int32_t i = 0; i < work->pair.num; i++)
        for (int32_t row = 0; row < FV_TILE_STRIP_ROWS; row++)
            if (!fv_lanes_all_below(work->weigh[i].fine_sums[row], limit)) return 0;
    return 1;
}

/* Takes over the parts of the row sums, or makes the weights again. */
static void fv_pair_end_weights(const fv_many_item *many, fv_pair_work *work)
{
    if (!work->is_exact)
        work->is_exact = many->item->pieces > 1 ? !fv_pair_sums_below(work, FV_MAX_WEIGHT_SUM)
                                                : !fv_words_all_below(work->top, FV_MAX_WEIGHT_WORD);
    if (work->is_exact) {
        fv_pair_weigh_exactly(many, work);
        return;
    }
    for (int32_t i = 0; many->is_fine && i < work->pair.num; i++)
        fv_parts_add(fv_row_sums_of(many->item, work->pair.strips[i]), work->weigh[i].fine_sums);
}

#endif
