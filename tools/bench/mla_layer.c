/* fovea bench mla-layer: one new token for each of 128 sequences through DeepSeek-V3's attention layer, from the
 * hidden state to the output projection. The cache keeps keys unrotated, each is rotated at reading; no norms.
 *
 * A stage's ceiling is the larger of its bytes over the measured read bandwidth and its operations over the
 * measured peak of the multiply-add units. The weights together are many times a processor's caches, so each
 * run finds them in memory. */
#include "bench/mla_layer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "bench/ceilings.h"
#include "bench/mla_report.h"
#include "bench/mla_workload.h"
#include "core/compiler.h"
#include "core/error.h"

#define Q_LORA 1536
#define MAX_LENGTHS 16
#define MAX_REPEAT 100
#define READ_RANGE_BYTES (1 << 20)

static char command[] = "bench mla-layer";

typedef struct options {
    fv_mla_sizes sizes;
    int32_t lengths[MAX_LENGTHS]; /* of the cache before the new token */
    int32_t num_lengths;
    int32_t num_threads, repeat, json, help;
    const char *backend;
} options;

/* --- options --------------------------------------------------------------------------------------------------- */

static void print_help(void)
{
    printf("usage: fovea bench mla-layer [OPTION...]\n\n"
           "Times an attention layer with DeepSeek-V3's sizes: one new token for each sequence, queries through\n"
           "Q_down and Q_up, latents through KV_down, absorbed attention over a cache of unrotated keys, W_o.\n"
           "Each stage stands beside its ceiling: the larger of its bytes over the read bandwidth and its\n"
           "operations over the peak of the multiply-add units, both measured in the same run.\n\n"
           "  --batch N         sequences (128)\n"
           "  --dim N           hidden size (7168)\n"
           "  --heads N         query heads (128)\n"
           "  --length LIST     cached tokens before the new one (512,2048,4096,6144)\n"
           "  --dtype NAME      of weights and activations; the engine's products take float32 (float32)\n"
           "  --backend NAME    (the one that auto takes)\n"
           "  --threads N       (all CPUs)\n"
           "  --repeat N        runs for each length, the median counts (3)\n"
           "  --json            print that instead of tables\n");
}

enum { BATCH = 1000, DIM, HEADS, LENGTH, DTYPE, BACKEND, THREADS, REPEAT, JSON, HELP };

static fv_status read_lengths(options *opts, const char *text)
{
    char copy[256], *rest = copy;
    if (strlen(text) >= sizeof(copy)) return fv_fail(FV_ERR_INVALID, "--length is too long a list");
    strcpy(copy, text);
    opts->num_lengths = 0;
    for (char *word; (word = strsep(&rest, ", "));) {
        if (opts->num_lengths == MAX_LENGTHS) {
            return fv_fail(FV_ERR_INVALID, "--length is '%s'; accepted: up to %d lengths", text, MAX_LENGTHS);
        }
        const fv_status status = fv_args_i32(&opts->lengths[opts->num_lengths++], "--length", word, 0, 1 << 20);
        if (status != FV_OK) return status;
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
    case DTYPE: return fv_args_dtype(&opts->sizes.dtype, "--dtype", text);
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
        {"backend", required_argument, NULL, BACKEND},
        {"threads", required_argument, NULL, THREADS},
        {"repeat", required_argument, NULL, REPEAT},
        {"json", no_argument, NULL, JSON},
        {"help", no_argument, NULL, HELP},
        {NULL, 0, NULL, 0},
    };
    *opts = (options){
        .sizes = {128, 7168, Q_LORA, {128, 512, 64, 128, 128, 1, 0}, FV_DTYPE_F32, FV_DTYPE_BF16},
        .lengths = {512, 2048, 4096, 6144},
        .num_lengths = 4,
        .repeat = 3,
    };
    opterr = 0;
    int value;
    while ((value = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
        const int32_t is_refused = value == ':' || value == '?';
        const fv_status status = is_refused ? fv_args_refuse(value, argc, argv) : set_option(opts, value, optarg);
        if (status != FV_OK) return status;
    }
    return optind < argc ? fv_args_refuse_operand(argv[optind], command) : FV_OK;
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
    fv_ceiling_compute(w->context); /* wakes workers that a kernel of one thread let sleep */
    const double start = fv_mla_now_us();
    const double operations = fv_ceiling_compute(w->context);
    const double middle = fv_mla_now_us();
    volatile uint64_t sink = fv_ceiling_read(w->context, o->data, ranges, num_ranges);
    (void)sink;
    all[COMPUTE][run] = operations / (middle - start);
    all[READ][run] = (double)bytes / (fv_mla_now_us() - middle);
    free(ranges);
    return FV_OK;
}

static fv_status sample_run(samples all, fv_mla_workload *w, int32_t run)
{
    memset(w->timer.stage_us, 0, sizeof(w->timer.stage_us));
    const double start = fv_mla_now_us();
    const fv_status status = fv_mla_run(w->plan, &w->layer, w->workspace, NULL);
    const double total = fv_mla_now_us() - start;
    double products = 0;
    for (int32_t stage = 0; stage < FV_MLA_NUM_STAGES; stage++) products += w->timer.stage_us[stage];
    w->timer.stage_us[FV_MLA_ATTENTION] = total - products;
    for (int32_t stage = 0; stage < FV_MLA_NUM_STAGES; stage++) all[stage][run] = w->timer.stage_us[stage];
    all[TOTAL][run] = total;
    return status;
}

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int32_t count)
{
    qsort(values, (size_t)count, sizeof(*values), compare_doubles);
    return values[count / 2];
}

/* What the machine can do: neighbours only ever slow it down. */
static double upper_quartile(double *values, int32_t count)
{
    qsort(values, (size_t)count, sizeof(*values), compare_doubles);
    return values[count * 3 / 4];
}

static fv_status measure(fv_mla_result *result, fv_mla_workload *w, int32_t length, const options *opts)
{
    samples all;
    fv_status status = fv_mla_workload_plan(w, length, opts->backend);
    if (status == FV_OK) status = sample_run(all, w, 0); /* touches code and workspace */
    for (int32_t run = 0; run < opts->repeat && status == FV_OK; run++) {
        status = sample_run(all, w, run);
        if (status == FV_OK) status = sample_ceilings(all, w, run);
    }
    if (status != FV_OK) return status;
    result->length = length;
    snprintf(result->plan, sizeof(result->plan), "%s", fv_plan_describe(w->plan));
    for (int32_t i = 0; i < FV_MLA_NUM_STAGES; i++) result->stage_us[i] = median(all[i], opts->repeat);
    result->total_us = median(all[TOTAL], opts->repeat);
    result->bytes_per_us = upper_quartile(all[READ], opts->repeat);
    result->operations_per_us = upper_quartile(all[COMPUTE], opts->repeat);
    return FV_OK;
}

static fv_status run_lengths(const options *opts)
{
    fv_mla_result results[MAX_LENGTHS];
    fv_mla_workload workload;
    int32_t max_length = 0, num_results = 0;
    for (int32_t i = 0; i < opts->num_lengths; i++) max_length = fv_max_i32(max_length, opts->lengths[i]);
    fv_status status = fv_mla_workload_init(&workload, &opts->sizes, max_length, opts->num_threads);
    const int32_t num_threads = status == FV_OK ? fv_context_num_workers(workload.context) : 0;
    if (status == FV_OK && !opts->json) fv_mla_print_heading(&opts->sizes, num_threads);
    for (; num_results < opts->num_lengths && status == FV_OK; num_results++) {
        fv_mla_result *result = &results[num_results];
        status = measure(result, &workload, opts->lengths[num_results], opts);
        if (status == FV_OK && !opts->json) fv_mla_print_result(&opts->sizes, result);
        fflush(stdout);
    }
    if (status == FV_OK && opts->json) fv_mla_print_json(&opts->sizes, num_threads, results, num_results);
    fv_mla_workload_deinit(&workload);
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
    return run_lengths(&opts) == FV_OK ? 0 : fv_run_fail(command);
}
