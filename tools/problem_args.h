/* The options that describe a problem, shared by `backends` and `bench`. */
#ifndef FV_TOOLS_PROBLEM_ARGS_H
#define FV_TOOLS_PROBLEM_ARGS_H

#include <getopt.h>

#include "fovea/problem.h"

/* getopt_long's values of these options; a command's own values start at FV_OPTION_COMMAND. */
enum {
    FV_OPTION_PROBLEM = 1000,
    FV_OPTION_HEADS = FV_OPTION_PROBLEM,
    FV_OPTION_HEAD_SIZE,
    FV_OPTION_V_HEAD_SIZE,
    FV_OPTION_BLOCK_SIZE,
    FV_OPTION_DTYPE,
    FV_OPTION_KV_CACHE_DTYPE,
    FV_OPTION_KV_SCALING,
    FV_OPTION_LAYOUT,
    FV_OPTION_WINDOW,
    FV_OPTION_SOFT_CAP,
    FV_OPTION_ALIBI,
    FV_OPTION_SINKS,
    FV_OPTION_NOT_CAUSAL,
    FV_OPTION_MLA,
    FV_OPTION_COMMAND,
};

/* For the array of long options. */
#define FV_PROBLEM_OPTIONS                                                                                            \
    {"heads", required_argument, NULL, FV_OPTION_HEADS}, {"head-size", required_argument, NULL, FV_OPTION_HEAD_SIZE}, \
        {"v-head-size", required_argument, NULL, FV_OPTION_V_HEAD_SIZE},                                              \
        {"block-size", required_argument, NULL, FV_OPTION_BLOCK_SIZE},                                                \
        {"dtype", required_argument, NULL, FV_OPTION_DTYPE},                                                          \
        {"kv-cache-dtype", required_argument, NULL, FV_OPTION_KV_CACHE_DTYPE},                                        \
        {"kv-scaling", required_argument, NULL, FV_OPTION_KV_SCALING},                                                \
        {"layout", required_argument, NULL, FV_OPTION_LAYOUT}, {"window", required_argument, NULL, FV_OPTION_WINDOW}, \
        {"soft-cap", required_argument, NULL, FV_OPTION_SOFT_CAP}, {"alibi", no_argument, NULL, FV_OPTION_ALIBI},     \
        {"sinks", no_argument, NULL, FV_OPTION_SINKS}, {"not-causal", no_argument, NULL, FV_OPTION_NOT_CAUSAL},       \
    {                                                                                                                 \
        "mla", no_argument, NULL, FV_OPTION_MLA                                                                       \
    }

/* For the text of --help. */
#define FV_PROBLEM_HELP                                                                       \
    "  --heads Q/KV           query and KV heads (32/8)\n"                                    \
    "  --head-size D          of Q, K and V (128)\n"                                          \
    "  --v-head-size D        of V where it differs\n"                                        \
    "  --block-size N         tokens of a cache block (16)\n"                                 \
    "  --dtype T              of Q, K, V and the output: float32, float16, bfloat16 (bf16)\n" \
    "  --kv-cache-dtype T     of the cache: as --dtype, or fp8_e4m3, fp8_e5m2\n"              \
    "  --kv-scaling S         fp8 scales: none, tensor, head, token-head (tensor with fp8)\n" \
    "  --layout L             of the cache (any: what the backend wants)\n"                   \
    "  --window N             sliding window of N keys\n"                                     \
    "  --soft-cap X           cap * tanh(score / cap)\n"                                      \
    "  --alibi --sinks        ALiBi slopes, attention sinks\n"                                \
    "  --not-causal           batches that are not causal\n"                                  \
    "  --mla                  multi-head latent attention, the shape of DeepSeek-V3\n"

/* The problem before any option: 32/8 heads of 128, bfloat16, blocks of 16, any layout. */
void fv_problem_args_init(fv_problem *problem);

/* Takes option `value` (FV_OPTION_HEADS ...) with getopt's optarg. */
fv_status fv_problem_args_set(fv_problem *problem, int value, const char *text);

/* Settles what depends on several options (fp8 scales, MLA's heads) and checks the whole. */
fv_status fv_problem_args_finish(fv_problem *problem);

/* One line: "32/8 heads of 128, bfloat16, cache fp8_e4m3, blocks of 16, window 1024". */
void fv_problem_args_describe(char *text, size_t text_bytes, const fv_problem *problem);

#endif
