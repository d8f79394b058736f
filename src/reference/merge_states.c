/* merge_states: two partial results of the same rows, weighted by e^lse; merge_ranks: any number. */
#include <math.h>

#include "core/float.h"
#include "reference/attend_row.h"
#include "reference/reference.h"

static double load_lse(const float *lse, int64_t token_stride, int64_t head_stride, int32_t token, int32_t head)
{
    float value;
    memcpy(&value, (const char *)lse + token * token_stride + head * head_stride, sizeof(value));
    return isfinite(value) ? value : -INFINITY;
}

static double side_lse(const fv_merge_side *side, int32_t token, int32_t head)
{
    return load_lse(side->lse, side->lse_token_stride, side->lse_head_stride, token, head);
}

static int32_t side_is_nan(const fv_merge_side *side, int32_t token, int32_t head)
{
    float value;
    memcpy(&value, (const char *)side->lse + token * side->lse_token_stride + head * side->lse_head_stride,
           sizeof(value));
    return isnan(value);
}

/* ln(e^a + e^b) */
static double add_lse(double a, double b)
{
    const double max = fmax(a, b);
    return max == -INFINITY ? max : max + log(exp(a - max) + exp(b - max));
}

/* The sink counts only where there are keys. */
static double with_sink(double lse, const float *sinks, int32_t head)
{
    return sinks && lse > -INFINITY ? add_lse(lse, sinks[head]) : lse;
}

/* e^(lse - total): 0 for a side without keys. */
static double weight_of(double lse, double total) { return lse == -INFINITY ? 0 : exp(lse - total); }

static double weighed_element(const fv_merge_side *side, fv_dtype dtype, int32_t token, int32_t head, double weight,
                              int32_t d)
{
    if (weight == 0) return 0; /* a side without keys may hold anything */
    const char *row = (const char *)side->out + token * side->token_stride + head * side->head_stride;
    return weight * fv_float_load(row + (size_t)d * fv_dtype_bytes(dtype), dtype);
}

static void merge_row(const fv_merge_params *params, int32_t token, int32_t head)
{
    const int32_t is_nan = params->nan_stays &&
                           (side_is_nan(&params->a, token, head) || side_is_nan(&params->b, token, head));
    const double lse_a = side_lse(&params->a, token, head);
    const double lse_b = side_lse(&params->b, token, head);
    const double lse = is_nan ? NAN : with_sink(add_lse(lse_a, lse_b), params->sinks, head);
    const double weight_a = weight_of(lse_a, lse), weight_b = weight_of(lse_b, lse);

    /* Element by element, since out may be a or b. */
    char *row = (char *)params->out + token * params->token_stride + head * params->head_stride;
    for (int32_t d = 0; d < params->head_size; d++) {
        double value = weighed_element(&params->a, params->dtype, token, head, weight_a, d) +
                       weighed_element(&params->b, params->dtype, token, head, weight_b, d);
        if (is_nan) value = NAN;
        fv_row_store(row + (size_t)d * fv_dtype_bytes(params->out_dtype), &value, 1, params->out_dtype);
    }
    if (!params->lse) return;
    fv_row_store((char *)params->lse + token * params->lse_token_stride + head * params->lse_head_stride, &lse, 1,
                 FV_DTYPE_F32);
}

fv_status fv_reference_merge_states(const fv_launch *launch, const fv_merge_params *params)
{
    (void)launch;
    for (int32_t token = 0; token < params->num_tokens; token++)
        for (int32_t head = 0; head < params->num_heads; head++) merge_row(params, token, head);
    return FV_OK;
}

static double total_lse(const fv_merge_ranks_params *params, int32_t token, int32_t head)
{
    if (params->total_lse) {
        return load_lse(params->total_lse, params->total_token_stride, params->total_head_stride, token, head);
    }
    double lse = -INFINITY;
    for (int32_t rank = 0; rank < params->num_ranks; rank++) {
        const fv_merge_side side = fv_merge_rank(params, rank);
        lse = add_lse(lse, side_lse(&side, token, head));
    }
    return with_sink(lse, params->sinks, head);
}

static void merge_ranks_row(const fv_merge_ranks_params *params, int32_t token, int32_t head)
{
    const double lse = total_lse(params, token, head);
    char *row = (char *)params->out + token * params->token_stride + head * params->head_stride;
    for (int32_t d = 0; params->out && d < params->head_size; d++) {
        double value = 0;
        for (int32_t rank = 0; rank < params->num_ranks && lse > -INFINITY; rank++) {
            const fv_merge_side side = fv_merge_rank(params, rank);
            value += weighed_element(&side, params->dtype, token, head, weight_of(side_lse(&side, token, head), lse),
                                     d);
        }
        fv_row_store(row + (size_t)d * fv_dtype_bytes(params->out_dtype), &value, 1, params->out_dtype);
    }
    if (!params->lse) return;
    fv_row_store((char *)params->lse + token * params->lse_token_stride + head * params->lse_head_stride, &lse, 1,
                 FV_DTYPE_F32);
}

fv_status fv_reference_merge_ranks(const fv_launch *launch, const fv_merge_ranks_params *params)
{
    (void)launch;
    for (int32_t token = 0; token < params->num_tokens; token++)
        for (int32_t head = 0; head < params->num_heads; head++) merge_ranks_row(params, token, head);
    return FV_OK;
}
