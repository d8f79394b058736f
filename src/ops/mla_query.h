/* mla_query: queries of an MLA layer from what goes into their product to what attends latents, and rope_kv_write of the
 * new keys beside it. In the words of fovea/mla.h, for each head h of a row t:
 *
 *   q = x[t] q_up[h]^T [P + R]        out[t][h] = [ q_nope W_UK[h] | q_rope, rotated ]   [L + R]
 *
 * q_nope is rounded to dtype before its product, as where q is written to memory; q_rope is rotated in fp32 before it is
 * rounded. A step of its own, where a device has it: others make it of two products and rope_kv_write. */
#ifndef FV_OPS_MLA_QUERY_H
#define FV_OPS_MLA_QUERY_H

#include "ops/rope.h"

typedef struct fv_mla_query_params {
    const void *x; /* [num_rows, depth] */
    int64_t x_row_stride;
    const void *q_up; /* [H (P + R), depth] */
    int64_t q_up_row_stride;
    const void *kv_up; /* [H, P or more, L]: the first P rows of a head are its W_UK */
    int64_t kv_up_row_stride, kv_up_head_stride;
    void *out;      /* [num_rows, H, L + R], dense; overlaps nothing */
    fv_dtype dtype; /* of all five */
    int32_t num_rows, num_heads, depth;
    int32_t nope_size, rope_size, latent_size; /* P, R, L */
    fv_rope_kv_write_params keys;              /* without q; its rope says how queries are rotated */
} fv_mla_query_params;

typedef struct fv_mla_query_step {
    /* NULL, or why `run` does not take them; NULL, or why it would be no faster than the products. */
    const char *(*why_not)(const fv_launch *launch, const fv_mla_query_params *params);
    const char *(*slower)(const fv_launch *launch, const fv_mla_query_params *params);
    fv_status (*run)(const fv_launch *launch, const fv_mla_query_params *params);
} fv_mla_query_step;

#endif
