/* The check of the check: wrong kernels, each with one fault, that the comparison must catch. */
#ifndef FV_TOOLS_CHECK_MUTANTS_H
#define FV_TOOLS_CHECK_MUTANTS_H

#include "check/lane.h"
#include "check/report.h"

/* Runs every mutant in every dtype that it applies to, on a batch that uses its feature, and counts
 * those that are caught each time. One that survives is a failed result, and so is a sound kernel that
 * is not let pass on the same batch. */
void check_mutants(check_report *report, const check_lane *lane);

#endif
