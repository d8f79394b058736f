/* Strips of rows and pairs of them, which share the tiles of keys and values that they meet: what the orders in which
 * an item of many rows can be done have in common (attend_tiles.c, attend_many_tiles.c, attend_shared_tiles.c). */
#ifndef FV_KERNELS_CPU_AMX_TILE_STRIPS_H
#define FV_KERNELS_CPU_AMX_TILE_STRIPS_H

#include "kernels/cpu/amx/half_pieces.h"
#include "kernels/cpu/amx/weigher.h"

enum {
    FV_QUERY_STRIPS_AHEAD = 2,                          /* asked for while one is packed */
    FV_STEP_SCORES = FV_STEP_KEYS * FV_TILE_STRIP_ROWS, /* of a strip */
};

/* --- queries -------------------------------------------------------------------------------------------------- */

/* Rows of the queries from `first_row` on; those that pad the strip repeat the last. */
static inline void fv_strip_find_queries(const char *rows[FV_TILE_STRIP_ROWS], const fv_attend_job *job,
                                         int32_t kv_head, int32_t first_row)
{
    const fv_attend_params *params = job->params;
    const int64_t next_token = params->q_token_stride - (job->group - 1) * params->q_head_stride;
    int32_t head = first_row % job->group;
    rows[0] = fv_attend_q_row(job, kv_head, first_row);
    for (int32_t i = 1; i < FV_TILE_STRIP_ROWS; i++) {
        rows[i] = rows[i - 1];
        if (first_row + i >= job->num_rows) continue;
        const int32_t ends_token = ++head == job->group;
        rows[i] += ends_token ? next_token : params->q_head_stride;
        if (ends_token) head = 0;
    }
}

/* To B tiles, or as_rows to A tiles. Returns the largest magnitudes of A tiles, and of what comes in pieces. */
static inline fv_words fv_strip_pack_queries(const fv_tile_strip *strip, const fv_tile_item *item, int32_t kv_head,
                                             int32_t as_rows)
{
    fv_words top = {0};
    const fv_attend_job *job = item->job;
    const char *rows[FV_TILE_STRIP_ROWS];
    fv_strip_find_queries(rows, job, kv_head, strip->rows.first_row);
    if (item->pieces > 1) return fv_half_pack_queries(strip->q, item, rows, as_rows);
    fv_tile_pad_queries(item, rows);
    for (int32_t d = 0; d < job->params->head_size; d += FV_TILE_DEPTH) {
        char *tile = strip->q + d / FV_TILE_DEPTH * FV_TILE_BYTES;
        if (!as_rows) fv_lanes_store_transposed(tile, rows);
        for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++) {
            if (as_rows) {
                fv_lanes_store(tile + i * FV_TILE_ROW_BYTES, fv_lanes_load(rows[i]));
                top = fv_words_max(top, fv_words_magnitudes(rows[i]));
            }
            rows[i] += FV_TILE_DEPTH * FV_BF16_BYTES;
        }
    }
    return top;
}

/* Asks for the queries of the strip from `first_row` on; none behind the last. */
static inline void fv_strip_call_queries(const fv_attend_job *job, int32_t kv_head, int32_t first_row)
{
    if (first_row >= job->num_rows) return;
    const char *rows[FV_TILE_STRIP_ROWS];
    fv_strip_find_queries(rows, job, kv_head, first_row);
    for (int32_t row = 0; row < FV_TILE_STRIP_ROWS; row++)
        for (int32_t i = 0; i < job->params->head_size * FV_BF16_BYTES; i += FV_CACHE_LINE)
            __builtin_prefetch(rows[row] + i, 0, 2);
}

/* Sums are not set yet. q_as_rows: queries become A tiles, else B tiles. Returns as fv_strip_pack_queries.
 * Calls ahead once for each strip. */
static inline fv_words fv_strips_begin(fv_tile_item *item, int32_t q_as_rows)
{
    fv_words top = {0};
    const fv_attend_job *job = item->job;
    const int32_t num_all = item->num_heads * item->num_strips;
    for (int32_t i = 0; i < num_all; i++) {
        const int32_t kv_head = item->first_head + i / item->num_strips;
        fv_tile_strip *strip = &item->scratch.strips[i];
        strip->q = item->scratch.q + i * item->pieces * fv_query_piece_bytes(item);
        strip->sums = item->scratch.sums + (size_t)i * item->scratch.sums_stride;
        fv_row_strip_init(&strip->rows, job, kv_head, i % item->num_strips * FV_TILE_STRIP_ROWS,
                          fv_strip_num_vectors(FV_TILE_STRIP_ROWS));
        fv_tile_scale_init(strip);
        fv_strip_call_queries(job, kv_head, (i % item->num_strips + FV_QUERY_STRIPS_AHEAD) * FV_TILE_STRIP_ROWS);
        top = fv_words_max(top, fv_strip_pack_queries(strip, item, kv_head, q_as_rows));
        fv_tile_call_ahead(item);
    }
    memset(item->scratch.zeros, 0,
           (size_t)fv_max_i32(job->params->head_size, job->params->v_head_size) * FV_BF16_BYTES);
    return top;
}

static inline void fv_strip_zero_sums(const fv_tile_strip *strip, int32_t size)
{
    memset(strip->sums, 0, (size_t)FV_TILE_STRIP_ROWS * (size_t)size * sizeof(float));
}

/* The weights of strip `i`, of those that are kept at a time. */
static inline char *fv_tile_weights(const fv_tile_item *item, int32_t i)
{
    return item->scratch.weights + i * item->pieces * fv_weight_piece_bytes(item);
}

/* --- scores ------------------------------------------------------------------------------------------------------ */

/* Up to two strips that meet a block of keys together, and the steps of it that they see. */
typedef struct fv_strip_pair {
    fv_tile_strip *strips[2];
    float *scores[2]; /* [block_keys][16] */
    char *weights[2]; /* [block_keys / 32] A tiles */
    int32_t num;
    int32_t first_step, end_step;
} fv_strip_pair;

/* Scores of a step, elements [first_d, end_d) / 32. */
FV_ALWAYS_INLINE void fv_pair_dot_part(fv_tile_item *item, const fv_strip_pair *pair, const fv_step_keys *keys,
                                       int32_t first_d, int32_t end_d, const int32_t num)
{
    fv_tiles *tiles = &item->tiles;
    const char *q0 = pair->strips[0]->q, *q1 = pair->strips[num - 1]->q;
    for (int32_t d = first_d; d < end_d; d++) {
        fv_tile_load(tiles, 6, q0 + d * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
        fv_tile_load(tiles, 4, keys->tiles[0] + d * keys->depths[0], keys->strides[0]);
        fv_tile_dot(tiles, 0, 4, 6);
        fv_tile_load(tiles, 5, keys->tiles[1] + d * keys->depths[1], keys->strides[1]);
        fv_tile_dot(tiles, 1, 5, 6);
        if (num == 2) {
            fv_tile_load(tiles, 7, q1 + d * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
            fv_tile_dot(tiles, 2, 4, 7);
            fv_tile_dot(tiles, 3, 5, 7);
        }
        fv_tile_call_ahead(item);
    }
}

FV_ALWAYS_INLINE void fv_pair_dot_begin(fv_tile_item *item, const int32_t num)
{
    fv_tile_zero(&item->tiles, 0);
    fv_tile_zero(&item->tiles, 1);
    if (num == 1) return;
    fv_tile_zero(&item->tiles, 2);
    fv_tile_zero(&item->tiles, 3);
}

FV_ALWAYS_INLINE void fv_pair_dot_end(fv_tile_item *item, const fv_strip_pair *pair, int32_t step, const int32_t num)
{
    const int32_t at = step * FV_STEP_SCORES, next = at + FV_TILE_ROWS * FV_TILE_STRIP_ROWS;
    fv_tile_store(&item->tiles, 0, pair->scores[0] + at, FV_TILE_ROW_BYTES);
    fv_tile_store(&item->tiles, 1, pair->scores[0] + next, FV_TILE_ROW_BYTES);
    if (num == 1) return;
    fv_tile_store(&item->tiles, 2, pair->scores[1] + at, FV_TILE_ROW_BYTES);
    fv_tile_store(&item->tiles, 3, pair->scores[1] + next, FV_TILE_ROW_BYTES);
}

/* The steps of the block that some row of the strips sees. */
static inline void fv_pair_find_steps(fv_strip_pair *pair, const fv_key_block *block)
{
    int32_t first = INT32_MAX, end = 0;
    for (int32_t i = 0; i < pair->num; i++) {
        first = fv_min_i32(first, pair->strips[i]->rows.some.first - block->first_key);
        end = fv_max_i32(end, pair->strips[i]->rows.some.end - block->first_key);
    }
    first = fv_max_i32(first, block->first);
    end = fv_min_i32(end, block->end);
    pair->first_step = first < end ? first / FV_STEP_KEYS : 0;
    pair->end_step = first < end ? (int32_t)fv_ceil_div(end, FV_STEP_KEYS) : 0;
}

/* Do all rows of the head see all keys of the block? */
static inline int32_t fv_strips_all_seen(const fv_tile_item *item, const fv_tile_strip *strips,
                                         const fv_key_block *block)
{
    for (int32_t i = 0; i < item->num_strips; i++) {
        const fv_key_range *all = &strips[i].rows.all;
        if (all->first - block->first_key > block->first || all->end - block->first_key < block->end) return 0;
    }
    return 1;
}

/* --- softmax ------------------------------------------------------------------------------------------------------ */

/* Whatever the score is made of, as `job` says. */
static inline void fv_strip_weigh_any(fv_tile_strip *strip, float *scores, char *weights, const fv_tile_item *item,
                                      const fv_attend_job *job, const fv_key_block *block, const fv_strip_pair *pair,
                                      const float *k_scales, fv_score_scale scale)
{
    fv_row_strip *rows = &strip->rows;
    fv_strip_span span = fv_row_strip_span(rows, job, block->first_key, block->first, block->end);
    span.first = fv_max_i32(span.first, pair->first_step * FV_STEP_KEYS);
    span.end = fv_max_i32(span.first, span.end);
    span.scale = scale;
    span.k_scales = k_scales;
    span.v_scales = item->v_scales;
    float old_max[FV_TILE_STRIP_ROWS];
    memcpy(old_max, rows->max, sizeof(old_max));
    fv_row_strip_softmax(rows, scores, &span);
    if (fv_rescaling_adds(item->rescaling)) fv_tile_scale_move(strip, old_max, job->params->q_dtype, item->rescaling);
    const fv_lanes s = fv_tile_scale_of(strip);
    for (int32_t step = pair->first_step; step < pair->end_step; step++) {
        fv_words words[16], low_words[16];
        for (int32_t p = 0; p < 16; p++) {
            fv_lanes halves[2];
            for (int32_t half = 0; half < 2; half++) {
                const int32_t key = step * FV_STEP_KEYS + fv_words_key(p, half);
                halves[half] = key < span.first || key >= span.end
                                   ? fv_lanes_splat(0.0f)
                                   : fv_lanes_load(scores + key * FV_TILE_STRIP_ROWS) * s;
            }
            words[p] = fv_words_of(halves[0], halves[1]);
            if (item->pieces == 1) continue;
            const fv_word_pieces pieces = fv_word_pieces_of(halves[0], halves[1]);
            words[p] = pieces.high;
            low_words[p] = pieces.low;
        }
        char *to = weights + step * FV_TILE_BYTES;
        fv_words_store_transposed(to, words);
        if (item->pieces > 1) fv_words_store_transposed(to + fv_weight_piece_bytes(item), low_words);
    }
}

/* The same of scores that fv_scores_prepare has seen: scales, cap and ALiBi are in them. */
static inline void fv_strip_weigh_prepared(fv_tile_strip *strip, float *scores, char *weights, const fv_tile_item *item,
                                           const fv_key_block *block, const fv_strip_pair *pair,
                                           fv_score_scale multiple)
{
    fv_attend_params params = *item->job->params;
    params.alibi = FV_ALIBI_NONE;
    fv_attend_job job = *item->job;
    job.params = &params;
    fv_strip_weigh_any(strip, scores, weights, item, &job, block, pair, NULL, multiple);
}

/* 1: a score is a multiple of its dot product, no overflow is near. */
static inline int32_t fv_scores_are_plain(const fv_attend_params *params, fv_score_scale scale)
{
    return scale.cap == 0 && params->alibi == FV_ALIBI_NONE && fv_scores_are_multiples(scale);
}

/* The strip's maxima over the pair's steps of the block. 1: fv_weigher_step makes the weights; 0: they are made. */
static inline int32_t fv_strip_weigh_begin(fv_weigher *weigh, const fv_tile_item *item, const fv_strip_pair *pair,
                                           int32_t i, const fv_key_block *block, fv_score_scale scale)
{
    fv_tile_strip *strip = pair->strips[i];
    float *scores = pair->scores[i];
    char *weights = pair->weights[i];
    if (!fv_scores_are_multiples(scale)) {
        fv_strip_weigh_any(strip, scores, weights, item, item->job, block, pair, item->k_scales, scale);
        return 0;
    }
    scale = fv_scores_prepare(scores, &strip->rows, item->job, block->first_key, pair->first_step, pair->end_step,
                              item->k_scales, scale);
    if (fv_weigher_begin(weigh, strip, item->job, scores, block->first_key, pair->first_step, pair->end_step,
                         fv_lanes_splat(scale.dot), item->rescaling))
        return 1;
    fv_strip_weigh_prepared(strip, scores, weights, item, block, pair, scale);
    return 0;
}

/* The weights themselves. */
FV_ALWAYS_INLINE void fv_strip_weigh(const fv_tile_item *item, const fv_strip_pair *pair, int32_t i,
                                     const fv_key_block *block, fv_score_scale scale)
{
    fv_weigher weigher;
    if (!fv_strip_weigh_begin(&weigher, item, pair, i, block, scale)) return;
    char *weights = pair->weights[i];
    const float *scores = pair->scores[i];
    for (int32_t step = pair->first_step; step < pair->end_step; step++)
        fv_weigher_step(&weigher, weights + step * FV_TILE_BYTES, scores + step * FV_STEP_SCORES,
                        fv_tile_step_scales(item, step), 0);
    fv_weigher_end(&weigher, pair->strips[i]);
}

/* --- the end ------------------------------------------------------------------------------------------------------- */

/* A row of the sums in natural order and units, to item->scratch.row. */
static inline void fv_strip_natural_row(const fv_tile_item *item, const fv_tile_strip *strip, int32_t in_strip)
{
    const int32_t size = item->job->params->v_head_size;
    for (int32_t column = 0; column < size; column += 32) {
        const float *low = strip->sums + column * FV_TILE_STRIP_ROWS + in_strip * FV_TILE_COLUMNS;
        fv_lanes_store_natural(item->scratch.row + column, low, low + FV_TILE_ROWS * FV_TILE_COLUMNS);
    }
    fv_tile_unscale_row(item->scratch.row, size, strip, in_strip, item->rescaling);
}

static inline void fv_strips_finish(const fv_tile_item *item)
{
    const int32_t num_rows = item->job->num_rows;
    for (int32_t i = 0; i < item->num_heads * num_rows; i++) {
        const int32_t head = i / num_rows, row = i % num_rows, in_strip = row % FV_TILE_STRIP_ROWS;
        const fv_tile_strip *strip = &item->scratch.strips[head * item->num_strips + row / FV_TILE_STRIP_ROWS];
        fv_strip_natural_row(item, strip, in_strip);
        fv_attend_finish_row(&item->natural, item->first_head + head, row, item->scratch.row, strip->rows.max[in_strip],
                             strip->rows.sum[in_strip]);
    }
}

#endif
