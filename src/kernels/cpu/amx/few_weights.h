/* From scores to weights, of few rows (attend_few_tiles.c): groups of heads that share a strip, what is on its way, where its
 * sums, queries and weights lie, and the way in parts, for a core sees some hundred instructions ahead. */
#ifndef FV_KERNELS_CPU_AMX_FEW_WEIGHTS_H
#define FV_KERNELS_CPU_AMX_FEW_WEIGHTS_H

#include "kernels/cpu/amx/few_block.h"
#include "kernels/cpu/amx/weigher.h"

/* KV heads [first, end) of the item's, which share a strip; of more than 16 rows one head, which has two. */
typedef struct head_group {
    fv_tile_strip *strips;
    int32_t first, end;
    fv_lanes dot_factors; /* what a dot product of each lane is multiplied by: its head's */
    fv_lanes factors;     /* the same of what prepare_scores leaves: with a soft cap that is the cap */
} head_group;

/* A group and a block on their way from scores to the sums. */
typedef struct few_unit {
    const head_group *group; /* NULL: nothing is on its way */
    const fv_few_block *block;
    float *scores; /* of each strip [32][16] */
    fv_weigher weigh;
    int32_t strip; /* that is weighed */
    int32_t parts_done;
    int32_t is_lost; /* 1: tiles cannot go on, for an overflow is near */
} few_unit;

/* Rows of the sums' tiles: those of even columns with those of odd ones, or each a tile of its own. */
static int32_t tile_rows(const fv_attend_job *job)
{
    return job->num_rows <= FV_TILE_ROWS / 2 ? 2 * job->num_rows : FV_TILE_ROWS;
}

static int32_t heads_at_once(const fv_attend_job *job) { return fv_max_i32(1, FV_TILE_STRIP_ROWS / job->num_rows); }

static char *q_of(const fv_tile_item *item, int32_t head, int32_t strip)
{
    const int64_t strip_bytes = (int64_t)FV_TILE_STRIP_ROWS * item->job->params->head_size * FV_BF16_BYTES;
    return item->scratch.q + (head * item->num_strips + strip) * strip_bytes;
}

/* Rows of a head's sums: of even columns, and as many of odd ones behind them. */
static int32_t half_rows(const fv_attend_job *job)
{
    return job->num_rows <= FV_TILE_ROWS / 2 ? job->num_rows : FV_TILE_ROWS;
}

/* [Dv / 32][2][half_rows] rows of 16 columns, the even ones of 32, then the odd ones: C tiles. */
static float *sums_of(const fv_tile_item *item, int32_t head, int32_t strip)
{
    const int64_t strip_floats = (int64_t)half_rows(item->job) * item->job->params->v_head_size;
    return item->scratch.sums + (head * item->num_strips + strip) * strip_floats;
}

/* Rows of a head in a strip of it. */
static int32_t rows_in_strip(const fv_attend_job *job, int32_t strip)
{
    return fv_min_i32(FV_TILE_STRIP_ROWS, job->num_rows - strip * FV_TILE_STRIP_ROWS);
}

/* --- parts ------------------------------------------------------------------------------------------------------- */

/* A tiles of a head's weights: [2 times 16 keys][before even elements, before odd ones][half_rows]. */
static char *spread_of(const fv_tile_item *item, int32_t strip, int32_t first_lane)
{
    return item->scratch.spread + (strip * FV_TILE_STRIP_ROWS + first_lane) * 4 * FV_TILE_ROW_BYTES;
}

static void spread_weights(const fv_tile_item *item, int32_t strip, int32_t first_lane)
{
    const int32_t num_rows = half_rows(item->job);
    for (int32_t row = 0; row < num_rows; row++) {
        const char *weights = item->scratch.weights + (first_lane + row) * FV_TILE_ROW_BYTES;
        for (int32_t half = 0; half < 2; half++) {
            char *to = spread_of(item, strip, first_lane) + (half * 2 * num_rows + row) * FV_TILE_ROW_BYTES;
            fv_word_half words;
            memcpy(&words, weights + half * sizeof(words), sizeof(words));
            const fv_lane_bits even = __builtin_convertvector(words, fv_lane_bits), odd = even << 16;
            memcpy(to, &even, sizeof(even));
            memcpy(to + num_rows * FV_TILE_ROW_BYTES, &odd, sizeof(odd));
        }
    }
}

/* Parts of a strip's way: the begin; a quarter of the words each and their end, or, where a group is one head, which has few
 * sites for parts, both at once; then each head's. */
enum { NUM_WORD_PARTS = 5 };

static int32_t num_heads_of(const few_unit *unit) { return unit->group->end - unit->group->first; }

static int32_t num_word_parts(const few_unit *unit) { return num_heads_of(unit) > 1 ? NUM_WORD_PARTS : 1; }

static int32_t num_strip_parts(const few_unit *unit) { return 1 + num_word_parts(unit) + num_heads_of(unit); }

static int32_t num_parts(const fv_tile_item *item, const few_unit *unit)
{
    return unit->group ? item->num_strips * num_strip_parts(unit) : 0;
}

static float *scores_at_hand(const few_unit *unit)
{
    return unit->scores + unit->strip * FV_STEP_KEYS * FV_TILE_STRIP_ROWS;
}

/* Scales of the unit's keys, those of each head in its lanes: [32][16]. `scales` is scratch for [heads][32]. */
static void find_lane_scales(float *lanes, float *scales, const fv_tile_item *item, const few_unit *unit,
                             const fv_scale_plane *plane, const float *head_scale)
{
    const int32_t num_heads = num_heads_of(unit), first_head = item->first_head + unit->group->first;
    fv_lane_ints head_of_lane;
    for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++) head_of_lane[i] = i / item->job->num_rows;
    for (int32_t head = 0; head < num_heads; head++)
        fv_key_block_find_scales(scales + head * FV_STEP_KEYS, item->job, &unit->block->keys, plane, head_scale,
                                 first_head + head);
    for (int32_t key = 0; key < FV_STEP_KEYS; key++) {
        fv_lanes all = fv_lanes_splat(scales[key]);
        for (int32_t head = 1; head < num_heads; head++)
            all = fv_lanes_select(head_of_lane == head, fv_lanes_splat(scales[head * FV_STEP_KEYS + key]), all);
        fv_lanes_store(lanes + key * FV_TILE_STRIP_ROWS, all);
    }
}

/* Those of the unit's keys and values, for all its strips. */
static void find_scales(fv_tile_item *item, const few_unit *unit)
{
    const fv_attend_job *job = item->job;
    const fv_attend_params *params = job->params;
    const fv_tile_scratch *scratch = &item->scratch;
    item->k_scales = job->has_k_scales ? scratch->k_scales : NULL;
    item->v_scales = job->has_v_scales ? scratch->v_scales : NULL;
    if (item->k_scales)
        find_lane_scales(scratch->lane_k_scales, scratch->k_scales, item, unit, &params->cache.k_scales,
                         params->k_scale);
    if (item->v_scales)
        find_lane_scales(scratch->lane_v_scales, scratch->v_scales, item, unit, &params->cache.v_scales,
                         params->v_scale);
}

/* Dot products to what scores are multiples of: see fv_scores_prepare. */
static void prepare_scores(const fv_tile_item *item, const few_unit *unit)
{
    const fv_attend_job *job = item->job;
    const head_group *group = unit->group;
    const float *k_scales = item->k_scales ? item->scratch.lane_k_scales : NULL;
    if (!k_scales && fv_score_form_is_plain(job->params)) return;
    const fv_score_form form = fv_score_form_of(&group->strips[unit->strip].rows, job->params, group->dot_factors,
                                                group->factors);
    for (int32_t key = 0; key < FV_STEP_KEYS; key++) {
        const int32_t at = key * FV_TILE_STRIP_ROWS;
        fv_score_prepare(scores_at_hand(unit) + at, k_scales ? fv_lanes_load(k_scales + at) : fv_lanes_splat(1.0f),
                         &form, job, unit->block->keys.first_key + key);
    }
}

/* Words 4 quarter to 4 quarter + 3 of the unit's: eight keys. lane_v_scales: of the values, or NULL. */
static void weigh_quarter(few_unit *unit, char *words, const float *lane_v_scales, int32_t quarter)
{
    fv_weigher weigh = unit->weigh;
    const float *scores = scores_at_hand(unit);
    FV_UNROLL
    for (int32_t i = 0; i < 4; i++) {
        const int32_t p = 4 * quarter + i, key = fv_words_key(p, 0) * FV_TILE_STRIP_ROWS;
        const int32_t other = fv_words_key(p, 1) * FV_TILE_STRIP_ROWS;
        const fv_words word = lane_v_scales
                                  ? fv_weigher_scaled_words(&weigh, scores + key, fv_lanes_load(lane_v_scales + key),
                                                            fv_lanes_load(lane_v_scales + other))
                                  : fv_weigher_words(&weigh, scores + key, 0);
        memcpy(words + p * sizeof(word), &word, sizeof(word));
    }
    unit->weigh = weigh;
}

static void weigh_words(const fv_tile_item *item, few_unit *unit, int32_t part)
{
    char *weights = item->scratch.weights, *words = weights + FV_TILE_BYTES;
    if (num_heads_of(unit) == 1) {
        fv_weigher_step(&unit->weigh, weights, scores_at_hand(unit), item->v_scales, 0);
    } else if (part < NUM_WORD_PARTS - 1) {
        weigh_quarter(unit, words, item->v_scales ? item->scratch.lane_v_scales : NULL, part);
        return;
    } else {
        fv_words all[16];
        memcpy(all, words, sizeof(all));
        fv_words_store_transposed(weights, all);
    }
    fv_weigher_end(&unit->weigh, &unit->group->strips[unit->strip]);
}

static void weigh_part(fv_tile_item *item, few_unit *unit)
{
    const int32_t part = unit->parts_done % num_strip_parts(unit), num_words = num_word_parts(unit);
    unit->strip = unit->parts_done++ / num_strip_parts(unit);
    if (unit->is_lost) return;
    if (part == 0) {
        if (unit->strip == 0) find_scales(item, unit);
        prepare_scores(item, unit);
        unit->is_lost = !fv_weigher_begin(&unit->weigh, &unit->group->strips[unit->strip], item->job,
                                          scores_at_hand(unit), unit->block->keys.first_key, 0, 1, unit->group->factors,
                                          item->rescaling);
    } else if (part <= num_words) {
        weigh_words(item, unit, part - 1);
    } else {
        spread_weights(item, unit->strip, (part - 1 - num_words) * item->job->num_rows);
    }
}

#endif
