/* fp16 in tiles of bf16: a number of 11 bits is the sum of a high piece of 8 and a low one of the rest, exactly. So a dot
 * product is four of pieces, and a weight, whose pieces hold 16 bits, times a value three products: what those of both low
 * pieces would add is below the last bit of the weight.
 *
 * Numbers of a byte are one piece: two products each.
 *
 * Rows become tiles of high pieces, behind which those of low ones follow. What is infinite or NaN has no such pieces: the
 * level below does without them. */
#ifndef FV_KERNELS_CPU_AMX_HALF_PIECES_H
#define FV_KERNELS_CPU_AMX_HALF_PIECES_H

#include "kernels/cpu/amx/key_block.h"

/* As words, above all magnitudes of numbers, of fp16 and of a byte as bf16. */
#define FV_HALF_INFINITY 0x7c00

/* Of a cache or of queries: as fp16, or as bf16, which formats of a byte become. NULL elements: zeros. */
typedef struct fv_half_row {
    const char *elements;
    int32_t is_bf16;
} fv_half_row;

/* The first `num` of 32 elements from number d on, zeros behind them; *top: the largest magnitudes so far. */
FV_ALWAYS_INLINE fv_word_pieces fv_half_row_pieces(const fv_half_row *row, int32_t d, int32_t num, fv_words *top)
{
    if (!row->elements) return (fv_word_pieces){0};
    const fv_words words = fv_words_load_some(row->elements + (int64_t)d * FV_BF16_BYTES, num);
    *top = fv_words_max(*top, words & 0x7fff);
    if (row->is_bf16) return (fv_word_pieces){.high = words};
    return fv_word_pieces_of_f16(words);
}

/* `size` elements of a row of the plane, to `buffer` where they are not to be read as they lie. */
static inline fv_half_row fv_half_row_of(char *buffer, const char *row, const fv_kv_plane *plane, int32_t size,
                                         fv_dtype stored, int32_t in_place, char *gathered)
{
    if (stored == FV_DTYPE_F16 && in_place) return (fv_half_row){row, 0};
    if (stored == FV_DTYPE_F16)
        fv_row_gather(buffer, row, plane, 0, size, FV_BF16_BYTES);
    else
        fv_tile_convert(buffer, row, plane, size, stored, gathered);
    return (fv_half_row){buffer, stored != FV_DTYPE_F16};
}

/* Elements d to d + 31 of 16 rows to a B tile of each piece, `piece_bytes` apart. */
static inline void fv_half_tile(char *to, int64_t piece_bytes, int32_t num_pieces, const fv_half_row rows[FV_TILE_ROWS],
                                int32_t d, int32_t num, fv_words *top)
{
    fv_words pieces[2][FV_TILE_ROWS];
    const char *of[2][FV_TILE_ROWS];
    for (int32_t i = 0; i < FV_TILE_ROWS; i++) {
        const fv_word_pieces both = fv_half_row_pieces(&rows[i], d, num, top);
        pieces[0][i] = both.high;
        pieces[1][i] = both.low;
        for (int32_t p = 0; p < 2; p++) of[p][i] = (const char *)&pieces[p][i];
    }
    for (int32_t p = 0; p < num_pieces; p++) fv_lanes_store_transposed(to + p * piece_bytes, of[p]);
}

/* A row to rows of A tiles of each piece. */
static inline void fv_half_tile_row(char *to, int64_t piece_bytes, const fv_half_row *row, int32_t size, fv_words *top)
{
    for (int32_t d = 0; d < size; d += FV_TILE_DEPTH, to += FV_TILE_BYTES) {
        const fv_word_pieces both = fv_half_row_pieces(row, d, size - d, top);
        fv_words_store(to, both.high);
        fv_words_store(to + piece_bytes, both.low);
    }
}

/* Rows of queries to B tiles, or as_rows to A tiles; returns their largest magnitudes. */
static inline fv_words fv_half_pack_queries(char *to, const fv_tile_item *item, const char *const rows[FV_TILE_ROWS],
                                            int32_t as_rows)
{
    const int32_t size = item->natural.params->head_size;
    const int64_t piece_bytes = fv_query_piece_bytes(item);
    fv_words top = {0};
    fv_half_row halves[FV_TILE_ROWS];
    for (int32_t i = 0; i < FV_TILE_ROWS; i++) {
        halves[i] = (fv_half_row){rows[i], 0};
        if (as_rows) fv_half_tile_row(to + i * FV_TILE_ROW_BYTES, piece_bytes, &halves[i], size, &top);
    }
    for (int32_t d = 0; d < size && !as_rows; d += FV_TILE_DEPTH, to += FV_TILE_BYTES)
        fv_half_tile(to, piece_bytes, 2, halves, d, size - d, &top);
    return top;
}

/* --- keys -------------------------------------------------------------------------------------------------------- */

/* A key of the block; zeros outside of the item. `copy`: a row of key_rows, where it is not to be read as it lies. */
static inline fv_half_row fv_half_key(const fv_tile_item *item, const fv_key_block *block, int32_t kv_head, int32_t key,
                                      int32_t copy)
{
    if (key < block->first || key >= block->end) return (fv_half_row){0};
    char *buffer = item->scratch.key_rows + (int64_t)copy * item->job->params->head_size * FV_BF16_BYTES;
    const fv_tile_scratch *scratch = &item->scratch;
    const fv_key_source *source = fv_attend_source_of(item->job, block->first_key + key);
    const char *row = block->k_rows[key] + kv_head * source->k.head_stride;
    const int32_t own_size = item->natural.params->head_size - source->shared_size;
    const int32_t in_place = source->k_in_place && source->shared_size == 0;
    const fv_half_row own = fv_half_row_of(buffer, row, &source->k, own_size, source->stored, in_place,
                                           scratch->gathered);
    if (source->shared_size == 0) return own;
    row = (const char *)source->k_shared.data +
          (item->job->dense_row + block->first_key + key) * source->k_shared.slot_stride;
    const fv_half_row shared = fv_half_row_of(scratch->gathered, row, &source->k_shared, source->shared_size,
                                              source->stored, 0, NULL);
    memcpy(buffer + own_size * FV_BF16_BYTES, shared.elements, (size_t)source->shared_size * FV_BF16_BYTES);
    return own;
}

/* Keys first to first + 15. */
static inline void fv_half_find_keys(fv_half_row rows[FV_TILE_ROWS], const fv_tile_item *item,
                                     const fv_key_block *block, int32_t kv_head, int32_t first)
{
    const int32_t there = fv_tile_gather_key_rows(item, block, kv_head, first);
    for (int32_t i = 0; i < FV_TILE_ROWS; i++)
        rows[i] = there ? (fv_half_row){fv_tile_key_row(item, i), item->job->cache.stored != FV_DTYPE_F16}
                        : fv_half_key(item, block, kv_head, first + i, i);
}

/* Keys of the block for one head, to A tiles. Returns 1 if some are infinite or NaN. */
static inline int32_t fv_half_copy_keys(const fv_tile_item *item, const fv_key_block *block, int32_t kv_head)
{
    const int32_t size = item->natural.params->head_size;
    const int64_t piece_bytes = fv_query_piece_bytes(item);
    fv_words top = {0};
    fv_half_row rows[FV_TILE_ROWS];
    for (int32_t key = 0; key < fv_key_block_steps(block) * FV_STEP_KEYS; key++) {
        if (key % FV_TILE_ROWS == 0) fv_half_find_keys(rows, item, block, kv_head, key);
        char *tile = item->scratch.k_copies + 2 * piece_bytes * (key / FV_TILE_ROWS);
        const fv_half_row row = rows[key % FV_TILE_ROWS];
        char *to = tile + key % FV_TILE_ROWS * FV_TILE_ROW_BYTES;
        for (int32_t d = 0; d < size; d += FV_TILE_DEPTH, to += FV_TILE_BYTES) {
            const fv_word_pieces pieces = fv_half_row_pieces(&row, d, size - d, &top);
            fv_words_store(to, pieces.high);
            if (item->kv_pieces > 1) fv_words_store(to + piece_bytes, pieces.low);
        }
    }
    return !fv_words_all_below(top, FV_HALF_INFINITY);
}

/* --- values ------------------------------------------------------------------------------------------------------ */

/* A value of the block; `there`: which of its step's have rows (fv_tile_gather_value_rows). */
static inline fv_half_row fv_half_value(const fv_tile_item *item, const fv_key_block *block, int32_t kv_head,
                                        int32_t key, int32_t there)
{
    if (key < block->first || key >= block->end) return (fv_half_row){0};
    char *buffer = fv_tile_value_row(item, key % FV_STEP_KEYS);
    if (fv_value_is_there(there, key)) return (fv_half_row){buffer, item->job->cache.stored != FV_DTYPE_F16};
    const int32_t size = item->natural.params->v_head_size;
    const fv_key_source *source = fv_attend_source_of(item->job, block->first_key + key);
    const char *row = block->v_rows[key] + kv_head * source->v.head_stride;
    return fv_half_row_of(buffer, row, &source->v, size, source->stored, source->v_in_place, item->scratch.gathered);
}

/* Elements d to d + 31 of two values to a row of two B tiles of pairs, and of their low pieces `piece_bytes` behind. */
FV_ALWAYS_INLINE void fv_half_store_pairs(char *to, int64_t piece_bytes, int32_t num_pieces, const fv_half_row rows[2],
                                          int32_t d, int32_t num, fv_words *top)
{
    fv_word_pieces of[2];
    for (int32_t i = 0; i < 2; i++) of[i] = fv_half_row_pieces(&rows[i], d, num, top);
    fv_words_store_pairs(to, to + FV_TILE_BYTES, (const char *)&of[0].high, (const char *)&of[1].high);
    if (num_pieces == 1) return;
    to += piece_bytes;
    fv_words_store_pairs(to, to + FV_TILE_BYTES, (const char *)&of[0].low, (const char *)&of[1].low);
}

/* Values of the block for one head, to B tiles of pairs. Returns 1 if some are infinite or NaN. */
static inline int32_t fv_half_pair_values(fv_tile_item *item, const fv_key_block *block, int32_t kv_head)
{
    const int32_t size = item->natural.params->v_head_size, padded = item->job->params->v_head_size;
    const int64_t piece_bytes = fv_pairs_piece_bytes(item);
    fv_words top = {0};
    int32_t there = 0;
    for (int32_t key = block->first / FV_STEP_KEYS * FV_STEP_KEYS; key < fv_key_block_steps(block) * FV_STEP_KEYS;
         key += 2) {
        const int32_t step = key / FV_STEP_KEYS, pair = key % FV_STEP_KEYS / 2;
        char *to = item->scratch.pairs + (int64_t)step * FV_STEP_KEYS * padded * FV_BF16_BYTES +
                   pair * FV_TILE_ROW_BYTES;
        fv_half_row rows[2];
        if (pair == 0) there = fv_tile_gather_value_rows(item, block, kv_head, step);
        for (int32_t i = 0; i < 2; i++) rows[i] = fv_half_value(item, block, kv_head, key + i, there);
        for (int32_t d = 0; d < padded; d += FV_TILE_DEPTH, to += 2 * FV_TILE_BYTES)
            fv_half_store_pairs(to, piece_bytes, item->kv_pieces, rows, d, size - d, &top);
        fv_tile_call_ahead(item);
    }
    return !fv_words_all_below(top, FV_HALF_INFINITY);
}

#endif
