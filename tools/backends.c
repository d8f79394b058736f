/* fovea backends: which backends serve a problem, and why the others do not. */
#include <stdio.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "fovea/backend.h"
#include "json.h"
#include "problem_args.h"

#define REASONS_BYTES 4096

typedef struct options {
    fv_problem problem;
    const char *device;
    int32_t json;
    int32_t help;
} options;

static void print_help(void)
{
    printf("usage: fovea backends [--why] [OPTION...]\n\n"
           "Lists the backends: yes where one serves the problem, else the reasons why not. The first yes is\n"
           "what \"auto\" takes. Without options the problem is 32/8 heads of 128 in bfloat16.\n\n" FV_PROBLEM_HELP
           "  --device NAME          cpu, cuda, cuda:1 (cpu)\n"
           "  --why                  the reasons (always printed; for those used to the flag)\n"
           "  --json                 print JSON\n");
}

static fv_status read_options(options *opts, int argc, char **argv)
{
    enum { DEVICE = FV_OPTION_COMMAND, WHY, JSON, HELP };
    static const struct option long_options[] = {
        FV_PROBLEM_OPTIONS,
        {"device", required_argument, NULL, DEVICE},
        {"why", no_argument, NULL, WHY},
        {"json", no_argument, NULL, JSON},
        {"help", no_argument, NULL, HELP},
        {NULL, 0, NULL, 0},
    };
    *opts = (options){.device = "cpu"};
    fv_problem_args_init(&opts->problem);
    opterr = 0;
    int value;
    while ((value = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
        fv_status status = FV_OK;
        switch (value) {
        case ':':
        case '?': status = fv_args_refuse(value, argc, argv); break;
        case DEVICE: opts->device = optarg; break;
        case WHY: break;
        case JSON: opts->json = 1; break;
        case 'h':
        case HELP: opts->help = 1; break;
        default: status = fv_problem_args_set(&opts->problem, value, optarg); break;
        }
        if (status != FV_OK) return status;
    }
    if (optind < argc) return fv_args_refuse_operand(argv[optind], argv[0]);
    return fv_problem_args_finish(&opts->problem);
}

static fv_status print_json(const fv_problem *problem, fv_device *device)
{
    char text[256], reasons[REASONS_BYTES];
    fv_json json;
    fv_json_init(&json, stdout);
    fv_json_begin_object(&json, NULL);
    fv_problem_args_describe(text, sizeof(text), problem);
    fv_json_string(&json, "problem", text);
    fv_json_string(&json, "device", fv_device_name(device));
    fv_json_begin_array(&json, "backends");
    for (int32_t i = 0; i < fv_backend_count(); i++) {
        const fv_status status = fv_backend_why_not(reasons, sizeof(reasons), fv_backend_name(i), device, problem);
        if (status != FV_OK) return status;
        fv_json_begin_row(&json);
        fv_json_string(&json, "name", fv_backend_name(i));
        fv_json_bool(&json, "serves", reasons[0] == '\0');
        fv_json_string(&json, "why_not", reasons);
        fv_json_string(&json, "summary", fv_backend_summary(i));
        fv_json_end_object(&json);
    }
    fv_json_end_array(&json);
    fv_json_end_object(&json);
    return FV_OK;
}

static fv_status print_table(const fv_problem *problem, fv_device *device)
{
    char text[256], reasons[REASONS_BYTES];
    fv_problem_args_describe(text, sizeof(text), problem);
    printf("%s, on %s\n\n", text, fv_device_name(device));
    for (int32_t i = 0; i < fv_backend_count(); i++) {
        const fv_status status = fv_backend_why_not(reasons, sizeof(reasons), fv_backend_name(i), device, problem);
        if (status != FV_OK) return status;
        printf("%-24s %-4s %s\n", fv_backend_name(i), reasons[0] ? "no:" : "yes",
               reasons[0] ? reasons : fv_backend_summary(i));
    }
    return FV_OK;
}

int fv_cmd_backends(int argc, char **argv)
{
    options opts;
    if (read_options(&opts, argc, argv) != FV_OK) return fv_args_fail("backends");
    if (opts.help) {
        print_help();
        return 0;
    }
    fv_context *context = NULL;
    fv_device *device = NULL;
    fv_status status = fv_context_create(&context, NULL);
    if (status == FV_OK) status = fv_device_find(&device, context, opts.device);
    if (status == FV_OK) status = (opts.json ? print_json : print_table)(&opts.problem, device);
    const int code = status == FV_OK ? 0 : fv_run_fail("backends");
    fv_context_destroy(context);
    return code;
}
