/* Sums of strips that share a block: products of weights and pairs of values. */
#ifndef FV_KERNELS_CPU_AMX_SHARED_SUMS_H
#define FV_KERNELS_CPU_AMX_SHARED_SUMS_H

#include "kernels/cpu/amx/shared_pairs.h"

/* Asks for the next lines of the next block, or of the results. */
FV_ALWAYS_INLINE void fv_shared_call_ahead(fv_shared_item *shared)
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
FV_ALWAYS_INLINE void fv_shared_add_step(fv_shared_item *shared, const fv_held_tiles *next, const char *weights,
                                         const char *others, const char *pairs, const int32_t is_first, int32_t is_zero,
                                         const int32_t num)
{
    fv_tiles *tiles = &shared->item->tiles;
    const fv_held_tiles *held = &shared->held;
    fv_tile_load(tiles, 6, pairs, FV_TILE_ROW_BYTES);
    fv_tile_load_past(tiles, 4, weights, FV_TILE_ROW_BYTES);
    if (is_first) FV_SWITCH_TILE(tiles, 0, held, next, is_zero);
    fv_tile_dot(tiles, 0, 4, 6);
    fv_tile_load(tiles, 7, pairs + FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    if (is_first) FV_SWITCH_TILE(tiles, 1, held, next, is_zero);
    fv_tile_dot(tiles, 1, 4, 7);
    if (num == 2) {
        fv_tile_load_past(tiles, 5, others, FV_TILE_ROW_BYTES);
        if (is_first) FV_SWITCH_TILE(tiles, 2, held, next, is_zero);
        fv_tile_dot(tiles, 2, 5, 6);
        if (is_first) FV_SWITCH_TILE(tiles, 3, held, next, is_zero);
        fv_tile_dot(tiles, 3, 5, 7);
    }
    if (is_first) shared->held = *next;
    fv_shared_call_ahead(shared);
}

FV_ALWAYS_INLINE void fv_shared_add_columns(fv_shared_item *shared, const fv_strip_pair *pair, int32_t column,
                                            const char *slice, const int32_t num)
{
    const char *weights = pair->weights[0], *others = pair->weights[num - 1];
    const int32_t is_zero = !pair->strips[0]->has_sums;
    const int32_t offset = column * FV_TILE_STRIP_ROWS;
    const fv_held_tiles sums = fv_held_of_pair(pair->strips[0]->sums + offset, pair->strips[num - 1]->sums + offset,
                                               num);
    if (shared->held.num > sums.num) fv_shared_store_held(shared);
    int32_t step = pair->first_step;
    fv_shared_add_step(shared, &sums, weights + step * FV_TILE_BYTES, others + step * FV_TILE_BYTES,
                       slice + step * FV_STEP_PAIRS_BYTES, 1, is_zero, num);
    for (step++; step < pair->end_step; step++)
        fv_shared_add_step(shared, &sums, weights + step * FV_TILE_BYTES, others + step * FV_TILE_BYTES,
                           slice + step * FV_STEP_PAIRS_BYTES, 0, 0, num);
    for (step = pair->first_step; shared->has_parts && step < pair->end_step; step++)
        fv_shared_add_step(shared, &sums, weights + step * FV_TILE_BYTES, others + step * FV_TILE_BYTES,
                           slice + shared->pairs.low_bytes + step * FV_STEP_PAIRS_BYTES, 0, 0, num);
    fv_shared_call_ahead(shared);
}

/* Sums t of the strip whose weights are in tile a, with pairs of V. */
#define FV_DOT_PAIRS(tiles, t, a, is_odd) \
    do {                                  \
        if (is_odd)                       \
            fv_tile_dot(tiles, t, a, 7);  \
        else                              \
            fv_tile_dot(tiles, t, a, 4);  \
    } while (0)

/* The products of 16 columns of two pairs with a step, as above. Pairs of V take tiles 4 and 7 in turn. */
FV_ALWAYS_INLINE void fv_shared_add_quad_step(fv_shared_item *shared, const fv_held_tiles *next,
                                              const char *const weights[4], int32_t step, const char *pairs,
                                              const int32_t is_first, int32_t is_zero, const int32_t is_odd)
{
    fv_tiles *tiles = &shared->item->tiles;
    const fv_held_tiles *held = &shared->held;
    const int32_t offset = step * FV_TILE_BYTES;
    pairs += step * FV_STEP_PAIRS_BYTES;
    if (is_odd)
        fv_tile_load_past(tiles, 7, pairs, FV_TILE_ROW_BYTES);
    else
        fv_tile_load_past(tiles, 4, pairs, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 5, weights[0] + offset, FV_TILE_ROW_BYTES);
    if (is_first) FV_SWITCH_TILE(tiles, 0, held, next, is_zero);
    FV_DOT_PAIRS(tiles, 0, 5, is_odd);
    fv_tile_load(tiles, 6, weights[1] + offset, FV_TILE_ROW_BYTES);
    if (is_first) FV_SWITCH_TILE(tiles, 1, held, next, is_zero);
    FV_DOT_PAIRS(tiles, 1, 6, is_odd);
    fv_tile_load(tiles, 5, weights[2] + offset, FV_TILE_ROW_BYTES);
    if (is_first) FV_SWITCH_TILE(tiles, 2, held, next, is_zero);
    FV_DOT_PAIRS(tiles, 2, 5, is_odd);
    fv_tile_load(tiles, 6, weights[3] + offset, FV_TILE_ROW_BYTES);
    if (is_first) FV_SWITCH_TILE(tiles, 3, held, next, is_zero);
    FV_DOT_PAIRS(tiles, 3, 6, is_odd);
    if (is_first) shared->held = *next;
    fv_shared_call_ahead(shared);
}

/* The same of values in pieces: those in tile 4 and those in tile 7. */
FV_ALWAYS_INLINE void fv_shared_add_quad_pieces(fv_shared_item *shared, const fv_held_tiles *next,
                                                const char *const weights[4], int32_t step, const char *pairs,
                                                const int32_t is_first, int32_t is_zero)
{
    fv_tiles *tiles = &shared->item->tiles;
    const fv_held_tiles *held = &shared->held;
    const int32_t offset = step * FV_TILE_BYTES;
    pairs += step * FV_STEP_PAIRS_BYTES;
    fv_tile_load_past(tiles, 4, pairs, FV_TILE_ROW_BYTES);
    fv_tile_load(tiles, 5, weights[0] + offset, FV_TILE_ROW_BYTES);
    if (is_first) FV_SWITCH_TILE(tiles, 0, held, next, is_zero);
    fv_tile_dot(tiles, 0, 5, 4);
    fv_tile_load_past(tiles, 7, pairs + shared->pairs.low_bytes, FV_TILE_ROW_BYTES);
    fv_tile_dot(tiles, 0, 5, 7);
    fv_tile_load(tiles, 6, weights[1] + offset, FV_TILE_ROW_BYTES);
    if (is_first) FV_SWITCH_TILE(tiles, 1, held, next, is_zero);
    fv_tile_dot(tiles, 1, 6, 4);
    fv_tile_dot(tiles, 1, 6, 7);
    fv_tile_load(tiles, 5, weights[2] + offset, FV_TILE_ROW_BYTES);
    if (is_first) FV_SWITCH_TILE(tiles, 2, held, next, is_zero);
    fv_tile_dot(tiles, 2, 5, 4);
    fv_tile_dot(tiles, 2, 5, 7);
    fv_tile_load(tiles, 6, weights[3] + offset, FV_TILE_ROW_BYTES);
    if (is_first) FV_SWITCH_TILE(tiles, 3, held, next, is_zero);
    fv_tile_dot(tiles, 3, 6, 4);
    fv_tile_dot(tiles, 3, 6, 7);
    if (is_first) shared->held = *next;
    fv_shared_call_ahead(shared);
}

/* 1: all strips of two pairs are there, and begin and end with the same steps. */
static int32_t fv_shared_is_quad(const fv_strip_pair *a, const fv_strip_pair *b)
{
    return a->num == 2 && b->num == 2 && a->first_step == b->first_step && a->end_step == b->end_step &&
           a->strips[0]->has_sums == b->strips[0]->has_sums;
}

/* All columns of two pairs. */
static void fv_shared_add_quad(fv_shared_item *shared, const fv_strip_pair *a, const fv_strip_pair *b)
{
    const fv_tile_item *item = shared->item;
    const char *const weights[4] = {a->weights[0], a->weights[1], b->weights[0], b->weights[1]};
    const int32_t is_zero = !a->strips[0]->has_sums;
    for (int32_t column = 0; column < item->job->params->v_head_size; column += FV_TILE_COLUMNS) {
        const char *pairs = item->scratch.pairs + column / FV_SUM_COLUMNS * shared->pairs.slice_bytes +
                            column % FV_SUM_COLUMNS / FV_TILE_COLUMNS * FV_TILE_BYTES;
        const int32_t offset = column * FV_TILE_STRIP_ROWS;
        const fv_held_tiles sums = {{a->strips[0]->sums + offset, a->strips[1]->sums + offset,
                                     b->strips[0]->sums + offset, b->strips[1]->sums + offset},
                                    4};
        int32_t step = a->first_step;
        if (shared->has_parts) {
            fv_shared_add_quad_pieces(shared, &sums, weights, step++, pairs, 1, is_zero);
            for (; step < a->end_step; step++) fv_shared_add_quad_pieces(shared, &sums, weights, step, pairs, 0, 0);
            fv_shared_call_ahead(shared);
            continue;
        }
        fv_shared_add_quad_step(shared, &sums, weights, step++, pairs, 1, is_zero, 0);
        for (; step + 1 < a->end_step; step += 2) {
            fv_shared_add_quad_step(shared, &sums, weights, step, pairs, 0, 0, 1);
            fv_shared_add_quad_step(shared, &sums, weights, step + 1, pairs, 0, 0, 0);
        }
        if (step < a->end_step) fv_shared_add_quad_step(shared, &sums, weights, step, pairs, 0, 0, 1);
        fv_shared_call_ahead(shared);
    }
}

/* All columns of the pairs [first, end), one after the other for each 32. */
static void fv_shared_add_pairs(fv_shared_item *shared, int32_t first, int32_t end)
{
    const char *slice = shared->item->scratch.pairs;
    for (int32_t column = 0; column < shared->item->job->params->v_head_size; column += FV_SUM_COLUMNS) {
        for (int32_t p = first; p < end; p++) {
            const fv_strip_pair *pair = &shared->works[p].pair;
            if (fv_pair_has_steps(pair) && pair->num == 2)
                fv_shared_add_columns(shared, pair, column, slice, 2);
            else if (fv_pair_has_steps(pair))
                fv_shared_add_columns(shared, pair, column, slice, 1);
        }
        slice += shared->pairs.slice_bytes;
    }
}

/* Of all pairs of strips. */
static void fv_shared_add_all(fv_shared_item *shared)
{
    const int32_t num = shared->num_pairs;
    for (int32_t p = 0; p < num; p += 2) {
        const fv_strip_pair *a = &shared->works[p].pair, *b = p + 1 < num ? &shared->works[p + 1].pair : NULL;
        if (b && fv_pair_has_steps(a) && fv_shared_is_quad(a, b))
            fv_shared_add_quad(shared, a, b);
        else
            fv_shared_add_pairs(shared, p, b ? p + 2 : p + 1);
    }
}

/* --- sums of one pair, of values in pieces ---------------------------------------------------------------------------- */

enum {
    FV_HIGH_PAIRS_BYTES = 4 * FV_TILE_BYTES, /* of the high pieces; the low ones follow */
    FV_PIECE_PRODUCTS = 8,                   /* of a step */
};

/* Pairs of a step in the making, for columns of one part whose sums are in tiles: one strip 64, two strips 32. Who has no other
 * pair to share them with leaves them in L1. */
typedef struct fv_piece_maker {
    const char *const *rows; /* of the next two keys */
    int64_t offset;          /* of the columns in them */
    fv_pair_scales scales;
    char *to;
} fv_piece_maker;

FV_ALWAYS_INLINE fv_piece_maker fv_piece_maker_of(const fv_shared_item *shared, int32_t step, int32_t column, char *to)
{
    const int32_t key = step * FV_STEP_KEYS;
    return (fv_piece_maker){shared->values + key, column * FV_BF16_BYTES,
                            fv_pair_scales_at(shared->pairs.scales, column, key), to};
}

/* `times` two keys. */
FV_ALWAYS_INLINE void fv_piece_maker_run(fv_piece_maker *maker, const int32_t times, const int32_t num)
{
    FV_UNROLL
    for (int32_t i = 0; i < times; i++) {
        const char *even = maker->rows[0] + maker->offset, *odd = maker->rows[1] + maker->offset;
        FV_UNROLL
        for (int32_t slice = 0; slice < 2 / num; slice++)
            fv_words_store_piece_pairs(maker->to + slice * 2 * FV_TILE_BYTES, FV_HIGH_PAIRS_BYTES,
                                       even + slice * FV_CACHE_LINE, odd + slice * FV_CACHE_LINE, &maker->scales);
        maker->rows += 2;
        maker->scales.high += 2;
        maker->scales.low += 2;
        maker->to += FV_TILE_ROW_BYTES;
    }
}

/* What goes beside one of a step's products. */
FV_ALWAYS_INLINE void fv_piece_maker_beside(fv_piece_maker *maker, const int32_t num)
{
    if (maker) fv_piece_maker_run(maker, FV_STEP_KEYS / 2 / FV_PIECE_PRODUCTS, num);
}

/* Sums t += weights in tile a x pairs in tile b: t of the first strip's tiles, or of the second's. */
#define FV_DOT_STRIP(tiles, t, b, is_second) \
    do {                                     \
        if (is_second)                       \
            fv_tile_dot(tiles, t, 6, b);     \
        else                                 \
            fv_tile_dot(tiles, t, 5, b);     \
    } while (0)

/* Both pieces of the columns of tile t: two strips have the same columns in tiles t and t + 2. */
#define FV_DOT_PIECES(tiles, t, from, num, maker)                               \
    do {                                                                        \
        const int32_t is_second = (num) == 2 && (t) >= 2;                       \
        const char *const pairs = (from) + ((t)-2 * is_second) * FV_TILE_BYTES; \
        fv_tile_load(tiles, 4, pairs, FV_TILE_ROW_BYTES);                       \
        FV_DOT_STRIP(tiles, t, 4, is_second);                                   \
        fv_piece_maker_beside(maker, num);                                      \
        fv_tile_load(tiles, 7, pairs + FV_HIGH_PAIRS_BYTES, FV_TILE_ROW_BYTES); \
        FV_DOT_STRIP(tiles, t, 7, is_second);                                   \
        fv_piece_maker_beside(maker, num);                                      \
    } while (0)

/* The products of a step; `maker` makes the next one's pairs, or is NULL. */
FV_ALWAYS_INLINE void fv_shared_add_pieces_step(fv_shared_item *shared, const fv_strip_pair *pair, int32_t step,
                                                const char *from, fv_piece_maker *maker, const int32_t num)
{
    fv_tiles *tiles = &shared->item->tiles;
    fv_tile_load(tiles, 5, pair->weights[0] + step * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    if (num == 2) fv_tile_load(tiles, 6, pair->weights[1] + step * FV_TILE_BYTES, FV_TILE_ROW_BYTES);
    FV_DOT_PIECES(tiles, 0, from, num, maker);
    FV_DOT_PIECES(tiles, 1, from, num, maker);
    FV_DOT_PIECES(tiles, 2, from, num, maker);
    FV_DOT_PIECES(tiles, 3, from, num, maker);
    fv_shared_call_ahead(shared);
}

/* Columns whose sums four tiles hold. */
FV_ALWAYS_INLINE void fv_shared_add_pieces_columns(fv_shared_item *shared, const fv_strip_pair *pair, int32_t column,
                                                   const int32_t num)
{
    fv_tiles *tiles = &shared->item->tiles;
    const int32_t offset = column * FV_TILE_STRIP_ROWS, is_zero = !pair->strips[0]->has_sums;
    float *first = pair->strips[0]->sums + offset, *second = pair->strips[num - 1]->sums + offset;
    if (num == 1) second += 2 * FV_TILE_FLOATS;
    const fv_held_tiles held = shared->held, sums = fv_held_of_pair(first, second, 2);
    FV_SWITCH_TILE(tiles, 0, &held, &sums, is_zero);
    FV_SWITCH_TILE(tiles, 1, &held, &sums, is_zero);
    FV_SWITCH_TILE(tiles, 2, &held, &sums, is_zero);
    FV_SWITCH_TILE(tiles, 3, &held, &sums, is_zero);
    shared->held = sums;
    char *const rooms[2] = {shared->item->scratch.pairs, shared->item->scratch.pairs + 2 * FV_HIGH_PAIRS_BYTES};
    int32_t step = pair->first_step;
    fv_piece_maker maker = fv_piece_maker_of(shared, step, column, rooms[0]);
    FV_ROLLED
    for (int32_t i = 0; i < FV_STEP_KEYS / 2; i++) fv_piece_maker_run(&maker, 1, num);
    for (; step + 1 < pair->end_step; step++) {
        const int32_t turn = (step - pair->first_step) & 1;
        maker = fv_piece_maker_of(shared, step + 1, column, rooms[!turn]);
        fv_shared_add_pieces_step(shared, pair, step, rooms[turn], &maker, num);
    }
    fv_shared_add_pieces_step(shared, pair, step, rooms[(step - pair->first_step) & 1], NULL, num);
    fv_shared_call_ahead(shared);
}

static void fv_shared_add_pieces(fv_shared_item *shared, const fv_strip_pair *pair)
{
    for (int32_t column = 0; column < shared->item->job->params->v_head_size;
         column += 2 / pair->num * FV_SUM_COLUMNS) {
        if (pair->num == 2)
            fv_shared_add_pieces_columns(shared, pair, column, 2);
        else
            fv_shared_add_pieces_columns(shared, pair, column, 1);
    }
}

static void fv_shared_add_values(fv_shared_item *shared)
{
    const int32_t num = shared->num_pairs;
    if (fv_shared_makes_late(shared) && fv_pair_has_steps(&shared->works[0].pair)) {
        fv_shared_add_pieces(shared, &shared->works[0].pair);
    } else {
        fv_shared_add_all(shared);
    }
    fv_shared_store_held(shared);
    for (int32_t p = 0; p < num; p++) {
        const fv_strip_pair *pair = &shared->works[p].pair;
        for (int32_t i = 0; i < pair->num && fv_pair_has_steps(pair); i++) pair->strips[i]->has_sums = 1;
    }
}

#endif
