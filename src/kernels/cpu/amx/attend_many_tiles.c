/* The order of products for 16 strips or more with plain scores: prefill.
 *
 * What bounds it is the way from L2 to L1, so each of the two phases of a block of keys keeps what it reads again small:
 *
 *   scores and weights   of a group of two pairs of strips, step by step: K of a step (8 KB) comes from L2 once for both
 *                        pairs; scores live for 4 KB
 *   sums                 pair after pair, 32 columns at a time: its weights (16 KB) stay in L1, pairs of V come from L2,
 *                        a run of 16 KB for each 32 columns; between the products K's tiles and V's pairs of the next
 *                        block are made
 *
 * Scores lie as [row][key]: queries are A tiles and keys B tiles, so that a row's weights are a row of an A tile as they
 * come, and nothing is transposed but the keys, once for a block. Base and sum of a row are a number and a vector.
 *
 * Strip after strip passes three stages, each beside the others in program order:
 *
 *   tiles 0, 1           products of strip 0 | of strip 1       | strip 0 of the next step
 *   from tiles to L1                         | strip 0's scores | strip 1's
 *   vectors                                  |                  | weights of strip 0
 *
 * While products are under way multiplications of 64 bytes have one port, additions and integers two: weights are of few
 * multiplications, rounded and packed by integers (lanes.h).
 *
 * So scores are gone before the maximum of their block is known. They need none: weights are taken against a reference,
 * the maximum of the first keys that a row saw, and bf16, sums and fp32 scores have exponents to spare. Where the
 * weights of a block add up to more than LIMIT (or to no number), the pair's block is done again with its maxima, to
 * which reference and sums then move. */
#include "kernels/cpu/amx/attend_many_tiles.h"

#include "kernels/cpu/amx/made_keys.h"
#include "kernels/cpu/amx/tile_products.h"

enum {
    GROUP_PAIRS = FV_TILE_GROUP_PAIRS,
    STEP_SCORES = FV_STEP_KEYS * FV_TILE_STRIP_ROWS,
    HALF_SCORES = STEP_SCORES / 2, /* of 16 keys: a C tile */
    COLUMNS = 32,                  /* of sums that are in tiles at a time */
    FEW_KEYS = 64,                 /* up to here weights are exact */
    SUM_ROWS = 8,                  /* whose weights are summed at a time */
    SLICE_STEP_BYTES = FV_STEP_KEYS * COLUMNS * FV_BF16_BYTES,
};

/* 2^59 as bf16: elements below make scores that are numbers, products of keys and queries of 2^8 elements. */
#define HUGE_WORD 0x5d00

/* 2^10 as bf16, above which no weight may be: references stay near to maxima, far from overflow. */
#define LIMIT 0x4480

/* Up to here references keep eight bits behind the point when they go into exponents in fixed point. */
#define MAX_REFERENCE 16000.0f

/* What hides a score: no row's maximum, weight 0, and no infinity in between. */
#define HIDDEN -0x1p120f
#define MIN_FACTOR 0x1p-80f
#define MAX_FACTOR 0x1p6f

/* K and V of a block in the making: a tile of K, or two keys of V, at a time. */
typedef struct key_tiles {
    fv_key_block block;
    fv_made_block *made; /* where others find them when they are made */
    int32_t index, is_made;
    char *k, *v;                    /* k: [block_keys / 16][D / 32] B tiles; v: [Dv / 32][block_keys / 32][2] B tiles */
    const char *rows[FV_TILE_ROWS]; /* of the 16 keys at hand, from the elements of their next tile on */
    int32_t first_step;
    int32_t next, num_k_tiles, end;
    int32_t not_finite; /* some value is infinite or NaN */
    fv_words top;       /* of the magnitudes of keys */
} key_tiles;

/* What turns a strip's scores into weights 2^(dot * factor - base). */
typedef struct row_weigher {
    fv_lanes fine_sums[FV_TILE_STRIP_ROWS]; /* of each row's weights in fp32, in 16 parts, where they are asked for */
    float base[FV_TILE_STRIP_ROWS];         /* is_fine; else what makes the exponents that fv_words_exp2_of takes */
} row_weigher;

/* A pair and a block. A strip that has no other makes a pair with itself. */
typedef struct pair_work {
    fv_strip_pair pair;
    row_weigher weigh[2];
    fv_words top;     /* of both strips' weights */
    int32_t is_exact; /* the weights need the block's maxima */
} pair_work;

typedef struct pair_step {
    pair_work *work; /* NULL: none */
    int32_t step;
    int32_t is_in_tiles; /* the second strip's are */
} pair_step;

typedef struct many_item {
    fv_tile_item *item;
    const key_tiles *keys;
    key_tiles *next_keys;
    fv_score_scale scale;
    int32_t is_fine; /* sums of weights leave the item: exponentials and sums in fp32 */
    int32_t has_huge_queries;
    float *scores; /* of a pair and a step: [2][2][16 rows][16 keys]; weights have been made of them when those of the
                    * next one are stored */
} many_item;

/* --- keys and values ------------------------------------------------------------------------------------------- */

static key_tiles key_tiles_of(const fv_tile_item *item, int32_t index)
{
    const fv_attend_params *params = item->job->params;
    fv_made_keys *made = fv_made_keys_of(params);
    const int32_t slot = fv_made_slot(params, index);
    key_tiles keys = {
        .block = fv_key_block_of(item, index * item->block_keys, index % 3),
        .made = &made->blocks[slot],
        .index = index,
        .k = fv_made_tiles(made, params, slot),
    };
    keys.v = keys.k + (int64_t)item->block_keys * params->head_size * FV_BF16_BYTES;
    const fv_key_block *block = &keys.block;
    if (block->first >= block->end) return keys;
    keys.is_made = keys.made->is_made && keys.made->index == index && keys.made->first <= block->first &&
                   keys.made->end >= block->end;
    if (keys.is_made) return keys;
    fv_key_block_find_rows(item, block);
    keys.first_step = block->first / FV_STEP_KEYS;
    const int32_t num_keys = (fv_key_block_steps(block) - keys.first_step) * FV_STEP_KEYS;
    keys.num_k_tiles = num_keys / FV_TILE_ROWS * (params->head_size / FV_TILE_DEPTH);
    keys.end = keys.num_k_tiles + num_keys / 2;
    return keys;
}

/* Aims at the lines that the block will be made of, or at its tiles. */
static void aim_at_keys(fv_tile_item *item, const key_tiles *keys, int32_t num_sites)
{
    if (!keys->is_made) {
        fv_tile_aim_ahead(item, &keys->block, num_sites);
        return;
    }
    const int64_t bytes = (int64_t)fv_made_block_bytes(item->job->params);
    item->ahead = fv_prefetch_nothing(keys->k);
    item->ahead.run_end = keys->k + bytes;
    item->ahead_portions = (int32_t)fv_ceil_div(bytes, (int64_t)num_sites * FV_AHEAD_BYTES);
}

/* Tile `t` of K; they come in order. */
static void make_keys(const fv_tile_item *item, key_tiles *keys, int32_t t)
{
    const int32_t depth = item->job->params->head_size / FV_TILE_DEPTH;
    for (int32_t i = 0; i < FV_TILE_ROWS; i++) {
        keys->rows[i] = t % depth == 0
                            ? fv_tile_find_key(item, &keys->block, item->first_head, t / depth * FV_TILE_ROWS + i, i)
                            : keys->rows[i] + FV_TILE_ROW_BYTES;
        keys->top = fv_words_max(keys->top, fv_words_magnitudes(keys->rows[i]));
    }
    fv_lanes_store_transposed(keys->k + (int64_t)t * FV_TILE_BYTES, keys->rows);
}

/* Pair `row` of a step: two keys whose weights lie side by side. Returns 1 if some value is infinite or NaN. */
static int32_t make_pairs(const fv_tile_item *item, const key_tiles *keys, int32_t step, int32_t row)
{
    const int32_t size = item->job->params->v_head_size;
    const int64_t slice_bytes = (int64_t)item->block_keys * COLUMNS * FV_BF16_BYTES;
    const int32_t first = step * FV_STEP_KEYS + fv_words_packed_key(row);
    const char *even = fv_tile_find_value(item, &keys->block, item->first_head, first, 0);
    const char *odd = fv_tile_find_value(item, &keys->block, item->first_head, first + 1, 1);
    char *to = keys->v + step * SLICE_STEP_BYTES + row * FV_TILE_ROW_BYTES;
    int32_t not_finite = 0;
    for (int32_t d = 0; d < size * FV_BF16_BYTES; d += COLUMNS * FV_BF16_BYTES, to += slice_bytes) {
        fv_words_store_pairs(to, to + FV_TILE_BYTES, even + d, odd + d);
        not_finite |= fv_words_not_finite(even + d) | fv_words_not_finite(odd + d);
    }
    return not_finite;
}

/* The next tile of K, or two values. */
static void make_next(const fv_tile_item *item, key_tiles *keys)
{
    if (keys->next >= keys->end) return;
    const int32_t at = keys->next++, pair = at - keys->num_k_tiles;
    if (pair < 0)
        make_keys(item, keys, keys->first_step * 2 * (item->job->params->head_size / FV_TILE_DEPTH) + at);
    else
        keys->not_finite |= make_pairs(item, keys, keys->first_step + pair / FV_TILE_ROWS, pair % FV_TILE_ROWS);
}

/* The slot is from now on the block's. */
static void make_begin(const key_tiles *keys)
{
    if (keys->end > 0) keys->made->is_made = 0;
}

/* The rest. A block of plain numbers is kept for other items, whatever their rows see of it. */
static void make_end(fv_tile_item *item, key_tiles *keys)
{
    if (keys->end == 0) return;
    while (keys->next < keys->end) {
        make_next(item, keys);
        if (keys->next % 2) fv_tile_call_ahead(item);
    }
    const int32_t is_plain = !keys->not_finite && fv_words_all_below(keys->top, HUGE_WORD);
    *keys->made = (fv_made_block){is_plain, keys->index, keys->block.first, keys->block.end};
}

/* --- scores beside weights ---------------------------------------------------------------------------------------- */

/* What the scores of a step are products of. */
typedef struct score_operands {
    const char *k, *q[2];
} score_operands;

FV_ALWAYS_INLINE score_operands score_operands_of(const many_item *many, const pair_step *at, const int32_t depth)
{
    return (score_operands){
        .k = many->keys->k + (int64_t)2 * at->step * depth * FV_TILE_BYTES,
        .q = {at->work->pair.strips[0]->q, at->work->pair.strips[1]->q},
    };
}

/* Product p of a strip's scores: 16 keys and 32 elements. The strips of a pair have two tiles of sums each. */
FV_ALWAYS_INLINE void score_product(fv_tile_item *item, const score_operands *of, const int32_t strip, int32_t p,
                                    const int32_t depth)
{
    fv_tiles *tiles = &item->tiles;
    const int32_t d = p / 2;
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

FV_ALWAYS_INLINE void score_begin(fv_tile_item *item, const int32_t strip)
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
FV_ALWAYS_INLINE void store_half(fv_tile_item *item, float *scores, const int32_t strip, const int32_t half)
{
    float *at = scores + strip * STEP_SCORES + half * HALF_SCORES;
    switch (2 * strip + half) {
    case 0: fv_tile_store(&item->tiles, 0, at, FV_TILE_ROW_BYTES); break;
    case 1: fv_tile_store(&item->tiles, 1, at, FV_TILE_ROW_BYTES); break;
    case 2: fv_tile_store(&item->tiles, 2, at, FV_TILE_ROW_BYTES); break;
    default: fv_tile_store(&item->tiles, 3, at, FV_TILE_ROW_BYTES); break;
    }
}

/* Weights of a row and a step, packed, which it also returns. */
FV_ALWAYS_INLINE fv_words weigh_row(row_weigher *weigh, char *weights, const float *scores, int32_t row,
                                    fv_lanes factor, const fv_exp2_constants *constants, const int32_t is_fine)
{
    const fv_lanes base = fv_lanes_splat(weigh->base[row]);
    const float *at = scores + row * FV_TILE_COLUMNS;
    const fv_lanes low = fv_lanes_load(at) * factor + base, high = fv_lanes_load(at + HALF_SCORES) * factor + base;
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

/* What stands beside each other: the scores of a step and the weights of the one before, either of which may be none. */
typedef struct step_pass {
    fv_tile_item *item;
    score_operands of;
    row_weigher *weigh; /* [2], of the last step's strips */
    char *weights[2];
    float *scores; /* of both steps: those of the last are read before those of the next are stored */
    fv_lanes factor;
    fv_exp2_constants constants;
    fv_words top;
    int32_t is_in_tiles; /* the last's second strip's scores are */
    int32_t depth, has_next, weighs, is_fine;
} step_pass;

FV_ALWAYS_INLINE step_pass step_pass_of(const many_item *many, const pair_step *next, const pair_step *last,
                                        int32_t depth, const int32_t scores, const int32_t weighs,
                                        const int32_t is_fine)
{
    step_pass pass = {
        .item = many->item,
        .scores = many->scores,
        .is_in_tiles = last->is_in_tiles,
        .depth = depth,
        .has_next = scores,
        .weighs = weighs,
        .is_fine = is_fine,
    };
    if (scores) pass.of = score_operands_of(many, next, depth);
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
FV_ALWAYS_INLINE void pass_product(step_pass *pass, const int32_t strip, int32_t p)
{
    const int32_t depth = pass->depth, products = 2 * depth;
    if (pass->has_next) {
        if (p == 0) score_begin(pass->item, strip);
        score_product(pass->item, &pass->of, strip, p, depth);
    }
    if (p == depth - 1 || p == depth + depth / 4) {
        const int32_t half = p != depth - 1;
        if (strip == 0 && pass->is_in_tiles) store_half(pass->item, pass->scores, 1, half);
        if (strip == 1 && pass->has_next) store_half(pass->item, pass->scores, 0, half);
    }
    if (!pass->weighs) return;
    for (int32_t row = p * FV_TILE_ROWS / products; row < (p + 1) * FV_TILE_ROWS / products; row++) {
        const fv_words words = weigh_row(&pass->weigh[strip], pass->weights[strip], pass->scores + strip * STEP_SCORES,
                                         row, pass->factor, &pass->constants, pass->is_fine);
        pass->top = fv_words_max(pass->top, words);
    }
}

FV_ALWAYS_INLINE void end_pass(const step_pass *pass, const pair_step *last)
{
    if (pass->weighs) last->work->top = pass->top;
}

FV_ALWAYS_INLINE void score_and_weigh_as(const many_item *many, const pair_step *next, const pair_step *last,
                                         const int32_t depth, const int32_t is_fine)
{
    step_pass pass = step_pass_of(many, next, last, depth, 1, 1, is_fine);
    FV_UNROLL
    for (int32_t p = 0; p < 2 * depth; p++) pass_product(&pass, 0, p);
    FV_UNROLL
    for (int32_t p = 0; p < 2 * depth; p++) pass_product(&pass, 1, p);
    end_pass(&pass, last);
}

/* For any depth; the scores or the weights may be none. */
FV_ALWAYS_INLINE void score_and_weigh_any(const many_item *many, const pair_step *next, const pair_step *last,
                                          const int32_t scores, const int32_t weighs, const int32_t is_fine)
{
    const int32_t depth = many->item->job->params->head_size / FV_TILE_DEPTH;
    step_pass pass = step_pass_of(many, next, last, depth, scores, weighs, is_fine);
    for (int32_t p = 0; p < 2 * depth; p++) pass_product(&pass, 0, p);
    for (int32_t p = 0; p < 2 * depth; p++) pass_product(&pass, 1, p);
    end_pass(&pass, last);
}

/* Stores what is left of a step's scores. */
static void store_scores(const many_item *many, pair_step *last)
{
    if (!last->is_in_tiles) return;
    store_half(many->item, many->scores, 1, 0);
    store_half(many->item, many->scores, 1, 1);
    last->is_in_tiles = 0;
}

static void score(const many_item *many, const pair_step *next, pair_step *last)
{
    store_scores(many, last);
    score_and_weigh_any(many, next, last, 1, 0, 0);
}

static void weigh(const many_item *many, pair_step *last)
{
    store_scores(many, last);
    if (many->is_fine)
        score_and_weigh_any(many, NULL, last, 0, 1, 1);
    else
        score_and_weigh_any(many, NULL, last, 0, 1, 0);
}

static void score_and_weigh_fine(const many_item *many, const pair_step *next, pair_step *last)
{
    if (many->item->job->params->head_size == 4 * FV_TILE_DEPTH)
        score_and_weigh_as(many, next, last, 4, 1);
    else
        score_and_weigh_any(many, next, last, 1, 1, 1);
}

static void score_and_weigh(const many_item *many, const pair_step *next, pair_step *last)
{
    const int32_t depth = many->item->job->params->head_size / FV_TILE_DEPTH;
    if (many->is_fine)
        score_and_weigh_fine(many, next, last);
    else if (depth == 4)
        score_and_weigh_as(many, next, last, 4, 0);
    else if (depth == 2)
        score_and_weigh_as(many, next, last, 2, 0);
    else
        score_and_weigh_any(many, next, last, 1, 1, 0);
}

/* To 2^-8, which exponents in fixed point take in as it is. */
static fv_lanes rounded_reference(fv_lanes max) { return (max + FV_FIXED_ZERO) - FV_FIXED_ZERO; }

/* A strip's scores of a step as [key][row]. */
static void turn_scores(float *to, const float *scores)
{
    const char *rows[FV_TILE_ROWS];
    for (int32_t half = 0; half < 2; half++) {
        for (int32_t i = 0; i < FV_TILE_ROWS; i++)
            rows[i] = (const char *)(scores + half * HALF_SCORES + i * FV_TILE_COLUMNS);
        fv_lanes_store_transposed((char *)(to + half * HALF_SCORES), rows);
    }
}

/* Hides the keys of a step, from number first_key on, from the rows that do not see them. */
static void hide_keys(const fv_row_strip *rows, float *scores, int32_t first_key)
{
    fv_lane_ints key;
    for (int32_t i = 0; i < FV_TILE_COLUMNS; i++) key[i] = first_key + i;
    for (int32_t half = 0; half < 2; half++, key += FV_TILE_COLUMNS) {
        for (int32_t row = 0; row < FV_TILE_STRIP_ROWS; row++) {
            float *at = scores + half * HALF_SCORES + row * FV_TILE_COLUMNS;
            const fv_lane_ints seen = (key >= rows->first[row]) & (key < rows->end[row]);
            fv_lanes_store(at, fv_lanes_select(seen, fv_lanes_load(at), fv_lanes_splat(HIDDEN)));
        }
    }
}

/* The references of a strip's rows: of those that have none, the maximum of the step. 0: some row sees no key there, or
 * an overflow is near. */
static int32_t find_reference(fv_row_strip *rows, const float *scores, fv_lanes factor)
{
    if (fv_strip_has_reference(rows)) return 1;
    float by_key[STEP_SCORES];
    turn_scores(by_key, scores);
    const fv_lanes top = fv_max_of_keys(by_key, 0, FV_STEP_KEYS);
    return fv_strip_take_reference(rows, top, rounded_reference(top * factor));
}

static float *weight_sums_of(const fv_tile_item *item, const fv_tile_strip *strip)
{
    return item->scratch.weight_sums + (strip - item->scratch.strips) * FV_TILE_ROWS * FV_TILE_COLUMNS;
}

/* Sums of a strip to the maxima that have just moved. */
static void rescale(const fv_tile_item *item, const fv_tile_strip *strip)
{
    if (strip->has_sums) fv_strip_rescale_sums(strip, item->job->params->v_head_size, item->rescaling);
    float *weight_sums = weight_sums_of(item, strip);
    for (int32_t row = 0; row < FV_TILE_STRIP_ROWS; row++)
        fv_tile_rescale_row(weight_sums + row * FV_TILE_COLUMNS, 0, 1, strip, row, item->rescaling);
}

/* Moves references to numbers that exponents in fixed point take in; maxima of exact weights are none. 0: too large. */
static int32_t fit_references(const fv_tile_item *item, fv_tile_strip *strip)
{
    const fv_lanes max = fv_lanes_load(strip->rows.max), moved = rounded_reference(max), less = max - moved;
    const float least = 0x1p-60f;
    if (!fv_lanes_all_below(max, MAX_REFERENCE) || !fv_lanes_all_below(-max, MAX_REFERENCE)) return 0;
    if (fv_lanes_all_below(less, least) && fv_lanes_all_below(-less, least)) return 1;
    fv_lanes_store(strip->rows.max, moved);
    fv_lanes_store(strip->rows.rescale, fv_lanes_exp2(less));
    rescale(item, strip);
    return 1;
}

/* Scores of a step are there: hides those that their rows do not see, and readies the weigher. 0: no weights. */
static int32_t begin_weights(const many_item *many, pair_step *at)
{
    pair_work *work = at->work;
    if (!work || work->is_exact) return 0;
    const int32_t first = at->step * FV_STEP_KEYS, local = many->keys->block.first_key + first;
    for (int32_t i = 0; i < 2; i++) {
        fv_row_strip *rows = &work->pair.strips[i]->rows;
        float *scores = many->scores + i * STEP_SCORES;
        const int32_t is_edge = local < rows->all.first || local + FV_STEP_KEYS > rows->all.end;
        if (is_edge || !fv_strip_has_reference(rows)) store_scores(many, at);
        if (is_edge) hide_keys(rows, scores, local);
        if (at->step > work->pair.first_step) continue;
        row_weigher *weigh = &work->weigh[i];
        if (many->is_fine) memset(weigh->fine_sums, 0, sizeof(weigh->fine_sums));
        if (!find_reference(rows, scores, fv_lanes_splat(many->scale.dot)) ||
            (!many->is_fine && !fit_references(many->item, work->pair.strips[i])))
            work->is_exact = 1;
        fv_lanes_store(weigh->base, fv_lanes_splat(many->is_fine ? 0 : FV_FIXED_ONE) - fv_lanes_load(rows->max));
    }
    return !work->is_exact;
}

/* Weights of a group of pairs. */
static void weigh_group(const many_item *many, pair_work *works, int32_t num)
{
    int32_t first = INT32_MAX, end = 0;
    for (int32_t p = 0; p < num; p++) {
        if (works[p].pair.first_step >= works[p].pair.end_step) continue;
        first = fv_min_i32(first, works[p].pair.first_step);
        end = fv_max_i32(end, works[p].pair.end_step);
    }
    pair_step last = {0};
    for (int32_t step = first; step < end; step++) {
        for (int32_t p = 0; p < num; p++) {
            pair_work *work = &works[p];
            if (step < work->pair.first_step || step >= work->pair.end_step || work->is_exact) continue;
            const pair_step next = {work, step, 1};
            if (begin_weights(many, &last))
                score_and_weigh(many, &next, &last);
            else
                score(many, &next, &last);
            last = next;
        }
    }
    if (begin_weights(many, &last)) weigh(many, &last);
}

/* A pair's scores of the block, as [key][row]. */
static void score_block(const many_item *many, pair_work *work)
{
    const fv_strip_pair *pair = &work->pair;
    for (int32_t step = pair->first_step; step < pair->end_step; step++) {
        pair_step none = {0}, at = {work, step, 1};
        score(many, &at, &none);
        store_scores(many, &at);
        for (int32_t i = 0; i < pair->num; i++)
            turn_scores(pair->scores[i] + step * STEP_SCORES, many->scores + i * STEP_SCORES);
    }
}

static float *row_sums_of(const fv_tile_item *item, const fv_tile_strip *strip)
{
    return item->scratch.row_sums + (strip - item->scratch.strips) * FV_TILE_ROWS * FV_TILE_COLUMNS;
}

/* The rows' sums of [row][16] parts. */
static fv_lanes gather_parts(const float *parts)
{
    float turned[FV_TILE_COLUMNS][FV_TILE_STRIP_ROWS];
    const char *rows[FV_TILE_STRIP_ROWS];
    for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++) rows[i] = (const char *)(parts + i * FV_TILE_COLUMNS);
    fv_lanes_store_transposed((char *)turned, rows);
    fv_lanes sum = fv_lanes_load(turned[0]);
    for (int32_t i = 1; i < FV_TILE_COLUMNS; i++) sum += fv_lanes_load(turned[i]);
    return sum;
}

static void add_parts(float *parts, const fv_lanes *more)
{
    for (int32_t row = 0; row < FV_TILE_STRIP_ROWS; row++, parts += FV_TILE_COLUMNS)
        fv_lanes_store(parts, fv_lanes_load(parts) + more[row]);
}

/* Takes over the parts of a strip's row sums. */
static void gather_row_sums(const fv_tile_item *item, fv_tile_strip *strip)
{
    float *parts = row_sums_of(item, strip);
    fv_lanes_store(strip->rows.sum, fv_lanes_load(strip->rows.sum) + gather_parts(parts));
    memset(parts, 0, FV_TILE_BYTES);
}

/* A strip's weights of a block with keys in order to the order of weigh_row. */
static void pack_ordered_weights(const fv_strip_pair *pair, int32_t i)
{
    char *at = pair->weights[i] + pair->first_step * FV_TILE_BYTES;
    for (int32_t row = 0; row < (pair->end_step - pair->first_step) * FV_TILE_ROWS; row++, at += FV_TILE_ROW_BYTES)
        fv_words_pack_order(at);
}

/* A pair's weights by its maxima over the block. */
static void weigh_exactly(const many_item *many, pair_work *work)
{
    fv_tile_item *item = many->item;
    fv_strip_pair *pair = &work->pair;
    score_block(many, work);
    for (int32_t i = 0; i < pair->num; i++) {
        fv_weigher weigher;
        if (many->is_fine) gather_row_sums(item, pair->strips[i]);
        if (fv_strip_weigh_begin(&weigher, item, pair, i, &many->keys->block, many->scale, pair->weights[i])) {
            for (int32_t step = pair->first_step; step < pair->end_step; step++)
                fv_weigher_step(&weigher, pair->weights[i] + step * FV_TILE_BYTES,
                                pair->scores[i] + step * STEP_SCORES);
            fv_weigher_end(&weigher, pair->strips[i]);
        }
        rescale(item, pair->strips[i]);
        pack_ordered_weights(pair, i);
    }
}

/* Takes over the parts of the row sums, or makes the weights again. */
static void end_weights(const many_item *many, pair_work *work)
{
    if (!work->is_exact) work->is_exact = !fv_words_all_below(work->top, LIMIT);
    if (work->is_exact) {
        weigh_exactly(many, work);
        return;
    }
    for (int32_t i = 0; many->is_fine && i < work->pair.num; i++)
        add_parts(row_sums_of(many->item, work->pair.strips[i]), work->weigh[i].fine_sums);
}

/* --- sums --------------------------------------------------------------------------------------------------------- */

/* Row sums in the making, beside products: SUM_ROWS rows of a pair, 0 to 3 of four. */
typedef struct weight_adder {
    const char *weights;
    float *parts;
    fv_lanes sums[SUM_ROWS];
} weight_adder;

FV_ALWAYS_INLINE weight_adder add_weights_begin(const fv_tile_item *item, const fv_strip_pair *pair, int32_t quarter)
{
    const int32_t i = quarter / 2, row = quarter % 2 * SUM_ROWS;
    weight_adder adder = {
        .weights = pair->weights[i] + row * FV_TILE_ROW_BYTES,
        .parts = weight_sums_of(item, pair->strips[i]) + row * FV_TILE_COLUMNS,
    };
    FV_UNROLL
    for (int32_t j = 0; j < SUM_ROWS; j++) adder.sums[j] = fv_lanes_load(adder.parts + j * FV_TILE_COLUMNS);
    return adder;
}

FV_ALWAYS_INLINE void add_weights(weight_adder *adder, int32_t step)
{
    const char *at = adder->weights + step * FV_TILE_BYTES;
    FV_UNROLL
    for (int32_t j = 0; j < SUM_ROWS; j++)
        adder->sums[j] = fv_words_add_to(adder->sums[j], fv_words_load(at + j * FV_TILE_ROW_BYTES));
}

FV_ALWAYS_INLINE void add_weights_end(const weight_adder *adder)
{
    FV_UNROLL
    for (int32_t j = 0; j < SUM_ROWS; j++) fv_lanes_store(adder->parts + j * FV_TILE_COLUMNS, adder->sums[j]);
}

/* COLUMNS of the values; beside their products, if any, a quarter of the weights is summed, or keys and values of the
 * next block are made. */
FV_ALWAYS_INLINE void add_slice(const many_item *many, const fv_strip_pair *pair, int32_t number, const int32_t sums,
                                const int32_t makes)
{
    fv_tile_item *item = many->item;
    const int32_t column = number * COLUMNS;
    const char *slice = many->keys->v + (int64_t)column * item->block_keys * FV_BF16_BYTES;
    weight_adder adder;
    if (sums) adder = add_weights_begin(item, pair, number);
    if (pair->strips[0]->has_sums)
        fv_pair_load_sums(item, pair, column);
    else
        fv_pair_dot_begin(item, 2);
    for (int32_t step = pair->first_step; step < pair->end_step; step++) {
        fv_pair_add_step(item, pair, step, slice + step * SLICE_STEP_BYTES);
        if (sums) add_weights(&adder, step);
        if (makes && step % 2) make_next(item, many->next_keys);
    }
    fv_pair_store_sums(item, pair, column);
    if (sums) add_weights_end(&adder);
}

/* Quarters of the weights for which no slice is left are summed by themselves. */
static void add_values(const many_item *many, const fv_strip_pair *pair)
{
    const int32_t num_slices = many->item->job->params->v_head_size / COLUMNS, num_quarters = 2 * pair->num;
    const int32_t makes = many->next_keys->next < many->next_keys->end;
    for (int32_t quarter = makes ? 0 : num_slices; quarter < num_quarters; quarter++) {
        weight_adder adder = add_weights_begin(many->item, pair, quarter);
        for (int32_t step = pair->first_step; step < pair->end_step; step++) add_weights(&adder, step);
        add_weights_end(&adder);
    }
    for (int32_t i = 0; i < num_slices; i++) {
        if (makes)
            add_slice(many, pair, i, 0, 1);
        else if (i < num_quarters)
            add_slice(many, pair, i, 1, 0);
        else
            add_slice(many, pair, i, 0, 0);
    }
    pair->strips[0]->has_sums = pair->strips[1]->has_sums = 1;
}

/* --- the item ----------------------------------------------------------------------------------------------------- */

/* The pair of strips from `first` on, number p of its group; its weighers are not set. */
static void pair_work_begin(pair_work *work, const many_item *many, int32_t first, int32_t p)
{
    const fv_tile_item *item = many->item;
    fv_strip_pair *pair = &work->pair;
    work->top = (fv_words){0};
    work->is_exact = many->has_huge_queries || !fv_words_all_below(many->keys->top, HUGE_WORD);
    pair->num = fv_min_i32(2, item->num_strips - first);
    for (int32_t i = 0; i < 2; i++) {
        const int32_t own = fv_min_i32(i, pair->num - 1);
        pair->strips[i] = &item->scratch.strips[first + own];
        pair->scores[i] = item->scratch.scores + (int64_t)i * item->block_keys * FV_TILE_STRIP_ROWS;
        pair->weights[i] = fv_tile_weights(item, 2 * p + own);
    }
    fv_pair_find_steps(pair, &many->keys->block);
    /* Rows that see few keys: the largest weight is then 1, which is held as it is. */
    for (int32_t i = 0; i < pair->num; i++) {
        const fv_row_strip *rows = &pair->strips[i]->rows;
        const int32_t ends = rows->some.end - many->keys->block.first_key <= FEW_KEYS;
        if (ends && !fv_strip_has_reference(rows)) work->is_exact = 1;
    }
}

static void attend_keys(const many_item *many)
{
    const int32_t num_strips = many->item->num_strips;
    for (int32_t first = 0; first < num_strips; first += 2 * GROUP_PAIRS) {
        pair_work works[GROUP_PAIRS];
        int32_t num = 0;
        for (; num < GROUP_PAIRS && first + 2 * num < num_strips; num++)
            pair_work_begin(&works[num], many, first + 2 * num, num);
        weigh_group(many, works, num);
        for (int32_t p = 0; p < num; p++) {
            if (works[p].pair.first_step >= works[p].pair.end_step) continue;
            end_weights(many, &works[p]);
            add_values(many, &works[p].pair);
        }
    }
}

/* --- the ends of an item ------------------------------------------------------------------------------------------- */

/* 1: rows end as bf16 of the sums over their denominator. */
static int32_t ends_plainly(const fv_attend_job *job)
{
    return job->item->partial < 0 && !job->params->sinks && job->params->out_dtype == FV_DTYPE_BF16;
}

/* Rows of a strip. */
static void finish_strip(const fv_tile_item *item, const fv_tile_strip *strip)
{
    const fv_attend_job *job = item->job;
    const fv_attend_params *params = job->params;
    const float v_scale = fv_head_scale_of(job->v_head_scale, params->num_kv_scales, item->first_head);
    const fv_lanes max = fv_lanes_load(strip->rows.max), sum = fv_lanes_load(strip->rows.sum);
    const fv_lanes weight_sums = gather_parts(weight_sums_of(item, strip));
    float factors[FV_TILE_STRIP_ROWS];
    for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++) factors[i] = max[i] == -INFINITY ? 0.0f : v_scale / weight_sums[i];
    const int32_t num_rows = fv_min_i32(FV_TILE_STRIP_ROWS, job->num_rows - strip->rows.first_row);
    const int32_t first_head = item->first_head * job->group, end_head = first_head + job->group;
    int64_t out_row = job->batch_token + strip->rows.first_row / job->group - params->out_first_token;
    int32_t head = first_head + strip->rows.first_row % job->group;
    for (int32_t i = 0; i < num_rows; i++, head++) {
        if (head == end_head) {
            head = first_head;
            out_row++;
        }
        char *out = (char *)params->out + out_row * params->out_token_stride + head * params->out_head_stride;
        const float *low = strip->sums + i * FV_TILE_COLUMNS;
        const fv_lanes factor = fv_lanes_splat(factors[i]);
        for (int32_t column = 0; column < params->v_head_size; column += COLUMNS) {
            const float *at = low + column * FV_TILE_STRIP_ROWS;
            fv_words_store_natural(out + column * FV_BF16_BYTES, at, at + FV_TILE_ROWS * FV_TILE_COLUMNS, factor);
        }
        if (!params->lse) continue;
        char *lse = (char *)params->lse + out_row * params->lse_token_stride + head * params->lse_head_stride;
        *(float *)(void *)lse = max[i] == -INFINITY ? -INFINITY : max[i] * FV_LN2 + logf(sum[i]);
    }
}

/* Sums of a strip as if its weights had been summed as they were multiplied. */
static void fit_sums(const fv_tile_item *item, const fv_tile_strip *strip)
{
    const fv_lanes weight_sums = gather_parts(weight_sums_of(item, strip));
    for (int32_t row = 0; row < FV_TILE_STRIP_ROWS; row++) {
        const float sum = strip->rows.sum[row];
        if (strip->rows.max[row] == -INFINITY) continue;
        const float factor = sum / weight_sums[row];
        for (int32_t column = 0; column < item->job->params->v_head_size; column += FV_TILE_COLUMNS) {
            float *at = strip->sums + column * FV_TILE_STRIP_ROWS + row * FV_TILE_COLUMNS;
            fv_lanes_store(at, fv_lanes_load(at) * factor);
        }
    }
}

static void finish(const many_item *many)
{
    const fv_tile_item *item = many->item;
    for (int32_t i = 0; i < item->num_strips; i++) {
        fv_tile_strip *strip = &item->scratch.strips[i];
        if (many->is_fine) gather_row_sums(item, strip);
        if (!strip->has_sums) fv_strip_zero_sums(strip, item->job->params->v_head_size); /* its rows saw no key */
    }
    if (!ends_plainly(item->job)) {
        for (int32_t i = 0; i < item->num_strips; i++) fit_sums(item, &item->scratch.strips[i]);
        fv_strips_finish(item);
        return;
    }
    for (int32_t i = 0; i < item->num_strips; i++) finish_strip(item, &item->scratch.strips[i]);
}

/* Rows of the query heads of a KV head, of queries or output: those of `num_tokens` tokens from `first` on. */
typedef struct token_rows {
    const char *first;
    int64_t token_stride, head_stride, row_bytes;
    int32_t num_tokens;
} token_rows;

static void aim_at_rows(fv_tile_item *item, token_rows of, int32_t num_sites)
{
    const int32_t group = item->job->group;
    const char **rows = item->scratch.token_rows;
    item->ahead = fv_prefetch_nothing(item->scratch.zeros);
    item->ahead_portions = 0;
    if (of.num_tokens <= 0 || of.num_tokens > item->num_strips * FV_TILE_STRIP_ROWS || num_sites <= 0) return;
    for (int32_t token = 0; token < of.num_tokens; token++) rows[token] = of.first + token * of.token_stride;
    const int32_t is_dense = of.head_stride == of.row_bytes; /* heads lie side by side: one row */
    item->ahead = (fv_prefetch_stream){
        .rows = {rows, rows},
        .num_planes = 1,
        .num_heads = is_dense ? 1 : group,
        .offset = item->first_head * group * of.head_stride,
        .head_stride = of.head_stride,
        .row_bytes = is_dense ? group * of.row_bytes : of.row_bytes,
        .end = of.num_tokens,
    };
    const int64_t bytes = of.num_tokens * group * of.row_bytes;
    item->ahead_portions = (int32_t)fv_ceil_div(bytes, (int64_t)num_sites * FV_AHEAD_BYTES);
    fv_prefetch_next_run(&item->ahead);
}

/* The rows of the item's output, which no cache holds. */
static void aim_at_output(fv_tile_item *item, int32_t num_sites)
{
    const fv_attend_job *job = item->job;
    const fv_attend_params *params = job->params;
    const int64_t first = job->batch_token - params->out_first_token;
    aim_at_rows(item,
                (token_rows){
                    .first = (const char *)params->out + first * params->out_token_stride,
                    .token_stride = params->out_token_stride,
                    .head_stride = params->out_head_stride,
                    .row_bytes = (int64_t)params->v_head_size * FV_BF16_BYTES,
                    .num_tokens = ends_plainly(job) ? job->item->num_tokens : 0,
                },
                num_sites);
}

/* The queries of the Q block before the item's, which a worker takes next where it can (made_keys.h). */
static void aim_at_queries(fv_tile_item *item, int32_t num_sites)
{
    const fv_attend_job *job = item->job;
    const fv_attend_params *params = job->params;
    const int32_t num_tokens = fv_min_i32(params->block_q, job->item->first_token);
    aim_at_rows(item,
                (token_rows){
                    .first = (const char *)params->q + (job->batch_token - num_tokens) * params->q_token_stride,
                    .token_stride = params->q_token_stride,
                    .head_stride = params->q_head_stride,
                    .row_bytes = (int64_t)params->head_size * FV_BF16_BYTES,
                    .num_tokens = num_tokens,
                },
                num_sites);
}

int32_t FV_ISA_SYMBOL(fv_many_tiles_serve)(const fv_attend_job *job, int32_t num_strips, fv_rescaling rescaling)
{
    const fv_attend_params *params = job->params;
    if (num_strips < FV_TILE_COPY_STRIPS || rescaling != FV_RESCALING_MULTIPLY) return 0;
    if (params->head_size > FV_MADE_MAX_SIZE || params->v_head_size > FV_MADE_MAX_SIZE) return 0;
    for (int32_t head = 0; head < job->item->num_kv_heads; head++) {
        const fv_score_scale scale = fv_attend_score_scale(job, job->item->first_kv_head + head);
        if (!fv_scores_are_plain(params, scale) || scale.dot < MIN_FACTOR || scale.dot > MAX_FACTOR) return 0;
    }
    return 1;
}

int32_t FV_ISA_SYMBOL(fv_attend_many_tiles)(fv_tile_item *item)
{
    const int32_t depth = item->job->params->head_size / FV_TILE_DEPTH;
    const int32_t num_sites = item->block_keys / FV_STEP_KEYS * ((item->num_strips + 1) / 2) * depth;
    const int32_t first = item->job->keys.first / item->block_keys;
    fv_made_keys_begin(fv_made_keys_of(item->job->params), item->job->item, item->first_head);
    key_tiles keys = key_tiles_of(item, first);
    aim_at_keys(item, &keys, item->num_strips);
    const fv_words queries_top = fv_strips_begin(item, 1);
    for (int32_t i = 0; i < item->num_strips; i++) item->scratch.strips[i].has_sums = 0;
    memset(item->scratch.weight_sums, 0, (size_t)item->num_strips * FV_TILE_BYTES);
    key_tiles next = key_tiles_of(item, first + 1);
    if (keys.end > 0) aim_at_keys(item, &next, keys.end / 2);
    make_begin(&keys);
    make_end(item, &keys);
    make_begin(&next);
    many_item many = {
        .item = item,
        .keys = &keys,
        .next_keys = &next,
        .scale = fv_attend_score_scale(item->job, item->first_head),
        .is_fine = item->job->params->lse || !ends_plainly(item->job),
        .scores = item->scratch.scores + 2 * item->block_keys * FV_TILE_STRIP_ROWS,
        .has_huge_queries = !fv_words_all_below(queries_top, HUGE_WORD),
    };
    if (many.is_fine) memset(item->scratch.row_sums, 0, (size_t)item->num_strips * FV_TILE_BYTES);
    for (int32_t index = first + 2; keys.block.first < keys.block.end; index++) {
        if (keys.not_finite && !fv_strips_all_seen(item, item->scratch.strips, &keys.block)) return 0;
        key_tiles after = key_tiles_of(item, index);
        if (after.block.first < after.block.end)
            aim_at_keys(item, &after, num_sites);
        else if (next.block.first < next.block.end)
            aim_at_queries(item, num_sites);
        else
            aim_at_output(item, num_sites / 4);
        attend_keys(&many);
        make_end(item, &next);
        keys = next;
        next = after;
        make_begin(&next);
    }
    finish(&many);
    return 1;
}
