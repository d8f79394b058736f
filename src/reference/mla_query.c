/* mla_query: sums in double, each result rounded once, q_nope also between its products. */
#include "core/float.h"
#include "reference/attend_row.h"
#include "reference/reference.h"

enum { MAX_HEAD = 1024 }; /* elements of q */

enum { RUN = 256 }; /* elements that are widened together */

static void project_head(double *q, const fv_mla_query_params *params, int64_t token, int64_t head)
{
    const int32_t size = params->nope_size + params->rope_size;
    const int64_t bytes = (int64_t)fv_dtype_bytes(params->dtype);
    const char *x = (const char *)params->x + token * params->x_row_stride;
    const char *weights = (const char *)params->q_up + head * size * params->q_up_row_stride;
    for (int32_t i = 0; i < size; i++) q[i] = 0;
    for (int32_t first = 0; first < params->depth; first += RUN) {
        const int32_t run = fv_min_i32(RUN, params->depth - first);
        double own[RUN], row[RUN];
        fv_row_load(own, x + first * bytes, run, params->dtype);
        for (int32_t i = 0; i < size; i++) {
            fv_row_load(row, weights + i * params->q_up_row_stride + first * bytes, run, params->dtype);
            for (int32_t d = 0; d < run; d++) q[i] += own[d] * row[d];
        }
    }
}

static void absorb_head(char *out, const double *q, const fv_mla_query_params *params, int64_t head)
{
    const fv_dtype dtype = params->dtype;
    const int64_t bytes = (int64_t)fv_dtype_bytes(dtype);
    const char *weights = (const char *)params->kv_up + head * params->kv_up_head_stride;
    double rounded[MAX_HEAD];
    for (int32_t d = 0; d < params->nope_size; d++) {
        uint32_t narrow;
        fv_row_store((char *)&narrow, &q[d], 1, dtype);
        rounded[d] = fv_float_load(&narrow, dtype);
    }
    for (int32_t first = 0; first < params->latent_size; first += RUN) {
        const int32_t run = fv_min_i32(RUN, params->latent_size - first);
        double sums[RUN] = {0}, row[RUN];
        for (int32_t d = 0; d < params->nope_size; d++) {
            fv_row_load(row, weights + d * params->kv_up_row_stride + first * bytes, run, dtype);
            for (int32_t i = 0; i < run; i++) sums[i] += rounded[d] * row[i];
        }
        fv_row_store(out + first * bytes, sums, run, dtype);
    }
}

/* Position -1: as it is. */
static void rotate_query(double *q, const fv_rope_params *rope, int64_t position)
{
    const int32_t half = rope->rope_dim / 2, interleaved = rope->style == FV_ROPE_INTERLEAVED;
    for (int32_t i = 0; i < half && position >= 0; i++) {
        double *first = q + (interleaved ? 2 * i : i), *second = q + (interleaved ? 2 * i + 1 : i + half);
        const double a = *first, b = *second;
        const double c = rope->cos[position * rope->row_stride + i], s = rope->sin[position * rope->row_stride + i];
        *first = a * c - b * s;
        *second = b * c + a * s;
    }
}

static const char *why_not(const fv_launch *launch, const fv_mla_query_params *params)
{
    (void)launch;
    return params->nope_size + params->rope_size > MAX_HEAD ? "heads of q have more than 1024 elements" : NULL;
}

static const char *slower(const fv_launch *launch, const fv_mla_query_params *params)
{
    (void)launch, (void)params;
    return "the reference is never faster";
}

fv_status fv_reference_mla_query(const fv_launch *launch, const fv_mla_query_params *params)
{
    const fv_rope_params *rope = &params->keys.rope;
    const int64_t row_elements = params->latent_size + params->rope_size;
    const int64_t bytes = (int64_t)fv_dtype_bytes(params->dtype);
    const int32_t num_tokens = fv_rope_tokens(rope);
    for (int64_t token = 0; token < num_tokens; token++) {
        for (int64_t head = 0; head < params->num_heads; head++) {
            double q[MAX_HEAD];
            char *out = (char *)params->out + (token * params->num_heads + head) * row_elements * bytes;
            project_head(q, params, token, head);
            absorb_head(out, q, params, head);
            rotate_query(q + params->nope_size, rope, fv_rope_position(rope, token));
            fv_row_store(out + params->latent_size * bytes, q + params->nope_size, params->rope_size, params->dtype);
        }
    }
    return fv_reference_rope_kv_write(launch, &params->keys);
}

const fv_mla_query_step fv_reference_mla_query_step = {why_not, slower, fv_reference_mla_query};
