/* The variants of attention on the GPU: those of the portable kernels, and those that take Hopper's where they serve
 * the call. */
#include <string.h>

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/hopper/few_meeting.h"
#include "kernels/cuda/kernels.h"

template <int32_t BLOCK_M, fv_rescaling RESCALING, bool IS_HOPPER>
static fv_status launch_paged(const fv_launch *launch, const fv_attend_params *params)
{
    return fv_cuda_attend_launch(launch, params, BLOCK_M, RESCALING, IS_HOPPER);
}

template <fv_rescaling RESCALING>
static int32_t narrows_latents(const fv_launch *launch, const fv_attend_params *params)
{
    return fv_cuda_narrows_partials(launch, params, RESCALING);
}

/* Without the cache, whose dtype and scales would have a say in how dense rows are read. */
static fv_attend_params without_cache(const fv_attend_params *params)
{
    fv_attend_params dense = *params;
    memset(&dense.cache, 0, sizeof(dense.cache));
    dense.block_table = NULL;
    dense.k_scale = dense.v_scale = NULL;
    dense.num_kv_scales = 0;
    return dense;
}

template <int32_t BLOCK_M, bool IS_HOPPER>
static fv_status launch_dense(const fv_launch *launch, const fv_attend_params *params)
{
    const fv_attend_params dense = without_cache(params);
    return fv_cuda_attend_launch(launch, &dense, BLOCK_M, FV_RESCALING_MULTIPLY, IS_HOPPER);
}

static size_t scratch_bytes(const fv_attend_params *params)
{
    (void)params;
    return 0;
}

static int32_t largest_head(const fv_problem *problem)
{
    return fv_max_i32(problem->mha.head_size, problem->mha.v_head_size);
}

static const char *why_not(const fv_problem *problem)
{
    if (problem->kind != FV_ATTENTION_MHA) return "the kernel serves MHA, GQA and MQA, not MLA";
    if (problem->mha.head_size % 8 != 0 || problem->mha.v_head_size % 8 != 0) return "head_size is not a multiple of 8";
    if (largest_head(problem) > 512) return "head_size is above 512";
    return NULL;
}

static const char *why_not_many(const fv_problem *problem)
{
    const char *reason = why_not(problem);
    if (reason) return reason;
    if (problem->q_dtype == FV_DTYPE_F32) return "blocks of many rows are for bf16 and fp16";
    return NULL;
}

static const char *why_not_mla(const fv_problem *problem)
{
    if (problem->kind != FV_ATTENTION_MLA) return "the kernel serves MLA";
    if (problem->mla.kv_lora_rank % 8 != 0) return "kv_lora_rank is not a multiple of 8";
    if (problem->mla.qk_rope_head_dim % 8 != 0) return "qk_rope_head_dim is not a multiple of 8";
    if (problem->mla.kv_lora_rank > 512) return "kv_lora_rank is above 512";
    if (problem->mla.kv_lora_rank + problem->mla.qk_rope_head_dim > 576)
        return "the latent entry is above 576 elements";
    return NULL;
}

static const char *why_not_mla_many(const fv_problem *problem)
{
    const char *reason = why_not_mla(problem);
    if (reason) return reason;
    if (problem->q_dtype == FV_DTYPE_F32) return "blocks of many rows are for bf16 and fp16";
    return NULL;
}

static const char *amla_why_not(const fv_problem *problem)
{
    const fv_dtype out_dtype = problem->out_dtype ? problem->out_dtype : problem->q_dtype;
    if (problem->q_dtype != FV_DTYPE_F32 && out_dtype == FV_DTYPE_F32)
        return "AMLA compensates to the precision of q_dtype, and out_dtype float32 is wider";
    return why_not_mla(problem);
}

/* Blocks of threads that a multiprocessor holds. */
static int32_t one_at_once(const fv_problem *) { return 1; }

/* Do Hopper's kernels of latents serve the problem, whose blocks can share keys? */
static int32_t splits_latents(const fv_problem *problem)
{
    const fv_mla_shape *mla = &problem->mla;
    if (problem->q_dtype == FV_DTYPE_F32) return 0;
    return mla->kv_lora_rank == 512 && mla->qk_rope_head_dim == 64 && problem->kv_dtype == problem->q_dtype;
}

/* Does decode of the problem take the kernels of attend_mma.cuh, whatever its pointers are? */
static int32_t takes_mma(const fv_problem *problem)
{
    const int32_t is_exact = problem->kv_dtype == problem->q_dtype || fv_dtype_bytes(problem->kv_dtype) == 1;
    if (problem->q_dtype == FV_DTYPE_F32 || !is_exact) return 0;
    if (problem->kind == FV_ATTENTION_MLA)
        return !splits_latents(problem) && problem->kv_layout != FV_KV_LAYOUT_LATENT_FP8_DS &&
               !problem->mla.rotate_at_reading;
    return largest_head(problem) > 256 || problem->soft_cap > 0 || problem->alibi != FV_ALIBI_NONE ||
           problem->tree_mask || problem->kv_scaling == FV_KV_SCALING_PER_TOKEN_HEAD ||
           problem->kv_layout == FV_KV_LAYOUT_X_PACKED || problem->kv_layout == FV_KV_LAYOUT_SHUFFLED;
}

/* Many rows are 128 where the head is short, and where Hopper's own kernel serves a longer one. */
template <bool IS_HOPPER> static bool takes_128_rows(const fv_problem *problem)
{
    const int32_t size = largest_head(problem);
    if (size <= 128) return true;
    if (!IS_HOPPER || size > 256 || fv_kv_layout_is_latent(problem->kv_layout)) return false; /* expanded keys share an end */
    const int32_t is_narrow = fv_dtype_bytes(problem->kv_dtype) == 1 &&
                              (problem->mha.head_size | problem->mha.v_head_size) % 16 == 0;
    return (problem->kv_dtype == problem->q_dtype || is_narrow) && !takes_mma(problem);
}

template <bool IS_HOPPER> static const char *why_not_64(const fv_problem *problem)
{
    const char *reason = why_not_many(problem);
    if (reason) return reason;
    return takes_128_rows<IS_HOPPER>(problem) ? "64 rows are for heads that 128 rows do not serve" : NULL;
}

template <bool IS_HOPPER> static const char *why_not_128(const fv_problem *problem)
{
    const char *reason = why_not_many(problem);
    if (reason) return reason;
    if (takes_128_rows<IS_HOPPER>(problem)) return NULL;
    return IS_HOPPER ? "128 rows are for head sizes up to 128, and to 256 over plain keys of the queries' dtype or of one byte"
                     : "128 rows are for head sizes up to 128";
}

/* few_shape::BLOCKS for decode of one token, but two where four small ones fit (few_halves); of attend_mma.cuh as many as
 * Hopper's shared memory has room for. */
template <bool IS_HOPPER> static int32_t few_at_once(const fv_problem *problem)
{
    const int32_t size = largest_head(problem);
    if (IS_HOPPER && takes_mma(problem)) return size <= 128 ? 4 : 2;
    if (problem->kind == FV_ATTENTION_MLA) return 1;
    const int32_t is_narrow = fv_dtype_bytes(problem->kv_dtype) == 1;
    const int32_t is_small = is_narrow && problem->mha.num_heads <= FV_CUDA_FEWEST_ROWS * problem->mha.num_kv_heads;
    return size <= 64 ? 4 : size <= 128 || is_small ? 2 : 1;
}

/* Heads of 128 next to one byte: find_few_kernel has two blocks of more warps for one round of the items, four small ones for
 * more. */
template <bool IS_HOPPER> static int32_t few_halves(const fv_problem *problem)
{
    if (problem->kind == FV_ATTENTION_MLA || problem->q_dtype == FV_DTYPE_F32 || fv_dtype_bytes(problem->kv_dtype) != 1)
        return 0;
    const int32_t size = largest_head(problem);
    if ((IS_HOPPER && takes_mma(problem)) || size <= 64 || size > 128) return 0;
    return FV_CUDA_FEWEST_ROWS;
}

/* KV heads of a job of one token. Next to one byte two heads of 128 with up to four rows each fill what one instruction takes,
 * and their keys are 256 bytes in one place, which come faster than 128 (docs/notes/cuda-hopper.md). */
template <bool IS_HOPPER> static int32_t few_heads_at_once(const fv_problem *problem)
{
    const fv_mha_shape *mha = &problem->mha;
    if (problem->kind == FV_ATTENTION_MLA || fv_dtype_bytes(problem->kv_dtype) != 1) return 1;
    if (IS_HOPPER && takes_mma(problem)) return 1;
    if (mha->head_size != 128 || mha->v_head_size != 128 || mha->num_kv_heads % 2 != 0) return 1;
    if (problem->block_size % 16 != 0 || problem->kv_scaling == FV_KV_SCALING_PER_HEAD) return 1;
    return 2 * mha->num_heads <= FV_CUDA_FEWEST_ROWS * mha->num_kv_heads ? 2 : 1;
}

/* Lanes that may share an item of one token: hopper/attend_few_meeting.cuh. */
template <bool IS_HOPPER> static int32_t few_meet(const fv_problem *problem)
{
    const fv_mha_shape *mha = &problem->mha;
    if (!IS_HOPPER || problem->kind == FV_ATTENTION_MLA || takes_mma(problem) || problem->q_dtype == FV_DTYPE_F32)
        return 0;
    const int32_t group = mha->num_heads / mha->num_kv_heads, is_power = (group & (group - 1)) == 0;
    if (mha->head_size != 128 || mha->v_head_size != 128 || group > FV_CUDA_FEWEST_ROWS || !is_power) return 0;
    if (problem->window > 0 || problem->block_size % 16 != 0 || problem->kv_scaling == FV_KV_SCALING_PER_HEAD) return 0;
    return FV_CUDA_MOST_MEETING;
}

/* Those of attend_mma.cuh wait for their own arithmetic. */
template <bool IS_HOPPER> static int32_t few_keep_pace(const fv_problem *problem)
{
    return IS_HOPPER && takes_mma(problem);
}

template <int32_t BLOCK_M, bool IS_HOPPER>
static constexpr fv_attend_variant paged(const char *name, const char *(*reason)(const fv_problem *),
                                         int32_t (*items_at_once)(const fv_problem *))
{
    return {
        .name = name,
        .block_m = BLOCK_M,
        .tile_keys = 64,
        .why_not = reason,
        .scratch_bytes = scratch_bytes,
        .launch = launch_paged<BLOCK_M, FV_RESCALING_MULTIPLY, IS_HOPPER>,
        .rescaling = FV_RESCALING_MULTIPLY,
        .items_at_once = items_at_once,
        .rows_of_halves = items_at_once == one_at_once ? NULL : few_halves<IS_HOPPER>,
        .heads_at_once = items_at_once == one_at_once ? NULL : few_heads_at_once<IS_HOPPER>,
        .splits_items = BLOCK_M <= FV_CUDA_FEW_ROWS ? few_meet<IS_HOPPER> : NULL,
        .items_keep_pace = items_at_once == one_at_once ? NULL : few_keep_pace<IS_HOPPER>,
    };
}

template <int32_t BLOCK_M, bool IS_HOPPER>
static constexpr fv_attend_variant latents(const char *name, const char *(*reason)(const fv_problem *),
                                           int32_t (*items_at_once)(const fv_problem *))
{
    fv_attend_variant variant = paged<BLOCK_M, IS_HOPPER>(name, reason, items_at_once);
    variant.splits_items = IS_HOPPER ? splits_latents : NULL;
    variant.narrows_partials = IS_HOPPER ? narrows_latents<FV_RESCALING_MULTIPLY> : NULL;
    return variant;
}

template <int32_t BLOCK_M, bool IS_HOPPER>
static constexpr fv_attend_variant dense(const char *name, const char *(*reason)(const fv_problem *),
                                         int32_t (*items_at_once)(const fv_problem *))
{
    fv_attend_variant variant = paged<BLOCK_M, IS_HOPPER>(name, reason, items_at_once);
    variant.launch = launch_dense<BLOCK_M, IS_HOPPER>;
    return variant;
}

template <fv_rescaling RESCALING, bool IS_HOPPER>
static constexpr fv_attend_variant amla(const char *name, const char *(*reason)(const fv_problem *))
{
    fv_attend_variant variant = paged<FV_CUDA_MANY_ROWS, IS_HOPPER>(name, reason, one_at_once);
    variant.launch = launch_paged<FV_CUDA_MANY_ROWS, RESCALING, IS_HOPPER>;
    variant.rescaling = RESCALING;
    variant.narrows_partials = IS_HOPPER ? narrows_latents<RESCALING> : NULL;
    return variant;
}

/* "amla_multiply" is the paper's Base, to compare with, chosen by name only. */
#define FV_CUDA_VARIANTS(PREFIX, IS_HOPPER)                                                          \
    const fv_attend_variant PREFIX##_mla_decode[FV_CUDA_NUM_MLA_DECODE] = {                          \
        latents<FV_CUDA_FEW_ROWS, IS_HOPPER>("rows16_keys64", why_not_mla, few_at_once<IS_HOPPER>),  \
        latents<FV_CUDA_FEW_LATENT_ROWS, IS_HOPPER>("rows32_keys64", why_not_mla_many, one_at_once), \
        latents<FV_CUDA_MANY_ROWS, IS_HOPPER>("rows64_keys64", why_not_mla_many, one_at_once),       \
        amla<FV_RESCALING_ADD, IS_HOPPER>("amla", amla_why_not),                                     \
        amla<FV_RESCALING_ADD_UNCOMPENSATED, IS_HOPPER>("amla_uncompensated", amla_why_not),         \
        amla<FV_RESCALING_MULTIPLY_BF16, IS_HOPPER>("amla_multiply", why_not_mla),                   \
    };                                                                                               \
    const fv_attend_variant PREFIX##_attend_paged[FV_CUDA_NUM_ATTEND] = {                            \
        paged<FV_CUDA_FEW_ROWS, IS_HOPPER>("rows16_keys64", why_not, few_at_once<IS_HOPPER>),        \
        paged<FV_CUDA_MANY_ROWS, IS_HOPPER>("rows64_keys64", why_not_64<IS_HOPPER>, one_at_once),               \
        paged<FV_CUDA_MANY_SHORT_ROWS, IS_HOPPER>("rows128_keys64", why_not_128<IS_HOPPER>, one_at_once),       \
    };                                                                                               \
    const fv_attend_variant PREFIX##_attend_dense[FV_CUDA_NUM_ATTEND] = {                            \
        dense<FV_CUDA_FEW_ROWS, IS_HOPPER>("rows16_keys64", why_not, few_at_once<IS_HOPPER>),        \
        dense<FV_CUDA_MANY_ROWS, IS_HOPPER>("rows64_keys64", why_not_64<IS_HOPPER>, one_at_once),               \
        dense<FV_CUDA_MANY_SHORT_ROWS, IS_HOPPER>("rows128_keys64", why_not_128<IS_HOPPER>, one_at_once),       \
    };

extern "C" {
FV_CUDA_VARIANTS(fv_cuda, false)
FV_CUDA_VARIANTS(fv_hopper, true)
}
