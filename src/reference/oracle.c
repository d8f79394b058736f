/* The oracle: two passes over the keys of a row, first the scores, then the values. */
#include "reference/oracle.h"

#include <math.h>

#include "core/float.h"

static const double unit_roundoff = 0x1p-24; /* of fp32 */
static const double least_number = 0x1p-126; /* normal, of fp32: a weight below may be 0 */

enum { NUM_LARGEST = 2 };
enum { STEP_OF_SUMS = 16 }; /* keys, and elements of a product, that a tensor core adds at once */

/* Rows side by side. */
typedef double rows_part __attribute__((vector_size(64), aligned(8), may_alias));
enum { ROWS_OF_PART = sizeof(rows_part) / sizeof(double) };

/* Where the scratch of a call is cut. Rows stand side by side, so that one key serves all of them. */
typedef struct oracle_scratch {
    double *q;       /* [D, FV_ORACLE_MAX_ROWS] */
    double *key;     /* [D] */
    double *value;   /* [Dv] */
    double *scores;  /* [num_keys, FV_ORACLE_MAX_ROWS]; -inf: not seen */
    double *errors;  /* the same shape: how far fp32 may be from the score */
    double *largest; /* [FV_ORACLE_MAX_ROWS, NUM_LARGEST, Dv] */
} oracle_scratch;

/* p_j v_j of a key whose p_j is rounded. */
typedef struct rounded_part {
    double norm2;
    double *values; /* [Dv] */
} rounded_part;

/* Sums over the keys of one row. */
typedef struct row_sums {
    double max;          /* of the scores */
    double p;            /* sum of p_j */
    double p_error2;     /* sum of (p_j e_j)^2, e_j the error of the score */
    double value_error2; /* sum of (p_j e_j |v_j|)^2 */
    double value2;       /* sum of (p_j |v_j|)^2 */
    double rounded2;     /* the same over the p_j that are not 1, those that are rounded, but for the largest */
    rounded_part largest[NUM_LARGEST]; /* of these, the largest first */
    double tiny;                       /* sum of p_j |v_j| where p_j may be 0 in fp32 */
    double p_score;                    /* sum of p_j (|s_j| + |alibi_j|) */
    int32_t num_keys;
} row_sums;

size_t fv_oracle_scratch_doubles(const fv_attend_params *params, int32_t num_keys)
{
    return (size_t)params->head_size * (FV_ORACLE_MAX_ROWS + 1) +
           (size_t)params->v_head_size * (FV_ORACLE_MAX_ROWS * NUM_LARGEST + 1) +
           (size_t)num_keys * FV_ORACLE_MAX_ROWS * 2;
}

static oracle_scratch cut_scratch(double *scratch, const fv_attend_params *params, int32_t num_keys)
{
    oracle_scratch cut = {.q = scratch};
    cut.key = cut.q + (size_t)params->head_size * FV_ORACLE_MAX_ROWS;
    cut.value = cut.key + params->head_size;
    cut.scores = cut.value + params->v_head_size;
    cut.errors = cut.scores + (size_t)num_keys * FV_ORACLE_MAX_ROWS;
    cut.largest = cut.errors + (size_t)num_keys * FV_ORACLE_MAX_ROWS;
    return cut;
}

/* The keys that any of the rows sees. */
static fv_key_range all_keys(const fv_oracle_row *rows, int32_t num_rows)
{
    fv_key_range keys = rows[0].row.keys;
    for (int32_t r = 1; r < num_rows; r++) {
        keys.first = fv_min_i32(keys.first, rows[r].row.keys.first);
        keys.end = fv_max_i32(keys.end, rows[r].row.keys.end);
    }
    return keys;
}

static void load_queries(double *q, const fv_oracle_row *rows, int32_t num_rows, const fv_attend_params *params)
{
    const int64_t step = (int64_t)fv_dtype_bytes(params->q_dtype);
    for (int32_t r = 0; r < FV_ORACLE_MAX_ROWS; r++) {
        const fv_attend_row *row = &rows[r < num_rows ? r : 0].row;
        const char *from = (const char *)params->q + row->token * params->q_token_stride +
                           row->head * params->q_head_stride;
        for (int32_t d = 0; d < params->head_size; d++)
            q[d * FV_ORACLE_MAX_ROWS + r] = fv_float_load(from + d * step, params->q_dtype);
    }
}

/* Products of the key with every query: their sums, and the sums of their squares. */
static void dot_rows(double *dots, double *squares, const double *q, const double *key, int32_t head_size)
{
    for (int32_t r = 0; r < FV_ORACLE_MAX_ROWS; r += ROWS_OF_PART) {
        rows_part sums = {0}, sums2 = {0};
        for (int32_t d = 0; d < head_size; d++) {
            const rows_part product = *(const rows_part *)(q + d * FV_ORACLE_MAX_ROWS + r) * key[d];
            sums += product;
            sums2 += product * product;
        }
        *(rows_part *)(dots + r) = sums;
        *(rows_part *)(squares + r) = sums2;
    }
}

/* How far fp32 may be from a score. The partial sums of the dot product are as large as a random walk
 * of its terms or as the whole, and each of the D additions rounds one of them. */
static double score_error(const fv_oracle_row *row, const fv_attend_params *params, int32_t key, double score,
                          double dot, double squares)
{
    const double partial = fabs((double)params->scale) * fmax(sqrt(squares), fabs(dot));
    const double alibi = fabs(fv_attend_row_alibi(&row->row, params, key));
    return unit_roundoff *
           (sqrt(params->head_size) * partial + 4 * fabs(score) + 4 * (double)params->soft_cap + 2 * alibi + 4);
}

static void score_keys(const oracle_scratch *scratch, row_sums *sums, const fv_oracle_row *rows, int32_t num_rows,
                       fv_key_range keys, const fv_attend_params *params, const fv_kv_reader *reader, int32_t table_row)
{
    double dots[FV_ORACLE_MAX_ROWS], squares[FV_ORACLE_MAX_ROWS];
    for (int32_t key = keys.first; key < keys.end; key++) {
        double *scores = scratch->scores + (size_t)(key - keys.first) * FV_ORACLE_MAX_ROWS;
        double *errors = scratch->errors + (size_t)(key - keys.first) * FV_ORACLE_MAX_ROWS;
        int32_t seen = 0;
        for (int32_t r = 0; r < num_rows; r++) {
            const fv_attend_row *row = &rows[r].row;
            const int32_t sees = key >= row->keys.first && key < row->keys.end && fv_attend_row_sees(row, params, key);
            scores[r] = sees ? 0 : -INFINITY;
            seen |= sees;
        }
        if (!seen) continue;
        fv_kv_reader_key(scratch->key, reader, rows[0].row.seq, table_row, key, rows[0].row.kv_head);
        dot_rows(dots, squares, scratch->q, scratch->key, params->head_size);
        for (int32_t r = 0; r < num_rows; r++) {
            if (scores[r] == -INFINITY) continue;
            scores[r] = fv_attend_row_score(&rows[r].row, params, key, dots[r]);
            errors[r] = score_error(&rows[r], params, key, scores[r], dots[r], squares[r]);
            sums[r].max = fmax(sums[r].max, scores[r]);
            sums[r].num_keys++;
        }
    }
}

static double round_to(double value, fv_dtype dtype)
{
    uint32_t stored; /* room for any dtype */
    fv_float_store(&stored, (float)value, dtype);
    return fv_float_load(&stored, dtype);
}

static double norm2(const double *row, int32_t size)
{
    double sum = 0;
    for (int32_t d = 0; d < size; d++) sum += row[d] * row[d];
    return sum;
}

/* Takes in a part that is rounded; the smallest of those kept so far goes to the sum of the others. */
static void add_rounded(row_sums *sums, double p, const double *value, double value_norm2, int32_t size)
{
    rounded_part part = {p * p * value_norm2, sums->largest[NUM_LARGEST - 1].values};
    if (part.norm2 <= sums->largest[NUM_LARGEST - 1].norm2) {
        sums->rounded2 += part.norm2;
        return;
    }
    sums->rounded2 += sums->largest[NUM_LARGEST - 1].norm2;
    for (int32_t d = 0; d < size; d++) part.values[d] = p * value[d];
    int32_t at = NUM_LARGEST - 1;
    for (; at > 0 && sums->largest[at - 1].norm2 < part.norm2; at--) sums->largest[at] = sums->largest[at - 1];
    sums->largest[at] = part;
}

/* 1: values of one row have scales that differ, which weights take in before they are rounded. */
static int32_t weights_take_scales(const fv_attend_params *params)
{
    return params->cache.v_scales.data || (params->dense.k && params->v_scale);
}

static void add_value(fv_oracle_row *row, row_sums *sums, const double *value, double value_norm2, int32_t key,
                      double score, double error, const fv_attend_params *params)
{
    const double p = exp(score - sums->max);
    if (!isfinite(value_norm2)) row->odd_weight = fmin(row->odd_weight, p);
    const double rounded = round_to(p, params->q_dtype);
    for (int32_t d = 0; d < params->v_head_size; d++) {
        row->exact[d] += p * value[d];
        row->ideal[d] += rounded * value[d];
    }
    sums->p += p;
    if (p < 2 * least_number) sums->tiny += p * sqrt(value_norm2);
    sums->value2 += p * p * value_norm2;
    /* Times the scale of its value the largest is no power of two either. */
    if (p < 1 || weights_take_scales(params)) add_rounded(sums, p, value, value_norm2, params->v_head_size);
    sums->p_score += p * (fabs(score) + fabs(fv_attend_row_alibi(&row->row, params, key)));
    sums->p_error2 += p * p * error * error;
    sums->value_error2 += p * p * error * error * value_norm2;
}

static void add_values(const oracle_scratch *scratch, row_sums *sums, fv_oracle_row *rows, int32_t num_rows,
                       fv_key_range keys, const fv_attend_params *params, const fv_kv_reader *reader, int32_t table_row)
{
    for (int32_t key = keys.first; key < keys.end; key++) {
        const double *scores = scratch->scores + (size_t)(key - keys.first) * FV_ORACLE_MAX_ROWS;
        const double *errors = scratch->errors + (size_t)(key - keys.first) * FV_ORACLE_MAX_ROWS;
        double value_norm2 = -1; /* not read yet */
        for (int32_t r = 0; r < num_rows; r++) {
            if (scores[r] == -INFINITY) continue;
            if (value_norm2 < 0) {
                fv_kv_reader_value(scratch->value, reader, rows[0].row.seq, table_row, key, rows[0].row.kv_head);
                value_norm2 = norm2(scratch->value, params->v_head_size);
            }
            add_value(&rows[r], &sums[r], scratch->value, value_norm2, key, scores[r], errors[r], params);
        }
    }
}

/* Half a step of the dtype at 1: by how much rounding moves a number at most, relative. */
static double half_step(fv_dtype dtype)
{
    return dtype == FV_DTYPE_BF16 ? 0x1p-8 : dtype == FV_DTYPE_F16 ? 0x1p-11 : unit_roundoff;
}

/* Rounding moves m 2^e, 1 <= m < 2, by up to half a step u of the dtype at 1, uniformly: by u / (m sqrt(3)) of it in
 * root mean square, and by u / sqrt(8 ln 2) where the logarithms of the numbers are spread evenly. */
double fv_oracle_rounding(fv_dtype dtype) { return half_step(dtype) / sqrt(8 * log(2)); }

/* How large the sum of the two largest parts may be, each with the sign that makes it larger, squared. */
static double largest_sum2(const row_sums *sums, int32_t size)
{
    const rounded_part *a = &sums->largest[0], *b = &sums->largest[1];
    double dot = 0;
    if (b->norm2 > 0)
        for (int32_t d = 0; d < size; d++) dot += a->values[d] * b->values[d];
    return a->norm2 + b->norm2 + 2 * fabs(dot);
}

/* What the output's rounding adds where one element has most of a row: weights that are off by more than half a step there have
 * the rest of the step rounded the same way. Of the squares' sum, as if both were added in that element. */
static double same_way(const fv_oracle_row *row, double weights2, const fv_attend_params *params)
{
    double largest = 0;
    for (int32_t d = 0; d < params->v_head_size; d++) largest = fmax(largest, fabs(row->exact[d]));
    if (!(largest > 0)) return 0;
    const double share = largest * largest / norm2(row->exact, params->v_head_size);
    const double step = half_step(params->out_dtype) * exp2(floor(log2(largest)));
    return sqrt(weights2) * share * step;
}

/* The larger of the ideal's error and the expected one. The roundings of different keys are independent, so their
 * squares add. Where one or two have most of it that says little: they count with half of what they can be at worst,
 * which the rule doubles. A result that is off is another number, which the output's rounding moves as it moves any. */
static double rounding_error(const fv_oracle_row *row, const row_sums *sums, double denominator,
                             const fv_attend_params *params)
{
    double ideal2 = 0, out2 = 0;
    for (int32_t d = 0; d < params->v_head_size; d++) {
        const double ideal = row->ideal[d] - row->exact[d];
        const double out = round_to(row->exact[d], params->out_dtype) - row->exact[d];
        ideal2 += ideal * ideal;
        out2 += out * out;
    }
    const double rounding = fv_oracle_rounding(params->q_dtype) / denominator;
    const double worst = half_step(params->q_dtype) / 2 / denominator;
    const double weights2 = rounding * rounding * sums->rounded2 +
                            worst * worst * largest_sum2(sums, params->v_head_size);
    const double of_output = fv_oracle_rounding(params->out_dtype);
    if (weights2 > 0) out2 = fmax(out2, of_output * of_output * norm2(row->exact, params->v_head_size));
    return sqrt(fmax(ideal2, weights2 + out2 + same_way(row, weights2, params)));
}

/* All sums relative to `max`, the sink, which is above the scores: relative to these it could be infinite. */
static void rise_to_sink(fv_oracle_row *row, row_sums *sums, double max, int32_t size)
{
    const double shrink = exp(sums->max - max);
    if (row->odd_weight < INFINITY) row->odd_weight *= shrink;
    for (int32_t d = 0; d < size; d++) {
        row->exact[d] *= shrink;
        row->ideal[d] *= shrink;
    }
    sums->max = max;
    sums->p *= shrink;
    sums->p_error2 *= shrink * shrink;
    sums->value_error2 *= shrink * shrink;
    sums->value2 *= shrink * shrink;
    sums->rounded2 *= shrink * shrink;
    sums->tiny *= shrink;
    sums->p_score *= shrink;
    for (int32_t i = 0; i < NUM_LARGEST; i++) {
        sums->largest[i].norm2 *= shrink * shrink;
        for (int32_t d = 0; d < size && sums->largest[i].norm2 > 0; d++) sums->largest[i].values[d] *= shrink;
    }
}

/* What products of pairs of bf16, whose sums below the least normal number are 0, may lose of a row; and weights below it
 * that have taken in the scale of their value, which as it is stored is up to 57344. */
static double flushed(const fv_oracle_row *row, const row_sums *sums, const fv_attend_params *params)
{
    const double scale = fv_head_scale(params->v_scale, params->num_kv_scales, row->row.kv_head);
    const double stored = weights_take_scales(params) ? 57344 : 1;
    return least_number * sums->num_keys * sqrt(params->v_head_size) * fmax(stored, fabs(scale));
}

/* What partial results of latents in 16 bits, steps of 2^-15 of a row's largest element, may move a row by: their rounding, twice
 * its root mean square, of elements that the output does not round to where they were. */
static double narrowed(const fv_oracle_row *row, const fv_attend_params *params)
{
    const fv_kv_layout layout = params->cache.layout;
    if (params->out_dtype == FV_DTYPE_F32) return 0;
    if (layout != FV_KV_LAYOUT_LATENT && layout != FV_KV_LAYOUT_LATENT_FP8_DS) return 0;
    double largest = 0;
    int32_t num_moved = 0;
    for (int32_t d = 0; d < params->v_head_size; d++) largest = fmax(largest, fabs(row->exact[d]));
    for (int32_t d = 0; d < params->v_head_size; d++)
        num_moved += fabs(row->exact[d]) * half_step(params->out_dtype) / 2 < largest * 0x1p-16;
    return 2 * largest * 0x1p-15 / sqrt(12) * sqrt(num_moved);
}

/* Divides by the denominator, sink included, and turns the sums into the floors. */
static void finish_row(fv_oracle_row *row, row_sums *sums, const fv_attend_params *params)
{
    if (sums->num_keys == 0) {
        row->lse = -INFINITY;
        row->error = row->out_floor = row->lse_floor = row->out_drift = row->lse_drift = 0;
        return;
    }
    const double keys_norm = sqrt(norm2(row->exact, params->v_head_size)) / sums->p; /* without the sink */
    const double sink = params->sinks ? params->sinks[row->row.head] : -INFINITY;
    if (sink > sums->max) rise_to_sink(row, sums, sink, params->v_head_size);
    double denominator = sums->p;
    if (params->sinks) {
        const double p = exp(sink - sums->max);
        const double error = unit_roundoff * (4 * fabs(sink) + 4);
        denominator += p;
        if (p > 0) sums->p_error2 += p * p * error * error;
    }
    for (int32_t d = 0; d < params->v_head_size; d++) {
        row->exact[d] /= denominator;
        row->ideal[d] = round_to(row->ideal[d] / denominator, params->out_dtype);
    }
    row->lse = sums->max + log(denominator);
    row->error = rounding_error(row, sums, denominator, params);

    const double out_norm = sqrt(norm2(row->exact, params->v_head_size));
    const double score_part = (sqrt(sums->value_error2) + sqrt(sums->p_error2) * out_norm) / denominator;
    const double sum_growth = unit_roundoff * (sqrt(sums->num_keys) + 8);
    row->out_floor = 2 * score_part + sum_growth * (sqrt(sums->value2) / denominator + out_norm) +
                     (sums->tiny + flushed(row, sums, params)) / denominator + least_number * keys_norm;
    row->lse_floor = 2 * sqrt(sums->p_error2) / denominator + sum_growth +
                     unit_roundoff * (2 * fabs(row->lse) + 2 * fabs(sums->max));
    const double of_sums = unit_roundoff * (sums->num_keys / STEP_OF_SUMS);
    const double of_scores = unit_roundoff * (params->head_size / STEP_OF_SUMS) * sums->p_score / denominator;
    row->out_drift = of_sums * out_norm + narrowed(row, params);
    row->lse_drift = of_sums + of_scores;
}

void fv_oracle_attend(fv_oracle_row *rows, int32_t num_rows, const fv_attend_params *params, const fv_kv_reader *reader,
                      int32_t table_row, double *scratch)
{
    row_sums sums[FV_ORACLE_MAX_ROWS];
    const fv_key_range keys = all_keys(rows, num_rows);
    const oracle_scratch cut = cut_scratch(scratch, params, keys.end - keys.first);
    for (int32_t r = 0; r < num_rows; r++) {
        sums[r] = (row_sums){.max = -INFINITY};
        for (int32_t i = 0; i < NUM_LARGEST; i++)
            sums[r].largest[i].values = cut.largest + (r * NUM_LARGEST + i) * params->v_head_size;
        for (int32_t d = 0; d < params->v_head_size; d++) rows[r].exact[d] = rows[r].ideal[d] = 0;
        rows[r].odd_weight = INFINITY;
    }
    load_queries(cut.q, rows, num_rows, params);
    score_keys(&cut, sums, rows, num_rows, keys, params, reader, table_row);
    add_values(&cut, sums, rows, num_rows, keys, params, reader, table_row);
    for (int32_t r = 0; r < num_rows; r++) finish_row(&rows[r], &sums[r], params);
}
