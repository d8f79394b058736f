#include "problem_args.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "args.h"
#include "core/compiler.h"
#include "core/error.h"

#define SCALING_BY_DTYPE (-1) /* until fv_problem_args_finish */
#define MAX_WORKSPACE_KIB (1ll << 30)

/* In the order of their enums. */
static const char *const type_names[] = {"decoder", "encoder", "cross"};
static const char *const mla_forms[] = {"latents", "weights"};
static const char *const scaling_names[] = {"none", "tensor", "head", "token-head"};
static const char *const alibi_names[] = {"linear", "sqrt"}; /* from FV_ALIBI_LINEAR on */
static const char *const cascade_names[] = {"auto", "off", "always"};
static const char *const path_names[] = {"auto", "2d", "3d"};

void fv_problem_args_init(fv_problem_args *args)
{
    *args = (fv_problem_args){
        .problem =
            {
                .struct_size = sizeof(args->problem),
                .kind = FV_ATTENTION_MHA,
                .mha = {.num_heads = 32, .num_kv_heads = 8, .head_size = 128},
                .q_dtype = FV_DTYPE_BF16,
                .kv_layout_any = 1,
                .block_size = 16,
                .kv_scaling = (fv_kv_scaling)SCALING_BY_DTYPE,
            },
        .plan = {.struct_size = sizeof(args->plan)},
    };
}

static fv_status set_layout(fv_problem *problem, const char *text)
{
    const char *names[FV_KV_LAYOUT_LATENT_FP8_DS + 2] = {[0] = "any"};
    for (int32_t i = 0; i <= FV_KV_LAYOUT_LATENT_FP8_DS; i++) names[i + 1] = fv_kv_layout_name((fv_kv_layout)i);
    int32_t index = 0;
    const fv_status status = fv_args_choice(&index, "--layout", text, names, FV_ARRAY_LEN(names));
    if (status != FV_OK) return status;
    problem->kv_layout_any = index == 0;
    problem->kv_layout = index == 0 ? FV_KV_LAYOUT_STRIDED : (fv_kv_layout)(index - 1);
    return FV_OK;
}

static fv_status set_type(fv_problem *problem, const char *text)
{
    int32_t index = 0;
    const fv_status status = fv_args_choice(&index, "--type", text, type_names, FV_ARRAY_LEN(type_names));
    problem->type = (fv_attention_type)index;
    return status;
}

static fv_status set_scaling(fv_problem *problem, const char *text)
{
    int32_t index = 0;
    const fv_status status = fv_args_choice(&index, "--kv-scaling", text, scaling_names, FV_ARRAY_LEN(scaling_names));
    problem->kv_scaling = (fv_kv_scaling)index;
    return status;
}

static fv_status set_alibi(fv_problem *problem, const char *text)
{
    int32_t index = 0;
    fv_status status = FV_OK;
    if (text) status = fv_args_choice(&index, "--alibi", text, alibi_names, FV_ARRAY_LEN(alibi_names));
    problem->alibi = (fv_alibi)(FV_ALIBI_LINEAR + index);
    return status;
}

static fv_status set_soft_cap(fv_problem *problem, const char *text)
{
    double soft_cap = 0;
    const fv_status status = fv_args_f64(&soft_cap, "--soft-cap", text, 0, 1e30);
    if (status == FV_OK && soft_cap > 0 && soft_cap < 1e-30)
        return fv_fail(FV_ERR_INVALID, "--soft-cap is '%s'; accepted: 0, none, or a number from 1e-30 to 1e30", text);
    problem->soft_cap = (float)soft_cap;
    return status;
}

static fv_status set_mla(fv_problem *problem, const char *text)
{
    int32_t form = 0;
    const fv_status status = text ? fv_args_choice(&form, "--mla", text, mla_forms, FV_ARRAY_LEN(mla_forms)) : FV_OK;
    problem->kind = FV_ATTENTION_MLA;
    problem->mla.absorbed = form == 0;
    return status;
}

static fv_status set_problem(fv_problem *problem, int value, const char *text)
{
    fv_mha_shape *mha = &problem->mha;
    switch (value) {
    case FV_OPTION_HEADS: return fv_args_heads(&mha->num_heads, &mha->num_kv_heads, "--heads", text);
    case FV_OPTION_HEAD_SIZE: return fv_args_i32(&mha->head_size, "--head-size", text, 1, 8192);
    case FV_OPTION_V_HEAD_SIZE: return fv_args_i32(&mha->v_head_size, "--v-head-size", text, 1, 8192);
    case FV_OPTION_BLOCK_SIZE: return fv_args_i32(&problem->block_size, "--block-size", text, 1, 1 << 20);
    case FV_OPTION_TYPE: return set_type(problem, text);
    case FV_OPTION_DTYPE: return fv_args_dtype(&problem->q_dtype, "--dtype", text);
    case FV_OPTION_KV_CACHE_DTYPE: return fv_args_dtype(&problem->kv_dtype, "--kv-cache-dtype", text);
    case FV_OPTION_KV_SCALING: return set_scaling(problem, text);
    case FV_OPTION_LAYOUT: return set_layout(problem, text);
    case FV_OPTION_WINDOW: return fv_args_i32(&problem->window, "--window", text, 0, INT32_MAX);
    case FV_OPTION_SOFT_CAP: return set_soft_cap(problem, text);
    case FV_OPTION_ALIBI: return set_alibi(problem, text);
    case FV_OPTION_SINKS: problem->sinks = 1; return FV_OK;
    case FV_OPTION_NOT_CAUSAL: problem->not_causal = 1; return FV_OK;
    case FV_OPTION_TREE_MASK: problem->tree_mask = 1; return FV_OK;
    case FV_OPTION_MLA: return set_mla(problem, text);
    default: return fv_fail(FV_ERR_INTERNAL, "option %d is not one of a problem", value);
    }
}

static fv_status set_cascade(fv_plan_options *plan, const char *text)
{
    int32_t index = 0;
    const fv_status status = fv_args_choice(&index, "--cascade", text, cascade_names, FV_ARRAY_LEN(cascade_names));
    plan->cascade = (fv_cascade)index;
    return status;
}

static fv_status set_max_workspace(fv_plan_options *plan, const char *text)
{
    int64_t kib = 0;
    const fv_status status = fv_args_i64(&kib, "--max-workspace", text, 1, MAX_WORKSPACE_KIB);
    plan->max_workspace_bytes = (size_t)kib * 1024;
    return status;
}

static fv_status set_path(fv_plan_options *plan, const char *text)
{
    int32_t index = 0;
    const fv_status status = fv_args_choice(&index, "--path", text, path_names, FV_ARRAY_LEN(path_names));
    plan->path = (fv_softmax_path)index;
    return status;
}

/* What MLA has no use for: sizes of heads, and KV heads but one. */
static void note_heads(fv_problem_args *args, int value, const char *text)
{
    const char *kv_heads = value == FV_OPTION_HEADS ? strchr(text, '/') : NULL;
    if (value == FV_OPTION_HEAD_SIZE) args->of_mha = "--head-size";
    if (value == FV_OPTION_V_HEAD_SIZE) args->of_mha = "--v-head-size";
    if (kv_heads && strcmp(kv_heads, "/1") != 0) args->of_mha = "--heads with KV heads";
}

/* What says nothing where there is no batch: how its plan is made, and what its sequences share. */
static void note_batch(fv_problem_args *args, int value)
{
    static const struct option options[] = {FV_PROBLEM_OPTIONS};
    for (int32_t i = 0; i < FV_ARRAY_LEN(options) && value >= FV_OPTION_CASCADE; i++)
        if (options[i].val == value) args->of_batch = options[i].name;
}

fv_status fv_problem_args_set(fv_problem_args *args, int value, const char *text)
{
    fv_plan_options *plan = &args->plan;
    note_batch(args, value);
    switch (value) {
    case FV_OPTION_CASCADE: return set_cascade(plan, text);
    case FV_OPTION_DECODE_THRESHOLD:
        return fv_args_i32(&plan->decode_threshold, "--decode-threshold", text, 1, 1 << 24);
    case FV_OPTION_MAX_WORKSPACE: return set_max_workspace(plan, text);
    case FV_OPTION_VARIANT: plan->variant = text; return FV_OK;
    case FV_OPTION_PATH: return set_path(plan, text);
    case FV_OPTION_SEGMENT_KEYS: return fv_args_i32(&plan->segment_keys, "--segment-keys", text, 1, 1 << 24);
    case FV_OPTION_BATCH_INVARIANT: plan->batch_invariant = 1; return FV_OK;
    case FV_OPTION_STATIC_GRID: plan->static_grid = 1; return FV_OK;
    case FV_OPTION_STATIC_LIST: plan->static_list = 1; return FV_OK;
    case FV_OPTION_SHARED_PREFIX: return fv_args_i32(&args->shared_prefix, "--shared-prefix", text, 0, 1 << 24);
    default:
        args->num_of_problem++;
        args->has_dtype |= value == FV_OPTION_DTYPE;
        note_heads(args, value, text);
        return set_problem(&args->problem, value, text);
    }
}

/* Options of which one would be passed over. */
static fv_status check_pairs(const fv_problem_args *args)
{
    const fv_plan_options *plan = &args->plan;
    if (args->shared_prefix && args->problem.type == FV_ATTENTION_ENCODER)
        return fv_fail(FV_ERR_INVALID,
                       "--shared-prefix does not go with --type encoder, which has no cache; accepted: decoder, cross");
    if (plan->segment_keys && plan->path != FV_PATH_3D && !plan->batch_invariant)
        return fv_fail(FV_ERR_INVALID,
                       "--segment-keys is %d without segments; accepted: with --path 3d or --batch-invariant",
                       plan->segment_keys);
    return FV_OK;
}

fv_status fv_problem_args_finish(fv_problem_args *args, const char *device)
{
    fv_problem *problem = &args->problem;
    const fv_status checked = check_pairs(args);
    if (checked != FV_OK) return checked;
    if ((int)problem->kv_scaling == SCALING_BY_DTYPE) {
        const int32_t fp8 = problem->kv_dtype == FV_DTYPE_F8_E4M3 || problem->kv_dtype == FV_DTYPE_F8_E5M2;
        const int32_t int8 = problem->kv_dtype == FV_DTYPE_I8;
        problem->kv_scaling = fp8 ? FV_KV_SCALING_PER_TENSOR : int8 ? FV_KV_SCALING_PER_TOKEN_HEAD : FV_KV_SCALING_NONE;
    }
    if (problem->kind == FV_ATTENTION_MLA && args->of_mha)
        return fv_fail(FV_ERR_INVALID, "%s does not go with --mla; accepted: --heads N, of latents of 512 + 64",
                       args->of_mha);
    if (problem->kind == FV_ATTENTION_MLA) {
        const int32_t is_of_engine = !problem->mla.absorbed && strcmp(device, "cpu") == 0;
        if (is_of_engine && !args->has_dtype) problem->q_dtype = FV_DTYPE_F32; /* what its products take */
        problem->mla = (fv_mla_shape){.num_heads = problem->mha.num_heads,
                                      .kv_lora_rank = 512,
                                      .qk_rope_head_dim = 64,
                                      .qk_nope_head_dim = 128,
                                      .v_head_dim = 128,
                                      .absorbed = problem->mla.absorbed};
    }
    return fv_problem_normalize(problem, problem);
}

static void append(char *text, size_t text_bytes, const char *format, ...) FV_PRINTF(3, 4);
static void append(char *text, size_t text_bytes, const char *format, ...)
{
    const size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, text_bytes - used, format, args);
    va_end(args);
}

void fv_problem_args_describe(char *text, size_t text_bytes, const fv_problem *problem)
{
    const fv_mha_shape *mha = &problem->mha;
    text[0] = '\0';
    if (problem->kind == FV_ATTENTION_MLA) {
        append(text, text_bytes, "MLA, %d heads, latents of %d + %d%s", problem->mla.num_heads,
               problem->mla.kv_lora_rank, problem->mla.qk_rope_head_dim,
               problem->mla.absorbed ? ", absorbed" : ", with weights");
    } else {
        append(text, text_bytes, "%d/%d heads of %d", mha->num_heads, mha->num_kv_heads, mha->head_size);
        if (mha->v_head_size != mha->head_size) append(text, text_bytes, ", values of %d", mha->v_head_size);
    }
    append(text, text_bytes, ", %s, cache %s", fv_dtype_name(problem->q_dtype), fv_dtype_name(problem->kv_dtype));
    if (problem->kv_scaling) append(text, text_bytes, " with %s scales", scaling_names[problem->kv_scaling]);
    append(text, text_bytes, ", blocks of %d", problem->block_size);
    if (!problem->kv_layout_any) append(text, text_bytes, ", layout %s", fv_kv_layout_name(problem->kv_layout));
    if (problem->type) append(text, text_bytes, ", %s", type_names[problem->type]);
    if (problem->window) append(text, text_bytes, ", window %d", problem->window);
    if (problem->soft_cap > 0) append(text, text_bytes, ", soft cap %g", (double)problem->soft_cap);
    if (problem->alibi) append(text, text_bytes, ", ALiBi %s", alibi_names[problem->alibi - FV_ALIBI_LINEAR]);
    if (problem->sinks) append(text, text_bytes, ", sinks");
    if (problem->not_causal) append(text, text_bytes, ", not causal");
    if (problem->tree_mask) append(text, text_bytes, ", tree mask");
}
