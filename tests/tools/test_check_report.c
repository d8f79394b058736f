/* The command that repeats a failure of fovea check, from the command line of the run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "check/report.h"

static void assert_again(const char *expected, const char *const *words)
{
    int argc = 0;
    char *argv[10];
    while (words[argc]) argc++;
    memcpy(argv, words, (size_t)(argc + 1) * sizeof(*argv));
    check_options options;
    assert_int_equal(check_options_parse(&options, argc, argv), FV_OK);
    check_report *report = malloc(sizeof(*report));
    assert_non_null(report);
    check_report_init(report, &options);
    const check_result failure = {.id = "random.17", .runner = "TRITON_ATTN", .verdict = CHECK_FAILED};
    char again[512];
    check_report_write_command(again, sizeof(again), report, &failure);
    assert_string_equal(again, expected);
    check_report_deinit(report);
    free(report);
}

#define ARGV(...) ((const char *[]){"check", __VA_ARGS__, NULL})

static void defaults_are_not_named(void **state)
{
    (void)state;
    assert_again("fovea check --only random.17 --seed 1", ARGV("--quick"));
    assert_again("fovea check --only random.17 --seed 5", ARGV("--seed", "5", "--backends", "all", "--isa", "all"));
}

static void what_chose_the_runners_stays(void **state)
{
    (void)state;
    assert_again("fovea check --only random.17 --seed 1 --isa portable --kernels reference",
                 ARGV("--kernels", "reference", "--isa", "portable"));
    assert_again("fovea check --only random.17 --seed 1 --device cuda:1 --backends TRITON_ATTN,ROCM_ATTN",
                 ARGV("--device=cuda:1", "--backends", "TRITON_ATTN,ROCM_ATTN"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_not_named),
        cmocka_unit_test(what_chose_the_runners_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
