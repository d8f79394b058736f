/* A work item as the tile kernels see it, and its scratch memory. */
#ifndef FV_KERNELS_CPU_AMX_TILE_ITEM_H
#define FV_KERNELS_CPU_AMX_TILE_ITEM_H

#include "kernels/cpu/amla_scale.h"
#include "kernels/cpu/amx/tile.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/piece_rows.h"
#include "kernels/cpu/prefetch_stream.h"
#include "kernels/cpu/row_strip.h"
#include "kvcache/latent_entry.h"

enum {
    FV_TILE_STRIP_ROWS = FV_TILE_COLUMNS,
    FV_STEP_KEYS = 32,         /* of a step: two A tiles of keys, one A tile of weights */
    FV_FEW_TILE_ROWS = 32,     /* of a KV head, up to here values are read where they lie: attend_few_tiles.c */
    FV_TILE_FEW_KEYS = 32,     /* of a block, one strip: near to the order in which rows lie, and soon begun */
    FV_TILE_MANY_KEYS = 256,   /* many strips: the sums pass once for eight products */
    FV_TILE_PIECED_KEYS = 128, /* values in two pieces: twice as many products, and as many bytes of pairs */
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
    FV_LATENT_PARTS = FV_DS_LATENT / FV_DS_TILE,
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

/* Scales of the keys of a block, whose latents have some by parts: latent_parts.h. */
typedef struct fv_part_scales {
    float of_keys[FV_LATENT_PARTS][FV_TILE_MANY_KEYS];
    float of_high[FV_LATENT_PARTS][FV_TILE_MANY_KEYS]; /* of both pieces of values */
    float of_low[FV_LATENT_PARTS][FV_TILE_MANY_KEYS];
} fv_part_scales;

typedef struct fv_tile_scratch {
    fv_tile_strip *strips; /* [heads][num_strips] */
    char *q;
    float *sums;
    size_t sums_stride; /* from strip to strip */
    float *weight_sums; /* [strips][16][16]: of a row's weights as bf16, in 16 parts; many strips only */
    float *row_sums;    /* the same of its weights in fp32 */
    float *scores;      /* of two pairs of strips, in turn, or of all that share a block: [2][2][block_keys][16] */
    char *weights;      /* of two pairs in turn, or of all: [2][2][pieces][block_keys / 32] A tiles */
    float *step_scores; /* [2][32][16]: a step of a pair of strips that share a block; of parts: three of these */
    fv_part_scales *part_scales;
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
    int32_t pieces;           /* fv_tile_pieces */
    int32_t kv_pieces;        /* the same of keys and values: 1 where all are of a byte, so that low pieces are zeros */
    int32_t keeps_keys;       /* in pieces: tiles are those that the worker keeps */
    int32_t has_piece_rows;   /* fv_has_piece_rows */
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

/* 1: those of the cache lie in pieces of 16 bytes, of which rows are made 16 at a time (piece_rows.h). */
static inline int32_t fv_has_piece_rows(const fv_attend_params *params)
{
    return fv_cache_has_piece_rows(&params->cache);
}

/* 1: latents have scales by parts (latent_parts.h). */
static inline int32_t fv_has_latent_parts(const fv_attend_params *params)
{
    return params->cache.layout == FV_KV_LAYOUT_LATENT_FP8_DS;
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
    const size_t has_parts = shared_strips && fv_has_latent_parts(params), rooms = has_parts ? 3 : 1;
    scratch.part_scales = fv_scratch_take(memory, &scratch.bytes, has_parts ? sizeof(fv_part_scales) : 0);
    scratch.step_scores = fv_scratch_take(memory, &scratch.bytes,
                                          (shared_strips ? 4 * rooms : 0) * (size_t)FV_TILE_BYTES);
    scratch.pairs = fv_scratch_take(memory, &scratch.bytes,
                                    (has_parts ? 2 : 1) * (keys * v_bytes + slices * FV_TILE_SLICE_PAD));
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

#endif
