/* Attention of one work item of up to 8 rows with bf16 tiles: decode of groups of 5 to 8 heads (item_loop.h).
 *
 * A strip has 16 lanes, so the rows of several KV heads share one: 2 heads of 8 rows, 3 heads of 5. Each head has
 * its queries in its own lanes of B and zeros in the others, so that the products with the keys of all heads add up to
 * one tile of scores, and one softmax serves them all:
 *
 *   scores^T [key][head, row] = sum over heads of K_head [key][d] x Q_head^T [d][head, row]
 *   sums_head [row][col]     += weights [row of head][key] x V_head [key][col]      tiles of a head's rows only
 *
 * Keys come 32 at a time, which is near to the order in which they lie in memory; the next 32 are asked for between. */
#include "kernels/cpu/amx/attend_few_tiles.h"

#include "kernels/cpu/amx/weigher.h"

/* The strip of one group of heads, [first, end) of the item's. */
typedef struct head_group {
    fv_tile_strip *strip;
    int32_t first, end;
} head_group;

static int32_t heads_at_once(const fv_attend_job *job) { return FV_TILE_STRIP_ROWS / job->num_rows; }

static char *q_of(const fv_tile_item *item, int32_t head)
{
    return item->scratch.q + (int64_t)head * FV_TILE_STRIP_ROWS * item->job->params->head_size * FV_BF16_BYTES;
}

/* [Dv / 16] C tiles of num_rows rows. */
static float *sums_of(const fv_tile_item *item, int32_t head)
{
    return item->scratch.sums + (int64_t)head * item->job->num_rows * item->job->params->v_head_size;
}

static head_group group_at(const fv_tile_item *item, int32_t first)
{
    const int32_t num = heads_at_once(item->job);
    return (head_group){&item->scratch.strips[first / num], first, fv_min_i32(first + num, item->num_heads)};
}

static void pack_queries(const fv_tile_item *item, int32_t head, int32_t first_lane)
{
    const fv_attend_job *job = item->job;
    char *to = q_of(item, head);
    for (int32_t d = 0; d < job->params->head_size; d += FV_TILE_DEPTH, to += FV_TILE_BYTES) {
        const char *rows[FV_TILE_STRIP_ROWS];
        for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++) {
            const int32_t row = i - first_lane;
            rows[i] = item->scratch.zeros;
            if (row < 0 || row >= job->num_rows) continue;
            rows[i] = fv_attend_q_row(job, item->first_head + head, row) + d * FV_BF16_BYTES;
        }
        fv_lanes_store_transposed(to, rows);
    }
}

/* All heads of a group have the same tokens, and so the same keys. */
static void begin_group(const fv_tile_item *item, const head_group *group)
{
    const fv_attend_job *job = item->job;
    fv_row_strip *rows = &group->strip->rows;
    fv_row_strip_init(rows, job, item->first_head + group->first, 0, fv_strip_num_vectors(FV_TILE_STRIP_ROWS));
    fv_tile_scale_init(group->strip);
    for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++) {
        const fv_key_range keys = fv_attend_row_keys(job, i % job->num_rows);
        rows->first[i] = keys.first;
        rows->end[i] = keys.end;
    }
    for (int32_t head = group->first; head < group->end; head++)
        pack_queries(item, head, (head - group->first) * job->num_rows);
}

static void dot(fv_tile_item *item, const head_group *group, const fv_key_block *block)
{
    fv_tiles *tiles = &item->tiles;
    const int32_t depth = item->job->params->head_size / FV_TILE_DEPTH;
    fv_tile_zero(tiles, 0);
    fv_tile_zero(tiles, 1);
    for (int32_t head = group->first; head < group->end; head++) {
        fv_tile_find_keys(item, block, item->first_head + head);
        const fv_step_keys keys = fv_step_keys_of(&item->scratch, 0);
        const char *q = q_of(item, head);
        for (int32_t d = 0; d < depth; d++) {
            fv_tile_load(tiles, 3, q + d * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
            fv_tile_load(tiles, 2, keys.tiles[0] + d * keys.depths[0], keys.strides[0]);
            fv_tile_dot(tiles, 0, 2, 3);
            fv_tile_load(tiles, 7, keys.tiles[1] + d * keys.depths[1], keys.strides[1]);
            fv_tile_dot(tiles, 1, 7, 3);
            fv_tile_call_ahead(item);
        }
    }
    fv_tile_store(tiles, 0, item->scratch.scores, FV_TILE_ROW_BYTES);
    fv_tile_store(tiles, 1, item->scratch.scores + FV_TILE_ROWS * FV_TILE_STRIP_ROWS, FV_TILE_ROW_BYTES);
}

static void add_values(fv_tile_item *item, int32_t head, int32_t first_lane)
{
    fv_tiles *tiles = &item->tiles;
    const int32_t size = item->job->params->v_head_size, tile_floats = item->job->num_rows * FV_TILE_COLUMNS;
    float *sums = sums_of(item, head);
    const char *pairs = item->scratch.pairs;
    fv_tile_load(tiles, 6, item->scratch.weights + first_lane * FV_TILE_ROW_BYTES, FV_TILE_ROW_BYTES);
    for (int32_t column = 0; column < size; column += 32, sums += 2 * tile_floats, pairs += 2 * FV_TILE_BYTES) {
        fv_tile_load(tiles, 4, sums, FV_TILE_ROW_BYTES);
        fv_tile_load(tiles, 7, pairs, FV_TILE_ROW_BYTES);
        fv_tile_dot(tiles, 4, 6, 7);
        fv_tile_load(tiles, 5, sums + tile_floats, FV_TILE_ROW_BYTES);
        fv_tile_load(tiles, 3, pairs + FV_TILE_BYTES, FV_TILE_ROW_BYTES);
        fv_tile_dot(tiles, 5, 6, 3);
        fv_tile_store(tiles, 4, sums, FV_TILE_ROW_BYTES);
        fv_tile_store(tiles, 5, sums + tile_floats, FV_TILE_ROW_BYTES);
        fv_tile_call_ahead(item);
    }
}

static void rescale_sums(const fv_tile_item *item, int32_t head, const fv_tile_strip *strip, int32_t first_lane)
{
    const int32_t num_rows = item->job->num_rows, num_tiles = item->job->params->v_head_size / FV_TILE_COLUMNS;
    for (int32_t row = 0; row < num_rows; row++) {
        if (fv_tile_keeps_row(strip, first_lane + row, item->rescaling)) continue;
        fv_tile_rescale_row(sums_of(item, head) + row * FV_TILE_COLUMNS, num_rows * FV_TILE_COLUMNS, num_tiles, strip,
                            first_lane + row, item->rescaling);
    }
}

/* A key that is infinite makes NaN of what other heads' zeros are multiplied by: 1 if there is none. */
static int32_t scores_are_finite(const float *scores)
{
    fv_lanes sum[2] = {fv_lanes_splat(0.0f), fv_lanes_splat(0.0f)};
    for (int32_t key = 0; key < FV_STEP_KEYS; key += 2) {
        sum[0] += fv_lanes_load(scores + key * FV_TILE_STRIP_ROWS) * 0.0f;
        sum[1] += fv_lanes_load(scores + (key + 1) * FV_TILE_STRIP_ROWS) * 0.0f;
    }
    return fv_lanes_all_below(sum[0] + sum[1], 1.0f);
}

/* What a dot product of each lane is multiplied by: its head's. */
static fv_lanes factors_of(const fv_tile_item *item, const head_group *group)
{
    fv_lanes factors = fv_lanes_splat(0.0f);
    for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++) {
        const int32_t head = fv_min_i32(group->first + i / item->job->num_rows, group->end - 1);
        factors[i] = fv_attend_score_scale(item->job, item->first_head + head).dot;
    }
    return factors;
}

/* Returns 0 where tiles cannot go on: near an overflow, or where a key, or a value that some rows must not see, is
 * infinite or NaN. */
static int32_t attend_group(fv_tile_item *item, const head_group *group, const fv_key_block *block)
{
    const int32_t num_rows = item->job->num_rows;
    const fv_key_range *all = &group->strip->rows.all;
    const int32_t all_seen = all->first - block->first_key <= block->first && all->end - block->first_key >= block->end;
    dot(item, group, block);
    if (!scores_are_finite(item->scratch.scores)) return 0;
    fv_weigher weigh;
    if (!fv_weigher_begin(&weigh, group->strip, item->scratch.scores, block->first_key, 0, 1, factors_of(item, group),
                          item->rescaling))
        return 0;
    fv_weigher_step(&weigh, item->scratch.weights, item->scratch.scores, 0);
    fv_weigher_end(&weigh, group->strip);
    for (int32_t head = group->first; head < group->end; head++) {
        const int32_t first_lane = (head - group->first) * num_rows;
        if (fv_tile_pair_values(item, block, item->first_head + head, !all_seen)) return 0;
        rescale_sums(item, head, group->strip, first_lane);
        add_values(item, head, first_lane);
    }
    return 1;
}

static void finish_group(const fv_tile_item *item, const head_group *group)
{
    const int32_t num_rows = item->job->num_rows, size = item->job->params->v_head_size;
    const int32_t tile_floats = num_rows * FV_TILE_COLUMNS;
    for (int32_t lane = 0; lane < (group->end - group->first) * num_rows; lane++) {
        const int32_t head = group->first + lane / num_rows, row = lane % num_rows;
        for (int32_t column = 0; column < size; column += 32) {
            const float *low = sums_of(item, head) + column * num_rows + row * FV_TILE_COLUMNS;
            fv_lanes_store_natural(item->scratch.row + column, low, low + tile_floats);
        }
        fv_tile_unscale_row(item->scratch.row, size, group->strip, lane, item->rescaling);
        fv_attend_finish_row(&item->natural, item->first_head + head, row, item->scratch.row,
                             group->strip->rows.max[lane], group->strip->rows.sum[lane]);
    }
}

static int32_t attend_heads(fv_tile_item *item)
{
    const fv_attend_params *params = item->job->params;
    const int32_t step = heads_at_once(item->job);
    const int32_t sites = params->head_size / FV_TILE_DEPTH + FV_STEP_KEYS / 2 + params->v_head_size / 32;
    memset(item->scratch.zeros, 0, (size_t)fv_max_i32(params->head_size, params->v_head_size) * FV_BF16_BYTES);
    memset(sums_of(item, 0), 0, (size_t)(sums_of(item, item->num_heads) - sums_of(item, 0)) * sizeof(float));
    for (int32_t head = 0; head < item->num_heads; head += step) {
        const head_group group = group_at(item, head);
        begin_group(item, &group);
    }
    fv_key_block block = fv_key_block_at(item, item->job->keys.first / FV_STEP_KEYS * FV_STEP_KEYS, 0);
    for (int32_t turn = 1; block.first < block.end; turn = !turn) {
        const fv_key_block next = fv_key_block_at(item, block.first_key + item->block_keys, turn);
        fv_tile_aim_ahead(item, &next, item->num_heads * sites);
        fv_tile_find_strides(item, &block);
        for (int32_t head = 0; head < item->num_heads; head += step) {
            const head_group group = group_at(item, head);
            if (!attend_group(item, &group, &block)) return 0;
        }
        block = next;
    }
    for (int32_t head = 0; head < item->num_heads; head += step) {
        const head_group group = group_at(item, head);
        finish_group(item, &group);
    }
    return 1;
}

int32_t FV_ISA_SYMBOL(fv_few_tiles_serve)(const fv_attend_job *job)
{
    const fv_attend_params *params = job->params;
    if (job->num_rows > FV_TILE_STRIP_ROWS / 2 || params->soft_cap > 0 || params->alibi != FV_ALIBI_NONE) return 0;
    if (params->tree_mask) return 0;
    for (int32_t head = 0; head < job->item->num_kv_heads; head++)
        if (!(fv_attend_score_scale(job, job->item->first_kv_head + head).dot > 0)) return 0;
    return 1;
}

int32_t FV_ISA_SYMBOL(fv_attend_few_tiles)(const fv_attend_job *job, void *memory, fv_rescaling rescaling)
{
    const int32_t end_head = job->item->first_kv_head + job->item->num_kv_heads;
    fv_tile_item item;
    item.job = job;
    item.natural = *job;
    item.natural.lane_dtype = FV_DTYPE_F32;
    item.rescaling = rescaling;
    item.num_strips = 1;
    item.block_keys = FV_STEP_KEYS;
    int32_t is_done = 1;
    fv_tiles_configure(&item.tiles, job->num_rows);
    for (int32_t head = job->item->first_kv_head; head < end_head && is_done; head += FV_TILE_MAX_HEADS) {
        item.first_head = head;
        item.num_heads = fv_min_i32(FV_TILE_MAX_HEADS, end_head - head);
        item.scratch = fv_tile_scratch_of(job->params, item.num_heads, 0, item.block_keys, memory);
        is_done = attend_heads(&item);
    }
    fv_tiles_release(&item.tiles);
    return is_done;
}
