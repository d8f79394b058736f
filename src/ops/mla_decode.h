/* mla_decode: absorbed multi-head latent attention on the paged latent cache: MQA with keys of
 * kv_lora_rank + rope elements whose first kv_lora_rank elements are the values.
 *
 *   s_j = scale * (q_latent . c_j + q_rope . R(pos_j) r_j);   out = softmax(s) C    [T', H, kv_lora_rank]
 *
 * with the latent c_j and the rope part r_j of the cache entry, R the rotation at the key's position
 * where keys lie unrotated (rotate_at_reading), the identity otherwise. Masks, segments, LSE and the
 * schedule are those of attend_paged with one KV head. */
#ifndef FV_OPS_MLA_DECODE_H
#define FV_OPS_MLA_DECODE_H

#include "ops/attend_paged.h"

typedef struct fv_mla_decode_params {
    fv_attend_params
        attend; /* head_size = lora + rope, v_head_size = lora, num_kv_heads 1, layout LATENT or LATENT_FP8_DS */
    int32_t rope_dim;
    const float *cos; /* [positions, rope_dim / 2] or NULL: keys are rotated already */
    const float *sin; /* half-rotation: element i pairs with i + rope_dim / 2 */
    int64_t num_positions;
} fv_mla_decode_params;

typedef fv_status (*fv_mla_decode_fn)(const fv_launch *launch, const fv_mla_decode_params *params);

#endif
