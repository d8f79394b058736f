/* mla_decode for many rows, query tokens x heads, all of which share one KV head.
 *
 * Bound by arithmetic: 2 (576 + 512) operations for each row and key, against 1152 bytes for a key of all rows.
 * Each tile of latents is converted to fp32 once, rotated if need be, and then met by all rows as keys and, its
 * first columns, as values. Rows go in strips of up to 24, one to a lane (48 on AVX-512; row_strip.h, strip_product.h):
 *
 *   latents of a tile  64 x 576 floats    144 KB    stay in L2 while the strips pass
 *   Q^T of a strip     96 x  24 floats      9 KB    stay in L1 while the tile's keys pass
 *   scores of a strip  64 x  24 floats      6 KB    stay in L1
 *   sums               rows x 512 floats            pass once for each tile; rescaled in place where a maximum grew
 *
 * The entries of the next tile are prefetched a few lines at a time during the first product, all of them twice, for some
 * prefetches are dropped: blocks of one token lie anywhere, and their latency would be a tenth of the time. */
#include "kernels/cpu/latent_rows.h"
#include "kernels/cpu/mla_decode_rows.h"
#include "kernels/cpu/row_strip.h"

enum { ASKS = 2 }; /* for each line of the next tile */

typedef struct mla_scratch {
    fv_row_strip *strips;
    float *q;       /* of each strip [D][width] */
    float *sums;    /* [rows][num_columns] */
    float *latents; /* [tile][stride] */
    float *scores;  /* [tile][rows of a strip] */
    float *copy;    /* one row */
    const char **addresses;
    const char **next_rows; /* [ASKS * tile] entries of the next tile, all of them ASKS times */
    int32_t stride;
    int32_t num_columns;
    size_t bytes;
} mla_scratch;

/* A tile of keys; indices count from first_key. */
typedef struct latent_tile {
    int32_t first_key;
    int32_t first, end;
    int32_t not_finite;    /* some element is infinite or NaN: weight 0 has to be kept from it */
    fv_strip_ahead *ahead; /* the next tile */
} latent_tile;

static mla_scratch mla_scratch_of(const fv_attend_params *params, int32_t num_rows, void *memory)
{
    const size_t rows = (size_t)fv_round_up(num_rows, FV_STRIP_LANES);
    const size_t tile = (size_t)params->tile_keys;
    mla_scratch scratch = {
        .stride = (int32_t)fv_round_up(params->head_size, FV_STRIP_PANEL),
        .num_columns = (int32_t)fv_round_up(params->v_head_size, FV_STRIP_PANEL),
    };
    const size_t row_bytes = (size_t)scratch.stride * sizeof(float);
    const size_t num_strips = (rows + FV_STRIP_ROWS - 1) / FV_STRIP_ROWS;
    scratch.strips = fv_scratch_take(memory, &scratch.bytes, num_strips * sizeof(fv_row_strip));
    scratch.q = fv_scratch_take(memory, &scratch.bytes, rows * (size_t)params->head_size * sizeof(float));
    scratch.sums = fv_scratch_take(memory, &scratch.bytes, rows * (size_t)scratch.num_columns * sizeof(float));
    scratch.latents = fv_scratch_take(memory, &scratch.bytes, tile * row_bytes);
    scratch.scores = fv_scratch_take(memory, &scratch.bytes, tile * FV_STRIP_ROWS * sizeof(float));
    scratch.copy = fv_scratch_take(memory, &scratch.bytes, row_bytes);
    scratch.addresses = fv_scratch_take(memory, &scratch.bytes, tile * sizeof(char *));
    scratch.next_rows = fv_scratch_take(memory, &scratch.bytes, ASKS * tile * sizeof(char *));
    return scratch;
}

size_t FV_ISA_SYMBOL(fv_mla_many_scratch)(const fv_attend_params *params)
{
    const int32_t num_rows = fv_max_i32(params->block_q * params->num_heads, FV_DECODE_ROWS);
    return mla_scratch_of(params, num_rows, NULL).bytes;
}

static int32_t begin_strips(const mla_scratch *scratch, const fv_attend_job *job)
{
    const int32_t num_strips = (job->num_rows + FV_STRIP_ROWS - 1) / FV_STRIP_ROWS;
    for (int32_t i = 0; i < num_strips; i++) {
        fv_row_strip *strip = &scratch->strips[i];
        const int32_t first_row = i * FV_STRIP_ROWS;
        const int32_t num_rows = fv_min_i32(job->num_rows - first_row, FV_STRIP_ROWS);
        strip->q = scratch->q + (int64_t)first_row * job->params->head_size;
        strip->sums = scratch->sums + (int64_t)first_row * scratch->num_columns;
        fv_row_strip_init(strip, job, 0, first_row, fv_strip_num_vectors(num_rows));
        fv_row_strip_pack_queries(strip, job, 0);
    }
    memset(scratch->sums, 0,
           (size_t)(fv_round_up(job->num_rows, FV_STRIP_LANES) * scratch->num_columns) * sizeof(float));
    return num_strips;
}

static void rescale_sums(const fv_row_strip *strip, int32_t num_columns)
{
    for (int32_t row = 0; row < fv_row_strip_width(strip); row++) {
        const float factor = strip->rescale[row];
        float *sums = strip->sums + (int64_t)row * num_columns;
        if (factor == 1.0f) continue;
        for (int32_t d = 0; d < num_columns; d += FV_LANES) fv_store_f32(sums + d, fv_load_f32(sums + d) * factor);
    }
}

/* The tile that starts at `first_key`; empty behind the item's keys. */
static latent_tile tile_at(const fv_attend_job *job, int32_t first_key)
{
    return (latent_tile){
        .first_key = first_key,
        .first = fv_max_i32(job->keys.first - first_key, 0),
        .end = fv_min_i32(job->keys.end - first_key, job->params->tile_keys),
    };
}

/* The memory of a tile. */
static fv_strip_ahead aim_ahead(fv_prefetch_stream *stream, const mla_scratch *scratch, const latent_tile *tile,
                                const fv_attend_job *job)
{
    const fv_attend_params *params = job->params;
    const fv_kv_view *cache = &params->cache;
    if (tile->first >= tile->end) return (fv_strip_ahead){0};
    fv_attend_find_rows(scratch->next_rows, job, &cache->k, tile->first_key + tile->first, tile->first_key + tile->end);
    const int32_t num_keys = tile->end - tile->first;
    for (int32_t i = num_keys; i < ASKS * num_keys; i++) scratch->next_rows[i] = scratch->next_rows[i - num_keys];
    const fv_prefetch_rows rows = {
        .rows = {scratch->next_rows},
        .num_planes = 1,
        .num_heads = 1,
        .row_bytes = cache->layout == FV_KV_LAYOUT_LATENT_FP8_DS
                         ? FV_DS_ENTRY_BYTES
                         : params->head_size * (int64_t)fv_dtype_bytes(cache->dtype),
        .end = ASKS * num_keys,
    };
    const int64_t num_lines = rows.end * fv_ceil_div(rows.row_bytes, FV_CACHE_LINE);
    return fv_strip_aim(stream, &rows, num_lines,
                        fv_strip_num_steps(job->num_rows, params->tile_keys, params->head_size, FV_STRIP_DEPTH));
}

static void attend_tile_strip(const mla_scratch *scratch, fv_row_strip *strip, const latent_tile *tile,
                              const fv_attend_job *job, fv_score_scale scale)
{
    fv_strip_span span = fv_row_strip_span(strip, job, tile->first_key, tile->first, tile->end);
    if (span.first >= span.end) return;
    span.scale = scale;

    fv_strip_scores(scratch->scores, scratch->latents, scratch->stride, strip->q, span.first, span.end,
                    job->params->head_size, FV_STRIP_DEPTH, strip->num_vectors, tile->ahead);
    fv_row_strip_softmax(strip, scratch->scores, &span);
    rescale_sums(strip, scratch->num_columns);
    const fv_strip_values values = fv_strip_values_of_rows(scratch->latents, scratch->stride);
    fv_strip_accumulate(strip->sums, scratch->num_columns, scratch->scores, NULL, &values, span.first, span.end,
                        strip->num_vectors, span.is_edge && tile->not_finite);
}

static void finish_rows(const mla_scratch *scratch, const fv_attend_job *job)
{
    for (int32_t row = 0; row < job->num_rows; row++) {
        const fv_row_strip *strip = &scratch->strips[row / FV_STRIP_ROWS];
        const int32_t in_strip = row % FV_STRIP_ROWS;
        fv_attend_finish_row(job, 0, row, scratch->sums + (int64_t)row * scratch->num_columns, strip->max[in_strip],
                             strip->sum[in_strip]);
    }
}

void FV_ISA_SYMBOL(fv_mla_many_rows)(const fv_attend_job *of_item, void *memory)
{
    fv_attend_job job = *of_item;
    job.lane_dtype = FV_DTYPE_F32; /* latents come in natural order, and scaled */
    job.k_head_scale = job.v_head_scale = NULL;

    const int32_t tile_keys = job.params->tile_keys;
    const fv_score_scale scale = fv_attend_score_scale(&job, 0);
    const mla_scratch scratch = mla_scratch_of(job.params, job.num_rows, memory);
    const int32_t num_strips = begin_strips(&scratch, &job);
    for (int32_t first_key = job.keys.first / tile_keys * tile_keys; first_key < job.keys.end; first_key += tile_keys) {
        latent_tile tile = tile_at(&job, first_key);
        tile.not_finite = fv_latents_load(scratch.latents + (int64_t)tile.first * scratch.stride, scratch.stride,
                                          scratch.addresses, scratch.copy, &job, first_key + tile.first,
                                          first_key + tile.end);
        const latent_tile next = tile_at(&job, first_key + tile_keys);
        fv_prefetch_stream stream;
        fv_strip_ahead ahead = aim_ahead(&stream, &scratch, &next, &job);
        tile.ahead = &ahead;
        for (int32_t i = 0; i < num_strips; i++) attend_tile_strip(&scratch, &scratch.strips[i], &tile, &job, scale);
    }
    finish_rows(&scratch, &job);
}
