#include "planner/lane_cut.h"

#include <math.h>

#include "planner/query_block.h"

#define LANE_BLOCKS 256      /* kinds of Q blocks that are weighed; where there are more, pieces taper */
#define MOST_SPLIT_PIECES 2  /* of a Q block, where two lanes share each: more are reduced as fast as they meet */
#define TAPER_KEYS 512       /* of the smallest piece that pieces taper to */
#define TAPER_END 0.2f       /* of the last piece: how long lanes wait for it */
#define HALF_LANE_ITEM 1.33f /* what an item takes in half a lane, at least */
#define HALF_LANE_TAPER 300  /* keys: what tapering pieces take more there of blocks that are no more than lanes */

/* Equal Q blocks, neighbours in the pass, as the lanes see them: one part of its heads. */
typedef struct lane_block {
    int32_t count, rows, num_tokens;
    float cost;  /* of its keys */
    float most;  /* pieces */
    float whole; /* what it takes beside its keys */
    float part;  /* what a piece of it takes in a full round */
} lane_block;

typedef struct lane_blocks {
    lane_block kinds[LANE_BLOCKS];
    int32_t num_kinds, num_blocks;
    int32_t most_rows; /* of a block */
} lane_blocks;

static int32_t add_kind(lane_blocks *blocks, const fv_split_rule *rule, const fv_query_block *block)
{
    if (blocks->num_kinds == LANE_BLOCKS) return 0;
    const int32_t rows = block->num_tokens * fv_group_of(rule->problem);
    blocks->num_blocks++;
    blocks->most_rows = fv_max_i32(blocks->most_rows, rows);
    blocks->kinds[blocks->num_kinds++] = (lane_block){
        .count = 1,
        .rows = rows,
        .num_tokens = block->num_tokens,
        .cost = (float)(fv_query_block_cost(rule, block) / fv_lane_parts(rule)),
        .most = (float)fv_max_i32(1, (block->end_key - block->first_key) / FV_MIN_LANE_SEGMENT_KEYS),
        .whole = fv_lane_item_cost(rows, 0),
        .part = fv_lane_item_cost(rows, 1),
    };
    return 1;
}

/* The pass's Q blocks; more than LANE_BLOCKS kinds: 0, there are enough for each to stay whole. */
static int32_t list_lane_blocks(lane_blocks *blocks, const fv_split_rule *rule, const fv_step *step,
                                const fv_pass *pass)
{
    blocks->num_kinds = blocks->num_blocks = blocks->most_rows = 0;
    int32_t num_before = 0; /* blocks before the run before */
    for (int32_t i = 0; i < pass->num_runs; i++) {
        const fv_query_run *run = &pass->runs[i];
        if (blocks->num_blocks == num_before + 1 && fv_query_run_repeats(step, pass, i)) {
            num_before = blocks->num_blocks++;
            blocks->kinds[blocks->num_kinds - 1].count++;
            continue;
        }
        num_before = blocks->num_blocks;
        for (int32_t token = run->first_token; token < run->first_token + run->num_tokens;) {
            const fv_query_block block = fv_query_block_at(rule, step, run, token);
            if (!add_kind(blocks, rule, &block)) return 0;
            token += block.num_tokens;
        }
    }
    return blocks->num_blocks;
}

/* How many of a kind are among blocks from .. end - 1; `at`: blocks before the kind, then with it. */
static float count_of(const lane_block *kind, int32_t *at, int32_t from, int32_t end)
{
    const int32_t first = fv_max_i32(*at, from), last = fv_min_i32(*at + kind->count, end);
    *at += kind->count;
    return (float)fv_max_i32(0, last - first);
}

static float cost_of_keys(int32_t rows, float keys) { return keys * (float)(FV_LANE_KEY_COST + rows); }

/* What a piece of `rows` rows takes beside its keys, one of so many. */
static float part_cost(const fv_split_rule *rule, int32_t rows, float num_items)
{
    return cost_of_keys(rows, fv_lane_part_keys(rule, rows, num_items));
}

/* What blocks are cut into, of one part of their heads: */
typedef struct piece_count {
    float num_items, num_slots; /* pieces and blocks that stay whole, partial results */
} piece_count;

/* Adds `count` blocks of a kind, cut into `pieces` each. */
static void count_pieces(piece_count *cut, const lane_block *block, float count, float pieces)
{
    cut->num_items += pieces * count;
    if (pieces > 1) cut->num_slots += count * pieces * (float)block->num_tokens;
}

/* Are there more pieces, or partial results, than there is room for? Blocks that find none stay whole, and end last. */
static int32_t are_too_many(const fv_split_rule *rule, const piece_count *cut, int32_t num_blocks)
{
    if (rule->max_slots > 0 && cut->num_slots > (float)rule->max_slots) return 1;
    return rule->spare_pieces > 0 && cut->num_items > (float)(num_blocks + rule->spare_pieces);
}

/* How long the lanes would take for blocks from .. end - 1 with shares of that size: the items' costs, what they take
 * beside their keys, and how well they fill rounds of the lanes. INFINITY: there are too many items. */
static float lane_time(const fv_split_rule *rule, const lane_blocks *blocks, int32_t from, int32_t end, float share)
{
    const float per_share = 1.0f / share;
    piece_count cut = {0};
    float total = 0;            /* of all */
    float keys = 0, beside = 0; /* of the largest */
    int32_t at = 0, rows_of_part = 0;
    for (int32_t i = 0; i < blocks->num_kinds; i++) {
        const lane_block *block = &blocks->kinds[i];
        const float count = count_of(block, &at, from, end);
        if (count == 0) continue;
        const float wanted = block->cost * per_share, up = (float)(int32_t)wanted;
        const float rounded = up < wanted ? up + 1 : up;
        const float pieces = rounded < block->most ? rounded : block->most;
        const float of_keys = block->cost / pieces, fixed = pieces > 1 ? block->part : block->whole;
        total += (of_keys + fixed) * pieces * count;
        count_pieces(&cut, block, count, pieces);
        if (of_keys + fixed <= keys + beside) continue;
        keys = of_keys;
        beside = fixed;
        rows_of_part = pieces > 1 ? block->rows : 0;
    }
    if (are_too_many(rule, &cut, end - from)) return INFINITY;
    const float parts = (float)fv_lane_parts(rule), lanes = (float)rule->num_lanes, num_items = cut.num_items * parts;
    if (rows_of_part > 0) beside = part_cost(rule, rows_of_part, num_items);
    const int32_t are_more = fv_lanes_halve(rule, blocks->most_rows) && num_items > lanes;
    const float reducing = are_more && rows_of_part > 0 ? cost_of_keys(rows_of_part, FV_HALF_LANE_REDUCTION) : 0;
    if (are_more && num_items <= 2 * lanes) return fv_half_lanes_time(rule, num_items, keys, beside) + reducing;
    const float in_rounds = fv_lane_time(rule, num_items, keys, beside);
    const float dealt_out = total * parts / lanes + (keys + beside) * (1 - 1 / lanes); /* never longer */
    return (in_rounds < dealt_out ? in_rounds : dealt_out) + reducing;
}

/* The same where two lanes share each item, all in one round; INFINITY: there are too many. */
static float split_time(const fv_split_rule *rule, const lane_blocks *blocks, int32_t from, int32_t end, float share)
{
    const float parts = (float)fv_lane_parts(rule);
    piece_count cut = {0};
    float longest = 0;
    int32_t at = 0;
    for (int32_t i = 0; i < blocks->num_kinds; i++) {
        const lane_block *block = &blocks->kinds[i];
        const float count = count_of(block, &at, from, end);
        if (count == 0) continue;
        const float pieces = fminf(ceilf(block->cost / share), block->most);
        count_pieces(&cut, block, count, pieces);
        const float beside = pieces > 1 ? part_cost(rule, block->rows, cut.num_items * parts) : block->whole;
        const float meeting = cost_of_keys(block->rows, fv_lane_meeting_keys(block->rows));
        longest = fmaxf(longest, block->cost / pieces / 2 + beside + meeting);
    }
    if (are_too_many(rule, &cut, end - from)) return INFINITY;
    return 2 * cut.num_items * parts <= (float)rule->num_lanes ? longest : INFINITY;
}

/* How long the first `end` blocks take if they are not cut. */
static float whole_time(const fv_split_rule *rule, const lane_blocks *blocks, int32_t end)
{
    float largest = 1;
    int32_t at = 0;
    for (int32_t i = 0; i < blocks->num_kinds; i++)
        if (count_of(&blocks->kinds[i], &at, 0, end) > 0) largest = fmaxf(largest, blocks->kinds[i].cost);
    return end > 0 ? lane_time(rule, blocks, 0, end, largest) : 0;
}

/* Blocks that make whole rounds of the lanes, if a worker has no second lane to make up for a round that is not full, and
 * blocks are runs. */
static int32_t count_whole_blocks(const fv_split_rule *rule, const fv_pass *pass, int32_t num_blocks)
{
    if (rule->num_lanes > rule->num_workers || num_blocks != pass->num_runs || pass->num_groups > 0) return 0;
    const int32_t parts = fv_lane_parts(rule);
    return num_blocks * parts / rule->num_lanes * rule->num_lanes / parts;
}

/* What blocks from `from` on cost together. */
static int64_t cost_from(const lane_blocks *blocks, int32_t from)
{
    int64_t cost = 0;
    int32_t at = 0;
    for (int32_t i = 0; i < blocks->num_kinds; i++) {
        const float count = count_of(&blocks->kinds[i], &at, from, blocks->num_blocks);
        cost += (int64_t)blocks->kinds[i].cost * (int64_t)count;
    }
    return cost;
}

/* And a little more, for times are floats. */
static int64_t share_of(int64_t exact) { return exact + exact / 1024; }

/* The share at which blocks from `from` on are as many pieces each, least .. most, as fill one round of `num_lanes`; 0: there is
 * none. */
static int64_t one_round_share(const fv_split_rule *rule, const lane_blocks *blocks, int32_t from, int32_t num_lanes,
                               int32_t least, int32_t most)
{
    const int32_t num_blocks = blocks->num_blocks - from;
    const int32_t pieces = num_blocks > 0 ? num_lanes / (num_blocks * fv_lane_parts(rule)) : 0;
    if (pieces < least || pieces > most) return 0;
    float largest = 0;
    int32_t at = 0;
    for (int32_t i = 0; i < blocks->num_kinds; i++)
        if (count_of(&blocks->kinds[i], &at, from, blocks->num_blocks) > 0)
            largest = fmaxf(largest, blocks->kinds[i].cost);
    return share_of(fv_ceil_div((int64_t)largest, pieces));
}

/* The share of `rest` (of one part) at which 24 lanes get so many items. */
static int64_t items_share(const fv_split_rule *rule, int64_t rest, int64_t items)
{
    const int64_t lanes = rule->num_lanes;
    return fv_max_i64(1, share_of(fv_ceil_div(rest * fv_lane_parts(rule) * 24, lanes * items)));
}

static int64_t least_taper_share(void) { return (int64_t)TAPER_KEYS * (FV_LANE_KEY_COST + FV_DECODE_ROWS); }

int64_t fv_lane_taper_share(const fv_split_rule *rule, const fv_lane_cut *cut, int64_t rest, int64_t cost)
{
    if (cost < cut->uncut) return fv_max_i64(1, cost);
    return fv_max_i64(rest * 3 / (2 * (int64_t)rule->num_lanes), least_taper_share());
}

/* How long the lanes would take with pieces that taper, of which there have to be more than lanes, and the first of which end
 * before the others do: a worker's lanes go on together to the end, one alone does not. */
static float taper_time(const fv_split_rule *rule, const fv_lane_cut *taper, const lane_blocks *blocks, int64_t total)
{
    const float parts = (float)fv_lane_parts(rule);
    const int32_t is_alone = rule->num_workers >= rule->num_lanes;
    piece_count cut = {0};
    float rest = (float)total, sum = 0, last = 0, most = 0;
    for (int32_t i = 0; i < blocks->num_kinds; i++) {
        const lane_block *block = &blocks->kinds[i];
        for (int32_t k = 0; k < block->count; k++) {
            const float share = (float)fv_lane_taper_share(rule, taper, (int64_t)rest, (int64_t)block->cost);
            const float wanted = ceilf(block->cost / share);
            const float pieces = fmaxf(1, fminf(wanted, block->most));
            last = block->cost / pieces + (pieces > 1 ? block->part : block->whole);
            sum += last * pieces;
            most = fmaxf(most, last);
            count_pieces(&cut, block, 1, pieces);
            rest = fmaxf(0, rest - block->cost * parts);
        }
    }
    if (cut.num_items * parts <= (float)rule->num_lanes) return INFINITY;
    if (are_too_many(rule, &cut, blocks->num_blocks)) return INFINITY;
    const float end = last * (is_alone ? 1 : TAPER_END);
    const float time = sum * parts / (float)rule->num_lanes + end;
    if (is_alone && most > time) return INFINITY;
    if (!fv_lanes_halve(rule, blocks->most_rows)) return time;
    const int32_t are_few = blocks->num_blocks * fv_lane_parts(rule) <= rule->num_lanes;
    return fmaxf(time + (are_few ? cost_of_keys(blocks->most_rows, HALF_LANE_TAPER) : 0), HALF_LANE_ITEM * most);
}

fv_lane_cut fv_lane_cut_choose(const fv_split_rule *rule, const fv_step *step, const fv_pass *pass, int64_t total)
{
    static const uint8_t items[] = {8, 12, 16, 18, 21, 24, 30, 36, 42, 48, 60, 72, 84, 96}; /* for 24 lanes */
    fv_lane_cut best = {.share = fv_max_i64(1, total / rule->num_lanes), .tapers = 1, .uncut = 4 * least_taper_share()};
    if (pass->num_runs * (int64_t)fv_lane_parts(rule) > 4 * (int64_t)rule->num_lanes) return best;
    lane_blocks blocks;
    const int32_t num_blocks = list_lane_blocks(&blocks, rule, step, pass);
    if (num_blocks == 0) return best;
    if (rule->num_workers < rule->num_lanes) best.uncut = least_taper_share();
    float best_time = taper_time(rule, &best, &blocks, total);
    best.time = best_time;
    const int32_t whole[] = {0, count_whole_blocks(rule, pass, num_blocks)};
    for (int32_t w = 0; w < (whole[1] > 0 ? 2 : 1); w++) {
        const float before = whole_time(rule, &blocks, whole[w]);
        const int64_t rest = cost_from(&blocks, whole[w]);
        const int32_t in_round = fv_min_i32(rule->num_lanes, rule->num_workers); /* a lane of each worker */
        const int64_t one_round = one_round_share(rule, &blocks, whole[w], in_round, 2, INT32_MAX);
        for (size_t i = 0; i < FV_ARRAY_LEN(items) + (one_round > 0); i++) {
            const int64_t share = i == FV_ARRAY_LEN(items) ? one_round : items_share(rule, rest, items[i]);
            const float time = before + lane_time(rule, &blocks, whole[w], num_blocks, (float)share);
            if (time >= best_time) continue;
            best_time = time;
            best = (fv_lane_cut){.share = share, .whole_runs = whole[w], .time = time};
        }
        if (rule->splits_items != 1 || pass->num_groups > 0) continue;
        const int64_t halves = one_round_share(rule, &blocks, whole[w], rule->num_lanes / 2, 1, MOST_SPLIT_PIECES);
        if (halves == 0) continue;
        const float time = before + split_time(rule, &blocks, whole[w], num_blocks, (float)halves);
        if (time >= best_time) continue;
        best_time = time;
        best = (fv_lane_cut){.share = halves, .whole_runs = whole[w], .splits = 1, .time = time};
    }
    return best;
}
