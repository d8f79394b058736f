/* Times plans on one workload, and the ceilings between their runs, so that all see the same clock
 * frequency and the same neighbours. */
#ifndef FV_TOOLS_BENCH_MEASURE_H
#define FV_TOOLS_BENCH_MEASURE_H

#include "bench/workload.h"

typedef struct fv_samples {
    double median_us;
    double min_us;
    double quartile_us; /* the first */
    double spread;      /* (third quartile - first quartile) / median */
    int32_t count;
} fv_samples;

typedef struct fv_measurement {
    fv_samples run;      /* fv_plan_run */
    double update_us;    /* fv_plan_update, median */
    double read_us;      /* a pure read of the same pages, first quartile: a ceiling is the machine undisturbed */
    double flops_per_us; /* of the multiply-add loop, likewise */
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
    int32_t min_runs;   /* ... and so often, but never much longer than 10 x min_seconds */
} fv_measure_limits;

/* A plan that is measured beside others. */
typedef struct fv_contender {
    fv_plan_options options;
    fv_status status; /* of fv_plan_create and the first update */
    char refusal[512];
    fv_measurement measured; /* where status is FV_OK */
} fv_contender;

/* Creates the plans that the contenders' options ask for, and times them in turn. A plan that cannot be made
 * is left out: its status and text say why. Fails where a run does. */
fv_status fv_measure(fv_contender *contenders, int32_t num_contenders, fv_workload *workload,
                     const fv_measure_limits *limits);

/* Seconds that one run took: the first, with cold code, for an estimate. */
fv_status fv_measure_once(double *seconds, fv_workload *workload, const fv_plan_options *options);

#endif
