/* GEMM against double sums, for both compute types where the CPU has them; threads and, in
 * batch-invariant mode, other rows must not change a bit. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "core/float.h"
#include "engine/gemm.h"
#include "engine/gemm_kernel.h"

/* A weight and X of hashed values in [-1, 1); a pure function of the place, as tasks read in any order. */
static float value_at(int64_t index, uint32_t salt)
{
    uint32_t bits = (uint32_t)index * 2654435761u + salt * 40503u;
    bits ^= bits >> 15;
    bits *= 2246822519u;
    bits ^= bits >> 13;
    return (float)(int32_t)(bits >> 8) / 8388608.0f - 1.0f;
}

static fv_status read_rows(float *rows, void *user, int64_t first_row, int64_t num_rows)
{
    const int64_t in_features = *(const int64_t *)user;
    for (int64_t i = 0; i < num_rows * in_features; i++) rows[i] = value_at(first_row * in_features + i, 1);
    return FV_OK;
}

static fv_status fail_to_read(float *rows, void *user, int64_t first_row, int64_t num_rows)
{
    (void)rows;
    (void)user;
    (void)num_rows;
    return fv_fail(FV_ERR_IO, "row %d is bad", first_row == 0 ? 0 : 1);
}

typedef struct fixture {
    fv_context *context;
    fv_gemm_library *gemm;
    fv_gemm_weight *weight;
    int64_t num_outputs, in_features, max_rows;
    float *x;
} fixture;

static void set_up(fixture *f, fv_dtype dtype, int32_t num_threads, int64_t num_outputs, int64_t in_features,
                   int64_t max_rows)
{
    const fv_context_options options = {.struct_size = sizeof(options), .num_threads = num_threads, .no_plugins = 1};
    *f = (fixture){.num_outputs = num_outputs, .in_features = in_features, .max_rows = max_rows};
    assert_int_equal(fv_context_create(&f->context, &options), FV_OK);
    assert_int_equal(fv_gemm_create(&f->gemm, f->context, dtype), FV_OK);
    assert_int_equal(fv_gemm_weight_create(&f->weight, f->gemm, num_outputs, in_features, read_rows, &f->in_features),
                     FV_OK);
    assert_int_equal(fv_gemm_reserve(f->gemm, max_rows), FV_OK);
    f->x = malloc((size_t)(max_rows * in_features) * sizeof(float));
    for (int64_t i = 0; i < max_rows * in_features; i++) f->x[i] = value_at(i, 2);
}

static void tear_down(fixture *f)
{
    free(f->x);
    fv_gemm_weight_destroy(f->weight);
    fv_gemm_destroy(f->gemm);
    fv_context_destroy(f->context);
}

/* Y with a guard behind it that must stay. The caller frees it. */
static float *run(fixture *f, const float *x, int64_t num_rows, bool batch_invariant)
{
    const int64_t size = num_rows * f->num_outputs;
    float *y = malloc((size_t)(size + 16) * sizeof(float));
    for (int64_t i = 0; i < size + 16; i++) y[i] = 12345.0f;
    assert_int_equal(fv_gemm_run(f->gemm, y, x, f->weight, num_rows, batch_invariant), FV_OK);
    for (int64_t i = size; i < size + 16; i++) assert_true(y[i] == 12345.0f);
    return y;
}

static void check_values(const fixture *f, const float *y, int64_t num_rows)
{
    /* fp32 sums of K terms below 1; bf16 rounds X and W by 2^-9 each. */
    const bool is_bf16 = fv_gemm_dtype(f->gemm) == FV_DTYPE_BF16;
    const double bound = (is_bf16 ? 0.01 : 3e-6) * sqrt((double)f->in_features);
    for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t output = 0; output < f->num_outputs; output += 1 + output / 7) {
            double sum = 0.0;
            for (int64_t k = 0; k < f->in_features; k++) {
                sum += (double)f->x[row * f->in_features + k] * (double)value_at(output * f->in_features + k, 1);
            }
            const double error = fabs(sum - (double)y[row * f->num_outputs + output]);
            if (!(error <= bound)) {
                fail_msg("row %d output %d: %g instead of %g", (int)row, (int)output,
                         (double)y[row * f->num_outputs + output], sum);
            }
        }
    }
}

static const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_BF16};

static bool is_there(fv_dtype dtype) { return dtype == FV_DTYPE_F32 || !fv_gemm_bf16_why_not(); }

static void test_values(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {{576, 576}, {960, 576}, {576, 1536}, {1, 32}, {97, 64}, {200, 33}};
    static const int64_t row_counts[] = {1, 2, 3, 4, 5, 16, 17, 33, 49, 65, 97, 127, 128, 129, 300};
    for (int32_t d = 0; d < FV_ARRAY_LEN(dtypes); d++) {
        if (!is_there(dtypes[d])) continue;
        for (int32_t s = 0; s < FV_ARRAY_LEN(shapes); s++) {
            fixture f;
            set_up(&f, dtypes[d], 2, shapes[s][0], shapes[s][1], 300);
            for (int32_t r = 0; r < FV_ARRAY_LEN(row_counts); r++) {
                for (int32_t invariant = 0; invariant < 2; invariant++) {
                    if (invariant && row_counts[r] > 20) continue;
                    float *y = run(&f, f.x, row_counts[r], invariant);
                    if (s > 2 || r % 4 == 0) check_values(&f, y, row_counts[r]);
                    free(y);
                }
            }
            tear_down(&f);
        }
    }
}

static void test_threads_do_not_matter(void **state)
{
    (void)state;
    enum { num_rows = 150 };
    for (int32_t d = 0; d < FV_ARRAY_LEN(dtypes); d++) {
        if (!is_there(dtypes[d])) continue;
        fixture one, three;
        set_up(&one, dtypes[d], 1, 960, 576, num_rows);
        set_up(&three, dtypes[d], 3, 960, 576, num_rows);
        float *a = run(&one, one.x, num_rows, false);
        float *b = run(&three, three.x, num_rows, false);
        assert_memory_equal(a, b, num_rows * 960 * sizeof(float));
        free(a);
        free(b);
        tear_down(&one);
        tear_down(&three);
    }
}

static void test_other_rows_do_not_matter(void **state)
{
    (void)state;
    enum { num_rows = 140 };
    for (int32_t d = 0; d < FV_ARRAY_LEN(dtypes); d++) {
        if (!is_there(dtypes[d])) continue;
        fixture f;
        set_up(&f, dtypes[d], 2, 576, 1536, num_rows);
        float *all = run(&f, f.x, num_rows, true);
        static const int64_t rows[] = {0, 1, 77, 128, 139};
        for (int32_t i = 0; i < FV_ARRAY_LEN(rows); i++) {
            float *alone = run(&f, f.x + rows[i] * f.in_features, 1, true);
            assert_memory_equal(alone, all + rows[i] * f.num_outputs, (size_t)f.num_outputs * sizeof(float));
            free(alone);
        }
        free(all);
        tear_down(&f);
    }
}

/* A weight with more input features than those before it, made after the room for rows. */
static void test_weights_may_come_late(void **state)
{
    (void)state;
    for (int32_t d = 0; d < FV_ARRAY_LEN(dtypes); d++) {
        if (!is_there(dtypes[d])) continue;
        fixture f;
        set_up(&f, dtypes[d], 2, 200, 32, 130);
        fv_gemm_weight_destroy(f.weight);
        free(f.x);
        f.num_outputs = 70;
        f.in_features = 1024;
        f.x = malloc((size_t)(f.max_rows * f.in_features) * sizeof(float));
        for (int64_t i = 0; i < f.max_rows * f.in_features; i++) f.x[i] = value_at(i, 2);
        assert_int_equal(fv_gemm_weight_create(&f.weight, f.gemm, 70, 1024, read_rows, &f.in_features), FV_OK);
        float *y = run(&f, f.x, f.max_rows, false);
        check_values(&f, y, f.max_rows);
        free(y);
        tear_down(&f);
    }
}

static void test_failures(void **state)
{
    (void)state;
    fixture f;
    set_up(&f, FV_DTYPE_F32, 2, 300, 64, 4);
    fv_gemm_weight *weight;
    assert_int_equal(fv_gemm_weight_create(&weight, f.gemm, 300, 64, fail_to_read, NULL), FV_ERR_IO);
    assert_non_null(strstr(fv_last_error(), "is bad")); /* the text of a worker reaches this thread */
    assert_null(weight);
    float y[300 * 5];
    assert_int_equal(fv_gemm_run(f.gemm, y, f.x, f.weight, 5, false), FV_ERR_INVALID);
    tear_down(&f);

    fv_gemm_library *gemm;
    assert_int_equal(fv_gemm_create(&gemm, NULL, FV_DTYPE_F16), FV_ERR_INVALID);
    if (fv_gemm_bf16_why_not()) {
        assert_int_equal(fv_gemm_create(&gemm, NULL, FV_DTYPE_BF16), FV_ERR_UNSUPPORTED);
        print_message("bf16 is left out: %s\n", fv_gemm_bf16_why_not());
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_threads_do_not_matter),
        cmocka_unit_test(test_other_rows_do_not_matter),
        cmocka_unit_test(test_weights_may_come_late),
        cmocka_unit_test(test_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
