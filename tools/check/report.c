/* Counting and printing results. */
#include "check/report.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MAX_PRINTED_FAILURES 20

void check_result_init(check_result *result, const char *id, const char *runner_format, ...)
{
    *result = (check_result){.verdict = CHECK_PASSED};
    snprintf(result->id, sizeof(result->id), "%s", id);
    va_list args;
    va_start(args, runner_format);
    vsnprintf(result->runner, sizeof(result->runner), runner_format, args);
    va_end(args);
}

void check_result_fail(check_result *result, const char *format, ...)
{
    result->verdict = CHECK_FAILED;
    va_list args;
    va_start(args, format);
    vsnprintf(result->text, sizeof(result->text), format, args);
    va_end(args);
}

void check_result_skip(check_result *result, const char *format, ...)
{
    result->verdict = CHECK_SKIPPED;
    va_list args;
    va_start(args, format);
    vsnprintf(result->text, sizeof(result->text), format, args);
    va_end(args);
}

void check_report_init(check_report *report, const check_options *options)
{
    memset(report, 0, sizeof(*report));
    pthread_mutex_init(&report->lock, NULL);
    report->options = options;
}

void check_report_deinit(check_report *report) { pthread_mutex_destroy(&report->lock); }

/* The tally of `name`, made where there is room; else the last one. */
static check_tally *find_tally(check_tally *tallies, int32_t *num_tallies, const char *name)
{
    for (int32_t i = 0; i < *num_tallies; i++)
        if (strncmp(tallies[i].name, name, sizeof(tallies[i].name) - 1) == 0) return &tallies[i];
    if (*num_tallies == CHECK_MAX_TALLIES) return &tallies[CHECK_MAX_TALLIES - 1];
    check_tally *tally = &tallies[(*num_tallies)++];
    snprintf(tally->name, sizeof(tally->name), "%.*s", (int)sizeof(tally->name) - 1, name);
    return tally;
}

static void count(check_tally *tally, const check_result *result)
{
    tally->passed += result->verdict == CHECK_PASSED;
    tally->failed += result->verdict == CHECK_FAILED;
    tally->skipped += result->verdict == CHECK_SKIPPED;
    if (result->worst > tally->worst) tally->worst = result->worst;
}

void check_report_write_command(char *text, size_t text_bytes, const check_report *report, const check_result *failure)
{
    char runners[384];
    check_options_write_runners(runners, sizeof(runners), report->options);
    snprintf(text, text_bytes, "fovea check --only %s --seed %" PRId64 "%s", failure->id, report->options->seed,
             runners);
}

static void add_failure(check_report *report, const check_result *result, const char *description)
{
    if (report->num_failures < CHECK_MAX_TALLIES) {
        const int32_t at = report->num_failures++;
        report->failures[at] = *result;
        snprintf(report->descriptions[at], sizeof(report->descriptions[at]), "%s", description);
    }
    if (report->options->json || report->failed > MAX_PRINTED_FAILURES) return;
    char again[512];
    check_report_write_command(again, sizeof(again), report, result);
    printf("FAIL %s on %s: %s\n     %s\n     again: %s\n", result->id, result->runner, result->text, description,
           again);
    if (report->failed == MAX_PRINTED_FAILURES) printf("further failures are counted, not printed\n");
    fflush(stdout);
}

/* The reason without what is in parentheses, the values of one case: reasons are counted by kind. */
static void shorten_reason(char *text)
{
    char *to = text;
    int32_t depth = 0;
    for (const char *at = text; *at; at++) {
        if (*at == '(') depth++;
        if (depth == 0) *to++ = *at;
        if (*at == '(' && to > text && to[-1] == ' ') to--;
        if (*at == ')') depth--;
    }
    *to = '\0';
}

void check_report_add(check_report *report, const check_result *result, const char *description)
{
    pthread_mutex_lock(&report->lock);
    report->passed += result->verdict == CHECK_PASSED;
    report->failed += result->verdict == CHECK_FAILED;
    report->skipped += result->verdict == CHECK_SKIPPED;
    count(find_tally(report->runners, &report->num_runners, result->runner), result);
    if (result->verdict == CHECK_SKIPPED) {
        char reason[sizeof(result->text)];
        snprintf(reason, sizeof(reason), "%s", result->text);
        shorten_reason(reason);
        count(find_tally(report->reasons, &report->num_reasons, reason), result);
    }
    if (result->verdict == CHECK_FAILED) add_failure(report, result, description);
    pthread_mutex_unlock(&report->lock);
}

void check_report_print(const check_report *report)
{
    for (int32_t i = 0; i < report->num_runners; i++) {
        const check_tally *tally = &report->runners[i];
        printf("  %-40s %7" PRId64 " passed %5" PRId64 " failed %6" PRId64 " skipped", tally->name, tally->passed,
               tally->failed, tally->skipped);
        if (tally->worst > 0) printf("   worst row at %.0f%% of its tolerance", 100 * tally->worst);
        printf("\n");
    }
    for (int32_t i = 0; i < report->num_reasons; i++)
        printf("  skipped %" PRId64 " times: %s\n", report->reasons[i].skipped, report->reasons[i].name);
    if (report->mutants > 0) printf("mutants: %d of %d caught\n", report->mutants_caught, report->mutants);
    printf("%" PRId64 " passed, %" PRId64 " failed, %" PRId64 " skipped\n", report->passed, report->failed,
           report->skipped);
}

static void print_tallies(fv_json *json, const char *key, const check_tally *tallies, int32_t num_tallies)
{
    fv_json_begin_array(json, key);
    for (int32_t i = 0; i < num_tallies; i++) {
        fv_json_begin_row(json);
        fv_json_string(json, "name", tallies[i].name);
        fv_json_int(json, "passed", tallies[i].passed);
        fv_json_int(json, "failed", tallies[i].failed);
        fv_json_int(json, "skipped", tallies[i].skipped);
        fv_json_double(json, "worst_share_of_tolerance", tallies[i].worst);
        fv_json_end_object(json);
    }
    fv_json_end_array(json);
}

/* null: all that there are. */
static void print_runners(fv_json *json, const check_options *options)
{
    fv_json_string(json, "device", options->device);
    fv_json_string(json, "isa", options->isa);
    fv_json_string(json, "kernels", options->kernels);
    fv_json_begin_array(json, "backends");
    for (int32_t i = 0; i < options->num_backends; i++) fv_json_string(json, NULL, options->backends[i]);
    fv_json_end_array(json);
}

void check_report_print_json(const check_report *report)
{
    fv_json json;
    fv_json_init(&json, stdout);
    fv_json_begin_object(&json, NULL);
    fv_json_int(&json, "seed", report->options->seed);
    print_runners(&json, report->options);
    fv_json_int(&json, "passed", report->passed);
    fv_json_int(&json, "failed", report->failed);
    fv_json_int(&json, "skipped", report->skipped);
    fv_json_int(&json, "mutants", report->mutants);
    fv_json_int(&json, "mutants_caught", report->mutants_caught);
    print_tallies(&json, "runners", report->runners, report->num_runners);
    print_tallies(&json, "skip_reasons", report->reasons, report->num_reasons);
    fv_json_begin_array(&json, "failures");
    for (int32_t i = 0; i < report->num_failures; i++) {
        char again[512];
        check_report_write_command(again, sizeof(again), report, &report->failures[i]);
        fv_json_begin_row(&json);
        fv_json_string(&json, "id", report->failures[i].id);
        fv_json_string(&json, "runner", report->failures[i].runner);
        fv_json_string(&json, "finding", report->failures[i].text);
        fv_json_string(&json, "case", report->descriptions[i]);
        fv_json_string(&json, "again", again);
        fv_json_end_object(&json);
    }
    fv_json_end_array(&json);
    fv_json_end_object(&json);
}
