/* attend_paged for most of the few rows of a KV head, and for some more of them: verification, decode with many query heads for
 * each KV head (docs/notes/cpu-portable.md, cpu-avx512.md, "Zen 5"). By pairs of bf16 (one_strip_pairs.h), by bf16 that is converted
 * in registers (one_strip_floats.h), or over panels of fp32 (one_strip_panels.h).
 *
 * So many rows are bound by arithmetic. They are one strip, one row to a lane (row_strip.h): an element of a key is broadcast
 * once for all rows, and nothing is summed across lanes. Keys and values are read where they lie. As for fewer rows
 * (attend_few_rows.c) the item's KV heads are served in turn for each tile of keys, and the memory of the next tile is asked for
 * between the products. */
#include "kernels/cpu/attend_one_strip.h"

#if FV_HAS_ONE_STRIP
#define FV_FEW_HAS_ORDERS 1
#if defined(FV_HAS_PAIRS)
#define HAS_REGISTERS 1
#define FV_PREFETCH_ASKS 2
#define FV_FEW_LEAST_RUN_BYTES 4096
#include "kernels/cpu/one_strip_bytes.h"
#include "kernels/cpu/one_strip_pieces.h"

static int32_t fv_one_serves(const fv_attend_job *job, int64_t num_rows)
{
    return fv_few_reads_bf16(job) || fv_one_reads_pieces(job) || fv_one_reads_bytes(job, num_rows);
}
#elif defined(__AVX512F__)
#define HAS_PANELS 1
#include "kernels/cpu/one_strip_wide.h"
#else
#define HAS_PANELS 1
#define HAS_REGISTERS 1
#include "kernels/cpu/one_strip_floats.h"
#endif

enum { TILE_BYTES = 128 * 1024 /* of K and V, all heads: so that sums pass seldom */ };

typedef struct one_scratch {
    fv_row_strip *strips; /* [heads] */
    float *q;             /* [heads][D][width] */
    float *sums;          /* [heads][width][Dv], lane order; of a cache in pieces [heads][Dv][width] */
    float *scores;        /* [tile, and FV_ONE_STEP_KEYS more][width] */
    float *row;           /* [Dv] */
#if HAS_PANELS
    float *panels; /* [D or Dv / 16][tile][16], and as many more as fill up a step */
#endif
    fv_few_tables tables;
    size_t bytes;
} one_scratch;

typedef struct one_item {
    const fv_attend_job *job;
    one_scratch scratch;
    int32_t width; /* rows of the strip, those that pad it too */
    int32_t tile_keys;
    int32_t in_panels, in_pieces, of_bytes;
} one_item;

static one_scratch one_scratch_of(const fv_attend_params *params, int32_t num_rows, void *memory)
{
    const size_t heads = (size_t)params->num_kv_heads, tile = (size_t)params->tile_keys;
    const size_t width = (size_t)fv_one_num_vectors(num_rows) * FV_STRIP_LANES;
    const size_t k_size = (size_t)params->head_size, v_size = (size_t)params->v_head_size;
    one_scratch scratch = {0};
    scratch.strips = fv_scratch_take(memory, &scratch.bytes, heads * sizeof(fv_row_strip));
    scratch.q = fv_scratch_take(memory, &scratch.bytes, heads * k_size * width * sizeof(float));
    scratch.sums = fv_scratch_take(memory, &scratch.bytes, heads * width * v_size * sizeof(float));
    scratch.scores = fv_scratch_take(memory, &scratch.bytes, (tile + FV_ONE_STEP_KEYS) * width * sizeof(float));
    scratch.row = fv_scratch_take(memory, &scratch.bytes, v_size * sizeof(float));
#if HAS_PANELS
    const size_t widest = k_size > v_size ? k_size : v_size;
    scratch.panels = fv_scratch_take(memory, &scratch.bytes, (tile + FV_ONE_STEP_KEYS) * widest * sizeof(float));
#endif
    scratch.tables = fv_few_tables_of(params, memory, &scratch.bytes);
    return scratch;
}

size_t FV_ISA_SYMBOL(fv_attend_one_strip_scratch)(const fv_attend_params *params)
{
    const int32_t num_rows = params->block_q * (params->num_heads / params->num_kv_heads);
    return one_scratch_of(params, fv_max_i32(fv_min_i32(num_rows, FV_ONE_MOST_ROWS), FV_DECODE_ROWS), NULL).bytes;
}

/* 1: heads are whole steps of the products, which take such queries. */
static int32_t takes(fv_dtype q_dtype, int32_t head_size, int32_t v_head_size)
{
    return head_size % FV_ONE_STEP_DEPTH == 0 && v_head_size % FV_ONE_STEP_COLUMNS == 0 &&
           fv_one_takes_queries(q_dtype);
}

int32_t FV_ISA_SYMBOL(fv_attend_one_strip_serves)(const fv_attend_job *job, int64_t num_rows)
{
    const fv_attend_params *params = job->params;
    if (num_rows < fv_one_least_rows(params) || num_rows > fv_one_most_rows(params)) return 0;
    if (!takes(params->q_dtype, params->head_size, params->v_head_size)) return 0;
    return fv_one_serves(job, num_rows);
}

/* By the strips of this level. */
static int32_t own_shared_rows(const fv_problem *problem)
{
    const fv_mha_shape *mha = &problem->mha;
    const int32_t v_head_size = mha->v_head_size ? mha->v_head_size : mha->head_size;
    if (!takes(problem->q_dtype, mha->head_size, v_head_size)) return FV_DECODE_ROWS;
    return fv_one_shares_heads(problem) ? fv_one_shared_rows() : FV_DECODE_ROWS;
}

int32_t FV_ISA_SYMBOL(fv_attend_one_strip_shared_rows)(const fv_problem *problem)
{
    const int32_t rows = own_shared_rows(problem);
#if FV_BASE_HAS_ONE_STRIP
    return fv_max_i32(rows, FV_BASE_SYMBOL(fv_attend_one_strip_shared_rows)(problem));
#else
    return rows;
#endif
}

static void head_init(const one_item *one, int32_t head)
{
    const fv_attend_params *params = one->job->params;
    const int32_t kv_head = one->job->item->first_kv_head + head;
    fv_row_strip *strip = &one->scratch.strips[head];
    strip->q = one->scratch.q + (int64_t)head * params->head_size * one->width;
    strip->sums = one->scratch.sums + (int64_t)head * one->width * params->v_head_size;
    fv_row_strip_init(strip, one->job, kv_head, 0, one->width / FV_STRIP_LANES);
    fv_row_strip_pack_queries(strip, one->job, kv_head);
    memset(strip->sums, 0, (size_t)one->width * (size_t)params->v_head_size * sizeof(float));
}

/* --- the item ------------------------------------------------------------------------------------------------- */

#if HAS_PANELS
static void attend_panels(const one_item *one, fv_row_strip *strip, const fv_few_tile *tile, const fv_strip_span *span)
{
    const fv_attend_params *params = one->job->params;
    const fv_key_rows *rows = &tile->rows;
    const fv_panels panels = {one->scratch.panels, one->tile_keys};
    fv_strip_ahead ahead = fv_panels_ahead(rows, params, tile->end - tile->first, one->job->num_rows);
    fv_panels_make(&panels, rows->k, rows->k_offset, span, params->head_size, tile->source->dtype);
    fv_panels_score(one->scratch.scores, strip, &panels, span, &ahead);
    fv_row_strip_softmax(strip, one->scratch.scores, span);
    fv_panels_make(&panels, rows->v, rows->v_offset, span, params->v_head_size, tile->source->dtype);
    fv_panels_add(one->scratch.scores, strip, &panels, span, &ahead);
}
#endif

#if HAS_REGISTERS
static void attend_in_place(const one_item *one, fv_row_strip *strip, fv_few_tile *tile, const fv_strip_span *span)
{
#if defined(FV_HAS_PAIRS)
    if (one->of_bytes) fv_one_make_rows(tile, &one->scratch.tables, one->job, span->first, span->end);
#endif
    fv_strip_ahead ahead = fv_one_ahead(&tile->rows, one->job->params, tile->end - tile->first);
    fv_one_score(one->scratch.scores, strip, &tile->rows, span, &ahead);
    fv_row_strip_softmax(strip, one->scratch.scores, span);
    fv_one_accumulate(one->scratch.scores, strip, &tile->rows, span, &ahead);
}
#endif

static void attend_tile_head(void *user, fv_few_tile *tile, int32_t head)
{
    const one_item *one = user;
    fv_row_strip *strip = &one->scratch.strips[head];
    fv_strip_span span = fv_row_strip_span(strip, one->job, tile->first_key, tile->first, tile->end);
    if (span.first >= span.end) return;
    span.k_scales = tile->k_scales;
    span.v_scales = tile->v_scales;
    span.scale = fv_attend_score_scale(one->job, one->job->item->first_kv_head + head);
#if HAS_PANELS
    if (one->in_panels) {
        attend_panels(one, strip, tile, &span);
        return;
    }
#endif
#if HAS_REGISTERS
    attend_in_place(one, strip, tile, &span);
#endif
}

static void finish_head(const one_item *one, int32_t head)
{
    const fv_row_strip *strip = &one->scratch.strips[head];
    const int32_t size = one->job->params->v_head_size;
    for (int32_t row = 0; row < one->job->num_rows; row++) {
        const float *sums = fv_one_sums_in_lanes(one->scratch.row, strip, row, size, one->job->lane_dtype,
                                                 one->in_pieces);
        fv_attend_finish_row(one->job, one->job->item->first_kv_head + head, row, sums, strip->max[row],
                             strip->sum[row]);
    }
}

void FV_ISA_SYMBOL(fv_attend_one_strip)(const fv_attend_job *job, const fv_attend_job *next_job, void *memory)
{
    one_item one = {
        .job = job,
        .scratch = one_scratch_of(job->params, job->num_rows, memory),
        .width = fv_one_num_vectors(job->num_rows) * FV_STRIP_LANES,
        .in_panels = fv_one_in_panels(job),
        .in_pieces = fv_one_reads_pieces(job),
        .of_bytes = fv_dtype_bytes(job->cache.stored) == 1, /* where there is a cache */
    };
#if HAS_PANELS
    const fv_dtype tile_dtype = one.in_panels ? fv_panels_tile_dtype(job) : job->lane_dtype;
#else
    const fv_dtype tile_dtype = job->lane_dtype;
#endif
    const int32_t tile_keys = fv_few_tile_keys(job->params, tile_dtype, TILE_BYTES);
    const fv_few_keys keys = {
        .job = job,
        .tables = &one.scratch.tables,
        .tile_keys = one.in_pieces ? fv_max_i32(tile_keys, job->params->cache.block_size) : tile_keys,
        .in_pieces = one.in_pieces,
    };
    one.tile_keys = keys.tile_keys;
#if defined(FV_HAS_PAIRS)
    if (one.of_bytes) fv_one_find_copies(&one.scratch.tables, job, keys.tile_keys);
#endif
    for (int32_t head = 0; head < job->item->num_kv_heads; head++) head_init(&one, head);
    fv_few_keys_walk(&keys, next_job, attend_tile_head, &one);
    for (int32_t head = 0; head < job->item->num_kv_heads; head++) finish_head(&one, head);
}
#endif
