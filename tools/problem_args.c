#include "problem_args.h"

#include <stdio.h>
#include <string.h>

#include "args.h"
#include "core/compiler.h"
#include "core/error.h"

#define SCALING_BY_DTYPE (-1) /* until fv_problem_args_finish */

void fv_problem_args_init(fv_problem *problem)
{
    *problem = (fv_problem){
        .struct_size = sizeof(*problem),
        .kind = FV_ATTENTION_MHA,
        .mha = {.num_heads = 32, .num_kv_heads = 8, .head_size = 128},
        .q_dtype = FV_DTYPE_BF16,
        .kv_layout_any = 1,
        .block_size = 16,
        .kv_scaling = (fv_kv_scaling)SCALING_BY_DTYPE,
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

static fv_status set_scaling(fv_problem *problem, const char *text)
{
    static const char *const names[] = {"none", "tensor", "head", "token-head"};
    int32_t index = 0;
    const fv_status status = fv_args_choice(&index, "--kv-scaling", text, names, FV_ARRAY_LEN(names));
    problem->kv_scaling = (fv_kv_scaling)index; /* in the order of fv_kv_scaling */
    return status;
}

static fv_status set_soft_cap(fv_problem *problem, const char *text)
{
    double soft_cap = 0;
    const fv_status status = fv_args_f64(&soft_cap, "--soft-cap", text, 0, 1e30);
    problem->soft_cap = (float)soft_cap;
    return status;
}

fv_status fv_problem_args_set(fv_problem *problem, int value, const char *text)
{
    fv_mha_shape *mha = &problem->mha;
    switch (value) {
    case FV_OPTION_HEADS: return fv_args_heads(&mha->num_heads, &mha->num_kv_heads, "--heads", text);
    case FV_OPTION_HEAD_SIZE: return fv_args_i32(&mha->head_size, "--head-size", text, 1, 8192);
    case FV_OPTION_V_HEAD_SIZE: return fv_args_i32(&mha->v_head_size, "--v-head-size", text, 1, 8192);
    case FV_OPTION_BLOCK_SIZE: return fv_args_i32(&problem->block_size, "--block-size", text, 1, 1 << 20);
    case FV_OPTION_DTYPE: return fv_args_dtype(&problem->q_dtype, "--dtype", text);
    case FV_OPTION_KV_CACHE_DTYPE: return fv_args_dtype(&problem->kv_dtype, "--kv-cache-dtype", text);
    case FV_OPTION_KV_SCALING: return set_scaling(problem, text);
    case FV_OPTION_LAYOUT: return set_layout(problem, text);
    case FV_OPTION_WINDOW: return fv_args_i32(&problem->window, "--window", text, 0, INT32_MAX);
    case FV_OPTION_SOFT_CAP: return set_soft_cap(problem, text);
    case FV_OPTION_ALIBI: problem->alibi = FV_ALIBI_LINEAR; return FV_OK;
    case FV_OPTION_SINKS: problem->sinks = 1; return FV_OK;
    case FV_OPTION_NOT_CAUSAL: problem->not_causal = 1; return FV_OK;
    case FV_OPTION_MLA: problem->kind = FV_ATTENTION_MLA; return FV_OK;
    default: return fv_fail(FV_ERR_INTERNAL, "option %d is not one of a problem", value);
    }
}

fv_status fv_problem_args_finish(fv_problem *problem)
{
    if ((int)problem->kv_scaling == SCALING_BY_DTYPE) {
        const int32_t fp8 = problem->kv_dtype == FV_DTYPE_F8_E4M3 || problem->kv_dtype == FV_DTYPE_F8_E5M2;
        problem->kv_scaling = fp8 ? FV_KV_SCALING_PER_TENSOR : FV_KV_SCALING_NONE;
    }
    if (problem->kind == FV_ATTENTION_MLA) {
        problem->mla = (fv_mla_shape){.num_heads = problem->mha.num_heads,
                                      .kv_lora_rank = 512,
                                      .qk_rope_head_dim = 64,
                                      .qk_nope_head_dim = 128,
                                      .v_head_dim = 128};
    }
    return fv_problem_normalize(problem, problem);
}

void fv_problem_args_describe(char *text, size_t text_bytes, const fv_problem *problem)
{
    char shape[64], window[32] = "", soft_cap[32] = "";
    if (problem->kind == FV_ATTENTION_MLA) {
        snprintf(shape, sizeof(shape), "MLA, %d heads, latents of %d + %d", problem->mla.num_heads,
                 problem->mla.kv_lora_rank, problem->mla.qk_rope_head_dim);
    } else {
        snprintf(shape, sizeof(shape), "%d/%d heads of %d", problem->mha.num_heads, problem->mha.num_kv_heads,
                 problem->mha.head_size);
    }
    if (problem->window) snprintf(window, sizeof(window), ", window %d", problem->window);
    if (problem->soft_cap > 0) snprintf(soft_cap, sizeof(soft_cap), ", soft cap %g", (double)problem->soft_cap);
    snprintf(text, text_bytes, "%s, %s, cache %s, blocks of %d%s%s%s%s%s", shape, fv_dtype_name(problem->q_dtype),
             fv_dtype_name(problem->kv_dtype), problem->block_size, window, soft_cap, problem->alibi ? ", ALiBi" : "",
             problem->sinks ? ", sinks" : "", problem->not_causal ? ", not causal" : "");
}
