/* The order of products for 8 strips or more (of few keys 16, in pieces 4): prefill.
 *
 * What bounds it is the way from L2 to L1, so each of the two phases of a block of keys keeps what it reads again
 * small:
 *
 *   scores and weights   of a group of two pairs of strips, step by step: K of a step (8 KB) comes from L2 once for
 *                        both pairs; scores live for 4 KB
 *   sums                 pair after pair, 32 columns at a time: its weights (16 KB) stay in L1, pairs of V come from
 *                        L2, a run of 16 KB for each 32 columns; between the products K's tiles and V's pairs of the
 *                        next block are made
 *
 * Scores lie as [row][key]: queries are A tiles and keys B tiles, so that a row's weights are a row of an A tile as
 * they come, and nothing is transposed but the keys, once for a block. Base and sum of a row are a number and a vector.
 *
 * Strip after strip passes three stages, each beside the others in program order:
 *
 *   tiles 0, 1           products of strip 0 | of strip 1       | strip 0 of the next step
 *   from tiles to L1                         | strip 0's scores | strip 1's
 *   vectors                                  |                  | weights of strip 0
 *
 * While products are under way multiplications of 64 bytes have one port, additions and integers two: weights are of
 * few multiplications, rounded and packed by integers (lanes.h).
 *
 * So scores are gone before the maximum of their block is known. They need none: weights are taken against a reference,
 * the maximum of the first keys that a row saw, and bf16, sums and fp32 scores have exponents to spare. Where a weight
 * of a block is above 2^10 (or no number), the pair's block is done again with its maxima, to which reference and sums
 * then move.
 *
 * fp16 comes in pieces (half_pieces.h), of which a step has four times as many products, and of its values three times. Its
 * weights are exponentials in fp32, whose sums divide; they have 16 bits whatever they are taken against, so that rows of few
 * keys are like all others.
 *
 * Where keys have scales of their own, dot products are multiplied by a vector of them in place of one number, and weights,
 * in fp32 as well, once they are summed.
 *
 * A soft cap or ALiBi goes into a step's scores in L1, before they are weighed (row_scores.h). With ALiBi a reference is what the
 * row's maximum will have become where keys are alike; where they are not, and all weights are far below it, another kernel
 * does the item.
 *
 * Its parts are headers of this file alone: key_tiles.h, pair_work.h, pair_step.h, half_step.h, row_scores.h,
 * weight_sums.h, pair_weights.h. Their functions are static without `inline`, which would have GCC take more of them into
 * each other, and the hottest out of its loop.
 */
#include "kernels/cpu/amx/attend_many_tiles.h"

#include "kernels/cpu/amx/pair_weights.h"
#include "kernels/cpu/amx/stream_words.h"

enum {
    GROUP_PAIRS = FV_TILE_GROUP_PAIRS,
    SLICE_SUMS = FV_SLICE_COLUMNS * FV_TILE_STRIP_ROWS, /* of a strip */
    FEW_KEYS = 128,                                     /* of a row, up to here weights are exact */
    STREAM_BYTES = 8 << 20, /* of a sequence's output, from which on it is written past the caches */
};

#define MAX_FACTOR 0x1p6f
#define LEAST_SUM 0x1p-40f /* of weights with ALiBi, whose least is 2^-100 */
#define MAX_CAP 0x1p7f     /* a hidden score times it is no infinity */

/* --- sums --------------------------------------------------------------------------------------------------------- */

/* Tile t of the sums: that of the slice before goes, the slice's own comes. */
#define CHANGE_SUMS(tiles, t, at, stores, loads)                                  \
    do {                                                                          \
        float *own = (at);                                                        \
        if (stores) fv_tile_store(tiles, t, own - SLICE_SUMS, FV_TILE_ROW_BYTES); \
        if (loads)                                                                \
            fv_tile_load(tiles, t, own, FV_TILE_ROW_BYTES);                       \
        else                                                                      \
            fv_tile_zero(tiles, t);                                               \
    } while (0)

/* The first step of a slice, as fv_pair_add_step, or as the first four products of fv_half_add_step, whose weights are
 * `piece` bytes behind. Each tile of sums changes hands just before its own first product: all four at once are more lines
 * to store than a core holds, and what follows waits for them. */
FV_ALWAYS_INLINE void add_first_step(fv_tile_item *item, const fv_strip_pair *pair, int32_t column, const char *pairs,
                                     int64_t piece)
{
    fv_tiles *tiles = &item->tiles;
    const int32_t step = pair->first_step, stores = column > 0, loads = pair->strips[0]->has_sums;
    float *low = pair->strips[0]->sums + column * FV_TILE_STRIP_ROWS;
    float *other_low = pair->strips[1]->sums + column * FV_TILE_STRIP_ROWS;
    fv_tile_load(tiles, 6, pairs, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 4, pair->weights[0] + piece + step * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 7, pairs + FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 5, pair->weights[1] + piece + step * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    CHANGE_SUMS(tiles, 0, low, stores, loads);
    fv_tile_dot(tiles, 0, 4, 6);
    CHANGE_SUMS(tiles, 1, low + SLICE_SUMS / 2, stores, loads);
    fv_tile_dot(tiles, 1, 4, 7);
    CHANGE_SUMS(tiles, 2, other_low, stores, loads);
    fv_tile_dot(tiles, 2, 5, 6);
    CHANGE_SUMS(tiles, 3, other_low + SLICE_SUMS / 2, stores, loads);
    fv_tile_dot(tiles, 3, 5, 7);
}

/* The products of a slice in pieces, whose weights were summed as they were made. */
static void add_half_slice(const fv_many_item *many, const fv_strip_pair *pair, int32_t number)
{
    fv_tile_item *item = many->item;
    const int32_t column = number * FV_SLICE_COLUMNS;
    const char *slice = many->keys->v + (int64_t)column * item->block_keys * FV_BF16_BYTES;
    for (int32_t step = pair->first_step; step < pair->end_step; step++) {
        const char *pairs = slice + step * FV_SLICE_STEP_BYTES;
        if (step == pair->first_step)
            add_first_step(item, pair, column, pairs, fv_weight_piece_bytes(item));
        else
            fv_half_add_low_weights(item, pair, step, pairs);
        fv_half_add_high_weights(item, pair, step, pairs);
        fv_key_tiles_make_next(item, many->next_keys);
    }
    if (column + FV_SLICE_COLUMNS == item->job->params->v_head_size) fv_pair_store_sums(item, pair, column);
}

/* FV_SLICE_COLUMNS of the values; beside their products, if any, a quarter of the weights is summed, or keys and values
 * of the next block are made. */
FV_ALWAYS_INLINE void add_slice(const fv_many_item *many, const fv_strip_pair *pair, int32_t number, const int32_t sums,
                                const int32_t makes)
{
    fv_tile_item *item = many->item;
    const int32_t column = number * FV_SLICE_COLUMNS;
    const char *slice = many->keys->v + (int64_t)column * item->block_keys * FV_BF16_BYTES;
    fv_weight_adder adder;
    if (sums) adder = fv_weight_adder_begin(item, pair, number);
    for (int32_t step = pair->first_step; step < pair->end_step; step++) {
        const char *pairs = slice + step * FV_SLICE_STEP_BYTES;
        if (step == pair->first_step)
            add_first_step(item, pair, column, pairs, 0);
        else
            fv_pair_add_step(item, pair, step, pairs);
        if (sums) fv_weight_adder_step(&adder, step);
        if (makes && step % 2) fv_key_tiles_make_next(item, many->next_keys);
    }
    if (column + FV_SLICE_COLUMNS == item->job->params->v_head_size) fv_pair_store_sums(item, pair, column);
    if (sums) fv_weight_adder_end(&adder);
}

static void add_half_values(const fv_many_item *many, const fv_strip_pair *pair)
{
    const int32_t num_slices = many->item->job->params->v_head_size / FV_SLICE_COLUMNS;
    for (int32_t i = 0; i < num_slices; i++) add_half_slice(many, pair, i);
    pair->strips[0]->has_sums = pair->strips[1]->has_sums = 1;
}

/* Quarters of the weights for which no slice is left are summed by themselves. */
static void add_values(const fv_many_item *many, const fv_strip_pair *pair)
{
    const int32_t num_slices = many->item->job->params->v_head_size / FV_SLICE_COLUMNS;
    const int32_t num_quarters = many->k_factors ? 0 : 2 * pair->num; /* of scaled weights nobody asks for the sum */
    const int32_t makes = many->next_keys->next < many->next_keys->end;
    for (int32_t quarter = makes ? 0 : num_slices; quarter < num_quarters; quarter++) {
        fv_weight_adder adder = fv_weight_adder_begin(many->item, pair, quarter);
        for (int32_t step = pair->first_step; step < pair->end_step; step++) fv_weight_adder_step(&adder, step);
        fv_weight_adder_end(&adder);
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

/* Does a row see few keys, but some? */
static int32_t strip_sees_few(const fv_attend_job *job, const fv_row_strip *rows)
{
    int32_t few = 0;
    for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++) {
        const int32_t first = rows->first[i], end = rows->end[i];
        few |= first < end && fv_attend_least_keys(job, first, end) <= FEW_KEYS;
    }
    return few;
}

/* The pair of strips from `first` on, number p of its group; its weighers are not set. */
static void pair_work_begin(fv_pair_work *work, const fv_many_item *many, int32_t first, int32_t p)
{
    const fv_tile_item *item = many->item;
    fv_strip_pair *pair = &work->pair;
    work->top = (fv_words){0};
    work->is_exact = many->has_huge_queries || many->has_odd_scales ||
                     (item->pieces == 1 && !fv_words_all_below(many->keys->top, FV_HUGE_WORD));
    pair->num = fv_min_i32(2, item->num_strips - first);
    for (int32_t i = 0; i < 2; i++) {
        const int32_t own = fv_min_i32(i, pair->num - 1);
        pair->strips[i] = &item->scratch.strips[first + own];
        pair->scores[i] = item->scratch.scores + (int64_t)i * item->block_keys * FV_TILE_STRIP_ROWS;
        pair->weights[i] = fv_tile_weights(item, 2 * p + own);
    }
    fv_pair_find_steps(pair, &many->keys->block);
    /* Rows that see few keys, wherever these lie: the largest weight is then 1, which is held as it is. In pieces all weights are but
     * for 2^-17, which only an output of fp32 shows. */
    const int32_t rounds_largest = item->pieces == 1 || item->job->params->out_dtype == FV_DTYPE_F32;
    for (int32_t i = 0; i < pair->num && rounds_largest && !work->is_exact; i++)
        work->is_exact = strip_sees_few(item->job, &pair->strips[i]->rows);
}

static void attend_keys(const fv_many_item *many)
{
    const int32_t num_strips = many->item->num_strips;
    for (int32_t first = 0; first < num_strips; first += 2 * GROUP_PAIRS) {
        fv_pair_work works[GROUP_PAIRS];
        int32_t num = 0;
        for (; num < GROUP_PAIRS && first + 2 * num < num_strips; num++)
            pair_work_begin(&works[num], many, first + 2 * num, num);
        fv_group_weigh(many, works, num);
        for (int32_t p = 0; p < num; p++) {
            if (works[p].pair.first_step >= works[p].pair.end_step) continue;
            fv_pair_end_weights(many, &works[p]);
            if (many->item->pieces > 1)
                add_half_values(many, &works[p].pair);
            else
                add_values(many, &works[p].pair);
        }
    }
}

/* Scales of the keys and values of the block at hand, where they have such. */
static void find_scales(fv_many_item *many)
{
    fv_tile_item *item = many->item;
    fv_tile_find_scales(item, &many->keys->block, item->first_head);
    if (!item->k_scales && !item->v_scales) return;
    float *k_factors = item->scratch.lane_k_scales, *v_scales = item->scratch.lane_v_scales;
    many->has_odd_scales = 0;
    for (int32_t key = 0; key < item->block_keys; key++) {
        const int32_t is_there = key < fv_key_block_steps(&many->keys->block) * FV_STEP_KEYS;
        const float factor = many->scale.dot * (item->k_scales && is_there ? item->k_scales[key] : 1.0f);
        k_factors[key] = many->prepares ? many->multiple : factor;
        v_scales[key] = item->v_scales && is_there ? item->v_scales[key] : 1.0f;
        many->has_odd_scales |= !(factor >= FV_MIN_PLAIN_FACTOR && factor <= MAX_FACTOR);
    }
    many->k_factors = k_factors;
    many->v_scales = v_scales;
}

/* --- the ends of an item ----------------------------------------------------------------------------------------- */

/* 1: rows end as bf16 or fp16 of the sums over their denominator. */
static int32_t ends_plainly(const fv_attend_job *job)
{
    const fv_dtype out_dtype = job->params->out_dtype;
    return job->item->partial < 0 && (out_dtype == FV_DTYPE_BF16 || out_dtype == FV_DTYPE_F16);
}

/* 1: the output of the item's sequence is more than caches keep until it is read, in whole lines. */
static int32_t streams_output(const fv_attend_job *job)
{
    const fv_attend_params *params = job->params;
    const int32_t query_len = params->query_start[job->item->seq + 1] - params->query_start[job->item->seq];
    const int64_t bytes = (int64_t)query_len * params->num_heads * params->v_head_size * FV_BF16_BYTES;
    const int64_t strides = params->out_token_stride | params->out_head_stride;
    return bytes >= STREAM_BYTES && ((int64_t)(uintptr_t)params->out | strides) % FV_CACHE_LINE == 0;
}

/* Elements of a row of the output, whose tiles may have some more. */
static int32_t own_size(const fv_tile_item *item) { return item->natural.params->v_head_size; }

/* What divides a strip's sums: its weights as they were multiplied, for the largest of a row may have been rounded, too. Where
 * weights were exact in every block it was 1, and then the sum of the weights before they are rounded is nearer: what small
 * values are multiplied by takes nothing from the others. */
static fv_lanes divisors_of(const fv_tile_item *item, const fv_tile_strip *strip)
{
    const int32_t sums_are_of_rows = item->pieces > 1 || item->k_scales || item->v_scales;
    if (sums_are_of_rows || strip_sees_few(item->job, &strip->rows)) return fv_lanes_load(strip->rows.sum);
    return fv_parts_gather(fv_weight_sums_of(item, strip));
}

/* What a strip's rows are divided by in the end. */
typedef struct row_ends {
    fv_lanes max, sum; /* of the weights in fp32, with the sink */
    fv_lanes divisors; /* of sums of values */
} row_ends;

/* The sinks of a strip's rows in base 2. */
static fv_lanes sinks_of(const fv_tile_item *item, const fv_row_strip *rows)
{
    const fv_attend_job *job = item->job;
    const float *sinks = job->params->sinks + item->first_head * job->group;
    fv_lanes of_rows;
    for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++) of_rows[i] = sinks[(rows->first_row + i) % job->group] * FV_LOG2E;
    return of_rows;
}

static row_ends row_ends_of(const fv_tile_item *item, const fv_tile_strip *strip)
{
    const fv_lanes sum = fv_lanes_load(strip->rows.sum), divisors = divisors_of(item, strip);
    const fv_lanes max = fv_lanes_select(sum == sum, fv_lanes_load(strip->rows.max), sum); /* NaN: not without keys */
    if (!item->job->params->sinks) return (row_ends){max, sum, divisors};
    const fv_lanes sink = sinks_of(item, &strip->rows), top = fv_lanes_max(sink, max);
    const fv_lanes shrink = fv_lanes_exp2(max - top), weight = fv_lanes_exp2(sink - top);
    return (row_ends){fv_lanes_select(max == -INFINITY, max, top), sum * shrink + weight, divisors + weight / shrink};
}

/* Rows of a strip. */
static void finish_strip(const fv_tile_item *item, const fv_tile_strip *strip, int32_t streams)
{
    const fv_attend_job *job = item->job;
    const fv_attend_params *params = job->params;
    const int32_t is_padded = own_size(item) < params->v_head_size;
    const float v_scale = fv_head_scale_of(job->v_head_scale, params->num_kv_scales, item->first_head);
    const row_ends ends = row_ends_of(item, strip);
    float factors[FV_TILE_STRIP_ROWS];
    for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++)
        factors[i] = ends.max[i] == -INFINITY ? 0.0f : v_scale / ends.divisors[i];
    const int32_t num_rows = fv_min_i32(FV_TILE_STRIP_ROWS, job->num_rows - strip->rows.first_row);
    const int32_t first_head = item->first_head * job->group, end_head = first_head + job->group;
    int64_t out_row = job->batch_token + strip->rows.first_row / job->group - params->out_first_token;
    int32_t head = first_head + strip->rows.first_row % job->group;
    for (int32_t i = 0; i < num_rows; i++, head++) {
        if (head == end_head) {
            head = first_head;
            out_row++;
        }
        char *own = (char *)params->out + out_row * params->out_token_stride + head * params->out_head_stride;
        char *out = is_padded ? (char *)item->scratch.row : own;
        const float *low = strip->sums + i * FV_TILE_COLUMNS;
        const fv_lanes factor = fv_lanes_splat(factors[i]);
        for (int32_t column = 0; column < params->v_head_size; column += FV_SLICE_COLUMNS) {
            const float *at = low + column * FV_TILE_STRIP_ROWS;
            const float *next = at + FV_TILE_ROWS * FV_TILE_COLUMNS;
            const fv_words words = params->out_dtype == FV_DTYPE_F16 ? fv_halves_natural(at, next, factor)
                                                                     : fv_words_natural(at, next, factor);
            if (streams)
                fv_words_stream(out + column * FV_BF16_BYTES, words);
            else
                fv_words_store(out + column * FV_BF16_BYTES, words);
        }
        if (is_padded) memcpy(own, out, (size_t)own_size(item) * FV_BF16_BYTES);
        if (!params->lse) continue;
        char *lse = (char *)params->lse + out_row * params->lse_token_stride + head * params->lse_head_stride;
        *(float *)(void *)lse = ends.max[i] == -INFINITY ? -INFINITY : ends.max[i] * FV_LN2 + logf(ends.sum[i]);
    }
}

/* Sums of a strip as if its weights had been summed as they were multiplied. */
static void fit_sums(const fv_tile_item *item, const fv_tile_strip *strip)
{
    const fv_lanes divisors = divisors_of(item, strip);
    for (int32_t row = 0; row < FV_TILE_STRIP_ROWS; row++) {
        const float sum = strip->rows.sum[row];
        if (strip->rows.max[row] == -INFINITY) continue;
        const float factor = sum / divisors[row];
        for (int32_t column = 0; column < item->job->params->v_head_size; column += FV_TILE_COLUMNS) {
            float *at = strip->sums + column * FV_TILE_STRIP_ROWS + row * FV_TILE_COLUMNS;
            fv_lanes_store(at, fv_lanes_load(at) * factor);
        }
    }
}

/* Sums of weights that are all far below their row's reference have lost too much. With ALiBi that can be, for the key that gave the
 * reference may weigh next to nothing; without it weighs 1. */
static int32_t sums_are_near_references(const fv_tile_item *item)
{
    if (item->job->params->alibi == FV_ALIBI_NONE) return 1;
    for (int32_t i = 0; i < item->num_strips; i++) {
        const fv_tile_strip *strip = &item->scratch.strips[i];
        const fv_lanes divisors = divisors_of(item, strip);
        for (int32_t row = 0; row < FV_TILE_STRIP_ROWS; row++)
            if (divisors[row] < LEAST_SUM && strip->rows.max[row] != -INFINITY) return 0;
    }
    return 1;
}

/* Returns 0 where another kernel has to do the item.
 *
 * Out of line: taken into its caller it makes all of that slower, by 7% at 256 tokens (GCC 12). */
static __attribute__((noinline)) int32_t finish(const fv_many_item *many)
{
    const fv_tile_item *item = many->item;
    for (int32_t i = 0; i < item->num_strips; i++) {
        fv_tile_strip *strip = &item->scratch.strips[i];
        if (many->is_fine) fv_row_sums_gather(item, strip);
        if (!strip->has_sums) fv_strip_zero_sums(strip, item->job->params->v_head_size); /* its rows saw no key */
    }
    if (!sums_are_near_references(item)) return 0;
    if (!ends_plainly(item->job)) {
        for (int32_t i = 0; i < item->num_strips && item->pieces == 1; i++) fit_sums(item, &item->scratch.strips[i]);
        fv_strips_finish(item);
        return 1;
    }
    const int32_t streams = streams_output(item->job) && own_size(item) == item->job->params->v_head_size;
    for (int32_t i = 0; i < item->num_strips; i++) finish_strip(item, &item->scratch.strips[i], streams);
    if (streams) fv_words_stream_end();
    return 1;
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
    fv_prefetch_aim_at_nothing(&item->ahead, item->scratch.zeros);
    item->ahead_portions = 0;
    if (of.num_tokens <= 0 || of.num_tokens > item->num_strips * FV_TILE_STRIP_ROWS || num_sites <= 0) return;
    for (int32_t token = 0; token < of.num_tokens; token++) rows[token] = of.first + token * of.token_stride;
    const int32_t is_dense = of.head_stride == of.row_bytes; /* heads lie side by side: one row */
    const fv_prefetch_rows of_rows = {
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
    fv_prefetch_aim(&item->ahead, &of_rows, fv_tile_tracks(item), FV_AHEAD_BYTES);
}

/* The rows of the item's output, which no cache holds, where they are written to caches. */
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
                    .num_tokens = ends_plainly(job) && !streams_output(job) ? job->item->num_tokens : 0,
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
    if (num_strips < fv_tile_many_strips(params) || rescaling != FV_RESCALING_MULTIPLY) return 0;
    /* Rows of few keys are done twice, but in pieces. */
    const int32_t is_short = job->keys.end - job->keys.first <= FV_TILE_MANY_KEYS;
    if (is_short && num_strips < FV_TILE_COPY_STRIPS && fv_tile_pieces(params) == 1) return 0;
    if (params->head_size > FV_MADE_MAX_SIZE || params->v_head_size > FV_MADE_MAX_SIZE) return 0;
    for (int32_t head = 0; head < job->item->num_kv_heads; head++) {
        const fv_score_scale scale = fv_attend_score_scale(job, job->item->first_kv_head + head);
        if (!(scale.dot >= FV_MIN_PLAIN_FACTOR && scale.dot <= MAX_FACTOR)) return 0;
        if (scale.cap > 0 && !(scale.cap >= FV_MIN_PLAIN_FACTOR && scale.cap <= MAX_CAP)) return 0;
    }
    return 1;
}

int32_t FV_ISA_SYMBOL(fv_attend_many_tiles)(fv_tile_item *item)
{
    const int32_t depth = item->job->params->head_size / FV_TILE_DEPTH;
    const int32_t num_sites = item->block_keys / FV_STEP_KEYS * ((item->num_strips + 1) / 2) * depth;
    const int32_t first = item->job->keys.first / item->block_keys;
    fv_made_keys_begin(fv_made_keys_of(item->job->params), item->job->item, item->first_head);
    fv_key_tiles keys = fv_key_tiles_of(item, first);
    fv_key_tiles_aim(item, &keys, item->num_strips);
    const fv_words queries_top = fv_strips_begin(item, 1);
    if (item->pieces > 1 && !fv_words_all_below(queries_top, FV_HALF_INFINITY)) return 0;
    for (int32_t i = 0; i < item->num_strips; i++) item->scratch.strips[i].has_sums = 0;
    memset(item->scratch.weight_sums, 0, (size_t)item->num_strips * FV_TILE_BYTES);
    fv_key_tiles next = fv_key_tiles_of(item, first + 1);
    if (keys.end > 0) fv_key_tiles_aim(item, &next, keys.end / 2);
    fv_key_tiles_begin(&keys);
    fv_key_tiles_end(item, &keys);
    fv_key_tiles_begin(&next);
    const fv_score_scale scale = fv_attend_score_scale(item->job, item->first_head);
    fv_many_item many = {
        .item = item,
        .keys = &keys,
        .next_keys = &next,
        .scale = scale,
        .multiple = fv_score_multiple(scale),
        .prepares = !fv_score_form_is_plain(item->job->params),
        .is_fine = item->pieces > 1 || item->job->has_k_scales || item->job->has_v_scales || item->job->params->lse ||
                   !ends_plainly(item->job),
        .scores = item->scratch.scores + 2 * item->block_keys * FV_TILE_STRIP_ROWS,
        .has_huge_queries = item->pieces == 1 && !fv_words_all_below(queries_top, FV_HUGE_WORD),
    };
    if (many.is_fine) memset(item->scratch.row_sums, 0, (size_t)item->num_strips * FV_TILE_BYTES);
    for (int32_t index = first + 2; keys.block.first < keys.block.end; index++) {
        find_scales(&many);
        if (keys.not_finite && (item->pieces > 1 || !fv_strips_all_seen(item, item->scratch.strips, &keys.block)))
            return 0;
        fv_key_tiles after = fv_key_tiles_of(item, index);
        if (after.block.first < after.block.end)
            fv_key_tiles_aim(item, &after, num_sites);
        else if (next.block.first < next.block.end)
            aim_at_queries(item, num_sites);
        else
            aim_at_output(item, num_sites / 4);
        attend_keys(&many);
        fv_key_tiles_end(item, &next);
        keys = next;
        next = after;
        fv_key_tiles_begin(&next);
    }
    return finish(&many);
}
