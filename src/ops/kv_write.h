/* kv_write: new K and V rows into the paged cache; kv_gather: cached keys and values to dense rows. In the
 * latent layouts there is one head, the value is the start of the key, and v is not read or written.
 *
 * Where the cache has scale planes, kv_write computes the scale of each (token, head) and stores it:
 *
 *   scale = max(largest |real| / LIMIT, 1e-6)    LIMIT: int8 127, e4m3 448, e5m2 57344
 *   stored = round(real / scale)                 int8: half away from zero, within +-127
 *
 * An infinite or NaN element does not count for the scale: infinity becomes +-LIMIT, NaN stays NaN in
 * fp8 and becomes 0 in int8, and the rest of the row is what it would be without them. Scales given for
 * the head as well (k_scale) divide first. All kernels give the same bits. */
#ifndef FV_OPS_KV_WRITE_H
#define FV_OPS_KV_WRITE_H

#include "core/compiler.h"
#include "core/device.h"
#include "fovea/view.h"
#include "ops/key_rotation.h"

typedef struct fv_kv_write_params {
    const void *k; /* [T', Hkv, D] src_dtype, strides in bytes, last dimension dense */
    int64_t k_token_stride, k_head_stride;
    const void *v; /* [T', Hkv, Dv] */
    int64_t v_token_stride, v_head_stride;
    fv_dtype src_dtype;
    fv_kv_view cache;
    const int64_t *slot_mapping; /* [T]; negative: skip; at or past num_blocks * block_size: skip */
    int32_t num_tokens;
    const int32_t *num_tokens_at; /* where the kernel reads the number, at most num_tokens; NULL: num_tokens */
    const float *k_scale;         /* stored = real / scale; [num_kv_scales] or NULL */
    const float *v_scale;
    int32_t num_kv_scales; /* 0 none, 1 per tensor, Hkv per head */
} fv_kv_write_params;

/* Rows to write, read where the kernel runs. */
FV_SHARED_INLINE int32_t fv_kv_write_tokens(const fv_kv_write_params *params)
{
    return params->num_tokens_at ? fv_min_i32(*params->num_tokens_at, params->num_tokens) : params->num_tokens;
}

typedef fv_status (*fv_kv_write_fn)(const fv_launch *launch, const fv_kv_write_params *params);

typedef struct fv_kv_gather_params {
    void *k; /* [N, Hkv, D] dst_dtype */
    int64_t k_token_stride, k_head_stride;
    void *v;
    int64_t v_token_stride, v_head_stride;
    fv_dtype dst_dtype;
    fv_kv_view cache;
    int32_t num_seqs;
    const int32_t *block_table;
    int64_t block_table_stride;
    int32_t block_table_width;
    const int32_t *key_start; /* [R] first key of each sequence */
    const int32_t *out_start; /* [R + 1] rows */
    int32_t num_rows;         /* out_start[R] */
    const float *k_scale;
    const float *v_scale;
    int32_t num_kv_scales;
    fv_context_parallel context_parallel; /* for the positions of local keys; world 0 or 1: none */
    fv_key_rotation rotation;             /* latent layouts: keys leave rotated */
} fv_kv_gather_params;

/* The sequence that owns row `row`: the last one with out_start[seq] <= row. */
FV_SHARED_INLINE int32_t fv_kv_gather_seq(const fv_kv_gather_params *params, int32_t row)
{
    int32_t low = 0, high = params->num_seqs;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (params->out_start[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

typedef fv_status (*fv_kv_gather_fn)(const fv_launch *launch, const fv_kv_gather_params *params);

#endif
