/* K and V of a block as B tiles, for many strips (attend_many_tiles.c): found among those that the worker has kept
 * (made_keys.h), or made beside the products of the block before. */
#ifndef FV_KERNELS_CPU_AMX_KEY_TILES_H
#define FV_KERNELS_CPU_AMX_KEY_TILES_H

#include "kernels/cpu/amx/half_pieces.h"
#include "kernels/cpu/amx/made_keys.h"

enum {
    FV_SLICE_COLUMNS = 32, /* of V, and of the sums that are in tiles at a time */
    FV_SLICE_STEP_BYTES = FV_STEP_KEYS * FV_SLICE_COLUMNS * FV_BF16_BYTES,
};

/* 2^59 as bf16: elements below make scores that are numbers, products of keys and queries of 2^8 elements. */
#define FV_HUGE_WORD 0x5d00

/* K and V of a block in the making: a tile of K, or two keys of V, at a time. */
typedef struct fv_key_tiles {
    fv_key_block block;
    fv_made_block *made; /* where others find them when they are made */
    int32_t index, is_made;
    char *k;                          /* [block_keys / 16][pieces][D / 32] B tiles */
    char *v;                          /* [pieces][Dv / 32][block_keys / 32][2] B tiles */
    const char *rows[FV_TILE_ROWS];   /* of the 16 keys at hand, from the elements of their next tile on */
    fv_half_row halves[FV_TILE_ROWS]; /* in place of them in pieces: from the first element on */
    int32_t values_there;             /* fv_tile_gather_value_rows, of the step at hand */
    int32_t first_step;
    int32_t next, num_k_tiles, end;
    int32_t not_finite; /* some value is infinite or NaN, in pieces some key, too */
    fv_words top;       /* of the magnitudes of keys */
} fv_key_tiles;

static fv_key_tiles fv_key_tiles_of(const fv_tile_item *item, int32_t index)
{
    const fv_attend_params *params = item->job->params;
    fv_made_keys *made = fv_made_keys_of(params);
    const int32_t slot = fv_made_slot(params, index);
    fv_key_tiles keys = {
        .block = fv_key_block_of(item, index * item->block_keys, index % 3),
        .made = &made->blocks[slot],
        .index = index,
        .k = fv_made_tiles(made, params, slot),
    };
    keys.v = keys.k + (int64_t)item->pieces * item->block_keys * params->head_size * FV_BF16_BYTES;
    const fv_key_block *block = &keys.block;
    if (block->first >= block->end) return keys;
    keys.is_made = fv_made_block_serves(keys.made, index, block->first, block->end);
    if (keys.is_made) return keys;
    fv_key_block_find_rows(item, block);
    keys.first_step = block->first / FV_STEP_KEYS;
    const int32_t num_keys = (fv_key_block_steps(block) - keys.first_step) * FV_STEP_KEYS;
    keys.num_k_tiles = num_keys / FV_TILE_ROWS * (params->head_size / FV_TILE_DEPTH);
    keys.end = keys.num_k_tiles + num_keys / 2;
    return keys;
}

/* Aims at the lines that the block will be made of, or at its tiles. */
static void fv_key_tiles_aim(fv_tile_item *item, const fv_key_tiles *keys, int32_t num_sites)
{
    if (!keys->is_made) {
        fv_tile_aim_ahead(item, &keys->block, num_sites);
        return;
    }
    fv_made_tiles_aim(item, keys->k, num_sites);
}

/* Tile `t` of K; they come in order. */
static void fv_key_tiles_make_keys(const fv_tile_item *item, fv_key_tiles *keys, int32_t t)
{
    const int32_t depth = item->job->params->head_size / FV_TILE_DEPTH, first = t / depth * FV_TILE_ROWS;
    const int32_t begins = t % depth == 0;
    const int32_t there = begins && fv_tile_gather_key_rows(item, &keys->block, item->first_head, first);
    for (int32_t i = 0; i < FV_TILE_ROWS; i++) {
        if (!begins)
            keys->rows[i] += FV_TILE_ROW_BYTES;
        else
            keys->rows[i] = there ? fv_tile_key_row(item, i)
                                  : fv_tile_find_key(item, &keys->block, item->first_head, first + i, i);
        keys->top = fv_words_max(keys->top, fv_words_magnitudes(keys->rows[i]));
    }
    fv_lanes_store_transposed(keys->k + (int64_t)t * FV_TILE_BYTES, keys->rows);
}

/* The same in pieces. */
static void fv_key_tiles_make_half_keys(const fv_tile_item *item, fv_key_tiles *keys, int32_t t)
{
    const int32_t depth = item->job->params->head_size / FV_TILE_DEPTH, first = t / depth * FV_TILE_ROWS;
    const int32_t d = t % depth * FV_TILE_DEPTH;
    if (d == 0) fv_half_find_keys(keys->halves, item, &keys->block, item->first_head, first);
    char *to = keys->k + (int64_t)(t / depth * item->pieces * depth + t % depth) * FV_TILE_BYTES;
    fv_half_tile(to, fv_query_piece_bytes(item), item->kv_pieces, keys->halves, d, item->natural.params->head_size - d,
                 &keys->top);
    keys->not_finite |= !fv_words_all_below(keys->top, FV_HALF_INFINITY);
}

static const char *fv_key_tiles_find_value(const fv_tile_item *item, const fv_key_tiles *keys, int32_t key)
{
    const int32_t in_step = key % FV_STEP_KEYS;
    if (fv_value_is_there(keys->values_there, key)) return fv_tile_value_row(item, in_step);
    return fv_tile_find_value(item, &keys->block, item->first_head, key, in_step);
}

/* Pair `row` of a step: two keys whose weights lie side by side. Returns 1 if some value is infinite or NaN. */
static int32_t fv_key_tiles_make_values(const fv_tile_item *item, const fv_key_tiles *keys, int32_t step, int32_t row)
{
    const int32_t size = item->job->params->v_head_size;
    const int64_t slice_bytes = (int64_t)item->block_keys * FV_SLICE_COLUMNS * FV_BF16_BYTES;
    const int32_t first = step * FV_STEP_KEYS + fv_words_packed_key(row);
    const char *even = fv_key_tiles_find_value(item, keys, first),
               *odd = fv_key_tiles_find_value(item, keys, first + 1);
    char *to = keys->v + step * FV_SLICE_STEP_BYTES + row * FV_TILE_ROW_BYTES;
    int32_t not_finite = 0;
    for (int32_t d = 0; d < size * FV_BF16_BYTES; d += FV_SLICE_COLUMNS * FV_BF16_BYTES, to += slice_bytes) {
        fv_words_store_pairs(to, to + FV_TILE_BYTES, even + d, odd + d);
        not_finite |= fv_words_not_finite(even + d) | fv_words_not_finite(odd + d);
    }
    return not_finite;
}

/* The same in pieces, whose weights lie in turn (fv_word_pieces_in_turn). */
static int32_t fv_key_tiles_make_half_values(const fv_tile_item *item, const fv_key_tiles *keys, int32_t step,
                                             int32_t row)
{
    const int32_t size = item->natural.params->v_head_size;
    const int64_t slice_bytes = (int64_t)item->block_keys * FV_SLICE_COLUMNS * FV_BF16_BYTES;
    const int64_t piece_bytes = fv_pairs_piece_bytes(item);
    char *to = keys->v + step * FV_SLICE_STEP_BYTES + row * FV_TILE_ROW_BYTES;
    fv_words top = {0};
    fv_half_row rows[2];
    for (int32_t i = 0; i < 2; i++)
        rows[i] = fv_half_value(item, &keys->block, item->first_head, step * FV_STEP_KEYS + row + i * FV_TILE_ROWS,
                                keys->values_there);
    for (int32_t d = 0; d < size; d += FV_SLICE_COLUMNS, to += slice_bytes)
        fv_half_store_pairs(to, piece_bytes, item->kv_pieces, rows, d, size - d, &top);
    return !fv_words_all_below(top, FV_HALF_INFINITY);
}

/* The next tile of K, or two values. */
static void fv_key_tiles_make_next(const fv_tile_item *item, fv_key_tiles *keys)
{
    if (keys->next >= keys->end) return;
    const int32_t at = keys->next++, pair = at - keys->num_k_tiles;
    if (pair < 0) {
        const int32_t t = keys->first_step * 2 * (item->job->params->head_size / FV_TILE_DEPTH) + at;
        if (item->pieces > 1)
            fv_key_tiles_make_half_keys(item, keys, t);
        else
            fv_key_tiles_make_keys(item, keys, t);
        return;
    }
    const int32_t step = keys->first_step + pair / FV_TILE_ROWS, row = pair % FV_TILE_ROWS;
    if (row == 0) keys->values_there = fv_tile_gather_value_rows(item, &keys->block, item->first_head, step);
    if (item->pieces > 1)
        keys->not_finite |= fv_key_tiles_make_half_values(item, keys, step, row);
    else
        keys->not_finite |= fv_key_tiles_make_values(item, keys, step, row);
}

/* The slot is from now on the block's. */
static void fv_key_tiles_begin(const fv_key_tiles *keys)
{
    if (keys->end > 0) keys->made->is_made = 0;
}

/* The rest. A block of plain numbers is kept for other items, whatever their rows see of it. */
static void fv_key_tiles_end(fv_tile_item *item, fv_key_tiles *keys)
{
    if (keys->end == 0) return;
    while (keys->next < keys->end) {
        fv_key_tiles_make_next(item, keys);
        if (keys->next % 2) fv_tile_call_ahead(item);
    }
    const int32_t is_plain = !keys->not_finite && (item->pieces > 1 || fv_words_all_below(keys->top, FV_HUGE_WORD));
    *keys->made = (fv_made_block){is_plain, keys->index, keys->block.first, keys->block.end};
}

#endif
