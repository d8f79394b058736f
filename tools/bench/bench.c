/* fovea bench: times batches through the public plan API, next to what the machine can do. The rows of a
 * batch are measured in turn (bench/measure.c); the reference kernels, which are slow, once and apart. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "bench/mla_layer.h"
#include "bench/quiet.h"
#include "bench/summary.h"
#include "commands.h"
#include "core/context.h"
#include "core/error.h"
#include "fovea/fovea.h"
#include "ops/kernel_table.h"
#include "problem_args.h"

#define DEFAULT_SPECS "q1s8k", "32q1s4k", "4q4s8k", "q2k"
#define REFERENCE "reference"
#define REFERENCE_LIMIT_SECONDS 2.0
#define SMALL_TOKENS 32
#define CALIBRATION_SPEC "q1s512"
#define CALIBRATION_ENCODER_SPEC "q32"
#define MAX_BACKENDS 64
#define MAX_TABLES 16

typedef struct options {
    fv_problem_args args;
    fv_measure_limits limits;
    const char *device;
    const char *backend; /* a name, "auto" or "all" */
    const char *kernels; /* a name, "best", "all", or NULL = best and reference */
    const char *compare;
    const char *output;
    int32_t num_threads;
    int32_t warm, stored;
    int32_t json, csv, cliffs, help;
    const char *const *specs;
    int32_t num_specs;
} options;

static void print_help(void)
{
    printf(
        "usage: fovea bench [SPEC...] [OPTION...]\n"
        "       fovea bench mla-layer [OPTION...]     a layer of DeepSeek-V3, stage by stage\n\n"
        "Times attention over batches SPEC: groups (count)q(len)(s(len)) joined with _, k for x 1024;\n"
        "32q1s4k is 32 decodes over 4096 keys, q2k a prefill, 2q1ks2k_32q1s1k a mix.\n"
        "Default: q1s8k 32q1s4k 4q4s8k q2k. Each time stands beside its ceiling, measured in the same run:\n"
        "a read of the same pages in the same order (shared ones once), or the peak of the multiply-add units.\n"
        "Several backends take turns, run by run; x best is the time over that of the fastest.\n"
        "On a GPU the read and the peak, a GEMM, are the GPU's; times are medians of graph replays by events, next\n"
        "to those of plain launches, with the host's time for an update and the latency into an idle "
        "stream.\n\n" FV_PROBLEM_HELP FV_PLAN_HELP "  --device NAME          cpu, cuda, cuda:1 (cpu)\n"
        "  --backend NAME|all     (the one that auto takes)\n"
        "  --kernels NAME|all     best, reference, portable, avx2, ... (best, and reference once)\n"
        "  --threads N            (the CPUs that this process may use)\n"
        "  --min-time S           seconds for each row, at least (0.5)\n"
        "  --repeat N             runs for each row, at least (5, which ten times --min-time end, as they do runs of\n"
        "                         a reference that --kernels does not ask for)\n"
        "  --quiet                only runs beside which nobody else was on the workers' cores count, as a loop of\n"
        "                         additions before and behind tells; not on a GPU\n"
        "  --warm                 one copy of the cache, which may stay in the processor's caches\n"
        "  --stored               new keys are in the cache already: attention alone, without their write\n"
        "  --cliffs               batches in this order are neighbours: where time / ceiling changes most, of\n"
        "                         each backend and kernels, but the reference\n"
        "  --json --csv           print that instead of a table\n"
        "  --output FILE          write the JSON there, beside the table\n"
        "  --compare FILE         ratio to the rows of an earlier --json, with the same problem, --shared-prefix,\n"
        "                         --stored, batch, backend and kernels\n"
        "  --help                 this text\n");
}

enum {
    DEVICE = FV_OPTION_COMMAND,
    BACKEND,
    KERNELS,
    THREADS,
    MIN_TIME,
    REPEAT,
    QUIET,
    WARM,
    STORED,
    CLIFFS,
    JSON,
    CSV,
    OUTPUT,
    COMPARE,
    HELP,
};

static fv_status set_option(options *opts, int value, const char *text)
{
    switch (value) {
    case DEVICE: opts->device = text; return FV_OK;
    case BACKEND: opts->backend = text; return FV_OK;
    case KERNELS: opts->kernels = text; return FV_OK;
    case THREADS: return fv_args_i32(&opts->num_threads, "--threads", text, 1, 4096);
    case MIN_TIME: return fv_args_f64(&opts->limits.min_seconds, "--min-time", text, 0, 3600);
    case REPEAT: opts->limits.runs_are_asked = 1; return fv_args_i32(&opts->limits.min_runs, "--repeat", text, 1, 2000);
    case QUIET: opts->limits.only_quiet = 1; return FV_OK;
    case WARM: opts->warm = 1; return FV_OK;
    case STORED: opts->stored = 1; return FV_OK;
    case CLIFFS: opts->cliffs = 1; return FV_OK;
    case JSON: opts->json = 1; return FV_OK;
    case CSV: opts->csv = 1; return FV_OK;
    case OUTPUT: opts->output = text; return FV_OK;
    case COMPARE: opts->compare = text; return FV_OK;
    case 'h':
    case HELP: opts->help = 1; return FV_OK;
    default: return fv_problem_args_set(&opts->args, value, text);
    }
}

/* Options of which one would be passed over. */
static fv_status check_options(const options *opts)
{
    const int32_t is_encoder = opts->args.problem.type == FV_ATTENTION_ENCODER;
    const char *printed = opts->json ? "--json" : "--csv";
    if (opts->json && opts->csv)
        return fv_fail(FV_ERR_INVALID,
                       "--csv does not go with --json; accepted: either, and --output FILE for the JSON");
    if (opts->compare && opts->csv)
        return fv_fail(FV_ERR_INVALID,
                       "--compare does not go with --csv, which has no column for it; accepted: --json, "
                       "or the table");
    if (opts->cliffs && (opts->json || opts->csv))
        return fv_fail(FV_ERR_INVALID,
                       "--cliffs does not go with %s; accepted: --cliffs, with --output FILE for the JSON", printed);
    if (!is_encoder || !opts->stored) return FV_OK;
    return fv_fail(FV_ERR_INVALID,
                   "--stored does not go with --type encoder, which has no cache; accepted: decoder, cross");
}

static fv_status read_options(options *opts, int argc, char **argv)
{
    static const struct option long_options[] = {
        FV_PROBLEM_OPTIONS,
        {"device", required_argument, NULL, DEVICE},
        {"backend", required_argument, NULL, BACKEND},
        {"kernels", required_argument, NULL, KERNELS},
        {"threads", required_argument, NULL, THREADS},
        {"min-time", required_argument, NULL, MIN_TIME},
        {"repeat", required_argument, NULL, REPEAT},
        {"quiet", no_argument, NULL, QUIET},
        {"warm", no_argument, NULL, WARM},
        {"stored", no_argument, NULL, STORED},
        {"cliffs", no_argument, NULL, CLIFFS},
        {"json", no_argument, NULL, JSON},
        {"csv", no_argument, NULL, CSV},
        {"output", required_argument, NULL, OUTPUT},
        {"compare", required_argument, NULL, COMPARE},
        {"help", no_argument, NULL, HELP},
        {NULL, 0, NULL, 0},
    };
    static const char *const default_specs[] = {DEFAULT_SPECS};
    *opts = (options){.device = "cpu", .backend = "auto", .limits = {.min_seconds = 0.5, .min_runs = 5}};
    fv_problem_args_init(&opts->args);
    opterr = 0;
    int value;
    while ((value = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
        const int32_t refused = value == ':' || value == '?';
        const fv_status status = refused ? fv_args_refuse(value, argc, argv) : set_option(opts, value, optarg);
        if (status != FV_OK) return status;
    }
    if (opts->help) return FV_OK;
    const fv_status checked = check_options(opts);
    if (checked != FV_OK) return checked;
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
    const fv_status status = fv_problem_args_finish(&opts->args, opts->device);
    const fv_problem *problem = &opts->args.problem;
    if (status != FV_OK || problem->kind != FV_ATTENTION_MLA || problem->mla.absorbed) return status;
    return fv_mla_products_check(problem->q_dtype, opts->device, " with --mla=weights");
}

typedef struct bench {
    const options *opts;
    FILE *output; /* NULL: none is asked for */
    fv_context *context;
    fv_device *device;
    fv_device_clock *clock; /* NULL on the CPU, as the ceilings */
    fv_device_ceilings ceilings;
    const char *backends[MAX_BACKENDS];
    int32_t num_backends;
    const char *kernels[MAX_TABLES]; /* names of tables that are measured in turn */
    int32_t num_kernels;
    int32_t with_reference;            /* 1: also the reference kernels, once */
    double reference_flops_per_second; /* 0: not known yet */
    fv_bench_setting setting;
    fv_bench_row *rows;
    int32_t num_rows;
} bench;

static int32_t asks_for_all(const bench *b) { return strcmp(b->opts->backend, "all") == 0; }

/* 1: `auto` asks the backend for layers of the other kind, MLA or not. */
static int32_t is_of_other_kind(const char *backend, const fv_device *device, const fv_problem *problem)
{
    const fv_problem other = {.kind = problem->kind == FV_ATTENTION_MLA ? FV_ATTENTION_MHA : FV_ATTENTION_MLA};
    const char *name;
    for (int32_t i = 0; (name = fv_backend_preferred_name(i, device, &other)); i++) {
        if (strcmp(name, backend) == 0) return 1;
    }
    return 0;
}

/* In the order of `auto`, then the rest of the problem's kind. */
static void choose_backends(bench *b)
{
    if (!asks_for_all(b)) {
        b->backends[b->num_backends++] = b->opts->backend; /* fv_plan_create knows the names */
        return;
    }
    const char *name;
    for (int32_t i = 0; (name = fv_backend_preferred_name(i, b->device, &b->opts->args.problem)); i++) {
        if (b->num_backends < MAX_BACKENDS) b->backends[b->num_backends++] = name;
    }
    for (int32_t i = 0; i < fv_backend_count(); i++) {
        int32_t is_known = is_of_other_kind(fv_backend_name(i), b->device, &b->opts->args.problem);
        for (int32_t j = 0; j < b->num_backends; j++) is_known |= strcmp(b->backends[j], fv_backend_name(i)) == 0;
        if (!is_known && b->num_backends < MAX_BACKENDS) b->backends[b->num_backends++] = fv_backend_name(i);
    }
}

static int32_t has_reference(const fv_device *device)
{
    return strcmp(device->tables[0]->name, REFERENCE) == 0; /* the weakest comes first */
}

static void choose_kernels(bench *b)
{
    const fv_device *device = b->device;
    const char *best = device->tables[device->num_tables - 1]->name;
    const char *asked = b->opts->kernels;
    const int32_t all = asked && strcmp(asked, "all") == 0;
    for (int32_t i = device->num_tables - 1; i >= 0 && all && b->num_kernels < MAX_TABLES; i--) {
        if (strcmp(device->tables[i]->name, REFERENCE) != 0) b->kernels[b->num_kernels++] = device->tables[i]->name;
    }
    if (b->num_kernels == 0) b->kernels[b->num_kernels++] = asked && !all && strcmp(asked, "best") != 0 ? asked : best;
    b->with_reference = (all || !asked) && has_reference(device) && strcmp(b->kernels[0], REFERENCE) != 0;
}

/* Seconds that the reference kernels would take, from a small batch of the same problem. */
static fv_status estimate_reference(double *seconds, bench *b, const fv_plan_options *plan, double flops)
{
    if (b->reference_flops_per_second == 0) {
        const fv_problem *problem = &b->opts->args.problem;
        const char *spec = problem->type == FV_ATTENTION_ENCODER ? CALIBRATION_ENCODER_SPEC : CALIBRATION_SPEC;
        fv_workload small;
        fv_status status = fv_workload_init(&small, b->context, b->device, problem, spec,
                                            &(fv_workload_options){.warm = 1});
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

static fv_bench_row *add_row(bench *b, const char *spec, const char *backend, const char *kernels,
                             const fv_workload *workload)
{
    fv_bench_row *row = &b->rows[b->num_rows++];
    *row = (fv_bench_row){
        .batch = spec,
        .is_cold = workload->is_cold,
        .num_copies = workload->num_copies,
        .flops = workload->flops,
    };
    snprintf(row->backend, sizeof(row->backend), "%s", backend);
    snprintf(row->kernels, sizeof(row->kernels), "%s", kernels);
    return row;
}

static void fill_row(fv_bench_row *row, const fv_contender *contender, const fv_workload *workload)
{
    row->read_bytes = workload->read_bytes; /* the measurement listed the pages */
    if (contender->status != FV_OK) {
        snprintf(row->skipped, sizeof(row->skipped), "%s", contender->refusal);
        return;
    }
    row->measured = contender->measured;
    snprintf(row->backend, sizeof(row->backend), "%s", contender->measured.backend); /* of auto */
}

/* A backend that cannot is a row among others; where none can and one was asked for wrongly, that is the
 * caller's error. */
static fv_status check_contenders(const bench *b, const fv_contender *contenders, int32_t num_contenders)
{
    const fv_contender *worst = NULL;
    for (int32_t i = 0; i < num_contenders; i++) {
        if (contenders[i].status == FV_OK) return FV_OK;
        const int32_t is_worse = contenders[i].status != FV_ERR_UNSUPPORTED || !asks_for_all(b);
        if (!worst && is_worse) worst = &contenders[i];
    }
    return worst ? fv_fail(worst->status, "%s", worst->refusal) : FV_OK;
}

/* One for each backend and kernels; the caller frees. */
static fv_status make_contenders(fv_contender **out, int32_t *num_contenders, const bench *b)
{
    const int32_t count = b->num_backends * b->num_kernels;
    fv_contender *contenders = calloc((size_t)count, sizeof(*contenders));
    if (!contenders) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d measurements", count);
    for (int32_t i = 0; i < count; i++) {
        fv_plan_options *plan = &contenders[i].options;
        *plan = b->opts->args.plan;
        plan->device = b->device;
        plan->backend = b->backends[i / b->num_kernels];
        plan->kernels = b->kernels[i % b->num_kernels];
    }
    *out = contenders;
    *num_contenders = count;
    return FV_OK;
}

/* Small plans know which backends, kernels and variants there are, before anything is printed or written. What a
 * batch makes impossible is told with it. */
static fv_status check_names(const bench *b)
{
    const fv_bounds small = {.struct_size = sizeof(small),
                             .max_num_seqs = 1,
                             .max_num_tokens = SMALL_TOKENS,
                             .max_query_len = SMALL_TOKENS,
                             .max_seq_len = SMALL_TOKENS};
    fv_contender *contenders;
    int32_t num_contenders;
    fv_status status = make_contenders(&contenders, &num_contenders, b);
    if (status != FV_OK) return status;
    for (int32_t i = 0; i < num_contenders; i++) {
        fv_plan *plan = NULL;
        contenders[i].options.max_workspace_bytes = 0; /* what is too little depends on the batch */
        contenders[i].status = fv_plan_create(&plan, b->context, &b->opts->args.problem, &small,
                                              &contenders[i].options);
        if (contenders[i].status != FV_OK)
            snprintf(contenders[i].refusal, sizeof(contenders[i].refusal), "%s", fv_last_error());
        fv_plan_destroy(plan);
    }
    status = check_contenders(b, contenders, num_contenders);
    free(contenders);
    return status == FV_ERR_INVALID ? status : FV_OK;
}

static fv_status run_contenders(bench *b, const char *spec, fv_workload *workload)
{
    fv_contender *contenders;
    int32_t num_contenders;
    fv_status status = make_contenders(&contenders, &num_contenders, b);
    if (status != FV_OK) return status;
    status = b->clock
                 ? fv_measure_on_device(contenders, num_contenders, workload, &b->opts->limits, b->clock, &b->ceilings)
                 : fv_measure(contenders, num_contenders, workload, &b->opts->limits);
    if (status == FV_OK) status = check_contenders(b, contenders, num_contenders);
    for (int32_t i = 0; i < num_contenders && status == FV_OK; i++) {
        const fv_plan_options *plan = &contenders[i].options;
        fill_row(add_row(b, spec, plan->backend, plan->kernels, workload), &contenders[i], workload);
    }
    free(contenders);
    return status;
}

/* The reference kernels under the backend that was asked for, under `all` the one that auto takes. */
static fv_status run_reference(bench *b, const char *spec, fv_workload *workload)
{
    if (!b->with_reference) return FV_OK;
    fv_contender reference = {.options = b->opts->args.plan};
    reference.options.device = workload->device;
    reference.options.backend = asks_for_all(b) ? "auto" : b->opts->backend;
    reference.options.kernels = REFERENCE;
    reference.options.variant = NULL;
    fv_bench_row *row = add_row(b, spec, reference.options.backend, REFERENCE, workload);
    double seconds = 0;
    fv_status status = FV_OK;
    if (!b->opts->kernels) status = estimate_reference(&seconds, b, &reference.options, workload->flops);
    if (status == FV_ERR_UNSUPPORTED) { /* every row says so already */
        b->num_rows--;
        return FV_OK;
    }
    if (status != FV_OK) return status;
    if (seconds > REFERENCE_LIMIT_SECONDS) {
        snprintf(row->skipped, sizeof(row->skipped), "would take about %.0f s; --kernels reference runs it", seconds);
        return FV_OK;
    }
    fv_measure_limits limits = b->opts->limits;
    limits.runs_are_asked &= b->opts->kernels != NULL;
    status = fv_measure(&reference, 1, workload, &limits);
    if (status == FV_OK) fill_row(row, &reference, workload);
    return status;
}

static int32_t prints_table(const bench *b) { return !b->opts->json && !b->opts->csv; }

static void print_row(const bench *b, const fv_bench_row *row)
{
    if (!prints_table(b)) return;
    if (b->clock) {
        fv_bench_print_device_row(row);
    } else {
        fv_bench_print_row(row);
    }
}

static fv_status run_batch(bench *b, const char *spec)
{
    const options *opts = b->opts;
    fv_workload workload;
    fv_status status = fv_workload_init(&workload, b->context, b->device, &opts->args.problem, spec,
                                        &(fv_workload_options){opts->args.shared_prefix, opts->warm, opts->stored});
    if (status != FV_OK) return status;

    fv_bench_row *first = b->rows + b->num_rows;
    status = run_contenders(b, spec, &workload);
    if (status == FV_OK) status = run_reference(b, spec, &workload);
    const int32_t num_rows = (int32_t)(b->rows + b->num_rows - first);
    if (status == FV_OK) fv_bench_fill_ratios(first, num_rows, REFERENCE);
    if (status == FV_OK && opts->compare) status = fv_bench_compare(first, num_rows, &b->setting, opts->compare);
    for (int32_t i = 0; i < num_rows && status == FV_OK; i++) print_row(b, &first[i]);
    fflush(stdout);
    fv_workload_deinit(&workload);
    return status;
}

/* What is in the file stays until there is more to write: it may be the one to compare with. */
static fv_status open_output(bench *b)
{
    if (!b->opts->output) return FV_OK;
    b->output = fopen(b->opts->output, "a");
    return b->output ? FV_OK : fv_fail(FV_ERR_IO, "--output is '%s': %s", b->opts->output, strerror(errno));
}

static fv_status write_output(const bench *b)
{
    if (!b->output) return FV_OK;
    const int32_t is_empty = ftruncate(fileno(b->output), 0) == 0 || errno == EINVAL; /* a pipe has nothing to cut */
    if (is_empty) fv_bench_print_json(b->output, &b->setting, b->rows, b->num_rows);
    if (is_empty && fflush(b->output) == 0 && !ferror(b->output)) return FV_OK;
    return fv_fail(FV_ERR_IO, "--output '%s' could not be written to the end", b->opts->output);
}

static fv_status open_device(bench *b)
{
    const fv_context_options context = {.struct_size = sizeof(context), .num_threads = b->opts->num_threads};
    const fv_status status = fv_context_create(&b->context, &context);
    if (status != FV_OK) return status;
    const fv_status found = fv_device_find(&b->device, b->context, b->opts->device);
    if (found != FV_OK || b->device->host_is_device || !b->opts->limits.only_quiet) return found;
    return fv_fail(FV_ERR_INVALID,
                   "--quiet does not go with --device %s, whose runs no other work shares a core with; "
                   "accepted: cpu",
                   b->opts->device);
}

/* What a device other than the CPU can do. */
static fv_status measure_device(bench *b)
{
    if (b->device->host_is_device) return FV_OK;
    const fv_status status = fv_device_clock_create(&b->clock, b->device);
    return status == FV_OK ? fv_device_ceilings_measure(&b->ceilings, b->clock) : status;
}

static fv_status alloc_rows(bench *b)
{
    const int32_t rows_of_batch = b->num_backends * b->num_kernels + b->with_reference;
    b->rows = calloc((size_t)b->opts->num_specs * (size_t)rows_of_batch, sizeof(*b->rows));
    return b->rows ? FV_OK : fv_fail(FV_ERR_NO_MEMORY, "no memory for the rows of %d batches", b->opts->num_specs);
}

static void print_heading(const bench *b)
{
    if (!prints_table(b)) return;
    if (b->clock) {
        fv_bench_print_device_heading(&b->setting);
    } else {
        fv_bench_print_heading(&b->setting);
    }
    fflush(stdout);
}

static void note_nothing_compared(const bench *b)
{
    for (int32_t i = 0; i < b->num_rows; i++) {
        if (b->rows[i].old_ratio > 0) return;
    }
    fprintf(stderr,
            "fovea bench: note: --compare '%s' has no row of the same problem, --shared-prefix, --stored, batch, "
            "backend and kernels\n",
            b->opts->compare);
}

static fv_status print_end(const bench *b)
{
    const options *opts = b->opts;
    if (opts->compare) note_nothing_compared(b);
    if (prints_table(b)) fv_bench_print_summary(b->rows, b->num_rows);
    if (prints_table(b) && opts->cliffs) fv_bench_print_cliffs(b->rows, b->num_rows, REFERENCE);
    if (opts->json) fv_bench_print_json(stdout, &b->setting, b->rows, b->num_rows);
    if (opts->csv) fv_bench_print_csv(stdout, b->rows, b->num_rows);
    return write_output(b);
}

static fv_status run_bench(bench *b)
{
    const options *opts = b->opts;
    char problem[320];
    fv_problem_args_describe(problem, sizeof(problem), &opts->args.problem);
    b->setting.problem = problem;
    b->setting.shared_prefix = opts->args.shared_prefix;
    b->setting.stored = opts->stored;
    fv_status status = open_device(b);
    if (status != FV_OK) return status;
    choose_backends(b);
    choose_kernels(b);
    status = check_names(b); /* what is wrong with names and files is so before the first run */
    if (status == FV_OK && opts->compare) status = fv_bench_compare(NULL, 0, &b->setting, opts->compare);
    if (status == FV_OK) status = open_output(b);
    if (status == FV_OK) status = measure_device(b);
    if (status == FV_OK) status = alloc_rows(b);
    if (status != FV_OK) return status;
    b->setting.num_threads = fv_context_num_workers(b->context);
    b->setting.device = b->device;
    b->setting.ceilings = b->clock ? &b->ceilings : NULL;
    print_heading(b);
    for (int32_t i = 0; i < opts->num_specs && status == FV_OK; i++) status = run_batch(b, opts->specs[i]);
    if (opts->limits.only_quiet) b->setting.quiet_limit_us = fv_quiet_limit();
    return status == FV_OK ? print_end(b) : status;
}

int fv_cmd_bench(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "mla-layer") == 0) return fv_bench_mla_layer(argc - 1, argv + 1);
    options opts;
    if (read_options(&opts, argc, argv) != FV_OK) return fv_args_fail("bench");
    if (opts.help) {
        print_help();
        return 0;
    }
    bench b = {.opts = &opts, .setting = {.argc = argc, .argv = argv}};
    const fv_status status = run_bench(&b);
    const int code = status == FV_OK ? 0 : fv_status_fail("bench", status);
    if (b.output) fclose(b.output);
    free(b.rows);
    fv_device_clock_destroy(b.clock);
    fv_context_destroy(b.context);
    return code;
}
