/* What came out: results, counted and printed from any thread. */
#ifndef FV_TOOLS_CHECK_REPORT_H
#define FV_TOOLS_CHECK_REPORT_H

#include <pthread.h>
#include <stdint.h>

#include "check/options.h"
#include "core/compiler.h"
#include "json.h"

typedef enum check_verdict {
    CHECK_PASSED = 0,
    CHECK_FAILED = 1,
    CHECK_SKIPPED = 2,
} check_verdict;

/* One run of one case. */
typedef struct check_result {
    char id[64];     /* of the case */
    char runner[96]; /* "avx2/rows16", "TRITON_ATTN", ... */
    check_verdict verdict;
    char text[512]; /* the finding, or why it was skipped */
    double worst;   /* largest share of its tolerance that a row took */
} check_result;

void check_result_init(check_result *result, const char *id, const char *runner_format, ...) FV_PRINTF(3, 4);
void check_result_fail(check_result *result, const char *format, ...) FV_PRINTF(2, 3);
void check_result_skip(check_result *result, const char *format, ...) FV_PRINTF(2, 3);

/* A runner's share of the results; a reason and how many runs it skipped. */
typedef struct check_tally {
    char name[160];
    int64_t passed, failed, skipped;
    double worst;
} check_tally;

#define CHECK_MAX_TALLIES 128

typedef struct check_report {
    pthread_mutex_t lock;
    const check_options *options; /* kept; for the command that repeats a failure; with json failures are not printed */
    int64_t passed, failed, skipped;
    int32_t mutants, mutants_caught;
    check_tally runners[CHECK_MAX_TALLIES];
    int32_t num_runners;
    check_tally reasons[CHECK_MAX_TALLIES];
    int32_t num_reasons;
    check_result failures[CHECK_MAX_TALLIES]; /* the first ones */
    char descriptions[CHECK_MAX_TALLIES][512];
    int32_t num_failures;
} check_report;

void check_report_init(check_report *report, const check_options *options);
void check_report_deinit(check_report *report);

/* Counts a result and prints a failure, with `description` of its case and the command that repeats it. */
void check_report_add(check_report *report, const check_result *result, const char *description);

/* The command that repeats the failure. */
void check_report_write_command(char *text, size_t text_bytes, const check_report *report, const check_result *failure);

/* The end: runners, reasons for skipping, mutants, and the line "N passed, N failed, N skipped". */
void check_report_print(const check_report *report);
void check_report_print_json(const check_report *report);

#endif
