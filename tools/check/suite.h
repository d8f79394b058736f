/* The suite: which cases there are and how they are spread over the threads. */
#ifndef FV_TOOLS_CHECK_SUITE_H
#define FV_TOOLS_CHECK_SUITE_H

#include "check/options.h"
#include "check/report.h"

/* Runs what the options select. A failure to start (no such kernels, no case of that name) is an error
 * with a text, and so is that nothing was run; findings are in the report. */
fv_status check_suite_run(check_report *report, const check_options *options);

/* Prints the ids of what the options select, each case with its description; or that as JSON. */
fv_status check_suite_list(const check_options *options);

#endif
