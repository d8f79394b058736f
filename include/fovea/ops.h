/* Operations on their own, for engines that compose their own strategy. Arrays and tensors are where
 * the device runs; calls go to `stream` in order. */
#ifndef FOVEA_OPS_H
#define FOVEA_OPS_H

#include "fovea/batch.h"
#include "fovea/device.h"
#include "fovea/view.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes num_tokens rows of k [T, Hkv, D] and v [T, Hkv, Dv] to the cache; slot_mapping [T] int64,
 * a negative slot is skipped. fp8: stored = real / scale; k_scale, v_scale [num_scales], num_scales 0
 * (no scales), 1 or Hkv. */
FV_API fv_status fv_kv_write(fv_device *device, const fv_kv_view *cache, const fv_tensor *k, const fv_tensor *v,
                             const int64_t *slot_mapping, int32_t num_tokens, const float *k_scale,
                             const float *v_scale, int32_t num_scales, fv_stream stream);

/* Copies cached tokens to dense rows: for each sequence r, key positions key_start[r] .. key_start[r]
 * + (out_start[r + 1] - out_start[r]) - 1 go to rows from out_start[r] of k [N, Hkv, D] and v. fp8 is
 * read back with the scales. Only block_table, block_table_stride, block_table_width and num_seqs of
 * the batch are used. */
FV_API fv_status fv_kv_gather(fv_device *device, const fv_tensor *k, const fv_tensor *v, const fv_kv_view *cache,
                              const fv_batch *batch, const int32_t *key_start, const int32_t *out_start,
                              int32_t num_rows, const float *k_scale, const float *v_scale, int32_t num_scales,
                              fv_stream stream);

/* Merges two partial results of the same rows by their LSE (FlashAttention-style online softmax):
 *
 *   m = max(la, lb);  out = (e^(la-m) a + e^(lb-m) b) / (e^(la-m) + e^(lb-m));  lse = m + ln(...)
 *
 * out, a, b [T, H, D] and lse, lse_a, lse_b [T, H] fp32 (lse may be absent). An LSE of -inf, +inf or
 * NaN marks a side without keys; with both sides empty out is 0 and lse -inf. out may be a or b. */
FV_API fv_status fv_merge_states(fv_device *device, const fv_tensor *out, const fv_tensor *lse, const fv_tensor *a,
                                 const fv_tensor *lse_a, const fv_tensor *b, const fv_tensor *lse_b, fv_stream stream);

#ifdef __cplusplus
}
#endif
#endif
