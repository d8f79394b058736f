/* A few hundred experts at most: plain scans. What may not be chosen (any more) is NaN in an array of scores;
 * scores that are NaN by themselves, from a broken model, count as the worst, so that a token always has
 * num_used different experts. */
#include "engine/expert_router.h"

#include <math.h>
#include <stdlib.h>

static void softmax(float *x, int32_t size)
{
    float max = x[0], sum = 0.0f;
    for (int32_t i = 1; i < size; i++) max = fmaxf(max, x[i]);
    for (int32_t i = 0; i < size; i++) {
        x[i] = expf(x[i] - max);
        sum += x[i];
    }
    for (int32_t i = 0; i < size; i++) x[i] /= sum;
}

static void sigmoid(float *x, int32_t size)
{
    for (int32_t i = 0; i < size; i++) x[i] = 1.0f / (1.0f + expf(-x[i]));
}

/* -1 where nothing is left. */
static int32_t find_best(const float *scores, int32_t size)
{
    int32_t best = -1;
    for (int32_t i = 0; i < size; i++) {
        if (!isnan(scores[i]) && (best < 0 || scores[i] > scores[best])) best = i;
    }
    return best;
}

static float score_group(const float *scores, int32_t size, fv_gating gating)
{
    const int32_t best = find_best(scores, size);
    if (gating == FV_GATING_SOFTMAX) return scores[best];
    float second = -INFINITY;
    for (int32_t i = 0; i < size; i++) {
        if (i != best) second = fmaxf(second, scores[i]);
    }
    return scores[best] + second;
}

/* Leaves the best groups. */
static void limit_to_groups(float *scores, const fv_expert_config *experts)
{
    const int32_t size = experts->num_experts / experts->num_groups;
    float group_scores[FV_MAX_EXPERT_GROUPS];
    bool is_used[FV_MAX_EXPERT_GROUPS] = {false};
    for (int32_t i = 0; i < experts->num_groups; i++) {
        const float score = score_group(scores + i * size, size, experts->gating);
        group_scores[i] = isnan(score) ? -INFINITY : score; /* inf - inf */
    }
    for (int32_t i = 0; i < experts->num_used_groups; i++) {
        const int32_t best = find_best(group_scores, experts->num_groups);
        is_used[best] = true;
        group_scores[best] = NAN;
    }
    for (int32_t i = 0; i < experts->num_experts; i++) {
        if (!is_used[i / size]) scores[i] = NAN;
    }
}

static int compare_experts(const void *a, const void *b)
{
    return ((const fv_expert_route *)a)->expert - ((const fv_expert_route *)b)->expert;
}

void fv_expert_route_row(fv_expert_route *routes, float *logits, const float *bias, const fv_expert_config *experts,
                         float *scratch)
{
    const int32_t count = experts->num_experts;
    if (experts->gating == FV_GATING_SIGMOID) {
        sigmoid(logits, count);
    } else {
        softmax(logits, count);
    }
    for (int32_t i = 0; i < count; i++) {
        const float score = bias ? logits[i] + bias[i] : logits[i];
        scratch[i] = isnan(score) ? -INFINITY : score;
    }
    if (experts->num_groups > 1) limit_to_groups(scratch, experts);
    for (int32_t i = 0; i < experts->num_used; i++) {
        const int32_t best = find_best(scratch, count);
        routes[i] = (fv_expert_route){best, logits[best]};
        scratch[best] = NAN;
    }
    qsort(routes, (size_t)experts->num_used, sizeof(*routes), compare_experts);

    float sum = 1e-20f; /* as DeepSeek-V3 has it: never a division by zero */
    for (int32_t i = 0; i < experts->num_used; i++) sum += routes[i].weight;
    const float factor = experts->normalises ? experts->weights_scale / sum : experts->weights_scale;
    for (int32_t i = 0; i < experts->num_used; i++) routes[i].weight *= factor;
}
