/* What the public operations check of their arguments, each with a text that names the value given and
 * the values accepted. */
#ifndef FV_OPS_OPS_CHECK_H
#define FV_OPS_OPS_CHECK_H

#include "core/context.h"
#include "ops/kernel_table.h"

/* The device's best table; NULL where it has none, or the device is NULL. */
static inline const fv_kernel_table *fv_ops_kernels(const fv_device *device)
{
    return device && device->num_tables > 0 ? device->tables[device->num_tables - 1] : NULL;
}

static inline fv_launch fv_ops_launch(fv_device *device, fv_stream stream)
{
    return (fv_launch){device, &device->context->executor, stream};
}

/* FV_ERR_INVALID: the device is NULL or has no table. */
fv_status fv_ops_check_device(const fv_device *device);

/* FV_ERR_UNSUPPORTED: the device has no kernel for an operation; `has_kernel` is 0. */
fv_status fv_ops_check_kernel(const fv_device *device, const char *operation, int32_t has_kernel);

/* A tensor [rows >= num_rows, heads, elements] with dense elements, or [rows >= num_rows, heads] where
 * `elements` is 0. Kernels count in int32_t: no size is above INT32_MAX. */
fv_status fv_ops_check_rows(const fv_device *device, const char *name, const fv_tensor *tensor, fv_dtype dtype,
                            int64_t num_rows, int64_t heads, int64_t elements);

/* On devices other than the CPU, whose kernels fault otherwise: data and those strides that count are multiples of
 * the element, of entries of FV_KV_LAYOUT_LATENT_FP8_DS of 4. fv_ops_check_rows and _cache_rows see to it. */
fv_status fv_ops_check_alignment(const fv_device *device, const char *name, const fv_tensor *tensor);
fv_status fv_ops_check_cache_alignment(const fv_device *device, const fv_kv_view *cache);

/* fp32, fp16 or bf16. */
fv_status fv_ops_check_compute_dtype(const char *name, const fv_tensor *tensor);

/* A view with data, a struct_size of this library, and a dtype and sizes that kernels serve. */
fv_status fv_ops_check_cache(const fv_kv_view *cache);

/* k and v rows that go to the cache, or come from it, with their scales. Latents need neither v nor its scale. */
fv_status fv_ops_check_cache_rows(const fv_device *device, const fv_kv_view *cache, const fv_tensor *k,
                                  const fv_tensor *v, int32_t num_rows, const float *k_scale, const float *v_scale,
                                  int32_t num_scales);

/* The cache's scale planes, where it has them, can be written. */
fv_status fv_ops_check_scale_planes(const fv_kv_view *cache);

/* The cache has the slot of a token, or the slot is negative. */
fv_status fv_ops_check_slot(const fv_kv_view *cache, int64_t slot, int32_t token);

/* Rows, scale planes and, where the host can read them, slots of a write. */
fv_status fv_ops_check_write(const fv_device *device, const fv_kv_view *cache, const fv_tensor *k, const fv_tensor *v,
                             const int64_t *slot_mapping, int32_t num_tokens, const float *k_scale,
                             const float *v_scale, int32_t num_scales);

/* What is gathered, and where from: lengths and block ids too, where the host can read them. */
fv_status fv_ops_check_gather(const fv_device *device, const fv_kv_view *cache, const fv_batch *batch,
                              const int32_t *key_start, const int32_t *out_start, int32_t num_rows);

/* Initialisers of the rows of fv_kv_write_params and fv_kv_gather_params. */
#define FV_OPS_KV_ROWS(k_tensor, v_tensor)                                \
    .k = (k_tensor)->data, .k_token_stride = (k_tensor)->stride_bytes[0], \
    .k_head_stride = (k_tensor)->stride_bytes[1], .v = (v_tensor)->data,  \
    .v_token_stride = (v_tensor)->stride_bytes[0], .v_head_stride = (v_tensor)->stride_bytes[1]

/* Absent tensors: NULL, or without data. */
static inline int32_t fv_ops_is_given(const fv_tensor *tensor) { return tensor && tensor->data; }

/* `tensor`, or one without data in its place. */
static inline const fv_tensor *fv_ops_or_absent(const fv_tensor *tensor)
{
    static const fv_tensor absent;
    return tensor ? tensor : &absent;
}

#endif
