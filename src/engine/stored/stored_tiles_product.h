/* The product of stored_tiles.h, over the tiles of kernels/cpu/amx/tile.h, native or emulated. */
#ifndef FV_ENGINE_STORED_TILES_PRODUCT_H
#define FV_ENGINE_STORED_TILES_PRODUCT_H

#include "core/float.h"
#include "engine/stored/stored_tiles.h"
#include "kernels/cpu/amx/tile.h"

#if !defined(FV_TILES_EMULATED)
#include <immintrin.h>
#endif

/* 32 elements of a row of X, of which `count` are there. */
FV_ALWAYS_INLINE void fv_stored_tiles_load_row(char *to, const float *from, int64_t count)
{
#if defined(FV_TILES_EMULATED)
    uint16_t words[FV_STORED_TILE_DEPTH] = {0};
    for (int64_t i = 0; i < count; i++) words[i] = fv_bf16_of_f32(from[i]);
    memcpy(to, words, sizeof(words));
#else
    const __mmask32 there = (__mmask32)_bzhi_u32(0xffffffffu, (uint32_t)count);
    const __m512 low = _mm512_maskz_loadu_ps((__mmask16)there, from);
    const __m512 high = _mm512_maskz_loadu_ps((__mmask16)(there >> 16), from + 16);
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
#endif
}

static void fv_stored_tiles_load_x(void *tiles, const float *x, int64_t num_rows, int64_t in_features)
{
    char *to = tiles;
    for (int64_t first = 0; first < in_features; first += FV_STORED_TILE_DEPTH, to += FV_STORED_TILE_BYTES) {
        const int64_t count = fv_min_i64(in_features - first, FV_STORED_TILE_DEPTH);
        for (int64_t row = 0; row < num_rows; row++)
            fv_stored_tiles_load_row(to + row * FV_TILE_ROW_BYTES, x + row * in_features + first, count);
        memset(to + num_rows * FV_TILE_ROW_BYTES, 0, (size_t)((FV_TILE_ROWS - num_rows) * FV_TILE_ROW_BYTES));
    }
}

/* Two blocks of rows and two groups of columns, the second of either may be the first again, and where they are in Y. */
typedef struct fv_tile_square {
    const char *x[2], *w[2];
    float *y;
    int64_t y_stride;
    int64_t num_rows, num_columns; /* that Y has from there on */
} fv_tile_square;

/* Y from its place to tiles 0 to 3 or back, as much of it as there is: rows of the first block, then of the second. */
static void fv_tile_square_move(fv_tiles *tiles, const fv_tile_square *of, const bool loads)
{
    for (int32_t t = 0; t < 4; t++) {
        const int64_t row = t / 2 * FV_TILE_ROWS, column = t % 2 * FV_TILE_COLUMNS;
        const int64_t rows = fv_min_i64(of->num_rows - row, FV_TILE_ROWS);
        const int64_t columns = fv_min_i64(of->num_columns - column, FV_TILE_COLUMNS);
        float *y = of->y + row * of->y_stride + column, part[FV_TILE_ROWS * FV_TILE_COLUMNS];
        if (rows <= 0 || columns <= 0) continue;
        const bool is_whole = rows == FV_TILE_ROWS && columns == FV_TILE_COLUMNS;
        float *at = is_whole ? y : part;
        const int64_t stride = (is_whole ? of->y_stride : FV_TILE_COLUMNS) * (int64_t)sizeof(float);
        if (!loads) FV_TILE_OF_FOUR(fv_tile_store, tiles, t, at, stride);
        for (int64_t i = 0; !is_whole && i < rows; i++) {
            if (loads)
                memcpy(part + i * FV_TILE_COLUMNS, y + i * of->y_stride, (size_t)columns * sizeof(float));
            else
                memcpy(y + i * of->y_stride, part + i * FV_TILE_COLUMNS, (size_t)columns * sizeof(float));
        }
        if (loads) FV_TILE_OF_FOUR(fv_tile_load, tiles, t, at, stride);
    }
}

/* W passes the first cache, which X stays in for the next square. */
static void fv_tile_square_multiply(fv_tiles *tiles, const fv_tile_square *of, int64_t depth)
{
    for (int64_t at = 0; at < depth * FV_STORED_TILE_BYTES; at += FV_STORED_TILE_BYTES) {
        fv_tile_load(tiles, 4, of->x[0] + at, FV_TILE_ROW_BYTES);
        fv_tile_load_past(tiles, 6, of->w[0] + at, FV_TILE_ROW_BYTES);
        fv_tile_dot(tiles, 0, 4, 6);
        fv_tile_load_past(tiles, 7, of->w[1] + at, FV_TILE_ROW_BYTES);
        fv_tile_dot(tiles, 1, 4, 7);
        fv_tile_load(tiles, 5, of->x[1] + at, FV_TILE_ROW_BYTES);
        fv_tile_dot(tiles, 2, 5, 6);
        fv_tile_dot(tiles, 3, 5, 7);
    }
}

static void fv_stored_tiles_multiply(const fv_tile_product *of)
{
    const int64_t x_bytes = of->x_depth * FV_STORED_TILE_BYTES, w_bytes = of->depth * FV_STORED_TILE_BYTES;
    const int64_t num_blocks = fv_ceil_div(of->num_rows, FV_TILE_ROWS);
    const int64_t num_groups = fv_ceil_div(of->num_outputs, FV_TILE_COLUMNS);
    const char *x = of->x_tiles, *w = of->w_tiles;
    fv_tiles tiles;
    fv_tiles_configure(&tiles, FV_TILE_ROWS);
    for (int64_t block = 0; block < num_blocks; block += 2) {
        for (int64_t group = 0; group < num_groups; group += 2) {
            const int64_t row = block * FV_TILE_ROWS, column = group * FV_TILE_COLUMNS;
            const fv_tile_square square = {
                .x = {x + block * x_bytes, x + fv_min_i64(block + 1, num_blocks - 1) * x_bytes},
                .w = {w + group * w_bytes, w + fv_min_i64(group + 1, num_groups - 1) * w_bytes},
                .y = of->y + row * of->y_stride + column,
                .y_stride = of->y_stride,
                .num_rows = of->num_rows - row,
                .num_columns = of->num_outputs - column,
            };
            fv_tile_zero(&tiles, 0);
            fv_tile_zero(&tiles, 1);
            fv_tile_zero(&tiles, 2);
            fv_tile_zero(&tiles, 3);
            if (of->adds) fv_tile_square_move(&tiles, &square, true);
            fv_tile_square_multiply(&tiles, &square, of->depth);
            fv_tile_square_move(&tiles, &square, false);
        }
    }
    fv_tiles_release(&tiles);
}

#endif
