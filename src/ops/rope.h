/* rope: rotary position embedding of q and k in place; rope_kv_write: the same, the rotated k with its v into
 * the cache, and the rotated q where it is wanted a second time.
 *
 * RoFormer (arXiv 2104.09864), equation 34, for each pair (a, b) of a head at position p, with
 * c = cos[p][i] and s = sin[p][i] of pair i in [0, rope_dim / 2):
 *
 *   a' = a c - b s        half (GPT-NeoX):          a = x[i],   b = x[i + rope_dim / 2]
 *   b' = b c + a s        interleaved (GPT-J):      a = x[2 i], b = x[2 i + 1]
 *
 * in fp32, rounded once to the tensors' dtype. What is written to the cache is the rounded k', so that
 * rope_kv_write gives the bits of rope followed by kv_write. */
#ifndef FV_OPS_ROPE_H
#define FV_OPS_ROPE_H

#include "core/compiler.h"
#include "fovea/ops.h"
#include "ops/kv_write.h"

typedef struct fv_rope_rows {
    void *data; /* [T', H, rope_dim or more], strides in bytes, last dimension dense; NULL: none */
    int64_t token_stride, head_stride;
    int32_t num_heads;
} fv_rope_rows;

typedef struct fv_rope_params {
    fv_rope_rows q, k;
    fv_dtype dtype; /* of both */
    fv_rope_style style;
    int32_t rope_dim;
    const float *cos;   /* [max_position, rope_dim / 2] */
    const float *sin;   /* the same */
    int64_t row_stride; /* of both, in elements */
    int64_t max_position;
    const int32_t *positions_32; /* [T], or NULL and then positions_64; a token whose position is outside */
    const int64_t *positions_64; /* [0, max_position) is not rotated */
    int32_t num_tokens;
    const int32_t *num_tokens_at; /* where the kernel reads the number, at most num_tokens; NULL: num_tokens */
} fv_rope_params;

typedef struct fv_rope_kv_write_params {
    fv_rope_params rope;      /* k is write.k, or a part of each of its heads, or none; its num_tokens count */
    fv_kv_write_params write; /* num_tokens and num_tokens_at as in rope */
    fv_rope_rows q_copy;      /* gets rope_dim elements of each head of q, rotated or not; overlaps nothing */
} fv_rope_kv_write_params;

/* Tokens to rotate, read where the kernel runs. */
FV_SHARED_INLINE int32_t fv_rope_tokens(const fv_rope_params *params)
{
    return params->num_tokens_at ? fv_min_i32(*params->num_tokens_at, params->num_tokens) : params->num_tokens;
}

/* Position of a token; -1: outside the tables. */
FV_SHARED_INLINE int64_t fv_rope_position(const fv_rope_params *params, int64_t token)
{
    const int64_t position = params->positions_64 ? params->positions_64[token] : params->positions_32[token];
    return position >= 0 && position < params->max_position ? position : -1;
}

/* The parameters of fv_rope for these tensors, checked as fv_rope checks them. */
fv_status fv_rope_params_init(fv_rope_params *params, const fv_device *device, const fv_tensor *q, const fv_tensor *k,
                              const fv_rotation *rotation, int32_t num_tokens);

typedef fv_status (*fv_rope_fn)(const fv_launch *launch, const fv_rope_params *params);
typedef fv_status (*fv_rope_kv_write_fn)(const fv_launch *launch, const fv_rope_kv_write_params *params);

#endif
