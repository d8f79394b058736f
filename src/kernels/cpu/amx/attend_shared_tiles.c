/* The order of products for 2 to 8 strips over large values: MLA's decode of 32 to 128 heads, where K of 256 keys is
 * 288 KB, and pairs of V as large.
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
 * block are kept and its maxima found first. */
#include "kernels/cpu/amx/attend_shared_tiles.h"

#include "kernels/cpu/amx/tile_products.h"

enum {
    MAX_PAIRS = FV_TILE_SHARED_STRIPS / 2,
    MIN_STRIPS = 2,
    MIN_V_SIZE = 256,
    FEW_KEYS = FV_TILE_MANY_KEYS, /* up to here weights are exact */
    COLUMNS = 32,                 /* of sums that are in tiles at a time */
    WEIGHED = 16,                 /* the times four products that have weights between them */
    MOST_SLICES = 4,
    TILE_FLOATS = FV_TILE_ROWS * FV_TILE_COLUMNS,
    STEP_PAIRS_BYTES = FV_STEP_KEYS * COLUMNS * FV_BF16_BYTES,
};

/* What the weights of a row and a block may add up to: references stay near to maxima, far from overflow. */
#define LIMIT 65536.0f

/* Tiles 0 to 3: two of each strip of a pair, or one of each strip of two pairs. */
typedef struct held_tiles {
    float *at[4]; /* where each belongs */
    int32_t num;  /* of tiles; 0: nothing is held */
} held_tiles;

/* A pair and a block. */
typedef struct pair_work {
    fv_strip_pair pair;
    fv_weigher weigh[2];
    int32_t is_exact;   /* the weights need the block's maxima */
    int32_t has_scores; /* its scores of the block are kept */
} pair_work;

/* The scores of a pair and a step. */
typedef struct pair_step {
    pair_work *work; /* NULL: none */
    int32_t step;
    held_tiles scores;
} pair_step;

/* V's pairs of a step in the making, some columns of two keys at a time. */
typedef struct pair_maker {
    const char *const *rows; /* of the step's keys */
    char *to;
    int64_t slice_bytes; /* from one run of columns to the next */
    int32_t key, column; /* the next */
    int32_t size;        /* columns */
    int32_t run, share;  /* how many times 32 are made at a time; and times after four products */
    int32_t looks, not_finite;
} pair_maker;

typedef struct shared_item {
    fv_tile_item *item;
    held_tiles held; /* in tiles, not in memory yet */
    pair_maker pairs;
    pair_work works[MAX_PAIRS];
    fv_score_scale scale;
    fv_lanes rounded_sums[FV_TILE_SHARED_STRIPS]; /* of each row's weights as they are multiplied */
    int32_t num_pairs;
    int32_t is_last;                       /* no key is asked for ahead, but room for the results */
    int32_t is_plain;                      /* weights may be taken against a reference */
    fv_key_shares *shares;                 /* NULL: the item has no siblings */
    int32_t index;                         /* else: which it is */
    fv_step_run own;                       /* then: its steps that are left */
    const char *values[FV_TILE_MANY_KEYS]; /* rows of the block's */
} shared_item;

int32_t FV_ISA_SYMBOL(fv_shared_strips)(const fv_attend_params *params, int32_t num_strips)
{
    if (params->v_head_size < MIN_V_SIZE || num_strips < MIN_STRIPS) return 0;
    return num_strips <= FV_TILE_SHARED_STRIPS ? num_strips : 0;
}

static int32_t has_steps(const fv_strip_pair *pair) { return pair->first_step < pair->end_step; }

static int32_t pair_sees(const fv_strip_pair *pair, int32_t step)
{
    return step >= pair->first_step && step < pair->end_step;
}

/* --- tiles that change hands ---------------------------------------------------------------------------------------- */

/* What tile t of 0 to 3 holds goes to memory. */
#define LEAVE_TILE(tiles, t, held)                                                        \
    do {                                                                                  \
        if ((held)->num > (t)) fv_tile_store(tiles, t, (held)->at[t], FV_TILE_ROW_BYTES); \
    } while (0)

/* And what it is to hold comes from there, or is 0. */
#define SWITCH_TILE(tiles, t, held, next, is_zero)                    \
    do {                                                              \
        LEAVE_TILE(tiles, t, held);                                   \
        if (is_zero)                                                  \
            fv_tile_zero(tiles, t);                                   \
        else                                                          \
            fv_tile_load(tiles, t, (next)->at[t], FV_TILE_ROW_BYTES); \
    } while (0)

/* Two tiles, one behind the other, for each strip of a pair. */
static held_tiles held_of_pair(float *first, float *second, int32_t num_strips)
{
    return (held_tiles){{first, first + TILE_FLOATS, second, second + TILE_FLOATS}, 2 * num_strips};
}

static void store_held(shared_item *shared)
{
    fv_tiles *tiles = &shared->item->tiles;
    LEAVE_TILE(tiles, 0, &shared->held);
    LEAVE_TILE(tiles, 1, &shared->held);
    LEAVE_TILE(tiles, 2, &shared->held);
    LEAVE_TILE(tiles, 3, &shared->held);
    shared->held.num = 0;
}

/* --- pairs of V ------------------------------------------------------------------------------------------------------ */

/* A run of columns lies a little further than the keys of a block take, so that those of one key are not all of the same
 * lines of L1. */
static int64_t slice_bytes_of(const fv_tile_item *item)
{
    return (int64_t)item->block_keys * COLUMNS * FV_BF16_BYTES + FV_TILE_SLICE_PAD;
}

/* Rows of the block, read where they lie. */
static void find_rows(shared_item *shared, const fv_key_block *keys)
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
static void convert_rows(shared_item *shared, const fv_key_block *keys)
{
    const fv_tile_item *item = shared->item;
    const fv_tile_scratch *scratch = &item->scratch;
    const int64_t row_bytes = (int64_t)item->job->params->head_size * FV_BF16_BYTES;
    for (int32_t t = 0; t < 2 * fv_key_block_steps(keys); t++) {
        const int32_t first = t * FV_TILE_ROWS;
        char *rows = scratch->k_copies + first * row_bytes;
        fv_tile_convert_rows(rows, item, keys, item->first_head, first);
        for (int32_t i = 0; i < FV_TILE_ROWS; i++) shared->values[first + i] = rows + i * row_bytes;
        scratch->k_tiles[t] = rows;
        scratch->k_strides[t] = row_bytes;
    }
}

static void begin_pairs(shared_item *shared, int32_t step)
{
    pair_maker *pairs = &shared->pairs;
    pairs->rows = shared->values + step * FV_STEP_KEYS;
    pairs->to = shared->item->scratch.pairs + step * STEP_PAIRS_BYTES;
    pairs->key = pairs->column = 0;
}

FV_ALWAYS_INLINE void make_pairs_of(pair_maker *pairs, const int32_t num_slices)
{
    const int64_t offset = pairs->column * FV_BF16_BYTES;
    const char *even = pairs->rows[pairs->key] + offset, *odd = pairs->rows[pairs->key + 1] + offset;
    char *to = pairs->to + pairs->column / COLUMNS * pairs->slice_bytes + pairs->key / 2 * FV_TILE_ROW_BYTES;
    FV_UNROLL
    for (int32_t i = 0; i < num_slices; i++, to += pairs->slice_bytes) {
        const int64_t at = i * COLUMNS * FV_BF16_BYTES;
        fv_words_store_pairs(to, to + FV_TILE_BYTES, even + at, odd + at);
        if (FV_UNLIKELY(pairs->looks))
            pairs->not_finite |= fv_words_not_finite(even + at) | fv_words_not_finite(odd + at);
    }
    pairs->column += num_slices * COLUMNS;
    if (pairs->column < pairs->size) return;
    pairs->column = 0;
    pairs->key += 2;
}

/* Where the next of the columns of two keys are, and where their pairs go. */
typedef struct pair_place {
    const char *even, *odd; /* NULL: nothing is left */
    char *to;
} pair_place;

/* MOST_SLICES columns of 32 are taken. */
FV_ALWAYS_INLINE pair_place take_pairs(pair_maker *pairs)
{
    if (pairs->key >= FV_STEP_KEYS || pairs->run != MOST_SLICES) return (pair_place){0};
    const int64_t offset = pairs->column * FV_BF16_BYTES;
    const pair_place place = {pairs->rows[pairs->key] + offset, pairs->rows[pairs->key + 1] + offset,
                              pairs->to + pairs->column / COLUMNS * pairs->slice_bytes +
                                  pairs->key / 2 * FV_TILE_ROW_BYTES};
    for (int32_t i = 0; FV_UNLIKELY(pairs->looks) && i < MOST_SLICES; i++) {
        const int64_t at = i * COLUMNS * FV_BF16_BYTES;
        pairs->not_finite |= fv_words_not_finite(place.even + at) | fv_words_not_finite(place.odd + at);
    }
    pairs->column += MOST_SLICES * COLUMNS;
    if (pairs->column >= pairs->size) {
        pairs->column = 0;
        pairs->key += 2;
    }
    return place;
}

/* One half of what was taken. */
FV_ALWAYS_INLINE void make_half(const pair_place *place, int64_t slice_bytes, const int32_t half)
{
    if (!place->even) return;
    FV_UNROLL
    for (int32_t i = half * MOST_SLICES / 2; i < (half + 1) * MOST_SLICES / 2; i++) {
        const int64_t at = i * COLUMNS * FV_BF16_BYTES;
        char *to = place->to + i * slice_bytes;
        fv_words_store_pairs(to, to + FV_TILE_BYTES, place->even + at, place->odd + at);
    }
}

/* Two keys, `run` of 32 columns. */
FV_ALWAYS_INLINE void make_pairs(pair_maker *pairs)
{
    if (pairs->key >= FV_STEP_KEYS) return;
    if (FV_LIKELY(pairs->run == MOST_SLICES))
        make_pairs_of(pairs, MOST_SLICES);
    else
        make_pairs_of(pairs, 1);
}

static void make_rest(pair_maker *pairs)
{
    while (pairs->key < FV_STEP_KEYS) make_pairs(pairs);
}

/* --- scores beside weights ------------------------------------------------------------------------------------------- */

/* What is to be weighed between four products. */
typedef struct due_weights {
    fv_weigher *weigh; /* NULL: nothing */
    fv_words *words;   /* two: four keys */
    const float *scores;
} due_weights;

/* Four products of a pair's scores; of the first elements: tile after tile is taken over from the pair before. */
FV_ALWAYS_INLINE void score_products(shared_item *shared, const pair_step *next, const fv_step_keys *keys, int32_t d,
                                     const int32_t is_first, const int32_t num, due_weights due)
{
    fv_tile_item *item = shared->item;
    fv_tiles *tiles = &item->tiles;
    const held_tiles *held = &shared->held, *scores = &next->scores;
    const fv_strip_pair *pair = &next->work->pair;
    const int64_t slice_bytes = shared->pairs.slice_bytes;
    const pair_place place = take_pairs(&shared->pairs);
    fv_tile_load_past(tiles, 6, pair->strips[0]->q + d * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 4, keys->tiles[0] + d * keys->depths[0], keys->strides[0]);
    if (is_first) SWITCH_TILE(tiles, 0, held, scores, 1);
    fv_tile_dot(tiles, 0, 4, 6);
    make_half(&place, slice_bytes, 0);
    fv_tile_load(tiles, 5, keys->tiles[1] + d * keys->depths[1], keys->strides[1]);
    if (is_first) SWITCH_TILE(tiles, 1, held, scores, 1);
    fv_tile_dot(tiles, 1, 5, 6);
    if (due.weigh) due.words[0] = fv_weigher_words(due.weigh, due.scores, 1);
    if (num == 2) {
        fv_tile_load_past(tiles, 7, pair->strips[1]->q + d * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
        if (is_first) SWITCH_TILE(tiles, 2, held, scores, 1);
        fv_tile_dot(tiles, 2, 4, 7);
    }
    make_half(&place, slice_bytes, 1);
    if (num == 2) {
        if (is_first) SWITCH_TILE(tiles, 3, held, scores, 1);
        fv_tile_dot(tiles, 3, 5, 7);
    }
    if (is_first) shared->held = *scores;
    for (int32_t i = place.even ? 1 : 0; i < shared->pairs.share; i++) make_pairs(&shared->pairs);
    fv_tile_call_ahead(item);
    if (due.weigh) due.words[1] = fv_weigher_words(due.weigh, due.scores + FV_TILE_STRIP_ROWS, 1);
}

static char *step_weights_of(const pair_step *at, int32_t i)
{
    return at->work->pair.weights[i] + at->step * FV_TILE_BYTES;
}

/* The scores of two strips and, from the second four products on, the weights of two others. */
static void score_and_weigh_pairs(shared_item *shared, const pair_step *next, const pair_step *last,
                                  const fv_step_keys *keys, int32_t depth)
{
    const due_weights none = {0};
    int32_t d = 0;
    score_products(shared, next, keys, d++, 1, 2, none);
    FV_ROLLED
    for (int32_t strip = 0; strip < 2; strip++) {
        fv_weigher weigh = last->work->weigh[strip];
        fv_words words[16];
        FV_ROLLED
        for (int32_t p = 0; p < 16; p += 2, d++) {
            const float *scores = last->scores.at[2 * strip] + fv_words_key(p, 0) * FV_TILE_STRIP_ROWS;
            score_products(shared, next, keys, d, 0, 2, (due_weights){&weigh, words + p, scores});
        }
        fv_words_store_transposed(step_weights_of(last, strip), words);
        fv_weigher_end_step(&weigh);
        last->work->weigh[strip] = weigh;
    }
    for (; d < depth; d++) score_products(shared, next, keys, d, 0, 2, none);
}

static void weigh(const pair_step *last)
{
    for (int32_t i = 0; i < last->work->pair.num; i++)
        fv_weigher_step(&last->work->weigh[i], step_weights_of(last, i), last->scores.at[2 * i], NULL, 1);
}

/* `last` is none where it is not to be weighed. */
static void score_and_weigh(shared_item *shared, const pair_step *next, const pair_step *last)
{
    const fv_step_keys keys = fv_step_keys_of(&shared->item->scratch, next->step);
    const int32_t depth = shared->item->job->params->head_size / FV_TILE_DEPTH, num = next->work->pair.num;
    if (depth > WEIGHED && num == 2 && last->work && last->work->pair.num == 2) {
        score_and_weigh_pairs(shared, next, last, &keys, depth);
        return;
    }
    const due_weights none = {0};
    if (shared->held.num > 2 * num) store_held(shared);
    for (int32_t d = 0; d < depth; d++) {
        if (num == 2 && d == 0)
            score_products(shared, next, &keys, d, 1, 2, none);
        else if (num == 2)
            score_products(shared, next, &keys, d, 0, 2, none);
        else if (d == 0)
            score_products(shared, next, &keys, d, 1, 1, none);
        else
            score_products(shared, next, &keys, d, 0, 1, none);
    }
    if (last->work) weigh(last);
}

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
static int32_t begin_weights(shared_item *shared, const pair_step *at, const fv_key_block *keys)
{
    pair_work *work = at->work;
    if (!work || work->is_exact) return 0;
    const fv_lanes factor = fv_lanes_splat(shared->scale.dot);
    const int32_t local = keys->first_key + at->step * FV_STEP_KEYS;
    for (int32_t i = 0; i < work->pair.num; i++) {
        fv_row_strip *rows = &work->pair.strips[i]->rows;
        float *scores = at->scores.at[2 * i];
        const int32_t is_edge = local < rows->all.first || local + FV_STEP_KEYS > rows->all.end;
        if (is_edge || !fv_strip_has_reference(rows)) store_held(shared);
        if (is_edge) fv_weigher_hide(rows, shared->item->job, scores, local, 0, 1);
        if (at->step > work->pair.first_step) continue;
        if (!find_reference(rows, scores, factor)) work->is_exact = 1;
        work->weigh[i] = (fv_weigher){.factor = factor, .base = fv_lanes_load(rows->max)};
    }
    return !work->is_exact;
}

/* Scores that live until the next pair's are stored, or are kept. */
static held_tiles scores_of(const shared_item *shared, const pair_work *work, int32_t step)
{
    const int32_t num = work->pair.num, offset = step * FV_STEP_SCORES;
    float *room = shared->item->scratch.step_scores;
    if (!work->has_scores) return held_of_pair(room, room + FV_STEP_SCORES, num);
    return held_of_pair(work->pair.scores[0] + offset, work->pair.scores[num - 1] + offset, num);
}

/* Scores of a block and, but for the exact, weights; pairs of its values. */
static void weigh_block(shared_item *shared, const fv_key_block *keys)
{
    int32_t first = INT32_MAX, end = 0;
    for (int32_t p = 0; p < shared->num_pairs; p++) {
        const fv_strip_pair *pair = &shared->works[p].pair;
        if (!has_steps(pair)) continue;
        first = fv_min_i32(first, pair->first_step);
        end = fv_max_i32(end, pair->end_step);
    }
    pair_step last = {0};
    for (int32_t step = first; step < end; step++) {
        begin_pairs(shared, step);
        for (int32_t p = 0; p < shared->num_pairs; p++) {
            pair_work *work = &shared->works[p];
            if (!pair_sees(&work->pair, step) || (work->is_exact && !work->has_scores)) continue;
            if (!begin_weights(shared, &last, keys)) last.work = NULL;
            if (work->is_exact && !work->has_scores) continue; /* since now */
            const pair_step next = {work, step, scores_of(shared, work, step)};
            score_and_weigh(shared, &next, &last);
            last = next;
        }
        make_rest(&shared->pairs);
    }
    if (begin_weights(shared, &last, keys)) {
        store_held(shared);
        weigh(&last);
    }
    store_held(shared);
}

/* A pair's weights by its maxima over the block. */
static void weigh_exactly(shared_item *shared, pair_work *work, const fv_key_block *keys)
{
    fv_tile_item *item = shared->item;
    const fv_strip_pair *pair = &work->pair;
    const pair_step none = {0};
    if (!work->has_scores) {
        work->has_scores = 1;
        for (int32_t step = pair->first_step; step < pair->end_step; step++) {
            const pair_step next = {work, step, scores_of(shared, work, step)};
            score_and_weigh(shared, &next, &none);
        }
        store_held(shared);
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
static void end_weights(shared_item *shared, pair_work *work, const fv_key_block *keys)
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

/* --- sums ------------------------------------------------------------------------------------------------------------ */

/* Asks for the next lines of the next block, or of the results. */
FV_ALWAYS_INLINE void call_ahead(shared_item *shared)
{
    fv_tile_item *item = shared->item;
    if (FV_LIKELY(!shared->is_last)) {
        fv_tile_call_ahead(item);
        return;
    }
    for (int32_t i = 0; i < item->ahead_portions && item->ahead.num_tracks > 0; i++)
        fv_prefetch_to_write(fv_prefetch_take_turn(&item->ahead, &item->ahead.turn), FV_AHEAD_BYTES);
}

/* The products of 32 columns of a pair with a step; in the first, tile after tile is taken over from those before. */
FV_ALWAYS_INLINE void add_step(shared_item *shared, const held_tiles *next, const char *weights, const char *others,
                               const char *pairs, const int32_t is_first, int32_t is_zero, const int32_t num)
{
    fv_tiles *tiles = &shared->item->tiles;
    const held_tiles *held = &shared->held;
    fv_tile_load(tiles, 6, pairs, FV_TILE_ROW_BYTES);
    fv_tile_load_past(tiles, 4, weights, FV_TILE_ROW_BYTES);
    if (is_first) SWITCH_TILE(tiles, 0, held, next, is_zero);
    fv_tile_dot(tiles, 0, 4, 6);
    fv_tile_load(tiles, 7, pairs + FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    if (is_first) SWITCH_TILE(tiles, 1, held, next, is_zero);
    fv_tile_dot(tiles, 1, 4, 7);
    if (num == 2) {
        fv_tile_load_past(tiles, 5, others, FV_TILE_ROW_BYTES);
        if (is_first) SWITCH_TILE(tiles, 2, held, next, is_zero);
        fv_tile_dot(tiles, 2, 5, 6);
        if (is_first) SWITCH_TILE(tiles, 3, held, next, is_zero);
        fv_tile_dot(tiles, 3, 5, 7);
    }
    if (is_first) shared->held = *next;
    call_ahead(shared);
}

FV_ALWAYS_INLINE void add_columns(shared_item *shared, const fv_strip_pair *pair, int32_t column, const char *slice,
                                  const int32_t num)
{
    const char *weights = pair->weights[0], *others = pair->weights[num - 1];
    const int32_t is_zero = !pair->strips[0]->has_sums;
    const int32_t offset = column * FV_TILE_STRIP_ROWS;
    const held_tiles sums = held_of_pair(pair->strips[0]->sums + offset, pair->strips[num - 1]->sums + offset, num);
    if (shared->held.num > sums.num) store_held(shared);
    int32_t step = pair->first_step;
    add_step(shared, &sums, weights + step * FV_TILE_BYTES, others + step * FV_TILE_BYTES,
             slice + step * STEP_PAIRS_BYTES, 1, is_zero, num);
    for (step++; step < pair->end_step; step++)
        add_step(shared, &sums, weights + step * FV_TILE_BYTES, others + step * FV_TILE_BYTES,
                 slice + step * STEP_PAIRS_BYTES, 0, 0, num);
    call_ahead(shared);
}

/* Sums t of the strip whose weights are in tile a, with pairs of V. */
#define DOT_PAIRS(tiles, t, a, is_odd)   \
    do {                                 \
        if (is_odd)                      \
            fv_tile_dot(tiles, t, a, 7); \
        else                             \
            fv_tile_dot(tiles, t, a, 4); \
    } while (0)

/* The products of 16 columns of two pairs with a step, as above. Pairs of V take tiles 4 and 7 in turn. */
FV_ALWAYS_INLINE void add_quad_step(shared_item *shared, const held_tiles *next, const char *const weights[4],
                                    int32_t step, const char *pairs, const int32_t is_first, int32_t is_zero,
                                    const int32_t is_odd)
{
    fv_tiles *tiles = &shared->item->tiles;
    const held_tiles *held = &shared->held;
    const int32_t offset = step * FV_TILE_BYTES;
    pairs += step * STEP_PAIRS_BYTES;
    if (is_odd)
        fv_tile_load_past(tiles, 7, pairs, FV_TILE_ROW_BYTES);
    else
        fv_tile_load_past(tiles, 4, pairs, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 5, weights[0] + offset, FV_TILE_ROW_BYTES);
    if (is_first) SWITCH_TILE(tiles, 0, held, next, is_zero);
    DOT_PAIRS(tiles, 0, 5, is_odd);
    fv_tile_load(tiles, 6, weights[1] + offset, FV_TILE_ROW_BYTES);
    if (is_first) SWITCH_TILE(tiles, 1, held, next, is_zero);
    DOT_PAIRS(tiles, 1, 6, is_odd);
    fv_tile_load(tiles, 5, weights[2] + offset, FV_TILE_ROW_BYTES);
    if (is_first) SWITCH_TILE(tiles, 2, held, next, is_zero);
    DOT_PAIRS(tiles, 2, 5, is_odd);
    fv_tile_load(tiles, 6, weights[3] + offset, FV_TILE_ROW_BYTES);
    if (is_first) SWITCH_TILE(tiles, 3, held, next, is_zero);
    DOT_PAIRS(tiles, 3, 6, is_odd);
    if (is_first) shared->held = *next;
    call_ahead(shared);
}

/* 1: all strips of two pairs are there, and begin and end with the same steps. */
static int32_t is_quad(const fv_strip_pair *a, const fv_strip_pair *b)
{
    return a->num == 2 && b->num == 2 && a->first_step == b->first_step && a->end_step == b->end_step &&
           a->strips[0]->has_sums == b->strips[0]->has_sums;
}

/* All columns of two pairs. */
static void add_quad(shared_item *shared, const fv_strip_pair *a, const fv_strip_pair *b)
{
    const fv_tile_item *item = shared->item;
    const char *const weights[4] = {a->weights[0], a->weights[1], b->weights[0], b->weights[1]};
    const int32_t is_zero = !a->strips[0]->has_sums;
    for (int32_t column = 0; column < item->job->params->v_head_size; column += FV_TILE_COLUMNS) {
        const char *pairs = item->scratch.pairs + column / COLUMNS * shared->pairs.slice_bytes +
                            column % COLUMNS / FV_TILE_COLUMNS * FV_TILE_BYTES;
        const int32_t offset = column * FV_TILE_STRIP_ROWS;
        const held_tiles sums = {{a->strips[0]->sums + offset, a->strips[1]->sums + offset, b->strips[0]->sums + offset,
                                  b->strips[1]->sums + offset},
                                 4};
        int32_t step = a->first_step;
        add_quad_step(shared, &sums, weights, step++, pairs, 1, is_zero, 0);
        for (; step + 1 < a->end_step; step += 2) {
            add_quad_step(shared, &sums, weights, step, pairs, 0, 0, 1);
            add_quad_step(shared, &sums, weights, step + 1, pairs, 0, 0, 0);
        }
        if (step < a->end_step) add_quad_step(shared, &sums, weights, step, pairs, 0, 0, 1);
        call_ahead(shared);
    }
}

/* All columns of the pairs [first, end), one after the other for each 32. */
static void add_pairs(shared_item *shared, int32_t first, int32_t end)
{
    const char *slice = shared->item->scratch.pairs;
    for (int32_t column = 0; column < shared->item->job->params->v_head_size; column += COLUMNS) {
        for (int32_t p = first; p < end; p++) {
            const fv_strip_pair *pair = &shared->works[p].pair;
            if (has_steps(pair) && pair->num == 2)
                add_columns(shared, pair, column, slice, 2);
            else if (has_steps(pair))
                add_columns(shared, pair, column, slice, 1);
        }
        slice += shared->pairs.slice_bytes;
    }
}

static void add_values(shared_item *shared)
{
    const int32_t num = shared->num_pairs;
    for (int32_t p = 0; p < num; p += 2) {
        const fv_strip_pair *a = &shared->works[p].pair, *b = p + 1 < num ? &shared->works[p + 1].pair : NULL;
        if (b && has_steps(a) && is_quad(a, b))
            add_quad(shared, a, b);
        else
            add_pairs(shared, p, b ? p + 2 : p + 1);
    }
    store_held(shared);
    for (int32_t p = 0; p < num; p++) {
        const fv_strip_pair *pair = &shared->works[p].pair;
        for (int32_t i = 0; i < pair->num && has_steps(pair); i++) pair->strips[i]->has_sums = 1;
    }
}

/* --- the item -------------------------------------------------------------------------------------------------------- */

/* The steps of the next block; !is_taken: as it would be now. Empty: none is left. */
static fv_step_run next_run(shared_item *shared, int32_t is_taken)
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

static pair_work pair_work_of(const shared_item *shared, int32_t p, const fv_key_block *keys)
{
    const fv_tile_item *item = shared->item;
    pair_work work = {.pair.num = fv_min_i32(2, item->num_strips - 2 * p)};
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
static int32_t begin_block(shared_item *shared, const fv_key_block *keys)
{
    const fv_tile_item *item = shared->item;
    if (fv_tile_reads_value(item, &item->job->cache))
        find_rows(shared, keys);
    else
        convert_rows(shared, keys);
    for (int32_t p = 0; p < shared->num_pairs; p++) shared->works[p] = pair_work_of(shared, p, keys);
    shared->pairs.looks = !fv_strips_all_seen(item, item->scratch.strips, keys);
    weigh_block(shared, keys);
    if (shared->pairs.not_finite) return 0;
    for (int32_t p = 0; p < shared->num_pairs; p++)
        if (has_steps(&shared->works[p].pair)) end_weights(shared, &shared->works[p], keys);
    return 1;
}

/* Aims at the rows of the item's results, which another CPU may hold: with as many sites as the last block's values have. */
static void aim_at_results(shared_item *shared, int32_t num_sites)
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

static void begin(shared_item *shared, fv_tile_item *item, fv_key_shares *shares)
{
    const fv_attend_params *params = item->job->params;
    const int32_t depth = params->head_size / FV_TILE_DEPTH, num_pairs = (item->num_strips + 1) / 2;
    const int32_t slices = params->v_head_size / COLUMNS, run = slices % MOST_SLICES ? 1 : MOST_SLICES;
    *shared = (shared_item){
        .item = item,
        .shares = shares,
        .index = shares ? fv_key_share_index(item->job) : 0,
        .scale = fv_attend_score_scale(item->job, item->first_head),
        .num_pairs = num_pairs,
        .pairs.slice_bytes = slice_bytes_of(item),
        .pairs.size = params->v_head_size,
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
static float fit_of(const shared_item *shared, int32_t strip, int32_t lane)
{
    const fv_row_strip *rows = &shared->item->scratch.strips[strip].rows;
    return rows->max[lane] != -INFINITY ? rows->sum[lane] / shared->rounded_sums[strip][lane] : 1.0f;
}

/* A row of the sums in natural order, times `factor`. */
static void store_row(float *to, const shared_item *shared, int32_t strip, int32_t lane, float factor)
{
    const float *sums = shared->item->scratch.strips[strip].sums + lane * FV_TILE_COLUMNS;
    const fv_lanes factors = fv_lanes_splat(factor);
    for (int32_t d = 0; d < shared->item->job->params->v_head_size; d += COLUMNS, sums += 2 * TILE_FLOATS)
        fv_lanes_store_natural_times(to + d, sums, sums + TILE_FLOATS, factors);
}

/* As fv_attend_finish_row, where the result is partial, but straight to its place. */
static void finish_partial_row(const shared_item *shared, int32_t row)
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

static void finish_row(const shared_item *shared, int32_t row)
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

static void finish(const shared_item *shared)
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
    const int32_t steps = item->block_keys / FV_STEP_KEYS, columns = params->v_head_size / COLUMNS;
    shared_item shared;
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
        add_values(&shared);
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
