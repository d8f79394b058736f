/* DeepSeek-V2's formula (arXiv 2405.04434, section 2.1) in double, and what rounding may add to it.
 *
 * On the way a kernel of a narrow dtype rounds, each number by r of itself in root mean square (docs/numerics.md):
 *
 *   absorbed   the absorbed query, and so all scores together; the attended latents
 *   expanded   the nope part of each key, and so each score by itself; the values; before them the latents where a
 *              scale is multiplied in, and the rope part where it is rotated at reading
 *   both       P, and the result
 *
 * A scaled fp8 number has one of few mantissas, which are rounded alike everywhere: scores are then scaled by as much,
 * and so are values.
 *
 * Roundings of vectors add up as squares and come out near their mean, so twice that is enough. A score is one number,
 * and with few keys the result moves by few scores: there it takes 5 times the mean. */
#include <math.h>
#include <string.h>

#include "check/mla_weights_case.h"
#include "check/row_rule.h"
#include "core/float.h"
#include "reference/oracle.h"

#define SCORE_DEVIATIONS 5
#define SAMPLED_LATENTS 64 /* elements that stand for all in the error of an absorbed query */

/* One row while it is computed; arrays in the case's memory. */
typedef struct row_work {
    const fv_mla_shape *mla;
    double scale;
    double *q, *absorbed;                  /* [P + R], [L] */
    double *entries, *values;              /* [num_keys, L + R], [num_keys, V] */
    double *p, *score2, *fp32_error;       /* [num_keys]: weights; square of what rounding K moves a score by */
    double *latent_score;                  /* [num_keys]: the part of a score that latents make */
    double *latent, *out;                  /* [L] attended, [V] */
    double *w_uk, *w_uv;                   /* [P, L], [V, L] of the head */
    double *column2;                       /* [L] squares of the columns of W_UV */
    int32_t gather_rounds, gather_rotates; /* expanded: what is rounded on its way from the cache */
    double max, sum;
    int32_t num_keys;
} row_work;

static double *doubles(check_mla_weights *test, int64_t count)
{
    return check_arena_alloc(&test->arena, (size_t)count * sizeof(double));
}

static row_work work_of(check_mla_weights *test, int32_t num_keys)
{
    const fv_mla_shape *mla = &test->problem.mla;
    const int64_t lora = mla->kv_lora_rank, rope = mla->qk_rope_head_dim;
    return (row_work){
        .mla = mla,
        .scale = test->problem.scale,
        .q = doubles(test, mla->qk_nope_head_dim + rope),
        .absorbed = doubles(test, lora),
        .entries = doubles(test, num_keys * (lora + rope)),
        .values = doubles(test, (int64_t)num_keys * mla->v_head_dim),
        .p = doubles(test, num_keys),
        .score2 = doubles(test, num_keys),
        .fp32_error = doubles(test, num_keys),
        .latent_score = doubles(test, num_keys),
        .latent = doubles(test, lora),
        .w_uk = doubles(test, mla->qk_nope_head_dim * lora),
        .w_uv = doubles(test, mla->v_head_dim * lora),
        .column2 = doubles(test, lora),
        .gather_rounds = test->k_scale || test->view.layout == FV_KV_LAYOUT_LATENT_FP8_DS,
        .gather_rotates = mla->rotate_at_reading,
        .out = doubles(test, mla->v_head_dim),
        .max = -INFINITY,
        .num_keys = num_keys,
    };
}

static void load_weights(row_work *work, const check_mla_weights *test, int32_t head)
{
    const int32_t nope = work->mla->qk_nope_head_dim, lora = work->mla->kv_lora_rank;
    const fv_tensor *w = &test->kv_up;
    for (int32_t i = 0; i < (nope + work->mla->v_head_dim) * lora; i++) {
        const char *row = (const char *)w->data + head * w->stride_bytes[0] + i / lora * w->stride_bytes[1];
        const double weight = fv_float_load(row + i % lora * w->stride_bytes[2], w->dtype);
        if (i / lora < nope) {
            work->w_uk[i] = weight;
        } else {
            work->w_uv[i - nope * lora] = weight;
            work->column2[i % lora] += weight * weight;
        }
    }
}

static void load_query(row_work *work, const check_mla_weights *test, int32_t token, int32_t head)
{
    const fv_mla_shape *mla = work->mla;
    const int32_t lora = mla->kv_lora_rank;
    const char *q = (const char *)test->q.data + token * test->q.stride_bytes[0] + head * test->q.stride_bytes[1];
    for (int32_t d = 0; d < mla->qk_nope_head_dim + mla->qk_rope_head_dim; d++)
        work->q[d] = fv_float_load(q + d * test->q.stride_bytes[2], test->q.dtype);
    for (int32_t d = 0; d < mla->qk_nope_head_dim; d++)
        for (int32_t l = 0; l < lora; l++) work->absorbed[l] += work->q[d] * work->w_uk[d * lora + l];
}

/* The score of a key, expanded; and its errors. */
static double score_key(row_work *work, int32_t key)
{
    const fv_mla_shape *mla = work->mla;
    const int32_t nope = mla->qk_nope_head_dim, lora = mla->kv_lora_rank, rope = mla->qk_rope_head_dim;
    const double *entry = work->entries + (int64_t)key * (lora + rope);
    double dot = 0, nope2 = 0, latent2 = 0, rope2 = 0;
    for (int32_t d = 0; d < nope; d++) {
        double k = 0;
        for (int32_t l = 0; l < lora; l++) k += work->w_uk[d * lora + l] * entry[l];
        dot += work->q[d] * k;
        nope2 += work->q[d] * k * work->q[d] * k;
    }
    work->latent_score[key] = work->scale * dot;
    for (int32_t l = 0; l < lora; l++) latent2 += work->absorbed[l] * entry[l] * work->absorbed[l] * entry[l];
    for (int32_t d = 0; d < rope; d++) {
        const double product = work->q[nope + d] * entry[lora + d];
        dot += product;
        rope2 += product * product;
    }
    const double partial = work->scale * fmax(sqrt(fmax(latent2, nope2) + rope2), fabs(dot));
    if (work->gather_rounds) nope2 += latent2;
    if (work->gather_rounds || work->gather_rotates) nope2 += rope2;
    work->score2[key] = work->scale * work->scale * nope2;
    work->fp32_error[key] = CHECK_UNIT * (sqrt(lora + rope) * partial + 4 * fabs(work->scale * dot) + 4);
    return work->scale * dot;
}

static void attend(row_work *work, const check_mla_weights *test, int32_t seq)
{
    const fv_mla_shape *mla = work->mla;
    const int32_t lora = mla->kv_lora_rank, rope = mla->qk_rope_head_dim;
    const fv_kv_reader reader = {
        .view = &test->view,
        .block_table = test->block_table,
        .block_table_stride = test->width,
        .k_scale = test->k_scale,
        .num_scales = test->k_scale != NULL,
        .head_size = lora + rope,
        .v_head_size = lora,
        .context_parallel = {1, 0, 1},
        .rotation = {test->cos, test->sin, rope, test->num_positions},
    };
    for (int32_t key = 0; key < work->num_keys; key++) {
        fv_kv_reader_key(work->entries + (int64_t)key * (lora + rope), &reader, seq, seq, key, 0);
        work->p[key] = score_key(work, key);
        work->max = fmax(work->max, work->p[key]);
    }
    for (int32_t key = 0; key < work->num_keys; key++) {
        const double *entry = work->entries + (int64_t)key * (lora + rope);
        work->p[key] = exp(work->p[key] - work->max);
        work->sum += work->p[key];
        for (int32_t l = 0; l < lora; l++) work->latent[l] += work->p[key] * entry[l];
        double *value = work->values + (int64_t)key * mla->v_head_dim;
        for (int32_t d = 0; d < mla->v_head_dim; d++)
            for (int32_t l = 0; l < lora; l++) value[d] += work->w_uv[d * lora + l] * entry[l];
        for (int32_t d = 0; d < mla->v_head_dim; d++) work->out[d] += work->p[key] * value[d];
    }
    for (int32_t l = 0; l < lora; l++) work->latent[l] /= work->sum;
    for (int32_t d = 0; d < mla->v_head_dim; d++) work->out[d] /= work->sum;
}

/* Mean square of what rounding the absorbed query moves the result by, as a multiple of r^2: each of its elements
 * moves the scores of all keys at once. *lse2 the same for the LSE. */
static double absorbed_score_error2(double *lse2, const row_work *work)
{
    const fv_mla_shape *mla = work->mla;
    const int32_t lora = mla->kv_lora_rank, v_size = mla->v_head_dim, step = fv_max_i32(1, lora / SAMPLED_LATENTS);
    double error2 = 0;
    *lse2 = 0;
    for (int32_t l = 0; l < lora; l++) {
        const double moved = work->scale * work->absorbed[l] * work->latent[l];
        *lse2 += moved * moved;
    }
    for (int32_t l = 0; l < lora; l += step) {
        double row[64] = {0}; /* v_head_dim at most */
        for (int32_t key = 0; key < work->num_keys; key++) {
            const double weight = work->p[key] / work->sum *
                                  work->entries[(int64_t)key * (lora + mla->qk_rope_head_dim) + l];
            for (int32_t d = 0; d < v_size; d++)
                row[d] += weight * (work->values[(int64_t)key * v_size + d] - work->out[d]);
        }
        const double moved = work->scale * work->absorbed[l] * check_row_norm(row, v_size);
        error2 += step * moved * moved;
    }
    return error2;
}

/* Sums over the keys, of squares of shares of the result. */
typedef struct key_sums {
    double p_rounded2, values2, latents2; /* of p v that are rounded, of all */
    double scores2, lse2;                 /* of what rounding keys one by one moves the result and the LSE by */
    double fp32_scores2, fp32_lse2;
} key_sums;

/* Sum of (c_l |W_l|)^2: what rounding latents moves what W_UV makes of them by, as a multiple of r. */
static double rounded_latents2(const row_work *work, const double *latent)
{
    double sum = 0;
    for (int32_t l = 0; l < work->mla->kv_lora_rank; l++) sum += latent[l] * latent[l] * work->column2[l];
    return sum;
}

static key_sums sum_keys(const row_work *work)
{
    const int32_t v_size = work->mla->v_head_dim;
    const int32_t entry_size = work->mla->kv_lora_rank + work->mla->qk_rope_head_dim;
    key_sums sums = {0};
    for (int32_t key = 0; key < work->num_keys; key++) {
        const double *value = work->values + (int64_t)key * v_size, p = work->p[key] / work->sum;
        double apart2 = 0, size = check_row_norm(value, v_size), error = work->fp32_error[key];
        for (int32_t d = 0; d < v_size; d++) apart2 += (value[d] - work->out[d]) * (value[d] - work->out[d]);
        sums.values2 += p * size * p * size;
        sums.latents2 += p * p * rounded_latents2(work, work->entries + (int64_t)key * entry_size);
        if (work->p[key] < 1) sums.p_rounded2 += p * size * p * size;
        sums.scores2 += p * p * work->score2[key] * apart2;
        sums.lse2 += p * p * work->score2[key];
        sums.fp32_scores2 += p * error * p * error * size * size;
        sums.fp32_lse2 += p * error * p * error;
    }
    return sums;
}

/* Square of what scaling the latents moves the result by; *lse2 of the LSE: as multiples of r^2. */
static double scaled_latents2(double *lse2, const row_work *work)
{
    const int32_t v_size = work->mla->v_head_dim;
    double moved[64] = {0}, lse = 0; /* v_head_dim at most */
    for (int32_t key = 0; key < work->num_keys; key++) {
        const double weight = work->p[key] / work->sum * work->latent_score[key];
        lse += weight;
        for (int32_t d = 0; d < v_size; d++)
            moved[d] += weight * (work->values[(int64_t)key * v_size + d] - work->out[d]);
    }
    *lse2 = lse * lse;
    return check_row_norm(moved, v_size) * check_row_norm(moved, v_size);
}

static double result_rounding2(const double *out, int32_t size, fv_dtype dtype)
{
    double sum = 0;
    for (int32_t d = 0; d < size; d++) {
        uint32_t stored; /* room for any dtype */
        fv_float_store(&stored, (float)out[d], dtype);
        const double error = fv_float_load(&stored, dtype) - out[d];
        sum += error * error;
    }
    return sum;
}

static void fill_errors(check_mla_row *row, const row_work *work, const check_mla_weights *test, int32_t absorbed)
{
    const int32_t v_size = work->mla->v_head_dim;
    const double r = fv_oracle_rounding(test->problem.q_dtype), out_norm = check_row_norm(work->out, v_size);
    const key_sums sums = sum_keys(work);
    const double latent2 = rounded_latents2(work, work->latent);
    double lse2 = sums.lse2, scores2 = sums.scores2, path2 = sums.values2;
    if (absorbed) {
        scores2 = absorbed_score_error2(&lse2, work);
        path2 = latent2;
    } else if (work->gather_rounds) {
        double scaled_lse2;
        scores2 += scaled_latents2(&scaled_lse2, work);
        lse2 += scaled_lse2;
        path2 += sums.latents2 + out_norm * out_norm;
    }
    const double vectors2 = r * r * (sums.p_rounded2 + path2) +
                            result_rounding2(work->out, v_size, test->problem.out_dtype);
    const double growth = CHECK_UNIT * (sqrt(work->num_keys) + sqrt(work->mla->kv_lora_rank) + 8);
    row->error = 2 * sqrt(vectors2) + SCORE_DEVIATIONS * r * sqrt(scores2) +
                 2 * (sqrt(sums.fp32_scores2) + sqrt(sums.fp32_lse2) * out_norm) +
                 growth * (sqrt(sums.values2) + sqrt(latent2) + out_norm);
    row->lse_error = SCORE_DEVIATIONS * r * sqrt(lse2) + 2 * sqrt(sums.fp32_lse2) + growth +
                     2 * CHECK_UNIT * (fabs(row->lse) + fabs(work->max));
}

void check_mla_weights_expect(check_mla_row *row, check_mla_weights *test, int32_t seq, int32_t token, int32_t head,
                              int32_t absorbed)
{
    const int32_t query_len = test->query_start[seq + 1] - test->query_start[seq];
    const int32_t num_keys = test->seq_lens[seq] == 0 ? 0 : test->seq_lens[seq] - query_len + token + 1;
    row_work work = work_of(test, num_keys);
    *row = (check_mla_row){.out = work.out, .lse = -INFINITY};
    if (num_keys == 0) return;
    load_weights(&work, test, head);
    load_query(&work, test, test->query_start[seq] + token, head);
    attend(&work, test, seq);
    row->lse = work.max + log(work.sum);
    fill_errors(row, &work, test, absorbed);
}
