/* The oracle's rows of a scene, and their comparison with a kernel's. */
#include "check/expected.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/executor.h"
#include "core/float.h"

#define LEAST_WEIGHT 1e-37 /* of a value: a weight below may be 0 in fp32 */

/* A run of rows that share sequence and KV head. */
typedef struct row_batch {
    int32_t first_row;
    int32_t num_rows;
} row_batch;

typedef struct oracle_loop {
    check_expected *expected;
    const fv_attend_params *params;
    const row_batch *batches;
    int32_t new_min_query_len;
    double *scratch; /* for each worker */
    size_t scratch_doubles;
} oracle_loop;

static void oracle_task(void *user, int64_t index, int32_t worker)
{
    const oracle_loop *loop = user;
    const row_batch *batch = &loop->batches[index];
    fv_oracle_row *rows = loop->expected->rows + batch->first_row;
    fv_kv_reader reader = fv_kv_reader_of(loop->params);
    reader.dense_min_query_len = loop->new_min_query_len;
    fv_oracle_attend(rows, batch->num_rows, loop->params, &reader, rows[0].row.seq,
                     loop->scratch + (size_t)worker * loop->scratch_doubles);
}

/* Is (token, kv_head) of the sequence one that the oracle looks at? */
static int32_t sampled(check_random *random, double share, int32_t is_last)
{
    const double draw = check_random_unit(random); /* drawn always: the sample does not depend on is_last */
    return draw < share || is_last;
}

static void choose_rows(check_expected *expected, check_scene *scene, const fv_attend_params *params)
{
    const int32_t group = params->num_heads / params->num_kv_heads;
    const double share = CHECK_ORACLE_STEPS / fmax(check_case_cost(scene->test), 1);
    check_random random = {scene->test->seed ^ 0x5eed};
    for (int32_t seq = 0; seq < params->num_seqs; seq++) {
        const int32_t query_len = params->query_start[seq + 1] - params->query_start[seq];
        for (int32_t kv_head = 0; kv_head < params->num_kv_heads; kv_head++) {
            for (int32_t token = 0; token < query_len; token++) {
                if (!sampled(&random, share, token == query_len - 1 && kv_head == seq % params->num_kv_heads)) continue;
                for (int32_t head = kv_head * group; head < (kv_head + 1) * group; head++)
                    expected->rows[expected->num_rows++].row = fv_attend_row_of(params, seq, token, head);
            }
        }
    }
}

static int32_t cut_batches(row_batch *batches, const check_expected *expected)
{
    int32_t num_batches = 0;
    for (int32_t r = 0; r < expected->num_rows; r++) {
        const fv_attend_row *row = &expected->rows[r].row;
        row_batch *last = num_batches > 0 ? &batches[num_batches - 1] : NULL;
        const fv_attend_row *first = last ? &expected->rows[last->first_row].row : NULL;
        if (last && last->num_rows < FV_ORACLE_MAX_ROWS && first->seq == row->seq && first->kv_head == row->kv_head)
            last->num_rows++;
        else
            batches[num_batches++] = (row_batch){r, 1};
    }
    return num_batches;
}

static fv_dense_keys new_keys(const check_scene *scene)
{
    return (fv_dense_keys){
        .k = scene->k.data,
        .k_token_stride = scene->k.stride_bytes[0],
        .k_head_stride = scene->k.stride_bytes[1],
        .v = scene->v.data,
        .v_token_stride = scene->v.stride_bytes[0],
        .v_head_stride = scene->v.stride_bytes[1],
        .dtype = scene->k.dtype,
    };
}

void check_expected_init(check_expected *expected, check_scene *scene, const check_lane *lane,
                         int32_t new_min_query_len)
{
    fv_attend_params params = check_scene_params(scene);
    const int32_t has_new = scene->k.data && scene->test->problem.context_parallel.world <= 1;
    if (has_new && new_min_query_len < INT32_MAX) params.dense = new_keys(scene);
    const size_t most_rows = (size_t)scene->num_tokens * (size_t)params.num_heads;
    *expected = (check_expected){.rows = check_arena_alloc(&scene->arena, most_rows * sizeof(fv_oracle_row)),
                                 .drifts = !lane->device->host_is_device};
    choose_rows(expected, scene, &params);
    const size_t num_rows = (size_t)expected->num_rows, size = (size_t)params.v_head_size;
    double *results = check_arena_alloc(&scene->arena, 2 * num_rows * size * sizeof(double));
    for (size_t r = 0; r < num_rows; r++) {
        expected->rows[r].exact = results + 2 * r * size;
        expected->rows[r].ideal = results + (2 * r + 1) * size;
    }
    row_batch *batches = check_arena_alloc(&scene->arena, num_rows * sizeof(row_batch));
    const int32_t num_batches = cut_batches(batches, expected);

    int32_t most_keys = 0;
    for (int32_t r = 0; r < params.num_seqs; r++) most_keys = fv_max_i32(most_keys, check_scene_num_keys(scene, r));
    oracle_loop loop = {.expected = expected,
                        .params = &params,
                        .batches = batches,
                        .new_min_query_len = new_min_query_len,
                        .scratch_doubles = fv_oracle_scratch_doubles(&params, most_keys)};
    loop.scratch = check_arena_alloc(&scene->arena,
                                     (size_t)lane->executor->num_workers * loop.scratch_doubles * sizeof(double));
    fv_executor_run(lane->executor, num_batches, oracle_task, &loop);
}

static double load_lse(const check_scene *scene, const fv_attend_row *row)
{
    const char *at = (const char *)scene->lse.data + row->token * scene->lse.stride_bytes[0] +
                     row->head * scene->lse.stride_bytes[1];
    return fv_float_load(at, FV_DTYPE_F32);
}

/* A row whose query holds a NaN and that sees a key: all of it is NaN. */
static int32_t compare_nan(char *text, size_t text_bytes, const fv_oracle_row *expected, const check_scene *scene)
{
    const fv_attend_row *row = &expected->row;
    const char *at = (const char *)scene->out.data + row->token * scene->out.stride_bytes[0] +
                     row->head * scene->out.stride_bytes[1];
    for (int32_t d = 0; d < scene->out.shape[2]; d++) {
        const float value = fv_float_load(at + d * scene->out.stride_bytes[2], scene->out.dtype);
        if (isnan(value)) continue;
        snprintf(text, text_bytes, "the query holds a NaN, but element %d is %g", d, value);
        return 0;
    }
    const double lse = scene->lse.data ? load_lse(scene, row) : NAN;
    if (isnan(lse)) return 1;
    snprintf(text, text_bytes, "the query holds a NaN, but the lse is %g", lse);
    return 0;
}

/* A row that sees a NaN or an infinity among keys and values: the elements of that value are no numbers, unless its weight
 * may be 0 in fp32. A NaN of a key is in all of the row. Other elements may be anything. */
static int32_t compare_spoilt(char *text, size_t text_bytes, const fv_oracle_row *expected, const check_scene *scene)
{
    const fv_attend_row *row = &expected->row;
    const char *at = (const char *)scene->out.data + row->token * scene->out.stride_bytes[0] +
                     row->head * scene->out.stride_bytes[1];
    for (int32_t d = 0; d < scene->out.shape[2] && !(expected->odd_weight < LEAST_WEIGHT); d++) {
        const float value = fv_float_load(at + d * scene->out.stride_bytes[2], scene->out.dtype);
        if (isfinite(expected->exact[d]) || !isfinite(value)) continue;
        snprintf(text, text_bytes, "element %d is %g, but sees a NaN or an infinity", d, value);
        return 0;
    }
    if (!isnan(expected->lse) || !scene->lse.data || isnan(load_lse(scene, row))) return 1;
    snprintf(text, text_bytes, "a key holds a NaN, but the lse is %g", load_lse(scene, row));
    return 0;
}

static int32_t row_is_spoilt(const fv_oracle_row *expected)
{
    return isnan(expected->lse) || !isinf(expected->odd_weight);
}

static int32_t compare_lse(double *share, char *text, size_t text_bytes, const fv_oracle_row *expected, double lse,
                           int32_t drifts)
{
    if (expected->lse == -INFINITY) {
        if (lse == -INFINITY) return 1;
        snprintf(text, text_bytes, "lse %g of a row without keys", lse);
        return 0;
    }
    const double error = fabs(lse - expected->lse);
    const double tolerance = expected->lse_floor + (drifts ? expected->lse_drift : 0);
    *share = error / tolerance;
    if (error <= tolerance) return 1;
    snprintf(text, text_bytes, "lse %.9g is not %.9g: error %.3g > %.3g", lse, expected->lse, error, tolerance);
    return 0;
}

static int32_t compare_out(double *share, char *text, size_t text_bytes, const fv_oracle_row *expected,
                           const check_scene *scene, int32_t drifts)
{
    const fv_attend_row *row = &expected->row;
    const char *at = (const char *)scene->out.data + row->token * scene->out.stride_bytes[0] +
                     row->head * scene->out.stride_bytes[1];
    double error2 = 0, exact2 = 0;
    for (int32_t d = 0; d < scene->out.shape[2]; d++) {
        const double value = fv_float_load(at + d * scene->out.stride_bytes[2], scene->out.dtype);
        error2 += (value - expected->exact[d]) * (value - expected->exact[d]);
        exact2 += expected->exact[d] * expected->exact[d];
    }
    const double tolerance = 2 * expected->error + expected->out_floor + (drifts ? expected->out_drift : 0);
    *share = tolerance > 0 ? sqrt(error2) / tolerance : 0;
    if (sqrt(error2) <= tolerance) return 1;
    const double norm = exact2 > 0 ? sqrt(exact2) : 1;
    snprintf(text, text_bytes, "relative error %.3g > %.3g (twice the ideal's %.3g, floor %.3g)", sqrt(error2) / norm,
             tolerance / norm, expected->error / norm, expected->out_floor / norm);
    return 0;
}

/* Rows that were not sampled must be numbers at least, but for those whose query is none. */
static int32_t all_finite(char *text, size_t text_bytes, const check_scene *scene)
{
    for (int32_t token = 0; token < scene->num_tokens; token++) {
        for (int32_t head = 0; head < scene->out.shape[1]; head++) {
            if (check_scene_query_is_nan(scene, token, head)) continue;
            const char *at = (const char *)scene->out.data + token * scene->out.stride_bytes[0] +
                             head * scene->out.stride_bytes[1];
            for (int32_t d = 0; d < scene->out.shape[2]; d++) {
                if (isfinite(fv_float_load(at + d * scene->out.stride_bytes[2], scene->out.dtype))) continue;
                snprintf(text, text_bytes, "token %d, head %d: element %d is not finite", token, head, d);
                return 0;
            }
        }
    }
    return 1;
}

/* Puts the pattern over the rows of the batch; then all of the memory must be the pattern. */
static int32_t rest_untouched(char *memory, size_t bytes, const fv_tensor *tensor, int32_t num_tokens)
{
    check_scene_cover_rows(tensor, num_tokens);
    for (size_t i = 0; i < bytes; i++)
        if ((unsigned char)memory[i] != CHECK_PATTERN) return 0;
    return 1;
}

int32_t check_expected_compare(double *worst, char *text, size_t text_bytes, const check_expected *expected,
                               check_scene *scene)
{
    char finding[256];
    *worst = 0;
    for (int32_t r = 0; r < expected->num_rows; r++) {
        const fv_oracle_row *row = &expected->rows[r];
        double share = 0, lse_share = 0;
        int32_t good;
        if (row->lse != -INFINITY && check_scene_query_is_nan(scene, row->row.token, row->row.head)) {
            good = compare_nan(finding, sizeof(finding), row, scene);
        } else if (scene->test->spoilt_keys && row_is_spoilt(row)) {
            good = compare_spoilt(finding, sizeof(finding), row, scene);
        } else if (scene->test->huge_scores && row->lse != -INFINITY) {
            good = !scene->lse.data || !isnan(load_lse(scene, &row->row)); /* the elements of all rows: all_finite */
            if (!good) snprintf(finding, sizeof(finding), "the lse is NaN");
        } else {
            good = compare_out(&share, finding, sizeof(finding), row, scene, expected->drifts);
            if (good && scene->lse.data)
                good = compare_lse(&lse_share, finding, sizeof(finding), row, load_lse(scene, &row->row),
                                   expected->drifts);
        }
        if (!good) {
            snprintf(text, text_bytes, "sequence %d, position %lld, token %d, head %d, %d keys: %s", row->row.seq,
                     (long long)row->row.position, row->row.token, row->row.head,
                     row->row.keys.end - row->row.keys.first, finding);
            return 0;
        }
        *worst = fmax(*worst, fmax(share, lse_share));
    }
    if (!scene->test->spoilt_keys && !all_finite(text, text_bytes, scene)) return 0;
    if (!rest_untouched(scene->out_memory, scene->out_bytes, &scene->out, scene->num_tokens)) {
        snprintf(text, text_bytes, "out is written outside of the rows of the batch");
        return 0;
    }
    if (!rest_untouched(scene->lse_memory, scene->lse_bytes, &scene->lse, scene->num_tokens)) {
        snprintf(text, text_bytes, "lse is written outside of the rows of the batch");
        return 0;
    }
    return 1;
}
