/* fv_merge_ranks and fv_scale_by_lse: checks, then one kernel for both. */
#include "ops/merge_ranks.h"

#include "core/error.h"
#include "fovea/context_parallel.h"
#include "ops/ops_check.h"

/* [world, T, H] or, with elements, [world, T, H, D]: the part of rank 0 must have the shape of a row tensor. */
static fv_status check_ranks(const fv_device *device, const char *name, const fv_tensor *tensor, fv_dtype dtype,
                             int64_t world, int64_t tokens, int64_t heads, int64_t elements)
{
    if (!fv_ops_is_given(tensor)) return fv_fail(FV_ERR_INVALID, "%s has no data", name);
    const int32_t num_dims = elements ? 4 : 3;
    if (tensor->num_dims != num_dims || tensor->shape[0] != world) {
        return fv_fail(FV_ERR_INVALID, "%s has %d dimensions and %lld ranks; accepted: %d dimensions and %lld ranks",
                       name, tensor->num_dims, (long long)tensor->shape[0], num_dims, (long long)world);
    }
    fv_tensor first = {tensor->data, tensor->dtype, num_dims - 1, {0}, {0}};
    for (int32_t i = 0; i < num_dims - 1; i++) {
        first.shape[i] = tensor->shape[i + 1];
        first.stride_bytes[i] = tensor->stride_bytes[i + 1];
    }
    return fv_ops_check_rows(device, name, &first, dtype, tokens, heads, elements);
}

/* `from` is `world` ranks, rank_stride bytes from one to the next. */
static fv_status check_alias(const fv_tensor *out, const fv_tensor *from, const char *name, int64_t world,
                             int64_t rank_stride)
{
    if (out->dtype == from->dtype) return FV_OK;
    for (int64_t rank = 0; rank < world; rank++) {
        if (out->data != (char *)from->data + rank * rank_stride) continue;
        return fv_fail(FV_ERR_INVALID, "out is %s in the memory of %s of %s, rank %lld; accepted there: the same dtype",
                       fv_dtype_name(out->dtype), name, fv_dtype_name(from->dtype), (long long)rank);
    }
    return FV_OK;
}

/* [T, H, D]: its own shape is the one that counts. */
static fv_status check_out(const fv_device *device, const fv_tensor *out)
{
    if (out->num_dims != 3) return fv_fail(FV_ERR_INVALID, "out has %d dimensions; accepted: 3", out->num_dims);
    const fv_status status = fv_ops_check_compute_dtype("out", out);
    if (status != FV_OK) return status;
    return fv_ops_check_rows(device, "out", out, out->dtype, out->shape[0], out->shape[1], out->shape[2]);
}

static fv_status check_merge(const fv_device *device, const fv_tensor *out, const fv_tensor *lse,
                             const fv_tensor *rank_out, const fv_tensor *rank_lse)
{
    if (!fv_ops_is_given(rank_lse) || rank_lse->num_dims != 3) {
        return fv_fail(FV_ERR_INVALID, "rank_lse has no data or has not three dimensions (rank, token, head)");
    }
    const int64_t world = rank_lse->shape[0], tokens = rank_lse->shape[1], heads = rank_lse->shape[2];
    if (world < 1 || world > FV_MAX_MERGE_RANKS) {
        return fv_fail(FV_ERR_INVALID, "%lld ranks; accepted: 1 to %d", (long long)world, FV_MAX_MERGE_RANKS);
    }
    if (fv_ops_is_given(out) != fv_ops_is_given(rank_out)) {
        return fv_fail(FV_ERR_INVALID, "only %s is given; accepted: out and rank_out, or neither",
                       fv_ops_is_given(out) ? "out" : "rank_out");
    }
    if (!fv_ops_is_given(out) && !fv_ops_is_given(lse)) {
        return fv_fail(FV_ERR_INVALID, "neither out nor lse is given; accepted: one of them or both");
    }
    fv_status status = check_ranks(device, "rank_lse", rank_lse, FV_DTYPE_F32, world, tokens, heads, 0);
    if (status == FV_OK && fv_ops_is_given(lse)) {
        status = fv_ops_check_rows(device, "lse", lse, FV_DTYPE_F32, tokens, heads, 0);
    }
    if (status != FV_OK || !fv_ops_is_given(out)) return status;
    status = check_out(device, out);
    if (status == FV_OK) status = fv_ops_check_rows(device, "out", out, out->dtype, tokens, heads, out->shape[2]);
    if (status == FV_OK) status = fv_ops_check_compute_dtype("rank_out", rank_out);
    if (status == FV_OK) {
        status = check_ranks(device, "rank_out", rank_out, rank_out->dtype, world, tokens, heads, out->shape[2]);
    }
    return status == FV_OK ? check_alias(out, rank_out, "rank_out", world, rank_out->stride_bytes[0]) : status;
}

static fv_status launch_merge(fv_device *device, const fv_merge_ranks_params *params, fv_stream stream)
{
    const fv_status status = fv_ops_check_kernel(device, "merge_ranks", fv_ops_kernels(device)->merge_ranks != NULL);
    if (status != FV_OK) return status;
    const fv_launch launch = fv_ops_launch(device, stream);
    return fv_ops_kernels(device)->merge_ranks(&launch, params);
}

fv_status fv_merge_ranks(fv_device *device, const fv_tensor *out, const fv_tensor *lse, const fv_tensor *rank_out,
                         const fv_tensor *rank_lse, const float *sinks, fv_stream stream)
{
    fv_status status = fv_ops_check_device(device);
    if (status == FV_OK) status = check_merge(device, out, lse, rank_out, rank_lse);
    if (status != FV_OK) return status;
    fv_merge_ranks_params params = {
        .ranks = {.lse = rank_lse->data,
                  .lse_token_stride = rank_lse->stride_bytes[1],
                  .lse_head_stride = rank_lse->stride_bytes[2]},
        .lse_rank_stride = rank_lse->stride_bytes[0],
        .sinks = sinks,
        .num_ranks = (int32_t)rank_lse->shape[0],
        .num_tokens = (int32_t)rank_lse->shape[1],
        .num_heads = (int32_t)rank_lse->shape[2],
    };
    if (fv_ops_is_given(lse)) {
        params.lse = lse->data;
        params.lse_token_stride = lse->stride_bytes[0];
        params.lse_head_stride = lse->stride_bytes[1];
    }
    if (fv_ops_is_given(out)) {
        params.out = out->data;
        params.token_stride = out->stride_bytes[0];
        params.head_stride = out->stride_bytes[1];
        params.ranks.out = rank_out->data;
        params.rank_stride = rank_out->stride_bytes[0];
        params.ranks.token_stride = rank_out->stride_bytes[1];
        params.ranks.head_stride = rank_out->stride_bytes[2];
        params.dtype = rank_out->dtype;
        params.out_dtype = out->dtype;
        params.head_size = (int32_t)out->shape[2];
    }
    return launch_merge(device, &params, stream);
}

fv_status fv_scale_by_lse(fv_device *device, const fv_tensor *out, const fv_tensor *in, const fv_tensor *lse_in,
                          const fv_tensor *lse_total, fv_stream stream)
{
    fv_status status = fv_ops_check_device(device);
    if (status != FV_OK) return status;
    if (!fv_ops_is_given(out)) return fv_fail(FV_ERR_INVALID, "out has no data");
    const int64_t tokens = out->shape[0], heads = out->shape[1];
    status = check_out(device, out);
    if (status == FV_OK) status = fv_ops_check_compute_dtype("in", in);
    if (status == FV_OK) status = fv_ops_check_rows(device, "in", in, in->dtype, tokens, heads, out->shape[2]);
    if (status == FV_OK) status = check_alias(out, in, "in", 1, 0);
    if (status == FV_OK) status = fv_ops_check_rows(device, "lse_in", lse_in, FV_DTYPE_F32, tokens, heads, 0);
    if (status == FV_OK) status = fv_ops_check_rows(device, "lse_total", lse_total, FV_DTYPE_F32, tokens, heads, 0);
    if (status != FV_OK) return status;
    const fv_merge_ranks_params params = {
        .out = out->data,
        .token_stride = out->stride_bytes[0],
        .head_stride = out->stride_bytes[1],
        .ranks = {in->data, in->stride_bytes[0], in->stride_bytes[1], lse_in->data, lse_in->stride_bytes[0],
                  lse_in->stride_bytes[1]},
        .total_lse = lse_total->data,
        .total_token_stride = lse_total->stride_bytes[0],
        .total_head_stride = lse_total->stride_bytes[1],
        .dtype = in->dtype,
        .out_dtype = out->dtype,
        .num_ranks = 1,
        .num_tokens = (int32_t)tokens,
        .num_heads = (int32_t)heads,
        .head_size = (int32_t)out->shape[2],
    };
    return launch_merge(device, &params, stream);
}
