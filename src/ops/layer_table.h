/* What an engine computes between its GEMMs, on a device: one table for each device that has it, used by
 * src/engine alone. Attention, cache and RMS norms in place are operations of the library (kernel_table.h).
 *
 * T rows are tokens of a step. The residual stream and what GEMMs give are fp32; what goes into GEMMs and
 * attention is bf16, rounded once. All arrays are dense and device memory. A row depends on its own inputs
 * alone, so rows of padding may hold anything. */
#ifndef FV_OPS_LAYER_TABLE_H
#define FV_OPS_LAYER_TABLE_H

#include <math.h>

#include "core/compiler.h"
#include "core/device.h"
#include "fovea/dtype.h"
#include "fovea/ops.h"

/* hidden[t] = scale * weights[tokens[t]]. */
typedef struct fv_embed_params {
    float *hidden;         /* [T, size] */
    const void *weights;   /* [num_weights, size] bf16 */
    const int32_t *tokens; /* [T]; outside the weights: a row of zeros */
    float scale;
    int32_t num_rows, size, num_weights;
} fv_embed_params;

/* The residual stream between two parts of a layer, then the RMS norm that the next part reads:
 *
 *   x = hidden[r] + added[r], or hidden[r] + norm(added[r], added_norm)      normed[t] = norm(x, weight)
 *
 * with r = t, and x goes back to hidden; or r = rows[t], and hidden stays. */
typedef struct fv_add_norm_params {
    float *hidden;           /* [T, size]; [any, size] with rows */
    const void *added;       /* [T, size], or NULL: nothing */
    fv_dtype added_dtype;    /* fp32 or bf16 */
    const float *added_norm; /* [size], or NULL */
    const float *weight;     /* [size] */
    const int32_t *rows;     /* [T], or NULL */
    void *normed;            /* [T, size] bf16 */
    float *normed_f32;       /* the same before rounding, or NULL */
    float epsilon;
    int32_t num_rows, size;
} fv_add_norm_params;

/* Heads of q and k normed where there are weights, and rotated (as ops/rope.h says); v as it is. */
typedef struct fv_split_heads_params {
    void *out;           /* [T, num_heads + 2 num_kv_heads, head_size] bf16 */
    const float *qkv;    /* the same shape: heads of q, then k, then v */
    const float *q_norm; /* [head_size], or NULL, as the next */
    const float *k_norm;
    const float *cos; /* [max_position, rope_dim / 2] */
    const float *sin;
    const int32_t *positions; /* [T]; outside the tables: not rotated */
    int64_t max_position;
    fv_rope_style style;
    int32_t rope_dim;
    float epsilon;
    int32_t num_rows, num_heads, num_kv_heads, head_size;
} fv_split_heads_params;

/* out = f(gate) * up (Shazeer, arXiv 2002.05202), f silu, or gelu in its form with tanh. */
typedef struct fv_activate_params {
    void *out;            /* [T, size] bf16 */
    const float *gate_up; /* [T, 2 size]: gate, then up */
    int32_t is_gelu;
    int32_t num_rows, size;
} fv_activate_params;

/* The experts of each token, ascending, and what their outputs are multiplied with: DeepSeekMoE and
 * DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). The router's scores of a token are the softmax or sigmoid of
 * its products with `router`; `bias` is added for choosing only, first the best groups (by their best expert, or
 * with sigmoid their two best together), then the best experts in them, of equals the first; NaN is the worst. */
typedef struct fv_route_params {
    int32_t *experts;    /* [T, num_used] */
    float *weights;      /* [T, num_used] */
    float *scratch;      /* [T, 3 num_experts] */
    const float *x;      /* [T, size] */
    const float *router; /* [num_experts, size] */
    const float *bias;   /* [num_experts], or NULL */
    float weights_scale;
    int32_t is_sigmoid;                                         /* else softmax */
    int32_t normalises;                                         /* the weights add up to 1 before they are scaled */
    int32_t num_experts, num_used, num_groups, num_used_groups; /* up to 64 groups; 1: none */
    int32_t num_rows, size;
} fv_route_params;

/* What each expert of a token makes of it: out[t][i] = down(silu(gate(x)) * up(x)) of expert experts[t][i]. */
typedef struct fv_run_experts_params {
    float *out;                 /* [T, num_used, size] */
    const void *x;              /* [T, size] bf16 */
    const int32_t *experts;     /* [T, num_used] */
    const void *const *gate_up; /* [num_experts] of [2 ffn_size, size] bf16; the pointers too are device memory */
    const void *const *down;    /* [num_experts] of [size, ffn_size] bf16 */
    int32_t num_rows, num_used, size, ffn_size, num_experts;
} fv_run_experts_params;

/* sum[t] += weights[t][i] * parts[t][i], i ascending; or sum[t] = that. */
typedef struct fv_add_experts_params {
    float *sum;           /* [T, size] */
    const float *parts;   /* [T, num_used, size] */
    const float *weights; /* [T, num_used] */
    int32_t overwrites;
    int32_t num_rows, num_used, size;
} fv_add_experts_params;

/* Element i is fv_random_weight(seed, first + i) * scale. */
typedef struct fv_fill_random_params {
    void *out; /* [count] bf16 */
    int64_t first, count;
    uint64_t seed;
    float scale;
} fv_fill_random_params;

/* Reads memory and keeps a sum of its words, so that the reading cannot be left out: the ceiling of what a
 * decode can reach. */
typedef struct fv_read_memory_params {
    const void *data; /* aligned to 16 */
    int64_t bytes;    /* a multiple of 16; the rest is left out */
    uint32_t *sum;    /* [1], added to */
} fv_read_memory_params;

/* What the kernels of a table take: a model beyond it is refused before it is loaded. */
typedef struct fv_layer_limits {
    int32_t max_row, row_step; /* sizes of add_norm: multiples of row_step up to max_row; 0: any */
    int32_t max_expert;        /* ffn_size of run_experts; 0: any */
} fv_layer_limits;

typedef struct fv_layer_table {
    fv_layer_limits limits;
    fv_status (*embed)(const fv_launch *launch, const fv_embed_params *params);
    fv_status (*add_norm)(const fv_launch *launch, const fv_add_norm_params *params);
    fv_status (*split_heads)(const fv_launch *launch, const fv_split_heads_params *params);
    fv_status (*activate)(const fv_launch *launch, const fv_activate_params *params);
    fv_status (*route)(const fv_launch *launch, const fv_route_params *params);
    fv_status (*run_experts)(const fv_launch *launch, const fv_run_experts_params *params);
    fv_status (*add_experts)(const fv_launch *launch, const fv_add_experts_params *params);
    fv_status (*fill_random)(const fv_launch *launch, const fv_fill_random_params *params);
    fv_status (*read_memory)(const fv_launch *launch, const fv_read_memory_params *params);
} fv_layer_table;

/* Number `index` of the stream `seed`: uniform in [-1, 1), the same everywhere. Mixes as in SplitMix64 (Steele et
 * al., 2014). */
FV_SHARED_INLINE float fv_random_weight(uint64_t seed, int64_t index)
{
    uint64_t bits = seed + (uint64_t)index * 0x9e3779b97f4a7c15u;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
    bits ^= bits >> 31;
    return (float)(int32_t)(bits >> 32) * 0x1p-31f;
}

/* What makes the variance of those numbers 1 / size. */
FV_SHARED_INLINE float fv_random_scale(int64_t size) { return sqrtf(3.0f / (float)size); }

/* -1 where all of scores are NaN. */
FV_SHARED_INLINE int32_t fv_best_score(const float *scores, int32_t size)
{
    int32_t best = -1;
    for (int32_t i = 0; i < size; i++) {
        if (scores[i] == scores[i] && (best < 0 || scores[i] > scores[best])) best = i;
    }
    return best;
}

/* As good as its best expert, or as its two best together; -inf where NaN. */
FV_SHARED_INLINE float fv_group_score(const float *scores, int32_t size, int32_t is_sigmoid)
{
    const int32_t best = fv_best_score(scores, size);
    if (!is_sigmoid) return scores[best];
    float second = -INFINITY;
    for (int32_t i = 0; i < size; i++) {
        if (i != best) second = fmaxf(second, scores[i]);
    }
    return scores[best] + second;
}

/* NaN where a group is not among the best; group_scores is scratch [num_groups]. */
FV_SHARED_INLINE void fv_limit_to_groups(float *choice, float *group_scores, const fv_route_params *params)
{
    const int32_t size = params->num_experts / params->num_groups;
    uint64_t used = 0;
    for (int32_t i = 0; i < params->num_groups; i++) {
        group_scores[i] = fv_group_score(choice + i * size, size, params->is_sigmoid);
    }
    for (int32_t i = 0; i < params->num_used_groups; i++) {
        int32_t best = -1;
        for (int32_t g = 0; g < params->num_groups; g++) {
            if ((used >> g & 1) == 0 && (best < 0 || group_scores[g] > group_scores[best])) best = g;
        }
        used |= (uint64_t)1 << best;
    }
    for (int32_t i = 0; i < params->num_experts; i++) {
        if ((used >> (i / size) & 1) == 0) choice[i] = NAN;
    }
}

/* The choice for one token from its scores [num_experts], softmax or sigmoid applied; `choice` is scratch
 * [2 num_experts]. */
FV_SHARED_INLINE void fv_route_token(int32_t *experts, float *weights, const float *scores, float *choice,
                                     const fv_route_params *params)
{
    for (int32_t i = 0; i < params->num_experts; i++) {
        const float score = params->bias ? scores[i] + params->bias[i] : scores[i];
        choice[i] = score == score ? score : -INFINITY;
    }
    if (params->num_groups > 1) fv_limit_to_groups(choice, choice + params->num_experts, params);
    for (int32_t i = 0; i < params->num_used; i++) {
        const int32_t best = fv_best_score(choice, params->num_experts);
        choice[best] = NAN;
        int32_t at = i; /* kept ascending */
        for (; at > 0 && experts[at - 1] > best; at--) experts[at] = experts[at - 1];
        experts[at] = best;
    }
    float sum = 1e-20f;
    for (int32_t i = 0; i < params->num_used; i++) sum += scores[experts[i]];
    const float factor = params->normalises ? params->weights_scale / sum : params->weights_scale;
    for (int32_t i = 0; i < params->num_used; i++) weights[i] = scores[experts[i]] * factor;
}

#endif
