/* The schedule that all MLA backends share. They differ in kernels, splits and where the LSE lies. */
#ifndef FV_BACKENDS_MLA_SCHEDULE_H
#define FV_BACKENDS_MLA_SCHEDULE_H

#include "backends/reasons.h"
#include "backends/schedule.h"
#include "backends/strategy.h"

/* The create() of an MLA backend. */
fv_status fv_mla_create(fv_plan *plan, const fv_strategy *strategy);

/* The schedule() of an MLA backend; `rule` cuts the decodes. */
fv_status fv_mla_schedule(fv_schedule *schedule, const fv_split_rule *rule);

/* Checks the problem against what all MLA backends take, and against the device's kernels (NULL: this
 * CPU), of which one has to rescale as given. */
void fv_mla_why_not(fv_reasons *reasons, const fv_device *device, const fv_problem *problem, fv_rescaling rescaling);

#endif
