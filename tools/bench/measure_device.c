/* Contenders on a device take turns as on the CPU (bench/measure.c): every sample takes the next copy of the cache,
 * so that its pages are not in the L2 cache. Each backend is timed three times a round: a graph of its static grid,
 * which serves every step and is what an engine replays, a graph of the schedule for this step's lengths, and that
 * schedule launched without a graph. A round is one passage of the gate (bench/device_clock.h):
 *
 *   gate | A grid, copy 1 | A list, copy 3 | A plain, copy 5 | B grid, copy 7 | ... | read, copy n / 2 further
 *
 * Before each sample, untimed, the same once with the copy before: the kernels' code is where a run of the like before
 * it leaves it, as in a loop over one graph. Without that a form is timed with cold code where the one before it takes
 * other kernels.
 *
 * After the rounds the latency into an idle stream is taken by the host's clock. */
#include <stdio.h>
#include <stdlib.h>

#include "bench/bench_memory.h"
#include "bench/measure.h"
#include "core/error.h"

#define MAX_SAMPLES 2000
#define NUM_LATENCIES 40
#define NUM_UPDATES 20

typedef enum timing {
    GRID = 0, /* graph of the static grid */
    LIST,     /* graph of the step's schedule */
    PLAIN,    /* that without a graph */
    NUM_TIMINGS,
} timing;

typedef struct device_plan {
    fv_plan *grid, *list;
    fv_layer *layers;    /* [num_copies] */
    fv_graph *graphs[2]; /* of GRID and of LIST: [num_copies] */
    double *times_us[NUM_TIMINGS];
} device_plan;

typedef struct device_race {
    fv_workload *workload;
    fv_device_clock *clock;
    device_plan *plans; /* [num_plans] */
    int32_t num_plans;
    void *workspace;
    fv_device_read read;
    double *read_us;
    int32_t num_rounds, next_copy;
} device_race;

/* --- plans and their graphs ----------------------------------------------------------------------------------- */

static void plan_deinit(device_plan *p, const fv_workload *w)
{
    for (int32_t which = 0; which < 2; which++) {
        for (int32_t i = 0; i < w->num_copies && p->graphs[which]; i++) {
            fv_graph_destroy(w->device, p->graphs[which][i]);
        }
        free(p->graphs[which]);
    }
    for (int32_t i = 0; i < NUM_TIMINGS; i++) free(p->times_us[i]);
    fv_plan_destroy(p->grid);
    fv_plan_destroy(p->list);
    free(p->layers);
    *p = (device_plan){0};
}

static fv_status alloc_plan(device_plan *p, int32_t num_copies)
{
    const size_t copies = (size_t)num_copies;
    p->layers = calloc(copies, sizeof(*p->layers));
    p->graphs[GRID] = calloc(copies, sizeof(fv_graph));
    p->graphs[LIST] = calloc(copies, sizeof(fv_graph));
    int32_t is_complete = p->layers && p->graphs[GRID] && p->graphs[LIST];
    for (int32_t i = 0; i < NUM_TIMINGS; i++) {
        p->times_us[i] = malloc(MAX_SAMPLES * sizeof(double));
        is_complete = is_complete && p->times_us[i];
    }
    return is_complete ? FV_OK : fv_fail(FV_ERR_NO_MEMORY, "no memory for %d graphs", 2 * num_copies);
}

static fv_status plan_init(device_plan *p, const fv_workload *w, const fv_plan_options *options, fv_stream stream)
{
    const fv_problem problem = fv_measured_problem(w);
    fv_plan_options grid = *options;
    grid.static_list = !options->static_grid;
    fv_status status = alloc_plan(p, w->num_copies);
    if (status == FV_OK) status = fv_plan_create(&p->list, w->context, &problem, &w->bounds, options);
    if (status == FV_OK) status = fv_plan_create(&p->grid, w->context, &problem, &w->bounds, &grid);
    if (status == FV_OK) status = fv_plan_update(p->list, &w->batch, stream);
    if (status == FV_OK) status = fv_plan_update(p->grid, &w->batch, stream);
    for (int32_t copy = 0; copy < w->num_copies && status == FV_OK; copy++) {
        status = fv_workload_view(&p->layers[copy], w, copy, fv_plan_kv_layout(p->grid));
    }
    return status;
}

/* The contenders whose plans can be made are plans[0 .. num_plans); places[i] is the contender of plan i. */
static fv_status make_plans(device_race *r, int32_t *places, fv_contender *contenders, int32_t num_contenders)
{
    for (int32_t i = 0; i < num_contenders; i++) {
        fv_contender *contender = &contenders[i];
        device_plan *p = &r->plans[r->num_plans];
        contender->status = plan_init(p, r->workload, &contender->options, r->clock->stream);
        if (contender->status != FV_OK) {
            snprintf(contender->refusal, sizeof(contender->refusal), "%s", fv_last_error());
            plan_deinit(p, r->workload);
            if (contender->status == FV_ERR_NO_MEMORY || contender->status == FV_ERR_DEVICE) return contender->status;
            continue;
        }
        places[r->num_plans++] = i;
    }
    return FV_OK;
}

static fv_status alloc_workspace(device_race *r)
{
    size_t bytes = 1;
    for (int32_t i = 0; i < r->num_plans; i++) {
        const size_t of_grid = fv_plan_workspace_bytes(r->plans[i].grid);
        const size_t of_list = fv_plan_workspace_bytes(r->plans[i].list);
        if (of_grid > bytes) bytes = of_grid;
        if (of_list > bytes) bytes = of_list;
    }
    return fv_bench_alloc(&r->workspace, r->workload->device, bytes);
}

typedef struct run_job {
    fv_plan *plan;
    const fv_layer *layer;
    void *workspace;
} run_job;

static fv_status send_run(void *user, fv_stream stream)
{
    const run_job *job = user;
    return fv_plan_run(job->plan, job->layer, job->workspace, stream);
}

/* Each plan runs once before it is captured: kernels are loaded then, and a GEMM chooses its algorithm. */
static fv_status capture_plan(device_race *r, device_plan *p)
{
    fv_device *device = r->workload->device;
    fv_plan *const plans[] = {p->grid, p->list};
    for (int32_t which = 0; which < 2; which++) {
        run_job job = {plans[which], &p->layers[0], r->workspace};
        fv_status status = send_run(&job, r->clock->stream);
        if (status == FV_OK) status = fv_stream_synchronize(device, r->clock->stream);
        for (int32_t copy = 0; copy < r->workload->num_copies && status == FV_OK; copy++) {
            job.layer = &p->layers[copy];
            status = fv_capture(&p->graphs[which][copy], r->clock, send_run, &job);
        }
        if (status != FV_OK) return status;
    }
    return FV_OK;
}

/* --- rounds ------------------------------------------------------------------------------------------------------ */

static int32_t take_copy(device_race *r)
{
    const int32_t copy = r->next_copy;
    r->next_copy = (copy + 1) % r->workload->num_copies;
    return copy;
}

static fv_status send_timing(device_race *r, const device_plan *p, timing which)
{
    const int32_t copy = take_copy(r);
    if (which != PLAIN) return fv_graph_launch(r->workload->device, p->graphs[which][copy], r->clock->stream);
    return fv_plan_run(p->list, &p->layers[copy], r->workspace, r->clock->stream);
}

static fv_status sample_timing(device_race *r, const device_plan *p, timing which)
{
    fv_status status = send_timing(r, p, which);
    if (status == FV_OK) status = fv_device_clock_start(r->clock);
    if (status == FV_OK) status = send_timing(r, p, which);
    return status == FV_OK ? fv_device_clock_stop(r->clock) : status;
}

static fv_status send_read(const device_race *r, int32_t further)
{
    const int32_t copy = (r->next_copy + further) % r->workload->num_copies;
    return fv_graph_launch(r->workload->device, r->read.graphs[copy], r->clock->stream);
}

static fv_status sample_read(device_race *r)
{
    const int32_t further = r->workload->num_copies / 2;
    fv_status status = send_read(r, further + 1);
    if (status == FV_OK) status = fv_device_clock_start(r->clock);
    if (status == FV_OK) status = send_read(r, further);
    return status == FV_OK ? fv_device_clock_stop(r->clock) : status;
}

static fv_status send_round(device_race *r, int32_t round)
{
    fv_status status = FV_OK;
    for (int32_t i = 0; i < r->num_plans && status == FV_OK; i++) {
        const device_plan *p = &r->plans[(round + i) % r->num_plans];
        for (int32_t which = 0; which < NUM_TIMINGS && status == FV_OK; which++) {
            status = sample_timing(r, p, (timing)which);
        }
    }
    if (status == FV_OK && r->read.num_ranges > 0) status = sample_read(r);
    return status;
}

static fv_status run_round(device_race *r, int32_t round)
{
    double times_us[FV_CLOCK_MAX_SAMPLES] = {0};
    fv_status status = fv_device_clock_begin(r->clock);
    if (status != FV_OK) return status;
    status = send_round(r, round);
    const fv_status ended = fv_device_clock_end(r->clock, times_us);
    if (status != FV_OK || ended != FV_OK) return status != FV_OK ? status : ended;
    for (int32_t i = 0; i < r->num_plans; i++) {
        const device_plan *p = &r->plans[(round + i) % r->num_plans];
        for (int32_t which = 0; which < NUM_TIMINGS; which++) {
            p->times_us[which][round] = times_us[i * NUM_TIMINGS + which];
        }
    }
    r->read_us[round] = times_us[r->num_plans * NUM_TIMINGS];
    return FV_OK;
}

static fv_status run_rounds(device_race *r, const fv_measure_limits *limits)
{
    const double start = fv_now_us();
    fv_status status = run_round(r, 0); /* warms up: its times are written over */
    for (r->num_rounds = 0; r->num_rounds < MAX_SAMPLES && status == FV_OK; r->num_rounds++) {
        if (fv_measure_is_enough(limits, r->num_rounds, r->num_plans, (fv_now_us() - start) * 1e-6)) break;
        status = run_round(r, r->num_rounds);
    }
    return status;
}

/* --- what the host sees -------------------------------------------------------------------------------------------- */

static fv_status measure_latency(fv_samples *samples, device_race *r, const device_plan *p, timing which)
{
    double times_us[NUM_LATENCIES];
    for (int32_t i = 0; i < NUM_LATENCIES; i++) {
        const double start = fv_now_us();
        fv_status status = send_timing(r, p, which);
        if (status == FV_OK) status = fv_stream_synchronize(r->workload->device, r->clock->stream);
        if (status != FV_OK) return status;
        times_us[i] = fv_now_us() - start;
    }
    *samples = fv_samples_of(times_us, NUM_LATENCIES);
    return FV_OK;
}

static fv_status measure_update(double *median_us, const device_race *r, fv_plan *plan)
{
    double times_us[NUM_UPDATES];
    for (int32_t i = 0; i < NUM_UPDATES; i++) {
        const double start = fv_now_us();
        fv_status status = fv_plan_update(plan, &r->workload->batch, r->clock->stream);
        times_us[i] = fv_now_us() - start;
        if (status == FV_OK) status = fv_stream_synchronize(r->workload->device, r->clock->stream);
        if (status != FV_OK) return status;
    }
    *median_us = fv_samples_of(times_us, NUM_UPDATES).median_us;
    return FV_OK;
}

static fv_status fill_measurement(fv_measurement *m, device_race *r, const device_plan *p,
                                  const fv_device_ceilings *ceilings)
{
    fv_measure_describe(m, p->grid);
    m->run = fv_samples_of(p->times_us[GRID], r->num_rounds);
    m->list = fv_samples_of(p->times_us[LIST], r->num_rounds);
    m->plain = fv_samples_of(p->times_us[PLAIN], r->num_rounds);
    m->flops_per_us = ceilings->bf16_flops_per_us;
    fv_status status = measure_latency(&m->graph_latency, r, p, GRID);
    if (status == FV_OK) status = measure_latency(&m->plain_latency, r, p, PLAIN);
    if (status == FV_OK) status = measure_update(&m->update_us, r, p->grid);
    return status == FV_OK ? measure_update(&m->list_update_us, r, p->list) : status;
}

static fv_status run_race(device_race *r, const fv_measure_limits *limits)
{
    fv_workload *w = r->workload;
    r->read_us = malloc(MAX_SAMPLES * sizeof(double));
    if (!r->read_us) return fv_fail(FV_ERR_NO_MEMORY, "no memory for samples");
    fv_status status = alloc_workspace(r);
    if (status == FV_OK) status = fv_workload_list_ranges(w, fv_plan_kv_layout(r->plans[0].grid));
    if (status == FV_OK && w->num_ranges > 0) {
        status = fv_device_read_init(&r->read, r->clock, w->caches, w->num_copies, w->ranges, w->num_ranges);
    }
    for (int32_t i = 0; i < r->num_plans && status == FV_OK; i++) status = capture_plan(r, &r->plans[i]);
    return status == FV_OK ? run_rounds(r, limits) : status;
}

fv_status fv_measure_on_device(fv_contender *contenders, int32_t num_contenders, fv_workload *workload,
                               const fv_measure_limits *limits, fv_device_clock *clock,
                               const fv_device_ceilings *ceilings)
{
    device_race r = {.workload = workload, .clock = clock};
    r.plans = calloc((size_t)num_contenders, sizeof(*r.plans));
    int32_t *places = calloc((size_t)num_contenders, sizeof(*places));
    fv_status status = FV_OK;
    if (!r.plans || !places) status = fv_fail(FV_ERR_NO_MEMORY, "no memory for %d plans", num_contenders);
    if (status == FV_OK) status = make_plans(&r, places, contenders, num_contenders);
    if (status == FV_OK && r.num_plans > 0) {
        status = run_race(&r, limits);
        for (int32_t i = 0; i < r.num_plans && status == FV_OK; i++) {
            status = fill_measurement(&contenders[places[i]].measured, &r, &r.plans[i], ceilings);
        }
        const double read_us = status == FV_OK ? fv_samples_of(r.read_us, r.num_rounds).median_us : 0;
        for (int32_t i = 0; i < r.num_plans; i++) contenders[places[i]].measured.read_us = read_us;
    }
    for (int32_t i = 0; i < r.num_plans; i++) plan_deinit(&r.plans[i], workload);
    fv_device_read_deinit(&r.read);
    fv_bench_free(workload->device, r.workspace);
    free(r.plans);
    free(places);
    free(r.read_us);
    return status;
}
