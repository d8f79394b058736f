/* attend_paged for 13 to 16 rows of a KV head over bf16: verification of four tokens, decode with as many query heads for each KV
 * head. AVX2 alone has it (docs/notes/cpu-portable.md).
 *
 * So many rows are bound by arithmetic. They are one strip, one row to a lane (row_strip.h): an element of a key is broadcast
 * once for all rows, and nothing is summed across lanes:
 *
 *   scores^T [key][row]  = K [key][d]     times  Q^T [d][row]     4 keys x 16 rows in registers
 *   sums     [row][col] += P^T [key][row] times  V [key][col]     up to 6 rows x 16 columns
 *
 * Keys and values are read where they lie and converted in registers, by units that multiply nothing. As for fewer rows
 * (attend_few_rows.c) the item's KV heads are served in turn for each tile of keys, and the memory of the next tile is asked for
 * between the products. */
#include "kernels/cpu/attend_one_strip.h"

#if FV_HAS_ONE_STRIP
#define FV_FEW_HAS_ORDERS 1
#include "kernels/cpu/few_tile.h"
#include "kernels/cpu/row_strip.h"

enum {
    WIDTH = FV_DECODE_ROWS,
    LEAST_ROWS = 13, /* fewer leave too many lanes empty */
    VECTORS = WIDTH / FV_LANES,
    STEP_KEYS = 4,
    STEP_ROWS = 6, /* at most */
    STEP_COLUMNS = 16,
    STEP_DEPTH = 16,        /* elements of keys between two requests for memory */
    TILE_BYTES = 128 * 1024 /* of K and V, all heads: twice those of fewer rows, so that sums pass half as often */
};

typedef struct one_scratch {
    fv_row_strip *strips; /* [heads] */
    float *q;             /* [heads][D][WIDTH] */
    float *sums;          /* [heads][WIDTH][Dv], lane order */
    float *scores;        /* [tile, and STEP_KEYS more][WIDTH] */
    fv_few_tables tables;
    size_t bytes;
} one_scratch;

typedef struct one_item {
    const fv_attend_job *job;
    one_scratch scratch;
} one_item;

static one_scratch one_scratch_of(const fv_attend_params *params, void *memory)
{
    const size_t heads = (size_t)params->num_kv_heads, tile = (size_t)params->tile_keys;
    const size_t k_size = (size_t)params->head_size, v_size = (size_t)params->v_head_size;
    one_scratch scratch = {0};
    scratch.strips = fv_scratch_take(memory, &scratch.bytes, heads * sizeof(fv_row_strip));
    scratch.q = fv_scratch_take(memory, &scratch.bytes, heads * k_size * WIDTH * sizeof(float));
    scratch.sums = fv_scratch_take(memory, &scratch.bytes, heads * WIDTH * v_size * sizeof(float));
    scratch.scores = fv_scratch_take(memory, &scratch.bytes, (tile + STEP_KEYS) * WIDTH * sizeof(float));
    scratch.tables = fv_few_tables_of(params, memory, &scratch.bytes);
    return scratch;
}

size_t FV_ISA_SYMBOL(fv_attend_one_strip_scratch)(const fv_attend_params *params)
{
    return one_scratch_of(params, NULL).bytes;
}

int32_t FV_ISA_SYMBOL(fv_attend_one_strip_serves)(const fv_attend_job *job, int64_t num_rows)
{
    const fv_attend_params *params = job->params;
    if (num_rows < LEAST_ROWS || num_rows > WIDTH) return 0;
    if (params->head_size % STEP_DEPTH != 0 || params->v_head_size % STEP_COLUMNS != 0) return 0;
    return fv_few_reads_bf16(job);
}

static void head_init(const one_item *one, int32_t head)
{
    const fv_attend_params *params = one->job->params;
    const int32_t kv_head = one->job->item->first_kv_head + head;
    fv_row_strip *strip = &one->scratch.strips[head];
    strip->q = one->scratch.q + (int64_t)head * params->head_size * WIDTH;
    strip->sums = one->scratch.sums + (int64_t)head * WIDTH * params->v_head_size;
    fv_row_strip_init(strip, one->job, kv_head, 0, VECTORS);
    fv_row_strip_pack_queries(strip, one->job, kv_head);
    memset(strip->sums, 0, (size_t)WIDTH * (size_t)params->v_head_size * sizeof(float));
}

/* --- scores = K Q^T ------------------------------------------------------------------------------------------ */

/* The elements in pairs of bf16 from k[j] on, each a word of `bytes`, with those of the strip's queries: in lane order the even
 * ones of 16, then the odd ones. */
FV_ALWAYS_INLINE void score_depth(fv_f32x8 acc[STEP_KEYS * VECTORS], const char *const k[STEP_KEYS], int64_t bytes,
                                  const float *q)
{
    for (int32_t i = 0; i < STEP_DEPTH / 2; i++, bytes += 4, q += WIDTH) {
        fv_u32x8 pairs[STEP_KEYS];
        FV_UNROLL
        for (int32_t j = 0; j < STEP_KEYS; j++) {
            float pair;
            memcpy(&pair, k[j] + bytes, sizeof(pair));
            pairs[j] = (fv_u32x8)fv_in_register(fv_splat(pair));
        }
        FV_UNROLL
        for (int32_t half = 0; half < 2; half++) {
            fv_f32x8 rows[VECTORS];
            FV_UNROLL
            for (int32_t v = 0; v < VECTORS; v++)
                rows[v] = fv_in_register(fv_load_f32(q + half * FV_LANES * WIDTH + v * FV_LANES));
            FV_UNROLL
            for (int32_t j = 0; j < STEP_KEYS; j++) {
                const fv_f32x8 element = (fv_f32x8)(half ? pairs[j] & 0xffff0000u : pairs[j] << 16);
                FV_UNROLL
                for (int32_t v = 0; v < VECTORS; v++)
                    acc[j * VECTORS + v] = fv_fma_onto(acc[j * VECTORS + v], element, rows[v]);
            }
        }
    }
}

/* Of the span's keys; the last step may have its last key again. */
static void score(const one_item *one, const fv_row_strip *strip, const fv_key_rows *rows, const fv_strip_span *span,
                  fv_strip_ahead *ahead)
{
    for (int32_t key = span->first; key < span->end; key += STEP_KEYS) {
        float *scores = one->scratch.scores + key * WIDTH;
        const char *k[STEP_KEYS];
        fv_f32x8 acc[STEP_KEYS * VECTORS];
        for (int32_t j = 0; j < STEP_KEYS; j++) k[j] = rows->k[fv_min_i32(key + j, span->end - 1)] + rows->k_offset;
        FV_UNROLL
        for (int32_t i = 0; i < STEP_KEYS * VECTORS; i++) acc[i] = fv_splat(0.0f);
        for (int32_t d = 0; d < one->job->params->head_size; d += STEP_DEPTH) {
            fv_strip_ahead_ask(ahead, 1);
            score_depth(acc, k, d * fv_few_element_bytes(FV_DTYPE_BF16), strip->q + d * WIDTH);
        }
        FV_UNROLL
        for (int32_t i = 0; i < STEP_KEYS * VECTORS; i++) fv_store_f32(scores + i * FV_LANES, acc[i]);
    }
}

/* --- sums += P V --------------------------------------------------------------------------------------------- */

/* num_rows rows x 16 columns, which begin `offset` bytes behind rows->v; masked: a weight of 0 hides its value, be it infinite
 * or NaN. */
FV_ALWAYS_INLINE void add_rows(float *sums, int32_t num_columns, const float *weights, const float *rescale,
                               const fv_key_rows *rows, int64_t offset, int32_t first, int32_t end,
                               const int32_t num_rows, const int32_t masked)
{
    fv_f32x8 acc[STEP_ROWS][2];
    FV_UNROLL
    for (int32_t r = 0; r < num_rows; r++) {
        FV_UNROLL
        for (int32_t u = 0; u < 2; u++) {
            acc[r][u] = fv_load_f32(sums + r * num_columns + u * FV_LANES);
            if (rescale) acc[r][u] *= rescale[r];
        }
    }
    for (int32_t key = first; key < end; key++) {
        const fv_f32x16 value = fv_load16(rows->v[key] + offset, FV_DTYPE_BF16);
        FV_UNROLL
        for (int32_t r = 0; r < num_rows; r++) {
            const fv_f32x8 weight = fv_splat(weights[key * WIDTH + r]);
            acc[r][0] = fv_fma(weight, masked ? fv_strip_seen(value.a, weight) : value.a, acc[r][0]);
            acc[r][1] = fv_fma(weight, masked ? fv_strip_seen(value.b, weight) : value.b, acc[r][1]);
        }
    }
    FV_UNROLL
    for (int32_t r = 0; r < num_rows; r++) {
        FV_UNROLL
        for (int32_t u = 0; u < 2; u++) fv_store_f32(sums + r * num_columns + u * FV_LANES, acc[r][u]);
    }
}

static int32_t keeps_sums(const fv_row_strip *strip)
{
    for (int32_t i = 0; i < WIDTH; i++)
        if (strip->rescale[i] != 1.0f) return 0;
    return 1;
}

/* 16 rows are 6, 5 and 5. */
static void accumulate(const one_item *one, const fv_row_strip *strip, const fv_key_rows *rows,
                       const fv_strip_span *span, fv_strip_ahead *ahead)
{
    const int32_t size = one->job->params->v_head_size, keeps = keeps_sums(strip);
    for (int32_t d = 0; d < size; d += STEP_COLUMNS) {
        const int64_t offset = rows->v_offset + d * fv_few_element_bytes(FV_DTYPE_BF16);
        for (int32_t row = 0, num; row < WIDTH; row += num) {
            num = row == 0 ? STEP_ROWS : STEP_ROWS - 1;
            fv_strip_ahead_ask(ahead, 1);
#define ADD(ROWS, MASKED)                                                            \
    add_rows(strip->sums + (int64_t)row * size + d, size, one->scratch.scores + row, \
             keeps ? NULL : strip->rescale + row, rows, offset, span->first, span->end, ROWS, MASKED)
            switch (2 * num + span->is_edge) {
            case 2 * STEP_ROWS: ADD(STEP_ROWS, 0); break;
            case 2 * STEP_ROWS + 1: ADD(STEP_ROWS, 1); break;
            case 2 * STEP_ROWS - 2: ADD(STEP_ROWS - 1, 0); break;
            default: ADD(STEP_ROWS - 1, 1); break;
            }
#undef ADD
        }
    }
}

/* --- the item ------------------------------------------------------------------------------------------------- */

/* Lines of the next tile for each request, so that the requests of all heads have asked for all of it: it is as long as this. */
static int32_t lines_of_request(const fv_attend_params *params, int32_t num_keys)
{
    const int64_t bytes = num_keys * (params->head_size + params->v_head_size) * fv_few_element_bytes(FV_DTYPE_BF16);
    const int64_t num_requests = fv_ceil_div(num_keys, STEP_KEYS) * (params->head_size / STEP_DEPTH) +
                                 fv_ceil_div(WIDTH, STEP_ROWS) * (params->v_head_size / STEP_COLUMNS);
    return (int32_t)fv_ceil_div(bytes, FV_CACHE_LINE * num_requests);
}

static void attend_tile_head(void *user, fv_few_tile *tile, int32_t head)
{
    const one_item *one = user;
    fv_row_strip *strip = &one->scratch.strips[head];
    fv_strip_span span = fv_row_strip_span(strip, one->job, tile->first_key, tile->first, tile->end);
    if (span.first >= span.end) return;
    span.k_scales = tile->k_scales;
    span.v_scales = tile->v_scales;
    span.scale = fv_attend_score_scale(one->job, one->job->item->first_kv_head + head);
    fv_strip_ahead ahead = {tile->rows.ahead, lines_of_request(one->job->params, tile->end - tile->first)};
    score(one, strip, &tile->rows, &span, &ahead);
    fv_row_strip_softmax(strip, one->scratch.scores, &span);
    accumulate(one, strip, &tile->rows, &span, &ahead);
}

static void finish_head(const one_item *one, int32_t head)
{
    const fv_row_strip *strip = &one->scratch.strips[head];
    for (int32_t row = 0; row < one->job->num_rows; row++)
        fv_attend_finish_row(one->job, one->job->item->first_kv_head + head, row,
                             strip->sums + (int64_t)row * one->job->params->v_head_size, strip->max[row],
                             strip->sum[row]);
}

void FV_ISA_SYMBOL(fv_attend_one_strip)(const fv_attend_job *job, const fv_attend_job *next_job, void *memory)
{
    one_item one = {.job = job, .scratch = one_scratch_of(job->params, memory)};
    const fv_few_keys keys = {job, &one.scratch.tables, fv_few_tile_keys(job->params, job->lane_dtype, TILE_BYTES)};
    for (int32_t head = 0; head < job->item->num_kv_heads; head++) head_init(&one, head);
    fv_few_keys_walk(&keys, next_job, attend_tile_head, &one);
    for (int32_t head = 0; head < job->item->num_kv_heads; head++) finish_head(&one, head);
}
#endif
