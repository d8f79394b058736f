/* fv_rope and fv_rope_kv_write: checks, then the device's best kernel. */
#include "ops/rope.h"

#include "core/error.h"
#include "ops/ops_check.h"

static fv_status check_tables(const fv_rotation *rotation, int32_t num_tokens)
{
    if (!rotation) return fv_fail(FV_ERR_INVALID, "the rotation is NULL");
    const fv_status status = fv_check_struct_size("fv_rotation", rotation->struct_size, sizeof(*rotation));
    if (status != FV_OK) return status;
    if (rotation->style != FV_ROPE_HALF && rotation->style != FV_ROPE_INTERLEAVED) {
        return fv_fail(FV_ERR_INVALID, "style is %d; accepted: 0 (half), 1 (interleaved)", (int)rotation->style);
    }
    if (rotation->rope_dim < 2 || rotation->rope_dim % 2 != 0) {
        return fv_fail(FV_ERR_INVALID, "rope_dim is %d; accepted: even numbers from 2 to the head size",
                       rotation->rope_dim);
    }
    if (!rotation->cos || !rotation->sin || rotation->max_position < 1) {
        return fv_fail(FV_ERR_INVALID, "cos or sin is NULL or max_position is %lld; accepted: 1 or more",
                       (long long)rotation->max_position);
    }
    if (rotation->row_stride != 0 && rotation->row_stride < rotation->rope_dim / 2) {
        return fv_fail(FV_ERR_INVALID, "row_stride is %lld; accepted: 0 (dense) or %d or more",
                       (long long)rotation->row_stride, rotation->rope_dim / 2);
    }
    if (num_tokens < 0) return fv_fail(FV_ERR_INVALID, "%d tokens; accepted: 0 or more", num_tokens);
    if (num_tokens > 0 && !rotation->positions_32 == !rotation->positions_64) {
        return fv_fail(FV_ERR_INVALID, "%s of positions_32 and positions_64 are given; accepted: one of them",
                       rotation->positions_32 ? "both" : "none");
    }
    return FV_OK;
}

/* The first token whose position the tables do not have. */
static fv_status check_positions(const fv_rope_params *params)
{
    for (int32_t token = 0; token < params->num_tokens; token++) {
        if (fv_rope_position(params, token) >= 0) continue;
        const int64_t position = params->positions_64 ? params->positions_64[token] : params->positions_32[token];
        return fv_fail(FV_ERR_INVALID, "the position of token %d is %lld; accepted: 0 to %lld (max_position is %lld)",
                       token, (long long)position, (long long)params->max_position - 1,
                       (long long)params->max_position);
    }
    return FV_OK;
}

/* q or k, if given: [num_tokens or more, H, rope_dim or more]. */
static fv_status take_rows(fv_rope_rows *rows, const fv_device *device, const char *name, const fv_tensor *tensor,
                           const fv_rope_params *params)
{
    *rows = (fv_rope_rows){0};
    if (!fv_ops_is_given(tensor)) return FV_OK;
    const int64_t elements = tensor->num_dims == 3 ? tensor->shape[2] : 0;
    const fv_status status = fv_ops_check_rows(device, name, tensor, params->dtype, params->num_tokens,
                                               tensor->shape[1], elements);
    if (status != FV_OK) return status;
    if (elements < params->rope_dim) {
        return fv_fail(FV_ERR_INVALID, "rope_dim is %d and heads of %s have %lld elements; accepted: 2 to %lld",
                       params->rope_dim, name, (long long)elements, (long long)elements);
    }
    *rows = (fv_rope_rows){tensor->data, tensor->stride_bytes[0], tensor->stride_bytes[1], (int32_t)tensor->shape[1]};
    return FV_OK;
}

fv_status fv_rope_params_init(fv_rope_params *params, const fv_device *device, const fv_tensor *q, const fv_tensor *k,
                              const fv_rotation *rotation, int32_t num_tokens)
{
    fv_status status = fv_ops_check_device(device);
    if (status == FV_OK) status = check_tables(rotation, num_tokens);
    if (status != FV_OK) return status;
    if (!fv_ops_is_given(q) && !fv_ops_is_given(k)) {
        return fv_fail(FV_ERR_INVALID, "neither q nor k has data; accepted: one of them or both");
    }
    const fv_tensor *first = fv_ops_is_given(q) ? q : k;
    status = fv_ops_check_compute_dtype(fv_ops_is_given(q) ? "q" : "k", first);
    if (status != FV_OK) return status;
    *params = (fv_rope_params){
        .dtype = first->dtype,
        .style = rotation->style,
        .rope_dim = rotation->rope_dim,
        .cos = rotation->cos,
        .sin = rotation->sin,
        .row_stride = rotation->row_stride ? rotation->row_stride : rotation->rope_dim / 2,
        .max_position = rotation->max_position,
        .positions_32 = rotation->positions_32,
        .positions_64 = rotation->positions_64,
        .num_tokens = num_tokens,
    };
    status = take_rows(&params->q, device, "q", q, params);
    if (status == FV_OK) status = take_rows(&params->k, device, "k", k, params);
    if (status == FV_OK && device->host_is_device) status = check_positions(params);
    return status;
}

fv_status fv_rope(fv_device *device, const fv_tensor *q, const fv_tensor *k, const fv_rotation *rotation,
                  int32_t num_tokens, fv_stream stream)
{
    fv_rope_params params;
    fv_status status = fv_rope_params_init(&params, device, q, k, rotation, num_tokens);
    if (status == FV_OK) status = fv_ops_check_kernel(device, "rope", fv_ops_kernels(device)->rope != NULL);
    if (status != FV_OK) return status;
    const fv_launch launch = fv_ops_launch(device, stream);
    return fv_ops_kernels(device)->rope(&launch, &params);
}

fv_status fv_rope_kv_write(fv_device *device, const fv_tensor *q, const fv_tensor *k, const fv_tensor *v,
                           const fv_rotation *rotation, const fv_kv_view *cache, const int64_t *slot_mapping,
                           int32_t num_tokens, const float *k_scale, const float *v_scale, int32_t num_scales,
                           fv_stream stream)
{
    fv_rope_kv_write_params params;
    fv_status status = fv_rope_params_init(&params.rope, device, q, k, rotation, num_tokens);
    if (status == FV_OK) {
        status = fv_ops_check_write(device, cache, k, v, slot_mapping, num_tokens, k_scale, v_scale, num_scales);
    }
    if (status == FV_OK) {
        status = fv_ops_check_kernel(device, "rope_kv_write", fv_ops_kernels(device)->rope_kv_write != NULL);
    }
    if (status != FV_OK) return status;
    params.q_copy = (fv_rope_rows){0};
    params.write = (fv_kv_write_params){
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
    return fv_ops_kernels(device)->rope_kv_write(&launch, &params);
}
