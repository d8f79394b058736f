/* Rows of a cache of one byte an element, as rows of bf16 or of tiles. */
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

#endif
