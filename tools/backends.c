/* fovea backends: which backends serve a problem, in which order `auto` asks them, why the others do not,
 * and what the plan of each would do with a batch. */
#include <stdio.h>
#include <stdlib.h>

#include "args.h"
#include "backends/answers.h"
#include "backends/backend.h"
#include "commands.h"
#include "core/error.h"
#include "json.h"

typedef struct options {
    fv_problem_args args;
    const char *device;
    const char *batch; /* NULL: no plan is made */
    int32_t why, json, help;
} options;

static void print_help(void)
{
    printf("usage: fovea backends [--why] [SPEC] [OPTION...]\n\n"
           "Without options: what \"auto\" takes for each kind of layer, and what backends there are.\n"
           "With --why, or options of a problem: all backends in the order in which \"auto\" asks them, the one\n"
           "chosen, those that can, and all reasons of those that cannot. The problem is 32/8 heads of 128 in\n"
           "bfloat16 where nothing else is said. With a batch SPEC, as fovea bench takes it (32q1s4k is 32 decodes\n"
           "over 4096 keys): what the plan of each does with it, kernel calls, chunks and cascade. Options from\n"
           "--cascade to --shared-prefix want one.\n\n" FV_PROBLEM_HELP FV_PLAN_HELP
           "  --batch SPEC           the same as SPEC\n"
           "  --device NAME          cpu, cuda, cuda:1 (cpu)\n"
           "  --json                 print JSON\n"
           "  --help                 this text\n");
}

static fv_status read_options(options *opts, int argc, char **argv)
{
    enum { DEVICE = FV_OPTION_COMMAND, BATCH, WHY, JSON, HELP };
    static const struct option long_options[] = {
        FV_PROBLEM_OPTIONS,
        {"batch", required_argument, NULL, BATCH},
        {"device", required_argument, NULL, DEVICE},
        {"why", no_argument, NULL, WHY},
        {"json", no_argument, NULL, JSON},
        {"help", no_argument, NULL, HELP},
        {NULL, 0, NULL, 0},
    };
    *opts = (options){.device = "cpu"};
    fv_problem_args_init(&opts->args);
    opterr = 0;
    int value;
    while ((value = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
        fv_status status = FV_OK;
        switch (value) {
        case ':':
        case '?': status = fv_args_refuse(value, argc, argv); break;
        case BATCH: opts->batch = optarg; break;
        case DEVICE: opts->device = optarg; break;
        case WHY: opts->why = 1; break;
        case JSON: opts->json = 1; break;
        case 'h':
        case HELP: opts->help = 1; break;
        default: status = fv_problem_args_set(&opts->args, value, optarg); break;
        }
        if (status != FV_OK) return status;
    }
    if (optind < argc && !opts->batch) opts->batch = argv[optind++];
    if (optind < argc) return fv_args_refuse_operand(argv[optind], argv[0]);
    if (opts->args.of_batch && !opts->batch) {
        return fv_fail(FV_ERR_INVALID, "--%s without a batch; accepted: with SPEC, e.g. 8q1s4k", opts->args.of_batch);
    }
    return fv_problem_args_finish(&opts->args, opts->device);
}

/* The default problem as a layer of a kind. */
static fv_status problem_of_kind(fv_problem *problem, fv_layer_kind kind, const char *device)
{
    fv_problem_args args;
    fv_problem_args_init(&args);
    args.problem.kind = kind == FV_LAYER_MLA ? FV_ATTENTION_MLA : FV_ATTENTION_MHA;
    args.problem.window = kind == FV_LAYER_SLIDING_WINDOW ? 1024 : 0;
    if (kind == FV_LAYER_ENCODER) args.problem.type = FV_ATTENTION_ENCODER;
    if (kind == FV_LAYER_CROSS) args.problem.type = FV_ATTENTION_CROSS;
    const fv_status status = fv_problem_args_finish(&args, device);
    *problem = args.problem;
    return status;
}

/* What auto takes for the problem; NULL: no backend can. */
static fv_status find_chosen(const char **chosen, fv_device *device, const fv_problem *problem)
{
    char reasons[FV_ANSWER_REASONS_BYTES];
    for (int32_t i = 0; (*chosen = fv_backend_preferred_name(i, device, problem)); i++) {
        const fv_status status = fv_backend_why_not(reasons, sizeof(reasons), *chosen, device, problem);
        if (status != FV_OK || !reasons[0]) return status;
    }
    return FV_OK;
}

static fv_status print_overview(const options *opts, fv_device *device)
{
    fv_json json;
    fv_json_init(&json, stdout);
    if (opts->json) {
        fv_json_begin_object(&json, NULL);
        fv_json_string(&json, "device", fv_device_name(device));
        fv_json_begin_array(&json, "layer_kinds");
    } else {
        printf("%-24s auto takes, on %s\n", "layer kind", fv_device_name(device));
    }
    for (int32_t kind = FV_LAYER_FULL; kind <= FV_LAYER_CROSS; kind++) {
        fv_problem problem;
        const char *chosen = NULL;
        fv_status status = problem_of_kind(&problem, (fv_layer_kind)kind, opts->device);
        if (status == FV_OK) status = find_chosen(&chosen, device, &problem);
        if (status != FV_OK) return status;
        if (!opts->json) {
            printf("%-24s %s\n", fv_layer_kind_name((fv_layer_kind)kind), chosen ? chosen : "none");
            continue;
        }
        fv_json_begin_row(&json);
        fv_json_string(&json, "layer_kind", fv_layer_kind_name((fv_layer_kind)kind));
        fv_json_string(&json, "auto", chosen);
        fv_json_end_object(&json);
    }
    if (opts->json) {
        fv_json_end_array(&json);
        fv_json_begin_array(&json, "backends");
    } else {
        printf("\n%-24s %-13s strategy\n", "backend", "layout");
    }
    for (int32_t i = 0; i < fv_backend_count(); i++) {
        const fv_backend *backend = fv_backend_at(i);
        const char *layout = fv_kv_layout_name(backend->layout);
        if (!opts->json) {
            printf("%-24s %-13s %s\n", backend->name, layout, backend->summary);
            continue;
        }
        fv_json_begin_row(&json);
        fv_json_string(&json, "name", backend->name);
        fv_json_string(&json, "layout", layout);
        fv_json_string(&json, "summary", backend->summary);
        fv_json_end_object(&json);
    }
    if (opts->json) {
        fv_json_end_array(&json);
        fv_json_end_object(&json);
    } else {
        printf("\nfovea backends --why [SPEC] [OPTION...] asks all of them about a problem and a batch.\n");
    }
    return FV_OK;
}

static fv_status print_answers(const options *opts, fv_device *device, fv_context *context)
{
    fv_answers *answers = calloc(1, sizeof(*answers));
    if (!answers) return fv_fail(FV_ERR_NO_MEMORY, "no memory for the answers of the backends");
    fv_status status = fv_answers_init(answers, &opts->args, device);
    if (status == FV_OK && opts->batch) status = fv_answers_add_batch(answers, context, opts->batch);
    if (status == FV_OK) (opts->json ? fv_answers_print_json : fv_answers_print)(answers);
    free(answers);
    return status;
}

int fv_cmd_backends(int argc, char **argv)
{
    options opts;
    if (read_options(&opts, argc, argv) != FV_OK) return fv_args_fail("backends");
    if (opts.help) {
        print_help();
        return 0;
    }
    const int32_t is_overview = !opts.why && !opts.batch && opts.args.num_of_problem == 0;
    fv_context *context = NULL;
    fv_device *device = NULL;
    fv_status status = fv_context_create(&context, NULL);
    if (status == FV_OK) status = fv_device_find(&device, context, opts.device);
    if (status == FV_OK) {
        status = is_overview ? print_overview(&opts, device) : print_answers(&opts, device, context);
    }
    const int code = status == FV_OK ? 0 : fv_status_fail("backends", status);
    fv_context_destroy(context);
    return code;
}
