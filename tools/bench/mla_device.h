/* An MLA layer on a device other than the CPU: its times, and its result beside another's. */
#ifndef FV_TOOLS_BENCH_MLA_DEVICE_H
#define FV_TOOLS_BENCH_MLA_DEVICE_H

#include "bench/device_ceilings.h"
#include "bench/mla_report.h"
#include "bench/mla_workload.h"

/* Medians of `repeat` runs (up to FV_CLOCK_MAX_SAMPLES) at the length of the workload's plan, which is on the static
 * grid: the layer as a graph, its stages by events between plain launches. Attention is what the products leave. */
fv_status fv_mla_measure_on_device(fv_mla_result *result, fv_mla_workload *workload, fv_device_clock *clock,
                                   const fv_device_ceilings *ceilings, int32_t repeat);

/* Runs the layer of two workloads of the same sizes, each of which has its plan and the same history, and fills
 * *error with the largest error of a row of the output, relative to `expected` in 2-norm. */
fv_status fv_mla_compare(double *error, fv_mla_workload *workload, fv_mla_workload *expected);

#endif
