/* The products of pairs of strips with a block of keys, whatever the order in which an item does them. */
#ifndef FV_KERNELS_CPU_AMX_TILE_PRODUCTS_H
#define FV_KERNELS_CPU_AMX_TILE_PRODUCTS_H

#include "kernels/cpu/amx/tile_strips.h"

/* --- scores ---------------------------------------------------------------------------------------------------- */

FV_ALWAYS_INLINE void fv_pair_dot_as(fv_tile_item *item, const fv_strip_pair *pair, int32_t first_step,
                                     int32_t end_step, const int32_t num)
{
    const int32_t depth = item->job->params->head_size / FV_TILE_DEPTH;
    for (int32_t step = first_step; step < end_step; step++) {
        const fv_step_keys keys = fv_step_keys_of(&item->scratch, step);
        fv_pair_dot_begin(item, num);
        fv_pair_dot_part(item, pair, &keys, 0, depth, num);
        fv_pair_dot_end(item, pair, step, num);
    }
}

static inline void fv_pair_dot(fv_tile_item *item, const fv_strip_pair *pair, int32_t first_step, int32_t end_step)
{
    if (pair->num == 2)
        fv_pair_dot_as(item, pair, first_step, end_step, 2);
    else
        fv_pair_dot_as(item, pair, first_step, end_step, 1);
}

/* --- sums ------------------------------------------------------------------------------------------------------- */

/* The tiles of the sums of two strips, 32 columns from `column` on. */
FV_ALWAYS_INLINE void fv_pair_load_sums(fv_tile_item *item, const fv_strip_pair *pair, int32_t column)
{
    const float *low = pair->strips[0]->sums + column * FV_TILE_STRIP_ROWS;
    const float *other_low = pair->strips[1]->sums + column * FV_TILE_STRIP_ROWS;
    fv_tile_load(&item->tiles, 0, low, FV_TILE_ROW_BYTES);
    fv_tile_load(&item->tiles, 1, low + FV_TILE_ROWS * FV_TILE_COLUMNS, FV_TILE_ROW_BYTES);
    fv_tile_load(&item->tiles, 2, other_low, FV_TILE_ROW_BYTES);
    fv_tile_load(&item->tiles, 3, other_low + FV_TILE_ROWS * FV_TILE_COLUMNS, FV_TILE_ROW_BYTES);
}

FV_ALWAYS_INLINE void fv_pair_store_sums(fv_tile_item *item, const fv_strip_pair *pair, int32_t column)
{
    float *low = pair->strips[0]->sums + column * FV_TILE_STRIP_ROWS;
    float *other_low = pair->strips[1]->sums + column * FV_TILE_STRIP_ROWS;
    fv_tile_store(&item->tiles, 0, low, FV_TILE_ROW_BYTES);
    fv_tile_store(&item->tiles, 1, low + FV_TILE_ROWS * FV_TILE_COLUMNS, FV_TILE_ROW_BYTES);
    fv_tile_store(&item->tiles, 2, other_low, FV_TILE_ROW_BYTES);
    fv_tile_store(&item->tiles, 3, other_low + FV_TILE_ROWS * FV_TILE_COLUMNS, FV_TILE_ROW_BYTES);
}

/* The values of a step: `pairs` are the two B tiles of its columns. */
FV_ALWAYS_INLINE void fv_pair_add_step(fv_tile_item *item, const fv_strip_pair *pair, int32_t step, const char *pairs)
{
    fv_tiles *tiles = &item->tiles;
    fv_tile_load(tiles, 6, pairs, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 4, pair->weights[0] + step * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    fv_tile_dot(tiles, 0, 4, 6);
    fv_tile_load(tiles, 7, pairs + FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    fv_tile_dot(tiles, 1, 4, 7);
    fv_tile_load(tiles, 5, pair->weights[1] + step * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    fv_tile_dot(tiles, 2, 5, 6);
    fv_tile_dot(tiles, 3, 5, 7);
}

/* To the maxima that have just grown. */
static inline void fv_strip_rescale_sums(const fv_tile_strip *strip, int32_t size, fv_rescaling rescaling)
{
    for (int32_t row = 0; row < FV_TILE_STRIP_ROWS; row++) {
        if (fv_tile_keeps_row(strip, row, rescaling)) continue;
        fv_tile_rescale_row(strip->sums + row * FV_TILE_COLUMNS, FV_TILE_ROWS * FV_TILE_COLUMNS, size / FV_TILE_COLUMNS,
                            strip, row, rescaling);
    }
}

/* --- of pieces (half_pieces.h) ----------------------------------------------------------------------------------- */

/* Four of a step's scores' products, or two of one strip; operands are in tiles 4 to 7. */
#define FV_HALF_DOT(tiles, num)          \
    do {                                 \
        fv_tile_dot(tiles, 0, 4, 6);     \
        fv_tile_dot(tiles, 1, 5, 6);     \
        if ((num) == 2) {                \
            fv_tile_dot(tiles, 2, 4, 7); \
            fv_tile_dot(tiles, 3, 5, 7); \
        }                                \
    } while (0)

/* Scores of a step, 32 elements from d * 32 on: high keys with high queries, these with low ones, low keys with those, and
 * with high ones, so that a change is of one operand. */
FV_ALWAYS_INLINE void fv_half_dot(fv_tile_item *item, const fv_strip_pair *pair, int32_t step, int32_t d,
                                  const int32_t num)
{
    fv_tiles *tiles = &item->tiles;
    const int64_t piece_bytes = fv_query_piece_bytes(item), at = d * FV_TILE_BYTES;
    const char *q0 = pair->strips[0]->q + at, *q1 = pair->strips[num - 1]->q + at;
    const char *k0 = item->scratch.k_copies + 4 * piece_bytes * step + at, *k1 = k0 + 2 * piece_bytes;
    fv_tile_load(tiles, 6, q0, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 4, k0, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 5, k1, FV_TILE_ROW_BYTES);
    if (num == 2) fv_tile_load(tiles, 7, q1, FV_TILE_ROW_BYTES);
    FV_HALF_DOT(tiles, num);
    fv_tile_load(tiles, 6, q0 + piece_bytes, FV_TILE_ROW_BYTES);
    if (num == 2) fv_tile_load(tiles, 7, q1 + piece_bytes, FV_TILE_ROW_BYTES);
    FV_HALF_DOT(tiles, num);
    fv_tile_call_ahead(item);
    if (item->kv_pieces == 1) return;
    fv_tile_load(tiles, 4, k0 + piece_bytes, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 5, k1 + piece_bytes, FV_TILE_ROW_BYTES);
    FV_HALF_DOT(tiles, num);
    fv_tile_load(tiles, 6, q0, FV_TILE_ROW_BYTES);
    if (num == 2) fv_tile_load(tiles, 7, q1, FV_TILE_ROW_BYTES);
    FV_HALF_DOT(tiles, num);
}

/* Four products of values of two strips; operands are in tiles 4 to 7. */
#define FV_HALF_ADD(tiles)           \
    do {                             \
        fv_tile_dot(tiles, 0, 4, 6); \
        fv_tile_dot(tiles, 1, 4, 7); \
        fv_tile_dot(tiles, 2, 5, 6); \
        fv_tile_dot(tiles, 3, 5, 7); \
    } while (0)

/* The values of a step: `pairs` are the two B tiles of its columns. Low weights with high values. */
FV_ALWAYS_INLINE void fv_half_add_low_weights(fv_tile_item *item, const fv_strip_pair *pair, int32_t step,
                                              const char *pairs)
{
    fv_tiles *tiles = &item->tiles;
    const int64_t at = fv_weight_piece_bytes(item) + step * FV_TILE_BYTES;
    fv_tile_load(tiles, 6, pairs, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 4, pair->weights[0] + at, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 7, pairs + FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 5, pair->weights[1] + at, FV_TILE_ROW_BYTES);
    FV_HALF_ADD(tiles);
}

/* Then high weights with these, which are in their tiles, and with low values. */
FV_ALWAYS_INLINE void fv_half_add_high_weights(fv_tile_item *item, const fv_strip_pair *pair, int32_t step,
                                               const char *pairs)
{
    fv_tiles *tiles = &item->tiles;
    const int64_t at = step * FV_TILE_BYTES, pairs_bytes = fv_pairs_piece_bytes(item);
    fv_tile_load(tiles, 4, pair->weights[0] + at, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 5, pair->weights[1] + at, FV_TILE_ROW_BYTES);
    FV_HALF_ADD(tiles);
    if (item->kv_pieces == 1) return;
    fv_tile_load(tiles, 6, pairs + pairs_bytes, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 7, pairs + pairs_bytes + FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    FV_HALF_ADD(tiles);
}

/* All three. */
FV_ALWAYS_INLINE void fv_half_add_step(fv_tile_item *item, const fv_strip_pair *pair, int32_t step, const char *pairs)
{
    fv_half_add_low_weights(item, pair, step, pairs);
    fv_half_add_high_weights(item, pair, step, pairs);
}

#endif
