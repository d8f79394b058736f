/* A block of keys of an item: K as A tiles where it lies or copied, V as B tiles, scales, and the lines that are asked for
 * ahead. */
#ifndef FV_KERNELS_CPU_AMX_KEY_BLOCK_H
#define FV_KERNELS_CPU_AMX_KEY_BLOCK_H

#include "kernels/cpu/amx/byte_rows.h"
#include "kernels/cpu/amx/tile_item.h"

/* --- rows --------------------------------------------------------------------------------------------------------- */

/* The item's block that starts at `first_key`, its rows not looked up; empty behind the item's keys. */
static inline fv_key_block fv_key_block_of(const fv_tile_item *item, int32_t first_key, int32_t turn)
{
    const char **rows = item->scratch.rows[turn];
    return (fv_key_block){
        .first_key = first_key,
        .first = fv_max_i32(item->job->keys.first - first_key, 0),
        .end = fv_min_i32(item->job->keys.end - first_key, item->block_keys),
        .k_rows = rows,
        .v_rows = rows + item->block_keys,
    };
}

static inline void fv_key_block_find_rows(const fv_tile_item *item, const fv_key_block *block)
{
    const fv_attend_job *job = item->job;
    const int32_t first_key = block->first_key;
    for (int32_t first = block->first, end; first < block->end; first = end) {
        const fv_key_source *source = fv_attend_source_of(job, first_key + first);
        end = fv_attend_source_end(job, first_key + first, first_key + block->end) - first_key;
        fv_attend_find_rows(block->k_rows + first, job, &source->k, first_key + first, first_key + end);
        fv_attend_find_rows(block->v_rows + first, job, &source->v, first_key + first, first_key + end);
    }
}

static inline fv_key_block fv_key_block_at(const fv_tile_item *item, int32_t first_key, int32_t turn)
{
    const fv_key_block block = fv_key_block_of(item, first_key, turn);
    fv_key_block_find_rows(item, &block);
    return block;
}

/* 1: keys can be read where they lie. */
static inline int32_t fv_tile_reads_key(const fv_tile_item *item, const fv_key_source *source)
{
    return !fv_tile_item_is_padded(item) && source->stored == FV_DTYPE_BF16 && source->k_in_place &&
           source->shared_size == 0;
}

static inline int32_t fv_tile_reads_value(const fv_tile_item *item, const fv_key_source *source)
{
    return !fv_tile_item_is_padded(item) && source->stored == FV_DTYPE_BF16 && source->v_in_place;
}

/* Bytes between 16 rows that are as far apart as one another; else 0. */
static inline int64_t fv_tile_even_stride(const char *const *rows)
{
    const int64_t stride = rows[1] - rows[0];
    for (int32_t i = 2; i < FV_TILE_ROWS; i++)
        if (rows[i] - rows[i - 1] != stride) return 0;
    return stride;
}

/* The memory that the 16 keys from `first` on lie in, all of them the item's; else NULL. */
static inline const fv_key_source *fv_tile_source(const fv_attend_job *job, const fv_key_block *block, int32_t first)
{
    if (first < block->first || first + FV_TILE_ROWS > block->end) return NULL;
    const fv_key_source *source = fv_attend_source_of(job, block->first_key + first);
    return fv_attend_source_of(job, block->first_key + first + FV_TILE_ROWS - 1) == source ? source : NULL;
}

/* Bytes between the 16 keys from `first` on, where they can be read as they lie; else 0. */
static inline int64_t fv_tile_stride(const fv_tile_item *item, const fv_key_block *block, int32_t first)
{
    const fv_key_source *source = fv_tile_source(item->job, block, first);
    return source && fv_tile_reads_key(item, source) ? fv_tile_even_stride(block->k_rows + first) : 0;
}

/* The same of their values. */
static inline int64_t fv_tile_value_stride(const fv_tile_item *item, const fv_key_block *block, int32_t first)
{
    const fv_key_source *source = fv_tile_source(item->job, block, first);
    return source && fv_tile_reads_value(item, source) ? fv_tile_even_stride(block->v_rows + first) : 0;
}

static inline int32_t fv_key_block_steps(const fv_key_block *block)
{
    return (int32_t)fv_ceil_div(block->end, FV_STEP_KEYS);
}

/* Many rows meet each tile: they are better off with tiles whose rows lie together, which the caches bring in ahead. */
static inline void fv_tile_find_strides(const fv_tile_item *item, const fv_key_block *block)
{
    const int32_t copies = item->num_strips >= FV_TILE_COPY_STRIPS;
    for (int32_t t = 0; t < 2 * fv_key_block_steps(block); t++)
        item->scratch.k_strides[t] = copies ? 0 : fv_tile_stride(item, block, t * FV_TILE_ROWS);
}

/* Elements of a row as bf16, which holds those of every narrow format. `gathered` [size] is scratch for rows whose
 * elements do not lie side by side. */
static inline void fv_tile_convert(char *to, const char *row, const fv_kv_plane *plane, int32_t size, fv_dtype dtype,
                                   char *gathered)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(dtype);
    if (!fv_plane_is_dense(plane, bytes)) {
        fv_row_gather(gathered, row, plane, 0, size, (size_t)bytes);
        row = gathered;
    }
    if (dtype == FV_DTYPE_BF16) {
        memcpy(to, row, (size_t)(size * bytes));
        return;
    }
    int32_t d = fv_byte_rows_convert(to, 0, FV_TILE_ROW_BYTES, &row, 1, 0, size, dtype);
    for (; d < size; d += FV_LANES)
        fv_store_u16(to + d * FV_BF16_BYTES, (fv_u32x8)fv_load8(row + d * bytes, dtype) >> 16);
}

/* --- rows that are made of pieces -------------------------------------------------------------------------------- */

/* 16 rows of a cache in pieces to 16-bit words: bf16, or fp16 as they are. raw: where they are in piece_rows, if of a byte. */
static inline int32_t fv_piece_rows_to_words(const fv_row_target *target, const char *raw, int32_t size,
                                             fv_dtype stored)
{
    const char *rows[FV_TILE_ROWS];
    for (int32_t i = 0; i < FV_TILE_ROWS; i++) rows[i] = raw + (int64_t)i * size;
    return fv_rows_to_bf16(target->to, target->row_stride, target->part_stride, rows, FV_TILE_ROWS, 0, size, stored);
}

/* Keys first to first + 15 of a cache in pieces so, or is_value their values. 0: they are not, or not all of the item. */
static inline int32_t fv_tile_gather(const fv_row_target *target, const fv_tile_item *item, const fv_key_block *block,
                                     int32_t kv_head, int32_t first, int32_t is_value)
{
    const fv_key_source *source = item->has_piece_rows ? fv_tile_source(item->job, block, first) : NULL;
    if (source != &item->job->cache) return 0;
    const fv_attend_params *params = item->natural.params;
    const int32_t size = is_value ? params->v_head_size : params->head_size;
    const int64_t bytes = (int64_t)fv_dtype_bytes(source->stored);
    const fv_kv_plane *plane = is_value ? &source->v : &source->k;
    const char *const *rows = (is_value ? block->v_rows : block->k_rows) + first;
    const int64_t of_head = kv_head * plane->head_stride;
    const char *const pieces[2] = {rows[0] + of_head, rows[FV_PIECE_KEYS / 2] + of_head};
    const fv_row_target raw = {item->scratch.piece_rows, size, FV_TILE_ROW_BYTES};
    if (bytes == 1 && size % FV_TILE_ROW_BYTES != 0) return 0;
    fv_pieces_to_rows(bytes == 1 ? &raw : target, plane, pieces, size, bytes, is_value);
    return bytes > 1 || fv_piece_rows_to_words(target, raw.to, size, source->stored);
}

/* Row `row` of 16 that a copy has. */
static inline char *fv_tile_key_row(const fv_tile_item *item, int32_t row)
{
    return item->scratch.key_rows + (int64_t)row * item->job->params->head_size * FV_BF16_BYTES;
}

static inline char *fv_tile_value_row(const fv_tile_item *item, int32_t row)
{
    return item->scratch.v_copies + (int64_t)row * item->job->params->v_head_size * FV_BF16_BYTES;
}

/* Keys first to first + 15 in pieces to rows 0 to 15 of key_rows. */
static inline int32_t fv_tile_gather_key_rows(const fv_tile_item *item, const fv_key_block *block, int32_t kv_head,
                                              int32_t first)
{
    const int64_t row_bytes = (int64_t)item->job->params->head_size * FV_BF16_BYTES;
    const fv_row_target target = {fv_tile_key_row(item, 0), row_bytes, FV_TILE_ROW_BYTES};
    return fv_tile_gather(&target, item, block, kv_head, first, 0);
}

/* Values in pieces of a step to the rows of v_copies. Returns which are there: bits 0 and 1, of 16 each. */
static inline int32_t fv_tile_gather_value_rows(const fv_tile_item *item, const fv_key_block *block, int32_t kv_head,
                                                int32_t step)
{
    const int64_t row_bytes = (int64_t)item->job->params->v_head_size * FV_BF16_BYTES;
    int32_t there = 0;
    for (int32_t t = 0; t < 2; t++) {
        const fv_row_target target = {fv_tile_value_row(item, t * FV_TILE_ROWS), row_bytes, FV_TILE_ROW_BYTES};
        there |= fv_tile_gather(&target, item, block, kv_head, step * FV_STEP_KEYS + t * FV_TILE_ROWS, 1) << t;
    }
    return there;
}

/* Is the value of a key of the step among them? */
static inline int32_t fv_value_is_there(int32_t there, int32_t key)
{
    return there >> (key % FV_STEP_KEYS / FV_TILE_ROWS) & 1;
}

/* --- lines that are asked for ahead ------------------------------------------------------------------------------- */

/* Places from which lines are asked for ahead. */
static inline int32_t fv_tile_tracks(const fv_tile_item *item)
{
    const int32_t num_tracks = item->job->params->ahead_tracks;
    return num_tracks > 0 ? num_tracks : FV_MAX_AHEAD_TRACKS;
}

/* Asks for the next few lines of the next block. */
FV_ALWAYS_INLINE void fv_tile_call_ahead(fv_tile_item *item)
{
    for (int32_t i = 0; i < item->ahead_portions && item->ahead.num_tracks > 0; i++)
        fv_prefetch_bytes(fv_prefetch_take_turn(&item->ahead, &item->ahead.turn), FV_AHEAD_BYTES);
}

/* Aims at the pages that begin in a block before its key `end`, of a cache in pieces, head by head; not at large ones, of which
 * caches hold few. */
static inline void fv_tile_aim_at_pages(fv_tile_item *item, const fv_key_block *block, int32_t end, int32_t num_sites)
{
    const fv_attend_params *params = item->natural.params;
    const int32_t page = params->cache.block_size, most = item->block_keys / FV_TILE_ROWS;
    const char **k_pages = item->scratch.pages, **v_pages = k_pages + most;
    int32_t num = 0;
    if (page > FV_TILE_MANY_KEYS) return;
    for (int32_t key = (int32_t)fv_round_up(block->first_key + block->first, page) - block->first_key; key < end;
         key += page) {
        k_pages[num] = block->k_rows[key];
        v_pages[num++] = block->v_rows[key];
    }
    if (num == 0) return;
    const fv_prefetch_rows of = {
        .rows = {k_pages, v_pages},
        .num_planes = 2,
        .num_heads = item->num_heads,
        .offset = item->first_head * params->cache.k.head_stride,
        .head_stride = params->cache.k.head_stride,
        .row_bytes = (int64_t)page * params->head_size * (int64_t)fv_dtype_bytes(params->cache.dtype),
        .end = num,
    };
    item->ahead_portions = (int32_t)fv_ceil_div(2 * num * item->num_heads * of.row_bytes,
                                                (int64_t)num_sites * FV_AHEAD_BYTES);
    fv_prefetch_aim(&item->ahead, &of, fv_tile_tracks(item), FV_AHEAD_BYTES);
}

/* Aims at the memory of a block and sets how much each of num_sites calls asks for. */
static inline void fv_tile_aim_ahead(fv_tile_item *item, const fv_key_block *block, int32_t num_sites)
{
    fv_prefetch_aim_at_nothing(&item->ahead, item->scratch.zeros);
    item->ahead_portions = 0;
    if (block->first >= block->end) return;
    const fv_key_source *source = fv_attend_source_of(item->job, block->first_key + block->first);
    const int32_t end = fv_attend_source_end(item->job, block->first_key + block->first,
                                             block->first_key + block->end) -
                        block->first_key;
    if (item->has_piece_rows && source == &item->job->cache) {
        fv_tile_aim_at_pages(item, block, end, num_sites);
        return;
    }
    if (!source->k_in_place || !source->v_in_place || source->shared_size > 0) return;
    const int64_t element_bytes = (int64_t)fv_dtype_bytes(source->stored);
    const int32_t is_latent = source->k.data == source->v.data;
    fv_prefetch_rows of = {
        .rows = {block->k_rows, block->v_rows},
        .num_planes = is_latent ? 1 : 2,
        .num_heads = item->num_heads,
        .offset = item->first_head * source->k.head_stride,
        .head_stride = source->k.head_stride,
        .row_bytes = fv_has_latent_parts(item->job->params) ? source->k.slot_stride
                                                            : item->natural.params->head_size * element_bytes,
        .first = block->first,
        .end = end,
    };
    const int64_t apart = block->v_rows[block->first] - block->k_rows[block->first];
    if (apart > 0 && apart <= 2 * of.row_bytes) { /* packed: the value follows its key */
        of.row_bytes = apart + item->natural.params->v_head_size * element_bytes;
        of.num_planes = 1;
    }
    const int64_t bytes = (int64_t)of.num_planes * (end - block->first) * item->num_heads * of.row_bytes;
    if (source->k.slot_stride > source->k.head_stride) { /* a token's heads lie side by side: one row */
        of.row_bytes += (item->num_heads - 1) * source->k.head_stride;
        of.num_heads = 1;
    }
    item->ahead_portions = (int32_t)fv_ceil_div(bytes, (int64_t)num_sites * FV_AHEAD_BYTES);
    fv_prefetch_aim(&item->ahead, &of, fv_tile_tracks(item), FV_AHEAD_BYTES);
}

/* --- tiles of keys ------------------------------------------------------------------------------------------------ */

/* Element 0 of a key of the block, as bf16: where it lies, or a copy, row `copy` of key_rows; zeros outside of the item. */
static inline const char *fv_tile_find_key(const fv_tile_item *item, const fv_key_block *block, int32_t kv_head,
                                           int32_t key, int32_t copy)
{
    const fv_attend_job *job = item->job;
    if (key < block->first || key >= block->end) return item->scratch.zeros;
    const fv_key_source *source = fv_attend_source_of(job, block->first_key + key);
    const char *row = block->k_rows[key] + kv_head * source->k.head_stride;
    if (fv_tile_reads_key(item, source)) return row;

    char *to = fv_tile_key_row(item, copy);
    char *gathered = item->scratch.gathered;
    const int32_t size = item->natural.params->head_size, own_size = size - source->shared_size;
    fv_tile_convert(to, row, &source->k, own_size, source->stored, gathered);
    fv_tile_pad(to, size, job->params->head_size);
    if (source->shared_size == 0) return to;
    row = (const char *)source->k_shared.data +
          (job->dense_row + block->first_key + key) * source->k_shared.slot_stride;
    fv_tile_convert(to + own_size * FV_BF16_BYTES, row, &source->k_shared, source->shared_size, source->stored,
                    gathered);
    return to;
}

/* To [D / 32] A tiles. */
static inline void fv_tile_copy(char *to, const fv_tile_item *item, const fv_key_block *block, int32_t kv_head,
                                int32_t first)
{
    const int32_t size = item->natural.params->head_size, depth = item->job->params->head_size / FV_TILE_DEPTH;
    const fv_key_source *source = fv_tile_source(item->job, block, first);
    if (fv_tile_gather(&(fv_row_target){to, FV_TILE_ROW_BYTES, FV_TILE_BYTES}, item, block, kv_head, first, 0)) return;
    if (source && source->k_in_place && source->shared_size == 0 &&
        fv_rows_to_bf16(to, FV_TILE_ROW_BYTES, FV_TILE_BYTES, block->k_rows + first, FV_TILE_ROWS,
                        kv_head * source->k.head_stride, size, source->stored))
        return;
    for (int32_t i = 0; i < FV_TILE_ROWS; i++, to += FV_TILE_ROW_BYTES) {
        const char *row = fv_tile_find_key(item, block, kv_head, first + i, 0);
        for (int32_t d = 0; d < depth; d++)
            fv_lanes_store(to + d * FV_TILE_BYTES, fv_lanes_load(row + d * FV_TILE_ROW_BYTES));
    }
}

/* To rows of bf16. */
static inline void fv_tile_convert_rows(char *to, const fv_tile_item *item, const fv_key_block *block, int32_t kv_head,
                                        int32_t first)
{
    const int32_t size = item->job->params->head_size;
    const int64_t row_bytes = (int64_t)size * FV_BF16_BYTES;
    const fv_key_source *source = fv_tile_source(item->job, block, first);
    if (source && fv_rows_to_bf16(to, row_bytes, FV_TILE_ROW_BYTES, block->k_rows + first, FV_TILE_ROWS,
                                  kv_head * source->k.head_stride, size, source->stored))
        return;
    for (int32_t i = 0; i < FV_TILE_ROWS; i++)
        memcpy(to + i * row_bytes, fv_tile_find_key(item, block, kv_head, first + i, 0), (size_t)row_bytes);
}

/* The tiles of K of one head. */
static inline void fv_tile_find_keys(const fv_tile_item *item, const fv_key_block *block, int32_t kv_head)
{
    const fv_tile_scratch *scratch = &item->scratch;
    const int64_t row_bytes = (int64_t)item->job->params->head_size * FV_BF16_BYTES;
    for (int32_t t = 0; t < 2 * fv_key_block_steps(block); t++) {
        const int32_t first = t * FV_TILE_ROWS;
        if (scratch->k_strides[t] != 0) {
            const fv_key_source *source = fv_attend_source_of(item->job, block->first_key + first);
            scratch->k_tiles[t] = block->k_rows[first] + kv_head * source->k.head_stride;
            continue;
        }
        char *copy = scratch->k_copies + first * row_bytes;
        fv_tile_copy(copy, item, block, kv_head, first);
        scratch->k_tiles[t] = copy;
    }
}

/* K of a step as the products take it: the tiles of its keys, and the bytes between the rows of each and from one to
 * the next 32 elements. */
typedef struct fv_step_keys {
    const char *tiles[2];
    int64_t strides[2], depths[2];
} fv_step_keys;

FV_ALWAYS_INLINE fv_step_keys fv_step_keys_of(const fv_tile_scratch *scratch, int32_t step)
{
    fv_step_keys keys;
    FV_UNROLL
    for (int32_t i = 0; i < 2; i++) {
        const int64_t stride = scratch->k_strides[2 * step + i];
        keys.tiles[i] = scratch->k_tiles[2 * step + i];
        keys.strides[i] = stride ? stride : FV_TILE_ROW_BYTES;
        keys.depths[i] = stride ? FV_TILE_ROW_BYTES : FV_TILE_BYTES;
    }
    return keys;
}

/* --- pairs of values ---------------------------------------------------------------------------------------------- */

/* Element 0 of a value, as bf16; zeros outside of the item, so that garbage there meets no weight. `copy` is a row of
 * v_copies. */
static inline const char *fv_tile_find_value(const fv_tile_item *item, const fv_key_block *block, int32_t kv_head,
                                             int32_t key, int32_t copy)
{
    const fv_attend_job *job = item->job;
    if (key < block->first || key >= block->end) return item->scratch.zeros;
    const fv_key_source *source = fv_attend_source_of(job, block->first_key + key);
    const char *row = block->v_rows[key] + kv_head * source->v.head_stride;
    if (fv_tile_reads_value(item, source)) return row;
    const int32_t size = item->natural.params->v_head_size, padded = job->params->v_head_size;
    char *to = fv_tile_value_row(item, copy);
    fv_tile_convert(to, row, &source->v, size, source->stored, item->scratch.gathered);
    fv_tile_pad(to, size, padded);
    return to;
}

/* Pairs of V of the block's keys. Returns 1 if `looks` and some value is infinite or NaN. */
static inline int32_t fv_tile_pair_values(fv_tile_item *item, const fv_key_block *block, int32_t kv_head, int32_t looks)
{
    const int32_t size = item->job->params->v_head_size;
    int32_t not_finite = 0;
    for (int32_t step = block->first / FV_STEP_KEYS; step < fv_key_block_steps(block); step++) {
        const char *rows[FV_STEP_KEYS];
        const int32_t there = fv_tile_gather_value_rows(item, block, kv_head, step);
        for (int32_t i = 0; i < FV_STEP_KEYS; i++)
            rows[i] = fv_value_is_there(there, i)
                          ? fv_tile_value_row(item, i)
                          : fv_tile_find_value(item, block, kv_head, step * FV_STEP_KEYS + i, i);
        char *to = item->scratch.pairs + (int64_t)step * FV_STEP_KEYS * size * FV_BF16_BYTES;
        for (int32_t i = 0; i < FV_STEP_KEYS; i += 2, to += FV_TILE_ROW_BYTES) {
            for (int32_t d = 0; d < size; d += 32) {
                char *low = to + d / FV_TILE_COLUMNS * FV_TILE_BYTES;
                fv_words_store_pairs(low, low + FV_TILE_BYTES, rows[i] + d * FV_BF16_BYTES,
                                     rows[i + 1] + d * FV_BF16_BYTES);
            }
            fv_tile_call_ahead(item);
        }
        for (int32_t i = 0; looks && i < FV_STEP_KEYS; i++)
            for (int32_t d = 0; d < size; d += 32) not_finite |= fv_words_not_finite(rows[i] + d * FV_BF16_BYTES);
    }
    return not_finite;
}

/* --- scales ------------------------------------------------------------------------------------------------------- */

/* Scales of the block's keys for one head; 1 where its steps have none. */
static inline void fv_key_block_find_scales(float *scales, const fv_attend_job *job, const fv_key_block *block,
                                            const fv_scale_plane *plane, const float *head_scale, int32_t kv_head)
{
    for (int32_t key = 0; key < fv_key_block_steps(block) * FV_STEP_KEYS; key++) scales[key] = 1.0f;
    fv_attend_find_scales(scales + block->first, job, plane, head_scale, kv_head, block->first_key + block->first,
                          block->first_key + block->end);
}

/* Those of keys and values, where the job has such, for the head at hand. */
static inline void fv_tile_find_scales(fv_tile_item *item, const fv_key_block *block, int32_t kv_head)
{
    const fv_attend_job *job = item->job;
    const fv_attend_params *params = job->params;
    item->k_scales = job->has_k_scales ? item->scratch.k_scales : NULL;
    item->v_scales = job->has_v_scales ? item->scratch.v_scales : NULL;
    if (item->k_scales)
        fv_key_block_find_scales(item->scratch.k_scales, job, block, &params->cache.k_scales, params->k_scale, kv_head);
    if (item->v_scales)
        fv_key_block_find_scales(item->scratch.v_scales, job, block, &params->cache.v_scales, params->v_scale, kv_head);
}

/* Those of the values of a step, or NULL. */
static inline const float *fv_tile_step_scales(const fv_tile_item *item, int32_t step)
{
    return item->v_scales ? item->v_scales + step * FV_STEP_KEYS : NULL;
}

#endif
