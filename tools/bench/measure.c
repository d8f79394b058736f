#include "bench/measure.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backends/backend.h"
#include "core/error.h"
#include "planner/plan.h"

#define MAX_SAMPLES 2000
#define WORKSPACE_ALIGNMENT 256

static double now_us(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static fv_samples summarize(double *values, int32_t count)
{
    qsort(values, (size_t)count, sizeof(*values), compare_doubles);
    const double median = values[count / 2];
    return (fv_samples){
        .median_us = median,
        .min_us = values[0],
        .quartile_us = values[count / 4],
        .spread = median > 0 ? (values[count * 3 / 4] - values[count / 4]) / median : 0,
        .count = count,
    };
}

typedef struct timed_plan {
    fv_plan *plan;
    void *workspace;
} timed_plan;

static void timed_plan_deinit(timed_plan *timed)
{
    fv_plan_destroy(timed->plan);
    free(timed->workspace);
}

static fv_status timed_plan_init(timed_plan *timed, fv_workload *workload, const fv_plan_options *options)
{
    *timed = (timed_plan){0};
    fv_problem problem = workload->problem;
    if (problem.kind == FV_ATTENTION_MHA && problem.mha.head_size != problem.mha.v_head_size) {
        problem.kv_layout = FV_KV_LAYOUT_STRIDED;
        problem.kv_layout_any = 0;
    }
    fv_status status = fv_plan_create(&timed->plan, workload->context, &problem, &workload->bounds, options);
    if (status != FV_OK) return status;
    status = fv_workload_set_layout(workload, fv_plan_kv_layout(timed->plan));
    if (status == FV_OK) {
        const size_t bytes = fv_plan_workspace_bytes(timed->plan);
        timed->workspace = aligned_alloc(WORKSPACE_ALIGNMENT,
                                         (bytes + WORKSPACE_ALIGNMENT) / WORKSPACE_ALIGNMENT * WORKSPACE_ALIGNMENT);
        if (!timed->workspace) status = fv_fail(FV_ERR_NO_MEMORY, "no memory for a workspace of %zu bytes", bytes);
    }
    if (status == FV_OK) status = fv_plan_update(timed->plan, &workload->batch, NULL);
    if (status != FV_OK) timed_plan_deinit(timed);
    return status;
}

/* What the schedule did: Q blocks whole ("2D"), cut ("3D"), or some of each. */
static const char *path_of(const fv_plan *plan)
{
    const fv_work_item *items = fv_step_buffers_on_device(&plan->buffers).items;
    int32_t num_cut = 0;
    for (int32_t i = 0; i < plan->num_items; i++) num_cut += items[i].partial >= 0;
    if (plan->num_items == 0) return plan->num_segments > 1 ? "3D" : "2D";
    if (num_cut == 0) return "2D";
    return num_cut == plan->num_items ? "3D" : "2D+3D";
}

static void describe(fv_measurement *m, fv_plan *plan)
{
    snprintf(m->backend, sizeof(m->backend), "%s", plan->backend->name);
    snprintf(m->kernels, sizeof(m->kernels), "%s", plan->kernels->name);
    snprintf(m->variant, sizeof(m->variant), "%s", plan->variant->name);
    snprintf(m->plan, sizeof(m->plan), "%s", fv_plan_describe(plan));
    snprintf(m->path, sizeof(m->path), "%s", path_of(plan));
}

static double median_update(fv_plan *plan, const fv_batch *batch)
{
    double times[5];
    for (int32_t i = 0; i < 5; i++) {
        const double start = now_us();
        fv_plan_update(plan, batch, NULL);
        times[i] = now_us() - start;
    }
    return summarize(times, 5).median_us;
}

typedef struct sample_arrays {
    double run[MAX_SAMPLES], read[MAX_SAMPLES], compute[MAX_SAMPLES]; /* us */
    double operations;                                                /* of one sample of compute */
    int32_t count;
} sample_arrays;

/* Runs layer after layer; the read of the same pages goes to the copy half way round, so that it
 * neither finds what the kernel left in the caches nor warms what comes next. */
static fv_status take_samples(sample_arrays *samples, fv_workload *w, timed_plan *timed,
                              const fv_measure_limits *limits)
{
    const double start = now_us();
    volatile uint64_t sink = 0;
    samples->count = 0;
    for (int32_t i = 0; i < MAX_SAMPLES; i++) {
        const double elapsed = (now_us() - start) * 1e-6;
        if (elapsed >= limits->min_seconds && i >= limits->min_runs) break;
        if (elapsed >= 10 * limits->min_seconds && i > 0) break;

        const int32_t copy = i % w->num_copies;
        const double run_start = now_us();
        const fv_status status = fv_plan_run(timed->plan, &w->layers[copy], timed->workspace, NULL);
        const double run_end = now_us();
        if (status != FV_OK) return status;

        fv_ceiling_compute(w->context); /* wakes workers that a kernel of one thread let sleep */
        const double compute_start = now_us();
        samples->operations = fv_ceiling_compute(w->context);
        const double read_start = now_us();
        sink += fv_ceiling_read(w->context, w->caches[(copy + w->num_copies / 2) % w->num_copies], w->ranges,
                                w->num_ranges);
        const double read_end = now_us();
        samples->run[i] = run_end - run_start;
        samples->read[i] = read_end - read_start;
        samples->compute[i] = read_start - compute_start;
        samples->count++;
    }
    (void)sink;
    return FV_OK;
}

fv_status fv_measure(fv_measurement *m, fv_workload *workload, const fv_plan_options *options,
                     const fv_measure_limits *limits)
{
    *m = (fv_measurement){0};
    timed_plan timed;
    fv_status status = timed_plan_init(&timed, workload, options);
    if (status != FV_OK) return status;

    sample_arrays *samples = malloc(sizeof(*samples));
    if (!samples) status = fv_fail(FV_ERR_NO_MEMORY, "no memory for samples");
    if (status == FV_OK) {
        m->update_us = median_update(timed.plan, &workload->batch);
        const fv_measure_limits once = {0, 1}; /* touches code, workspace and output */
        status = take_samples(samples, workload, &timed, &once);
    }
    if (status == FV_OK) status = take_samples(samples, workload, &timed, limits);
    if (status == FV_OK) {
        describe(m, timed.plan);
        m->run = summarize(samples->run, samples->count);
        m->read_us = summarize(samples->read, samples->count).quartile_us;
        m->flops_per_us = samples->operations / summarize(samples->compute, samples->count).quartile_us;
    }
    free(samples);
    timed_plan_deinit(&timed);
    return status;
}

fv_status fv_measure_once(double *seconds, fv_workload *workload, const fv_plan_options *options)
{
    timed_plan timed;
    fv_status status = timed_plan_init(&timed, workload, options);
    if (status != FV_OK) return status;
    const double start = now_us();
    status = fv_plan_run(timed.plan, &workload->layers[0], timed.workspace, NULL);
    *seconds = (now_us() - start) * 1e-6;
    timed_plan_deinit(&timed);
    return status;
}
