/* The keys of an item of few rows, tile by tile, for all of its KV heads: where their rows are, which are copied first where they
 * cannot be read in place, their scales, and the memory that the next tile will want. attend_few_rows.c and
 * attend_one_strip.c go through them. */
#ifndef FV_KERNELS_CPU_FEW_TILE_H
#define FV_KERNELS_CPU_FEW_TILE_H

#include "kernels/cpu/attend_item.h"
#include "kernels/cpu/few_kernels.h"
#include "kvcache/latent_entry.h"

/* Scratch: rows of a tile and of the next, in turn. */
typedef struct fv_few_tables {
    const char **k_rows[2]; /* [tile] */
    const char **v_rows[2];
    const char **k_copied; /* [tile] rows in k_copies, where they cannot be read in place */
    const char **v_copied;
    char *k_copies;  /* [tile][D] */
    char *v_copies;  /* [tile][Dv] */
    float *k_scales; /* [tile] */
    float *v_scales; /* [tile] */
} fv_few_tables;

/* The keys of an item, in tiles. */
typedef struct fv_few_keys {
    const fv_attend_job *job;
    const fv_few_tables *tables;
    int32_t tile_keys;
    int32_t in_pieces; /* 1: elements are read where they lie in pieces (one_strip_pieces.h); tiles are whole blocks */
} fv_few_keys;

/* Keys of one tile that share a source, for one head. `first` and `end` count from the tile's first key. */
typedef struct fv_few_tile {
    const fv_key_source *source;
    fv_key_rows rows;
    int32_t first_key; /* of the tile */
    int32_t first, end;
    int64_t v_stride;      /* of the rows of values, see fv_key_rows */
    const float *k_scales; /* of the keys of the head at hand, or NULL */
    const float *v_scales;
    int32_t turn; /* 0 or 1: whose row tables it uses */
} fv_few_tile;

static inline int32_t fv_few_is_bf16_in_place(const fv_key_source *source)
{
    return source->stored == FV_DTYPE_BF16 && source->dtype == FV_DTYPE_BF16 && source->k_in_place &&
           source->v_in_place && source->shared_size == 0;
}

/* 1: all of the call's keys and values are bf16 where they lie: by its parameters alone, so that no item of it differs. */
static inline int32_t fv_few_reads_bf16(const fv_attend_job *job)
{
    const fv_attend_params *params = job->params;
    if (params->cache.dtype != FV_DTYPE_NONE && !fv_few_is_bf16_in_place(&job->cache)) return 0;
    return !params->dense.k || fv_few_is_bf16_in_place(&job->dense);
}

/* The same of bytes, all of them in the cache. */
static inline int32_t fv_few_are_bytes(const fv_attend_job *job)
{
    const fv_key_source *cache = &job->cache;
    return !job->params->dense.k && fv_dtype_bytes(cache->stored) == 1 && cache->k_in_place && cache->v_in_place;
}

/* For products that round weights. Values with scales of their own are not: those would be in the weights, and rounded with them,
 * also where a row sees one key, whose weight of 1 has no error. */
static inline int32_t fv_few_reads_bytes(const fv_attend_job *job)
{
    return fv_few_are_bytes(job) && !job->has_v_scales;
}

#define FV_FEW_PIECE_BYTES 16

/* Scratch is sized before the cache is known. */
#define FV_FEW_MAX_ELEMENT_BYTES 4

static inline fv_few_tables fv_few_tables_of(const fv_attend_params *params, void *memory, size_t *bytes)
{
    const size_t tile = (size_t)params->tile_keys;
    const size_t k_size = (size_t)fv_few_padded(params->head_size), v_size = (size_t)fv_few_padded(params->v_head_size);
    fv_few_tables tables;
    tables.k_scales = fv_scratch_take(memory, bytes, tile * sizeof(float));
    tables.v_scales = fv_scratch_take(memory, bytes, tile * sizeof(float));
    for (int32_t i = 0; i < 2; i++) tables.k_rows[i] = fv_scratch_take(memory, bytes, tile * sizeof(char *));
    for (int32_t i = 0; i < 2; i++) tables.v_rows[i] = fv_scratch_take(memory, bytes, tile * sizeof(char *));
    tables.k_copied = fv_scratch_take(memory, bytes, tile * sizeof(char *));
    tables.v_copied = fv_scratch_take(memory, bytes, tile * sizeof(char *));
    tables.k_copies = fv_scratch_take(memory, bytes, tile * k_size * FV_FEW_MAX_ELEMENT_BYTES);
    tables.v_copies = fv_scratch_take(memory, bytes, tile * v_size * FV_FEW_MAX_ELEMENT_BYTES);
    return tables;
}

/* Keys of a tile: those of the schedule, or an even part of them, so that a tile, with all KV heads, has tile_bytes at most: this one
 * and the next leave room in a core's L2 cache. Not of the item's heads: the tiles must not depend
 * on the schedule. */
static inline int32_t fv_few_tile_keys(const fv_attend_params *params, fv_dtype dtype, int64_t tile_bytes)
{
    const int32_t v_is_part_of_k = fv_kv_layout_is_latent(params->cache.layout);
    const int32_t v_size = v_is_part_of_k ? 0 : params->v_head_size;
    const int64_t key_bytes = (int64_t)params->num_kv_heads * (params->head_size + v_size) *
                              (int64_t)fv_dtype_bytes(dtype);
    int32_t tile_keys = params->tile_keys;
    while (tile_keys % 32 == 0 && tile_keys * key_bytes > tile_bytes) tile_keys /= 2;
    return tile_keys;
}

/* Repeats the first and the last entry over the rest of the tile. */
static inline void fv_few_pad_rows(const char **rows, int32_t first, int32_t end, int32_t tile_keys)
{
    for (int32_t i = 0; i < first; i++) rows[i] = rows[first];
    for (int32_t i = end; i < tile_keys; i++) rows[i] = rows[end - 1];
}

static inline void fv_few_pad_scales(float *scales, int32_t first, int32_t end)
{
    for (int32_t i = first / FV_LANES * FV_LANES; i < first; i++) scales[i] = 1.0f;
    for (int32_t i = end; i % FV_LANES != 0; i++) scales[i] = 1.0f;
}

/* Repeats the first and the last row of the tile in the entries that share a vector with them. */
static inline void fv_few_pad_copied(const char **copied, const fv_few_tile *tile)
{
    for (int32_t i = tile->first / FV_LANES * FV_LANES; i < tile->first; i++) copied[i] = copied[tile->first];
    for (int32_t i = tile->end; i % FV_LANES != 0; i++) copied[i] = copied[tile->end - 1];
}

/* Where the tile's keys of one head are; copies them first where they cannot be read in place. */
static inline void fv_few_tile_find_keys(fv_few_tile *tile, const fv_few_keys *keys, int32_t kv_head)
{
    const fv_few_tables *tables = keys->tables;
    const fv_key_source *source = tile->source;
    const char **rows = tables->k_rows[tile->turn];
    tile->rows.k = rows;
    tile->rows.k_offset = kv_head * source->k.head_stride;
    tile->rows.stored_bytes = (int32_t)fv_dtype_bytes(source->stored);
    tile->rows.k_piece_stride = keys->in_pieces ? source->k.element_chunk_stride : FV_FEW_PIECE_BYTES;
    if (keys->in_pieces || (source->k_in_place && source->shared_size == 0)) return;
    const int64_t copy_bytes = keys->job->params->head_size * (int64_t)fv_dtype_bytes(source->dtype);
    for (int32_t i = tile->first; i < tile->end; i++) {
        char *to = tables->k_copies + i * copy_bytes;
        fv_attend_copy_key(to, rows[i] + tile->rows.k_offset, keys->job, source, tile->first_key + i);
        tables->k_copied[i] = to;
    }
    fv_few_pad_copied(tables->k_copied, tile);
    tile->rows.k = tables->k_copied;
    tile->rows.k_offset = 0;
}

/* And its values. */
static inline void fv_few_tile_find_values(fv_few_tile *tile, const fv_few_keys *keys, int32_t kv_head)
{
    const fv_few_tables *tables = keys->tables;
    const fv_key_source *source = tile->source;
    const int32_t size = keys->job->params->v_head_size;
    const char **rows = tables->v_rows[tile->turn];
    tile->rows.v = rows;
    tile->rows.v_offset = kv_head * source->v.head_stride;
    tile->rows.v_stride = tile->v_stride;
    tile->rows.v_element_stride = source->v.element_stride;
    if (keys->in_pieces || source->v_in_place) return;
    const int64_t copy_bytes = size * (int64_t)fv_dtype_bytes(source->dtype);
    for (int32_t i = tile->first; i < tile->end; i++) {
        char *to = tables->v_copies + i * copy_bytes;
        fv_attend_copy_row(to, rows[i] + tile->rows.v_offset, keys->job, source, &source->v, size);
        tables->v_copied[i] = to;
    }
    fv_few_pad_copied(tables->v_copied, tile);
    tile->rows.v = tables->v_copied;
    tile->rows.v_offset = 0;
    tile->rows.v_stride = 0;
}

static inline const float *fv_few_find_scales(float *scales, const fv_few_keys *keys, const fv_few_tile *tile,
                                              const fv_scale_plane *plane, const float *head_scale, int32_t kv_head)
{
    fv_attend_find_scales(scales + tile->first, keys->job, plane, head_scale, kv_head, tile->first_key + tile->first,
                          tile->first_key + tile->end);
    fv_few_pad_scales(scales, tile->first, tile->end);
    return scales;
}

/* Of the cache's rows; dense ones have none. */
static inline void fv_few_tile_find_scales(fv_few_tile *tile, const fv_few_keys *keys, int32_t kv_head)
{
    const fv_attend_job *job = keys->job;
    const fv_attend_params *params = job->params;
    const fv_few_tables *tables = keys->tables;
    const int32_t has_scales = tile->source == &job->cache;
    tile->k_scales = tile->v_scales = NULL;
    if (job->has_k_scales && has_scales)
        tile->k_scales = fv_few_find_scales(tables->k_scales, keys, tile, &params->cache.k_scales, params->k_scale,
                                            kv_head);
    if (job->has_v_scales && has_scales)
        tile->v_scales = fv_few_find_scales(tables->v_scales, keys, tile, &params->cache.v_scales, params->v_scale,
                                            kv_head);
}

/* Bytes from each of a tile's values to the next of its run (fv_few_end_of_run), 0 where they vary. Blocks of whole runs need not
 * be looked at, wherever they lie. */
static inline int64_t fv_few_run_stride(const fv_few_keys *keys, const fv_few_tile *tile)
{
    const fv_kv_plane *v = &tile->source->v;
    const int32_t block_size = keys->job->params->cache.block_size;
    if (tile->source == &keys->job->dense) return v->slot_stride;
    if (v->slot_chunk <= 0 && block_size % FV_FEW_ACCUMULATE_KEYS == 0 && keys->tile_keys % FV_FEW_ACCUMULATE_KEYS == 0)
        return v->slot_stride;
    return fv_few_row_stride(keys->tables->v_rows[tile->turn], tile->first, tile->end);
}

/* The item's tile that starts at key `key`, with the rows looked up; empty at the end of the keys. */
static inline fv_few_tile fv_few_tile_from(const fv_few_keys *keys, int32_t key, int32_t turn)
{
    const fv_attend_job *job = keys->job;
    const int32_t first_key = key / keys->tile_keys * keys->tile_keys;
    const int32_t end_key = fv_attend_source_end(job, key, fv_min_i32(job->keys.end, first_key + keys->tile_keys));
    fv_few_tile tile = {
        .source = fv_attend_source_of(job, key),
        .first_key = first_key,
        .first = key - first_key,
        .end = end_key - first_key,
        .turn = turn,
    };
    if (key >= end_key) return tile;

    const char **k_rows = keys->tables->k_rows[turn], **v_rows = keys->tables->v_rows[turn];
    fv_attend_find_rows(k_rows + tile.first, job, &tile.source->k, key, end_key);
    fv_attend_find_rows(v_rows + tile.first, job, &tile.source->v, key, end_key);
    fv_few_pad_rows(k_rows, tile.first, tile.end, keys->tile_keys);
    fv_few_pad_rows(v_rows, tile.first, tile.end, keys->tile_keys);
    tile.v_stride = fv_few_run_stride(keys, &tile);
    return tile;
}

/* Portions pass the end of a run that is shorter, of some of the KV heads or of blocks of a token: its lines are asked for one by
 * one. */
#ifndef FV_FEW_LEAST_RUN_BYTES
#define FV_FEW_LEAST_RUN_BYTES 512
#endif

/* Aims at the memory of a tile in pieces, whole blocks: the KV heads of one lie side by side. */
static inline void fv_few_tile_aim_at_blocks(fv_prefetch_stream *stream, const fv_few_keys *keys,
                                             const fv_few_tile *tile)
{
    const fv_attend_job *job = keys->job;
    const fv_kv_view *cache = &job->params->cache;
    const int32_t block_size = cache->block_size, first_block = (tile->first_key + tile->first) / block_size;
    const int32_t end_block = (int32_t)fv_ceil_div(tile->first_key + tile->end, block_size);
    const char **blocks[2] = {keys->tables->k_copied, keys->tables->v_copied}; /* nothing is copied */
    for (int32_t i = first_block; i < end_block; i++) {
        blocks[0][i - first_block] = (const char *)cache->k.data + job->table[i] * cache->k.block_stride;
        blocks[1][i - first_block] = (const char *)cache->v.data + job->table[i] * cache->v.block_stride;
    }
    const fv_prefetch_rows of = {
        .rows = {blocks[0], blocks[1]},
        .num_planes = 2,
        .num_heads = 1,
        .offset = job->item->first_kv_head * cache->k.head_stride,
        .row_bytes = job->item->num_kv_heads * cache->k.head_stride,
        .end = end_block - first_block,
    };
    fv_prefetch_aim(stream, &of, fv_max_i32(1, job->params->ahead_tracks), FV_CACHE_LINE);
    if (stream->order == FV_PREFETCH_IN_ORDER && job->params->ahead_is_near) stream->order = FV_PREFETCH_NEAR;
}

/* Aims at the memory of a tile; at nothing where its rows are copied first, or it has none. */
static inline void fv_few_tile_aim(fv_prefetch_stream *stream, const fv_few_keys *keys, const fv_few_tile *tile)
{
    const fv_attend_params *params = keys->job->params;
    const fv_key_source *source = tile->source;
    const fv_kv_plane *k = &source->k;
    const int64_t element_bytes = (int64_t)fv_dtype_bytes(source->dtype);
    const int32_t num_heads = keys->job->item->num_kv_heads;
    if (keys->in_pieces && tile->first < tile->end) {
        fv_few_tile_aim_at_blocks(stream, keys, tile);
        return;
    }
    if (tile->first >= tile->end || !source->k_in_place || !source->v_in_place || source->shared_size > 0) {
        fv_prefetch_aim_at_nothing(stream, keys->tables->k_rows[0]);
        return;
    }
    fv_prefetch_rows of = {
        .rows = {keys->tables->k_rows[tile->turn], keys->tables->v_rows[tile->turn]},
        .num_planes = 2,
        .num_heads = num_heads,
        .offset = keys->job->item->first_kv_head * k->head_stride,
        .head_stride = k->head_stride,
        .row_bytes = params->head_size * element_bytes,
        .first = tile->first,
        .end = tile->end,
    };
    const int64_t apart = of.rows[1][tile->first] - of.rows[0][tile->first];
    if (apart >= 0 && apart <= 2 * of.row_bytes) { /* packed: the value follows its key, or is a part of it */
        of.row_bytes = fv_max_i64(of.row_bytes, apart + params->v_head_size * element_bytes);
        of.num_planes = 1;
    }
    if (k->slot_stride > k->head_stride) { /* a token's heads lie side by side: one row */
        of.row_bytes += (num_heads - 1) * k->head_stride;
        of.num_heads = 1;
    }
    fv_prefetch_aim(stream, &of, FV_FEW_HAS_ORDERS ? fv_max_i32(1, params->ahead_tracks) : 1, FV_CACHE_LINE);
    if (!FV_FEW_HAS_ORDERS || stream->order != FV_PREFETCH_IN_ORDER) return;
    const int64_t key_bytes = fv_few_row_stride(of.rows[0], of.first, fv_min_i32(of.first + 2, of.end));
    if (of.row_bytes < FV_FEW_LEAST_RUN_BYTES && key_bytes != of.row_bytes)
        stream->order = FV_PREFETCH_IN_TRACKS;
    else if (params->ahead_is_near)
        stream->order = FV_PREFETCH_NEAR;
}

/* Scales of a block lie in a few lines, of all heads; where they lie in the rows, the stream has them. */
#define FV_FEW_MAX_SCALE_BYTES 1024

static inline void fv_few_tile_prefetch_scales(const fv_few_keys *keys, const fv_few_tile *tile,
                                               const fv_scale_plane *plane)
{
    const fv_attend_job *job = keys->job;
    const int32_t block_size = job->params->cache.block_size;
    const int32_t first_head = job->item->first_kv_head, last_head = first_head + job->item->num_kv_heads - 1;
    if (!plane->data || tile->source != &job->cache) return;
    for (int32_t i = tile->first, num; i < tile->end; i += num) {
        const int32_t key = tile->first_key + i, slot = key % block_size;
        num = fv_min_i32(block_size - slot, tile->end - i);
        const int64_t block = job->table[key / block_size];
        const char *at = fv_scale_address(plane, block, slot, first_head);
        const char *last = fv_scale_address(plane, block, slot + num - 1, last_head);
        if (last < at || last - at > FV_FEW_MAX_SCALE_BYTES) return;
        for (; at < last; at += FV_CACHE_LINE) __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(last, 0, 2);
    }
}

/* Asks for what the arithmetic of a tile should find in the cache: its scales at once, its rows little by little,
 * by the stream. */
static inline void fv_few_tile_prefetch(fv_prefetch_stream *stream, const fv_few_keys *keys, const fv_few_tile *tile)
{
    fv_few_tile_prefetch_scales(keys, tile, &keys->job->params->cache.k_scales);
    fv_few_tile_prefetch_scales(keys, tile, &keys->job->params->cache.v_scales);
    fv_few_tile_aim(stream, keys, tile);
    if (stream->order == FV_PREFETCH_IN_ORDER) fv_prefetch_sparsely(stream);
}

/* Reads `size` elements of each of the tile's rows and of the item's heads, line by line. */
static inline void fv_few_tile_read_plane(const fv_few_keys *keys, const fv_few_tile *tile, const fv_kv_plane *plane,
                                          const char *const *rows, int32_t size)
{
    const fv_work_item *item = keys->job->item;
    const int32_t are_together = plane->head_stride < plane->slot_stride; /* the heads of a token */
    const int32_t num_runs = are_together ? 1 : item->num_kv_heads, heads = item->num_kv_heads / num_runs;
    const int64_t bytes = (heads - 1) * plane->head_stride + size * (int64_t)fv_dtype_bytes(tile->source->dtype);
    for (int32_t run = 0; run < num_runs; run++) {
        for (int32_t i = tile->first; i < tile->end; i++) {
            const char *at = rows[i] + (item->first_kv_head + run) * plane->head_stride;
            for (int64_t byte = 0; byte < bytes; byte += FV_CACHE_LINE) (void)*(const volatile char *)(at + byte);
        }
    }
}

/* Reads a tile that nobody has asked for, in the order in which it lies: head by head, as it is multiplied, each few lines would come
 * with memory's latency, and prefetches of so many are dropped. Not what is copied first or lies in pieces. */
static inline void fv_few_tile_read(const fv_few_keys *keys, const fv_few_tile *tile)
{
    const fv_attend_params *params = keys->job->params;
    const fv_key_source *source = tile->source;
    if (keys->in_pieces || !source->k_in_place || !source->v_in_place || source->shared_size > 0) return;
    fv_few_tile_read_plane(keys, tile, &source->k, keys->tables->k_rows[tile->turn], params->head_size);
    if (source->v.data != source->k.data)
        fv_few_tile_read_plane(keys, tile, &source->v, keys->tables->v_rows[tile->turn], params->v_head_size);
}

typedef void (*fv_few_tile_fn)(void *user, fv_few_tile *tile, int32_t head);

/* Calls `attend` for all tiles of the item, each with all of its heads. The last one asks for the first tile of `next_job`, the
 * worker's next item; without keys there is none. */
FV_ALWAYS_INLINE void fv_few_keys_walk(const fv_few_keys *keys, const fv_attend_job *next_job, fv_few_tile_fn attend,
                                       void *user)
{
    fv_few_keys next_keys = *keys;
    next_keys.job = next_job;
    fv_few_tile tile = fv_few_tile_from(keys, keys->job->keys.first, 0);
    fv_prefetch_stream ahead;
    if (!keys->job->is_asked_for) fv_few_tile_read(keys, &tile);
    fv_prefetch_aim_at_nothing(&ahead, keys->tables->k_rows[0]);
    while (tile.first < tile.end) {
        const fv_few_tile next = fv_few_tile_from(keys, tile.first_key + tile.end, !tile.turn);
        const fv_prefetch_portion last = ahead.last;
        if (next.first < next.end || next_job->keys.first >= next_job->keys.end) {
            fv_few_tile_prefetch(&ahead, keys, &next);
        } else {
            const fv_few_tile of_next_item = fv_few_tile_from(&next_keys, next_job->keys.first, !tile.turn);
            fv_few_tile_prefetch(&ahead, &next_keys, &of_next_item);
        }
        ahead.last = last;
        tile.rows.ahead = &ahead;
        for (int32_t head = 0; head < keys->job->item->num_kv_heads; head++) {
            const int32_t kv_head = keys->job->item->first_kv_head + head;
            fv_few_tile_find_keys(&tile, keys, kv_head);
            fv_few_tile_find_values(&tile, keys, kv_head);
            fv_few_tile_find_scales(&tile, keys, kv_head);
            attend(user, &tile, head);
        }
        tile = next;
    }
}

#endif
