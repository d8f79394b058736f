/* Contenders take turns: round after round each runs once, then the ceilings are measured once for all. So
 * a neighbour that comes and goes, or a clock that falls, meets all of them alike. Every run takes the next
 * copy of the cache, and the order within a round rotates, so that no plan is always the first after the
 * ceilings, and none finds the pages that the one before it brought in. Each has its own views of the copies
 * (a layout is a view of the same random bytes), and all share one workspace, as plans on a stream do.
 *
 *   round 0   A copy 0 | B copy 1 | C copy 2 | peak, read
 *   round 1   B copy 3 | C copy 4 | A copy 5 | peak, read
 */
#include "bench/measure.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/backend.h"
#include "bench/bench_memory.h"
#include "bench/quiet.h"
#include "core/cpu.h"
#include "core/error.h"
#include "planner/plan.h"

#define MAX_SAMPLES 2000
#define NUM_LEVELS (FV_ISA_AMX + 1)

/* Times, and the slower probe (quiet.h) of those before and behind each. */
typedef struct timed_runs {
    double us[MAX_SAMPLES];
    double probe_us[MAX_SAMPLES]; /* 0: none is asked for */
} timed_runs;

/* A plan and the copies as it sees them. */
typedef struct timed_plan {
    fv_plan *plan;
    fv_layer *layers; /* [num_copies] */
    fv_isa isa;       /* whose peak is its ceiling */
    timed_runs runs;
} timed_plan;

static void timed_plan_destroy(timed_plan *timed)
{
    if (!timed) return;
    fv_plan_destroy(timed->plan);
    free(timed->layers);
    free(timed);
}

static fv_status make_views(timed_plan *timed, const fv_workload *workload)
{
    timed->layers = calloc((size_t)workload->num_copies, sizeof(*timed->layers));
    if (!timed->layers) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d layers", workload->num_copies);
    fv_status status = FV_OK;
    for (int32_t copy = 0; copy < workload->num_copies && status == FV_OK; copy++) {
        status = fv_workload_view(&timed->layers[copy], workload, copy, fv_plan_kv_layout(timed->plan));
    }
    return status;
}

fv_problem fv_measured_problem(const fv_workload *workload)
{
    fv_problem problem = workload->problem;
    if (problem.kind == FV_ATTENTION_MHA && problem.mha.head_size != problem.mha.v_head_size) {
        problem.kv_layout = FV_KV_LAYOUT_STRIDED; /* named layouts have K and V of one size */
        problem.kv_layout_any = 0;
    }
    return problem;
}

/* The level of a table, by its name; that of the machine where a table is of none. */
static fv_isa level_of(const fv_kernel_table *kernels)
{
    for (fv_isa isa = FV_ISA_PORTABLE; isa < fv_cpu_isa(); isa++)
        if (strcmp(kernels->name, fv_isa_name(isa)) == 0) return isa;
    return fv_cpu_isa();
}

static fv_status timed_plan_create(timed_plan **out, const fv_workload *workload, const fv_plan_options *options)
{
    *out = NULL;
    const fv_problem problem = fv_measured_problem(workload);
    timed_plan *timed = calloc(1, sizeof(*timed));
    if (!timed) return fv_fail(FV_ERR_NO_MEMORY, "no memory for samples");
    fv_status status = fv_plan_create(&timed->plan, workload->context, &problem, &workload->bounds, options);
    if (status == FV_OK) status = fv_plan_update(timed->plan, &workload->batch, NULL);
    if (status == FV_OK) status = make_views(timed, workload);
    if (status != FV_OK) {
        timed_plan_destroy(timed);
        return status;
    }
    timed->isa = level_of(timed->plan->kernels);
    *out = timed;
    return FV_OK;
}

/* Memory for the largest of the plans. */
static fv_status alloc_workspace(void **workspace, fv_device *device, timed_plan *const *plans, int32_t num_plans)
{
    size_t bytes = 0;
    for (int32_t i = 0; i < num_plans; i++) {
        const size_t wanted = fv_plan_workspace_bytes(plans[i]->plan);
        if (wanted > bytes) bytes = wanted;
    }
    return fv_bench_alloc(workspace, device, bytes);
}

/* What the schedule did: Q blocks whole ("2D"), cut ("3D"), or some of each. */
static const char *path_of(const fv_plan *plan)
{
    const fv_work_item *items = fv_step_buffers_on_device(&plan->buffers).items;
    int32_t num_cut = 0;
    if (!plan->device->host_is_device) return plan->num_segments > 1 || plan->used.num_reduces > 0 ? "3D" : "2D";
    for (int32_t i = 0; i < plan->used.num_items; i++) num_cut += items[i].partial >= 0;
    if (plan->used.num_items == 0) return plan->num_segments > 1 ? "3D" : "2D";
    if (num_cut == 0) return "2D";
    return num_cut == plan->used.num_items ? "3D" : "2D+3D";
}

void fv_measure_describe(fv_measurement *m, fv_plan *plan)
{
    snprintf(m->backend, sizeof(m->backend), "%s", plan->backend->name);
    snprintf(m->kernels, sizeof(m->kernels), "%s", plan->kernels->name);
    snprintf(m->variant, sizeof(m->variant), "%s", plan->paged->name);
    snprintf(m->layout, sizeof(m->layout), "%s",
             plan->problem.type == FV_ATTENTION_ENCODER ? "none" : fv_kv_layout_name(fv_plan_kv_layout(plan)));
    m->workspace_bytes = fv_plan_workspace_bytes(plan);
    m->buffer_bytes = fv_plan_buffer_bytes(plan);
    snprintf(m->plan, sizeof(m->plan), "%s", fv_plan_describe(plan));
    snprintf(m->path, sizeof(m->path), "%s", path_of(plan));
}

static double median_update(fv_plan *plan, const fv_batch *batch)
{
    double times[5];
    for (int32_t i = 0; i < 5; i++) {
        const double start = fv_now_us();
        fv_plan_update(plan, batch, NULL);
        times[i] = fv_now_us() - start;
    }
    return fv_samples_of(times, 5).median_us;
}

/* The plans of a measurement, and what is measured once a round. */
typedef struct race {
    fv_workload *workload;
    timed_plan **plans; /* [num_plans] */
    int32_t num_plans;
    void *workspace;
    timed_runs *reads;
    timed_runs *computes;          /* [NUM_LEVELS], of the levels that some plan has */
    double operations[NUM_LEVELS]; /* of one sample of compute */
    double read_us;                /* what they come to */
    double flops_per_us[NUM_LEVELS];
    int32_t only_quiet;
    double probe_us; /* the last one */
    int32_t num_rounds;
    int32_t next_copy;
} race;

static int32_t has_level(const race *r, fv_isa isa)
{
    for (int32_t i = 0; i < r->num_plans; i++)
        if (r->plans[i]->isa == isa) return 1;
    return 0;
}

/* A run of a round that has just ended. */
static void keep_run(race *r, timed_runs *runs, int32_t round, double us)
{
    const double before = r->probe_us;
    if (r->only_quiet) r->probe_us = fv_quiet_probe(r->workload->context);
    runs->us[round] = us;
    runs->probe_us[round] = before > r->probe_us ? before : r->probe_us;
}

static int32_t count_quiet(const timed_runs *runs, int32_t num_rounds)
{
    int32_t num_quiet = 0;
    for (int32_t i = 0; i < num_rounds; i++) num_quiet += runs->probe_us[i] <= fv_quiet_limit();
    return num_quiet;
}

/* Moves the quiet runs to the front and returns their number; all where none is, or none is asked for. */
static int32_t take_quiet(timed_runs *runs, const race *r)
{
    int32_t num_quiet = 0;
    for (int32_t i = 0; i < r->num_rounds && r->only_quiet; i++)
        if (runs->probe_us[i] <= fv_quiet_limit()) runs->us[num_quiet++] = runs->us[i];
    return num_quiet > 0 ? num_quiet : r->num_rounds;
}

/* The read of the same pages goes to the copy half way round, so that it neither finds what a kernel left in
 * the caches nor warms what comes next. */
static void sample_ceilings(race *r, int32_t round)
{
    fv_workload *w = r->workload;
    const int32_t copy = (r->next_copy + w->num_copies / 2) % w->num_copies;
    int32_t is_awake = 0;
    for (fv_isa isa = 0; isa < NUM_LEVELS; isa++) {
        if (!has_level(r, isa)) continue;
        /* Wakes workers that one thread let sleep. */
        if (!is_awake) fv_ceiling_compute(w->context, w->problem.q_dtype, w->problem.kv_dtype, isa);
        is_awake = 1;
        const double start = fv_now_us();
        r->operations[isa] = fv_ceiling_compute(w->context, w->problem.q_dtype, w->problem.kv_dtype, isa);
        keep_run(r, &r->computes[isa], round, fv_now_us() - start);
    }
    const double read_start = fv_now_us();
    volatile uint64_t sink = fv_ceiling_read(w->context, w->caches[copy], w->ranges, w->num_ranges);
    const double read_end = fv_now_us();
    (void)sink;
    keep_run(r, r->reads, round, read_end - read_start);
}

static fv_status sample_plan(race *r, timed_plan *timed, int32_t round)
{
    const fv_layer *layer = &timed->layers[r->next_copy];
    r->next_copy = (r->next_copy + 1) % r->workload->num_copies;
    const double start = fv_now_us();
    const fv_status status = fv_plan_run(timed->plan, layer, r->workspace, NULL);
    keep_run(r, &timed->runs, round, fv_now_us() - start);
    return status;
}

int32_t fv_measure_is_enough(const fv_measure_limits *limits, int32_t num_rounds, int32_t num_plans, double seconds)
{
    const double min_seconds = limits->min_seconds * num_plans;
    if (num_rounds >= limits->min_runs) return seconds >= min_seconds;
    return !limits->runs_are_asked && num_rounds > 0 && seconds >= 10 * min_seconds;
}

/* Rounds that count: of the plan that has the fewest. */
static int32_t num_counting(const race *r)
{
    int32_t num = r->num_rounds;
    for (int32_t i = 0; i < r->num_plans && r->only_quiet; i++)
        num = fv_min_i32(num, count_quiet(&r->plans[i]->runs, r->num_rounds));
    return num;
}

static int32_t is_enough(const race *r, const fv_measure_limits *limits, double seconds)
{
    if (fv_measure_is_enough(limits, num_counting(r), r->num_plans, seconds)) return 1;
    if (!r->only_quiet) return 0;
    return limits->runs_are_asked ? r->num_rounds >= 10 * limits->min_runs
                                  : seconds >= 10 * limits->min_seconds * r->num_plans && r->num_rounds > 0;
}

static fv_status run_rounds(race *r, const fv_measure_limits *limits)
{
    const double start = fv_now_us();
    r->num_rounds = 0;
    r->probe_us = r->only_quiet ? fv_quiet_probe(r->workload->context) : 0;
    for (int32_t round = 0; round < MAX_SAMPLES; round++) {
        if (is_enough(r, limits, (fv_now_us() - start) * 1e-6)) break;
        for (int32_t i = 0; i < r->num_plans; i++) {
            const fv_status status = sample_plan(r, r->plans[(round + i) % r->num_plans], round);
            if (status != FV_OK) return status;
        }
        sample_ceilings(r, round);
        r->num_rounds++;
    }
    return FV_OK;
}

static fv_status run_race(race *r, const fv_measure_limits *limits)
{
    r->reads = malloc(sizeof(*r->reads));
    r->computes = malloc(NUM_LEVELS * sizeof(*r->computes));
    if (!r->reads || !r->computes) return fv_fail(FV_ERR_NO_MEMORY, "no memory for samples");
    fv_status status = alloc_workspace(&r->workspace, r->workload->device, r->plans, r->num_plans);
    /* The pages are the same bytes in every layout: one order of reading is the ceiling of all. */
    if (status == FV_OK) status = fv_workload_list_ranges(r->workload, r->plans[0]->plan->problem.kv_layout);
    const fv_measure_limits once = {.min_runs = 1}; /* touches code, workspace and output */
    if (status == FV_OK) status = run_rounds(r, &once);
    r->only_quiet = limits->only_quiet;
    return status == FV_OK ? run_rounds(r, limits) : status;
}

/* Once: sorts the samples. */
static void find_ceilings(race *r)
{
    r->read_us = fv_samples_of(r->reads->us, take_quiet(r->reads, r)).quartile_us;
    for (fv_isa isa = 0; isa < NUM_LEVELS; isa++) {
        if (!has_level(r, isa)) continue;
        timed_runs *runs = &r->computes[isa];
        r->flops_per_us[isa] = r->operations[isa] / fv_samples_of(runs->us, take_quiet(runs, r)).quartile_us;
    }
}

static void fill_measurement(fv_measurement *m, race *r, timed_plan *timed)
{
    fv_measure_describe(m, timed->plan);
    m->update_us = median_update(timed->plan, &r->workload->batch);
    if (r->only_quiet) {
        m->quiet_runs = count_quiet(&timed->runs, r->num_rounds);
        m->all_runs = r->num_rounds;
    }
    m->run = fv_samples_of(timed->runs.us, take_quiet(&timed->runs, r));
    m->read_us = r->read_us;
    m->flops_per_us = r->flops_per_us[timed->isa];
}

/* The contenders whose plans can be made are plans[0 .. num_plans); places[i] is the contender of plan i. */
static fv_status make_plans(race *r, int32_t *places, fv_contender *contenders, int32_t num_contenders)
{
    for (int32_t i = 0; i < num_contenders; i++) {
        fv_contender *contender = &contenders[i];
        timed_plan *timed = NULL;
        contender->status = timed_plan_create(&timed, r->workload, &contender->options);
        if (contender->status == FV_ERR_NO_MEMORY) return contender->status;
        if (contender->status != FV_OK) {
            snprintf(contender->refusal, sizeof(contender->refusal), "%s", fv_last_error());
            continue;
        }
        places[r->num_plans] = i;
        r->plans[r->num_plans++] = timed;
    }
    return FV_OK;
}

fv_status fv_measure(fv_contender *contenders, int32_t num_contenders, fv_workload *workload,
                     const fv_measure_limits *limits)
{
    race r = {.workload = workload, .plans = calloc((size_t)num_contenders, sizeof(*r.plans))};
    int32_t *places = calloc((size_t)num_contenders, sizeof(*places));
    fv_status status = FV_OK;
    if (!r.plans || !places) status = fv_fail(FV_ERR_NO_MEMORY, "no memory for %d plans", num_contenders);
    if (status == FV_OK) status = make_plans(&r, places, contenders, num_contenders);
    if (status == FV_OK && r.num_plans > 0) {
        status = run_race(&r, limits);
        if (status == FV_OK) find_ceilings(&r);
        for (int32_t i = 0; i < r.num_plans && status == FV_OK; i++) {
            fill_measurement(&contenders[places[i]].measured, &r, r.plans[i]);
        }
    }
    for (int32_t i = 0; i < r.num_plans; i++) timed_plan_destroy(r.plans[i]);
    free(r.plans);
    free(places);
    fv_bench_free(workload->device, r.workspace);
    free(r.reads);
    free(r.computes);
    return status;
}

fv_status fv_measure_once(double *seconds, fv_workload *workload, const fv_plan_options *options)
{
    timed_plan *timed = NULL;
    void *workspace = NULL;
    fv_status status = timed_plan_create(&timed, workload, options);
    if (status != FV_OK) return status;
    status = alloc_workspace(&workspace, workload->device, &timed, 1);
    if (status == FV_OK) {
        const double start = fv_now_us();
        status = fv_plan_run(timed->plan, &timed->layers[0], workspace, NULL);
        *seconds = (fv_now_us() - start) * 1e-6;
    }
    fv_bench_free(workload->device, workspace);
    timed_plan_destroy(timed);
    return status;
}
