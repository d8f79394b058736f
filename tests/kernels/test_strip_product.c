/* The products of strips with vectors of 16 lanes in plain C, against sums in order. Their native form, and that of 8 lanes,
 * run in `fovea check`. */
#define FV_STRIP_WIDE 1

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "kernels/cpu/strip_product.h"

enum { KEYS = 40, FIRST = 9, END = 37, HEAD = 104, COLUMNS = 48, STRIDE = 112 };

static float next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) * 0x1p-23f - 1.0f;
}

static void fill(float *values, int32_t num, uint32_t *state)
{
    for (int32_t i = 0; i < num; i++) values[i] = next_random(state);
}

/* Strips of one, two and three registers. */
static void scores_are_dot_products(void **state)
{
    (void)state;
    uint32_t random = 3;
    static float keys[KEYS * STRIDE], q[HEAD * FV_STRIP_ROWS], scores[KEYS * FV_STRIP_ROWS];
    fill(keys, KEYS * STRIDE, &random);
    fill(q, HEAD * FV_STRIP_ROWS, &random);
    for (int32_t num_vectors = 1; num_vectors <= FV_STRIP_VECTORS; num_vectors++) {
        const int32_t width = num_vectors * FV_STRIP_LANES;
        for (int32_t i = 0; i < KEYS * FV_STRIP_ROWS; i++) scores[i] = NAN;
        fv_strip_ahead nothing = {0};
        fv_strip_scores(scores, keys, STRIDE, q, FIRST, END, HEAD, FV_STRIP_DEPTH, num_vectors, &nothing);
        for (int32_t key = FIRST; key < END; key++) {
            for (int32_t row = 0; row < width; row++) {
                double sum = 0;
                for (int32_t d = 0; d < HEAD; d++) sum += (double)keys[key * STRIDE + d] * q[d * width + row];
                assert_true(fabs(scores[key * width + row] - sum) < 2e-5);
            }
        }
        for (int32_t i = 0; i < FIRST / 8 * 8 * width; i++)
            assert_true(isnan(scores[i])); /* keys before are not touched */
    }
}

/* `values` of either layout; `hidden`: a key whose weights are 0 and whose values are NaN, or -1. */
static void check_sums(const fv_strip_values *values, const float *natural, int32_t num_vectors, int32_t rescales,
                       int32_t hidden)
{
    uint32_t random = 5;
    static float weights[KEYS * FV_STRIP_ROWS], sums[FV_STRIP_ROWS * COLUMNS], before[FV_STRIP_ROWS * COLUMNS];
    float rescale[FV_STRIP_ROWS];
    const int32_t width = num_vectors * FV_STRIP_LANES;
    fill(weights, KEYS * FV_STRIP_ROWS, &random);
    fill(sums, FV_STRIP_ROWS * COLUMNS, &random);
    fill(rescale, FV_STRIP_ROWS, &random);
    if (hidden >= 0) memset(weights + hidden * width, 0, (size_t)width * sizeof(float));
    memcpy(before, sums, sizeof(sums));
    fv_strip_accumulate(sums, COLUMNS, weights, rescales ? rescale : NULL, values, FIRST, END, num_vectors,
                        hidden >= 0);
    for (int32_t row = 0; row < width; row++) {
        for (int32_t d = 0; d < COLUMNS; d++) {
            double sum = (double)before[row * COLUMNS + d] * (rescales ? rescale[row] : 1.0f);
            for (int32_t key = FIRST; key < END; key++)
                if (key != hidden) sum += (double)weights[key * width + row] * natural[key * STRIDE + d];
            assert_true(fabs(sums[row * COLUMNS + d] - sum) < 1e-5);
        }
    }
    const size_t rest = (size_t)((FV_STRIP_ROWS - width) * COLUMNS) * sizeof(float);
    assert_memory_equal(sums + width * COLUMNS, before + width * COLUMNS, rest);
}

/* Two registers of columns and a rest of one; rows that lie whole, and panels. */
static void sums_are_weighted_values(void **state)
{
    (void)state;
    uint32_t random = 4;
    static float rows[KEYS * STRIDE], panels[COLUMNS * KEYS];
    for (int32_t hidden = -1; hidden <= 20; hidden += 21) {
        fill(rows, KEYS * STRIDE, &random);
        for (int32_t d = 0; d < COLUMNS && hidden >= 0; d++) rows[hidden * STRIDE + d] = NAN;
        for (int32_t key = 0; key < KEYS; key++) {
            for (int32_t d = 0; d < COLUMNS; d++)
                panels[d / FV_STRIP_PANEL * KEYS * FV_STRIP_PANEL + key * FV_STRIP_PANEL + d % FV_STRIP_PANEL] =
                    rows[key * STRIDE + d];
        }
        const fv_strip_values whole = fv_strip_values_of_rows(rows, STRIDE);
        const fv_strip_values in_panels = {panels, FV_STRIP_PANEL, KEYS * FV_STRIP_PANEL};
        for (int32_t num_vectors = 1; num_vectors <= FV_STRIP_VECTORS; num_vectors++) {
            check_sums(&whole, rows, num_vectors, 0, hidden);
            check_sums(&in_panels, rows, num_vectors, 1, hidden);
        }
    }
}

static void rows_fill_registers(void **state)
{
    (void)state;
    assert_int_equal(fv_strip_num_vectors(1), 1);
    assert_int_equal(fv_strip_num_vectors(16), 1);
    assert_int_equal(fv_strip_num_vectors(17), 2);
    assert_int_equal(fv_strip_num_vectors(FV_STRIP_ROWS), FV_STRIP_VECTORS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_are_dot_products),
        cmocka_unit_test(sums_are_weighted_values),
        cmocka_unit_test(rows_fill_registers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
