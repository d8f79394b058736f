/* Products of many rows with weights as stored, by tiles of bf16 (AMX): X and a panel of W in tiles, Y as it lies.
 *
 *   X   blocks of 16 rows, each [depth] tiles of 16 rows x 32 elements
 *   W   groups of 16 rows, each [depth] tiles of 16 pairs of elements x 16 rows (B of kernels/cpu/amx/tile.h), of all
 *       features or of some
 *   Y   32 rows x 32 columns at a time in four tiles of fp32
 *
 * depth is ceil(features / 32); elements and rows that fill up tiles are zeros. Numbers are rounded to bf16 to the
 * nearest, ties to even; NaN stays. */
#ifndef FV_ENGINE_STORED_TILES_H
#define FV_ENGINE_STORED_TILES_H

#include <stdbool.h>

#include "core/compiler.h"
#include "engine/stored/stored.h"

enum { FV_STORED_TILE_ROWS = 16, FV_STORED_TILE_DEPTH = 32, FV_STORED_TILE_BYTES = 1024 };

static inline int64_t fv_stored_tile_depth(int64_t in_features)
{
    return fv_ceil_div(in_features, FV_STORED_TILE_DEPTH);
}

/* Of rows of X, or of W. */
static inline size_t fv_stored_tiles_bytes(int64_t num_rows, int64_t in_features)
{
    return (size_t)(fv_ceil_div(num_rows, FV_STORED_TILE_ROWS) * fv_stored_tile_depth(in_features)) *
           FV_STORED_TILE_BYTES;
}

/* y[i * y_stride + j] = x[i] . w[j] over some features, or that added to y. */
typedef struct fv_tile_product {
    float *y;
    int64_t y_stride;
    int64_t num_rows, num_outputs;
    const void *x_tiles; /* of the first block, from the first of those features on */
    int64_t x_depth;     /* of a block */
    const void *w_tiles;
    int64_t depth; /* of those features */
    bool adds;
} fv_tile_product;

typedef struct fv_stored_tiles {
    const char *name;
    /* One block of X: num_rows rows, at most 16, dense. */
    void (*load_x)(void *tiles, const float *x, int64_t num_rows, int64_t in_features);
    /* Features [first, first + count) of W; first is a multiple of 256. */
    void (*expand)(void *tiles, const fv_stored_rows *w, int64_t first, int64_t count);
    void (*multiply)(const fv_tile_product *of);
} fv_stored_tiles;

/* NULL: neither the CPU nor `limit` has tiles. Static memory. */
const fv_stored_tiles *fv_stored_find_tiles(fv_isa limit);

#endif
