/* fovea bench mla-layer: one new token for each of 128 sequences through DeepSeek-V3's attention layer, from the
 * hidden state to the output projection. The cache keeps keys unrotated, each is rotated at reading; no norms.
 *
 * A stage's ceiling is the larger of its bytes over the measured read bandwidth and its operations over the
 * measured peak of the multiply-add units, on a device of a GEMM. The weights together are many times a processor's caches, so each
 * run finds them in memory. */
#include "bench/mla_layer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "bench/ceilings.h"
#include "bench/mla_device.h"
#include "bench/mla_workload.h"
#include "bench/samples.h"
#include "core/compiler.h"
#include "core/error.h"

#define Q_LORA 1536
#define MAX_LENGTHS 16
#define DEFAULT_REPEAT 3
#define MAX_REPEAT 100
#define READ_RANGE_BYTES (1 << 20)
#define ACCEPTED_ERROR 0.03 /* of --check: each stage rounds to 16 bits, in another order */

static char command[] = "bench mla-layer";

typedef struct options {
    fv_mla_sizes sizes;
    int32_t lengths[MAX_LENGTHS]; /* of the cache before the new token */
    int32_t num_lengths;
    int32_t num_threads, repeat, check, json, help; /* repeat is 0 where it is not given */
    const char *device, *backend;
    int32_t has_dtype;
} options;

/* --- options --------------------------------------------------------------------------------------------------- */

static void print_help(void)
{
    printf("usage: fovea bench mla-layer [OPTION...]\n\n"
           "Times an attention layer with DeepSeek-V3's sizes: one new token for each sequence, queries through\n"
           "Q_down and Q_up, latents through KV_down (one product with Q_down), absorbed attention over a cache of\n"
           "unrotated keys, W_o.\n"
           "Each stage stands beside its ceiling: the larger of its bytes over the read bandwidth and its\n"
           "operations over the peak of the multiply-add units, both measured in the same run.\n\n"
           "  --batch N         sequences (128)\n"
           "  --dim N           hidden size (7168)\n"
           "  --heads N         query heads (128)\n"
           "  --length LIST     cached tokens before the new one (512,2048,4096,6144)\n"
           "  --dtype NAME      of weights and activations (bfloat16; on the CPU float32, which the engine's\n"
           "                    products take)\n"
           "  --rotated         keys are rotated when they are written, as in models\n"
           "  --device NAME     cpu, cuda, cuda:1 (cpu)\n"
           "  --backend NAME    (the one that auto takes)\n"
           "  --threads N       (the CPUs that this process may use)\n"
           "  --repeat N        runs for each length, the median counts (3)\n"
           "  --check           on a GPU: compare the output with the CPU's instead; for small sizes, without --json\n"
           "                    and --repeat\n"
           "  --json            print that instead of tables\n"
           "  --help            this text\n");
}

enum { BATCH = 1000, DIM, HEADS, LENGTH, DTYPE, ROTATED, DEVICE, BACKEND, THREADS, REPEAT, CHECK, JSON, HELP };

static fv_status refuse_lengths(const char *text)
{
    return fv_fail(FV_ERR_INVALID, "--length is '%s'; accepted: up to %d lengths with commas between", text,
                   MAX_LENGTHS);
}

static fv_status read_lengths(options *opts, const char *text)
{
    char word[32];
    opts->num_lengths = 0;
    for (const char *at = text; at == text || *at;) {
        at += strspn(at, " ");
        const size_t length = strcspn(at, ", ");
        if (opts->num_lengths == MAX_LENGTHS || length == 0 || length >= sizeof(word)) return refuse_lengths(text);
        snprintf(word, sizeof(word), "%.*s", (int)length, at);
        const fv_status status = fv_args_i32(&opts->lengths[opts->num_lengths++], "--length", word, 0, 1 << 20);
        if (status != FV_OK) return status;
        at += length + strspn(at + length, " ");
        if (*at == ',' && *++at == '\0') return refuse_lengths(text);
    }
    return FV_OK;
}

static fv_status set_option(options *opts, int value, const char *text)
{
    switch (value) {
    case BATCH: return fv_args_i32(&opts->sizes.batch, "--batch", text, 1, 1 << 16);
    case DIM: return fv_args_i32(&opts->sizes.dim, "--dim", text, 1, 1 << 16);
    case HEADS: return fv_args_i32(&opts->sizes.mla.num_heads, "--heads", text, 1, 1024);
    case LENGTH: return read_lengths(opts, text);
    case DTYPE: opts->has_dtype = 1; return fv_args_dtype(&opts->sizes.dtype, "--dtype", text);
    case ROTATED: opts->sizes.mla.rotate_at_reading = 0; return FV_OK;
    case DEVICE: opts->device = text; return FV_OK;
    case CHECK: opts->check = 1; return FV_OK;
    case BACKEND: opts->backend = text; return FV_OK;
    case THREADS: return fv_args_i32(&opts->num_threads, "--threads", text, 1, 4096);
    case REPEAT: return fv_args_i32(&opts->repeat, "--repeat", text, 1, MAX_REPEAT);
    case JSON: opts->json = 1; return FV_OK;
    default: opts->help = 1; return FV_OK;
    }
}

static fv_status read_options(options *opts, int argc, char **argv)
{
    static const struct option long_options[] = {
        {"batch", required_argument, NULL, BATCH},
        {"dim", required_argument, NULL, DIM},
        {"heads", required_argument, NULL, HEADS},
        {"length", required_argument, NULL, LENGTH},
        {"dtype", required_argument, NULL, DTYPE},
        {"rotated", no_argument, NULL, ROTATED},
        {"device", required_argument, NULL, DEVICE},
        {"backend", required_argument, NULL, BACKEND},
        {"threads", required_argument, NULL, THREADS},
        {"repeat", required_argument, NULL, REPEAT},
        {"check", no_argument, NULL, CHECK},
        {"json", no_argument, NULL, JSON},
        {"help", no_argument, NULL, HELP},
        {NULL, 0, NULL, 0},
    };
    *opts = (options){
        .sizes = {128, 7168, Q_LORA, {128, 512, 64, 128, 128, 1, 0}, FV_DTYPE_F32, FV_DTYPE_BF16},
        .lengths = {512, 2048, 4096, 6144},
        .num_lengths = 4,
        .device = "cpu",
    };
    opterr = 0;
    int value;
    while ((value = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
        const int32_t is_refused = value == ':' || value == '?';
        const fv_status status = is_refused ? fv_args_refuse(value, argc, argv) : set_option(opts, value, optarg);
        if (status != FV_OK) return status;
    }
    if (optind < argc) return fv_args_refuse_operand(argv[optind], command);
    if (opts->check && (opts->json || opts->repeat))
        return fv_fail(FV_ERR_INVALID,
                       "%s does not go with --check, which prints an error of each length; accepted: either",
                       opts->json ? "--json" : "--repeat");
    if (opts->repeat == 0) opts->repeat = DEFAULT_REPEAT;
    const int32_t is_cpu = strcmp(opts->device, "cpu") == 0;
    if (!opts->has_dtype && !is_cpu) opts->sizes.dtype = FV_DTYPE_BF16;
    if (!opts->check || !is_cpu) return fv_mla_products_check(opts->sizes.dtype, opts->device, "");
    return fv_fail(FV_ERR_INVALID, "--check compares a device with the CPU, and --device is 'cpu'; accepted: cuda");
}

/* --- measuring --------------------------------------------------------------------------------------------------- */

/* Samples [stage], the whole run, and the ceilings. */
enum { TOTAL = FV_MLA_NUM_STAGES, READ, COMPUTE, NUM_SAMPLES };
typedef double samples[NUM_SAMPLES][MAX_REPEAT];

/* Bandwidth of a read of W_o, the largest of the weights, and the peak of the cores. */
static fv_status sample_ceilings(samples all, const fv_mla_workload *w, int32_t run)
{
    const fv_tensor *o = &w->layer.o;
    const int64_t bytes = o->shape[0] * o->stride_bytes[0], num_ranges = fv_ceil_div(bytes, READ_RANGE_BYTES);
    fv_read_range *ranges = malloc(sizeof(*ranges) * (size_t)num_ranges);
    if (!ranges) return fv_fail(FV_ERR_NO_MEMORY, "no memory for the ranges of a read");
    for (int64_t i = 0; i < num_ranges; i++) {
        const int64_t offset = i * READ_RANGE_BYTES;
        ranges[i] = (fv_read_range){offset, fv_min_i64(READ_RANGE_BYTES, bytes - offset)};
    }
    const fv_isa isa = fv_cpu_isa();
    /* Wakes workers that a kernel of one thread let sleep. */
    fv_ceiling_compute(w->context, FV_DTYPE_F32, FV_DTYPE_F32, isa);
    const double start = fv_now_us();
    const double operations = fv_ceiling_compute(w->context, FV_DTYPE_F32, FV_DTYPE_F32, isa);
    const double middle = fv_now_us();
    volatile uint64_t sink = fv_ceiling_read(w->context, o->data, ranges, num_ranges);
    (void)sink;
    all[COMPUTE][run] = operations / (middle - start);
    all[READ][run] = (double)bytes / (fv_now_us() - middle);
    free(ranges);
    return FV_OK;
}

static fv_status sample_run(samples all, fv_mla_workload *w, int32_t run)
{
    fv_mla_timer_begin(&w->timer);
    const double start = fv_now_us();
    const fv_status status = fv_mla_run(w->plan, &w->layer, w->workspace, NULL);
    const double total = fv_now_us() - start;
    double products = 0;
    for (int32_t stage = 0; stage < FV_MLA_NUM_STAGES; stage++) products += w->timer.stage_us[stage];
    w->timer.stage_us[FV_MLA_ATTENTION] = total - products;
    for (int32_t stage = 0; stage < FV_MLA_NUM_STAGES; stage++) all[stage][run] = w->timer.stage_us[stage];
    all[TOTAL][run] = total;
    return status;
}

static double median(double *values, int32_t count) { return fv_samples_of(values, count).median_us; }

/* What the machine can do: neighbours only ever slow it down. */
static double upper_quartile(double *values, int32_t count)
{
    fv_samples_of(values, count); /* sorts */
    return values[count * 3 / 4];
}

static fv_status measure_on_cpu(fv_mla_result *result, fv_mla_workload *w, const options *opts)
{
    samples all;
    fv_status status = sample_run(all, w, 0); /* touches code and workspace */
    for (int32_t run = 0; run < opts->repeat && status == FV_OK; run++) {
        status = sample_run(all, w, run);
        if (status == FV_OK) status = sample_ceilings(all, w, run);
    }
    if (status != FV_OK) return status;
    for (int32_t i = 0; i < FV_MLA_NUM_STAGES; i++) result->stage_us[i] = median(all[i], opts->repeat);
    result->total_us = median(all[TOTAL], opts->repeat);
    result->bytes_per_us = upper_quartile(all[READ], opts->repeat);
    result->operations_per_us = upper_quartile(all[COMPUTE], opts->repeat);
    return FV_OK;
}

/* The workload, and what a device other than the CPU is timed with. */
typedef struct bench {
    const options *opts;
    fv_mla_workload workload;
    fv_device_clock *clock; /* NULL on the CPU */
    fv_device_ceilings ceilings;
    fv_mla_setting setting;
    fv_mla_result results[MAX_LENGTHS];
    int32_t max_length;
} bench;

static fv_status open_bench(bench *b)
{
    const fv_mla_machine machine = {.device = b->opts->device, .num_threads = b->opts->num_threads};
    fv_mla_workload *w = &b->workload;
    fv_status status = fv_mla_workload_init(w, &b->opts->sizes, b->max_length, &machine);
    if (status != FV_OK) return status;
    b->setting.num_threads = fv_context_num_workers(w->context);
    if (w->device->host_is_device) return FV_OK;
    b->setting.device = fv_device_describe(w->device);
    status = fv_device_clock_create(&b->clock, w->device);
    return status == FV_OK ? fv_device_ceilings_measure(&b->ceilings, b->clock) : status;
}

static fv_status measure(fv_mla_result *result, bench *b, int32_t length)
{
    const options *opts = b->opts;
    fv_status status = fv_mla_workload_plan(&b->workload, length, opts->backend, b->clock != NULL);
    if (status != FV_OK) return status;
    *result = (fv_mla_result){.length = length};
    snprintf(result->plan, sizeof(result->plan), "%s", fv_plan_describe(b->workload.plan));
    if (!b->clock) return measure_on_cpu(result, &b->workload, opts);
    return fv_mla_measure_on_device(result, &b->workload, b->clock, &b->ceilings, opts->repeat);
}

static fv_status compare_length(bench *b, fv_mla_workload *cpu, int32_t length)
{
    double error = 0;
    fv_status status = fv_mla_workload_plan(&b->workload, length, b->opts->backend, 1);
    if (status == FV_OK) status = fv_mla_workload_plan(cpu, length, NULL, 0);
    if (status == FV_OK) status = fv_mla_compare(&error, &b->workload, cpu);
    if (status != FV_OK) return status;
    printf("length %d: largest relative error of a row of the output against the CPU's %.5f\n", length, error);
    if (error <= ACCEPTED_ERROR) return FV_OK;
    return fv_fail(FV_ERR_DEVICE, "length %d: an error of %g; accepted: %g", length, error, ACCEPTED_ERROR);
}

static fv_status compare_lengths(bench *b)
{
    const fv_mla_machine machine = {.device = "cpu", .num_threads = b->opts->num_threads, .plain_products = 1};
    fv_mla_workload cpu;
    fv_status status = fv_mla_workload_init(&cpu, &b->opts->sizes, b->max_length, &machine);
    for (int32_t i = 0; i < b->opts->num_lengths && status == FV_OK; i++) {
        status = compare_length(b, &cpu, b->opts->lengths[i]);
    }
    fv_mla_workload_deinit(&cpu);
    return status;
}

static fv_status measure_lengths(bench *b)
{
    const options *opts = b->opts;
    fv_status status = FV_OK;
    if (!opts->json) fv_mla_print_heading(&opts->sizes, &b->setting);
    for (int32_t i = 0; i < opts->num_lengths && status == FV_OK; i++) {
        status = measure(&b->results[i], b, opts->lengths[i]);
        if (status == FV_OK && !opts->json) fv_mla_print_result(&opts->sizes, &b->results[i]);
        fflush(stdout);
    }
    if (status == FV_OK && opts->json) {
        fv_mla_print_json(&opts->sizes, &b->setting, b->results, opts->num_lengths);
    }
    return status;
}

static fv_status run(bench *b)
{
    const options *opts = b->opts;
    for (int32_t i = 0; i < opts->num_lengths; i++) b->max_length = fv_max_i32(b->max_length, opts->lengths[i]);
    fv_status status = open_bench(b);
    if (status == FV_OK) status = opts->check ? compare_lengths(b) : measure_lengths(b);
    fv_device_clock_destroy(b->clock);
    fv_mla_workload_deinit(&b->workload);
    return status;
}

int fv_bench_mla_layer(int argc, char **argv)
{
    argv[0] = command; /* what getopt's refusals name */
    options opts;
    if (read_options(&opts, argc, argv) != FV_OK) return fv_args_fail(command);
    if (opts.help) {
        print_help();
        return 0;
    }
    bench *b = calloc(1, sizeof(*b));
    if (!b) {
        fv_fail(FV_ERR_NO_MEMORY, "no memory for the results");
        return fv_run_fail(command);
    }
    b->opts = &opts;
    b->setting.argc = argc;
    b->setting.argv = argv;
    const int code = run(b) == FV_OK ? 0 : fv_run_fail(command);
    free(b);
    return code;
}
