/* The order of products for 2 to 8 strips over large values: MLA's decode of 32 to 128 heads, where K of 256 keys is
 * 288 KB, and pairs of V as large.
 *
 *   block i      weights of all strips, step by step; between them the scores of block i + 1
 *                for each step of 32 keys, half of the depth (18 KB of K) and pair of strips: 9 x 4 products, then the
 *                exponentials of one strip
 *                sums of all strips, 32 columns at a time (pairs of V: 16 KB)
 *                for each pair of strips: its rescaling, then 8 x 4 products
 *
 * So K comes from L2 once for all strips and not once for each pair of them, and pairs of V are written to L1 and read
 * there. What streams from L2 instead are queries and weights, whose tiles are whole. The partial scores of the first
 * half of the depth pass through memory.
 *
 * It is the preload pipeline of AMLA (arXiv 2509.25224, section 4.1): C1 of the next block stands beside V1 of this one,
 * and V2 beside C2. */
#include "kernels/cpu/amx/attend_shared_tiles.h"

#include "kernels/cpu/amx/tile_strips.h"

enum {
    MAX_PAIRS = FV_TILE_SHARED_STRIPS / 2,
    MIN_STRIPS = 2,
    MIN_V_SIZE = 256,
    SPLIT_PAIRS = 2, /* from here on the depth is split: one pair meets K once anyway */
    COLUMNS = 32,    /* of V, paired for all strips */
    STEP_PAIRS_BYTES = FV_STEP_KEYS * COLUMNS * FV_BF16_BYTES,
};

/* A block, and what each pair of strips sees of it. */
typedef struct shared_block {
    fv_key_block keys;
    fv_strip_pair pairs[MAX_PAIRS];
    int32_t first_step, end_step; /* that some pair sees */
} shared_block;

/* The weights of a block in the making. */
typedef struct shared_weigher {
    fv_weigher strips[MAX_PAIRS][2];
    int32_t begun[MAX_PAIRS][2];
} shared_weigher;

/* Lanes of a pair whose sums are to be rescaled: 0 to 15 of its first strip, 16 to 31 of its second. */
typedef struct moved_lanes {
    int32_t num;
    int32_t lanes[2 * FV_TILE_STRIP_ROWS];
} moved_lanes;

int32_t FV_ISA_SYMBOL(fv_shared_strips)(const fv_attend_params *params, int32_t num_strips)
{
    if (params->v_head_size < MIN_V_SIZE || num_strips < MIN_STRIPS) return 0;
    return num_strips <= FV_TILE_SHARED_STRIPS ? num_strips : 0;
}

static int32_t num_pairs_of(const fv_tile_item *item) { return (item->num_strips + 1) / 2; }

/* `turn`: which of the two buffers of scores. */
static shared_block shared_block_of(const fv_tile_item *item, const fv_key_block *keys, int32_t turn)
{
    const int64_t strip_scores = (int64_t)item->block_keys * FV_TILE_STRIP_ROWS;
    shared_block block = {.keys = *keys, .first_step = INT32_MAX};
    for (int32_t p = 0; p < num_pairs_of(item); p++) {
        fv_strip_pair *pair = &block.pairs[p];
        pair->num = fv_min_i32(2, item->num_strips - 2 * p);
        for (int32_t i = 0; i < pair->num; i++) {
            pair->strips[i] = &item->scratch.strips[2 * p + i];
            pair->scores[i] = item->scratch.scores + (turn * item->num_strips + 2 * p + i) * strip_scores;
        }
        fv_pair_find_steps(pair, keys);
        if (pair->first_step >= pair->end_step) continue;
        block.first_step = fv_min_i32(block.first_step, pair->first_step);
        block.end_step = fv_max_i32(block.end_step, pair->end_step);
    }
    return block;
}

static int32_t pair_sees(const fv_strip_pair *pair, int32_t step)
{
    return step >= pair->first_step && step < pair->end_step;
}

/* --- scores of one block beside the weights of another ------------------------------------------------------------- */

/* Exponentials of strip `i` of a pair, where there are some to make. */
FV_ALWAYS_INLINE void weigh_strip(fv_tile_item *item, shared_weigher *weigh, const shared_block *block, int32_t p,
                                  int32_t i, int32_t step)
{
    const fv_strip_pair *pair = &block->pairs[p];
    if (!weigh->begun[p][i] || !pair_sees(pair, step)) return;
    fv_weigher_step(&weigh->strips[p][i], fv_tile_weights(item, 2 * p + i) + step * FV_TILE_BYTES,
                    pair->scores[i] + step * FV_STEP_KEYS * FV_TILE_STRIP_ROWS);
}

/* Half of the depth of a pair's scores. */
FV_ALWAYS_INLINE void score_half(fv_tile_item *item, const fv_strip_pair *pair, const fv_step_keys *keys, int32_t half)
{
    const int32_t depth = item->job->params->head_size / FV_TILE_DEPTH, middle = (depth + 1) / 2;
    const int32_t first = half ? middle : 0, end = half ? depth : middle;
    if (pair->num == 2)
        fv_pair_dot_part(item, pair, keys, first, end, 2);
    else
        fv_pair_dot_part(item, pair, keys, first, end, 1);
}

static void begin_scores(fv_tile_item *item, const fv_strip_pair *pair) { fv_pair_dot_begin(item, pair->num); }

static void load_scores(fv_tile_item *item, const fv_strip_pair *pair, int32_t step)
{
    const int32_t at = step * FV_STEP_KEYS * FV_TILE_STRIP_ROWS, next = at + FV_TILE_ROWS * FV_TILE_STRIP_ROWS;
    fv_tile_load(&item->tiles, 0, pair->scores[0] + at, FV_TILE_ROW_BYTES);
    fv_tile_load(&item->tiles, 1, pair->scores[0] + next, FV_TILE_ROW_BYTES);
    if (pair->num == 1) return;
    fv_tile_load(&item->tiles, 2, pair->scores[1] + at, FV_TILE_ROW_BYTES);
    fv_tile_load(&item->tiles, 3, pair->scores[1] + next, FV_TILE_ROW_BYTES);
}

static void end_scores(fv_tile_item *item, const fv_strip_pair *pair, int32_t step)
{
    fv_pair_dot_end(item, pair, step, pair->num);
}

/* A step of all pairs, the depth in halves: K of a half stays in L1 for all of them. */
static void weigh_and_score_split(fv_tile_item *item, shared_weigher *weigh, const shared_block *block,
                                  const shared_block *next, int32_t step)
{
    const fv_step_keys keys = fv_step_keys_of(&item->scratch, step);
    for (int32_t half = 0; half < 2; half++) {
        for (int32_t p = 0; p < num_pairs_of(item); p++) {
            const fv_strip_pair *pair = &next->pairs[p];
            const int32_t scores = pair_sees(pair, step);
            if (scores && half == 0) begin_scores(item, pair);
            if (scores && half == 1) load_scores(item, pair, step);
            if (scores) score_half(item, pair, &keys, half);
            weigh_strip(item, weigh, block, p, half, step);
            if (scores) end_scores(item, pair, step);
        }
    }
}

static void weigh_and_score_whole(fv_tile_item *item, shared_weigher *weigh, const shared_block *block,
                                  const shared_block *next, int32_t step)
{
    const fv_step_keys keys = fv_step_keys_of(&item->scratch, step);
    for (int32_t p = 0; p < num_pairs_of(item); p++) {
        const fv_strip_pair *pair = &next->pairs[p];
        const int32_t scores = pair_sees(pair, step);
        if (scores) begin_scores(item, pair);
        for (int32_t half = 0; half < 2; half++) {
            if (scores) score_half(item, pair, &keys, half);
            weigh_strip(item, weigh, block, p, half, step);
        }
        if (scores) end_scores(item, pair, step);
    }
}

/* The weights of a block, and the scores of the next; either may be empty. */
static void weigh_and_score(fv_tile_item *item, const shared_block *block, const shared_block *next)
{
    const fv_score_scale scale = fv_attend_score_scale(item->job, item->first_head);
    shared_weigher weigh = {.begun = {{0}}};
    for (int32_t p = 0; p < num_pairs_of(item); p++) {
        const fv_strip_pair *pair = &block->pairs[p];
        for (int32_t i = 0; i < pair->num && pair->first_step < pair->end_step; i++) {
            weigh.begun[p][i] = fv_strip_weigh_begin(&weigh.strips[p][i], item, pair, i, &block->keys, scale,
                                                     fv_tile_weights(item, 2 * p + i));
        }
    }
    const int32_t end = fv_max_i32(block->end_step, next->end_step);
    for (int32_t step = fv_min_i32(block->first_step, next->first_step); step < end; step++) {
        if (num_pairs_of(item) >= SPLIT_PAIRS)
            weigh_and_score_split(item, &weigh, block, next, step);
        else
            weigh_and_score_whole(item, &weigh, block, next, step);
    }
    for (int32_t i = 0; i < item->num_strips; i++) {
        if (weigh.begun[i / 2][i % 2]) fv_weigher_end(&weigh.strips[i / 2][i % 2], &item->scratch.strips[i]);
    }
}

/* --- sums ------------------------------------------------------------------------------------------------------------ */

static moved_lanes moved_lanes_of(const fv_tile_item *item, const fv_strip_pair *pair)
{
    moved_lanes moved = {.num = 0};
    for (int32_t i = 0; i < pair->num; i++) {
        for (int32_t lane = 0; lane < FV_TILE_STRIP_ROWS; lane++) {
            if (!fv_tile_keeps_row(pair->strips[i], lane, item->rescaling))
                moved.lanes[moved.num++] = i * FV_TILE_STRIP_ROWS + lane;
        }
    }
    return moved;
}

static void rescale_columns(const fv_tile_item *item, const fv_strip_pair *pair, const moved_lanes *moved,
                            int32_t column)
{
    for (int32_t i = 0; i < moved->num; i++) {
        const fv_tile_strip *strip = pair->strips[moved->lanes[i] / FV_TILE_STRIP_ROWS];
        const int32_t lane = moved->lanes[i] % FV_TILE_STRIP_ROWS;
        fv_tile_rescale_row(strip->sums + column * FV_TILE_STRIP_ROWS + lane * FV_TILE_COLUMNS,
                            FV_TILE_ROWS * FV_TILE_COLUMNS, COLUMNS / FV_TILE_COLUMNS, strip, lane, item->rescaling);
    }
}

/* Pairs of V, 32 columns of the block's steps. Returns 1 if `looks` and some value is infinite or NaN. */
static int32_t pair_columns(fv_tile_item *item, const char *const *rows, const shared_block *block, int32_t column,
                            int32_t looks)
{
    const int64_t offset = column * FV_BF16_BYTES;
    int32_t not_finite = 0;
    for (int32_t step = block->first_step; step < block->end_step; step++) {
        const char *const *of_step = rows + step * FV_STEP_KEYS;
        char *to = item->scratch.pairs + step * STEP_PAIRS_BYTES;
        for (int32_t i = 0; i < FV_STEP_KEYS; i += 2, to += FV_TILE_ROW_BYTES)
            fv_words_store_pairs(to, to + FV_TILE_BYTES, of_step[i] + offset, of_step[i + 1] + offset);
        for (int32_t i = 0; looks && i < FV_STEP_KEYS; i++) not_finite |= fv_words_not_finite(of_step[i] + offset);
        fv_tile_call_ahead(item);
    }
    return not_finite;
}

FV_ALWAYS_INLINE void add_columns_as(fv_tile_item *item, const shared_block *block, int32_t p, int32_t column,
                                     const int32_t num)
{
    fv_tiles *tiles = &item->tiles;
    const fv_strip_pair *pair = &block->pairs[p];
    const char *weights = fv_tile_weights(item, 2 * p), *others = fv_tile_weights(item, 2 * p + num - 1);
    float *low = pair->strips[0]->sums + column * FV_TILE_STRIP_ROWS, *high = low + FV_TILE_ROWS * FV_TILE_COLUMNS;
    float *other_low = pair->strips[num - 1]->sums + column * FV_TILE_STRIP_ROWS;
    float *other_high = other_low + FV_TILE_ROWS * FV_TILE_COLUMNS;
    fv_tile_load(tiles, 0, low, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 1, high, FV_TILE_ROW_BYTES);
    if (num == 2) {
        fv_tile_load(tiles, 2, other_low, FV_TILE_ROW_BYTES);
        fv_tile_load(tiles, 3, other_high, FV_TILE_ROW_BYTES);
    }
    for (int32_t step = pair->first_step; step < pair->end_step; step++) {
        const char *pairs = item->scratch.pairs + step * STEP_PAIRS_BYTES;
        fv_tile_load(tiles, 6, pairs, FV_TILE_ROW_BYTES);
        fv_tile_load(tiles, 4, weights + step * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
        fv_tile_dot(tiles, 0, 4, 6);
        fv_tile_load(tiles, 7, pairs + FV_TILE_BYTES, FV_TILE_ROW_BYTES);
        fv_tile_dot(tiles, 1, 4, 7);
        if (num == 2) {
            fv_tile_load(tiles, 5, others + step * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
            fv_tile_dot(tiles, 2, 5, 6);
            fv_tile_dot(tiles, 3, 5, 7);
        }
    }
    fv_tile_store(tiles, 0, low, FV_TILE_ROW_BYTES);
    fv_tile_store(tiles, 1, high, FV_TILE_ROW_BYTES);
    if (num == 2) {
        fv_tile_store(tiles, 2, other_low, FV_TILE_ROW_BYTES);
        fv_tile_store(tiles, 3, other_high, FV_TILE_ROW_BYTES);
    }
}

static void add_columns(fv_tile_item *item, const shared_block *block, int32_t p, int32_t column)
{
    if (block->pairs[p].num == 2)
        add_columns_as(item, block, p, column, 2);
    else
        add_columns_as(item, block, p, column, 1);
}

/* Returns 0 where a value that some rows must not see is infinite or NaN. */
static int32_t add_values(fv_tile_item *item, const shared_block *block)
{
    const int32_t size = item->job->params->v_head_size, num_pairs = num_pairs_of(item);
    const int32_t looks = !fv_strips_all_seen(item, item->scratch.strips, &block->keys);
    const int64_t head = item->first_head * item->job->cache.v.head_stride;
    const char *rows[FV_TILE_MANY_KEYS];
    for (int32_t key = block->first_step * FV_STEP_KEYS; key < block->end_step * FV_STEP_KEYS; key++) {
        const int32_t is_inside = key >= block->keys.first && key < block->keys.end;
        rows[key] = is_inside ? block->keys.v_rows[key] + head : item->scratch.zeros;
    }
    moved_lanes moved[MAX_PAIRS];
    for (int32_t p = 0; p < num_pairs; p++) {
        const int32_t has_work = block->pairs[p].first_step < block->pairs[p].end_step;
        moved[p] = has_work ? moved_lanes_of(item, &block->pairs[p]) : (moved_lanes){.num = 0};
    }
    for (int32_t column = 0; column < size; column += COLUMNS) {
        rescale_columns(item, &block->pairs[0], &moved[0], column);
        if (pair_columns(item, rows, block, column, looks)) return 0;
        for (int32_t p = 0; p < num_pairs; p++) {
            if (p + 1 < num_pairs) rescale_columns(item, &block->pairs[p + 1], &moved[p + 1], column);
            if (block->pairs[p].first_step < block->pairs[p].end_step) add_columns(item, block, p, column);
        }
    }
    return 1;
}

/* --- the item -------------------------------------------------------------------------------------------------------- */

/* Block `index` of the item, its rows in one of the three buffers. */
static fv_key_block keys_at(const fv_tile_item *item, int32_t index)
{
    const int32_t first_key = item->job->keys.first / FV_STEP_KEYS * FV_STEP_KEYS;
    return fv_key_block_at(item, first_key + index * item->block_keys, index % 3);
}

/* Makes the tiles of K those of the block. */
static void find_keys(const fv_tile_item *item, const fv_key_block *keys)
{
    if (keys->first >= keys->end) return;
    fv_tile_find_strides(item, keys);
    fv_tile_find_keys(item, keys, item->first_head);
}

int32_t FV_ISA_SYMBOL(fv_attend_shared_tiles)(fv_tile_item *item)
{
    const fv_attend_params *params = item->job->params;
    const int32_t steps = item->block_keys / FV_STEP_KEYS, columns = params->v_head_size / COLUMNS;
    const int32_t num_sites = steps * (num_pairs_of(item) * (params->head_size / FV_TILE_DEPTH) + columns);
    fv_strips_begin(item, 0);
    for (int32_t i = 0; i < item->num_heads * item->num_strips; i++)
        fv_strip_zero_sums(&item->scratch.strips[i], item->job->params->v_head_size);
    fv_key_block keys = keys_at(item, 0), next_keys = keys_at(item, 1);
    shared_block block = {.first_step = INT32_MAX}, next = shared_block_of(item, &keys, 0);
    fv_tile_aim_ahead(item, &next_keys, num_sites);
    find_keys(item, &keys);
    weigh_and_score(item, &block, &next);
    for (int32_t index = 1; next.keys.first < next.keys.end; index++) {
        block = next;
        next = shared_block_of(item, &next_keys, index % 2);
        find_keys(item, &next.keys);
        next_keys = keys_at(item, index + 1);
        fv_tile_aim_ahead(item, &next_keys, num_sites);
        weigh_and_score(item, &block, &next);
        if (!add_values(item, &block)) return 0;
    }
    fv_strips_finish(item);
    return 1;
}
