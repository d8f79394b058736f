/* The single operations of fovea/ops.h that write, gather and merge: checks, then the device's best
 * kernel. */
#include "fovea/ops.h"

#include "core/error.h"
#include "ops/ops_check.h"

fv_status fv_kv_write(fv_device *device, const fv_kv_view *cache, const fv_tensor *k, const fv_tensor *v,
                      const int64_t *slot_mapping, int32_t num_tokens, const float *k_scale, const float *v_scale,
                      int32_t num_scales, fv_stream stream)
{
    fv_status status = fv_ops_check_device(device);
    if (status != FV_OK) return status;
    status = fv_ops_check_write(device, cache, k, v, slot_mapping, num_tokens, k_scale, v_scale, num_scales);
    if (status != FV_OK) return status;
    const fv_kv_write_params params = {
        FV_OPS_KV_ROWS(k, fv_ops_or_absent(v)),
        .src_dtype = k->dtype,
        .cache = *cache,
        .slot_mapping = slot_mapping,
        .num_tokens = num_tokens,
        .k_scale = k_scale,
        .v_scale = v_scale,
        .num_kv_scales = num_scales,
    };
    const fv_launch launch = fv_ops_launch(device, stream);
    return fv_ops_kernels(device)->kv_write(&launch, &params);
}

fv_status fv_kv_gather(fv_device *device, const fv_tensor *k, const fv_tensor *v, const fv_kv_view *cache,
                       const fv_batch *batch, const int32_t *key_start, const int32_t *out_start, int32_t num_rows,
                       const float *k_scale, const float *v_scale, int32_t num_scales, fv_stream stream)
{
    fv_status status = fv_ops_check_device(device);
    if (status != FV_OK) return status;
    status = fv_ops_check_cache_rows(device, cache, k, v, num_rows, k_scale, v_scale, num_scales);
    if (status != FV_OK) return status;
    status = fv_ops_check_gather(device, cache, batch, key_start, out_start, num_rows);
    if (status != FV_OK || num_rows == 0) return status;
    const fv_kv_gather_params params = {
        FV_OPS_KV_ROWS(k, fv_ops_or_absent(v)),
        .dst_dtype = k->dtype,
        .cache = *cache,
        .num_seqs = batch->num_seqs,
        .block_table = batch->block_table,
        .block_table_stride = batch->block_table_stride,
        .block_table_width = batch->block_table_width,
        .key_start = key_start,
        .out_start = out_start,
        .num_rows = num_rows,
        .k_scale = k_scale,
        .v_scale = v_scale,
        .num_kv_scales = num_scales,
    };
    const fv_launch launch = fv_ops_launch(device, stream);
    return fv_ops_kernels(device)->kv_gather(&launch, &params);
}

static fv_merge_side side_of(const fv_tensor *out, const fv_tensor *lse)
{
    return (fv_merge_side){out->data, out->stride_bytes[0], out->stride_bytes[1],
                           lse->data, lse->stride_bytes[0], lse->stride_bytes[1]};
}

/* a and b of one dtype, out of any of the three; all [T, H, D]. */
static fv_status check_merge(const fv_device *device, const fv_tensor *out, const fv_tensor *lse, const fv_tensor *a,
                             const fv_tensor *lse_a, const fv_tensor *b, const fv_tensor *lse_b)
{
    if (!out || out->num_dims != 3) return fv_fail(FV_ERR_INVALID, "out is NULL or has not three dimensions");
    const int64_t tokens = out->shape[0], heads = out->shape[1], elements = out->shape[2];
    fv_status status = fv_ops_check_compute_dtype("out", out);
    if (status == FV_OK) status = fv_ops_check_rows(device, "out", out, out->dtype, tokens, heads, elements);
    if (status == FV_OK) status = fv_ops_check_compute_dtype("a", a);
    if (status == FV_OK) status = fv_ops_check_rows(device, "a", a, a->dtype, tokens, heads, elements);
    if (status == FV_OK) status = fv_ops_check_rows(device, "b", b, a->dtype, tokens, heads, elements);
    if (status == FV_OK) status = fv_ops_check_rows(device, "lse_a", lse_a, FV_DTYPE_F32, tokens, heads, 0);
    if (status == FV_OK) status = fv_ops_check_rows(device, "lse_b", lse_b, FV_DTYPE_F32, tokens, heads, 0);
    if (status == FV_OK && fv_ops_is_given(lse)) {
        status = fv_ops_check_rows(device, "lse", lse, FV_DTYPE_F32, tokens, heads, 0);
    }
    if (status != FV_OK) return status;
    if (out->dtype != a->dtype && (out->data == a->data || out->data == b->data)) {
        return fv_fail(FV_ERR_INVALID, "out is %s in the memory of a side of %s; accepted there: the same dtype",
                       fv_dtype_name(out->dtype), fv_dtype_name(a->dtype));
    }
    return FV_OK;
}

fv_status fv_merge_states(fv_device *device, const fv_tensor *out, const fv_tensor *lse, const fv_tensor *a,
                          const fv_tensor *lse_a, const fv_tensor *b, const fv_tensor *lse_b, const float *sinks,
                          fv_stream stream)
{
    fv_status status = fv_ops_check_device(device);
    if (status == FV_OK) status = check_merge(device, out, lse, a, lse_a, b, lse_b);
    if (status != FV_OK) return status;
    const int32_t has_lse = fv_ops_is_given(lse);
    const fv_merge_params params = {
        .out = out->data,
        .token_stride = out->stride_bytes[0],
        .head_stride = out->stride_bytes[1],
        .lse = has_lse ? lse->data : NULL,
        .lse_token_stride = has_lse ? lse->stride_bytes[0] : 0,
        .lse_head_stride = has_lse ? lse->stride_bytes[1] : 0,
        .a = side_of(a, lse_a),
        .b = side_of(b, lse_b),
        .dtype = a->dtype,
        .out_dtype = out->dtype,
        .sinks = sinks,
        .num_tokens = (int32_t)out->shape[0],
        .num_heads = (int32_t)out->shape[1],
        .head_size = (int32_t)out->shape[2],
    };
    const fv_launch launch = fv_ops_launch(device, stream);
    return fv_ops_kernels(device)->merge_states(&launch, &params);
}
