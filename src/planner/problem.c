/* Checks a problem and fills in its defaults: what every backend needs, before any is asked. */
#include <math.h>

#include "core/error.h"
#include "fovea/problem.h"

#define MAX_HEADS 65536
#define MAX_HEAD_SIZE 8192

static fv_status check_range(const char *field, int64_t value, int64_t low, int64_t high)
{
    if (value >= low && value <= high) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "%s is %lld; accepted: %lld to %lld", field, (long long)value, (long long)low,
                   (long long)high);
}

static fv_status check_mha(fv_mha_shape *shape)
{
    fv_status status = check_range("num_heads", shape->num_heads, 1, MAX_HEADS);
    if (status == FV_OK) status = check_range("num_kv_heads", shape->num_kv_heads, 1, MAX_HEADS);
    if (status == FV_OK) status = check_range("head_size", shape->head_size, 1, MAX_HEAD_SIZE);
    if (status == FV_OK) status = check_range("v_head_size", shape->v_head_size, 0, MAX_HEAD_SIZE);
    if (status != FV_OK) return status;
    if (shape->num_heads % shape->num_kv_heads != 0) {
        return fv_fail(FV_ERR_INVALID, "num_heads %d is not a multiple of num_kv_heads %d", shape->num_heads,
                       shape->num_kv_heads);
    }
    if (shape->v_head_size == 0) shape->v_head_size = shape->head_size;
    return FV_OK;
}

static fv_status check_mla(fv_mha_shape *latents, const fv_mla_shape *shape)
{
    fv_status status = check_range("num_heads", shape->num_heads, 1, MAX_HEADS);
    if (status == FV_OK) status = check_range("kv_lora_rank", shape->kv_lora_rank, 1, MAX_HEAD_SIZE);
    if (status == FV_OK) status = check_range("qk_rope_head_dim", shape->qk_rope_head_dim, 0, MAX_HEAD_SIZE);
    if (status == FV_OK) status = check_range("qk_nope_head_dim", shape->qk_nope_head_dim, 1, MAX_HEAD_SIZE);
    if (status == FV_OK) status = check_range("v_head_dim", shape->v_head_dim, 1, MAX_HEAD_SIZE);
    *latents = (fv_mha_shape){
        .num_heads = shape->num_heads,
        .num_kv_heads = 1,
        .head_size = shape->kv_lora_rank + shape->qk_rope_head_dim,
        .v_head_size = shape->kv_lora_rank,
    };
    return status;
}

static int32_t is_compute_dtype(fv_dtype dtype)
{
    return dtype == FV_DTYPE_F32 || dtype == FV_DTYPE_F16 || dtype == FV_DTYPE_BF16;
}

/* Wide elements hold what scales of tokens and heads would bring: no write stores them. */
static fv_status check_cache_dtype(fv_dtype dtype, fv_kv_scaling scaling)
{
    if (fv_dtype_bytes(dtype) == 0) {
        return fv_fail(FV_ERR_INVALID, "kv_dtype is %d; accepted: the values of fv_dtype", (int)dtype);
    }
    if (dtype == FV_DTYPE_I8 && scaling == FV_KV_SCALING_NONE) {
        return fv_fail(FV_ERR_INVALID, "kv_dtype is int8 with kv_scaling 0 (none); accepted: scales of the tensor (1), "
                                       "of heads (2), or of tokens and heads (3)");
    }
    if (fv_dtype_bytes(dtype) > 1 && scaling == FV_KV_SCALING_PER_TOKEN_HEAD) {
        return fv_fail(FV_ERR_INVALID,
                       "kv_dtype is %s with kv_scaling 3 (of tokens and heads); accepted: int8, fp8_e4m3, fp8_e5m2",
                       fv_dtype_name(dtype));
    }
    return FV_OK;
}

/* Each rank would count the sink, which fv_merge_ranks takes once for all. */
static fv_status check_context_parallel(fv_context_parallel *cp, int32_t sinks)
{
    if (cp->world == 0) cp->world = 1;
    if (cp->interleave == 0) cp->interleave = 1;
    fv_status status = check_range("context_parallel.world", cp->world, 1, 65536);
    if (status == FV_OK) status = check_range("context_parallel.rank", cp->rank, 0, cp->world - 1);
    if (status == FV_OK) status = check_range("context_parallel.interleave", cp->interleave, 1, 1 << 24);
    if (status == FV_OK && cp->world > 1 && sinks) {
        return fv_fail(FV_ERR_INVALID,
                       "sinks is %d with context_parallel.world %d; accepted: 0, the sinks go to fv_merge_ranks", sinks,
                       cp->world);
    }
    return status;
}

fv_status fv_problem_normalize(fv_problem *out, const fv_problem *problem)
{
    if (!out || !problem) return fv_fail(FV_ERR_INVALID, "problem is NULL");
    fv_status status = fv_check_struct_size("fv_problem", problem->struct_size, sizeof(*problem));
    if (status != FV_OK) return status;
    fv_problem normal = *problem;
    switch (normal.kind) {
    case FV_ATTENTION_MHA: status = check_mha(&normal.mha); break;
    case FV_ATTENTION_MLA: status = check_mla(&normal.mha, &normal.mla); break;
    default: status = fv_fail(FV_ERR_INVALID, "kind is %d; accepted: 1 (MHA), 2 (MLA)", (int)normal.kind); break;
    }
    if (status == FV_OK) status = check_range("type", normal.type, FV_ATTENTION_DECODER, FV_ATTENTION_CROSS);
    if (status == FV_OK) status = check_range("block_size", normal.block_size, 1, 1 << 20);
    if (status == FV_OK) status = check_range("window", normal.window, 0, INT32_MAX);
    if (status == FV_OK) status = check_range("alibi", normal.alibi, FV_ALIBI_NONE, FV_ALIBI_SQRT);
    if (status == FV_OK) {
        status = check_range("kv_scaling", normal.kv_scaling, FV_KV_SCALING_NONE, FV_KV_SCALING_PER_TOKEN_HEAD);
    }
    if (status == FV_OK) {
        status = check_range("kv_layout", normal.kv_layout, FV_KV_LAYOUT_STRIDED, FV_KV_LAYOUT_LATENT_FP8_DS);
    }
    if (status == FV_OK) status = check_context_parallel(&normal.context_parallel, normal.sinks);
    if (status != FV_OK) return status;

    if (!is_compute_dtype(normal.q_dtype)) {
        return fv_fail(FV_ERR_INVALID, "q_dtype is %s (%d); accepted: float32, float16, bfloat16",
                       fv_dtype_name(normal.q_dtype), (int)normal.q_dtype);
    }
    if (normal.kv_dtype == FV_DTYPE_NONE) normal.kv_dtype = normal.q_dtype;
    if (normal.out_dtype == FV_DTYPE_NONE) normal.out_dtype = normal.q_dtype;
    status = check_cache_dtype(normal.kv_dtype, normal.kv_scaling);
    if (status != FV_OK) return status;
    if (!is_compute_dtype(normal.out_dtype)) {
        return fv_fail(FV_ERR_INVALID, "out_dtype is %s (%d); accepted: float32, float16, bfloat16",
                       fv_dtype_name(normal.out_dtype), (int)normal.out_dtype);
    }
    if (!(normal.soft_cap >= 0) || isinf(normal.soft_cap)) {
        return fv_fail(FV_ERR_INVALID, "soft_cap is %g; accepted: 0 (none) or a positive number",
                       (double)normal.soft_cap);
    }
    if (!isfinite(normal.scale)) {
        return fv_fail(FV_ERR_INVALID, "scale is %g; accepted: 0 (1 / sqrt of the head size) or any finite number",
                       (double)normal.scale);
    }
    if (normal.scale == 0) {
        const int32_t elements = normal.kind == FV_ATTENTION_MHA
                                     ? normal.mha.head_size
                                     : normal.mla.qk_nope_head_dim + normal.mla.qk_rope_head_dim;
        normal.scale = (float)(1.0 / sqrt((double)elements));
    }
    *out = normal;
    return FV_OK;
}
