/* The order of products for 2 to 8 strips over large values: MLA's decode of 32 to 128 heads, where K of 256 keys is
 * 288 KB, and pairs of V as large; and for one, too, where latents have scales by parts (latent_parts.h).
 *
 *   block   for each step of 32 keys, whose K (36 KB) stays in L1:
 *             for each pair of strips: 18 x 4 products; between them the weights of the pair before, and V's pairs,
 *             in portions as small as can be, for a core looks but a few products ahead
 *           for each two pairs of strips, whose weights (32 KB) stay in L1:
 *             for each 16 columns: 8 x 4 products; a pair that has no other: for each 32 columns
 *
 * What binds it is the way from L2 to L1. Queries and pairs of V, which stream past K and weights, are loaded without a
 * stay in L1; four tiles of sums make room one after the other, so that the products of the next ones begin before the
 * last of these are stored; scores live for 4 KB. Loops stay rolled up, for their instructions pass a cache, too.
 *
 * So scores are gone before the maximum of their block is known, as in attend_many_tiles.c: weights are taken against a
 * reference, the maximum of the first keys that a row saw. Where the weights of a block add up to more than LIMIT (or to
 * no number), rows of a finer output see few keys, or the sums follow their maxima in another way (tile_scale.h), the pair's scores of the
 * block are kept and its maxima found first.
 *
 * Scores of parts leave their tiles part by part and are added up beside the products of the next part. Values in two pieces
 * have twice as many products; their pairs, where one pair of strips meets them, are made in L1 beside these products, for as
 * many columns as tiles hold sums of. */
#include "kernels/cpu/amx/attend_shared_tiles.h"

#include "kernels/cpu/amx/shared_scores.h"
#include "kernels/cpu/amx/shared_sums.h"
#include "kernels/cpu/amx/tile_products.h"

enum {
    MIN_STRIPS = 2,
    MIN_V_SIZE = 256,
    FEW_KEYS = FV_TILE_MANY_KEYS, /* up to here weights are exact */
};

/* What the weights of a row and a block may add up to: references stay near to maxima, far from overflow. */
#define LIMIT 65536.0f

int32_t FV_ISA_SYMBOL(fv_shared_strips)(const fv_attend_params *params, int32_t num_strips)
{
    const int32_t least = fv_has_latent_parts(params) ? 1 : MIN_STRIPS; /* which no other order takes */
    if (params->v_head_size < MIN_V_SIZE || num_strips < least) return 0;
    return num_strips <= FV_TILE_SHARED_STRIPS ? num_strips : 0;
}

/* --- rows of a block ------------------------------------------------------------------------------------------------ */

/* Rows of the block, read where they lie. */
static void find_rows(fv_shared_item *shared, const fv_key_block *keys)
{
    const fv_tile_item *item = shared->item;
    const int64_t head = item->first_head * item->job->cache.v.head_stride;
    for (int32_t key = 0; key < fv_key_block_steps(keys) * FV_STEP_KEYS; key++) {
        const int32_t is_inside = key >= keys->first && key < keys->end;
        shared->values[key] = is_inside ? keys->v_rows[key] + head : item->scratch.zeros;
    }
    fv_tile_find_strides(item, keys);
    fv_tile_find_keys(item, keys, item->first_head);
}

/* Copies of them as bf16, in which both keys and values are read: latents of a byte an element. */
static void convert_rows(fv_shared_item *shared, const fv_key_block *keys)
{
    const fv_tile_item *item = shared->item;
    const fv_tile_scratch *scratch = &item->scratch;
    const int64_t row_bytes = (int64_t)item->job->params->head_size * FV_BF16_BYTES;
    for (int32_t t = 0; t < 2 * fv_key_block_steps(keys); t++) {
        const int32_t first = t * FV_TILE_ROWS;
        char *rows = scratch->k_copies + first * row_bytes;
        if (shared->has_parts)
            shared->pairs.not_finite |= fv_latent_parts_to_rows(rows, scratch->part_scales, keys, first,
                                                                shared->pairs.looks);
        else
            fv_tile_convert_rows(rows, item, keys, item->first_head, first);
        for (int32_t i = 0; i < FV_TILE_ROWS; i++) shared->values[first + i] = rows + i * row_bytes;
        scratch->k_tiles[t] = rows;
        scratch->k_strides[t] = row_bytes;
    }
}

/* --- weights of a block ---------------------------------------------------------------------------------------------- */

/* The references of a strip's rows: of those that have none, the maximum of the step. 0: some row sees no key there, or
 * an overflow is near. */
static int32_t find_reference(fv_row_strip *rows, const float *scores, fv_lanes factor)
{
    if (fv_strip_has_reference(rows)) return 1;
    const fv_lanes top = fv_max_of_keys(scores, 0, FV_STEP_KEYS);
    return fv_strip_take_reference(rows, top, top * factor);
}

/* The scores of a step are there, or in tiles: hides those that their rows do not see, and readies the weigher. 0: no
 * weights. */
static int32_t begin_weights(fv_shared_item *shared, const fv_shared_step *at, const fv_key_block *keys)
{
    fv_shared_work *work = at->work;
    if (!work || work->is_exact) return 0;
    const fv_lanes factor = fv_lanes_splat(shared->scale.dot);
    const int32_t local = keys->first_key + at->step * FV_STEP_KEYS;
    for (int32_t i = 0; i < work->pair.num; i++) {
        fv_row_strip *rows = &work->pair.strips[i]->rows;
        float *scores = at->scores.at[2 * i];
        const int32_t is_edge = local < rows->all.first || local + FV_STEP_KEYS > rows->all.end;
        if (is_edge || !fv_strip_has_reference(rows)) fv_shared_store_held(shared);
        if (is_edge) fv_weigher_hide(rows, shared->item->job, scores, local, 0, 1);
        if (at->step > work->pair.first_step) continue;
        if (!find_reference(rows, scores, factor)) work->is_exact = 1;
        work->weigh[i] = (fv_weigher){.factor = factor, .base = fv_lanes_load(rows->max)};
    }
    return !work->is_exact;
}

/* Scores that live until the next pair's are stored, or are kept. */
static fv_held_tiles scores_of(fv_shared_item *shared, const fv_shared_work *work, int32_t step)
{
    const int32_t num = work->pair.num, offset = step * FV_STEP_SCORES;
    float *room = shared->item->scratch.step_scores + shared->room * 2 * FV_STEP_SCORES;
    if (shared->has_parts) shared->room = !shared->room;
    if (!work->has_scores) return fv_held_of_pair(room, room + FV_STEP_SCORES, num);
    return fv_held_of_pair(work->pair.scores[0] + offset, work->pair.scores[num - 1] + offset, num);
}

/* Scores of a block and, but for the exact, weights; pairs of its values. */
static void weigh_block(fv_shared_item *shared, const fv_key_block *keys)
{
    int32_t first = INT32_MAX, end = 0;
    for (int32_t p = 0; p < shared->num_pairs; p++) {
        const fv_strip_pair *pair = &shared->works[p].pair;
        if (!fv_pair_has_steps(pair)) continue;
        first = fv_min_i32(first, pair->first_step);
        end = fv_max_i32(end, pair->end_step);
    }
    fv_shared_step last = {0};
    for (int32_t step = first; step < end; step++) {
        if (!fv_shared_makes_late(shared)) fv_pair_maker_begin(shared, step);
        for (int32_t p = 0; p < shared->num_pairs; p++) {
            fv_shared_work *work = &shared->works[p];
            if (!fv_pair_sees(&work->pair, step) || (work->is_exact && !work->has_scores)) continue;
            if (!begin_weights(shared, &last, keys)) last.work = NULL;
            if (work->is_exact && !work->has_scores) continue; /* since now */
            const fv_shared_step next = {work, step, scores_of(shared, work, step)};
            fv_shared_score_and_weigh(shared, &next, &last);
            last = next;
        }
        fv_pair_maker_end(&shared->pairs, shared->has_parts);
    }
    if (begin_weights(shared, &last, keys)) {
        fv_shared_store_held(shared);
        fv_shared_weigh(&last);
    }
    fv_shared_store_held(shared);
}

/* A pair's weights by its maxima over the block. */
static void weigh_exactly(fv_shared_item *shared, fv_shared_work *work, const fv_key_block *keys)
{
    fv_tile_item *item = shared->item;
    const fv_strip_pair *pair = &work->pair;
    const fv_shared_step none = {0};
    if (!work->has_scores) {
        work->has_scores = 1;
        for (int32_t step = pair->first_step; step < pair->end_step; step++) {
            const fv_shared_step next = {work, step, scores_of(shared, work, step)};
            fv_shared_score_and_weigh(shared, &next, &none);
        }
        fv_shared_store_held(shared);
    }
    for (int32_t i = 0; i < pair->num; i++) {
        fv_row_strip *rows = &pair->strips[i]->rows;
        fv_lanes *rounded_sum = &shared->rounded_sums[pair->strips[i] - item->scratch.strips];
        const fv_lanes old_sum = fv_lanes_load(rows->sum);
        fv_strip_weigh(item, pair, i, keys, shared->scale);
        const fv_lanes shrink = fv_lanes_load(rows->rescale);
        /* Unrounded: the largest of these weights is 1, which bf16 holds. */
        *rounded_sum = *rounded_sum * shrink + (fv_lanes_load(rows->sum) - old_sum * shrink);
        if (pair->strips[i]->has_sums)
            fv_strip_rescale_sums(pair->strips[i], item->job->params->v_head_size, item->rescaling);
    }
}

/* Takes over the sums of the weights, or makes the weights again. */
static void end_weights(fv_shared_item *shared, fv_shared_work *work, const fv_key_block *keys)
{
    const fv_strip_pair *pair = &work->pair;
    fv_lanes sums[2];
    for (int32_t i = 0; i < pair->num && !work->is_exact; i++) {
        sums[i] = fv_weigher_sum(&work->weigh[i]);
        work->is_exact = !fv_lanes_all_below(sums[i], LIMIT);
    }
    if (work->is_exact) {
        weigh_exactly(shared, work, keys);
        return;
    }
    for (int32_t i = 0; i < pair->num; i++) {
        float *sum = pair->strips[i]->rows.sum;
        fv_lanes_store(sum, fv_lanes_load(sum) + sums[i]);
        shared->rounded_sums[pair->strips[i] - shared->item->scratch.strips] += work->weigh[i].rounded_sum;
    }
}

/* --- the item -------------------------------------------------------------------------------------------------------- */

/* The steps of the next block; !is_taken: as it would be now. Empty: none is left. */
static fv_step_run next_run(fv_shared_item *shared, int32_t is_taken)
{
    const int32_t steps = shared->item->block_keys / FV_STEP_KEYS;
    if (shared->shares) return fv_key_shares_next(shared->shares, shared->index, steps, is_taken);
    const fv_step_run run = {shared->own.first, fv_min_i32(shared->own.first + steps, shared->own.end)};
    if (is_taken) shared->own.first = run.end;
    return run;
}

/* The block of some steps, its rows in one of the three buffers. */
static fv_key_block keys_of(const fv_tile_item *item, fv_step_run run, int32_t turn)
{
    fv_key_block block = fv_key_block_of(item, run.first * FV_STEP_KEYS, turn % 3);
    block.end = fv_min_i32(block.end, (run.end - run.first) * FV_STEP_KEYS);
    fv_key_block_find_rows(item, &block);
    return block;
}

static fv_shared_work pair_work_of(const fv_shared_item *shared, int32_t p, const fv_key_block *keys)
{
    const fv_tile_item *item = shared->item;
    fv_shared_work work = {.pair.num = fv_min_i32(2, item->num_strips - 2 * p)};
    fv_strip_pair *pair = &work.pair;
    for (int32_t i = 0; i < pair->num; i++) {
        pair->strips[i] = &item->scratch.strips[2 * p + i];
        pair->scores[i] = item->scratch.scores + (int64_t)(2 * p + i) * item->block_keys * FV_TILE_STRIP_ROWS;
        pair->weights[i] = fv_tile_weights(item, 2 * p + i);
    }
    fv_pair_find_steps(pair, keys);
    work.is_exact = !shared->is_plain;
    /* Rows that see few keys, where nothing rounds them but their weights: the largest is then 1, which is held as it is. */
    const int32_t is_finer = item->job->params->out_dtype != FV_DTYPE_BF16;
    for (int32_t i = 0; i < pair->num && is_finer; i++) {
        const fv_key_range *some = &pair->strips[i]->rows.some;
        if (fv_attend_least_keys(item->job, some->first, some->end) <= FEW_KEYS) work.is_exact = 1;
    }
    work.has_scores = work.is_exact;
    return work;
}

/* Weights of a block, and pairs of its values. Returns 0 where a value that some rows must not see is infinite or NaN. */
static int32_t begin_block(fv_shared_item *shared, const fv_key_block *keys)
{
    const fv_tile_item *item = shared->item;
    shared->pairs.looks = !fv_strips_all_seen(item, item->scratch.strips, keys);
    if (fv_tile_reads_value(item, &item->job->cache))
        find_rows(shared, keys);
    else
        convert_rows(shared, keys);
    for (int32_t p = 0; p < shared->num_pairs; p++) shared->works[p] = pair_work_of(shared, p, keys);
    weigh_block(shared, keys);
    if (shared->pairs.not_finite) return 0;
    for (int32_t p = 0; p < shared->num_pairs; p++)
        if (fv_pair_has_steps(&shared->works[p].pair)) end_weights(shared, &shared->works[p], keys);
    return 1;
}

/* Aims at the rows of the item's results, which another CPU may hold: with as many sites as the last block's values have. */
static void aim_at_results(fv_shared_item *shared, int32_t num_sites)
{
    fv_tile_item *item = shared->item;
    const fv_attend_job *job = item->job;
    const fv_attend_params *params = job->params;
    const int64_t head = (int64_t)item->first_head * job->group;
    const int32_t is_part = job->item->partial >= 0;
    const int64_t head_bytes = params->v_head_size *
                               (int64_t)(is_part ? sizeof(float) : fv_dtype_bytes(params->out_dtype));
    const char **rows = item->scratch.token_rows;
    shared->is_last = 1;
    if (!is_part && params->out_head_stride != head_bytes) return;
    for (int32_t token = 0; token < job->item->num_tokens; token++) {
        const int64_t slot = (int64_t)job->item->partial + token;
        const int64_t out_row = (int64_t)job->batch_token + token - params->out_first_token;
        rows[token] = is_part ? (const char *)params->partial_out + (slot * params->num_heads + head) * head_bytes
                              : (const char *)params->out + out_row * params->out_token_stride + head * head_bytes;
    }
    const fv_prefetch_rows of = {
        .rows = {rows, rows},
        .num_planes = 1,
        .num_heads = 1,
        .row_bytes = job->group * head_bytes,
        .end = job->item->num_tokens,
    };
    item->ahead_portions = (int32_t)fv_ceil_div(job->num_rows * head_bytes, (int64_t)num_sites * FV_AHEAD_BYTES);
    fv_prefetch_aim(&item->ahead, &of, fv_tile_tracks(item), FV_AHEAD_BYTES);
}

static void begin(fv_shared_item *shared, fv_tile_item *item, fv_key_shares *shares)
{
    const fv_attend_params *params = item->job->params;
    const int32_t depth = params->head_size / FV_TILE_DEPTH, num_pairs = (item->num_strips + 1) / 2;
    const int32_t slices = params->v_head_size / FV_SUM_COLUMNS, run = slices % FV_PAIR_SLICES ? 1 : FV_PAIR_SLICES;
    *shared = (fv_shared_item){
        .item = item,
        .shares = shares,
        .index = shares ? fv_key_share_index(item->job) : 0,
        .scale = fv_attend_score_scale(item->job, item->first_head),
        .has_parts = fv_has_latent_parts(params),
        .num_pairs = num_pairs,
        .pairs.slice_bytes = fv_shared_slice_bytes(item),
        .pairs.size = params->v_head_size,
        .pairs.scales = item->scratch.part_scales,
        .pairs.low_bytes = fv_shared_slice_bytes(item) * slices,
        .pairs.run = run,
        .pairs.share = (int32_t)fv_ceil_div(FV_STEP_KEYS / 2 * slices, num_pairs * depth * run),
        .pairs.key = FV_STEP_KEYS,
    };
    const fv_key_range *own = &item->job->keys;
    shared->own = (fv_step_run){own->first / FV_STEP_KEYS, (int32_t)fv_ceil_div(own->end, FV_STEP_KEYS)};
    shared->is_plain = fv_scores_are_plain(params, shared->scale) && item->rescaling == FV_RESCALING_MULTIPLY;
    for (int32_t i = 0; i < item->num_strips; i++) item->scratch.strips[i].has_sums = 0;
}

/* What makes the sums of a row those of weights that add up to its sum, rounded as they were. */
static float fit_of(const fv_shared_item *shared, int32_t strip, int32_t lane)
{
    const fv_row_strip *rows = &shared->item->scratch.strips[strip].rows;
    return rows->max[lane] != -INFINITY ? rows->sum[lane] / shared->rounded_sums[strip][lane] : 1.0f;
}

/* A row of the sums in natural order, times `factor`. */
static void store_row(float *to, const fv_shared_item *shared, int32_t strip, int32_t lane, float factor)
{
    const float *sums = shared->item->scratch.strips[strip].sums + lane * FV_TILE_COLUMNS;
    const fv_lanes factors = fv_lanes_splat(factor);
    for (int32_t d = 0; d < shared->item->job->params->v_head_size; d += FV_SUM_COLUMNS, sums += 2 * FV_TILE_FLOATS)
        fv_lanes_store_natural_times(to + d, sums, sums + FV_TILE_FLOATS, factors);
}

/* As fv_attend_finish_row, where the result is partial, but straight to its place. */
static void finish_partial_row(const fv_shared_item *shared, int32_t row)
{
    const fv_tile_item *item = shared->item;
    const fv_attend_job *job = item->job;
    const fv_attend_params *params = job->params;
    const int32_t strip = row / FV_TILE_STRIP_ROWS, lane = row % FV_TILE_STRIP_ROWS;
    const fv_row_strip *rows = &item->scratch.strips[strip].rows;
    const float sum = rows->sum[lane], max = sum != sum ? sum : rows->max[lane];
    const int32_t is_empty = max == -INFINITY;
    const int64_t slot = (int64_t)job->item->partial + row / job->group;
    const int64_t at = slot * params->num_heads + item->first_head * job->group + row % job->group;
    const float v_scale = fv_head_scale_of(job->v_head_scale, params->num_kv_scales, item->first_head);
    store_row(params->partial_out + at * params->v_head_size, shared, strip, lane,
              is_empty ? 0.0f : v_scale * fit_of(shared, strip, lane));
    params->partial_max[at] = max * FV_LN2;
    params->partial_sum[at] = is_empty ? 0.0f : sum;
}

static void finish_row(const fv_shared_item *shared, int32_t row)
{
    const fv_tile_item *item = shared->item;
    const int32_t i = row / FV_TILE_STRIP_ROWS, lane = row % FV_TILE_STRIP_ROWS;
    const fv_tile_strip *strip = &item->scratch.strips[i];
    if (shared->is_plain)
        store_row(item->scratch.row, shared, i, lane, fit_of(shared, i, lane));
    else
        fv_strip_natural_row(item, strip, lane);
    fv_attend_finish_row(&item->natural, item->first_head, row, item->scratch.row, strip->rows.max[lane],
                         strip->rows.sum[lane]);
}

static void finish(const fv_shared_item *shared)
{
    const fv_tile_item *item = shared->item;
    const int32_t size = item->job->params->v_head_size;
    for (int32_t i = 0; i < item->num_strips; i++) {
        const fv_tile_strip *strip = &item->scratch.strips[i];
        if (!strip->has_sums) fv_strip_zero_sums(strip, size); /* its rows saw no key */
    }
    for (int32_t row = 0; row < item->job->num_rows; row++) {
        if (shared->is_plain && item->job->item->partial >= 0)
            finish_partial_row(shared, row);
        else
            finish_row(shared, row);
    }
}

/* shares NULL: the item keeps its keys. */
static int32_t attend(fv_tile_item *item, fv_key_shares *shares)
{
    const fv_attend_params *params = item->job->params;
    const int32_t steps = item->block_keys / FV_STEP_KEYS, columns = params->v_head_size / FV_SUM_COLUMNS;
    fv_shared_item shared;
    begin(&shared, item, shares);
    const int32_t score_sites = shared.num_pairs * steps * (params->head_size / FV_TILE_DEPTH);
    const int32_t value_sites = shared.num_pairs * columns * (steps + 1);
    fv_step_run run = next_run(&shared, 1);
    fv_key_block keys = keys_of(item, run, 0);
    fv_tile_aim_ahead(item, &keys, score_sites);
    fv_strips_begin(item, 0);
    for (int32_t index = 1; run.first < run.end; index++) {
        const fv_step_run ahead = next_run(&shared, 0);
        const fv_key_block next = keys_of(item, ahead, index);
        shared.is_last = 0;
        if (index > 1) fv_tile_aim_ahead(item, &next, score_sites + value_sites);
        if (!begin_block(&shared, &keys)) return 0;
        if (index == 1) fv_tile_aim_ahead(item, &next, value_sites);
        if (next.first >= next.end) aim_at_results(&shared, value_sites);
        fv_shared_add_values(&shared);
        run = next_run(&shared, 1);
        keys = run.first == ahead.first && run.end == ahead.end ? next : keys_of(item, run, index);
    }
    finish(&shared);
    return 1;
}

int32_t FV_ISA_SYMBOL(fv_attend_shared_tiles)(fv_tile_item *item, fv_key_shares *shares)
{
    const fv_attend_job *job = item->job;
    /* Several tokens: values that some must not see are looked at, and what is lost is lost to all siblings. Several KV heads,
     * which come here one after the other: what the first has taken from the shares the others need, too. */
    if (!fv_key_shares_has(shares, job) || job->item->num_tokens > 1 || job->item->num_kv_heads > 1)
        return attend(item, NULL);
    const fv_attend_job whole = fv_key_shares_whole(shares, job);
    item->job = &whole;
    const int32_t is_done = attend(item, shares);
    item->job = job;
    return is_done;
}
