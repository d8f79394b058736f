/* A block of 32 keys of an item of few rows (attend_few_tiles.c): its tiles of keys and of values, which are read where they lie
 * or copied. Of a cache whose pages hold whole tiles they are found by page, without a look at each row. */
#ifndef FV_KERNELS_CPU_AMX_FEW_BLOCK_H
#define FV_KERNELS_CPU_AMX_FEW_BLOCK_H

#include "kernels/cpu/amx/key_block.h"

/* 16 rows of keys or values, of KV head 0. */
typedef struct fv_row_tile {
    const char *first;
    int64_t stride; /* bytes from row to row; 0: they are no tile as they lie, and copied */
    int64_t head_stride;
} fv_row_tile;

/* 32 keys. */
typedef struct fv_few_block {
    fv_key_block keys;
    fv_row_tile k[2], v[2];
    int32_t number; /* of those that the item meets */
} fv_few_block;

static inline int32_t fv_few_block_is_copied(const fv_few_block *block)
{
    return block->k[0].stride == 0 || block->k[1].stride == 0 || block->v[0].stride == 0 || block->v[1].stride == 0;
}

/* Do 16 keys from a multiple of 16 on lie in one page of the cache, as far apart as one another, as bf16? */
static inline int32_t fv_plane_is_in_tiles(const fv_kv_plane *plane)
{
    return plane->slot_chunk <= 0 || plane->slot_chunk % FV_TILE_ROWS == 0;
}

static inline int32_t fv_cache_is_in_tiles(const fv_tile_item *item)
{
    const fv_attend_job *job = item->job;
    const fv_key_source *cache = &job->cache;
    return job->table && job->params->cache.block_size % FV_TILE_ROWS == 0 && fv_tile_reads_key(item, cache) &&
           fv_tile_reads_value(item, cache) && fv_plane_is_in_tiles(&cache->k) && fv_plane_is_in_tiles(&cache->v);
}

static inline fv_row_tile fv_tile_of_rows(const char *const *rows, int32_t first, int64_t stride,
                                          const fv_kv_plane *plane)
{
    return stride == 0 ? (fv_row_tile){0} : (fv_row_tile){rows[first], stride, plane->head_stride};
}

/* Its keys t * 16 to t * 16 + 15. */
static inline void fv_few_block_find_tiles(const fv_tile_item *item, fv_few_block *block, int32_t t, int32_t in_tiles)
{
    const fv_attend_job *job = item->job;
    const int32_t first = t * FV_TILE_ROWS, key = block->keys.first_key + first;
    const int32_t is_whole = first >= block->keys.first && first + FV_TILE_ROWS <= block->keys.end;
    if (in_tiles && is_whole && key + FV_TILE_ROWS <= job->dense_from) {
        const fv_kv_plane *k = &job->cache.k, *v = &job->cache.v;
        block->k[t] = fv_tile_of_rows(block->keys.k_rows, first, k->slot_stride, k);
        block->v[t] = fv_tile_of_rows(block->keys.v_rows, first, v->slot_stride, v);
        return;
    }
    const fv_key_source *source = fv_attend_source_of(job, key);
    block->k[t] = fv_tile_of_rows(block->keys.k_rows, first, fv_tile_stride(item, &block->keys, first), &source->k);
    block->v[t] = fv_tile_of_rows(block->keys.v_rows, first, fv_tile_value_stride(item, &block->keys, first),
                                  &source->v);
}

/* The block that starts at `first_key`; in_tiles: what fv_cache_is_in_tiles says. */
static inline void fv_few_block_find(const fv_tile_item *item, fv_few_block *block, int32_t first_key, int32_t turn,
                                     int32_t in_tiles)
{
    block->keys = fv_key_block_of(item, first_key, turn);
    fv_key_block_find_rows(item, &block->keys);
    if (block->keys.first >= block->keys.end) return;
    for (int32_t t = 0; t < 2; t++) fv_few_block_find_tiles(item, block, t, in_tiles);
}

/* The values of 16 keys as bf16, one behind the other; zeros for those outside of the item. */
static inline void fv_tile_copy_values(char *to, const fv_tile_item *item, const fv_key_block *block, int32_t head,
                                       int32_t first)
{
    const int64_t row_bytes = (int64_t)item->job->params->v_head_size * FV_BF16_BYTES;
    const fv_key_source *source = fv_tile_source(item->job, block, first);
    if (fv_tile_gather(&(fv_row_target){to, row_bytes, FV_TILE_ROW_BYTES}, item, block, head, first, 1)) return;
    if (source && source->v_in_place &&
        fv_rows_to_bf16(to, row_bytes, FV_TILE_ROW_BYTES, block->v_rows + first, FV_TILE_ROWS,
                        head * source->v.head_stride, item->natural.params->v_head_size, source->stored))
        return;
    for (int32_t i = 0; i < FV_TILE_ROWS; i++)
        memcpy(to + i * row_bytes, fv_tile_find_value(item, block, head, first + i, 0), (size_t)row_bytes);
}

/* Memory for the copies of a head's tiles: while its products meet them, those of the next head, or of the next block of latents,
 * are made elsewhere, for a tile that is loaded behind the stores of its rows waits for them. */
static inline char *fv_few_head_copies(const fv_tile_item *item, const fv_few_block *block, int32_t head)
{
    const fv_attend_params *params = item->job->params;
    const int64_t row_bytes = (int64_t)fv_max_i32(params->head_size, params->v_head_size) * FV_BF16_BYTES;
    const int32_t turn = item->converts_latents ? block->number : head;
    return item->scratch.head_copies + turn % 2 * FV_STEP_KEYS * row_bytes;
}

/* Those of K, before fv_few_block_keys. */
static inline void fv_few_block_copy_keys(const fv_tile_item *item, const fv_few_block *block, int32_t head)
{
    const int64_t tile_bytes = (int64_t)FV_TILE_ROWS * item->job->params->head_size * FV_BF16_BYTES;
    for (int32_t t = 0; t < 2; t++) {
        char *to = fv_few_head_copies(item, block, head) + t * tile_bytes;
        if (item->converts_latents)
            fv_tile_convert_rows(to, item, &block->keys, head, t * FV_TILE_ROWS);
        else if (block->k[t].stride == 0)
            fv_tile_copy(to, item, &block->keys, head, t * FV_TILE_ROWS);
    }
}

/* And those of V, but where they are K's. */
static inline void fv_few_block_copy_values(const fv_tile_item *item, const fv_few_block *block, int32_t head)
{
    const int64_t tile_bytes = (int64_t)FV_TILE_ROWS * item->job->params->v_head_size * FV_BF16_BYTES;
    if (item->converts_latents) return;
    for (int32_t t = 0; t < 2; t++)
        if (block->v[t].stride == 0)
            fv_tile_copy_values(fv_few_head_copies(item, block, head) + t * tile_bytes, item, &block->keys, head,
                                t * FV_TILE_ROWS);
}

/* Converted latents, which are keys and values. */
static inline fv_step_keys fv_few_block_latents(const fv_tile_item *item, const fv_few_block *block, int32_t head)
{
    const int64_t row_bytes = (int64_t)item->job->params->head_size * FV_BF16_BYTES;
    const char *rows = fv_few_head_copies(item, block, head);
    return (fv_step_keys){
        .tiles = {rows, rows + FV_TILE_ROWS * row_bytes},
        .strides = {row_bytes, row_bytes},
        .depths = {FV_TILE_ROW_BYTES, FV_TILE_ROW_BYTES},
    };
}

/* A head's tiles of rows, or their copies. */
static inline fv_step_keys fv_few_block_keys(const fv_tile_item *item, const fv_few_block *block, int32_t head)
{
    const int64_t row_bytes = (int64_t)item->job->params->head_size * FV_BF16_BYTES;
    if (item->converts_latents) return fv_few_block_latents(item, block, head);
    fv_step_keys keys;
    for (int32_t t = 0; t < 2; t++) {
        const fv_row_tile *tile = &block->k[t];
        const int32_t is_copied = tile->stride == 0;
        keys.strides[t] = is_copied ? FV_TILE_ROW_BYTES : tile->stride;
        keys.depths[t] = is_copied ? FV_TILE_BYTES : FV_TILE_ROW_BYTES;
        keys.tiles[t] = is_copied ? fv_few_head_copies(item, block, head) + t * FV_TILE_ROWS * row_bytes
                                  : tile->first + head * tile->head_stride;
    }
    return keys;
}

static inline fv_step_keys fv_few_block_values(const fv_tile_item *item, const fv_few_block *block, int32_t head)
{
    const int64_t row_bytes = (int64_t)item->job->params->v_head_size * FV_BF16_BYTES;
    if (item->converts_latents) return fv_few_block_latents(item, block, head);
    fv_step_keys values;
    for (int32_t t = 0; t < 2; t++) {
        const fv_row_tile *tile = &block->v[t];
        const int32_t is_copied = tile->stride == 0;
        values.depths[t] = FV_TILE_ROW_BYTES;
        values.strides[t] = is_copied ? row_bytes : tile->stride;
        values.tiles[t] = is_copied ? fv_few_head_copies(item, block, head) + t * FV_TILE_ROWS * row_bytes
                                    : tile->first + head * tile->head_stride;
    }
    return values;
}

#endif
