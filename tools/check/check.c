/* fovea check: every kernel and backend against the oracle. */
#include <stdlib.h>

#include "args.h"
#include "check/suite.h"
#include "commands.h"
#include "core/error.h"

static fv_status run(int *exit_code, const check_options *options)
{
    check_report *report = malloc(sizeof(*report)); /* too large for the stack */
    if (!report) return fv_fail(FV_ERR_NO_MEMORY, "no memory for the report");
    check_report_init(report, options);
    const fv_status status = check_suite_run(report, options);
    if (status == FV_OK) {
        if (options->json)
            check_report_print_json(report);
        else
            check_report_print(report);
        *exit_code = report->failed > 0;
    }
    check_report_deinit(report);
    free(report);
    return status;
}

int fv_cmd_check(int argc, char **argv)
{
    check_options options;
    if (check_options_parse(&options, argc, argv) != FV_OK) return fv_args_fail("check");
    if (options.help) {
        check_options_print_help();
        return 0;
    }
    if (options.list) return check_suite_list(&options) == FV_OK ? 0 : fv_args_fail("check");
    int exit_code = 0;
    const fv_status status = run(&exit_code, &options);
    return status == FV_OK ? exit_code : fv_status_fail("check", status);
}
