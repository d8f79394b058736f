/* One strip of rows over bf16 in pieces of 16 bytes, the x-packed and the shuffled layout (attend_packed_rows.c), by pairs: K as
 * one_strip_pairs.h has it, an element of V of keys 2i and 2i + 1 is a pair as it lies.
 *
 *   sums^T [col][row] += pairs of V [col][key]  times  pairs of the weights [key][row]     16 columns x 16 rows, 8 x 32, 4 x 48
 *
 * So nothing is converted or shuffled; sums have columns where those of rows have rows. */
#ifndef FV_KERNELS_CPU_ONE_STRIP_PIECES_H
#define FV_KERNELS_CPU_ONE_STRIP_PIECES_H

#include "kernels/cpu/one_strip_pairs.h"
#include "kernels/cpu/piece_rows.h"

enum { FV_ONE_MOST_COLUMNS = 16 };

/* Adds two keys to some columns, which begin at `from` and are `stride` bytes apart. keys: the words of those that the span has;
 * the slot of another may hold anything. masked: a weight of 0 hides its value, be it infinite or NaN. */
FV_ALWAYS_INLINE void fv_one_add_pair(fv_lanes *acc, const float *weights, const char *from, int64_t stride,
                                      const int32_t num_vectors, const int32_t num_columns, const int32_t masked,
                                      const uint32_t keys)
{
    fv_words weight[FV_STRIP_VECTORS], seen[FV_STRIP_VECTORS];
    FV_UNROLL
    for (int32_t i = 0; i < num_vectors; i++) {
        weight[i] = fv_words_load(weights + i * FV_STRIP_LANES);
        seen[i] = masked ? fv_pairs_seen_each(weight[i]) : weight[i];
    }
    FV_UNROLL
    for (int32_t c = 0; c < num_columns; c++) {
        uint32_t pair;
        memcpy(&pair, from + c * stride, sizeof(pair));
        const fv_words value = fv_pairs_splat(pair & keys);
        FV_UNROLL
        for (int32_t i = 0; i < num_vectors; i++)
            acc[c * num_vectors + i] = fv_pairs_dot(acc[c * num_vectors + i], masked ? value & seen[i] : value,
                                                    weight[i]);
    }
}

/* Adds the keys [first, end), whose pairs of weights are [key / 2][row], to some columns from those at v[key] + offset on. */
FV_ALWAYS_INLINE void fv_one_add_columns(float *sums, const float *weights, const float *rescale, const char *const *v,
                                         int64_t offset, int64_t stride, int32_t first, int32_t end,
                                         const int32_t num_vectors, const int32_t num_columns, const int32_t masked)
{
    const int32_t width = num_vectors * FV_STRIP_LANES;
    fv_lanes acc[FV_ONE_MOST_COLUMNS];
    FV_UNROLL
    for (int32_t i = 0; i < num_columns * num_vectors; i++) acc[i] = fv_lanes_splat(0.0f);
    int32_t key = first;
    if (key % 2 != 0) { /* the second of two */
        fv_one_add_pair(acc, weights + key / 2 * width, v[key] + offset - 2, stride, num_vectors, num_columns, masked,
                        0xffff0000u);
        key++;
    }
    for (; key + 2 <= end; key += 2)
        fv_one_add_pair(acc, weights + key / 2 * width, v[key] + offset, stride, num_vectors, num_columns, masked,
                        0xffffffffu);
    if (key < end)
        fv_one_add_pair(acc, weights + key / 2 * width, v[key] + offset, stride, num_vectors, num_columns, masked,
                        0xffffu);
    FV_UNROLL
    for (int32_t i = 0; i < num_columns * num_vectors; i++) {
        float *at = sums + i * FV_STRIP_LANES;
        fv_lanes_store(at, fv_lanes_load(at) * fv_lanes_load(rescale + i % num_vectors * FV_STRIP_LANES) + acc[i]);
    }
}

/* 16, 8 or 4 columns at a time, by the vectors of a strip. */
FV_ALWAYS_INLINE void fv_one_add_pieces_as(const float *weights, const fv_row_strip *strip, const fv_key_rows *rows,
                                           const fv_strip_span *span, const int32_t num_vectors, const int32_t masked,
                                           const fv_prefetch_order order)
{
    const int32_t size = span->job->params->v_head_size, width = num_vectors * FV_STRIP_LANES;
    const int32_t num_columns = FV_ONE_MOST_COLUMNS / (num_vectors == 3 ? 4 : num_vectors);
    const int64_t stride = rows->v_element_stride, asked = (int64_t)(span->end - span->first) * num_columns * 2;
    fv_prefetch_cursor cursor = fv_prefetch_begin(rows->ahead, order);
    for (int32_t d = 0; d < size; d += num_columns) {
        const fv_prefetch_portion ahead = fv_few_portion(&cursor, asked);
        for (int64_t at = 0; at < asked; at += FV_CACHE_LINE)
            fv_few_ask(&cursor, ahead, at, FV_CACHE_LINE, FV_ONE_ASKS);
        fv_one_add_columns(strip->sums + (int64_t)d * width, weights, strip->rescale, rows->v,
                           rows->v_offset + d * stride, stride, span->first, span->end, num_vectors, num_columns,
                           masked);
    }
    fv_prefetch_end(&cursor);
}

/* sums = sums * rescale + V^T weights, of pairs. */
static inline void fv_one_add_pieces(const float *weights, const fv_row_strip *strip, const fv_key_rows *rows,
                                     const fv_strip_span *span)
{
#define ADD(VECTORS, MASKED) fv_one_add_pieces_as(weights, strip, rows, span, VECTORS, MASKED, order)
#define ADD_EACH(ORDER)                                   \
    do {                                                  \
        const fv_prefetch_order order = ORDER;            \
        switch (2 * strip->num_vectors + span->is_edge) { \
        case 2: ADD(1, 0); break;                         \
        case 3: ADD(1, 1); break;                         \
        case 4: ADD(2, 0); break;                         \
        case 5: ADD(2, 1); break;                         \
        case 6: ADD(3, 0); break;                         \
        default: ADD(3, 1); break;                        \
        }                                                 \
    } while (0)
    FV_ONE_EACH_ORDER(rows->ahead, ADD_EACH)
#undef ADD_EACH
#undef ADD
}

/* A row of sums [col][row]. */
static inline void fv_one_gather_columns(float *natural, const float *sums, int32_t width, int32_t row,
                                         int32_t num_columns)
{
    for (int32_t d = 0; d < num_columns; d++) natural[d] = sums[d * width + row];
}

/* --- rows or pieces --------------------------------------------------------------------------------------------- */

/* 1: all keys and values lie in pieces, and blocks are parts of a tile, so that what comes next is asked for block by block. */
static inline int32_t fv_one_reads_pieces(const fv_attend_job *job)
{
    const fv_attend_params *params = job->params;
    const fv_kv_view *cache = &params->cache;
    if (params->dense.k || cache->dtype != FV_DTYPE_BF16 || !params->multiplies_pairs) return 0;
    if (!fv_cache_is_in_pieces(cache) || params->tile_keys % cache->block_size != 0) return 0;
    const int64_t head_bytes = (int64_t)params->head_size * cache->block_size * 2;
    return params->head_size == params->v_head_size && cache->k.head_stride == head_bytes &&
           cache->v.head_stride == head_bytes;
}

/* sums = sums * rescale + weights^T V; the weights become pairs in place. */
static inline void fv_one_accumulate(float *weights, const fv_row_strip *strip, const fv_key_rows *rows,
                                     const fv_strip_span *span, fv_strip_ahead *ahead)
{
    (void)ahead;
    fv_many_pack_weights(weights, span->first, span->end, fv_row_strip_width(strip));
    if (rows->k_piece_stride == FV_FEW_PIECE_BYTES)
        fv_one_add_rows(weights, strip, rows, span);
    else
        fv_one_add_pieces(weights, strip, rows, span);
}

/* A row of sums in lane order; `copy` has room for it. */
static inline const float *fv_one_sums_in_lanes(float *copy, const fv_row_strip *strip, int32_t row,
                                                int32_t num_columns, fv_dtype lane_dtype, int32_t in_pieces)
{
    if (in_pieces)
        fv_one_gather_columns(copy, strip->sums, fv_row_strip_width(strip), row, num_columns);
    else
        fv_one_unblock_row(copy, strip->sums + (int64_t)row * num_columns, num_columns);
    fv_row_load_lanes(copy, (const char *)copy, num_columns, FV_DTYPE_F32, lane_dtype);
    return copy;
}

#endif
