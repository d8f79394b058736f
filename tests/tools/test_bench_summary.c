/* What rows of fovea bench come to: which of them are neighbours. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "bench/summary.h"
#include "core/compiler.h"

static fv_bench_row row_of(const char *batch, const char *backend, const char *kernels, double ratio)
{
    fv_bench_row row = {.batch = batch, .measured = {.run = {.median_us = 10 * ratio}, .read_us = 10}};
    snprintf(row.backend, sizeof(row.backend), "%s", backend);
    snprintf(row.kernels, sizeof(row.kernels), "%s", kernels);
    return row;
}

static void neighbours_are_of_one_backend_and_kernels(void **state)
{
    (void)state;
    const fv_bench_row rows[] = {
        row_of("q1s64", "A", "avx2", 1.1),   row_of("q1s64", "B", "avx2", 3),
        row_of("q1s64", "A", "portable", 9), row_of("q1s64", "A", "reference", 80),
        row_of("q1s65", "A", "avx2", 1.2),   row_of("q1s65", "B", "avx2", 6),
        row_of("q1s65", "A", "portable", 9), row_of("q1s65", "A", "reference", 400),
    };
    const fv_bench_cliffs cliffs = fv_bench_find_cliffs(rows, FV_ARRAY_LEN(rows), "reference");
    assert_int_equal(cliffs.num_steps, 3);
    assert_int_equal(cliffs.num_cliffs, 1);
    assert_float_equal(cliffs.worst, 2, 1e-9);
    assert_ptr_equal(cliffs.from, &rows[1]);
    assert_ptr_equal(cliffs.to, &rows[5]);
}

static void a_batch_without_a_row_is_passed_over(void **state)
{
    (void)state;
    fv_bench_row rows[] = {row_of("a", "A", "avx2", 1), row_of("b", "A", "avx2", 1), row_of("c", "A", "avx2", 1.5)};
    snprintf(rows[1].skipped, sizeof(rows[1].skipped), "refused");
    const fv_bench_cliffs cliffs = fv_bench_find_cliffs(rows, FV_ARRAY_LEN(rows), "reference");
    assert_int_equal(cliffs.num_steps, 1);
    assert_ptr_equal(cliffs.from, &rows[0]);
}

static void the_reference_alone_has_neighbours(void **state)
{
    (void)state;
    const fv_bench_row rows[] = {row_of("a", "A", "reference", 70), row_of("b", "A", "reference", 80)};
    assert_int_equal(fv_bench_find_cliffs(rows, FV_ARRAY_LEN(rows), "reference").num_steps, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(neighbours_are_of_one_backend_and_kernels),
        cmocka_unit_test(a_batch_without_a_row_is_passed_over),
        cmocka_unit_test(the_reference_alone_has_neighbours),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
