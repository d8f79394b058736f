/* Pairs of values for strips that share a block, made between products. */
#ifndef FV_KERNELS_CPU_AMX_SHARED_PAIRS_H
#define FV_KERNELS_CPU_AMX_SHARED_PAIRS_H

#include "kernels/cpu/amx/shared_item.h"

/* 1: pairs of values are made beside their products, and not before. */
static int32_t fv_shared_makes_late(const fv_shared_item *shared)
{
    return shared->has_parts && shared->num_pairs == 1;
}

static void fv_pair_maker_begin(fv_shared_item *shared, int32_t step)
{
    fv_pair_maker *pairs = &shared->pairs;
    pairs->rows = shared->values + step * FV_STEP_KEYS;
    pairs->to = shared->item->scratch.pairs + step * FV_STEP_PAIRS_BYTES;
    pairs->key = pairs->column = 0;
    pairs->first_key = step * FV_STEP_KEYS;
}

/* Of the next two keys: FV_PAIR_SLICES of columns are a part. */
FV_ALWAYS_INLINE fv_pair_scales fv_pair_maker_scales(const fv_pair_maker *pairs)
{
    return fv_pair_scales_at(pairs->scales, pairs->column, pairs->first_key + pairs->key);
}

FV_ALWAYS_INLINE void fv_pair_maker_run_of(fv_pair_maker *pairs, const int32_t num_slices, const int32_t has_parts)
{
    fv_pair_scales scales = {0};
    if (has_parts) scales = fv_pair_maker_scales(pairs);
    const int64_t offset = pairs->column * FV_BF16_BYTES;
    const char *even = pairs->rows[pairs->key] + offset, *odd = pairs->rows[pairs->key + 1] + offset;
    char *to = pairs->to + pairs->column / FV_SUM_COLUMNS * pairs->slice_bytes + pairs->key / 2 * FV_TILE_ROW_BYTES;
    FV_UNROLL
    for (int32_t i = 0; i < num_slices; i++, to += pairs->slice_bytes) {
        const int64_t at = i * FV_SUM_COLUMNS * FV_BF16_BYTES;
        if (has_parts)
            fv_words_store_piece_pairs(to, pairs->low_bytes, even + at, odd + at, &scales);
        else
            fv_words_store_pairs(to, to + FV_TILE_BYTES, even + at, odd + at);
        if (!has_parts && FV_UNLIKELY(pairs->looks)) /* parts were looked at when they became rows */
            pairs->not_finite |= fv_words_not_finite(even + at) | fv_words_not_finite(odd + at);
    }
    pairs->column += num_slices * FV_SUM_COLUMNS;
    if (pairs->column < pairs->size) return;
    pairs->column = 0;
    pairs->key += 2;
}

/* Where the next of the columns of two keys are, and where their pairs go. */
typedef struct fv_pair_place {
    const char *even, *odd; /* NULL: nothing is left */
    char *to;
    fv_pair_scales scales; /* of values in pieces */
} fv_pair_place;

/* FV_PAIR_SLICES columns of 32 are taken. */
FV_ALWAYS_INLINE fv_pair_place fv_pair_maker_take(fv_pair_maker *pairs, const int32_t has_parts)
{
    if (pairs->key >= FV_STEP_KEYS || pairs->run != FV_PAIR_SLICES) return (fv_pair_place){0};
    const int64_t offset = pairs->column * FV_BF16_BYTES;
    fv_pair_place place = {.even = pairs->rows[pairs->key] + offset,
                           .odd = pairs->rows[pairs->key + 1] + offset,
                           .to = pairs->to + pairs->column / FV_SUM_COLUMNS * pairs->slice_bytes +
                                 pairs->key / 2 * FV_TILE_ROW_BYTES};
    if (has_parts) place.scales = fv_pair_maker_scales(pairs);
    for (int32_t i = 0; !has_parts && FV_UNLIKELY(pairs->looks) && i < FV_PAIR_SLICES; i++) {
        const int64_t at = i * FV_SUM_COLUMNS * FV_BF16_BYTES;
        pairs->not_finite |= fv_words_not_finite(place.even + at) | fv_words_not_finite(place.odd + at);
    }
    pairs->column += FV_PAIR_SLICES * FV_SUM_COLUMNS;
    if (pairs->column >= pairs->size) {
        pairs->column = 0;
        pairs->key += 2;
    }
    return place;
}

/* One half of what was taken. */
FV_ALWAYS_INLINE void fv_pair_place_make(const fv_pair_place *place, int64_t slice_bytes, int64_t low_bytes,
                                         const int32_t half, const int32_t has_parts)
{
    if (!place->even) return;
    FV_UNROLL
    for (int32_t i = half * FV_PAIR_SLICES / 2; i < (half + 1) * FV_PAIR_SLICES / 2; i++) {
        const int64_t at = i * FV_SUM_COLUMNS * FV_BF16_BYTES;
        char *to = place->to + i * slice_bytes;
        if (has_parts)
            fv_words_store_piece_pairs(to, low_bytes, place->even + at, place->odd + at, &place->scales);
        else
            fv_words_store_pairs(to, to + FV_TILE_BYTES, place->even + at, place->odd + at);
    }
}

/* Two keys, `run` of 32 columns. */
FV_ALWAYS_INLINE void fv_pair_maker_run(fv_pair_maker *pairs, const int32_t has_parts)
{
    if (pairs->key >= FV_STEP_KEYS) return;
    if (FV_LIKELY(pairs->run == FV_PAIR_SLICES))
        fv_pair_maker_run_of(pairs, FV_PAIR_SLICES, has_parts);
    else
        fv_pair_maker_run_of(pairs, 1, has_parts);
}

static void fv_pair_maker_end(fv_pair_maker *pairs, int32_t has_parts)
{
    while (pairs->key < FV_STEP_KEYS) {
        if (has_parts)
            fv_pair_maker_run(pairs, 1);
        else
            fv_pair_maker_run(pairs, 0);
    }
}

#endif
