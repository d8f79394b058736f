/* Options of `fovea check`. */
#include "check/options.h"

#include <stdio.h>
#include <string.h>

#include "args.h"
#include "core/compiler.h"
#include "core/cpu.h"
#include "core/error.h"
#include "fovea/backend.h"

#define DEFAULT_RANDOM 3000
#define QUICK_RANDOM 600

const check_emulated_level check_emulated_levels[CHECK_NUM_EMULATED] = {
    {FV_ISA_AVX512_BF16, &fv_cpu_emulated_bf16},
    {FV_ISA_AMX, &fv_cpu_emulated_amx},
};

void check_options_print_help(void)
{
    printf(
        "usage: fovea check [OPTION...]\n"
        "\n"
        "Runs every kernel and backend against the oracle: the published test grids, random cases, and\n"
        "mutants that the comparison must catch. Exit code 1 if anything failed.\n"
        "\n"
        "  --backends LIST   backends to check, by name with commas between; default: all\n"
        "  --device NAME     where the kernels run: cpu (default), cuda, cuda:1\n"
        "  --kernels NAME    only this table of kernels (reference, portable, avx2, ...,\n"
        "                    avx512_bf16-emulated, amx-emulated)\n"
        "  --isa NAME        strongest instruction set: portable, avx2, avx512, avx512_bf16, amx; default all: what\n"
        "                    the CPU has, and the last two emulated where it does not have them\n"
        "  --random N        random cases; default %d, with --quick %d\n"
        "  --seed N          seed of the random cases; default 1\n"
        "  --only ID         one case or group: random.17, triton_unified, cpu_attn.3, mutants, or an operation:\n"
        "                    merge_states, reduce_segments, merge_ranks, kv_copy, rope, rope_kv_write,\n"
        "                    rms_norm, copy_rows, mla_query, mla_weights\n"
        "  --quick           a sample of the grids that takes seconds\n"
        "  --list            name the cases, run none\n"
        "  --threads N       default: the CPUs that this process may use\n"
        "  --json            the result as JSON; with --list the list, an array of name and text\n"
        "  --help            this text\n",
        DEFAULT_RANDOM, QUICK_RANDOM);
}

static fv_status add_backend(check_options *options, const char *name, size_t length)
{
    for (int32_t i = 0; i < fv_backend_count(); i++) {
        const char *known = fv_backend_name(i);
        if (strlen(known) != length || strncmp(known, name, length) != 0) continue;
        if (options->num_backends < CHECK_MAX_BACKENDS) options->backends[options->num_backends++] = known;
        return FV_OK;
    }
    char names[256] = "all";
    for (int32_t i = 0; i < fv_backend_count(); i++) {
        strncat(names, ", ", sizeof(names) - strlen(names) - 1);
        strncat(names, fv_backend_name(i), sizeof(names) - strlen(names) - 1);
    }
    return fv_fail(FV_ERR_INVALID, "--backends has '%.*s'; accepted: %s", (int)length, name, names);
}

static fv_status parse_backends(check_options *options, const char *text)
{
    options->num_backends = 0;
    if (strcmp(text, "all") == 0) {
        for (int32_t i = 0; i < fv_backend_count() && i < CHECK_MAX_BACKENDS; i++)
            options->backends[options->num_backends++] = fv_backend_name(i);
        return FV_OK;
    }
    fv_status status = FV_OK;
    while (status == FV_OK) {
        const size_t length = strcspn(text, ",");
        status = add_backend(options, text, length);
        if (text[length] == '\0') break;
        text += length + 1;
    }
    return status;
}

static void append(char *text, size_t text_bytes, const char *before, const char *value)
{
    const size_t length = strlen(text);
    snprintf(text + length, text_bytes - length, "%s%s", before, value);
}

void check_options_write_runners(char *text, size_t text_bytes, const check_options *options)
{
    text[0] = '\0';
    if (strcmp(options->device, "cpu") != 0) append(text, text_bytes, " --device ", options->device);
    if (options->isa) append(text, text_bytes, " --isa ", options->isa);
    if (options->kernels) append(text, text_bytes, " --kernels ", options->kernels);
    for (int32_t i = 0; i < options->num_backends && options->num_backends != fv_backend_count(); i++)
        append(text, text_bytes, i == 0 ? " --backends " : ",", options->backends[i]);
}

/* A level that the CPU has not, and that is emulated in place of that, limits nothing. */
static fv_status parse_isa(check_options *options, const char *text)
{
    fv_isa isa;
    options->isa = NULL;
    if (strcmp(text, "all") == 0) return FV_OK;
    const fv_status status = fv_isa_parse(&isa, text);
    if (status != FV_OK) return status;
    int32_t is_emulated = 0;
    for (int32_t i = 0; i < CHECK_NUM_EMULATED; i++) is_emulated |= check_emulated_levels[i].isa == isa;
    if (!is_emulated || fv_cpu_isa() >= isa) options->isa = text;
    return FV_OK;
}

/* Levels that the CPU has not, where no weaker one is asked for, or one by name. */
static void find_emulated(check_options *options)
{
    if (strcmp(options->device, "cpu") != 0) return;
    for (int32_t i = 0; i < CHECK_NUM_EMULATED; i++) {
        const check_emulated_level *level = &check_emulated_levels[i];
        const int32_t is_named = options->kernels && strcmp(options->kernels, level->table->name) == 0;
        if (is_named || (fv_cpu_isa() < level->isa && !options->isa))
            options->emulated[options->num_emulated++] = level->table;
    }
}

fv_status check_options_parse(check_options *options, int argc, char **argv)
{
    static const struct option names[] = {
        {"backends", required_argument, NULL, 'b'},
        {"kernels", required_argument, NULL, 'k'},
        {"device", required_argument, NULL, 'd'},
        {"isa", required_argument, NULL, 'i'},
        {"random", required_argument, NULL, 'r'},
        {"seed", required_argument, NULL, 's'},
        {"only", required_argument, NULL, 'o'},
        {"threads", required_argument, NULL, 't'},
        {"quick", no_argument, NULL, 'q'},
        {"list", no_argument, NULL, 'l'},
        {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    *options = (check_options){.device = "cpu", .seed = 1, .num_random = -1};
    fv_status status = parse_backends(options, "all");
    opterr = 0;
    optind = 1;
    int answer;
    while (status == FV_OK && (answer = getopt_long(argc, argv, ":h", names, NULL)) != -1) {
        switch (answer) {
        case 'b': status = parse_backends(options, optarg); break;
        case 'k': options->kernels = optarg; break;
        case 'd': options->device = optarg; break;
        case 'i': status = parse_isa(options, optarg); break;
        case 'r': status = fv_args_i32(&options->num_random, "--random", optarg, 0, 100000000); break;
        case 's': status = fv_args_i64(&options->seed, "--seed", optarg, 0, INT64_MAX); break;
        case 'o': options->only = optarg; break;
        case 't': status = fv_args_i32(&options->num_threads, "--threads", optarg, 1, 4096); break;
        case 'q': options->quick = 1; break;
        case 'l': options->list = 1; break;
        case 'j': options->json = 1; break;
        case 'h': options->help = 1; break;
        default: status = fv_args_refuse(answer, argc, argv); break;
        }
    }
    if (status == FV_OK && optind < argc) status = fv_args_refuse_operand(argv[optind], argv[0]);
    find_emulated(options);
    if (options->num_random < 0) options->num_random = options->quick ? QUICK_RANDOM : DEFAULT_RANDOM;
    return status;
}
