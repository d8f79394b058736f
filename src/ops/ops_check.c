/* The checks that the public operations share. */
#include "ops/ops_check.h"

#include "core/error.h"
#include "kvcache/latent_entry.h"

fv_status fv_ops_check_device(const fv_device *device)
{
    return fv_ops_kernels(device) ? FV_OK : fv_fail(FV_ERR_INVALID, "device is NULL or has no kernels");
}

fv_status fv_ops_check_kernel(const fv_device *device, const char *operation, int32_t has_kernel)
{
    if (has_kernel) return FV_OK;
    return fv_fail(FV_ERR_UNSUPPORTED, "device %s has no %s", device->name, operation);
}

/* What kernels count in int32_t. */
static fv_status check_extents(const char *name, const fv_tensor *tensor, int32_t num_dims)
{
    for (int32_t i = 0; i < num_dims; i++) {
        if (tensor->shape[i] >= 0 && tensor->shape[i] <= INT32_MAX) continue;
        return fv_fail(FV_ERR_INVALID, "dimension %d of %s is %lld; accepted: 0 to %d", i, name,
                       (long long)tensor->shape[i], INT32_MAX);
    }
    return FV_OK;
}

static fv_status check_address(const fv_device *device, const char *name, const void *data, int64_t bytes)
{
    if ((uintptr_t)data % (uintptr_t)bytes == 0) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "%s is at %p; accepted on %s: multiples of %d bytes", name, data, device->name,
                   (int)bytes);
}

static fv_status check_stride(const fv_device *device, const char *name, int64_t stride, int64_t bytes)
{
    if (stride % bytes == 0) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "%s has a stride of %lld bytes; accepted on %s: multiples of %d", name,
                   (long long)stride, device->name, (int)bytes);
}

fv_status fv_ops_check_alignment(const fv_device *device, const char *name, const fv_tensor *tensor)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(tensor->dtype);
    if (device->host_is_device || bytes == 0) return FV_OK; /* what is no dtype is refused by the product */
    fv_status status = check_address(device, name, tensor->data, bytes);
    for (int32_t i = 0; i < tensor->num_dims && status == FV_OK; i++) {
        if (tensor->shape[i] > 1) status = check_stride(device, name, tensor->stride_bytes[i], bytes);
    }
    return status;
}

static fv_status check_plane_alignment(const fv_device *device, const char *name, const fv_kv_view *cache,
                                       const fv_kv_plane *plane)
{
    const int32_t is_ds = cache->layout == FV_KV_LAYOUT_LATENT_FP8_DS; /* its scales are fp32 */
    const int64_t bytes = is_ds ? (int64_t)sizeof(float) : (int64_t)fv_dtype_bytes(cache->dtype);
    const int64_t strides[] = {
        cache->num_blocks > 1 ? plane->block_stride : 0,
        cache->num_kv_heads > 1 ? plane->head_stride : 0,
        cache->block_size > 1 ? plane->slot_stride : 0,
        is_ds ? 0 : plane->element_stride,
        plane->slot_chunk > 0 ? plane->slot_chunk_stride : 0,
        plane->element_chunk > 0 ? plane->element_chunk_stride : 0,
    };
    fv_status status = check_address(device, name, plane->data, bytes);
    for (int32_t i = 0; i < FV_ARRAY_LEN(strides) && status == FV_OK; i++)
        status = check_stride(device, name, strides[i], bytes);
    return status;
}

fv_status fv_ops_check_cache_alignment(const fv_device *device, const fv_kv_view *cache)
{
    if (device->host_is_device) return FV_OK;
    const fv_status status = check_plane_alignment(device, "K of the KV cache", cache, &cache->k);
    return status == FV_OK ? check_plane_alignment(device, "V of the KV cache", cache, &cache->v) : status;
}

fv_status fv_ops_check_rows(const fv_device *device, const char *name, const fv_tensor *tensor, fv_dtype dtype,
                            int64_t num_rows, int64_t heads, int64_t elements)
{
    if (!fv_ops_is_given(tensor)) return fv_fail(FV_ERR_INVALID, "%s has no data", name);
    const int32_t num_dims = elements ? 3 : 2;
    const int64_t last = tensor->num_dims == 3 ? tensor->shape[2] : 0;
    if (tensor->dtype != dtype || tensor->num_dims != num_dims || tensor->shape[0] < num_rows ||
        tensor->shape[1] != heads || last != elements) {
        return fv_fail(FV_ERR_INVALID, "%s is %s [%lld, %lld, %lld]; accepted: %s [%lld or more, %lld, %lld]", name,
                       fv_dtype_name(tensor->dtype), (long long)tensor->shape[0], (long long)tensor->shape[1],
                       (long long)last, fv_dtype_name(dtype), (long long)num_rows, (long long)heads,
                       (long long)elements);
    }
    const fv_status status = check_extents(name, tensor, num_dims);
    if (status != FV_OK) return status;
    if (elements && tensor->stride_bytes[2] != (int64_t)fv_dtype_bytes(dtype)) {
        return fv_fail(FV_ERR_INVALID, "the last stride of %s is %lld bytes; accepted: %zu (dense)", name,
                       (long long)tensor->stride_bytes[2], fv_dtype_bytes(dtype));
    }
    return fv_ops_check_alignment(device, name, tensor);
}

fv_status fv_ops_check_compute_dtype(const char *name, const fv_tensor *tensor)
{
    const fv_dtype dtype = tensor ? tensor->dtype : FV_DTYPE_NONE;
    if (dtype == FV_DTYPE_F32 || dtype == FV_DTYPE_F16 || dtype == FV_DTYPE_BF16) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "%s is %s; accepted: float32, float16, bfloat16", name, fv_dtype_name(dtype));
}

/* Entries of MLA, whose values are the first elements of their keys. */
static fv_status check_latents(const fv_kv_view *cache)
{
    if (!fv_kv_layout_is_latent(cache->layout)) return FV_OK;
    if (cache->num_kv_heads != 1 || cache->v_head_size > cache->head_size) {
        return fv_fail(
            FV_ERR_INVALID,
            "the KV cache has layout %s, %d heads of %d elements, %d of them values; accepted: 1 head, values "
            "of up to all elements",
            fv_kv_layout_name(cache->layout), cache->num_kv_heads, cache->head_size, cache->v_head_size);
    }
    if (cache->layout != FV_KV_LAYOUT_LATENT_FP8_DS ||
        (cache->dtype == FV_DTYPE_F8_E4M3 && cache->head_size == FV_DS_LATENT + FV_DS_ROPE &&
         cache->v_head_size == FV_DS_LATENT)) {
        return FV_OK;
    }
    return fv_fail(FV_ERR_INVALID,
                   "the KV cache has layout latent_fp8_ds, %s entries of %d elements, %d of them values; accepted: "
                   "fp8_e4m3 of %d, %d of them values",
                   fv_dtype_name(cache->dtype), cache->head_size, cache->v_head_size, FV_DS_LATENT + FV_DS_ROPE,
                   FV_DS_LATENT);
}

fv_status fv_ops_check_cache(const fv_kv_view *cache)
{
    if (!cache) return fv_fail(FV_ERR_INVALID, "the KV cache view is NULL");
    const fv_status status = fv_check_struct_size("fv_kv_view", cache->struct_size, sizeof(*cache));
    if (status != FV_OK) return status;
    if (!cache->k.data || !cache->v.data) return fv_fail(FV_ERR_INVALID, "the KV cache has no data");
    if (fv_dtype_bytes(cache->dtype) == 0) {
        return fv_fail(FV_ERR_INVALID, "the KV cache has dtype %d; accepted: the values of fv_dtype but 0 (none)",
                       (int)cache->dtype);
    }
    if (cache->block_size < 1 || cache->num_blocks < 0 || cache->num_kv_heads < 1 || cache->head_size < 1 ||
        cache->v_head_size < 1) {
        return fv_fail(
            FV_ERR_INVALID,
            "the KV cache has %lld blocks of %d tokens, %d heads of %d and %d elements; accepted: 0 or more of "
            "1 or more",
            (long long)cache->num_blocks, cache->block_size, cache->num_kv_heads, cache->head_size, cache->v_head_size);
    }
    return check_latents(cache);
}

fv_status fv_ops_check_cache_rows(const fv_device *device, const fv_kv_view *cache, const fv_tensor *k,
                                  const fv_tensor *v, int32_t num_rows, const float *k_scale, const float *v_scale,
                                  int32_t num_scales)
{
    fv_status status = fv_ops_check_cache(cache);
    if (status == FV_OK) status = fv_ops_check_cache_alignment(device, cache);
    if (status != FV_OK) return status;
    if (num_rows < 0) return fv_fail(FV_ERR_INVALID, "%d rows; accepted: 0 or more", num_rows);
    if (num_scales != 0 && num_scales != 1 && num_scales != cache->num_kv_heads) {
        return fv_fail(FV_ERR_INVALID, "num_scales is %d; accepted: 0, 1 or %d (one for each KV head)", num_scales,
                       cache->num_kv_heads);
    }
    const int32_t is_latent = fv_kv_layout_is_latent(cache->layout);
    if (num_scales && (!k_scale || (!v_scale && !is_latent))) {
        return fv_fail(FV_ERR_INVALID, "k_scale or v_scale is NULL");
    }
    status = fv_ops_check_compute_dtype("k", k);
    if (status != FV_OK) return status;
    status = fv_ops_check_rows(device, "k", k, k->dtype, num_rows, cache->num_kv_heads, cache->head_size);
    if (status != FV_OK || (is_latent && !fv_ops_is_given(v))) return status;
    return fv_ops_check_rows(device, "v", v, k->dtype, num_rows, cache->num_kv_heads, cache->v_head_size);
}

/* Two tokens or heads that share a scale would overwrite each other's. */
static fv_status check_scale_plane(const char *name, const fv_kv_view *cache, const fv_scale_plane *plane)
{
    if (!plane->data) return FV_OK;
    if (cache->dtype != FV_DTYPE_I8 && cache->dtype != FV_DTYPE_F8_E4M3 && cache->dtype != FV_DTYPE_F8_E5M2) {
        return fv_fail(FV_ERR_INVALID, "%s of a cache of %s; accepted: int8, fp8_e4m3, fp8_e5m2", name,
                       fv_dtype_name(cache->dtype));
    }
    if ((plane->slot_stride == 0 && cache->block_size > 1) || (plane->head_stride == 0 && cache->num_kv_heads > 1) ||
        (plane->block_stride == 0 && cache->num_blocks > 1)) {
        return fv_fail(FV_ERR_INVALID,
                       "%s has strides of %lld (block), %lld (slot) and %lld (head) bytes; accepted for a write: none "
                       "of them 0",
                       name, (long long)plane->block_stride, (long long)plane->slot_stride,
                       (long long)plane->head_stride);
    }
    return FV_OK;
}

fv_status fv_ops_check_scale_planes(const fv_kv_view *cache)
{
    const fv_status status = check_scale_plane("k_scales", cache, &cache->k_scales);
    return status == FV_OK ? check_scale_plane("v_scales", cache, &cache->v_scales) : status;
}

fv_status fv_ops_check_slot(const fv_kv_view *cache, int64_t slot, int32_t token)
{
    const int64_t num_slots = cache->num_blocks * cache->block_size;
    if (slot < num_slots) return FV_OK;
    return fv_fail(FV_ERR_INVALID,
                   "slot_mapping[%d] is %lld; accepted: up to %lld, the KV cache's last slot, or negative "
                   "(not written)",
                   token, (long long)slot, (long long)num_slots - 1);
}

fv_status fv_ops_check_write(const fv_device *device, const fv_kv_view *cache, const fv_tensor *k, const fv_tensor *v,
                             const int64_t *slot_mapping, int32_t num_tokens, const float *k_scale,
                             const float *v_scale, int32_t num_scales)
{
    fv_status status = fv_ops_check_cache_rows(device, cache, k, v, num_tokens, k_scale, v_scale, num_scales);
    if (status == FV_OK) status = fv_ops_check_scale_planes(cache);
    if (status == FV_OK && num_tokens > 0 && !slot_mapping) status = fv_fail(FV_ERR_INVALID, "slot_mapping is NULL");
    for (int32_t token = 0; token < num_tokens && status == FV_OK && device->host_is_device; token++) {
        status = fv_ops_check_slot(cache, slot_mapping[token], token);
    }
    return status;
}

/* The blocks of keys [first, end) of sequence `seq`. */
static fv_status check_blocks(const fv_kv_view *cache, const fv_batch *batch, int32_t seq, int64_t first, int64_t end)
{
    const int32_t *row = batch->block_table + seq * batch->block_table_stride;
    if (first < 0 || fv_ceil_div(end, cache->block_size) > batch->block_table_width) {
        return fv_fail(FV_ERR_INVALID, "keys %lld to %lld of sequence %d; accepted: from 0, in %d blocks of %d tokens",
                       (long long)first, (long long)end, seq, batch->block_table_width, cache->block_size);
    }
    for (int64_t i = first / cache->block_size; i < fv_ceil_div(end, cache->block_size); i++) {
        if (row[i] >= 1 && row[i] < cache->num_blocks) continue;
        return fv_fail(FV_ERR_INVALID, "block_table[%d][%lld] is %d; accepted: 1 to %lld (0 is the null block)", seq,
                       (long long)i, row[i], (long long)cache->num_blocks - 1);
    }
    return FV_OK;
}

fv_status fv_ops_check_gather(const fv_device *device, const fv_kv_view *cache, const fv_batch *batch,
                              const int32_t *key_start, const int32_t *out_start, int32_t num_rows)
{
    if (!batch) return fv_fail(FV_ERR_INVALID, "the batch is NULL");
    fv_status status = fv_check_struct_size("fv_batch", batch->struct_size, sizeof(*batch));
    if (status != FV_OK) return status;
    if (batch->num_seqs < 0 || batch->block_table_width < 0 || batch->block_table_stride < batch->block_table_width) {
        return fv_fail(FV_ERR_INVALID,
                       "%d sequences, block_table_stride %lld and width %d; accepted: 0 or more, 0 <= width <= stride",
                       batch->num_seqs, (long long)batch->block_table_stride, batch->block_table_width);
    }
    if (batch->num_seqs == 0 && num_rows == 0) return FV_OK;
    if (!batch->block_table || !key_start || !out_start) {
        return fv_fail(FV_ERR_INVALID, "the batch's block_table, key_start or out_start is NULL");
    }
    if (!device->host_is_device) return FV_OK;
    if (out_start[0] != 0 || out_start[batch->num_seqs] != num_rows) {
        return fv_fail(FV_ERR_INVALID, "out_start goes from %d to %d; accepted: from 0 to the %d rows", out_start[0],
                       out_start[batch->num_seqs], num_rows);
    }
    for (int32_t seq = 0; seq < batch->num_seqs; seq++) {
        const int64_t num_keys = (int64_t)out_start[seq + 1] - out_start[seq];
        if (num_keys < 0) {
            return fv_fail(FV_ERR_INVALID, "out_start[%d] is %d after %d; it must not fall", seq + 1,
                           out_start[seq + 1], out_start[seq]);
        }
        const int64_t first = key_start[seq];
        status = num_keys > 0 ? check_blocks(cache, batch, seq, first, first + num_keys) : FV_OK;
        if (status != FV_OK) return status;
    }
    return FV_OK;
}
