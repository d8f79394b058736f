/* Greedy, or: weights e^((logit - max) / temperature), a heap that gives up the likeliest tokens one
 * by one until top-k and top-p are met, and one draw among them. The heap costs O(vocabulary) once
 * and little for each token taken; sorting all would cost milliseconds. */
#include "engine/sampler.h"

#include <math.h>
#include <stdbool.h>

/* Lies in the scratch: weights of all tokens, then ids as a heap. */
typedef struct candidates {
    float *weights; /* [vocabulary] */
    int32_t *heap;  /* ids, the likeliest first */
    int32_t count;
} candidates;

fv_status fv_sampler_init(fv_sampler *sampler, float temperature, int32_t top_k, float top_p, uint64_t seed)
{
    if (!(temperature >= 0.0f) || !isfinite(temperature)) {
        return fv_fail(FV_ERR_INVALID, "temperature is %g; accepted: 0 (greedy) or more", (double)temperature);
    }
    if (top_k < 0) return fv_fail(FV_ERR_INVALID, "top_k is %d; accepted: 0 (all) or more", top_k);
    if (!(top_p >= 0.0f && top_p <= 1.0f)) {
        return fv_fail(FV_ERR_INVALID, "top_p is %g; accepted: 0 to 1 (all)", (double)top_p);
    }
    *sampler = (fv_sampler){.temperature = temperature, .top_k = top_k, .top_p = top_p, .random_state = seed};
    return FV_OK;
}

size_t fv_sampler_scratch_bytes(int32_t vocabulary_size)
{
    return (size_t)vocabulary_size * (sizeof(float) + sizeof(int32_t));
}

/* SplitMix64 (Steele, Lea, Flood 2014): 53 bits in [0, 1). */
static double next_uniform(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    z ^= z >> 31;
    return (double)(z >> 11) * 0x1.0p-53;
}

/* In lanes, which the compiler keeps in vector registers; NaN is never larger. -inf when there is no number, or no
 * larger one. */
static float largest_value(const float *logits, int32_t count)
{
    enum { num_lanes = 16 };
    float lanes[num_lanes];
    int32_t i = 0;
    for (int32_t lane = 0; lane < num_lanes; lane++) lanes[lane] = -INFINITY;
    for (; i + num_lanes <= count; i += num_lanes) {
        for (int32_t lane = 0; lane < num_lanes; lane++) {
            lanes[lane] = logits[i + lane] > lanes[lane] ? logits[i + lane] : lanes[lane];
        }
    }
    for (; i < count; i++) lanes[0] = logits[i] > lanes[0] ? logits[i] : lanes[0];
    for (int32_t lane = 1; lane < num_lanes; lane++) lanes[0] = lanes[lane] > lanes[0] ? lanes[lane] : lanes[0];
    return lanes[0];
}

/* The first of the largest; -1 when no logit is a number. */
static int32_t find_largest(const float *logits, int32_t count)
{
    const float largest = largest_value(logits, count);
    for (int32_t i = 0; i < count; i++) {
        if (logits[i] == largest) return i;
    }
    return -1;
}

static bool is_likelier(const candidates *from, int32_t a, int32_t b)
{
    if (from->weights[a] != from->weights[b]) return from->weights[a] > from->weights[b];
    return a < b;
}

static void sift_down(candidates *from, int32_t position)
{
    const int32_t id = from->heap[position];
    for (;;) {
        int32_t child = 2 * position + 1;
        if (child >= from->count) break;
        if (child + 1 < from->count && is_likelier(from, from->heap[child + 1], from->heap[child])) child++;
        if (!is_likelier(from, from->heap[child], id)) break;
        from->heap[position] = from->heap[child];
        position = child;
    }
    from->heap[position] = id;
}

static int32_t take_likeliest(candidates *from)
{
    const int32_t id = from->heap[0];
    from->heap[0] = from->heap[--from->count];
    from->heap[from->count] = id; /* what was taken lies behind the heap, the likeliest last */
    if (from->count > 0) sift_down(from, 0);
    return id;
}

static double fill_weights(float *weights, const float *logits, int32_t count, float largest, float temperature)
{
    double total = 0.0;
    for (int32_t i = 0; i < count; i++) {
        /* a +inf logit: equals weigh 1, the rest 0 */
        const float below = logits[i] == largest ? 0.0f : logits[i] - largest;
        weights[i] = isnan(logits[i]) ? 0.0f : expf(below / temperature);
        total += (double)weights[i];
    }
    return total;
}

/* Keeps the likeliest tokens, top_k of them at most and top_p of the weight of those. Returns their
 * weight; they lie behind the heap, from its count on. */
static double keep_likeliest(candidates *from, const fv_sampler *sampler, double total)
{
    const int32_t all = from->count;
    const bool cuts_k = sampler->top_k > 0 && sampler->top_k < all;
    if (cuts_k) {
        total = 0.0;
        for (int32_t i = 0; i < sampler->top_k; i++) total += (double)from->weights[take_likeliest(from)];
        if (sampler->top_p <= 0.0f || sampler->top_p >= 1.0f) return total;
    }
    /* Of what top-k kept, likeliest first, as many as reach top_p. */
    double kept = 0.0;
    if (!cuts_k) {
        while (from->count > 0 && kept < (double)sampler->top_p * total) {
            kept += (double)from->weights[take_likeliest(from)];
        }
        return kept;
    }
    int32_t position = all;
    while (position > from->count && kept < (double)sampler->top_p * total) {
        kept += (double)from->weights[from->heap[--position]];
    }
    from->count = position;
    return kept;
}

/* The token at `drawn` on the line of weights ids[0], ids[1], ...; the last with a weight if rounding
 * ran past the end. ids NULL: all tokens in order. */
static int32_t find_drawn(const float *weights, const int32_t *ids, int32_t count, double drawn)
{
    int32_t last = ids ? ids[count - 1] : 0;
    for (int32_t i = 0; i < count; i++) {
        const int32_t id = ids ? ids[i] : i;
        if (!(weights[id] > 0.0f)) continue;
        last = id;
        drawn -= (double)weights[id];
        if (drawn < 0.0) break;
    }
    return last;
}

fv_status fv_sampler_next(int32_t *token, fv_sampler *sampler, const float *logits, int32_t vocabulary_size,
                          void *scratch)
{
    const int32_t best = find_largest(logits, vocabulary_size);
    if (best < 0) return fv_fail(FV_ERR_INTERNAL, "no logit is a number: nothing to sample");
    *token = best;
    if (sampler->temperature == 0.0f || sampler->top_k == 1) return FV_OK;

    candidates from = {.weights = scratch, .count = vocabulary_size};
    from.heap = (int32_t *)(from.weights + vocabulary_size);
    double total = fill_weights(from.weights, logits, vocabulary_size, logits[best], sampler->temperature);
    const double uniform = next_uniform(&sampler->random_state);
    const bool keeps_all = (sampler->top_k == 0 || sampler->top_k >= vocabulary_size) &&
                           (sampler->top_p <= 0.0f || sampler->top_p >= 1.0f);
    if (keeps_all) {
        *token = find_drawn(from.weights, NULL, vocabulary_size, uniform * total);
        return FV_OK;
    }
    for (int32_t i = 0; i < vocabulary_size; i++) from.heap[i] = i;
    for (int32_t i = vocabulary_size / 2 - 1; i >= 0; i--) sift_down(&from, i);
    total = keep_likeliest(&from, sampler, total);
    *token = find_drawn(from.weights, from.heap + from.count, vocabulary_size - from.count, uniform * total);
    return FV_OK;
}
