/* The single operations of fovea/ops.h: checks, then the device's best kernel. */
#include "fovea/ops.h"

#include "core/context.h"
#include "core/error.h"
#include "ops/kernel_table.h"

static const fv_kernel_table *kernels_of(const fv_device *device)
{
    return device && device->num_tables > 0 ? device->tables[device->num_tables - 1] : NULL;
}

/* [rows >= num_rows, heads, elements], dense elements. */
static fv_status check_rows(const char *name, const fv_tensor *tensor, fv_dtype dtype, int64_t num_rows, int64_t heads,
                            int64_t elements)
{
    if (!tensor || !tensor->data) return fv_fail(FV_ERR_INVALID, "%s has no data", name);
    const int32_t num_dims = elements ? 3 : 2;
    const int64_t last = tensor->num_dims == 3 ? tensor->shape[2] : 0;
    if (tensor->dtype != dtype || tensor->num_dims != num_dims || tensor->shape[0] < num_rows ||
        tensor->shape[1] != heads || last != elements) {
        return fv_fail(FV_ERR_INVALID, "%s is %s [%lld, %lld, %lld]; accepted: %s [%lld or more, %lld, %lld]", name,
                       fv_dtype_name(tensor->dtype), (long long)tensor->shape[0], (long long)tensor->shape[1],
                       (long long)last, fv_dtype_name(dtype), (long long)num_rows, (long long)heads,
                       (long long)elements);
    }
    if (elements && tensor->stride_bytes[2] != (int64_t)fv_dtype_bytes(dtype)) {
        return fv_fail(FV_ERR_INVALID, "the last stride of %s is %lld bytes; accepted: %zu (dense)", name,
                       (long long)tensor->stride_bytes[2], fv_dtype_bytes(dtype));
    }
    return FV_OK;
}

static fv_status check_cache_rows(const fv_kv_view *cache, const fv_tensor *k, const fv_tensor *v, int32_t num_rows,
                                  const float *k_scale, const float *v_scale, int32_t num_scales)
{
    if (!cache || cache->struct_size != sizeof(*cache) || !cache->k.data || !cache->v.data) {
        return fv_fail(FV_ERR_INVALID, "the KV cache view is NULL, has no data or its struct_size is not %zu",
                       sizeof(*cache));
    }
    if (num_rows < 0) return fv_fail(FV_ERR_INVALID, "%d rows; accepted: 0 or more", num_rows);
    if (num_scales != 0 && num_scales != 1 && num_scales != cache->num_kv_heads) {
        return fv_fail(FV_ERR_INVALID, "num_scales is %d; accepted: 0, 1 or %d (one for each KV head)", num_scales,
                       cache->num_kv_heads);
    }
    if (num_scales && (!k_scale || !v_scale)) return fv_fail(FV_ERR_INVALID, "k_scale or v_scale is NULL");
    const fv_dtype dtype = k ? k->dtype : FV_DTYPE_NONE;
    if (dtype != FV_DTYPE_F32 && dtype != FV_DTYPE_F16 && dtype != FV_DTYPE_BF16) {
        return fv_fail(FV_ERR_INVALID, "k is %s; accepted: float32, float16, bfloat16", fv_dtype_name(dtype));
    }
    const fv_status status = check_rows("k", k, dtype, num_rows, cache->num_kv_heads, cache->head_size);
    if (status != FV_OK) return status;
    return check_rows("v", v, dtype, num_rows, cache->num_kv_heads, cache->v_head_size);
}

fv_status fv_kv_write(fv_device *device, const fv_kv_view *cache, const fv_tensor *k, const fv_tensor *v,
                      const int64_t *slot_mapping, int32_t num_tokens, const float *k_scale, const float *v_scale,
                      int32_t num_scales, fv_stream stream)
{
    const fv_kernel_table *kernels = kernels_of(device);
    if (!kernels) return fv_fail(FV_ERR_INVALID, "device is NULL or has no kernels");
    const fv_status status = check_cache_rows(cache, k, v, num_tokens, k_scale, v_scale, num_scales);
    if (status != FV_OK) return status;
    if (num_tokens > 0 && !slot_mapping) return fv_fail(FV_ERR_INVALID, "slot_mapping is NULL");
    const fv_kv_write_params params = {
        .k = k->data,
        .k_token_stride = k->stride_bytes[0],
        .k_head_stride = k->stride_bytes[1],
        .v = v->data,
        .v_token_stride = v->stride_bytes[0],
        .v_head_stride = v->stride_bytes[1],
        .src_dtype = k->dtype,
        .cache = *cache,
        .slot_mapping = slot_mapping,
        .num_tokens = num_tokens,
        .k_scale = k_scale,
        .v_scale = v_scale,
        .num_kv_scales = num_scales,
    };
    const fv_launch launch = {device, &device->context->executor, stream};
    return kernels->kv_write(&launch, &params);
}

fv_status fv_kv_gather(fv_device *device, const fv_tensor *k, const fv_tensor *v, const fv_kv_view *cache,
                       const fv_batch *batch, const int32_t *key_start, const int32_t *out_start, int32_t num_rows,
                       const float *k_scale, const float *v_scale, int32_t num_scales, fv_stream stream)
{
    const fv_kernel_table *kernels = kernels_of(device);
    if (!kernels) return fv_fail(FV_ERR_INVALID, "device is NULL or has no kernels");
    const fv_status status = check_cache_rows(cache, k, v, num_rows, k_scale, v_scale, num_scales);
    if (status != FV_OK) return status;
    if (!batch || !batch->block_table || !key_start || !out_start) {
        return fv_fail(FV_ERR_INVALID, "batch, its block_table, key_start or out_start is NULL");
    }
    const fv_kv_gather_params params = {
        .k = k->data,
        .k_token_stride = k->stride_bytes[0],
        .k_head_stride = k->stride_bytes[1],
        .v = v->data,
        .v_token_stride = v->stride_bytes[0],
        .v_head_stride = v->stride_bytes[1],
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
    const fv_launch launch = {device, &device->context->executor, stream};
    return kernels->kv_gather(&launch, &params);
}

static fv_merge_side side_of(const fv_tensor *out, const fv_tensor *lse)
{
    return (fv_merge_side){out->data, out->stride_bytes[0], out->stride_bytes[1],
                           lse->data, lse->stride_bytes[0], lse->stride_bytes[1]};
}

fv_status fv_merge_states(fv_device *device, const fv_tensor *out, const fv_tensor *lse, const fv_tensor *a,
                          const fv_tensor *lse_a, const fv_tensor *b, const fv_tensor *lse_b, fv_stream stream)
{
    const fv_kernel_table *kernels = kernels_of(device);
    if (!kernels) return fv_fail(FV_ERR_INVALID, "device is NULL or has no kernels");
    if (!out || out->num_dims != 3) return fv_fail(FV_ERR_INVALID, "out is NULL or has not three dimensions");
    const int64_t tokens = out->shape[0], heads = out->shape[1], elements = out->shape[2];
    fv_status status = check_rows("out", out, out->dtype, tokens, heads, elements);
    if (status == FV_OK) status = check_rows("a", a, out->dtype, tokens, heads, elements);
    if (status == FV_OK) status = check_rows("b", b, out->dtype, tokens, heads, elements);
    if (status == FV_OK) status = check_rows("lse_a", lse_a, FV_DTYPE_F32, tokens, heads, 0);
    if (status == FV_OK) status = check_rows("lse_b", lse_b, FV_DTYPE_F32, tokens, heads, 0);
    if (status == FV_OK && lse && lse->data) status = check_rows("lse", lse, FV_DTYPE_F32, tokens, heads, 0);
    if (status != FV_OK) return status;
    const int32_t has_lse = lse && lse->data;
    const fv_merge_params params = {
        .out = out->data,
        .token_stride = out->stride_bytes[0],
        .head_stride = out->stride_bytes[1],
        .lse = has_lse ? lse->data : NULL,
        .lse_token_stride = has_lse ? lse->stride_bytes[0] : 0,
        .lse_head_stride = has_lse ? lse->stride_bytes[1] : 0,
        .a = side_of(a, lse_a),
        .b = side_of(b, lse_b),
        .dtype = out->dtype,
        .num_tokens = (int32_t)tokens,
        .num_heads = (int32_t)heads,
        .head_size = (int32_t)elements,
    };
    const fv_launch launch = {device, &device->context->executor, stream};
    return kernels->merge_states(&launch, &params);
}
