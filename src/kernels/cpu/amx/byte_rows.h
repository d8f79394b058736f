/* Rows of a cache as rows of bf16 or of tiles: those of one byte an element converted, those of bf16 copied. */
#ifndef FV_KERNELS_CPU_AMX_BYTE_ROWS_H
#define FV_KERNELS_CPU_AMX_BYTE_ROWS_H

#include "kernels/cpu/amx/tile.h"
#include "kernels/cpu/byte_words.h"

FV_ALWAYS_INLINE void fv_byte_rows_convert_of(char *to, int64_t row_stride, int64_t part_stride,
                                              const char *const *rows, int32_t num_rows, int64_t offset, int32_t size,
                                              const fv_dtype dtype)
{
    for (int32_t d = 0; d + FV_CACHE_LINE <= size; d += FV_CACHE_LINE, to += 2 * part_stride) {
        for (int32_t i = 0; i < num_rows; i++) {
            fv_words words[2];
            fv_words_of_line(words, rows[i] + offset + d, dtype);
            fv_words_store(to + i * row_stride, words[0]);
            fv_words_store(to + i * row_stride + part_stride, words[1]);
        }
    }
}

/* The whole lines of rows, `offset` bytes behind where `rows` says, to rows row_stride bytes apart, 32 elements of each every
 * part_stride bytes. Returns how many elements of a row these are, 0 of formats of more than a byte. */
static inline int32_t fv_byte_rows_convert(char *to, int64_t row_stride, int64_t part_stride, const char *const *rows,
                                           int32_t num_rows, int64_t offset, int32_t size, fv_dtype dtype)
{
#define CONVERT(dtype) fv_byte_rows_convert_of(to, row_stride, part_stride, rows, num_rows, offset, size, dtype)
    switch (dtype) {
    case FV_DTYPE_F8_E4M3: CONVERT(FV_DTYPE_F8_E4M3); break;
    case FV_DTYPE_F8_E5M2: CONVERT(FV_DTYPE_F8_E5M2); break;
    case FV_DTYPE_I8: CONVERT(FV_DTYPE_I8); break;
    default: return 0;
    }
#undef CONVERT
    return size / FV_CACHE_LINE * FV_CACHE_LINE;
}

/* Whole rows so, of any format that bf16 holds; behind their end zeros to the next multiple of 32. 0: they have to be converted
 * one by one. */
static inline int32_t fv_rows_to_bf16(char *to, int64_t row_stride, int64_t part_stride, const char *const *rows,
                                      int32_t num_rows, int64_t offset, int32_t size, fv_dtype dtype)
{
    if (dtype != FV_DTYPE_BF16)
        return size % FV_CACHE_LINE == 0 &&
               fv_byte_rows_convert(to, row_stride, part_stride, rows, num_rows, offset, size, dtype);
    for (int32_t d = 0; d < size; d += FV_TILE_DEPTH, to += part_stride)
        for (int32_t i = 0; i < num_rows; i++)
            fv_words_store(to + i * row_stride, fv_words_load_some(rows[i] + offset + d * 2, size - d));
    return 1;
}

#endif
