/* The softmax of strips with vectors of 16 lanes in plain C, against sums in double. Its native form, and that of 8 lanes,
 * run in `fovea check`. */
#define FV_STRIP_WIDE 1

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#define FV_ISA portable
#include "kernels/cpu/row_strip.h"

enum { KEYS = 24, FIRST = 3, END = 21, FIRST_KEY = 100 };

static float next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) * 0x1p-23f - 1.0f;
}

/* One tile after another, so that sums are taken over from the first. is_edge: row i sees keys up to FIRST_KEY + i % 32. */
static void check_softmax(int32_t num_vectors, int32_t is_edge, const float *v_scales)
{
    uint32_t random = 9;
    fv_attend_params params = {.alibi = FV_ALIBI_NONE};
    fv_attend_job job = {.params = &params};
    fv_row_strip strip = {.num_vectors = num_vectors};
    const int32_t width = fv_row_strip_width(&strip);
    double all[2][FV_STRIP_ROWS] = {{0}};
    float scores[KEYS * FV_STRIP_ROWS], dots[KEYS * FV_STRIP_ROWS];
    for (int32_t row = 0; row < width; row++) {
        strip.max[row] = -INFINITY;
        strip.end[row] = is_edge ? FIRST_KEY + row % 32 : INT32_MAX;
    }
    for (int32_t tile = 0; tile < 2; tile++) {
        const fv_strip_span span = {.job = &job,
                                    .v_scales = v_scales,
                                    .first_key = FIRST_KEY,
                                    .first = FIRST,
                                    .end = END,
                                    .is_edge = is_edge,
                                    .scale = {.dot = 7.0f}};
        float before[FV_STRIP_ROWS];
        memcpy(before, strip.max, sizeof(before));
        for (int32_t i = 0; i < KEYS * width; i++) dots[i] = next_random(&random);
        memcpy(scores, dots, sizeof(scores));
        fv_row_strip_softmax(&strip, scores, &span);
        for (int32_t row = 0; row < width; row++) {
            float max = before[row];
            for (int32_t key = FIRST; key < END; key++)
                if (FIRST_KEY + key < strip.end[row]) max = fmaxf(max, 7.0f * dots[key * width + row]);
            assert_true(strip.max[row] == max);
            const double shrink = max == -INFINITY ? 0.0 : exp2((double)before[row] - max);
            assert_true(fabs(strip.rescale[row] - shrink) <= 1e-6 * shrink);
            all[1][row] = all[0][row] * shrink;
            for (int32_t key = FIRST; key < END; key++) {
                const int32_t is_seen = FIRST_KEY + key < strip.end[row];
                const double weight = is_seen ? exp2(7.0 * dots[key * width + row] - max) : 0.0;
                const double stored = weight * (v_scales ? v_scales[key] : 1.0f);
                assert_true(fabs(scores[key * width + row] - stored) <= 3e-6 * stored);
                all[1][row] += weight;
            }
            assert_true(fabs(strip.sum[row] - all[1][row]) <= 3e-6 * all[1][row]);
            all[0][row] = all[1][row];
        }
        assert_memory_equal(scores, dots, (size_t)(FIRST * width) * sizeof(float));
        assert_memory_equal(scores + END * width, dots + END * width, (size_t)((KEYS - END) * width) * sizeof(float));
    }
}

static void weights_are_exponentials(void **state)
{
    (void)state;
    for (int32_t num_vectors = 1; num_vectors <= FV_STRIP_VECTORS; num_vectors++) check_softmax(num_vectors, 0, NULL);
}

/* Rows 0 to 3 see no key, others some, some all. */
static void hidden_keys_have_no_weight(void **state)
{
    (void)state;
    for (int32_t num_vectors = 1; num_vectors <= FV_STRIP_VECTORS; num_vectors++) check_softmax(num_vectors, 1, NULL);
}

static void values_have_scales(void **state)
{
    (void)state;
    uint32_t random = 2;
    float scales[KEYS];
    for (int32_t key = 0; key < KEYS; key++) scales[key] = 1.5f + next_random(&random);
    check_softmax(FV_STRIP_VECTORS, 0, scales);
    check_softmax(FV_STRIP_VECTORS, 1, scales);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_are_exponentials),
        cmocka_unit_test(hidden_keys_have_no_weight),
        cmocka_unit_test(values_have_scales),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
