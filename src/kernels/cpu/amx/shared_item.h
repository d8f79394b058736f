/* An item whose strips share blocks of keys (attend_shared_tiles.c), and tiles that change hands. */
#ifndef FV_KERNELS_CPU_AMX_SHARED_ITEM_H
#define FV_KERNELS_CPU_AMX_SHARED_ITEM_H

#include "kernels/cpu/amx/key_shares.h"
#include "kernels/cpu/amx/latent_parts.h"
#include "kernels/cpu/amx/tile_strips.h"

enum {
    FV_SHARED_MAX_PAIRS = FV_TILE_SHARED_STRIPS / 2,
    FV_SUM_COLUMNS = 32, /* of sums that are in tiles at a time */
    FV_PAIR_SLICES = 4,  /* of as many columns, whose pairs are made at a time */
    FV_TILE_FLOATS = FV_TILE_ROWS * FV_TILE_COLUMNS,
    FV_STEP_PAIRS_BYTES = FV_STEP_KEYS * FV_SUM_COLUMNS * FV_BF16_BYTES,
};

/* Tiles 0 to 3: two of each strip of a pair, or one of each strip of two pairs. */
typedef struct fv_held_tiles {
    float *at[4]; /* where each belongs */
    int32_t num;  /* of tiles; 0: nothing is held */
} fv_held_tiles;

/* A pair and a block. */
typedef struct fv_shared_work {
    fv_strip_pair pair;
    fv_weigher weigh[2];
    int32_t is_exact;   /* the weights need the block's maxima */
    int32_t has_scores; /* its scores of the block are kept */
} fv_shared_work;

/* The scores of a pair and a step. */
typedef struct fv_shared_step {
    fv_shared_work *work; /* NULL: none */
    int32_t step;
    fv_held_tiles scores;
} fv_shared_step;

/* V's pairs of a step in the making, some columns of two keys at a time. */
typedef struct fv_pair_maker {
    const char *const *rows; /* of the step's keys */
    char *to;
    int64_t slice_bytes; /* from one run of columns to the next */
    int32_t key, column; /* the next */
    int32_t size;        /* columns */
    int32_t run, share;  /* how many times 32 are made at a time; and times after four products */
    int32_t looks, not_finite;
    const fv_part_scales *scales; /* of values that come in two pieces: latent_parts.h */
    int64_t low_bytes;            /* then: from the pairs of the high ones to those of the low ones */
    int32_t first_key;            /* of the step */
} fv_pair_maker;

typedef struct fv_shared_item {
    fv_tile_item *item;
    fv_held_tiles held; /* in tiles, not in memory yet */
    fv_pair_maker pairs;
    fv_shared_work works[FV_SHARED_MAX_PAIRS];
    fv_score_scale scale;
    fv_lanes rounded_sums[FV_TILE_SHARED_STRIPS]; /* of each row's weights as they are multiplied */
    int32_t num_pairs;
    int32_t is_last;                       /* no key is asked for ahead, but room for the results */
    int32_t is_plain;                      /* weights may be taken against a reference */
    int32_t has_parts;                     /* keys and values have scales by parts: latent_parts.h */
    int32_t room;                          /* then: which of two the next scores of a step go to */
    fv_key_shares *shares;                 /* NULL: the item has no siblings */
    int32_t index;                         /* else: which it is */
    fv_step_run own;                       /* then: its steps that are left */
    const char *values[FV_TILE_MANY_KEYS]; /* rows of the block's */
} fv_shared_item;

static int32_t fv_pair_has_steps(const fv_strip_pair *pair) { return pair->first_step < pair->end_step; }

static int32_t fv_pair_sees(const fv_strip_pair *pair, int32_t step)
{
    return step >= pair->first_step && step < pair->end_step;
}

/* --- tiles that change hands ---------------------------------------------------------------------------------------- */

/* What tile t of 0 to 3 holds goes to memory. */
#define FV_LEAVE_TILE(tiles, t, held)                                                     \
    do {                                                                                  \
        if ((held)->num > (t)) fv_tile_store(tiles, t, (held)->at[t], FV_TILE_ROW_BYTES); \
    } while (0)

/* And what it is to hold comes from there, or is 0. */
#define FV_SWITCH_TILE(tiles, t, held, next, is_zero)                 \
    do {                                                              \
        FV_LEAVE_TILE(tiles, t, held);                                \
        if (is_zero)                                                  \
            fv_tile_zero(tiles, t);                                   \
        else                                                          \
            fv_tile_load(tiles, t, (next)->at[t], FV_TILE_ROW_BYTES); \
    } while (0)

/* Two tiles, one behind the other, for each strip of a pair. */
static fv_held_tiles fv_held_of_pair(float *first, float *second, int32_t num_strips)
{
    return (fv_held_tiles){{first, first + FV_TILE_FLOATS, second, second + FV_TILE_FLOATS}, 2 * num_strips};
}

/* Where the products of a part go before they are added to a step's scores. */
static fv_held_tiles fv_shared_part_products(const fv_shared_item *shared, int32_t num_strips)
{
    float *room = shared->item->scratch.step_scores + 4 * FV_STEP_SCORES;
    return fv_held_of_pair(room, room + FV_STEP_SCORES, num_strips);
}

static void fv_shared_store_held(fv_shared_item *shared)
{
    fv_tiles *tiles = &shared->item->tiles;
    FV_LEAVE_TILE(tiles, 0, &shared->held);
    FV_LEAVE_TILE(tiles, 1, &shared->held);
    FV_LEAVE_TILE(tiles, 2, &shared->held);
    FV_LEAVE_TILE(tiles, 3, &shared->held);
    shared->held.num = 0;
}

/* A run of columns lies a little further than the keys of a block take, so that those of one key are not all of the same
 * lines of L1. */
static int64_t fv_shared_slice_bytes(const fv_tile_item *item)
{
    return (int64_t)item->block_keys * FV_SUM_COLUMNS * FV_BF16_BYTES + FV_TILE_SLICE_PAD;
}

#endif
