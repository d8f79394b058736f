/* Greedy, or: weights e^((logit - max) / temperature), of which top-k and top-p keep the likeliest, and one draw
 * among those. Where the cut falls is found without sorting, from the highest of the weights' bits to the lowest: what
 * weights have in each class of bits is added up, whole classes are kept from the top, and the next bits divide the one
 * in which the cut falls. So the time does not grow with the number of tokens kept: after sorting, or by taking one after
 * another from a heap, a vocabulary of 262144 took up to 60 ms. */
#include "engine/sampler.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "core/float.h"

enum {
    weight_bits = 30, /* of weights up to 1 as fp32: no sign, and the highest bit of the exponent is 0 */
    class_bits = 10,
    num_classes = 1 << class_bits,
};

/* Weights whose upper bits are equal. */
typedef struct weight_class {
    double weight; /* together */
    int32_t count;
} weight_class;

/* Lies in the scratch. */
typedef struct candidates {
    weight_class *classes; /* [num_classes] */
    float *weights;        /* [count]; of tokens that are not kept 0 */
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
    return num_classes * sizeof(weight_class) + (size_t)vocabulary_size * sizeof(float);
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

/* Adds up the weights whose bits above `shift` + class_bits are `prefix`. */
static void fill_classes(const candidates *from, uint32_t prefix, int32_t shift)
{
    memset(from->classes, 0, num_classes * sizeof(*from->classes));
    for (int32_t i = 0; i < from->count; i++) {
        const uint32_t bits = fv_bits_of_f32(from->weights[i]);
        if (bits >> shift >> class_bits != prefix) continue;
        weight_class *of = &from->classes[bits >> shift & (num_classes - 1)];
        of->weight += (double)from->weights[i];
        of->count++;
    }
}

/* Leaves those above the weight of these bits, and of its equals the first num_equal. */
static void drop_rest(const candidates *from, uint32_t cut, int32_t num_equal)
{
    for (int32_t i = 0; i < from->count; i++) {
        const uint32_t bits = fv_bits_of_f32(from->weights[i]);
        if (bits > cut || (bits == cut && num_equal-- > 0)) continue;
        from->weights[i] = 0.0f;
    }
}

/* Keeps the likeliest tokens until there are `most` of them or they weigh `enough`, which is above 0. Returns what they
 * weigh. */
static double keep_likeliest(const candidates *from, int32_t most, double enough)
{
    double kept = 0.0;
    uint32_t cut = 0;
    int32_t left = most, at = 0;
    for (int32_t shift = weight_bits - class_bits; shift >= 0; shift -= class_bits) {
        fill_classes(from, cut, shift);
        for (at = num_classes - 1; at > 0; at--) {
            const weight_class *whole = &from->classes[at];
            if (whole->count > left || !(kept + whole->weight < enough)) break;
            kept += whole->weight;
            left -= whole->count;
        }
        cut = cut << class_bits | (uint32_t)at;
    }
    const int32_t most_equal = left < from->classes[at].count ? left : from->classes[at].count;
    int32_t num_equal = 0;
    for (; num_equal < most_equal && kept < enough; num_equal++) kept += (double)fv_f32_of_bits(cut);
    drop_rest(from, cut, num_equal);
    return kept;
}

/* The token at `drawn` on the line of all weights; the last with a weight if rounding ran past the end. */
static int32_t find_drawn(const candidates *from, double drawn)
{
    int32_t last = 0;
    for (int32_t i = 0; i < from->count; i++) {
        if (!(from->weights[i] > 0.0f)) continue;
        last = i;
        drawn -= (double)from->weights[i];
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

    const candidates from = {
        .classes = scratch,
        .weights = (float *)((weight_class *)scratch + num_classes),
        .count = vocabulary_size,
    };
    double total = fill_weights(from.weights, logits, vocabulary_size, logits[best], sampler->temperature);
    if (sampler->top_k > 0 && sampler->top_k < vocabulary_size) total = keep_likeliest(&from, sampler->top_k, INFINITY);
    if (sampler->top_p > 0.0f && sampler->top_p < 1.0f) {
        total = keep_likeliest(&from, vocabulary_size, (double)sampler->top_p * total);
    }
    *token = find_drawn(&from, next_uniform(&sampler->random_state) * total);
    return FV_OK;
}
