#include "generate/options.h"

#include <ctype.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "core/compiler.h"
#include "core/error.h"
#include "fovea/backend.h"

#define DEFAULT_MODEL "SmolLM2-135M-Instruct.Q4_1.gguf"

enum { default_prompt_tokens = 500 };

enum {
    OPTION_RAW = 256,
    OPTION_SYSTEM,
    OPTION_BACKEND,
    OPTION_BLOCK_SIZE,
    OPTION_KV_DTYPE,
    OPTION_ATTENTION_DTYPE,
    OPTION_DTYPE,
    OPTION_THREADS,
    OPTION_MAX_TOKENS,
    OPTION_CACHE_TOKENS,
    OPTION_BATCHED_TOKENS,
    OPTION_NUM_SEQS,
    OPTION_SEED,
    OPTION_TEMPERATURE,
    OPTION_TOP_K,
    OPTION_TOP_P,
    OPTION_BATCH_INVARIANT,
    OPTION_IGNORE_EOS,
    OPTION_JSON,
    OPTION_PROFILE,
    OPTION_PROGRESS,
    OPTION_VERSION,
    OPTION_DEVICE,
    OPTION_NO_GRAPHS,
    OPTION_RANDOM_WEIGHTS,
    OPTION_PROMPT_TOKENS,
};

static const struct option long_options[] = {
    {"model", required_argument, NULL, 'm'},
    {"file", required_argument, NULL, 'f'},
    {"help", no_argument, NULL, 'h'},
    {"version", no_argument, NULL, OPTION_VERSION},
    {"raw", no_argument, NULL, OPTION_RAW},
    {"system", required_argument, NULL, OPTION_SYSTEM},
    {"attention-backend", required_argument, NULL, OPTION_BACKEND},
    {"backend", required_argument, NULL, OPTION_BACKEND},
    {"block-size", required_argument, NULL, OPTION_BLOCK_SIZE},
    {"kv-cache-dtype", required_argument, NULL, OPTION_KV_DTYPE},
    {"attention-dtype", required_argument, NULL, OPTION_ATTENTION_DTYPE},
    {"dtype", required_argument, NULL, OPTION_DTYPE},
    {"threads", required_argument, NULL, OPTION_THREADS},
    {"max-tokens", required_argument, NULL, OPTION_MAX_TOKENS},
    {"cache-tokens", required_argument, NULL, OPTION_CACHE_TOKENS},
    {"max-batched-tokens", required_argument, NULL, OPTION_BATCHED_TOKENS},
    {"max-num-seqs", required_argument, NULL, OPTION_NUM_SEQS},
    {"seed", required_argument, NULL, OPTION_SEED},
    {"temperature", required_argument, NULL, OPTION_TEMPERATURE},
    {"top-k", required_argument, NULL, OPTION_TOP_K},
    {"top-p", required_argument, NULL, OPTION_TOP_P},
    {"batch-invariant", no_argument, NULL, OPTION_BATCH_INVARIANT},
    {"ignore-eos", no_argument, NULL, OPTION_IGNORE_EOS},
    {"json", no_argument, NULL, OPTION_JSON},
    {"profile", no_argument, NULL, OPTION_PROFILE},
    {"progress", no_argument, NULL, OPTION_PROGRESS},
    {"device", required_argument, NULL, OPTION_DEVICE},
    {"no-graphs", no_argument, NULL, OPTION_NO_GRAPHS},
    {"random-weights", required_argument, NULL, OPTION_RANDOM_WEIGHTS},
    {"prompt-tokens", required_argument, NULL, OPTION_PROMPT_TOKENS},
    {NULL, 0, NULL, 0},
};

void generate_print_help(void)
{
    printf(
        "usage: fovea generate [OPTION...] PROMPT\n"
        "       fovea generate [OPTION...] -f FILE\n"
        "       fovea generate [OPTION...] --random-weights SHAPE\n"
        "\n"
        "Writes text with a model, on standard output. What ran and how fast goes to standard error.\n"
        "\n"
        "  -m, --model FILE            model in GGUF; default $FOVEA_MODEL, else the one that `make run` gets:\n"
        "                              fovea/" DEFAULT_MODEL " in $XDG_CACHE_HOME or ~/.cache\n"
        "  -f, --file FILE             prompts, one in each line, served together; - is standard input\n"
        "      --raw                   continue the prompt as it is, without the model's chat template\n"
        "      --system TEXT           system message of the chat\n"
        "\n"
        "      --max-tokens N          tokens to write; default 256\n"
        "      --temperature X         0 (default) takes the likeliest token\n"
        "      --top-k N               only the N likeliest tokens; default 0, all\n"
        "      --top-p X               only the likeliest tokens that have X together; default 1, all\n"
        "      --seed N                of the random numbers; default 0\n"
        "      --ignore-eos            write on after the model has ended its text\n"
        "\n"
        "      --attention-backend NAME, --backend NAME\n"
        "                              default $VLLM_ATTENTION_BACKEND, else auto; see fovea backends\n"
        "      --kv-cache-dtype TYPE   auto (float16; bfloat16 on a GPU, and with that as --attention-dtype), "
        "float32,\n"
        "                              float16, bfloat16, fp8_e4m3, fp8_e5m2, int8\n"
        "      --attention-dtype TYPE  of queries and results of attention: auto (float32; float16 with AMX over a "
        "cache\n"
        "                              of it or of a byte; bfloat16 on a GPU), float32, float16, bfloat16, the "
        "fastest\n"
        "                              with AMX, and with AVX512_BF16 on AMD's CPUs\n"
        "      --block-size N          tokens of a cache block, from 1; default 16\n"
        "      --cache-tokens N        tokens that the cache holds; default the model's context length\n"
        "      --max-batched-tokens N  tokens of a step, longer prompts are cut; default 512\n"
        "      --max-num-seqs N        prompts that run at once, others wait; default 16\n"
        "      --batch-invariant       results that do not depend, bit for bit, on the other prompts\n"
        "      --device NAME           cpu (default), or a GPU: cuda, cuda:1. On a GPU weights and cache are bfloat16\n"
        "                              and steps that only decode are launches of captured graphs\n"
        "      --no-graphs             plain launches on a GPU\n"
        "      --dtype TYPE            of weights and GEMMs: float32, bfloat16, auto (those that the file has smaller\n"
        "                              as it has them, others in bfloat16 where the CPU has it, else in float32)\n"
        "      --threads N             default: the CPUs that this process may use\n"
        "\n"
        "      --random-weights SHAPE  no model file: seeded random weights of the shape tiny or llama-8b, a random\n"
        "                              prompt, and the time of a token along the context, on a GPU beside the time\n"
        "                              that reading weights and cache takes at the speed of memory\n"
        "      --prompt-tokens N       with --random-weights: of the prompt; default 500\n"
        "\n"
        "      --json                  text, tokens and statistics as JSON\n"
        "      --profile               where the time went\n"
        "      --progress              progress lines even if standard error is no terminal\n"
        "      --help, --version\n");
}

/* The name in upper case, as vLLM's users may write it in any; checked before a model is loaded. */
static fv_status set_backend(generate_options *options, const char *name, const char *source)
{
    size_t length = 0;
    for (; name[length] && length < sizeof(options->backend) - 1; length++) {
        options->backend[length] = (char)toupper((unsigned char)name[length]);
    }
    options->backend[length] = '\0';
    options->session.attention_backend = options->backend;
    if (strcmp(options->backend, "AUTO") == 0) {
        options->session.attention_backend = NULL;
        return FV_OK;
    }
    char accepted[512] = "auto";
    for (int32_t i = 0; i < fv_backend_count(); i++) {
        if (name[length] == '\0' && strcmp(options->backend, fv_backend_name(i)) == 0) return FV_OK;
        const size_t used = strlen(accepted);
        snprintf(accepted + used, sizeof(accepted) - used, ", %s", fv_backend_name(i));
    }
    return fv_fail(FV_ERR_INVALID, "%s is '%s'; accepted: %s", source, name, accepted);
}

/* "auto" or one of `names`. */
static fv_status read_dtype(fv_dtype *dtype, const char *option, const char *text, const char *accepted,
                            const fv_dtype *dtypes, int32_t num_dtypes)
{
    fv_dtype read = FV_DTYPE_NONE;
    *dtype = FV_DTYPE_NONE;
    if (strcmp(text, "auto") == 0) return FV_OK;
    const bool is_dtype = fv_dtype_parse(&read, text) == FV_OK;
    for (int32_t i = 0; is_dtype && i < num_dtypes; i++) {
        if (dtypes[i] != read) continue;
        *dtype = read;
        return FV_OK;
    }
    return fv_fail(FV_ERR_INVALID, "%s is '%s'; accepted: auto, %s", option, text, accepted);
}

static fv_status read_f32(float *value, const char *option, const char *text, double min, double max)
{
    double read = 0.0;
    const fv_status status = fv_args_f64(&read, option, text, min, max);
    if (status == FV_OK) *value = (float)read;
    return status;
}

static fv_status read_seed(uint64_t *seed, const char *text)
{
    int64_t read = 0;
    const fv_status status = fv_args_i64(&read, "--seed", text, 0, INT64_MAX);
    if (status == FV_OK) *seed = (uint64_t)read;
    return status;
}

static fv_status set_shape(generate_options *options, const char *text)
{
    char accepted[256] = "";
    const char *name;
    options->engine.random_weights = text;
    for (int32_t i = 0; (name = fv_engine_random_shape(i)) != NULL; i++) {
        if (strcmp(name, text) == 0) return FV_OK;
        const size_t used = strlen(accepted);
        snprintf(accepted + used, sizeof(accepted) - used, "%s%s", i > 0 ? ", " : "", name);
    }
    return fv_fail(FV_ERR_INVALID, "--random-weights is '%s'; accepted: %s", text, accepted);
}

static fv_status set_option(generate_options *o, int option, const char *text)
{
    static const fv_dtype kv_dtypes[] = {FV_DTYPE_F32,     FV_DTYPE_F16,     FV_DTYPE_BF16,
                                         FV_DTYPE_F8_E4M3, FV_DTYPE_F8_E5M2, FV_DTYPE_I8};
    static const fv_dtype gemm_dtypes[] = {FV_DTYPE_F32, FV_DTYPE_BF16};
    static const fv_dtype attention_dtypes[] = {FV_DTYPE_F32, FV_DTYPE_F16, FV_DTYPE_BF16};
    switch (option) {
    case 'm':
        free(o->model);
        o->model = strdup(text);
        o->model_is_given = true;
        return o->model ? FV_OK : fv_fail(FV_ERR_NO_MEMORY, "no memory for a path");
    case 'f':
        if (o->prompts_file)
            return fv_fail(FV_ERR_INVALID, "a second file of prompts, '%s', behind '%s'; accepted: one", text,
                           o->prompts_file);
        o->prompts_file = text;
        return FV_OK;
    case OPTION_RAW: o->raw = true; return FV_OK;
    case OPTION_SYSTEM: o->system = text; return FV_OK;
    case OPTION_BACKEND: return set_backend(o, text, "--attention-backend");
    case OPTION_BLOCK_SIZE: return fv_args_i32(&o->session.block_size, "--block-size", text, 1, 65536);
    case OPTION_KV_DTYPE:
        return read_dtype(&o->session.kv_cache_dtype, "--kv-cache-dtype", text,
                          "float32, float16, bfloat16, fp8_e4m3, fp8_e5m2, int8", kv_dtypes, FV_ARRAY_LEN(kv_dtypes));
    case OPTION_ATTENTION_DTYPE:
        return read_dtype(&o->session.attention_dtype, "--attention-dtype", text, "float32, float16, bfloat16",
                          attention_dtypes, FV_ARRAY_LEN(attention_dtypes));
    case OPTION_DTYPE:
        return read_dtype(&o->engine.compute_dtype, "--dtype", text, "float32, bfloat16", gemm_dtypes, 2);
    case OPTION_THREADS: return fv_args_i32(&o->engine.num_threads, "--threads", text, 1, 1024);
    case OPTION_MAX_TOKENS: return fv_args_i32(&o->sampling.max_tokens, "--max-tokens", text, 1, 1 << 30);
    case OPTION_CACHE_TOKENS: return fv_args_i32(&o->session.cache_tokens, "--cache-tokens", text, 1, 1 << 30);
    case OPTION_BATCHED_TOKENS:
        return fv_args_i32(&o->session.max_batched_tokens, "--max-batched-tokens", text, 1, 1 << 20);
    case OPTION_NUM_SEQS: return fv_args_i32(&o->session.max_num_seqs, "--max-num-seqs", text, 1, 1 << 16);
    case OPTION_SEED: return read_seed(&o->sampling.seed, text);
    case OPTION_TEMPERATURE: return read_f32(&o->sampling.temperature, "--temperature", text, 0.0, 1000.0);
    case OPTION_TOP_K: return fv_args_i32(&o->sampling.top_k, "--top-k", text, 0, INT_MAX);
    case OPTION_TOP_P: return read_f32(&o->sampling.top_p, "--top-p", text, 1e-6, 1.0);
    case OPTION_BATCH_INVARIANT: o->session.batch_invariant = 1; return FV_OK;
    case OPTION_IGNORE_EOS: o->sampling.ignore_eos = 1; return FV_OK;
    case OPTION_JSON: o->json = true; return FV_OK;
    case OPTION_PROFILE: o->profile = true; return FV_OK;
    case OPTION_PROGRESS: o->progress = true; return FV_OK;
    case OPTION_DEVICE: o->engine.device = text; return FV_OK;
    case OPTION_NO_GRAPHS: o->session.no_graphs = 1; return FV_OK;
    case OPTION_RANDOM_WEIGHTS: return set_shape(o, text);
    case OPTION_PROMPT_TOKENS: return fv_args_i32(&o->prompt_tokens, "--prompt-tokens", text, 1, 1 << 28);
    default: return fv_fail(FV_ERR_INTERNAL, "option %d is not handled", option);
    }
}

static fv_status read_environment(generate_options *options)
{
    const char *backend = getenv("VLLM_ATTENTION_BACKEND");
    if (options->backend[0] || !backend || !backend[0]) return FV_OK;
    options->backend_is_from_environment = true;
    return set_backend(options, backend, "VLLM_ATTENTION_BACKEND");
}

static fv_status set_default_model(generate_options *options)
{
    if (options->model_is_given) return FV_OK;
    const char *model = getenv("FOVEA_MODEL");
    if (model && model[0]) {
        options->model = strdup(model);
        return options->model ? FV_OK : fv_fail(FV_ERR_NO_MEMORY, "no memory for a path");
    }
    const char *cache = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    const bool has_cache = cache && cache[0];
    if (asprintf(&options->model, "%s%s/fovea/%s",
                 has_cache ? cache
                 : home    ? home
                           : "",
                 has_cache ? "" : "/.cache", DEFAULT_MODEL) < 0) {
        options->model = NULL;
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for a path");
    }
    if (access(options->model, R_OK) == 0) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "no model: there is no %s, which `make run` gets; or give one with -m FILE",
                   options->model);
}

/* A run with random weights has neither a model file nor a text, and a report of its own. */
static fv_status finish_random(generate_options *options, int argc, char **argv)
{
    const char *refused = optind < argc             ? argv[optind]
                          : options->prompts_file   ? "a file of prompts"
                          : options->model_is_given ? "a model"
                          : options->system         ? "--system"
                          : options->raw            ? "--raw"
                          : options->profile        ? "--profile"
                                                    : NULL;
    if (refused) return fv_fail(FV_ERR_INVALID, "%s with --random-weights; accepted: --prompt-tokens N", refused);
    if (options->prompt_tokens == 0) options->prompt_tokens = default_prompt_tokens;
    options->engine.random_seed = options->sampling.seed;
    return read_environment(options);
}

/* The operands, and what goes together. */
static fv_status finish(generate_options *options, int argc, char **argv)
{
    if (options->engine.random_weights) return finish_random(options, argc, argv);
    if (options->prompt_tokens > 0) {
        return fv_fail(FV_ERR_INVALID, "--prompt-tokens without --random-weights; accepted: a prompt");
    }
    if (optind < argc) options->prompt = argv[optind];
    if (optind + 1 < argc) {
        return fv_fail(FV_ERR_INVALID, "a second prompt, '%s'; accepted: one (in quotes), or a file of them with -f",
                       argv[optind + 1]);
    }
    if (!options->prompt == !options->prompts_file) {
        return fv_fail(FV_ERR_INVALID, "%s; accepted: PROMPT, or -f FILE with one prompt in each line",
                       options->prompt ? "a prompt and a file of prompts" : "no prompt");
    }
    if (options->raw && options->system) {
        return fv_fail(FV_ERR_INVALID, "--system with --raw; accepted: one of them, as --raw leaves the chat out");
    }
    const fv_status status = read_environment(options);
    return status == FV_OK ? set_default_model(options) : status;
}

fv_status generate_options_init(generate_options *options, generate_action *action, int argc, char **argv)
{
    *options = (generate_options){
        .engine = {.struct_size = sizeof(fv_engine_options)},
        .session = {.struct_size = sizeof(fv_session_options)},
        .sampling = {.struct_size = sizeof(fv_request), .max_tokens = 256},
        .progress = isatty(STDERR_FILENO),
    };
    *action = GENERATE_RUN;
    opterr = 0;
    optind = 1;
    int option;
    while ((option = getopt_long(argc, argv, ":m:f:h", long_options, NULL)) != -1) {
        if (option == 'h') *action = GENERATE_HELP;
        if (option == OPTION_VERSION) *action = GENERATE_VERSION;
        if (*action != GENERATE_RUN) return FV_OK;
        fv_status status;
        if (option == ':' || option == '?') {
            status = fv_args_refuse(option, argc, argv);
        } else {
            status = set_option(options, option, optarg);
        }
        if (status != FV_OK) return status;
    }
    return finish(options, argc, argv);
}

void generate_options_deinit(generate_options *options)
{
    free(options->model);
    options->model = NULL;
}
