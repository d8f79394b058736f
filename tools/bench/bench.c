/* fovea bench: times batches through the public plan API, next to what the machine can do. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "bench/report.h"
#include "commands.h"
#include "core/context.h"
#include "core/error.h"
#include "fovea/fovea.h"
#include "ops/kernel_table.h"
#include "problem_args.h"

#define DEFAULT_SPECS "q1s8k", "32q1s4k", "4q4s8k", "q2k"
#define REFERENCE "reference"
#define REFERENCE_LIMIT_SECONDS 2.0
#define CALIBRATION_SPEC "q1s512"

typedef struct options {
    fv_problem problem;
    fv_plan_options plan;
    fv_measure_limits limits;
    const char *backend; /* a name, "auto" or "all" */
    const char *kernels; /* a name, "best", "all", or NULL = best and reference */
    const char *compare;
    const char *output;
    int32_t num_threads;
    int32_t warm;
    int32_t json, csv, help;
    const char *const *specs;
    int32_t num_specs;
} options;

static void print_help(void)
{
    printf("usage: fovea bench [SPEC...] [OPTION...]\n\n"
           "Times attention over batches SPEC: groups (count)q(len)(s(len)) joined with _, k for x 1024;\n"
           "32q1s4k is 32 decodes over 4096 keys, q2k a prefill, 2q1ks2k_32q1s1k a mix.\n"
           "Default: q1s8k 32q1s4k 4q4s8k q2k. Each time stands beside its ceiling, measured in the same run:\n"
           "a read of the same pages in the same order, or the peak of the multiply-add units.\n\n" FV_PROBLEM_HELP
           "  --backend NAME|all     (the one that auto takes)\n"
           "  --kernels NAME|all     best, reference, portable, avx2, ... (best and reference)\n"
           "  --variant NAME         of the kernel\n"
           "  --path 2d|3d           instead of the planner's choice\n"
           "  --segment-keys N       keys of a segment on the 3D path\n"
           "  --batch-invariant --static-grid\n"
           "  --threads N            (all CPUs)\n"
           "  --min-time S           seconds for each row, at least (0.5)\n"
           "  --repeat N             runs for each row, at least (5)\n"
           "  --warm                 one copy of the cache, which may stay in the processor's caches\n"
           "  --json --csv           print that instead of a table\n"
           "  --output FILE          write the JSON there, beside the table\n"
           "  --compare FILE         ratio to the rows of an earlier --json\n");
}

enum {
    BACKEND = FV_OPTION_COMMAND,
    KERNELS,
    VARIANT,
    SOFTMAX_PATH,
    SEGMENT_KEYS,
    BATCH_INVARIANT,
    STATIC_GRID,
    THREADS,
    MIN_TIME,
    REPEAT,
    WARM,
    JSON,
    CSV,
    OUTPUT,
    COMPARE,
    HELP,
};

static fv_status set_option(options *opts, int value, const char *text)
{
    static const char *const paths[] = {"auto", "2d", "3d"}; /* in the order of fv_softmax_path */
    int32_t path = 0;
    switch (value) {
    case BACKEND: opts->backend = text; return FV_OK;
    case KERNELS: opts->kernels = text; return FV_OK;
    case VARIANT: opts->plan.variant = text; return FV_OK;
    case SOFTMAX_PATH: {
        const fv_status status = fv_args_choice(&path, "--path", text, paths, FV_ARRAY_LEN(paths));
        opts->plan.path = (fv_softmax_path)path;
        return status;
    }
    case SEGMENT_KEYS: return fv_args_i32(&opts->plan.segment_keys, "--segment-keys", text, 1, 1 << 24);
    case BATCH_INVARIANT: opts->plan.batch_invariant = 1; return FV_OK;
    case STATIC_GRID: opts->plan.static_grid = 1; return FV_OK;
    case THREADS: return fv_args_i32(&opts->num_threads, "--threads", text, 1, 4096);
    case MIN_TIME: return fv_args_f64(&opts->limits.min_seconds, "--min-time", text, 0, 3600);
    case REPEAT: return fv_args_i32(&opts->limits.min_runs, "--repeat", text, 1, 2000);
    case WARM: opts->warm = 1; return FV_OK;
    case JSON: opts->json = 1; return FV_OK;
    case CSV: opts->csv = 1; return FV_OK;
    case OUTPUT: opts->output = text; return FV_OK;
    case COMPARE: opts->compare = text; return FV_OK;
    case 'h':
    case HELP: opts->help = 1; return FV_OK;
    default: return fv_problem_args_set(&opts->problem, value, text);
    }
}

static fv_status read_options(options *opts, int argc, char **argv)
{
    static const struct option long_options[] = {
        FV_PROBLEM_OPTIONS,
        {"backend", required_argument, NULL, BACKEND},
        {"kernels", required_argument, NULL, KERNELS},
        {"variant", required_argument, NULL, VARIANT},
        {"path", required_argument, NULL, SOFTMAX_PATH},
        {"segment-keys", required_argument, NULL, SEGMENT_KEYS},
        {"batch-invariant", no_argument, NULL, BATCH_INVARIANT},
        {"static-grid", no_argument, NULL, STATIC_GRID},
        {"threads", required_argument, NULL, THREADS},
        {"min-time", required_argument, NULL, MIN_TIME},
        {"repeat", required_argument, NULL, REPEAT},
        {"warm", no_argument, NULL, WARM},
        {"json", no_argument, NULL, JSON},
        {"csv", no_argument, NULL, CSV},
        {"output", required_argument, NULL, OUTPUT},
        {"compare", required_argument, NULL, COMPARE},
        {"help", no_argument, NULL, HELP},
        {NULL, 0, NULL, 0},
    };
    static const char *const default_specs[] = {DEFAULT_SPECS};
    *opts = (options){.backend = "auto", .plan = {.struct_size = sizeof(opts->plan)}, .limits = {0.5, 5}};
    fv_problem_args_init(&opts->problem);
    opterr = 0;
    int value;
    while ((value = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
        const int32_t refused = value == ':' || value == '?';
        const fv_status status = refused ? fv_args_refuse(value, argc, argv) : set_option(opts, value, optarg);
        if (status != FV_OK) return status;
    }
    opts->num_specs = argc - optind;
    opts->specs = (const char *const *)(argv + optind);
    if (opts->num_specs == 0) {
        opts->specs = default_specs;
        opts->num_specs = FV_ARRAY_LEN(default_specs);
    }
    for (int32_t i = 0; i < opts->num_specs; i++) { /* all are right before the first is run */
        fv_batch_spec spec;
        const fv_status status = fv_batch_spec_init(&spec, opts->specs[i]);
        if (status != FV_OK) return status;
        fv_batch_spec_deinit(&spec);
    }
    return fv_problem_args_finish(&opts->problem);
}

typedef struct bench {
    const options *opts;
    fv_context *context;
    const char *backends[64];
    int32_t num_backends;
    const char *kernels[16]; /* names of tables */
    int32_t num_kernels;
    double reference_flops_per_second; /* 0: not known yet */
    fv_bench_setting setting;
    fv_bench_row *rows;
    int32_t num_rows;
} bench;

static fv_status choose_backends(bench *b)
{
    const char *asked = b->opts->backend;
    if (strcmp(asked, "all") != 0) {
        b->backends[b->num_backends++] = asked; /* fv_plan_create knows the names */
        return FV_OK;
    }
    for (int32_t i = 0; i < fv_min_i32(fv_backend_count(), FV_ARRAY_LEN(b->backends)); i++) {
        b->backends[b->num_backends++] = fv_backend_name(i);
    }
    return FV_OK;
}

/* Best first, so that what was asked for is seen before the slow reference. */
static fv_status choose_kernels(bench *b)
{
    const fv_device *cpu = b->context->devices[0];
    const char *best = cpu->tables[cpu->num_tables - 1]->name;
    const char *asked = b->opts->kernels;
    if (asked && strcmp(asked, "all") == 0) {
        for (int32_t i = cpu->num_tables - 1; i >= 0; i--) b->kernels[b->num_kernels++] = cpu->tables[i]->name;
        return FV_OK;
    }
    b->kernels[b->num_kernels++] = asked && strcmp(asked, "best") != 0 ? asked : best;
    if (!asked && strcmp(best, REFERENCE) != 0) b->kernels[b->num_kernels++] = REFERENCE;
    return FV_OK;
}

/* Seconds that the reference kernels would take, from a small batch of the same problem. */
static fv_status estimate_reference(double *seconds, bench *b, const fv_plan_options *plan, double flops)
{
    if (b->reference_flops_per_second == 0) {
        fv_workload small;
        fv_status status = fv_workload_init(&small, b->context, &b->opts->problem, CALIBRATION_SPEC, 1);
        if (status != FV_OK) return status;
        double once = 0;
        status = fv_measure_once(&once, &small, plan);
        const double small_flops = small.flops;
        fv_workload_deinit(&small);
        if (status != FV_OK) return status;
        b->reference_flops_per_second = small_flops / once;
    }
    *seconds = flops / b->reference_flops_per_second;
    return FV_OK;
}

static fv_status fill_row(fv_bench_row *row, bench *b, fv_workload *workload)
{
    fv_plan_options plan = b->opts->plan;
    plan.backend = row->backend;
    plan.kernels = row->kernels;
    plan.device = workload->device;
    const int32_t is_reference = strcmp(row->kernels, REFERENCE) == 0;
    if (is_reference) plan.variant = NULL;
    if (is_reference && !b->opts->kernels) {
        double seconds = 0;
        const fv_status status = estimate_reference(&seconds, b, &plan, workload->flops);
        if (status != FV_OK) return status;
        if (seconds > REFERENCE_LIMIT_SECONDS) {
            snprintf(row->skipped, sizeof(row->skipped), "would take about %.0f s; --kernels reference runs it",
                     seconds);
            return FV_OK;
        }
    }
    const fv_status status = fv_measure(&row->measured, workload, &plan, &b->opts->limits);
    if (status == FV_OK) snprintf(row->backend, sizeof(row->backend), "%s", row->measured.backend); /* of auto */
    row->is_cold = workload->is_cold;
    row->num_copies = workload->num_copies;
    row->flops = workload->flops;
    row->read_bytes = workload->read_bytes;
    if (status == FV_ERR_UNSUPPORTED && strcmp(b->opts->backend, "all") == 0) {
        snprintf(row->skipped, sizeof(row->skipped), "%s", fv_last_error());
        return FV_OK;
    }
    return status;
}

/* How much faster than the reference each row of a batch is. */
static void fill_ratios(fv_bench_row *rows, int32_t num_rows)
{
    for (int32_t i = 0; i < num_rows; i++) {
        for (int32_t j = 0; j < num_rows; j++) {
            if (strcmp(rows[j].kernels, REFERENCE) != 0 || strcmp(rows[i].backend, rows[j].backend) != 0) continue;
            if (rows[i].skipped[0] || rows[j].skipped[0] || i == j) continue;
            rows[i].reference_ratio = rows[j].measured.run.median_us / rows[i].measured.run.median_us;
        }
    }
}

static fv_status run_batch(bench *b, const char *spec)
{
    const options *opts = b->opts;
    fv_workload workload;
    fv_status status = fv_workload_init(&workload, b->context, &opts->problem, spec, opts->warm);
    if (status != FV_OK) return status;

    fv_bench_row *first = b->rows + b->num_rows;
    for (int32_t i = 0; i < b->num_backends * b->num_kernels && status == FV_OK; i++) {
        fv_bench_row *row = &b->rows[b->num_rows++];
        *row = (fv_bench_row){.batch = spec};
        snprintf(row->backend, sizeof(row->backend), "%s", b->backends[i / b->num_kernels]);
        snprintf(row->kernels, sizeof(row->kernels), "%s", b->kernels[i % b->num_kernels]);
        workload.problem = opts->problem; /* set_layout of the row before changed it */
        status = fill_row(row, b, &workload);
    }
    const int32_t num_rows = (int32_t)(b->rows + b->num_rows - first);
    if (status == FV_OK) fill_ratios(first, num_rows);
    if (status == FV_OK && opts->compare) status = fv_bench_compare(first, num_rows, opts->compare);
    for (int32_t i = 0; i < num_rows && status == FV_OK && !opts->json && !opts->csv; i++)
        fv_bench_print_row(&first[i]);
    fflush(stdout);
    fv_workload_deinit(&workload);
    return status;
}

static fv_status write_output(const bench *b)
{
    if (!b->opts->output) return FV_OK;
    FILE *file = fopen(b->opts->output, "w");
    if (!file) return fv_fail(FV_ERR_IO, "--output is '%s', which cannot be written", b->opts->output);
    fv_bench_print_json(file, &b->setting, b->rows, b->num_rows);
    if (fclose(file) == 0) return FV_OK;
    return fv_fail(FV_ERR_IO, "--output '%s' could not be written to the end", b->opts->output);
}

static fv_status run_bench(bench *b)
{
    const options *opts = b->opts;
    const fv_context_options context_options = {.struct_size = sizeof(context_options),
                                                .num_threads = opts->num_threads};
    fv_status status = fv_context_create(&b->context, &context_options);
    if (status == FV_OK) status = choose_backends(b);
    if (status == FV_OK) status = choose_kernels(b);
    if (status != FV_OK) return status;
    b->rows = calloc((size_t)opts->num_specs * (size_t)b->num_backends * (size_t)b->num_kernels, sizeof(*b->rows));
    if (!b->rows) return fv_fail(FV_ERR_NO_MEMORY, "no memory for the rows of %d batches", opts->num_specs);
    if (opts->compare) status = fv_bench_compare(b->rows, 0, opts->compare); /* wrong before the first run */

    char problem[256];
    fv_problem_args_describe(problem, sizeof(problem), &opts->problem);
    b->setting.problem = problem;
    b->setting.num_threads = fv_context_num_workers(b->context);
    if (status == FV_OK && !opts->json && !opts->csv) fv_bench_print_heading(&b->setting);
    for (int32_t i = 0; i < opts->num_specs && status == FV_OK; i++) status = run_batch(b, opts->specs[i]);
    if (status == FV_OK && opts->json) fv_bench_print_json(stdout, &b->setting, b->rows, b->num_rows);
    if (status == FV_OK && opts->csv) fv_bench_print_csv(stdout, b->rows, b->num_rows);
    return status == FV_OK ? write_output(b) : status;
}

int fv_cmd_bench(int argc, char **argv)
{
    options opts;
    if (read_options(&opts, argc, argv) != FV_OK) return fv_args_fail("bench");
    if (opts.help) {
        print_help();
        return 0;
    }
    bench b = {.opts = &opts, .setting = {.argc = argc, .argv = argv}};
    const int code = run_bench(&b) == FV_OK ? 0 : fv_run_fail("bench");
    free(b.rows);
    fv_context_destroy(b.context);
    return code;
}
