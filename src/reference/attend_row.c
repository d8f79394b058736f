/* One row of attention in double. */
#include "reference/attend_row.h"

#include <math.h>

#include "core/float.h"

fv_attend_row fv_attend_row_of(const fv_attend_params *params, int32_t seq, int32_t token, int32_t head)
{
    const int32_t query_len = params->query_start[seq + 1] - params->query_start[seq];
    const int32_t seq_len = params->seq_lens[seq];
    const int64_t context = (int64_t)seq_len - query_len;
    const int32_t causal = params->causal ? params->causal[seq] : 1;
    return (fv_attend_row){
        .seq = seq,
        .token = params->query_start[seq] + token,
        .head = head,
        .kv_head = head / (params->num_heads / params->num_kv_heads),
        .context = context,
        .position = context + token,
        .keys = fv_row_keys(&params->context_parallel, seq_len, context + token, causal, params->window),
    };
}

int32_t fv_attend_row_sees(const fv_attend_row *row, const fv_attend_params *params, int32_t key)
{
    if (!params->tree_mask) return 1;
    const int64_t new_token = fv_key_position(&params->context_parallel, key) - row->context;
    if (new_token < 0) return 1;
    return new_token < FV_TREE_TOKENS && (params->tree_mask[row->token] >> new_token & 1u);
}

double fv_attend_row_alibi(const fv_attend_row *row, const fv_attend_params *params, int32_t key)
{
    if (params->alibi == FV_ALIBI_NONE || !params->alibi_slopes) return 0;
    const double slope = params->alibi_slopes[row->head];
    const double distance = (double)(fv_key_position(&params->context_parallel, key) - row->position);
    if (params->alibi == FV_ALIBI_LINEAR) return slope * distance;
    return distance <= 0 ? -slope * sqrt(-distance) : 0;
}

#define SCORE_LIMIT 3e38 /* what partial results hold, as fp32 */

double fv_attend_row_score(const fv_attend_row *row, const fv_attend_params *params, int32_t key, double dot)
{
    double score = params->scale * dot;
    if (params->soft_cap > 0) score = params->soft_cap * tanh(score / params->soft_cap);
    if (score > SCORE_LIMIT) score = SCORE_LIMIT; /* NaN stays */
    if (score < -SCORE_LIMIT) score = -SCORE_LIMIT;
    return score + fv_attend_row_alibi(row, params, key);
}

void fv_attend_row_query(double *q, const fv_attend_row *row, const fv_attend_params *params)
{
    const char *from = (const char *)params->q + row->token * params->q_token_stride +
                       row->head * params->q_head_stride;
    fv_row_load(q, from, params->head_size, params->q_dtype);
}

void fv_softmax_state_init(fv_softmax_state *state, double *out, int32_t size)
{
    *state = (fv_softmax_state){.max = -INFINITY, .sum = 0, .out = out, .size = size};
    for (int32_t d = 0; d < size; d++) out[d] = 0;
}

/* Makes `max` the maximum of the state. */
static void rescale(fv_softmax_state *state, double max)
{
    if (max <= state->max) return;
    const double factor = exp(state->max - max); /* 0 where there was no key: max is finite */
    state->max = max;
    state->sum *= factor;
    for (int32_t d = 0; d < state->size; d++) state->out[d] *= factor;
}

void fv_softmax_state_add(fv_softmax_state *state, double score, const double *v)
{
    rescale(state, score);
    const double p = exp(score - state->max);
    state->sum += p;
    if (!v) return;
    for (int32_t d = 0; d < state->size; d++) state->out[d] += p * v[d];
}

void fv_softmax_state_merge(fv_softmax_state *state, float max, float sum, const float *out)
{
    if (max == -INFINITY) return;
    rescale(state, max);
    const double factor = exp(max - state->max);
    state->sum += factor * sum;
    for (int32_t d = 0; d < state->size; d++) state->out[d] += factor * out[d];
}

double fv_softmax_state_finish(fv_softmax_state *state, const float *sink)
{
    if (state->max == -INFINITY) return -INFINITY;
    if (sink && *sink > -INFINITY) fv_softmax_state_add(state, *sink, NULL);
    for (int32_t d = 0; d < state->size; d++) state->out[d] /= state->sum;
    return state->max + log(state->sum);
}

void fv_row_load(double *row, const void *from, int32_t size, fv_dtype dtype)
{
    const int64_t step = (int64_t)fv_dtype_bytes(dtype);
    for (int32_t d = 0; d < size; d++) row[d] = fv_float_load((const char *)from + d * step, dtype);
}

void fv_row_store(void *to, const double *row, int32_t size, fv_dtype dtype)
{
    const int64_t step = (int64_t)fv_dtype_bytes(dtype);
    for (int32_t d = 0; d < size; d++) fv_float_store((char *)to + d * step, (float)row[d], dtype);
}
