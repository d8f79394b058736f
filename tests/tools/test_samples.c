/* What the times of a measurement come to, and how many of them are enough. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "bench/measure.h"

static void the_median_of_an_even_count_is_a_mean(void **state)
{
    (void)state;
    double four[] = {8, 1, 2, 4}, three[] = {7, 1, 3}, one[] = {5};
    assert_float_equal(fv_samples_of(four, 4).median_us, 3, 0);
    assert_float_equal(fv_samples_of(three, 3).median_us, 3, 0);
    assert_float_equal(fv_samples_of(one, 1).median_us, 5, 0);
    assert_float_equal(fv_samples_of(NULL, 0).median_us, 0, 0);
}

static void runs_of_default_end_with_ten_times_the_time(void **state)
{
    (void)state;
    const fv_measure_limits limits = {.min_seconds = 1, .min_runs = 5};
    assert_false(fv_measure_is_enough(&limits, 0, 2, 100));
    assert_false(fv_measure_is_enough(&limits, 4, 2, 19));
    assert_true(fv_measure_is_enough(&limits, 1, 2, 20));
    assert_false(fv_measure_is_enough(&limits, 5, 2, 1.9));
    assert_true(fv_measure_is_enough(&limits, 5, 2, 2));
}

static void runs_that_are_asked_for_take_what_they_take(void **state)
{
    (void)state;
    const fv_measure_limits limits = {.min_seconds = 1, .min_runs = 5, .runs_are_asked = 1};
    assert_false(fv_measure_is_enough(&limits, 4, 2, 1000));
    assert_true(fv_measure_is_enough(&limits, 5, 2, 1000));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_median_of_an_even_count_is_a_mean),
        cmocka_unit_test(runs_of_default_end_with_ten_times_the_time),
        cmocka_unit_test(runs_that_are_asked_for_take_what_they_take),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
