/* One strip of rows over numbers of one byte: a tile's keys and values become rows of bf16, which has them all exactly, before the
 * products of one_strip_pairs.h. */
#ifndef FV_KERNELS_CPU_ONE_STRIP_BYTES_H
#define FV_KERNELS_CPU_ONE_STRIP_BYTES_H

#include "kernels/cpu/byte_words.h"
#include "kernels/cpu/one_strip_pairs.h"

/* Rows from which on it pays to make rows of a tile once; groups of four convert what they multiply. */
enum { FV_ONE_LEAST_BYTE_ROWS = 13 };

/* 1: values are the first elements of their keys. */
static inline int32_t fv_one_are_latents(const fv_attend_job *job) { return job->cache.k.data == job->cache.v.data; }

/* 1: all keys and values are bytes where they lie, and heads whole lines of them. */
static inline int32_t fv_one_reads_bytes(const fv_attend_job *job, int64_t num_rows)
{
    const fv_attend_params *params = job->params;
    if (!params->multiplies_pairs || !fv_few_reads_bytes(job)) return 0;
    if (num_rows < FV_ONE_LEAST_BYTE_ROWS && !fv_one_are_latents(job)) return 0;
    return params->head_size % FV_CACHE_LINE == 0 && params->v_head_size % FV_CACHE_LINE == 0;
}

FV_ALWAYS_INLINE void fv_one_rows_of_bytes_as(char *to, int64_t row_bytes, const char *const *rows, int64_t offset,
                                              int32_t first, int32_t end, int32_t size, const fv_dtype dtype)
{
    for (int32_t key = first; key < end; key++) {
        const char *from = rows[key] + offset;
        char *row = to + key * row_bytes;
        for (int32_t d = 0; d < size; d += FV_CACHE_LINE, row += 2 * FV_CACHE_LINE) {
            fv_words words[2];
            fv_words_of_line(words, from + d, dtype);
            fv_words_store(row, words[0]);
            fv_words_store(row + FV_CACHE_LINE, words[1]);
        }
    }
}

static inline void fv_one_rows_of_bytes(char *to, int64_t row_bytes, const char *const *rows, int64_t offset,
                                        int32_t first, int32_t end, int32_t size, fv_dtype dtype)
{
#define CONVERT(DTYPE) fv_one_rows_of_bytes_as(to, row_bytes, rows, offset, first, end, size, DTYPE)
    switch (dtype) {
    case FV_DTYPE_F8_E4M3: CONVERT(FV_DTYPE_F8_E4M3); break;
    case FV_DTYPE_F8_E5M2: CONVERT(FV_DTYPE_F8_E5M2); break;
    default: CONVERT(FV_DTYPE_I8); break;
    }
#undef CONVERT
}

/* The rows of k_copied and v_copied, bf16. Values that are the first elements of their keys, latents, are those of the keys. */
static inline void fv_one_find_copies(const fv_few_tables *tables, const fv_attend_job *job, int32_t tile_keys)
{
    const fv_attend_params *params = job->params;
    const int32_t are_keys = fv_one_are_latents(job);
    for (int32_t key = 0; key < tile_keys; key++) {
        tables->k_copied[key] = tables->k_copies + (int64_t)key * params->head_size * 2;
        tables->v_copied[key] = are_keys ? tables->k_copied[key]
                                         : tables->v_copies + (int64_t)key * params->v_head_size * 2;
    }
}

/* Makes rows of a tile's keys [first, end); fv_one_find_copies has been called. */
static inline void fv_one_make_rows(fv_few_tile *tile, const fv_few_tables *tables, const fv_attend_job *job,
                                    int32_t first, int32_t end)
{
    const fv_attend_params *params = job->params;
    const fv_dtype dtype = job->cache.stored;
    fv_key_rows *rows = &tile->rows;
    fv_one_rows_of_bytes(tables->k_copies, (int64_t)params->head_size * 2, rows->k, rows->k_offset, first, end,
                         params->head_size, dtype);
    if (!fv_one_are_latents(job))
        fv_one_rows_of_bytes(tables->v_copies, (int64_t)params->v_head_size * 2, rows->v, rows->v_offset, first, end,
                             params->v_head_size, dtype);
    rows->k = tables->k_copied;
    rows->v = tables->v_copied;
    rows->k_offset = rows->v_offset = 0;
}

#endif
