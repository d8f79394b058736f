/* The options that describe a problem and a plan, shared by `backends` and `bench`. */
#ifndef FV_TOOLS_PROBLEM_ARGS_H
#define FV_TOOLS_PROBLEM_ARGS_H

#include <getopt.h>

#include "fovea/plan.h"

/* getopt_long's values of these options; a command's own values start at FV_OPTION_COMMAND. */
enum {
    FV_OPTION_HEADS = 1000, /* of a problem */
    FV_OPTION_HEAD_SIZE,
    FV_OPTION_V_HEAD_SIZE,
    FV_OPTION_BLOCK_SIZE,
    FV_OPTION_TYPE,
    FV_OPTION_DTYPE,
    FV_OPTION_KV_CACHE_DTYPE,
    FV_OPTION_KV_SCALING,
    FV_OPTION_LAYOUT,
    FV_OPTION_WINDOW,
    FV_OPTION_SOFT_CAP,
    FV_OPTION_ALIBI,
    FV_OPTION_SINKS,
    FV_OPTION_NOT_CAUSAL,
    FV_OPTION_TREE_MASK,
    FV_OPTION_MLA,
    FV_OPTION_CASCADE, /* of a plan */
    FV_OPTION_DECODE_THRESHOLD,
    FV_OPTION_MAX_WORKSPACE,
    FV_OPTION_VARIANT,
    FV_OPTION_PATH,
    FV_OPTION_SEGMENT_KEYS,
    FV_OPTION_BATCH_INVARIANT,
    FV_OPTION_STATIC_GRID,
    FV_OPTION_STATIC_LIST,
    FV_OPTION_SHARED_PREFIX, /* of a batch */
    FV_OPTION_COMMAND,
};

/* What these options say. */
typedef struct fv_problem_args {
    fv_problem problem;
    fv_plan_options plan;   /* not its backend, kernels and device */
    int32_t shared_prefix;  /* keys that the sequences of a group of a batch share; 0: none */
    int32_t num_of_problem; /* options given that describe the problem */
    const char *of_mha;     /* one of them that MLA has no use for; NULL: none */
    const char *of_batch;   /* an option given of a plan or of a batch; NULL: none */
    int32_t has_dtype;      /* 1: --dtype was given */
} fv_problem_args;

/* For the array of long options. */
#define FV_PROBLEM_OPTIONS                                                                                            \
    {"heads", required_argument, NULL, FV_OPTION_HEADS}, {"head-size", required_argument, NULL, FV_OPTION_HEAD_SIZE}, \
        {"v-head-size", required_argument, NULL, FV_OPTION_V_HEAD_SIZE},                                              \
        {"block-size", required_argument, NULL, FV_OPTION_BLOCK_SIZE},                                                \
        {"type", required_argument, NULL, FV_OPTION_TYPE}, {"dtype", required_argument, NULL, FV_OPTION_DTYPE},       \
        {"kv-cache-dtype", required_argument, NULL, FV_OPTION_KV_CACHE_DTYPE},                                        \
        {"kv-scaling", required_argument, NULL, FV_OPTION_KV_SCALING},                                                \
        {"layout", required_argument, NULL, FV_OPTION_LAYOUT}, {"window", required_argument, NULL, FV_OPTION_WINDOW}, \
        {"soft-cap", required_argument, NULL, FV_OPTION_SOFT_CAP},                                                    \
        {"alibi", optional_argument, NULL, FV_OPTION_ALIBI}, {"sinks", no_argument, NULL, FV_OPTION_SINKS},           \
        {"not-causal", no_argument, NULL, FV_OPTION_NOT_CAUSAL},                                                      \
        {"tree-mask", no_argument, NULL, FV_OPTION_TREE_MASK}, {"mla", optional_argument, NULL, FV_OPTION_MLA},       \
        {"cascade", required_argument, NULL, FV_OPTION_CASCADE},                                                      \
        {"decode-threshold", required_argument, NULL, FV_OPTION_DECODE_THRESHOLD},                                    \
        {"max-workspace", required_argument, NULL, FV_OPTION_MAX_WORKSPACE},                                          \
        {"variant", required_argument, NULL, FV_OPTION_VARIANT}, {"path", required_argument, NULL, FV_OPTION_PATH},   \
        {"segment-keys", required_argument, NULL, FV_OPTION_SEGMENT_KEYS},                                            \
        {"batch-invariant", no_argument, NULL, FV_OPTION_BATCH_INVARIANT},                                            \
        {"static-grid", no_argument, NULL, FV_OPTION_STATIC_GRID},                                                    \
        {"static-list", no_argument, NULL, FV_OPTION_STATIC_LIST},                                                    \
    {                                                                                                                 \
        "shared-prefix", required_argument, NULL, FV_OPTION_SHARED_PREFIX                                             \
    }

/* For the text of --help. */
#define FV_PROBLEM_HELP                                                                                              \
    "  --heads Q/KV           query and KV heads (32/8)\n"                                                           \
    "  --head-size D          of Q, K and V (128)\n"                                                                 \
    "  --v-head-size D        of V where it differs\n"                                                               \
    "  --block-size N         tokens of a cache block (16)\n"                                                        \
    "  --type T               of the layer: decoder, encoder, cross (decoder)\n"                                     \
    "  --dtype T              of Q, K, V and the output: float32, float16, bfloat16 (bfloat16; with\n"               \
    "                         --mla=weights on the CPU float32, which the engine's products take)\n"                 \
    "  --kv-cache-dtype T     of the cache: as --dtype, or fp8_e4m3, fp8_e5m2, int8\n"                               \
    "  --kv-scaling S         none, tensor, head, token-head (fp8: tensor, int8: token-head)\n"                      \
    "  --layout L             any, strided, nb_2_bs_h_d, 2_nb_bs_h_d, x_packed, shuffled,\n"                         \
    "                         packed_nhd, packed_hnd, latent, latent_fp8_ds (any: the backend's)\n"                  \
    "  --window N             sliding window of N keys\n"                                                            \
    "  --soft-cap X           cap * tanh(score / cap)\n"                                                             \
    "  --alibi[=FORM]         ALiBi slopes: linear, sqrt (linear)\n"                                                 \
    "  --sinks                attention sinks\n"                                                                     \
    "  --not-causal           batches that are not causal\n"                                                         \
    "  --tree-mask            new tokens see their ancestors only, as in speculation\n"                              \
    "  --mla[=FORM]           multi-head latent attention, latents of DeepSeek-V3, which has --heads 128: latents\n" \
    "                         (queries and outputs absorbed by the caller) or weights (multiplied here) (latents)\n"
#define FV_PLAN_HELP                                                                                         \
    "  --cascade C            shared prefixes read once: auto, off, always (auto)\n"                         \
    "  --decode-threshold N   longest query that is decode where a backend tells it apart: ROCM_AITER_FA,\n" \
    "                         ROCM_ATTN (up to 16 rows of a KV head), MLA with weights\n"                    \
    "  --max-workspace KIB    less leads to more chunks and fewer segments (the planner's choice)\n"         \
    "  --variant NAME         of the kernel\n"                                                               \
    "  --path P               auto, 2d, 3d (auto: the planner's choice)\n"                                   \
    "  --segment-keys N       keys of a segment, with --path 3d or --batch-invariant\n"                      \
    "  --batch-invariant      a row's bits do not depend on its neighbours (not ROCM_AITER_FA)\n"            \
    "  --static-grid          scheduled from bounds only, as under a captured graph\n"                       \
    "  --static-list          under a captured graph, but by the lengths of each step\n"                     \
    "  --shared-prefix N      the sequences of each group of SPEC share the blocks of their first N keys\n"

/* Before any option: 32/8 heads of 128, bfloat16, blocks of 16, any layout, the planner's choices. */
void fv_problem_args_init(fv_problem_args *args);

/* Takes option `value` (FV_OPTION_HEADS ...) with getopt's optarg. */
fv_status fv_problem_args_set(fv_problem_args *args, int value, const char *text);

/* Settles what depends on several options (scales of the cache, MLA's heads) and on the device that is asked for (the dtype
 * of MLA with weights), and checks the whole. */
fv_status fv_problem_args_finish(fv_problem_args *args, const char *device);

/* One line: "32/8 heads of 128, bfloat16, cache fp8_e4m3 with tensor scales, blocks of 16, window 1024". */
void fv_problem_args_describe(char *text, size_t text_bytes, const fv_problem *problem);

#endif
