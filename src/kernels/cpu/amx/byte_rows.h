/* Rows of a cache of one byte an element, as rows of bf16 or of tiles. */
#ifndef FV_KERNELS_CPU_AMX_BYTE_ROWS_H
#define FV_KERNELS_CPU_AMX_BYTE_ROWS_H

#include "kernels/cpu/amx/tile.h"
#include "kernels/cpu/byte_words.h"

FV_ALWAYS_INLINE void fv_tile_convert_lines_of(char *to, const char *row, int32_t size, const fv_dtype dtype)
{
    for (int32_t d = 0; d + FV_CACHE_LINE <= size; d += FV_CACHE_LINE, to += 2 * FV_TILE_ROW_BYTES) {
        fv_words words[2];
        fv_words_of_line(words, row + d, dtype);
        fv_words_store(to, words[0]);
        fv_words_store(to + FV_TILE_ROW_BYTES, words[1]);
    }
}

/* The whole lines of a row of one byte an element; returns how many elements these are, 0 of other formats. */
static inline int32_t fv_tile_convert_lines(char *to, const char *row, int32_t size, fv_dtype dtype)
{
    switch (dtype) {
    case FV_DTYPE_F8_E4M3: fv_tile_convert_lines_of(to, row, size, FV_DTYPE_F8_E4M3); break;
    case FV_DTYPE_F8_E5M2: fv_tile_convert_lines_of(to, row, size, FV_DTYPE_F8_E5M2); break;
    case FV_DTYPE_I8: fv_tile_convert_lines_of(to, row, size, FV_DTYPE_I8); break;
    default: return 0;
    }
    return size / FV_CACHE_LINE * FV_CACHE_LINE;
}

/* 16 rows of one byte an element, to rows row_stride bytes apart, 32 elements of each every part_stride bytes. */
FV_ALWAYS_INLINE void fv_tile_convert_rows_of(char *to, int64_t row_stride, int64_t part_stride,
                                              const char *const *rows, int64_t offset, int32_t size,
                                              const fv_dtype dtype)
{
    for (int32_t d = 0; d < size; d += FV_CACHE_LINE, to += 2 * part_stride) {
        for (int32_t i = 0; i < FV_TILE_ROWS; i++) {
            fv_words words[2];
            fv_words_of_line(words, rows[i] + offset + d, dtype);
            fv_words_store(to + i * row_stride, words[0]);
            fv_words_store(to + i * row_stride + part_stride, words[1]);
        }
    }
}

/* Returns 0 where the rows are no whole lines of one byte an element. */
static inline int32_t fv_tile_convert_rows(char *to, int64_t row_stride, int64_t part_stride, const char *const *rows,
                                           int64_t offset, int32_t size, fv_dtype dtype)
{
    if (size % FV_CACHE_LINE != 0) return 0;
    switch (dtype) {
    case FV_DTYPE_F8_E4M3:
        fv_tile_convert_rows_of(to, row_stride, part_stride, rows, offset, size, FV_DTYPE_F8_E4M3);
        return 1;
    case FV_DTYPE_F8_E5M2:
        fv_tile_convert_rows_of(to, row_stride, part_stride, rows, offset, size, FV_DTYPE_F8_E5M2);
        return 1;
    case FV_DTYPE_I8: fv_tile_convert_rows_of(to, row_stride, part_stride, rows, offset, size, FV_DTYPE_I8); return 1;
    default: return 0;
    }
}

#endif
