/* Attention of one work item with bf16 tiles.
 *
 * Rows (query tokens x heads of a KV head) go in strips of 16. For each block of keys, KV head and pair of strips:
 *
 *   scores^T [key][row]  = K   [key][d]     x  Q^T [d][row]      A: K as it lies in the cache, 16 keys x 32 elements;
 *                                                                B: pairs of the queries' elements, made once
 *   weights  [row][key]  = 2^(scores - max), rounded to bf16     lanes are rows: no step is a horizontal one; 32 keys
 *                                                                x 16 rows are transposed as bf16
 *   sums     [row][col] += weights          x  V [key][col]      A: the weights; B: pairs of keys of V, made once for
 *                                                                a block and all rows that meet it
 *
 * K needs no transposition: as A it is read straight from the pages, wherever 16 successive keys lie equally far apart.
 * Others (blocks of fewer or of odd numbers of tokens, the ends of a sequence, heads of no multiple of 32) are copied to
 * tiles first, zeros for those outside of the item and behind the end of a head; so are all where many strips meet them,
 * for tiles whose rows lie together come faster from L2. Two strips share each tile of K and each pair of V: 2 x 2 tiles,
 * four products for four loads.
 *
 * Eight tiles hold the scores of 32 keys x 32 rows, but not the sums of 32 rows x 128 columns: the sums stay in memory,
 * are rescaled there where a maximum grew, and pass through four tiles once for a block of keys. That is what blocks of
 * keys are for.
 *
 * While the scores of one pair of strips become weights, those of the next are computed and the values of the one before
 * are added: the tile unit and the vector units take turns in program order, four products and the exponentials of
 * eight keys, for a core looks no further ahead. Lines of the next block are asked for between, in the order in which
 * they lie.
 *
 * Many strips take the order of attend_many_tiles.c, few of large values that of
 * attend_shared_tiles.c. fp16 comes in two pieces of bf16 (half_pieces.h): sixteen products of scores and twelve of sums
 * where four are above. Where its strips are many, tiles of keys and values are kept from item to item (made_keys.h). */
#include "kernels/cpu/amx/attend_tiles.h"

#include "kernels/cpu/amx/attend_many_tiles.h"
#include "kernels/cpu/amx/attend_shared_tiles.h"
#include "kernels/cpu/amx/made_keys.h"
#include "kernels/cpu/amx/tile_products.h"

/* --- what is served ------------------------------------------------------------------------------------------- */

/* The queries' own format, or one of a byte, whose numbers are all bf16. */
static int32_t formats_serve(fv_dtype q_dtype, fv_dtype kv_dtype)
{
    if (q_dtype != FV_DTYPE_BF16 && q_dtype != FV_DTYPE_F16) return 0;
    return kv_dtype == q_dtype || kv_dtype == FV_DTYPE_F8_E4M3 || kv_dtype == FV_DTYPE_F8_E5M2 ||
           kv_dtype == FV_DTYPE_I8;
}

static int32_t sizes_serve(int32_t head_size, int32_t v_head_size)
{
    return head_size % FV_LANES == 0 && v_head_size % FV_LANES == 0 && head_size <= FV_TILE_MAX_SIZE &&
           v_head_size <= FV_TILE_MAX_SIZE;
}

const char *FV_ISA_SYMBOL(fv_tiles_why_not)(const fv_problem *problem)
{
    if (!formats_serve(problem->q_dtype, problem->kv_dtype)) return "tiles are of bf16, or of fp16 in two pieces";
    if (!sizes_serve(problem->mha.head_size, problem->mha.v_head_size))
        return "head_size is not a multiple of 8, or above 576";
    return NULL;
}

int32_t FV_ISA_SYMBOL(fv_tiles_serve)(const fv_attend_params *params)
{
    const fv_kv_view *cache = &params->cache;
    if (!sizes_serve(params->head_size, params->v_head_size)) return 0;
    if (!formats_serve(params->q_dtype, cache->dtype == FV_DTYPE_NONE ? params->q_dtype : cache->dtype)) return 0;
    return !params->dense.k || params->dense.dtype == params->q_dtype;
}

size_t FV_ISA_SYMBOL(fv_tiles_scratch)(const fv_attend_params *params)
{
    const int32_t group = params->num_heads / params->num_kv_heads;
    const int32_t few = fv_min_i32(params->num_kv_heads, FV_TILE_MAX_HEADS);
    const int32_t many = fv_num_strips(fv_max_i32(params->block_q * group, FV_DECODE_ROWS));
    const size_t in_pairs = fv_tile_scratch_of(params, fv_max_i32(few, many), 0, FV_TILE_MANY_KEYS, NULL).bytes;
    const size_t in_few = fv_tile_scratch_of(params, 2 * few, 0, FV_TILE_FEW_KEYS, NULL).bytes;
    const size_t least = in_pairs > in_few ? in_pairs : in_few;
    const int32_t shared = FV_ISA_SYMBOL(fv_shared_strips)(params, fv_min_i32(many, FV_TILE_SHARED_STRIPS));
    if (!shared) return least;
    const size_t in_common = fv_tile_scratch_of(params, shared, shared, FV_TILE_MANY_KEYS, NULL).bytes;
    return least > in_common ? least : in_common;
}

/* --- the sums of a strip without another -------------------------------------------------------------------------- */

/* Of one: 64 columns at a time, or the last 32. */
FV_ALWAYS_INLINE void add_columns(fv_tile_item *item, const fv_strip_pair *pair, int32_t column,
                                  const int32_t num_columns)
{
    fv_tiles *tiles = &item->tiles;
    const fv_tile_scratch *scratch = &item->scratch;
    const int64_t step_bytes = (int64_t)FV_STEP_KEYS * item->job->params->v_head_size * FV_BF16_BYTES;
    float *sums = pair->strips[0]->sums + (int64_t)column * FV_TILE_STRIP_ROWS;
    const int32_t tile_floats = FV_TILE_ROWS * FV_TILE_COLUMNS, num_rounds = item->pieces > 1 ? item->kv_pieces + 1 : 1;
    fv_tile_load(tiles, 0, sums, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 1, sums + tile_floats, FV_TILE_ROW_BYTES);
    if (num_columns == 64) {
        fv_tile_load(tiles, 2, sums + 2 * tile_floats, FV_TILE_ROW_BYTES);
        fv_tile_load(tiles, 3, sums + 3 * tile_floats, FV_TILE_ROW_BYTES);
    }
    for (int32_t round = 0; round < num_rounds; round++) {
        const char *weights = pair->weights[0] + (round == 1 ? fv_weight_piece_bytes(item) : 0);
        const char *of_columns = scratch->pairs + (round == 2 ? fv_pairs_piece_bytes(item) : 0) + column * 64;
        for (int32_t step = pair->first_step; step < pair->end_step; step++) {
            const char *pairs = of_columns + step * step_bytes;
            fv_tile_load(tiles, 4, weights + step * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
            fv_tile_load(tiles, 5, pairs, FV_TILE_ROW_BYTES);
            fv_tile_dot(tiles, 0, 4, 5);
            fv_tile_load(tiles, 6, pairs + FV_TILE_BYTES, FV_TILE_ROW_BYTES);
            fv_tile_dot(tiles, 1, 4, 6);
            if (num_columns == 64) {
                fv_tile_load(tiles, 7, pairs + 2 * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
                fv_tile_dot(tiles, 2, 4, 7);
                fv_tile_load(tiles, 5, pairs + 3 * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
                fv_tile_dot(tiles, 3, 4, 5);
            }
        }
    }
    fv_tile_store(tiles, 0, sums, FV_TILE_ROW_BYTES);
    fv_tile_store(tiles, 1, sums + tile_floats, FV_TILE_ROW_BYTES);
    if (num_columns == 64) {
        fv_tile_store(tiles, 2, sums + 2 * tile_floats, FV_TILE_ROW_BYTES);
        fv_tile_store(tiles, 3, sums + 3 * tile_floats, FV_TILE_ROW_BYTES);
    }
}

static void add_values_1(fv_tile_item *item, const fv_strip_pair *pair)
{
    const int32_t size = item->job->params->v_head_size;
    int32_t column = 0;
    for (; column + 64 <= size; column += 64) add_columns(item, pair, column, 64);
    if (column < size) add_columns(item, pair, column, 32);
}

/* --- the products that stand between exponentials ------------------------------------------------------------ */

/* Products of pairs of two strips, four at a time or, in pieces, sixteen of scores and twelve of sums: the scores of one pair,
 * then the sums of another. */
typedef struct product_queue {
    const fv_strip_pair *dots, *adds; /* NULL: none */
    int32_t dot_step, dot_d;          /* the next */
    int32_t add_step, add_column;
    int32_t num_left; /* times that */
} product_queue;

static product_queue queue_of(const fv_tile_item *item, const fv_strip_pair *dots, const fv_strip_pair *adds)
{
    const fv_attend_params *params = item->job->params;
    product_queue queue = {0};
    if (dots->num == 2 && dots->first_step < dots->end_step) {
        queue.dots = dots;
        queue.dot_step = dots->first_step;
        queue.num_left += (dots->end_step - dots->first_step) * (params->head_size / FV_TILE_DEPTH);
    }
    if (adds->num == 2 && adds->first_step < adds->end_step) {
        queue.adds = adds;
        queue.add_step = adds->first_step;
        queue.num_left += (adds->end_step - adds->first_step) * (params->v_head_size / 32);
    }
    return queue;
}

FV_ALWAYS_INLINE void dot_next(fv_tile_item *item, product_queue *queue, const int32_t pieces)
{
    const int32_t depth = item->job->params->head_size / FV_TILE_DEPTH;
    if (queue->dot_d == 0) fv_pair_dot_begin(item, 2);
    if (pieces > 1) {
        fv_half_dot(item, queue->dots, queue->dot_step, queue->dot_d, 2);
    } else {
        const fv_step_keys keys = fv_step_keys_of(&item->scratch, queue->dot_step);
        fv_pair_dot_part(item, queue->dots, &keys, queue->dot_d, queue->dot_d + 1, 2);
    }
    if (++queue->dot_d < depth) return;
    fv_pair_dot_end(item, queue->dots, queue->dot_step, 2);
    queue->dot_d = 0;
    if (++queue->dot_step == queue->dots->end_step) queue->dots = NULL;
}

FV_ALWAYS_INLINE void add_next(fv_tile_item *item, product_queue *queue, const int32_t pieces)
{
    const fv_strip_pair *pair = queue->adds;
    const int64_t step_bytes = (int64_t)FV_STEP_KEYS * item->job->params->v_head_size * FV_BF16_BYTES;
    const char *pairs = item->scratch.pairs + queue->add_step * step_bytes + queue->add_column * FV_TILE_ROW_BYTES;
    if (queue->add_step == pair->first_step) fv_pair_load_sums(item, pair, queue->add_column);
    if (pieces > 1)
        fv_half_add_step(item, pair, queue->add_step, pairs);
    else
        fv_pair_add_step(item, pair, queue->add_step, pairs);
    if (++queue->add_step < pair->end_step) return;
    fv_pair_store_sums(item, pair, queue->add_column);
    queue->add_step = pair->first_step;
    queue->add_column += 32;
}

/* The next products. */
FV_ALWAYS_INLINE void queue_next(fv_tile_item *item, product_queue *queue, const int32_t pieces)
{
    queue->num_left--;
    if (queue->dots)
        dot_next(item, queue, pieces);
    else
        add_next(item, queue, pieces);
}

static void queue_finish(fv_tile_item *item, product_queue *queue)
{
    while (queue->num_left > 0) queue_next(item, queue, item->pieces);
}

/* Scores of a pair that has no other beside it. */
static void dot_alone(fv_tile_item *item, const fv_strip_pair *pair)
{
    const int32_t depth = item->job->params->head_size / FV_TILE_DEPTH;
    if (item->pieces == 1) {
        fv_pair_dot(item, pair, pair->first_step, pair->end_step);
        return;
    }
    for (int32_t step = pair->first_step; step < pair->end_step; step++) {
        fv_pair_dot_begin(item, pair->num);
        for (int32_t d = 0; d < depth; d++) fv_half_dot(item, pair, step, d, pair->num);
        fv_pair_dot_end(item, pair, step, pair->num);
    }
}

/* --- softmax ------------------------------------------------------------------------------------------------------ */

/* One strip's weights of a step, and after each quarter of it some products: `share` of them for each of `of` quarters
 * that are to come, so that the tile unit and the vector units have both what to do. */
FV_ALWAYS_INLINE void weigh_between(fv_tile_item *item, fv_weigher *weigh, char *weights, const float *scores,
                                    const float *v_scales, product_queue *queue, int32_t *due, int32_t share,
                                    int32_t of, const int32_t pieces)
{
    fv_weigher weigher = *weigh;
    fv_words words[16], low_words[16];
    FV_UNROLL
    for (int32_t quarter = 0; quarter < 4; quarter++) {
        if (pieces == 1)
            fv_weigher_quarter(&weigher, words, scores, v_scales, quarter, 0);
        else
            fv_weigher_quarter_pieces(&weigher, words, low_words, scores, v_scales, quarter);
        for (*due += share; *due >= of; *due -= of) queue_next(item, queue, pieces);
    }
    fv_words_store_transposed(weights, words);
    if (pieces > 1) fv_words_store_transposed(weights + fv_weight_piece_bytes(item), low_words);
    fv_weigher_end_step(&weigher);
    *weigh = weigher;
}

/* Scores of a pair to weights, with the products of `queue` in between, and its sums to the new maximum. */
FV_ALWAYS_INLINE void weigh_pair_as(fv_tile_item *item, const fv_strip_pair *pair, product_queue *queue,
                                    const fv_key_block *block, int32_t kv_head, const int32_t pieces)
{
    const fv_attend_params *params = item->job->params;
    const fv_score_scale scale = fv_attend_score_scale(item->job, kv_head);
    fv_weigher weigh[2];
    int32_t begun[2] = {0, 0};
    for (int32_t i = 0; i < pair->num; i++) begun[i] = fv_strip_weigh_begin(&weigh[i], item, pair, i, block, scale);
    const int32_t share = queue->num_left;
    const int32_t num_quarters = 4 * (begun[0] + begun[1]) * (pair->end_step - pair->first_step);
    int32_t due = 0;
    for (int32_t step = pair->first_step; step < pair->end_step; step++) {
        for (int32_t i = 0; i < pair->num; i++) {
            if (!begun[i]) continue;
            weigh_between(item, &weigh[i], pair->weights[i] + step * FV_TILE_BYTES,
                          pair->scores[i] + step * FV_STEP_SCORES, fv_tile_step_scales(item, step), queue, &due, share,
                          num_quarters, pieces);
        }
    }
    for (int32_t i = 0; i < pair->num; i++) {
        if (begun[i]) fv_weigher_end(&weigh[i], pair->strips[i]);
        fv_strip_rescale_sums(pair->strips[i], params->v_head_size, item->rescaling);
    }
}

static void weigh_pair(fv_tile_item *item, const fv_strip_pair *pair, product_queue *queue, const fv_key_block *block,
                       int32_t kv_head)
{
    if (item->pieces == 1)
        weigh_pair_as(item, pair, queue, block, kv_head, 1);
    else
        weigh_pair_as(item, pair, queue, block, kv_head, 2);
}

/* --- one block, one item ---------------------------------------------------------------------------------------- */

/* The pair of strips from `first` on and its steps; scores and weights lie in buffer `turn`. None behind the last. */
static fv_strip_pair pair_at(const fv_tile_item *item, fv_tile_strip *strips, const fv_key_block *block, int32_t first,
                             int32_t turn)
{
    fv_strip_pair pair = {.num = fv_min_i32(2, item->num_strips - first)};
    if (pair.num <= 0) return (fv_strip_pair){0};
    for (int32_t i = 0; i < pair.num; i++) {
        pair.strips[i] = &strips[first + i];
        pair.scores[i] = item->scratch.scores + (int64_t)(2 * turn + i) * item->block_keys * FV_TILE_STRIP_ROWS;
        pair.weights[i] = fv_tile_weights(item, 2 * turn + i);
    }
    fv_pair_find_steps(&pair, block);
    return pair;
}

/* All strips of a head, in pairs: while one pair's scores become weights, the next one's are computed, and the values
 * of the one before are added. */
static void attend_strips(fv_tile_item *item, fv_tile_strip *strips, const fv_key_block *block, int32_t kv_head)
{
    fv_strip_pair last = {0}, pair = pair_at(item, strips, block, 0, 0);
    dot_alone(item, &pair);
    for (int32_t i = 0; i < item->num_strips; i += 2) {
        const fv_strip_pair next = pair_at(item, strips, block, i + 2, (i / 2 + 1) % 2);
        product_queue queue = queue_of(item, &next, &last);
        if (pair.first_step < pair.end_step) weigh_pair(item, &pair, &queue, block, kv_head);
        queue_finish(item, &queue);
        if (next.num == 1) dot_alone(item, &next);
        last = pair;
        pair = next;
    }
    product_queue queue = queue_of(item, &pair, &last);
    queue_finish(item, &queue);
    if (last.num == 1 && last.first_step < last.end_step) add_values_1(item, &last);
}

/* What the worker keeps of a block in pieces (made_keys.h), if it keeps any. */
typedef struct kept_block {
    fv_made_block *block; /* NULL: nothing */
    char *tiles;
    int32_t index, serves;
} kept_block;

static kept_block kept_block_of(const fv_tile_item *item, const fv_key_block *block)
{
    if (!item->keeps_keys) return (kept_block){0};
    const fv_attend_params *params = item->job->params;
    fv_made_keys *made = fv_made_keys_of(params);
    const int32_t index = block->first_key / item->block_keys, slot = fv_made_slot(params, index);
    return (kept_block){
        .block = &made->blocks[slot],
        .tiles = fv_made_tiles(made, params, slot),
        .index = index,
        .serves = fv_made_block_serves(&made->blocks[slot], index, block->first, block->end),
    };
}

/* Keys and values of a head in pieces. Returns 0 where something is infinite or NaN. */
static int32_t make_pieces(fv_tile_item *item, const fv_key_block *block, int32_t kv_head)
{
    const kept_block kept = kept_block_of(item, block);
    if (kept.block) {
        item->scratch.k_copies = kept.tiles;
        item->scratch.pairs = kept.tiles +
                              item->pieces * item->block_keys * item->job->params->head_size * FV_BF16_BYTES;
        if (kept.serves) return 1;
        kept.block->is_made = 0;
    }
    if (fv_half_copy_keys(item, block, kv_head) || fv_half_pair_values(item, block, kv_head)) return 0;
    if (kept.block) *kept.block = (fv_made_block){1, kept.index, block->first, block->end};
    return 1;
}

/* Aims at what the block's tiles are made of, or at the tiles, where they are kept. */
static void aim_ahead(fv_tile_item *item, const fv_key_block *block, int32_t num_sites)
{
    const kept_block kept = kept_block_of(item, block);
    if (kept.serves && block->first < block->end)
        fv_made_tiles_aim(item, kept.tiles, num_sites);
    else
        fv_tile_aim_ahead(item, block, num_sites);
}

/* Keys and values of a head as the products take them. Returns 0 where what some rows must not see is infinite or NaN, in
 * pieces where anything is. */
static int32_t make_tiles(fv_tile_item *item, const fv_tile_strip *strips, const fv_key_block *block, int32_t kv_head)
{
    fv_tile_find_scales(item, block, kv_head);
    if (item->pieces > 1) return make_pieces(item, block, kv_head);
    fv_tile_find_keys(item, block, kv_head);
    return !fv_tile_pair_values(item, block, kv_head, !fv_strips_all_seen(item, strips, block));
}

/* Returns 0 as make_tiles. */
static int32_t attend_block(fv_tile_item *item, const fv_key_block *block)
{
    if (item->pieces == 1) fv_tile_find_strides(item, block);
    for (int32_t head = 0; head < item->num_heads; head++) {
        const int32_t kv_head = item->first_head + head;
        fv_tile_strip *strips = &item->scratch.strips[head * item->num_strips];
        if (!make_tiles(item, strips, block, kv_head)) return 0;
        attend_strips(item, strips, block, kv_head);
    }
    return 1;
}

/* Some of the item's KV heads. */
static int32_t attend_heads(fv_tile_item *item)
{
    const fv_attend_job *job = item->job;
    const fv_words top = fv_strips_begin(item, 0);
    if (item->pieces > 1 && !fv_words_all_below(top, FV_HALF_INFINITY)) return 0;
    for (int32_t i = 0; i < item->num_heads * item->num_strips; i++)
        fv_strip_zero_sums(&item->scratch.strips[i], item->job->params->v_head_size);
    item->keeps_keys = item->pieces > 1 && item->num_strips >= fv_tile_many_strips(job->params) &&
                       fv_made_keys_bytes(job->params) > 0;
    if (item->keeps_keys) fv_made_keys_begin(fv_made_keys_of(job->params), job->item, item->first_head);
    const int32_t aligned = item->keeps_keys ? item->block_keys : FV_STEP_KEYS;
    fv_key_block block = fv_key_block_at(item, job->keys.first / aligned * aligned, 0);
    const int32_t products = (item->num_strips + 1) / 2 * (job->params->head_size / FV_TILE_DEPTH);
    const int32_t num_sites = item->num_heads * (item->block_keys / FV_STEP_KEYS) * (products + FV_STEP_KEYS / 2);
    for (int32_t turn = 1; block.first < block.end; turn = !turn) {
        const fv_key_block next = fv_key_block_at(item, block.first_key + item->block_keys, turn);
        aim_ahead(item, &next, num_sites);
        if (!attend_block(item, &block)) return 0;
        block = next;
    }
    fv_strips_finish(item);
    return 1;
}

int32_t FV_ISA_SYMBOL(fv_attend_tiles)(const fv_attend_job *job, void *memory, fv_rescaling rescaling,
                                       fv_key_shares *shares)
{
    const int32_t has_parts = fv_has_latent_parts(job->params);
    const int32_t is_few = job->num_rows <= FV_TILE_STRIP_ROWS && !has_parts;
    const int32_t end_head = job->item->first_kv_head + job->item->num_kv_heads, run = is_few ? FV_TILE_MAX_HEADS : 1;
    fv_tile_item item;
    fv_tile_item_begin(&item, job);
    job = item.job;
    item.rescaling = rescaling;
    item.k_scales = item.v_scales = NULL;
    item.num_strips = fv_num_strips(job->num_rows);
    item.block_keys = is_few ? FV_TILE_FEW_KEYS : FV_TILE_MANY_KEYS;
    if (has_parts && item.num_strips > 2) item.block_keys = FV_TILE_PIECED_KEYS;
    const int32_t in_rows = fv_tile_reads_value(&item, &job->cache) || item.converts_latents;
    const int32_t has_scales = job->has_k_scales || job->has_v_scales, is_cached = job->keys.end <= job->dense_from;
    const int32_t shared = in_rows && is_cached && !has_scales
                               ? FV_ISA_SYMBOL(fv_shared_strips)(job->params, item.num_strips)
                               : 0;
    if (has_parts && !shared) return 0;
    const int32_t many = !shared && FV_ISA_SYMBOL(fv_many_tiles_serve)(job, item.num_strips, rescaling);
    int32_t is_done = 1;
    fv_tiles_configure(&item.tiles, FV_TILE_ROWS);
    for (int32_t head = job->item->first_kv_head; head < end_head && is_done; head += run) {
        item.first_head = head;
        item.num_heads = fv_min_i32(run, end_head - head);
        item.ahead_portions = 0;
        item.scratch = fv_tile_scratch_of(job->params, item.num_heads * item.num_strips, shared, item.block_keys,
                                          memory);
        if (shared)
            is_done = FV_ISA_SYMBOL(fv_attend_shared_tiles)(&item, shares);
        else
            is_done = many ? FV_ISA_SYMBOL(fv_attend_many_tiles)(&item) : attend_heads(&item);
    }
    fv_tiles_release(&item.tiles);
    return is_done;
}
