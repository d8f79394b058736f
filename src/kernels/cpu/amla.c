/* AMLA: absorbed MLA decode that rescales its output by integer additions (arXiv 2509.25224, section 3 and
 * appendix A). Keys come in blocks of tile_keys; Q, S, P and O have a row for each query token and head.
 *
 *   block i, per row      Base                          AMLA
 *   [C1]  S    =          scale Q K_i^T
 *   [V1]  m_i  =          max(m_{i-1}, max S)           the same: the maximum stays exact
 *         P    =          e^(S - m_i)
 *         l    =          l e^(m_{i-1} - m_i) + sum P
 *                                                       n_i = round(-m_i / ln 2), r_i = e^(m_i + n_i ln 2)
 *                                                       s_i = bf16(r_i), gamma_i = r_i / s_i
 *         P^   =          bf16(P)                       bf16(s_i P)
 *   [V2]  O   *=          e^(m_{i-1} - m_i)             2^(n_i - n_{i-1}) gamma_{i-1} / gamma_i, by
 *                                                       bits(O) += round((n_i - n_{i-1} + eps_i) 2^23),
 *                                                       eps_i = 1.5 (gamma_{i-1} / gamma_i - 1)
 *   [C2]  O   +=          P^ V_i
 *   end   out  =          O / l                         O / (s l)
 *
 * r_i lies in [1/sqrt 2, sqrt 2]. It cannot go into P unrounded, for 1 and the other numbers that bf16 holds
 * would be rounded too; s_i is the part of it that can, gamma_i = 1 + O(2^-8) is what the addition takes in beside
 * the power of two. Without the compensation s_i = r_i and gamma_i = 1. The row sum and the LSE are Base's.
 *
 * bf16 stands for the type of the queries, to which P is rounded for its product; fp32 is not rounded at all.
 * Scores are in base 2, so that ln 2 is 1 and n_i = -round(m_i). n is a float, for a score may exceed any integer.
 * Products are summed in fp32. */
#include "kernels/cpu/amla.h"

#include "kernels/cpu/amla_scale.h"
#include "kernels/cpu/latent_rows.h"
#include "kernels/cpu/row_strip.h"

enum { CHUNK_KEYS = 64 }; /* keys that stay in L2 while all rows meet them */

/* Up to FV_STRIP_ROWS rows, one to a lane, and beside their maxima m and sums l what the scale of their output hangs on. */
typedef struct amla_strip {
    fv_row_strip rows; /* its sums are O */
    fv_amla_scale scale[FV_STRIP_ROWS / FV_LANES];
    int32_t addend[FV_STRIP_ROWS]; /* of the block at hand: what V2 adds to the bits of O; Base: rows.rescale */
    float *scores;                 /* S^T, then P^T, then P^^T [tile][width] */
} amla_strip;

typedef struct amla_scratch {
    amla_strip *strips;
    float *q;
    float *scores;
    float *out;
    float *latents; /* [tile][stride]: K, and in its first columns V */
    float *copy;    /* one row */
    const char **addresses;
    int32_t stride;
    int32_t num_columns; /* of O */
    size_t bytes;
} amla_scratch;

/* A block of keys; indices count from first_key. */
typedef struct key_block {
    int32_t first_key;
    int32_t first, end;
    int32_t not_finite; /* some value is infinite or NaN */
} key_block;

static amla_scratch amla_scratch_of(const fv_attend_params *params, int32_t num_rows, void *memory)
{
    const size_t rows = (size_t)fv_round_up(num_rows, FV_STRIP_LANES);
    const size_t tile = (size_t)params->tile_keys;
    amla_scratch scratch = {
        .stride = (int32_t)fv_round_up(params->head_size, FV_STRIP_PANEL),
        .num_columns = (int32_t)fv_round_up(params->v_head_size, FV_STRIP_PANEL),
    };
    const size_t row_bytes = (size_t)scratch.stride * sizeof(float);
    const size_t num_strips = (rows + FV_STRIP_ROWS - 1) / FV_STRIP_ROWS;
    scratch.strips = fv_scratch_take(memory, &scratch.bytes, num_strips * sizeof(amla_strip));
    scratch.q = fv_scratch_take(memory, &scratch.bytes, rows * row_bytes);
    scratch.scores = fv_scratch_take(memory, &scratch.bytes, rows * tile * sizeof(float));
    scratch.out = fv_scratch_take(memory, &scratch.bytes, rows * (size_t)scratch.num_columns * sizeof(float));
    scratch.latents = fv_scratch_take(memory, &scratch.bytes, tile * row_bytes);
    scratch.copy = fv_scratch_take(memory, &scratch.bytes, row_bytes);
    scratch.addresses = fv_scratch_take(memory, &scratch.bytes, tile * sizeof(char *));
    return scratch;
}

size_t FV_ISA_SYMBOL(fv_amla_scratch)(const fv_attend_params *params)
{
    const int32_t num_rows = params->block_q * (params->num_heads / params->num_kv_heads);
    return amla_scratch_of(params, fv_max_i32(num_rows, FV_DECODE_ROWS), NULL).bytes;
}

/* --- the stages of a block ----------------------------------------------------------------------------- */

/* The keys [first, end) of the block that some row of the strip sees. */
static fv_strip_span strip_span(const amla_strip *strip, const key_block *block, const fv_attend_job *job,
                                int32_t first, int32_t end)
{
    fv_strip_span span = fv_row_strip_span(&strip->rows, job, block->first_key, fv_max_i32(first, block->first),
                                           fv_min_i32(end, block->end));
    span.scale = fv_attend_score_scale(job, 0);
    return span;
}

/* C1: S = Q K_i^T. A function of its own, as C2 is, for compilers to find registers for its loop. */
__attribute__((noinline)) static void score_keys(const amla_scratch *scratch, const amla_strip *strip,
                                                 const fv_strip_span *span)
{
    fv_strip_ahead nothing = {0};
    fv_strip_scores(strip->scores, scratch->latents, scratch->stride, strip->rows.q, span->first, span->end,
                    span->job->params->head_size, FV_STRIP_DEPTH, strip->rows.num_vectors, &nothing);
}

/* V1: S to P^, and m, l, n, s, gamma. */
static void softmax(amla_strip *strip, const fv_strip_span *span, fv_rescaling rescaling)
{
    const fv_dtype dtype = span->job->params->q_dtype;
    const int32_t width = fv_row_strip_width(&strip->rows);
    float old_max[FV_STRIP_ROWS];
    memcpy(old_max, strip->rows.max, sizeof(old_max));
    fv_row_strip_softmax(&strip->rows, strip->scores, span);
    for (int32_t row = 0; row < width; row += FV_LANES) {
        fv_amla_scale *scale = &strip->scale[row / FV_LANES];
        if (rescaling != FV_RESCALING_MULTIPLY) {
            const fv_i32x8 addend = fv_amla_scale_move(scale, fv_load_f32(strip->rows.max + row),
                                                       fv_load_f32(old_max + row), dtype, rescaling);
            memcpy(strip->addend + row, &addend, sizeof(addend));
        }

        float *p = strip->scores + row;
        for (int32_t key = span->first; key < span->end; key++)
            fv_store_f32(p + key * width, fv_amla_round(scale->scale * fv_load_f32(p + key * width), dtype));
    }
}

/* V2: O to the new scale. */
static void rescale(const amla_strip *strip, int32_t num_columns, fv_rescaling rescaling)
{
    float *out = strip->rows.sums;
    for (int32_t row = 0; row < fv_row_strip_width(&strip->rows); row++, out += num_columns) {
        if (rescaling == FV_RESCALING_MULTIPLY) {
            const float factor = strip->rows.rescale[row];
            if (factor == 1.0f) continue;
            for (int32_t d = 0; d < num_columns; d += FV_LANES) fv_store_f32(out + d, fv_load_f32(out + d) * factor);
        } else {
            const int32_t addend = strip->addend[row];
            if (addend == 0) continue;
            for (int32_t d = 0; d < num_columns; d += FV_LANES)
                fv_store_f32(out + d, fv_exponent_add(fv_load_f32(out + d), addend));
        }
    }
}

/* C2: O += P^ V_i. */
__attribute__((noinline)) static void add_values(const amla_scratch *scratch, const amla_strip *strip,
                                                 const fv_strip_span *span, int32_t not_finite)
{
    const fv_strip_values values = fv_strip_values_of_rows(scratch->latents, scratch->stride);
    fv_strip_accumulate(strip->rows.sums, scratch->num_columns, strip->scores, NULL, &values, span->first, span->end,
                        strip->rows.num_vectors, not_finite);
}

static void attend_block(const amla_scratch *scratch, int32_t num_strips, const key_block *block,
                         const fv_attend_job *job, fv_rescaling rescaling)
{
    for (int32_t chunk = 0; chunk < block->end; chunk += CHUNK_KEYS) {
        for (int32_t i = 0; i < num_strips; i++) {
            const fv_strip_span span = strip_span(&scratch->strips[i], block, job, chunk, chunk + CHUNK_KEYS);
            score_keys(scratch, &scratch->strips[i], &span);
        }
    }
    for (int32_t i = 0; i < num_strips; i++) {
        const fv_strip_span span = strip_span(&scratch->strips[i], block, job, 0, block->end);
        if (span.first >= span.end) continue;
        softmax(&scratch->strips[i], &span, rescaling);
        rescale(&scratch->strips[i], scratch->num_columns, rescaling);
    }
    for (int32_t chunk = 0; chunk < block->end; chunk += CHUNK_KEYS) {
        for (int32_t i = 0; i < num_strips; i++) {
            const fv_strip_span span = strip_span(&scratch->strips[i], block, job, chunk, chunk + CHUNK_KEYS);
            add_values(scratch, &scratch->strips[i], &span, block->not_finite);
        }
    }
}

/* --- one item -------------------------------------------------------------------------------------------- */

static int32_t begin_strips(const amla_scratch *scratch, const fv_attend_job *job)
{
    const int32_t num_strips = (job->num_rows + FV_STRIP_ROWS - 1) / FV_STRIP_ROWS;
    for (int32_t i = 0; i < num_strips; i++) {
        const int32_t first_row = i * FV_STRIP_ROWS;
        const int32_t num_rows = fv_min_i32(job->num_rows - first_row, FV_STRIP_ROWS);
        amla_strip *strip = &scratch->strips[i];
        strip->rows.q = scratch->q + (int64_t)first_row * scratch->stride;
        strip->rows.sums = scratch->out + (int64_t)first_row * scratch->num_columns;
        strip->scores = scratch->scores + (int64_t)first_row * job->params->tile_keys;
        fv_row_strip_init(&strip->rows, job, 0, first_row, fv_strip_num_vectors(num_rows));
        fv_row_strip_pack_queries(&strip->rows, job, 0);
        for (int32_t v = 0; v < FV_STRIP_ROWS / FV_LANES; v++) fv_amla_scale_init(&strip->scale[v]);
    }
    memset(scratch->out, 0,
           (size_t)(fv_round_up(job->num_rows, FV_STRIP_LANES) * scratch->num_columns) * sizeof(float));
    return num_strips;
}

/* O / s is in natural units: what a segment leaves, and what the row sum divides. */
static void finish_rows(const amla_scratch *scratch, const fv_attend_job *job)
{
    for (int32_t row = 0; row < job->num_rows; row++) {
        const amla_strip *strip = &scratch->strips[row / FV_STRIP_ROWS];
        const int32_t in_strip = row % FV_STRIP_ROWS;
        float *out = scratch->out + (int64_t)row * scratch->num_columns;
        const float scale = strip->scale[in_strip / FV_LANES].scale[in_strip % FV_LANES];
        for (int32_t d = 0; d < scratch->num_columns; d += FV_LANES)
            fv_store_f32(out + d, fv_load_f32(out + d) / scale);
        fv_attend_finish_row(job, 0, row, out, strip->rows.max[in_strip], strip->rows.sum[in_strip]);
    }
}

void FV_ISA_SYMBOL(fv_amla_rows)(const fv_attend_job *of_item, void *memory, fv_rescaling rescaling)
{
    fv_attend_job job = *of_item;
    job.lane_dtype = FV_DTYPE_F32; /* latents come in natural order, and scaled */
    job.k_head_scale = job.v_head_scale = NULL;

    const int32_t tile_keys = job.params->tile_keys;
    const amla_scratch scratch = amla_scratch_of(job.params, job.num_rows, memory);
    const int32_t num_strips = begin_strips(&scratch, &job);
    for (int32_t first_key = job.keys.first / tile_keys * tile_keys; first_key < job.keys.end; first_key += tile_keys) {
        key_block block = {
            .first_key = first_key,
            .first = fv_max_i32(job.keys.first - first_key, 0),
            .end = fv_min_i32(job.keys.end - first_key, tile_keys),
        };
        block.not_finite = fv_latents_load(scratch.latents + (int64_t)block.first * scratch.stride, scratch.stride,
                                           scratch.addresses, scratch.copy, &job, first_key + block.first,
                                           first_key + block.end);
        attend_block(&scratch, num_strips, &block, &job, rescaling);
    }
    finish_rows(&scratch, &job);
}
