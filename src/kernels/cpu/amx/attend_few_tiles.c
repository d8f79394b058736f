/* Attention of one work item of up to 32 rows of a KV head with bf16 tiles: decode and verification (item_loop.h).
 *
 * A strip has 16 lanes, so the rows of several KV heads share one: 4 heads of 4 rows, 2 of 8, 3 of 5. Each head has
 * its queries in its own lanes of B and zeros in the others, so that the products with the keys of all heads add up to
 * one tile of scores, and one softmax serves them all:
 *
 *   scores^T [key][head, row] = sum over heads of K_head [key][d] x Q_head^T [d][head, row]
 *
 * Values are read where they lie, too. A B tile has pairs: of its row k and column n the elements 2 n and 2 n + 1 of what
 * is loaded as key k. So the weights of a row come twice, each time with zeros between them, once before the even and
 * once before the odd elements, and no value moves from its place:
 *
 *   even [row][col]  += [w 0 w 0 ..] [row][2 key]  x  V_head [key][2 col]            columns 0, 2, 4 ..
 *   odd [row][col]   += [0 w 0 w ..] [row][2 key]  x  V_head [key][2 col + 1]        columns 1, 3, 5 ..
 *
 * which is one product for 16 keys and 32 columns where both fit one A tile of 2 x rows, else two: half of the units'
 * depth is zeros, but few rows leave them idle anyway. From 17 rows on a head has two strips, which meet its tiles of keys
 * and of values together. Rows of one byte an element, and of heads of no multiple of 32, are copied to bf16 a head ahead
 * of its products (few_block.h).
 *
 * Keys come 32 at a time, which is near to the order in which they lie in memory. A core sees some hundred instructions ahead,
 * so that what stands between loads of tiles keeps memory waiting: the weights of a group of heads are made in parts between
 * the products of the next group's scores, and its values are added up after those. */
#include "kernels/cpu/amx/attend_few_tiles.h"

#include "kernels/cpu/amx/attend_shared_tiles.h"
#include "kernels/cpu/amx/few_weights.h"

#define STEPS_AT_ONCE 8 /* that siblings take from their shares */

typedef struct few_item {
    fv_tile_item tile;
    head_group groups[FV_TILE_MAX_HEADS];
    int32_t num_groups;
    fv_key_shares *shares;  /* NULL: the item keeps its keys */
    int32_t index;          /* of its share */
    fv_step_run run;        /* steps of 32 keys that are the item's, and not begun */
    int32_t in_tiles;       /* fv_cache_is_in_tiles */
    int32_t num_blocks;     /* found so far */
    fv_few_block blocks[3]; /* of the unit before, at hand, and the next one */
    few_unit units[2];
} few_item;

static void pack_queries(const fv_tile_item *item, int32_t head, int32_t strip, int32_t first_lane)
{
    const fv_attend_job *job = item->job;
    char *to = q_of(item, head, strip);
    const char *rows[FV_TILE_STRIP_ROWS];
    for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++) {
        const int32_t row = i - first_lane, is_row = row >= 0 && row < rows_in_strip(job, strip);
        rows[i] = is_row ? fv_attend_q_row(job, item->first_head + head, strip * FV_TILE_STRIP_ROWS + row)
                         : item->scratch.zeros;
    }
    fv_tile_pad_queries(item, rows);
    for (int32_t d = 0; d < job->params->head_size; d += FV_TILE_DEPTH, to += FV_TILE_BYTES) {
        fv_lanes_store_transposed(to, rows);
        for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++) rows[i] += FV_TILE_ROW_BYTES;
    }
}

/* That of the item whose row a lane has; of lanes without a row the last. */
static int32_t head_of_lane(const fv_attend_job *job, const head_group *group, int32_t lane)
{
    return fv_min_i32(group->first + lane / job->num_rows, group->end - 1);
}

/* Of ALiBi, as fv_row_strip has it. */
static float slope_of(const fv_tile_item *item, int32_t head, int32_t row)
{
    const fv_attend_job *job = item->job;
    if (job->params->alibi == FV_ALIBI_NONE) return 0.0f;
    return job->params->alibi_slopes[(item->first_head + head) * job->group + row % job->group] * FV_LOG2E;
}

/* All heads of a group have the same tokens, and so the same keys. */
static void begin_strip(const fv_tile_item *item, const head_group *group, int32_t strip)
{
    const fv_attend_job *job = item->job;
    const int32_t first_row = strip * FV_TILE_STRIP_ROWS;
    fv_row_strip *rows = &group->strips[strip].rows;
    fv_row_strip_init(rows, job, item->first_head + group->first, first_row, fv_strip_num_vectors(FV_TILE_STRIP_ROWS));
    fv_tile_scale_init(&group->strips[strip]);
    for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++) {
        const int32_t in_head = i % rows_in_strip(job, strip);
        rows->first[i] = rows->first[in_head];
        rows->end[i] = rows->end[in_head];
        rows->position[i] = rows->position[in_head];
        rows->tree[i] = rows->tree[in_head];
        rows->slope[i] = slope_of(item, head_of_lane(job, group, i), first_row + in_head);
    }
    for (int32_t head = group->first; head < group->end; head++)
        pack_queries(item, head, strip, (head - group->first) * job->num_rows);
}

static void begin_group(const fv_tile_item *item, head_group *group)
{
    const fv_attend_job *job = item->job;
    for (int32_t strip = 0; strip < item->num_strips; strip++) begin_strip(item, group, strip);
    for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++) {
        const int32_t head = head_of_lane(job, group, i);
        const fv_score_scale scale = fv_attend_score_scale(job, item->first_head + head);
        group->dot_factors[i] = scale.dot;
        group->factors[i] = scale.cap > 0 ? scale.cap : scale.dot;
    }
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* Scores of a unit, and the weights of the one before. */
static void score_and_weigh(fv_tile_item *item, const few_unit *unit, few_unit *before)
{
    fv_tiles *tiles = &item->tiles;
    const head_group *group = unit->group;
    const int32_t depth = item->job->params->head_size / FV_TILE_DEPTH, parts = num_parts(item, before);
    const int32_t sites = (group->end - group->first) * depth, is_copied = fv_few_block_is_copied(unit->block);
    int32_t due = 0;
    fv_tile_zero(tiles, 0);
    fv_tile_zero(tiles, 1);
    if (is_copied) fv_few_block_copy_keys(item, unit->block, item->first_head + group->first);
    for (int32_t head = group->first; head < group->end; head++) {
        const fv_step_keys keys = fv_few_block_keys(item, unit->block, item->first_head + head);
        if (is_copied && head + 1 < group->end) fv_few_block_copy_keys(item, unit->block, item->first_head + head + 1);
        const char *q = q_of(item, head, 0);
        for (int32_t d = 0; d < depth; d++) {
            fv_tile_load(tiles, 7, q + d * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
            fv_tile_load_past(tiles, 2, keys.tiles[0] + d * keys.depths[0], keys.strides[0]);
            fv_tile_dot(tiles, 0, 2, 7);
            fv_tile_call_ahead(item);
            fv_tile_load_past(tiles, 2, keys.tiles[1] + d * keys.depths[1], keys.strides[1]);
            fv_tile_dot(tiles, 1, 2, 7);
            fv_tile_call_ahead(item);
            for (due += parts; due >= sites; due -= sites) weigh_part(item, before);
        }
    }
    fv_tile_store(tiles, 0, unit->scores, FV_TILE_ROW_BYTES);
    fv_tile_store(tiles, 1, unit->scores + FV_TILE_ROWS * FV_TILE_STRIP_ROWS, FV_TILE_ROW_BYTES);
}

/* The same of two strips of a head. */
static void score_and_weigh_pair(fv_tile_item *item, const few_unit *unit, few_unit *before)
{
    fv_tiles *tiles = &item->tiles;
    const int32_t head = unit->group->first, depth = item->job->params->head_size / FV_TILE_DEPTH;
    const int32_t parts = num_parts(item, before);
    if (fv_few_block_is_copied(unit->block)) fv_few_block_copy_keys(item, unit->block, item->first_head + head);
    const fv_step_keys keys = fv_few_block_keys(item, unit->block, item->first_head + head);
    const char *q = q_of(item, head, 0), *other_q = q_of(item, head, 1);
    int32_t due = 0;
    fv_tile_zero(tiles, 0);
    fv_tile_zero(tiles, 1);
    fv_tile_zero(tiles, 2);
    fv_tile_zero(tiles, 3);
    for (int32_t d = 0; d < depth; d++) {
        fv_tile_load(tiles, 6, q + d * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
        fv_tile_load_past(tiles, 4, keys.tiles[0] + d * keys.depths[0], keys.strides[0]);
        fv_tile_dot(tiles, 0, 4, 6);
        fv_tile_load(tiles, 7, other_q + d * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
        fv_tile_dot(tiles, 2, 4, 7);
        fv_tile_call_ahead(item);
        fv_tile_load_past(tiles, 5, keys.tiles[1] + d * keys.depths[1], keys.strides[1]);
        fv_tile_dot(tiles, 1, 5, 6);
        fv_tile_dot(tiles, 3, 5, 7);
        fv_tile_call_ahead(item);
        for (due += parts; due >= depth; due -= depth) weigh_part(item, before);
    }
    const int32_t high = FV_TILE_ROWS * FV_TILE_STRIP_ROWS, other = FV_STEP_KEYS * FV_TILE_STRIP_ROWS;
    fv_tile_store(tiles, 0, unit->scores, FV_TILE_ROW_BYTES);
    fv_tile_store(tiles, 1, unit->scores + high, FV_TILE_ROW_BYTES);
    fv_tile_store(tiles, 2, unit->scores + other, FV_TILE_ROW_BYTES);
    fv_tile_store(tiles, 3, unit->scores + other + high, FV_TILE_ROW_BYTES);
}

/* Even and odd columns of up to 8 rows: a product of both. */
static void add_values_joined(fv_tile_item *item, const fv_step_keys *values, float *sums, const char *spread)
{
    fv_tiles *tiles = &item->tiles;
    const int32_t size = item->job->params->v_head_size, tile_floats = tile_rows(item->job) * FV_TILE_COLUMNS;
    const char *low = values->tiles[0], *high = values->tiles[1];
    fv_tile_load(tiles, 6, spread, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 5, spread + tile_floats * sizeof(float), FV_TILE_ROW_BYTES);
    for (int32_t column = 0; column < size; column += 32, sums += tile_floats) {
        fv_tile_load(tiles, 4, sums, FV_TILE_ROW_BYTES);
        fv_tile_load_past(tiles, 7, low + column * FV_BF16_BYTES, values->strides[0]);
        fv_tile_dot(tiles, 4, 6, 7);
        fv_tile_call_ahead(item);
        fv_tile_load_past(tiles, 7, high + column * FV_BF16_BYTES, values->strides[1]);
        fv_tile_dot(tiles, 4, 5, 7);
        fv_tile_store(tiles, 4, sums, FV_TILE_ROW_BYTES);
        fv_tile_call_ahead(item);
    }
}

/* Of up to 16 rows: a product of each. */
static void add_values_apart(fv_tile_item *item, const fv_step_keys *values, float *sums, const char *spread)
{
    fv_tiles *tiles = &item->tiles;
    const int32_t size = item->job->params->v_head_size, tile_floats = FV_TILE_ROWS * FV_TILE_COLUMNS;
    const char *low = values->tiles[0], *high = values->tiles[1];
    fv_tile_load(tiles, 3, spread, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 5, spread + FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 6, spread + 2 * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 7, spread + 3 * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    for (int32_t column = 0; column < size; column += 32, sums += 2 * tile_floats) {
        fv_tile_load(tiles, 4, sums, FV_TILE_ROW_BYTES);
        fv_tile_load_past(tiles, 0, low + column * FV_BF16_BYTES, values->strides[0]);
        fv_tile_dot(tiles, 4, 3, 0);
        fv_tile_load(tiles, 2, sums + tile_floats, FV_TILE_ROW_BYTES);
        fv_tile_dot(tiles, 2, 5, 0);
        fv_tile_call_ahead(item);
        fv_tile_load_past(tiles, 1, high + column * FV_BF16_BYTES, values->strides[1]);
        fv_tile_dot(tiles, 4, 6, 1);
        fv_tile_store(tiles, 4, sums, FV_TILE_ROW_BYTES);
        fv_tile_dot(tiles, 2, 7, 1);
        fv_tile_store(tiles, 2, sums + tile_floats, FV_TILE_ROW_BYTES);
        fv_tile_call_ahead(item);
    }
}

/* Weights of 16 keys, before even and odd elements, of two strips, times 32 columns of their values in tile `value`. */
#define ADD_TO_PAIR(tiles, value, spread, other)                           \
    do {                                                                   \
        fv_tile_load(tiles, 6, spread, FV_TILE_ROW_BYTES);                 \
        fv_tile_dot(tiles, 0, 6, value);                                   \
        fv_tile_load(tiles, 7, spread + FV_TILE_BYTES, FV_TILE_ROW_BYTES); \
        fv_tile_dot(tiles, 1, 7, value);                                   \
        fv_tile_load(tiles, 6, other, FV_TILE_ROW_BYTES);                  \
        fv_tile_dot(tiles, 2, 6, value);                                   \
        fv_tile_load(tiles, 7, other + FV_TILE_BYTES, FV_TILE_ROW_BYTES);  \
        fv_tile_dot(tiles, 3, 7, value);                                   \
    } while (0)

/* Of two strips. */
static void add_values_pair(fv_tile_item *item, const fv_step_keys *values, int32_t head)
{
    fv_tiles *tiles = &item->tiles;
    const int32_t size = item->job->params->v_head_size, tile_floats = FV_TILE_ROWS * FV_TILE_COLUMNS;
    const char *low = values->tiles[0], *high = values->tiles[1];
    const char *spread = spread_of(item, 0, 0), *other = spread_of(item, 1, 0);
    float *sums = sums_of(item, head, 0), *other_sums = sums_of(item, head, 1);
    for (int32_t column = 0; column < size; column += 32, sums += 2 * tile_floats, other_sums += 2 * tile_floats) {
        fv_tile_load(tiles, 0, sums, FV_TILE_ROW_BYTES);
        fv_tile_load(tiles, 1, sums + tile_floats, FV_TILE_ROW_BYTES);
        fv_tile_load(tiles, 2, other_sums, FV_TILE_ROW_BYTES);
        fv_tile_load(tiles, 3, other_sums + tile_floats, FV_TILE_ROW_BYTES);
        fv_tile_load_past(tiles, 4, low + column * FV_BF16_BYTES, values->strides[0]);
        ADD_TO_PAIR(tiles, 4, spread, other);
        fv_tile_call_ahead(item);
        fv_tile_load_past(tiles, 5, high + column * FV_BF16_BYTES, values->strides[1]);
        ADD_TO_PAIR(tiles, 5, spread + 2 * FV_TILE_BYTES, other + 2 * FV_TILE_BYTES);
        fv_tile_store(tiles, 0, sums, FV_TILE_ROW_BYTES);
        fv_tile_store(tiles, 1, sums + tile_floats, FV_TILE_ROW_BYTES);
        fv_tile_store(tiles, 2, other_sums, FV_TILE_ROW_BYTES);
        fv_tile_store(tiles, 3, other_sums + tile_floats, FV_TILE_ROW_BYTES);
        fv_tile_call_ahead(item);
    }
}

static void rescale_sums(const fv_tile_item *item, int32_t head, const head_group *group, int32_t in_group,
                         int32_t first_lane)
{
    const fv_tile_strip *strip = &group->strips[in_group];
    const int32_t num_rows = rows_in_strip(item->job, in_group), half = half_rows(item->job);
    const int32_t num_tiles = item->job->params->v_head_size / 32;
    if (fv_tile_keeps_all(strip, item->rescaling)) return;
    for (int32_t row = 0; row < num_rows; row++) {
        if (fv_tile_keeps_row(strip, first_lane + row, item->rescaling)) continue;
        for (int32_t is_odd = 0; is_odd < 2; is_odd++)
            fv_tile_rescale_row(sums_of(item, head, in_group) + (is_odd * half + row) * FV_TILE_COLUMNS,
                                2 * half * FV_TILE_COLUMNS, num_tiles, strip, first_lane + row, item->rescaling);
    }
}

static void add_values(fv_tile_item *item, const few_unit *unit)
{
    const head_group *group = unit->group;
    const int32_t num_rows = item->job->num_rows;
    if (!group || unit->is_lost) return;
    const int32_t is_copied = fv_few_block_is_copied(unit->block);
    if (is_copied) fv_few_block_copy_values(item, unit->block, item->first_head + group->first);
    for (int32_t head = group->first; head < group->end; head++) {
        const int32_t first_lane = (head - group->first) * num_rows;
        const fv_step_keys values = fv_few_block_values(item, unit->block, item->first_head + head);
        if (is_copied && head + 1 < group->end)
            fv_few_block_copy_values(item, unit->block, item->first_head + head + 1);
        for (int32_t strip = 0; strip < item->num_strips; strip++) rescale_sums(item, head, group, strip, first_lane);
        if (item->num_strips == 2)
            add_values_pair(item, &values, head);
        else if (num_rows <= FV_TILE_ROWS / 2)
            add_values_joined(item, &values, sums_of(item, head, 0), spread_of(item, 0, first_lane));
        else
            add_values_apart(item, &values, sums_of(item, head, 0), spread_of(item, 0, first_lane));
    }
}

/* --- the item ----------------------------------------------------------------------------------------------------- */

/* Returns 0 where a sum is infinite or NaN: a key or a value is, which zeros have multiplied, too, and perhaps no row sees
 * it. */
static int32_t sums_are_finite(const few_item *few)
{
    const fv_tile_item *item = &few->tile;
    const float *sums = sums_of(item, 0, 0), *end = sums_of(item, item->num_heads, 0);
    fv_lanes sum = fv_lanes_splat(0.0f);
    for (int32_t i = 0; i < few->num_groups * item->num_strips; i++)
        sum += fv_lanes_load(item->scratch.strips[i].rows.sum) * 0.0f;
    for (; sums < end; sums += FV_TILE_COLUMNS) sum += fv_lanes_load(sums) * 0.0f;
    return fv_lanes_all_below(sum, 1.0f);
}

static void finish_group(const fv_tile_item *item, const head_group *group)
{
    const int32_t num_rows = item->job->num_rows, half = half_rows(item->job);
    const int32_t size = item->job->params->v_head_size;
    for (int32_t n = 0; n < (group->end - group->first) * num_rows; n++) {
        const int32_t head = group->first + n / num_rows, row = n % num_rows;
        const int32_t in_group = n / FV_TILE_STRIP_ROWS, lane = n % FV_TILE_STRIP_ROWS;
        const fv_tile_strip *strip = &group->strips[in_group];
        const float *sums = sums_of(item, head, in_group) + (row - in_group * FV_TILE_STRIP_ROWS) * FV_TILE_COLUMNS;
        for (int32_t column = 0; column < size; column += 32) {
            const float *even = sums + column * half;
            const float *odd = even + half * FV_TILE_COLUMNS;
            for (int32_t i = 0; i < FV_TILE_COLUMNS; i++) {
                item->scratch.row[column + 2 * i] = even[i];
                item->scratch.row[column + 2 * i + 1] = odd[i];
            }
        }
        fv_tile_unscale_row(item->scratch.row, size, strip, lane, item->rescaling);
        fv_attend_finish_row(&item->natural, item->first_head + head, row, item->scratch.row, strip->rows.max[lane],
                             strip->rows.sum[lane]);
    }
}

static void begin_heads(few_item *few)
{
    fv_tile_item *item = &few->tile;
    const fv_attend_params *params = item->job->params;
    const int32_t step = heads_at_once(item->job);
    memset(item->scratch.zeros, 0, (size_t)fv_max_i32(params->head_size, params->v_head_size) * FV_BF16_BYTES);
    const float *end = sums_of(item, item->num_heads, 0);
    memset(sums_of(item, 0, 0), 0, (size_t)(end - sums_of(item, 0, 0)) * sizeof(float));
    few->num_groups = 0;
    for (int32_t head = 0; head < item->num_heads; head += step) {
        head_group *group = &few->groups[few->num_groups];
        group->strips = &item->scratch.strips[few->num_groups++ * item->num_strips];
        group->first = head;
        group->end = fv_min_i32(head + step, item->num_heads);
        begin_group(item, group);
    }
}

/* Takes the next 32 keys to few->blocks[turn]; empty: none are left. */
static void find_next_block(few_item *few, int32_t turn)
{
    fv_few_block *block = &few->blocks[turn];
    if (few->shares && few->run.first >= few->run.end)
        few->run = fv_key_shares_next(few->shares, few->index, STEPS_AT_ONCE, 1);
    if (few->run.first < few->run.end)
        fv_few_block_find(&few->tile, block, few->run.first++ * FV_STEP_KEYS, turn, few->in_tiles);
    else
        *block = (fv_few_block){0};
    block->number = few->num_blocks++;
}

/* The first block, all of which is asked for at once. */
static void begin_keys(few_item *few)
{
    fv_tile_item *item = &few->tile;
    few->in_tiles = fv_cache_is_in_tiles(item);
    fv_tiles_configure(&item->tiles, tile_rows(item->job));
    const fv_key_range *own = &item->job->keys;
    few->run = (fv_step_run){own->first / FV_STEP_KEYS, (int32_t)fv_ceil_div(own->end, FV_STEP_KEYS)};
    if (few->shares) few->run.end = few->run.first; /* to be taken */
    few->num_blocks = 0;
    find_next_block(few, 0);
    fv_tile_aim_ahead(item, &few->blocks[0].keys, 1);
    fv_tile_call_ahead(item);
}

/* The block behind those at hand, whose rows are asked for by who works on these. */
static void look_ahead(few_item *few, int32_t turn)
{
    fv_tile_item *item = &few->tile;
    const fv_attend_params *params = item->job->params;
    const int32_t sites = 2 * (params->head_size / FV_TILE_DEPTH + params->v_head_size / 32);
    find_next_block(few, turn);
    fv_tile_aim_ahead(item, &few->blocks[turn].keys, item->num_heads * sites);
}

/* Takes a group and a block to their scores, and the unit before to its end. Returns 0 where that one is lost. */
static int32_t attend_unit(few_item *few, int32_t group, const fv_few_block *block, int32_t index)
{
    fv_tile_item *item = &few->tile;
    few_unit *unit = &few->units[index % 2], *before = &few->units[(index + 1) % 2];
    *unit = (few_unit){.group = &few->groups[group], .block = block};
    unit->scores = item->scratch.scores + index % 2 * item->num_strips * FV_STEP_KEYS * FV_TILE_STRIP_ROWS;
    if (item->num_strips == 2)
        score_and_weigh_pair(item, unit, before);
    else
        score_and_weigh(item, unit, before);
    if (before->is_lost) return 0;
    add_values(item, before);
    return 1;
}

/* Returns 0 where tiles cannot go on: near an overflow, or where a key or a value is infinite or NaN. */
static int32_t attend_heads(few_item *few)
{
    fv_tile_item *item = &few->tile;
    begin_keys(few);
    begin_heads(few);
    memset(few->units, 0, sizeof(few->units));
    int32_t turn = 0, num_units = 0;
    while (few->blocks[turn].keys.first < few->blocks[turn].keys.end) {
        const fv_few_block *block = &few->blocks[turn];
        turn = (turn + 1) % 3;
        look_ahead(few, turn);
        for (int32_t g = 0; g < few->num_groups; g++)
            if (!attend_unit(few, g, block, num_units++)) return 0;
    }
    few_unit *last = &few->units[(num_units + 1) % 2];
    while (last->parts_done < num_parts(item, last)) weigh_part(item, last);
    if (last->is_lost) return 0;
    add_values(item, last);
    if (!sums_are_finite(few)) return 0;
    for (int32_t g = 0; g < few->num_groups; g++) finish_group(item, &few->groups[g]);
    return 1;
}

int32_t FV_ISA_SYMBOL(fv_few_tiles_serve)(const fv_attend_job *job)
{
    const fv_attend_params *params = job->params;
    if (fv_tile_pieces(params) > 1 || fv_has_latent_parts(params)) return 0;
    if (job->num_rows > FV_TILE_STRIP_ROWS && FV_ISA_SYMBOL(fv_shared_strips)(params, 2)) return 0;
    if (job->num_rows > FV_FEW_TILE_ROWS) return 0;
    for (int32_t head = 0; head < job->item->num_kv_heads; head++)
        if (!fv_scores_are_multiples(fv_attend_score_scale(job, job->item->first_kv_head + head))) return 0;
    return 1;
}

static int32_t attend(const fv_attend_job *job, void *memory, fv_rescaling rescaling, fv_key_shares *shares)
{
    const int32_t end_head = job->item->first_kv_head + job->item->num_kv_heads;
    few_item few;
    fv_tile_item *const item = &few.tile;
    fv_tile_item_begin(item, job);
    item->rescaling = rescaling;
    item->k_scales = item->v_scales = NULL;
    item->num_strips = fv_num_strips(job->num_rows);
    item->block_keys = FV_STEP_KEYS;
    few.shares = shares;
    few.index = shares ? fv_key_share_index(job) : 0;
    int32_t is_done = 1;
    for (int32_t head = job->item->first_kv_head; head < end_head && is_done; head += FV_TILE_MAX_HEADS) {
        item->first_head = head;
        item->num_heads = fv_min_i32(FV_TILE_MAX_HEADS, end_head - head);
        item->scratch = fv_tile_scratch_of(item->job->params, item->num_heads * item->num_strips, 0, item->block_keys,
                                           memory);
        is_done = attend_heads(&few);
    }
    fv_tiles_release(&item->tiles);
    return is_done;
}

int32_t FV_ISA_SYMBOL(fv_attend_few_tiles)(const fv_attend_job *job, void *memory, fv_rescaling rescaling,
                                           fv_key_shares *shares)
{
    /* More heads than one pass takes would need the keys once more. */
    if (!fv_key_shares_has(shares, job) || job->item->num_kv_heads > FV_TILE_MAX_HEADS)
        return attend(job, memory, rescaling, NULL);
    const fv_attend_job whole = fv_key_shares_whole(shares, job);
    return attend(&whole, memory, rescaling, shares);
}
