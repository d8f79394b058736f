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

/* Two blocks of rows and two groups of columns; the second of either may be the first again. */
typedef struct fv_tile_square {
    const char *x[2], *w[2];
} fv_tile_square;

/* Y of a square to tiles 0 to 3: rows of the first block, then of the second. W passes the first cache, which X stays in for
 * the next square. */
static void fv_tile_square_multiply(fv_tiles *tiles, const fv_tile_square *of, int64_t depth)
{
    fv_tile_zero(tiles, 0);
    fv_tile_zero(tiles, 1);
    fv_tile_zero(tiles, 2);
    fv_tile_zero(tiles, 3);
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

static void fv_tile_square_store_tile(fv_tiles *tiles, int32_t tile, float *to, int64_t stride)
{
    const int64_t bytes = stride * (int64_t)sizeof(float);
    switch (tile) {
    case 0: fv_tile_store(tiles, 0, to, bytes); break;
    case 1: fv_tile_store(tiles, 1, to, bytes); break;
    case 2: fv_tile_store(tiles, 2, to, bytes); break;
    default: fv_tile_store(tiles, 3, to, bytes); break;
    }
}

/* As much of the square as Y has. */
static void fv_tile_square_store(fv_tiles *tiles, float *y, int64_t y_stride, int64_t num_rows, int64_t num_columns)
{
    for (int32_t tile = 0; tile < 4; tile++) {
        const int64_t row = tile / 2 * FV_TILE_ROWS, column = tile % 2 * FV_TILE_COLUMNS;
        const int64_t rows = fv_min_i64(num_rows - row, FV_TILE_ROWS);
        const int64_t columns = fv_min_i64(num_columns - column, FV_TILE_COLUMNS);
        float *to = y + row * y_stride + column;
        if (rows <= 0 || columns <= 0) continue;
        if (rows == FV_TILE_ROWS && columns == FV_TILE_COLUMNS) {
            fv_tile_square_store_tile(tiles, tile, to, y_stride);
            continue;
        }
        float whole[FV_TILE_ROWS * FV_TILE_COLUMNS];
        fv_tile_square_store_tile(tiles, tile, whole, FV_TILE_COLUMNS);
        for (int64_t i = 0; i < rows; i++)
            memcpy(to + i * y_stride, whole + i * FV_TILE_COLUMNS, (size_t)columns * sizeof(float));
    }
}

static void fv_stored_tiles_multiply(float *y, int64_t y_stride, const void *x_tiles, int64_t num_rows,
                                     const void *w_tiles, int64_t num_outputs, int64_t in_features)
{
    const int64_t depth = fv_stored_tile_depth(in_features), bytes = depth * FV_STORED_TILE_BYTES;
    const int64_t num_blocks = fv_ceil_div(num_rows, FV_TILE_ROWS);
    const int64_t num_groups = fv_ceil_div(num_outputs, FV_TILE_COLUMNS);
    const char *x = x_tiles, *w = w_tiles;
    fv_tiles tiles;
    fv_tiles_configure(&tiles, FV_TILE_ROWS, FV_TILE_ROWS);
    for (int64_t block = 0; block < num_blocks; block += 2) {
        for (int64_t group = 0; group < num_groups; group += 2) {
            const fv_tile_square square = {
                .x = {x + block * bytes, x + fv_min_i64(block + 1, num_blocks - 1) * bytes},
                .w = {w + group * bytes, w + fv_min_i64(group + 1, num_groups - 1) * bytes},
            };
            const int64_t row = block * FV_TILE_ROWS, column = group * FV_TILE_COLUMNS;
            fv_tile_square_multiply(&tiles, &square, depth);
            fv_tile_square_store(&tiles, y + row * y_stride + column, y_stride, num_rows - row, num_outputs - column);
        }
    }
    fv_tiles_release(&tiles);
}

#endif
