/* fovea accuracy: the accuracy of rescaling by integer addition (AMLA, arXiv 2509.25224, tables 3 and 4), measured
 * through the backend of that name. */
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "accuracy/table.h"
#include "args.h"
#include "commands.h"
#include "core/error.h"

typedef struct options {
    accuracy_setup setup;
    int32_t num_threads;
    int32_t json, help;
} options;

static void print_help(void)
{
    printf(
        "usage: fovea accuracy [OPTION...]\n\n"
        "Absorbed MLA decode over random latents with AMLA's rescaling by integer addition, with and without its\n"
        "compensation of errors, and with the multiplication that it stands for (\"Base\"): relative errors against\n"
        "double beside those of the paper's tables 3 and 4, and how often a block of keys, as many as a kernel takes\n"
        "at once, has a larger maximum than those before it.\n\n"
        "  --samples N      random decodes of each column (100)\n"
        "  --heads N        query heads, 1 to 128 (128)\n"
        "  --context N      keys of each (8192)\n"
        "  --quick          4 samples of 32 heads where the options above say nothing: the tables within some "
        "percent,\n"
        "                   in seconds\n"
        "  --seed N         of the random numbers (1)\n"
        "  --threads N      of the CPU, which computes in double (all)\n"
        "  --device NAME    cpu, cuda, cuda:1: where the backend runs (cpu)\n"
        "  --kernels NAME   of the device, CPU: portable, avx2, avx512, avx512_bf16, amx, and amx-emulated, which\n"
        "                   runs on any, slowly; CUDA: portable, hopper (the best)\n"
        "  --json           print JSON instead\n"
        "  --help           this text\n");
}

static fv_status read_options(options *opts, int argc, char **argv)
{
    enum { SAMPLES = 1000, HEADS, CONTEXT, QUICK, SEED, THREADS, DEVICE, KERNELS, JSON };
    static const struct option long_options[] = {
        {"samples", required_argument, NULL, SAMPLES},
        {"heads", required_argument, NULL, HEADS},
        {"context", required_argument, NULL, CONTEXT},
        {"quick", no_argument, NULL, QUICK},
        {"seed", required_argument, NULL, SEED},
        {"threads", required_argument, NULL, THREADS},
        {"device", required_argument, NULL, DEVICE},
        {"kernels", required_argument, NULL, KERNELS},
        {"json", no_argument, NULL, JSON},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    *opts = (options){.setup = {.context = 8192}};
    int64_t seed = 1;
    int32_t is_quick = 0;
    opterr = 0;
    int value;
    while ((value = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
        accuracy_setup *setup = &opts->setup;
        fv_status status = FV_OK;
        switch (value) {
        case SAMPLES: status = fv_args_i32(&setup->num_samples, "--samples", optarg, 1, 100000); break;
        case HEADS: status = fv_args_i32(&setup->num_heads, "--heads", optarg, 1, 128); break;
        case CONTEXT: status = fv_args_i32(&setup->context, "--context", optarg, 1, 1 << 20); break;
        case QUICK: is_quick = 1; break;
        case SEED: status = fv_args_i64(&seed, "--seed", optarg, 0, INT64_MAX); break;
        case THREADS: status = fv_args_i32(&opts->num_threads, "--threads", optarg, 1, 1024); break;
        case DEVICE: setup->device = optarg; break;
        case KERNELS: setup->kernels = optarg; break;
        case JSON: opts->json = 1; break;
        case 'h': opts->help = 1; break;
        default: status = fv_args_refuse(value, argc, argv); break;
        }
        if (status != FV_OK) return status;
    }
    opts->setup.seed = (uint64_t)seed;
    if (opts->setup.num_samples == 0) opts->setup.num_samples = is_quick ? 4 : 100;
    if (opts->setup.num_heads == 0) opts->setup.num_heads = is_quick ? 32 : 128;
    if (optind < argc) return fv_args_refuse_operand(argv[optind], argv[0]);
    return FV_OK;
}

/* The progress line, on a terminal only. */
typedef struct progress_line {
    int32_t is_shown;
    int32_t column;
    int32_t num_samples;
} progress_line;

static void show_progress(void *user, int32_t num_done)
{
    const progress_line *line = user;
    if (!line->is_shown) return;
    const accuracy_distribution *distribution = &accuracy_paper[line->column].distribution;
    fprintf(stderr, "\r\033[Kcolumn %d of %d, %s %g: %d of %d samples", line->column + 1, ACCURACY_NUM_COLUMNS,
            distribution->shape == ACCURACY_GAUSSIAN ? "Gaussian" : "uniform", (double)distribution->width, num_done,
            line->num_samples);
}

static fv_status measure(accuracy_column *columns, accuracy_lab *lab)
{
    progress_line line = {.is_shown = isatty(STDERR_FILENO), .num_samples = lab->setup.num_samples};
    fv_status status = FV_OK;
    for (; status == FV_OK && line.column < ACCURACY_NUM_COLUMNS; line.column++) {
        columns[line.column].distribution = accuracy_paper[line.column].distribution;
        show_progress(&line, 0);
        status = accuracy_measure(&columns[line.column], lab, show_progress, &line);
    }
    if (line.is_shown) fprintf(stderr, "\r\033[K");
    return status;
}

int fv_cmd_accuracy(int argc, char **argv)
{
    options opts;
    if (read_options(&opts, argc, argv) != FV_OK) return fv_args_fail("accuracy");
    if (opts.help) {
        print_help();
        return 0;
    }
    const fv_context_options context_options = {.struct_size = sizeof(context_options),
                                                .num_threads = opts.num_threads};
    accuracy_column columns[ACCURACY_NUM_COLUMNS];
    accuracy_lab lab = {0};
    fv_context *context = NULL;
    fv_status status = fv_context_create(&context, &context_options);
    if (status == FV_OK) status = accuracy_lab_init(&lab, context, &opts.setup);
    if (status == FV_OK) status = measure(columns, &lab);
    if (status == FV_OK) (opts.json ? accuracy_print_json : accuracy_print)(columns, &lab);
    const int code = status == FV_OK ? 0 : fv_status_fail("accuracy", status);
    accuracy_lab_deinit(&lab);
    fv_context_destroy(context);
    return code;
}
