/* The sampler: greedy takes the largest, chance follows the weights, the same seed the same way. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "engine/sampler.h"

enum { num_tokens = 8 };
static const float logits[num_tokens] = {0.5f, 2.0f, -1.0f, 1.0f, 2.5f, -3.0f, 0.0f, 1.5f}; /* 4, 1, 7, 3, 0, 6, 2, 5 */

static int32_t sample(fv_sampler *sampler, const float *from)
{
    void *scratch = malloc(fv_sampler_scratch_bytes(num_tokens));
    int32_t token = -1;
    assert_int_equal(fv_sampler_next(&token, sampler, from, num_tokens, scratch), FV_OK);
    free(scratch);
    return token;
}

static void count_samples(int32_t *counts, float temperature, int32_t top_k, float top_p, int32_t num_samples)
{
    fv_sampler sampler;
    assert_int_equal(fv_sampler_init(&sampler, temperature, top_k, top_p, 42), FV_OK);
    memset(counts, 0, num_tokens * sizeof(*counts));
    for (int32_t i = 0; i < num_samples; i++) counts[sample(&sampler, logits)]++;
}

static void test_greedy(void **state)
{
    (void)state;
    fv_sampler sampler;
    assert_int_equal(fv_sampler_init(&sampler, 0.0f, 0, 0.0f, 1), FV_OK);
    assert_int_equal(sample(&sampler, logits), 4);
    const float equal[num_tokens] = {1, 3, 3, 0, 3, 0, 0, 0};
    assert_int_equal(sample(&sampler, equal), 1); /* among equals the lowest id */
    const float with_nan[num_tokens] = {NAN, 1, NAN, 2, NAN, 0, 0, NAN};
    assert_int_equal(sample(&sampler, with_nan), 3);
    const float infinite[num_tokens] = {-INFINITY, -INFINITY, 0, INFINITY, 1, 0, 0, 0};
    assert_int_equal(sample(&sampler, infinite), 3);
}

static void test_frequencies(void **state)
{
    (void)state;
    enum { num_samples = 40000 };
    const float temperature = 0.8f;
    int32_t counts[num_tokens];
    count_samples(counts, temperature, 0, 0.0f, num_samples);
    double total = 0.0;
    for (int32_t i = 0; i < num_tokens; i++) total += exp((double)logits[i] / (double)temperature);
    for (int32_t i = 0; i < num_tokens; i++) {
        const double p = exp((double)logits[i] / (double)temperature) / total;
        const double deviation = sqrt(p * (1.0 - p) * num_samples);
        assert_true(fabs(counts[i] - p * num_samples) < 4.5 * deviation + 1.0);
    }
}

static void test_top_k(void **state)
{
    (void)state;
    int32_t counts[num_tokens];
    count_samples(counts, 1.0f, 3, 0.0f, 2000);
    assert_true(counts[4] > counts[1] && counts[1] > counts[7] && counts[7] > 100);
    assert_int_equal(counts[4] + counts[1] + counts[7], 2000);
    count_samples(counts, 5.0f, 1, 0.0f, 100);
    assert_int_equal(counts[4], 100);
}

static void test_top_p(void **state)
{
    (void)state;
    /* e^logit in order: 12.18, 7.39, 4.48, 2.72, 1.65, 1, 0.37, 0.05: 29.84 in all; 0.41, 0.66, 0.81, 0.90 together */
    int32_t counts[num_tokens];
    count_samples(counts, 1.0f, 0, 0.6f, 2000);
    assert_int_equal(counts[4] + counts[1], 2000);
    assert_true(counts[1] > 500);
    count_samples(counts, 1.0f, 0, 0.7f, 2000);
    assert_int_equal(counts[4] + counts[1] + counts[7], 2000);
    assert_true(counts[7] > 200);
    count_samples(counts, 1.0f, 0, 1e-6f, 100); /* always one at least */
    assert_int_equal(counts[4], 100);
    /* Of the 3 likeliest, 24.05 in all, half is the first alone; 0.6 needs the second. */
    count_samples(counts, 1.0f, 3, 0.5f, 1000);
    assert_int_equal(counts[4], 1000);
    count_samples(counts, 1.0f, 3, 0.6f, 1000);
    assert_int_equal(counts[4] + counts[1], 1000);
    assert_true(counts[1] > 200);
}

/* On many logits: the set of possible tokens is the k likeliest. */
static void test_large_vocabulary(void **state)
{
    (void)state;
    enum { vocabulary = 5000, kept = 20 };
    float *many = malloc(vocabulary * sizeof(*many));
    void *scratch = malloc(fv_sampler_scratch_bytes(vocabulary));
    for (int32_t i = 0; i < vocabulary; i++) many[i] = (float)((i * 7919) % vocabulary) / 500.0f; /* all different */
    fv_sampler sampler;
    assert_int_equal(fv_sampler_init(&sampler, 50.0f, kept, 1.0f, 3), FV_OK);
    int32_t num_seen = 0;
    bool *seen = calloc(vocabulary, sizeof(*seen));
    for (int32_t i = 0; i < 3000; i++) {
        int32_t token;
        assert_int_equal(fv_sampler_next(&token, &sampler, many, vocabulary, scratch), FV_OK);
        assert_true((token * 7919) % vocabulary >= vocabulary - kept);
        num_seen += !seen[token];
        seen[token] = true;
    }
    assert_int_equal(num_seen, kept);
    free(seen);
    free(scratch);
    free(many);
}

static const float *sorted_by;

static int by_logit(const void *a, const void *b)
{
    const int32_t first = *(const int32_t *)a, second = *(const int32_t *)b;
    if (sorted_by[first] != sorted_by[second]) return sorted_by[first] > sorted_by[second] ? -1 : 1;
    return (first > second) - (first < second);
}

/* Draws until each token that sorting keeps should have come, and no other may. */
static void check_against_sorting(const float *many, int32_t count, int32_t top_k, float top_p)
{
    enum { draws_each = 300 };
    double total = 0.0, kept = 0.0;
    int32_t num_kept = 0;
    int32_t *order = malloc((size_t)count * sizeof(*order));
    int32_t *draws = calloc((size_t)count, sizeof(*draws));
    double *weights = malloc((size_t)count * sizeof(*weights));
    void *scratch = malloc(fv_sampler_scratch_bytes(count));
    for (int32_t i = 0; i < count; i++) {
        order[i] = i;
        weights[i] = (double)expf(many[i] - 2.5f);
    }
    sorted_by = many;
    qsort(order, (size_t)count, sizeof(*order), by_logit);
    const int32_t most = top_k > 0 ? top_k : count;
    for (int32_t i = 0; i < most; i++) total += weights[order[i]];
    while (num_kept < most && kept < (double)top_p * total) kept += weights[order[num_kept++]];

    fv_sampler sampler;
    assert_int_equal(fv_sampler_init(&sampler, 1.0f, top_k, top_p, 11), FV_OK);
    for (int32_t i = 0; i < draws_each * num_kept; i++) {
        int32_t token;
        assert_int_equal(fv_sampler_next(&token, &sampler, many, count, scratch), FV_OK);
        draws[token]++;
    }
    for (int32_t i = 0; i < count; i++) {
        const double p = weights[order[i]] / kept;
        const double expected = i < num_kept ? draws_each * num_kept * p : 0.0;
        if (fabs(draws[order[i]] - expected) <= 5.0 * sqrt(expected)) continue;
        fail_msg("top_k %d, top_p %g: the %d. likeliest came %d times, expected %g", top_k, (double)top_p, i,
                 draws[order[i]], expected);
    }
    free(scratch);
    free(weights);
    free(draws);
    free(order);
}

static void test_like_sorting(void **state)
{
    (void)state;
    enum { vocabulary = 200 };
    static const struct {
        int32_t top_k;
        float top_p;
    } cases[] = {{2, 1.0f}, {17, 1.0f}, {60, 1.0f}, {0, 0.01f}, {0, 0.3f}, {0, 0.9f}, {20, 0.51f}, {199, 0.99f}};
    float many[3][vocabulary];
    for (int32_t i = 0; i < vocabulary; i++) {
        many[0][i] = (float)((i * 7919) % vocabulary) / 80.0f;     /* all different */
        many[1][i] = (float)((i * 7919) % vocabulary / 18) / 4.0f; /* 18 of each: of equals the first are kept */
        many[2][i] = 2.5f + 1e-7f * (float)(i % 3);                /* weights of which only the last bits differ */
    }
    for (int32_t i = 0; i < FV_ARRAY_LEN(many); i++) {
        for (int32_t j = 0; j < FV_ARRAY_LEN(cases); j++) {
            check_against_sorting(many[i], vocabulary, cases[j].top_k, cases[j].top_p);
        }
    }
}

static void test_seeds(void **state)
{
    (void)state;
    fv_sampler a, b, c;
    assert_int_equal(fv_sampler_init(&a, 1.0f, 0, 0.9f, 5), FV_OK);
    assert_int_equal(fv_sampler_init(&b, 1.0f, 0, 0.9f, 5), FV_OK);
    assert_int_equal(fv_sampler_init(&c, 1.0f, 0, 0.9f, 6), FV_OK);
    int32_t num_different = 0;
    for (int32_t i = 0; i < 200; i++) {
        const int32_t token = sample(&a, logits);
        assert_int_equal(token, sample(&b, logits));
        num_different += token != sample(&c, logits);
    }
    assert_true(num_different > 50);
}

static void test_refusals(void **state)
{
    (void)state;
    fv_sampler sampler;
    assert_int_equal(fv_sampler_init(&sampler, -0.1f, 0, 0.0f, 0), FV_ERR_INVALID);
    assert_int_equal(fv_sampler_init(&sampler, NAN, 0, 0.0f, 0), FV_ERR_INVALID);
    assert_int_equal(fv_sampler_init(&sampler, INFINITY, 0, 0.0f, 0), FV_ERR_INVALID);
    assert_int_equal(fv_sampler_init(&sampler, 1.0f, -1, 0.0f, 0), FV_ERR_INVALID);
    assert_int_equal(fv_sampler_init(&sampler, 1.0f, 0, 1.5f, 0), FV_ERR_INVALID);
    assert_int_equal(fv_sampler_init(&sampler, 1.0f, 0, NAN, 0), FV_ERR_INVALID);
    assert_int_equal(fv_sampler_init(&sampler, 1.0f, 0, 0.0f, 0), FV_OK);
    const float nothing[2] = {NAN, NAN};
    int32_t token;
    assert_int_equal(fv_sampler_next(&token, &sampler, nothing, 2, NULL), FV_ERR_INTERNAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_frequencies),
        cmocka_unit_test(test_top_k),
        cmocka_unit_test(test_top_p),
        cmocka_unit_test(test_seeds),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_large_vocabulary),
        cmocka_unit_test(test_like_sorting),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
