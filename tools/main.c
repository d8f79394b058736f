/* fovea: one program, a table of subcommands. */
#include <stdio.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "core/compiler.h"
#include "fovea/status.h"

typedef struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} command;

static const command commands[] = {
#ifdef FV_HAVE_ENGINE
    {"generate", fv_cmd_generate, "write text with a model: several prompts on one paged cache"},
#endif
    {"backends", fv_cmd_backends, "which backends serve a problem, and why the others do not"},
    {"check", fv_cmd_check, "every kernel and backend against the oracle"},
    {"bench", fv_cmd_bench, "time batches against a read of the same pages and the peak of the cores"},
    {"accuracy", fv_cmd_accuracy, "errors of AMLA's rescaling beside the paper's tables"},
    {"pipeline", fv_cmd_pipeline, "overlap matrix and vector stages: the preload pipeline and its chart"},
    {"info", fv_cmd_info, "version, CPU, instruction sets, caches, devices"},
};

static void print_help(void)
{
    printf("usage: fovea COMMAND [OPTION...]\n\ncommands:\n");
    for (int32_t i = 0; i < FV_ARRAY_LEN(commands); i++) printf("  %-10s %s\n", commands[i].name, commands[i].summary);
    printf("\nfovea COMMAND --help shows the options of a command; fovea --version the version.\n");
}

static const command *find_command(const char *name)
{
    for (int32_t i = 0; i < FV_ARRAY_LEN(commands); i++) {
        if (strcmp(commands[i].name, name) == 0) return &commands[i];
    }
    return NULL;
}

static int refuse(const char *name)
{
    fprintf(stderr, "fovea: %s '%s'; accepted:", name[0] == '-' ? "unknown option" : "unknown command", name);
    for (int32_t i = 0; i < FV_ARRAY_LEN(commands); i++) fprintf(stderr, " %s", commands[i].name);
    fprintf(stderr, " --help --version\n");
    return 2;
}

/* What is no command. */
static int run_own(int argc, char **argv)
{
    if (argc < 2) {
        print_help();
        return 2;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        print_help();
        return 0;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("fovea %s\n", fv_version());
        return 0;
    }
    return refuse(argv[1]);
}

int main(int argc, char **argv)
{
    const command *chosen = argc > 1 ? find_command(argv[1]) : NULL;
    const int code = chosen ? chosen->run(argc - 1, argv + 1) : run_own(argc, argv);
    if (fv_output_flush() == FV_OK || code != 0) return code;
    return fv_run_fail(argv[1]);
}
