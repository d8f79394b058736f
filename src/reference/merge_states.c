/* merge_states: two partial results of the same rows, weighted by e^lse. */
#include <math.h>

#include "core/float.h"
#include "reference/attend_row.h"
#include "reference/reference.h"

static double side_lse(const fv_merge_side *side, int32_t token, int32_t head)
{
    float lse;
    memcpy(&lse, (const char *)side->lse + token * side->lse_token_stride + head * side->lse_head_stride, sizeof(lse));
    return isfinite(lse) ? lse : -INFINITY;
}

static void add_side(double *out, const fv_merge_params *params, const fv_merge_side *side, int32_t token, int32_t head,
                     double weight, int32_t d)
{
    if (weight == 0) return; /* a side without keys may hold anything */
    const char *row = (const char *)side->out + token * side->token_stride + head * side->head_stride;
    *out += weight * fv_float_load(row + (size_t)d * fv_dtype_bytes(params->dtype), params->dtype);
}

static void merge_row(const fv_merge_params *params, int32_t token, int32_t head)
{
    const double lse_a = side_lse(&params->a, token, head);
    const double lse_b = side_lse(&params->b, token, head);
    const double max = fmax(lse_a, lse_b);
    const int32_t empty = max == -INFINITY;
    const double sum = empty ? 1 : exp(lse_a - max) + exp(lse_b - max);
    const double weight_a = empty ? 0 : exp(lse_a - max) / sum;
    const double weight_b = empty ? 0 : exp(lse_b - max) / sum;

    /* Element by element, since out may be a or b. */
    char *row = (char *)params->out + token * params->token_stride + head * params->head_stride;
    for (int32_t d = 0; d < params->head_size; d++) {
        double value = 0;
        add_side(&value, params, &params->a, token, head, weight_a, d);
        add_side(&value, params, &params->b, token, head, weight_b, d);
        fv_row_store(row + (size_t)d * fv_dtype_bytes(params->dtype), &value, 1, params->dtype);
    }
    if (!params->lse) return;
    const double lse = max + log(sum);
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
