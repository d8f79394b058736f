/* Positions of local keys under context parallelism, and the rotation of keys at reading. */
#ifndef FV_OPS_KEY_ROTATION_H
#define FV_OPS_KEY_ROTATION_H

#include "core/compiler.h"
#include "fovea/problem.h"

/* The last rope_dim elements of each key are rotated by the tables' row of its global position; half
 * rotation, element i pairs with i + rope_dim / 2. */
typedef struct fv_key_rotation {
    const float *cos; /* [num_positions, rope_dim / 2]; NULL: keys are rotated already */
    const float *sin;
    int32_t rope_dim;
    int64_t num_positions;
} fv_key_rotation;

/* Number of this rank's keys whose global position is below `position` (vLLM: local sequence length
 * under decode context parallelism). */
FV_SHARED_INLINE int32_t fv_local_keys(const fv_context_parallel *cp, int64_t position)
{
    if (position <= 0) return 0;
    if (cp->world <= 1) return (int32_t)position;
    const int64_t run = cp->interleave;
    const int64_t round = run * cp->world;
    int64_t rest = position % round - (int64_t)cp->rank * run;
    if (rest < 0) rest = 0;
    if (rest > run) rest = run;
    return (int32_t)(position / round * run + rest);
}

/* Global position of local key `key`. */
FV_SHARED_INLINE int64_t fv_key_position(const fv_context_parallel *cp, int64_t key)
{
    if (cp->world <= 1) return key;
    const int64_t run = cp->interleave;
    return key / run * run * cp->world + (int64_t)cp->rank * run + key % run;
}

#endif
