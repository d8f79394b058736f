/* attend_paged for many rows: prefill, and long extensions.
 *
 * Bound by arithmetic. Each tile of keys is converted once for a KV head, to fp32, at level avx512_bf16 to pairs of bf16, and
 * then met by all rows of the item. Rows go in strips, one to a lane (row_strip.h, strip_product.h), so that nothing is transposed but
 * the queries, once for an item.
 *
 * Keys and values of all heads seldom fit into the second-level cache, and blocks lie anywhere: the rows of the next
 * tile are prefetched a few lines at a time during the first product. */
#include "kernels/cpu/piece_rows.h"
#if defined(FV_HAS_PAIRS)
#include "kernels/cpu/many_pairs.h"
#else
#include "kernels/cpu/many_floats.h"
#endif

/* Elements of Q^T that stay in L1 while the keys of a tile pass: 12 KB, with vectors of 16 lanes 24. */
enum { DEPTH = 128 };

typedef struct many_scratch {
    fv_row_strip *strips;
    float *q;
    float *sums;
    float *keys;   /* [tile][D], lane order */
    float *values; /* [padded Dv / 16][tile][16], lane order */
    float *scores; /* [tile][rows of a strip] */
    float *k_scales;
    float *v_scales;
    const char **rows;
    const char **next_rows[2]; /* [tile] keys, values of the next tile */
    float *copy;               /* one row */
    char *piece_rows;          /* 16 rows as they are stored, of a cache in pieces */
    size_t bytes;
} many_scratch;

/* A tile of keys of one KV head; indices count from first_key. */
typedef struct many_tile {
    int32_t first_key;
    int32_t first, end;
    int32_t not_finite;    /* some value is infinite or NaN: weight 0 has to be kept from it */
    const float *k_scales; /* per-token-head, or NULL */
    const float *v_scales;
    fv_strip_ahead *ahead; /* the next tile */
} many_tile;

/* Bytes of a row of a cache in pieces, in whole parts. */
static int64_t piece_row_bytes(const fv_attend_params *params)
{
    const int64_t widest = fv_max_i32(params->head_size, params->v_head_size);
    return fv_round_up(widest * (int64_t)sizeof(uint16_t), FV_PART_BYTES);
}

/* Columns of sums: whole panels. */
static int32_t num_columns_of(const fv_attend_params *params)
{
    return (int32_t)fv_round_up(params->v_head_size, FV_STRIP_PANEL);
}

static many_scratch many_scratch_of(const fv_attend_params *params, int32_t num_rows, void *memory)
{
    const size_t rows = (size_t)fv_round_up(num_rows, FV_STRIP_LANES);
    const size_t tile = (size_t)params->tile_keys;
    const size_t head_size = (size_t)params->head_size;
    const size_t columns = (size_t)num_columns_of(params);
    const size_t widest = head_size > columns ? head_size : columns;
    many_scratch scratch = {0};
    scratch.strips = fv_scratch_take(memory, &scratch.bytes,
                                     (rows + FV_STRIP_ROWS - 1) / FV_STRIP_ROWS * sizeof(fv_row_strip));
    scratch.q = fv_scratch_take(memory, &scratch.bytes, rows * head_size * sizeof(float));
    scratch.sums = fv_scratch_take(memory, &scratch.bytes, rows * columns * sizeof(float));
    scratch.keys = fv_scratch_take(memory, &scratch.bytes, tile * head_size * sizeof(float));
    scratch.values = fv_scratch_take(memory, &scratch.bytes, tile * columns * sizeof(float));
    scratch.scores = fv_scratch_take(memory, &scratch.bytes, tile * FV_STRIP_ROWS * sizeof(float));
    scratch.k_scales = fv_scratch_take(memory, &scratch.bytes, tile * sizeof(float));
    scratch.v_scales = fv_scratch_take(memory, &scratch.bytes, tile * sizeof(float));
    scratch.rows = fv_scratch_take(memory, &scratch.bytes, tile * sizeof(char *));
    for (int32_t plane = 0; plane < 2; plane++)
        scratch.next_rows[plane] = fv_scratch_take(memory, &scratch.bytes, tile * sizeof(char *));
    scratch.copy = fv_scratch_take(memory, &scratch.bytes, widest * sizeof(float));
    scratch.piece_rows = fv_scratch_take(memory, &scratch.bytes, (size_t)(FV_PIECE_KEYS * piece_row_bytes(params)));
    return scratch;
}

size_t FV_ISA_SYMBOL(fv_attend_many_scratch)(const fv_attend_params *params)
{
    const int32_t num_rows = params->block_q * (params->num_heads / params->num_kv_heads);
    return many_scratch_of(params, fv_max_i32(num_rows, FV_DECODE_ROWS), NULL).bytes;
}

/* --- the tile's elements -------------------------------------------------------------------------------- */

#define EACH_DTYPE(CALL)                                  \
    switch (dtype) {                                      \
    case FV_DTYPE_F32: CALL(FV_DTYPE_F32); break;         \
    case FV_DTYPE_F16: CALL(FV_DTYPE_F16); break;         \
    case FV_DTYPE_BF16: CALL(FV_DTYPE_BF16); break;       \
    case FV_DTYPE_F8_E4M3: CALL(FV_DTYPE_F8_E4M3); break; \
    case FV_DTYPE_F8_E5M2: CALL(FV_DTYPE_F8_E5M2); break; \
    case FV_DTYPE_I8: CALL(FV_DTYPE_I8); break;           \
    case FV_DTYPE_NONE: break;                            \
    }

static void convert_keys(float *keys, const char *const *rows, int32_t first, int32_t end, int32_t head_size,
                         int32_t num_elements, fv_dtype dtype)
{
#define CONVERT(DTYPE) fv_many_convert_keys(keys, rows, first, end, head_size, num_elements, DTYPE)
    EACH_DTYPE(CONVERT)
#undef CONVERT
}

static int32_t convert_values(float *values, const char *const *rows, int32_t first, int32_t end, int32_t tile_keys,
                              int32_t v_head_size, fv_dtype dtype)
{
    int32_t not_finite = 0;
#define CONVERT(DTYPE) not_finite = fv_many_convert_values(values, rows, first, end, tile_keys, v_head_size, DTYPE)
    EACH_DTYPE(CONVERT)
#undef CONVERT
    return not_finite;
}

/* --- one KV head ----------------------------------------------------------------------------------------- */

/* Element 0 of the keys [first, end) of the tile, which share a source, in a plane of it. */
static void load_rows(const char **rows, const fv_attend_job *job, const fv_kv_plane *plane, int32_t kv_head,
                      const many_tile *tile, int32_t first, int32_t end)
{
    fv_attend_find_rows(rows + first, job, plane, tile->first_key + first, tile->first_key + end);
    for (int32_t key = first; key < end; key++) rows[key] += kv_head * plane->head_stride;
}

/* 1: the 16 keys from `key` on, below `end`, lie in pieces of one page. */
static int32_t are_piece_keys(const fv_attend_job *job, const fv_key_source *source, const many_tile *tile, int32_t key,
                              int32_t end)
{
    if (source != &job->cache || !fv_cache_has_piece_rows(&job->params->cache)) return 0;
    return (tile->first_key + key) % FV_PIECE_KEYS == 0 && key + FV_PIECE_KEYS <= end;
}

/* Makes rows of them. */
static void make_piece_rows(const many_scratch *scratch, const fv_attend_job *job, const fv_kv_plane *plane,
                            int32_t key, int32_t size, int32_t is_value)
{
    const fv_attend_params *params = job->params;
    const int64_t row_bytes = piece_row_bytes(params), bytes = (int64_t)fv_dtype_bytes(params->cache.dtype);
    const fv_row_target target = {scratch->piece_rows, row_bytes, FV_PART_BYTES};
    const char **rows = scratch->rows + key;
    const char *const pieces[2] = {rows[0], rows[FV_PIECE_KEYS / 2]};
    fv_pieces_to_rows(&target, plane, pieces, size, bytes, is_value);
    for (int32_t i = 0; i < FV_PIECE_KEYS; i++) rows[i] = scratch->piece_rows + i * row_bytes;
}

static void load_keys(const many_scratch *scratch, const many_tile *tile, const fv_attend_job *job, int32_t kv_head,
                      int32_t first, int32_t end)
{
    const fv_key_source *source = fv_attend_source_of(job, tile->first_key + first);
    const int32_t head_size = job->params->head_size;
    const int32_t own_size = head_size - source->shared_size;
    load_rows(scratch->rows, job, &source->k, kv_head, tile, first, end);
    if (!source->k_in_place) {
        for (int32_t key = first; key < end; key++) {
            if (are_piece_keys(job, source, tile, key, end)) {
                make_piece_rows(scratch, job, &source->k, key, head_size, 0);
                convert_keys(scratch->keys, scratch->rows, key, key + FV_PIECE_KEYS, head_size, head_size,
                             source->dtype);
                key += FV_PIECE_KEYS - 1;
                continue;
            }
            fv_attend_copy_key(scratch->copy, scratch->rows[key], job, source, tile->first_key + key);
            scratch->rows[key] = (const char *)scratch->copy;
            convert_keys(scratch->keys, scratch->rows, key, key + 1, head_size, head_size, source->dtype);
        }
        return;
    }
    convert_keys(scratch->keys, scratch->rows, first, end, head_size, own_size, source->dtype);
    if (source->shared_size == 0) return;
    load_rows(scratch->rows, job, &source->k_shared, 0, tile, first, end);
    convert_keys(scratch->keys + own_size / FV_STRIP_NUMBERS, scratch->rows, first, end, head_size, source->shared_size,
                 source->dtype);
}

static void load_values(const many_scratch *scratch, many_tile *tile, const fv_attend_job *job, int32_t kv_head,
                        int32_t first, int32_t end)
{
    const fv_key_source *source = fv_attend_source_of(job, tile->first_key + first);
    const int32_t tile_keys = job->params->tile_keys, size = job->params->v_head_size;
    load_rows(scratch->rows, job, &source->v, kv_head, tile, first, end);
    if (source->v_in_place) {
        tile->not_finite |= convert_values(scratch->values, scratch->rows, first, end, tile_keys, size, source->dtype);
        return;
    }
    for (int32_t key = first; key < end; key++) {
        if (are_piece_keys(job, source, tile, key, end)) {
            make_piece_rows(scratch, job, &source->v, key, size, 1);
            tile->not_finite |= convert_values(scratch->values, scratch->rows, key, key + FV_PIECE_KEYS, tile_keys,
                                               size, source->dtype);
            key += FV_PIECE_KEYS - 1;
            continue;
        }
        fv_attend_copy_row(scratch->copy, scratch->rows[key], job, source, &source->v, size);
        scratch->rows[key] = (const char *)scratch->copy;
        tile->not_finite |= convert_values(scratch->values, scratch->rows, key, key + 1, tile_keys, size,
                                           source->dtype);
    }
}

static void load_tile(const many_scratch *scratch, many_tile *tile, const fv_attend_job *job, int32_t kv_head)
{
    const fv_attend_params *params = job->params;
    const int32_t stride = params->head_size / FV_STRIP_NUMBERS;
    fv_many_begin_values(scratch->values, tile->first, tile->end, params->tile_keys, num_columns_of(params));
    for (int32_t first = tile->first, end; first < tile->end; first = end) {
        end = fv_attend_source_end(job, tile->first_key + first, tile->first_key + tile->end) - tile->first_key;
        load_keys(scratch, tile, job, kv_head, first, end);
        load_values(scratch, tile, job, kv_head, first, end);
    }
    for (int32_t key = tile->end; key < params->tile_keys && key < tile->end + FV_STRIP_KEYS; key++) {
        memset(scratch->keys + (int64_t)key * stride, 0, (size_t)stride * sizeof(float));
    }

    const int32_t first = tile->first_key + tile->first, end = tile->first_key + tile->end;
    if (job->has_k_scales) {
        fv_attend_find_scales(scratch->k_scales + tile->first, job, &params->cache.k_scales, params->k_scale, kv_head,
                              first, end);
        tile->k_scales = scratch->k_scales;
    }
    if (job->has_v_scales) {
        fv_attend_find_scales(scratch->v_scales + tile->first, job, &params->cache.v_scales, params->v_scale, kv_head,
                              first, end);
        tile->v_scales = scratch->v_scales;
    }
}

/* The tile that starts at `first_key`; empty behind the item's keys. */
static many_tile tile_at(const fv_attend_job *job, int32_t first_key)
{
    return (many_tile){
        .first_key = first_key,
        .first = fv_max_i32(job->keys.first - first_key, 0),
        .end = fv_min_i32(job->keys.end - first_key, job->params->tile_keys),
    };
}

/* The memory of a tile, of the first of its sources where it has two; of rows that are copied first, nothing. */
static fv_strip_ahead aim_ahead(fv_prefetch_stream *stream, const many_scratch *scratch, const many_tile *tile,
                                const fv_attend_job *job, int32_t kv_head)
{
    const fv_attend_params *params = job->params;
    const int32_t first = tile->first, last_key = tile->first_key + tile->end;
    const fv_key_source *source = fv_attend_source_of(job, tile->first_key + first);
    if (first >= tile->end || !source->k_in_place || !source->v_in_place) return (fv_strip_ahead){0};

    const int32_t end = fv_attend_source_end(job, tile->first_key + first, last_key) - tile->first_key;
    load_rows(scratch->next_rows[0], job, &source->k, kv_head, tile, first, end);
    load_rows(scratch->next_rows[1], job, &source->v, kv_head, tile, first, end);
    const int32_t key_size = params->head_size - source->shared_size;
    const fv_prefetch_rows rows = {
        .rows = {scratch->next_rows[0], scratch->next_rows[1]},
        .num_planes = 2,
        .num_heads = 1,
        .row_bytes = fv_max_i32(key_size, params->v_head_size) * (int64_t)fv_dtype_bytes(source->dtype),
        .first = first,
        .end = end,
    };
    return fv_strip_aim(
        stream, &rows, 2 * (end - first) * fv_ceil_div(rows.row_bytes, FV_CACHE_LINE),
        fv_strip_num_steps(job->num_rows, params->tile_keys, params->head_size / FV_STRIP_NUMBERS, DEPTH));
}

static void attend_tile_strip(const many_scratch *scratch, fv_row_strip *strip, const many_tile *tile,
                              const fv_attend_job *job, fv_score_scale scale)
{
    const fv_attend_params *params = job->params;
    const int32_t depth = params->head_size / FV_STRIP_NUMBERS;
    fv_strip_span span = fv_row_strip_span(strip, job, tile->first_key, tile->first, tile->end);
    if (span.first >= span.end) return;
    span.k_scales = tile->k_scales;
    span.v_scales = tile->v_scales;
    span.scale = scale;

    fv_strip_scores(scratch->scores, scratch->keys, depth, strip->q, span.first, span.end, depth, DEPTH,
                    strip->num_vectors, tile->ahead);
    fv_row_strip_softmax(strip, scratch->scores, &span);
    fv_many_pack_weights(scratch->scores, span.first, span.end, fv_row_strip_width(strip));

    const int32_t first = span.first / FV_STRIP_NUMBERS;
    const int32_t end = (int32_t)fv_ceil_div(span.end, FV_STRIP_NUMBERS);
    const int32_t has_others = span.is_edge || (span.first | span.end) % FV_STRIP_NUMBERS != 0;
    const fv_strip_values values = {scratch->values, FV_STRIP_PANEL,
                                    params->tile_keys / FV_STRIP_NUMBERS * FV_STRIP_PANEL};
    fv_strip_accumulate(strip->sums, num_columns_of(params), scratch->scores, strip->rescale, &values, first, end,
                        strip->num_vectors, has_others && tile->not_finite);
}

static void attend_head(const fv_attend_job *job, const many_scratch *scratch, int32_t kv_head)
{
    const fv_attend_params *params = job->params;
    const int32_t num_columns = num_columns_of(params);
    const int32_t num_strips = (job->num_rows + FV_STRIP_ROWS - 1) / FV_STRIP_ROWS;
    for (int32_t i = 0; i < num_strips; i++) {
        fv_row_strip *strip = &scratch->strips[i];
        const int32_t first_row = i * FV_STRIP_ROWS;
        const int32_t num_rows = fv_min_i32(job->num_rows - first_row, FV_STRIP_ROWS);
        strip->q = scratch->q + (int64_t)first_row * (params->head_size / FV_STRIP_NUMBERS);
        strip->sums = scratch->sums + (int64_t)first_row * num_columns;
        fv_row_strip_init(strip, job, kv_head, first_row, fv_strip_num_vectors(num_rows));
        fv_row_strip_pack_queries(strip, job, kv_head);
    }
    memset(scratch->sums, 0, (size_t)(fv_round_up(job->num_rows, FV_STRIP_LANES) * num_columns) * sizeof(float));

    const fv_score_scale scale = fv_attend_score_scale(job, kv_head);
    for (int32_t first_key = job->keys.first / params->tile_keys * params->tile_keys; first_key < job->keys.end;
         first_key += params->tile_keys) {
        many_tile tile = tile_at(job, first_key);
        load_tile(scratch, &tile, job, kv_head);
        const many_tile next = tile_at(job, first_key + params->tile_keys);
        fv_prefetch_stream stream;
        fv_strip_ahead ahead = aim_ahead(&stream, scratch, &next, job, kv_head);
        tile.ahead = &ahead;
        for (int32_t i = 0; i < num_strips; i++) attend_tile_strip(scratch, &scratch->strips[i], &tile, job, scale);
    }

    for (int32_t row = 0; row < job->num_rows; row++) {
        const fv_row_strip *strip = &scratch->strips[row / FV_STRIP_ROWS];
        const int32_t in_strip = row % FV_STRIP_ROWS;
        const float *sums = fv_many_sums_in_lanes(scratch->copy, strip->sums + (int64_t)in_strip * num_columns,
                                                  num_columns, job->lane_dtype);
        fv_attend_finish_row(job, kv_head, row, sums, strip->max[in_strip], strip->sum[in_strip]);
    }
}

#if defined(FV_HAS_PAIRS)
/* 1: bf16 has the numbers of a source exactly, and they are loaded in natural order. */
static int32_t is_exact(const fv_attend_job *job, const fv_key_source *source)
{
    if (source->stored != FV_DTYPE_BF16 && fv_dtype_bytes(source->stored) != 1) return 0;
    return source->shared_size % 16 == 0 && (source->dtype == source->stored || job->lane_dtype != FV_DTYPE_BF16);
}

/* Scales of single values are not served: they would be in the weights, and rounded with them. */
int32_t FV_ISA_SYMBOL(fv_attend_many_serves)(const fv_attend_job *job)
{
    const fv_attend_params *params = job->params;
#if !defined(FV_PAIRS_EMULATED)
    if (!params->multiplies_pairs) return 0;
#endif
    if (params->q_dtype != FV_DTYPE_BF16 || job->has_v_scales) return 0;
    if (params->head_size % 16 != 0 || params->v_head_size % 16 != 0) return 0;
    if (params->cache.dtype != FV_DTYPE_NONE && !is_exact(job, &job->cache)) return 0;
    return !params->dense.k || is_exact(job, &job->dense);
}
#else
int32_t FV_ISA_SYMBOL(fv_attend_many_serves)(const fv_attend_job *job) { return job != NULL; }
#endif

void FV_ISA_SYMBOL(fv_attend_many_rows)(const fv_attend_job *job, void *memory)
{
    const many_scratch scratch = many_scratch_of(job->params, job->num_rows, memory);
    for (int32_t head = 0; head < job->item->num_kv_heads; head++) {
        attend_head(job, &scratch, job->item->first_kv_head + head);
    }
}
