/* A work item as the tile kernels see it: blocks of keys, K as A tiles where it lies or copied, V as B tiles, and the
 * lines that are asked for ahead. */
#ifndef FV_KERNELS_CPU_AMX_TILE_ITEM_H
#define FV_KERNELS_CPU_AMX_TILE_ITEM_H

#include "kernels/cpu/amla_scale.h"
#include "kernels/cpu/amx/byte_rows.h"
#include "kernels/cpu/amx/tile.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/piece_rows.h"
#include "kernels/cpu/prefetch_stream.h"
#include "kernels/cpu/row_strip.h"

enum {
    FV_TILE_STRIP_ROWS = FV_TILE_COLUMNS,
    FV_STEP_KEYS = 32,         /* of a step: two A tiles of keys, one A tile of weights */
    FV_FEW_TILE_ROWS = 32,     /* of a KV head, up to here values are read where they lie: attend_few_tiles.c */
    FV_TILE_FEW_KEYS = 32,     /* of a block, one strip: near to the order in which rows lie, and soon begun */
    FV_TILE_MANY_KEYS = 256,   /* many strips: the sums pass once for eight products */
    FV_TILE_MANY_STRIPS = 8,   /* from here on items take attend_many_tiles.c */
    FV_TILE_PIECED_STRIPS = 4, /* the same in pieces */
    FV_TILE_COPY_STRIPS = 16,  /* from here on others have K copied to tiles */
    FV_TILE_GROUP_PAIRS = 2,   /* of strips that meet each step of keys together, where there are many */
    FV_TILE_SHARED_STRIPS = 8, /* of a head, over large values: up to here all share a block */
    FV_TILE_MAX_HEADS = 16,    /* KV heads that meet a block of keys one after the other, while its rows are near */
    FV_TILE_MAX_SIZE = 576,    /* of a head */
    FV_BF16_BYTES = 2,
    FV_AHEAD_BYTES = 256,
    FV_TILE_PAGE = 4096,
    FV_TILE_SLICE_PAD = 256, /* bytes between runs of columns of V that share a block */
};

/* Where tile kernels start: a strip with its tiles. */
typedef struct fv_tile_strip {
    fv_row_strip rows; /* its q and sums are unused */
    char *q;           /* [pieces][D / 32] B tiles, or A tiles (attend_many_tiles.c) */
    int32_t has_sums;  /* 0: they are 0, and not in memory yet */
    float *sums;       /* [Dv / 16] C tiles; pairs of columns as fv_words_store_pairs leaves them */
    fv_amla_scale scale[FV_TILE_STRIP_ROWS / FV_LANES]; /* of the sums, where they are rescaled by addition */
    int32_t addend[FV_TILE_STRIP_ROWS];                 /* of the block at hand, to the bits of each row's sums */
} fv_tile_strip;

/* A block of keys; indices count from first_key, a multiple of FV_STEP_KEYS. */
typedef struct fv_key_block {
    int32_t first_key;
    int32_t first, end;  /* keys that the item looks at */
    const char **k_rows; /* [block_keys] of KV head 0, from `first` to `end` */
    const char **v_rows;
} fv_key_block;

typedef struct fv_tile_scratch {
    fv_tile_strip *strips; /* [heads][num_strips] */
    char *q;
    float *sums;
    size_t sums_stride;      /* from strip to strip */
    float *weight_sums;      /* [strips][16][16]: of a row's weights as bf16, in 16 parts; many strips only */
    float *row_sums;         /* the same of its weights in fp32 */
    float *scores;           /* of two pairs of strips, in turn, or of all that share a block: [2][2][block_keys][16] */
    char *weights;           /* of two pairs in turn, or of all: [2][2][pieces][block_keys / 32] A tiles */
    float *step_scores;      /* [2][32][16]: a step of a pair of strips that share a block */
    char *spread;            /* [2][16 lanes][4] rows of A tiles: attend_few_tiles.c */
    char *pairs;             /* [pieces][block_keys / 32][Dv / 16] B tiles of V */
    char *k_copies;          /* [block_keys / 16][pieces][D / 32] A tiles */
    char *head_copies;       /* of two heads in turn: K as k_copies or rows of V; attend_few_tiles.c */
    char *v_copies;          /* [FV_STEP_KEYS][Dv] */
    char *key_rows;          /* [16][D] keys that had to be converted */
    char *piece_rows;        /* the same of keys or values as they are stored, in bytes */
    const char **pages;      /* [2][block_keys / 16]: those of a block, where keys lie in pieces */
    char *gathered;          /* [max(D, Dv)] */
    char *zeros;             /* [max(D, Dv)] */
    float *row;              /* [Dv] */
    const char **rows[3];    /* of this block and the next two, in turn: [2][block_keys] */
    const char **token_rows; /* [strips of a head][16] */
    const char **k_tiles;    /* [block_keys / 16] of the head at hand */
    int64_t *k_strides;      /* bytes between the keys of a tile in the cache; 0: they are copied */
    float *k_scales;         /* [block_keys] of single keys; of few rows of all heads: [heads][block_keys] */
    float *v_scales;
    float *lane_k_scales; /* [FV_STEP_KEYS][16]: few_weights.h; [FV_TILE_MANY_KEYS]: attend_many_tiles.c */
    float *lane_v_scales;
    size_t bytes;
} fv_tile_scratch;

typedef struct fv_tile_item {
    const fv_attend_job *job; /* with heads of whole tiles: fv_tile_item_begin */
    fv_attend_job natural;    /* the job as it is, with its sums in natural order, for the end of a row */
    fv_attend_job padded_job; /* what `job` is where heads are no whole tiles */
    fv_attend_params padded;
    fv_tile_scratch scratch;
    fv_tiles tiles;
    int32_t first_head, num_heads;
    int32_t num_strips; /* of a head */
    int32_t block_keys;
    int32_t pieces;     /* fv_tile_pieces */
    int32_t kv_pieces;  /* the same of keys and values: 1 where all are of a byte, so that low pieces are zeros */
    int32_t keeps_keys; /* in pieces: tiles are those that the worker keeps */
    int32_t
        has_piece_rows; /* keys and values of the cache lie in pieces of 16 bytes (piece_rows.h), in pages of whole tiles */
    int32_t converts_latents; /* fv_converts_latents */
    fv_rescaling rescaling;
    fv_prefetch_stream ahead;
    int32_t ahead_portions; /* of FV_AHEAD_BYTES, at each site */
    const float *k_scales;  /* of the keys of the block at hand, for the head at hand; NULL: they have none */
    const float *v_scales;
} fv_tile_item;

/* --- heads of whole tiles ------------------------------------------------------------------------------------- */

/* Elements of a head as the tiles have it: zeros stand behind the last of it. */
static inline int32_t fv_tile_size(int32_t size) { return (int32_t)fv_round_up(size, FV_TILE_DEPTH); }

/* Numbers of bf16 whose sum an element is: 2 where queries are fp16 (half_pieces.h). */
static inline int32_t fv_tile_pieces(const fv_attend_params *params) { return params->q_dtype == FV_DTYPE_F16 ? 2 : 1; }

/* Strips of a KV head from which on an item has many. */
static inline int32_t fv_tile_many_strips(const fv_attend_params *params)
{
    return fv_tile_pieces(params) > 1 ? FV_TILE_PIECED_STRIPS : FV_TILE_MANY_STRIPS;
}

static inline int32_t fv_heads_are_padded(int32_t head_size, int32_t v_head_size)
{
    return head_size % FV_TILE_DEPTH != 0 || v_head_size % FV_TILE_DEPTH != 0;
}

/* 1: 16 keys of a page and their values are made rows at a time. */
static inline int32_t fv_has_piece_rows(const fv_attend_params *params)
{
    return !params->dense.k && fv_cache_has_piece_rows(&params->cache);
}

/* 1: keys are of a byte an element, and values the first of their elements, so that rows of bf16 serve for both. */
static inline int32_t fv_converts_latents(const fv_attend_job *job)
{
    const fv_attend_params *params = job->params;
    const fv_key_source *cache = &job->cache;
    return fv_tile_pieces(params) == 1 && !fv_heads_are_padded(params->head_size, params->v_head_size) &&
           fv_dtype_bytes(cache->stored) == 1 && cache->k_in_place && cache->k.data == cache->v.data &&
           cache->k.slot_stride == cache->v.slot_stride && !params->dense.k;
}

/* Sets what the item is of. Where its heads are no whole tiles the job becomes one of padded heads, whose rows are copied. */
static inline void fv_tile_item_begin(fv_tile_item *item, const fv_attend_job *job)
{
    item->job = job;
    item->natural = *job;
    item->natural.lane_dtype = FV_DTYPE_F32;
    const fv_attend_params *params = job->params;
    item->pieces = fv_tile_pieces(params);
    item->kv_pieces = params->dense.k || fv_dtype_bytes(params->cache.dtype) > 1 ? item->pieces : 1;
    item->has_piece_rows = fv_has_piece_rows(params);
    item->converts_latents = fv_converts_latents(job);
    if (!fv_heads_are_padded(params->head_size, params->v_head_size)) return;
    item->padded = *params;
    item->padded.head_size = fv_tile_size(params->head_size);
    item->padded.v_head_size = fv_tile_size(params->v_head_size);
    item->padded_job = *job;
    item->padded_job.params = &item->padded;
    item->job = &item->padded_job;
}

static inline int32_t fv_tile_item_is_padded(const fv_tile_item *item)
{
    return item->job->params != item->natural.params;
}

/* Elements [size, padded) of a row of bf16 become zeros. */
static inline void fv_tile_pad(char *row, int32_t size, int32_t padded)
{
    if (size < padded) memset(row + size * FV_BF16_BYTES, 0, (size_t)(padded - size) * FV_BF16_BYTES);
}

/* 16 rows of queries, or copies of them with zeros behind, in key_rows. */
static inline void fv_tile_pad_queries(const fv_tile_item *item, const char *rows[FV_TILE_ROWS])
{
    const int32_t size = item->natural.params->head_size, padded = item->job->params->head_size;
    if (!fv_tile_item_is_padded(item)) return;
    for (int32_t i = 0; i < FV_TILE_ROWS; i++) {
        char *to = item->scratch.key_rows + (int64_t)i * padded * FV_BF16_BYTES;
        memcpy(to, rows[i], (size_t)size * FV_BF16_BYTES);
        fv_tile_pad(to, size, padded);
        rows[i] = to;
    }
}

/* Bytes from the high pieces to the low ones of a strip's queries, and of the keys of a tile. */
static inline int64_t fv_query_piece_bytes(const fv_tile_item *item)
{
    return (int64_t)FV_TILE_STRIP_ROWS * item->job->params->head_size * FV_BF16_BYTES;
}

/* The same of a strip's weights. */
static inline int64_t fv_weight_piece_bytes(const fv_tile_item *item)
{
    return (int64_t)item->block_keys * FV_TILE_STRIP_ROWS * FV_BF16_BYTES;
}

/* The same of the pairs of values. */
static inline int64_t fv_pairs_piece_bytes(const fv_tile_item *item)
{
    return (int64_t)item->block_keys * item->job->params->v_head_size * FV_BF16_BYTES;
}

/* --- scratch -------------------------------------------------------------------------------------------------- */

static inline int32_t fv_num_strips(int32_t num_rows) { return (int32_t)fv_ceil_div(num_rows, FV_TILE_STRIP_ROWS); }

/* shared_strips: those that share a block (attend_shared_tiles.c), or 0. */
static inline fv_tile_scratch fv_tile_scratch_of(const fv_attend_params *params, int32_t all_strips,
                                                 int32_t shared_strips, int32_t block_keys, void *memory)
{
    const size_t strips = (size_t)all_strips, keys = (size_t)block_keys;
    const size_t weighed = (size_t)fv_max_i32(2 * FV_TILE_GROUP_PAIRS, shared_strips);
    const size_t strip_scores = keys * FV_TILE_STRIP_ROWS;
    const size_t many = all_strips >= fv_tile_many_strips(params) ? strips : 0;
    const size_t pieces_bytes = (size_t)fv_tile_pieces(params) * FV_BF16_BYTES;
    const size_t v_size = (size_t)fv_tile_size(params->v_head_size), v_bytes = v_size * pieces_bytes;
    const size_t k_bytes = (size_t)fv_tile_size(params->head_size) * pieces_bytes;
    /* Many strips: addresses modulo a page decide whether loads wait for stores (pair_step.h). */
    const size_t alignment = many && !shared_strips ? FV_TILE_PAGE : FV_CACHE_LINE;
    fv_tile_scratch scratch = {0};
    scratch.strips = fv_scratch_take(memory, &scratch.bytes, strips * sizeof(fv_tile_strip));
    scratch.q = fv_scratch_take_aligned(memory, &scratch.bytes, strips * FV_TILE_STRIP_ROWS * k_bytes, alignment);
    /* Strips that share a block: sums of the same columns lie in different lines of L1. */
    scratch.sums_stride = FV_TILE_STRIP_ROWS * v_size + (shared_strips ? FV_TILE_BYTES / sizeof(float) : 0);
    scratch.sums = fv_scratch_take(memory, &scratch.bytes, strips * scratch.sums_stride * sizeof(float));
    scratch.weight_sums = fv_scratch_take(memory, &scratch.bytes, many * FV_TILE_BYTES);
    scratch.row_sums = fv_scratch_take(memory, &scratch.bytes, many * FV_TILE_BYTES);
    scratch.scores = fv_scratch_take_aligned(memory, &scratch.bytes, weighed * strip_scores * sizeof(float), alignment);
    scratch.weights = fv_scratch_take(memory, &scratch.bytes, weighed * strip_scores * pieces_bytes);
    scratch.spread = fv_scratch_take(memory, &scratch.bytes, 8 * (size_t)FV_TILE_BYTES);
    const size_t slices = shared_strips ? v_size / (2 * FV_TILE_COLUMNS) : 0;
    scratch.step_scores = fv_scratch_take(memory, &scratch.bytes, (shared_strips ? 4 : 0) * (size_t)FV_TILE_BYTES);
    scratch.pairs = fv_scratch_take(memory, &scratch.bytes, keys * v_bytes + slices * FV_TILE_SLICE_PAD);
    scratch.k_copies = fv_scratch_take(memory, &scratch.bytes, keys * k_bytes);
    const size_t copied_keys = block_keys == FV_TILE_FEW_KEYS ? 2 * keys : 0;
    scratch.head_copies = fv_scratch_take(memory, &scratch.bytes,
                                          copied_keys * (k_bytes > v_bytes ? k_bytes : v_bytes));
    scratch.v_copies = fv_scratch_take(memory, &scratch.bytes, FV_STEP_KEYS * v_bytes);
    scratch.key_rows = fv_scratch_take(memory, &scratch.bytes, FV_TILE_ROWS * k_bytes);
    scratch.piece_rows = fv_scratch_take(memory, &scratch.bytes,
                                         FV_TILE_ROWS * (k_bytes > v_bytes ? k_bytes : v_bytes));
    scratch.pages = fv_scratch_take(memory, &scratch.bytes, 2 * keys / FV_TILE_ROWS * sizeof(char *));
    scratch.gathered = fv_scratch_take(memory, &scratch.bytes, k_bytes > v_bytes ? k_bytes : v_bytes);
    scratch.zeros = fv_scratch_take(memory, &scratch.bytes, k_bytes > v_bytes ? k_bytes : v_bytes);
    scratch.row = fv_scratch_take(memory, &scratch.bytes, v_size * sizeof(float));
    for (int32_t i = 0; i < 3; i++)
        scratch.rows[i] = fv_scratch_take(memory, &scratch.bytes, 2 * keys * sizeof(char *));
    scratch.token_rows = fv_scratch_take(memory, &scratch.bytes, strips * FV_TILE_STRIP_ROWS * sizeof(char *));
    scratch.k_tiles = fv_scratch_take(memory, &scratch.bytes, keys / FV_TILE_ROWS * sizeof(char *));
    scratch.k_strides = fv_scratch_take(memory, &scratch.bytes, keys / FV_TILE_ROWS * sizeof(int64_t));
    const size_t scaled_heads = block_keys == FV_TILE_FEW_KEYS ? FV_TILE_MAX_HEADS : 1;
    scratch.k_scales = fv_scratch_take(memory, &scratch.bytes, scaled_heads * keys * sizeof(float));
    scratch.v_scales = fv_scratch_take(memory, &scratch.bytes, scaled_heads * keys * sizeof(float));
    const size_t lane_bytes = FV_STEP_KEYS * FV_TILE_STRIP_ROWS * sizeof(float);
    scratch.lane_k_scales = fv_scratch_take(memory, &scratch.bytes, lane_bytes);
    scratch.lane_v_scales = fv_scratch_take(memory, &scratch.bytes, lane_bytes);
    return scratch;
}

/* --- keys ------------------------------------------------------------------------------------------------------ */

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

/* 16 rows of a cache in pieces to 16-bit words: bf16, or fp16 as they are. raw: where they are in piece_rows, if of a byte. */
static inline int32_t fv_piece_rows_to_words(const fv_row_target *target, const char *raw, int32_t size,
                                             fv_dtype stored)
{
    const char *rows[FV_TILE_ROWS];
    for (int32_t i = 0; i < FV_TILE_ROWS; i++) rows[i] = raw + (int64_t)i * size;
    return fv_rows_to_bf16(target->to, target->row_stride, target->part_stride, rows, FV_TILE_ROWS, 0, size, stored);
}

/* Keys first to first + 15 of a cache in pieces so. 0: they are not, or not all of the item. */
static inline int32_t fv_tile_gather_keys(const fv_row_target *target, const fv_tile_item *item,
                                          const fv_key_block *block, int32_t kv_head, int32_t first)
{
    const fv_key_source *source = item->has_piece_rows ? fv_tile_source(item->job, block, first) : NULL;
    if (!source) return 0;
    const int32_t size = item->natural.params->head_size, bytes = (int32_t)fv_dtype_bytes(source->stored);
    const char *pieces = block->k_rows[first] + kv_head * source->k.head_stride;
    const fv_row_target raw = {item->scratch.piece_rows, size, FV_TILE_ROW_BYTES};
    if (bytes == 1 && size % FV_TILE_ROW_BYTES != 0) return 0;
    fv_key_pieces_to_rows(bytes == 1 ? &raw : target, pieces, source->k.element_chunk_stride,
                          size * bytes / FV_PIECE_BYTES);
    return bytes > 1 || fv_piece_rows_to_words(target, raw.to, size, source->stored);
}

/* The same of values. */
static inline int32_t fv_tile_gather_values(const fv_row_target *target, const fv_tile_item *item,
                                            const fv_key_block *block, int32_t kv_head, int32_t first)
{
    const fv_key_source *source = item->has_piece_rows ? fv_tile_source(item->job, block, first) : NULL;
    if (!source) return 0;
    const int32_t size = item->natural.params->v_head_size, bytes = (int32_t)fv_dtype_bytes(source->stored);
    const int64_t of_head = kv_head * source->v.head_stride;
    const char *const pieces[2] = {block->v_rows[first] + of_head, block->v_rows[first + FV_TILE_ROWS / 2] + of_head};
    const fv_row_target raw = {item->scratch.piece_rows, size, FV_TILE_ROW_BYTES};
    if (bytes == 1 && size % FV_TILE_ROW_BYTES != 0) return 0;
    fv_value_pieces_to_rows(bytes == 1 ? &raw : target, pieces, source->v.element_stride, size, bytes);
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
    return fv_tile_gather_keys(&(fv_row_target){fv_tile_key_row(item, 0), row_bytes, FV_TILE_ROW_BYTES}, item, block,
                               kv_head, first);
}

/* Values in pieces of a step to the rows of v_copies. Returns which are there: bits 0 and 1, of 16 each. */
static inline int32_t fv_tile_gather_value_rows(const fv_tile_item *item, const fv_key_block *block, int32_t kv_head,
                                                int32_t step)
{
    const int64_t row_bytes = (int64_t)item->job->params->v_head_size * FV_BF16_BYTES;
    int32_t there = 0;
    for (int32_t t = 0; t < 2; t++) {
        const fv_row_target target = {fv_tile_value_row(item, t * FV_TILE_ROWS), row_bytes, FV_TILE_ROW_BYTES};
        there |= fv_tile_gather_values(&target, item, block, kv_head, step * FV_STEP_KEYS + t * FV_TILE_ROWS) << t;
    }
    return there;
}

/* Is the value of a key of the step among them? */
static inline int32_t fv_value_is_there(int32_t there, int32_t key)
{
    return there >> (key % FV_STEP_KEYS / FV_TILE_ROWS) & 1;
}

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
    if (fv_tile_gather_keys(&(fv_row_target){to, FV_TILE_ROW_BYTES, FV_TILE_BYTES}, item, block, kv_head, first))
        return;
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

/* The same of a cache in pieces: pages that begin in the block, head by head. */
static inline void fv_tile_aim_at_pages(fv_tile_item *item, const fv_key_block *block, int32_t num_sites)
{
    const fv_attend_params *params = item->natural.params;
    const int32_t page = params->cache.block_size, most = item->block_keys / FV_TILE_ROWS;
    const char **k_pages = item->scratch.pages, **v_pages = k_pages + most;
    int32_t num = 0;
    for (int32_t key = (int32_t)fv_round_up(block->first_key + block->first, page) - block->first_key; key < block->end;
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
    if (item->has_piece_rows) {
        fv_tile_aim_at_pages(item, block, num_sites);
        return;
    }
    const fv_key_source *source = fv_attend_source_of(item->job, block->first_key + block->first);
    const int32_t end = fv_attend_source_end(item->job, block->first_key + block->first,
                                             block->first_key + block->end) -
                        block->first_key;
    if (!source->k_in_place || !source->v_in_place || source->shared_size > 0) return;
    const int64_t element_bytes = (int64_t)fv_dtype_bytes(source->stored);
    const int32_t is_latent = source->k.data == source->v.data;
    fv_prefetch_rows of = {
        .rows = {block->k_rows, block->v_rows},
        .num_planes = is_latent ? 1 : 2,
        .num_heads = item->num_heads,
        .offset = item->first_head * source->k.head_stride,
        .head_stride = source->k.head_stride,
        .row_bytes = item->natural.params->head_size * element_bytes,
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

#endif
