/* Times plans on one workload, and the ceilings between their runs, so that all see the same clock
 * frequency and the same neighbours. */
#ifndef FV_TOOLS_BENCH_MEASURE_H
#define FV_TOOLS_BENCH_MEASURE_H

#include "bench/device_ceilings.h"
#include "bench/samples.h"
#include "bench/workload.h"

typedef struct fv_measurement {
    fv_samples run;      /* fv_plan_run; on a device a graph of it on the static grid, replayed */
    double update_us;    /* fv_plan_update on the host, median; on a device that of the static grid */
    double read_us;      /* a pure read of the same pages: the first quartile, a ceiling is the machine undisturbed;
                          * on a device the median of a graph of it */
    double flops_per_us; /* of a loop of the kernels' own multiply-adds, likewise; on a device of a GEMM, 0: it has
                          * none */
    fv_samples list;     /* on a device: a graph of the schedule for this step's lengths */
    fv_samples plain;    /* that schedule launched without a graph */
    fv_samples graph_latency,
        plain_latency; /* of run and plain into an idle stream, until the host knows; wall clock */
    double list_update_us;
    int32_t quiet_runs, all_runs; /* where only quiet ones count: so many did, of so many; none: all do. Else 0 */
    size_t workspace_bytes;
    size_t buffer_bytes; /* that the plan holds */
    char backend[48];
    char kernels[32]; /* the table, e.g. "avx2" */
    char variant[64]; /* of attend_paged */
    char layout[32];
    char path[16];  /* "2D", "3D" or "2D+3D": what the schedule did */
    char plan[768]; /* fv_plan_describe */
} fv_measurement;

typedef struct fv_measure_limits {
    double min_seconds; /* run each plan at least so long ... */
    int32_t min_runs;   /* ... and so often; where they are not asked for, never much longer than 10 x min_seconds */
    int32_t runs_are_asked; /* 1: min_runs whatever they take */
    /* 1: runs and samples of the ceilings that are not quiet (quiet.h) do not count; min_runs is of those that do, in ten times as
     * many at most. */
    int32_t only_quiet;
} fv_measure_limits;

/* 1: so many rounds of so many plans, which took `seconds`, will do. */
int32_t fv_measure_is_enough(const fv_measure_limits *limits, int32_t num_rounds, int32_t num_plans, double seconds);

/* A plan that is measured beside others. */
typedef struct fv_contender {
    fv_plan_options options;
    fv_status status; /* of fv_plan_create and the first update */
    char refusal[512];
    fv_measurement measured; /* where status is FV_OK */
} fv_contender;

/* Creates the plans that the contenders' options ask for, on the workload's device, and times them in turn. A plan that cannot be made
 * is left out: its status and text say why. Fails where a run does. */
fv_status fv_measure(fv_contender *contenders, int32_t num_contenders, fv_workload *workload,
                     const fv_measure_limits *limits);

/* The same on a device other than the CPU. */
fv_status fv_measure_on_device(fv_contender *contenders, int32_t num_contenders, fv_workload *workload,
                               const fv_measure_limits *limits, fv_device_clock *clock,
                               const fv_device_ceilings *ceilings);

/* The problem of a workload as its plans take it. */
fv_problem fv_measured_problem(const fv_workload *workload);

/* Fills in what the plan says of itself. */
void fv_measure_describe(fv_measurement *measurement, fv_plan *plan);

/* Seconds that one run took: the first, with cold code, for an estimate. */
fv_status fv_measure_once(double *seconds, fv_workload *workload, const fv_plan_options *options);

#endif
