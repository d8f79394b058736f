/* Row groups: R = 1, 2 or 4 rows of one KV head that share each key, and their online softmax.
 *
 * Scores of a tile come in vectors of 8 / R keys:
 *
 *     key 0: row 0 .. R - 1 | key 1: row 0 .. R - 1 | ...
 *
 * Every step of the softmax is then a vertical one, and the lane of a score depends on nothing but
 * its row and its key's place in the tile. */
#ifndef FV_KERNELS_CPU_ROW_GROUP_H
#define FV_KERNELS_CPU_ROW_GROUP_H

#include "kernels/cpu/attend_item.h"

/* Lane i belongs to row i % R; rows that pad the last group repeat the last. */
typedef struct fv_row_group {
    fv_f32x8 max;        /* running, of the lane's row */
    fv_f32x8 sum;        /* of this lane's keys only */
    fv_f32x8 excess;     /* what rounding has made of sum beyond what was added */
    fv_i32x8 first, end; /* keys that the lane's row sees */
    fv_f32x8 slope;      /* ALiBi, times log2(e) */
    fv_i32x8 position;   /* global, of the lane's query token */
    fv_key_range some;   /* keys that some row sees */
    fv_key_range all;    /* keys that all rows see */
} fv_row_group;

/* A call of the softmax: which keys of which group. */
typedef struct fv_softmax_span {
    const fv_attend_job *job;
    const float *k_scales; /* of the tile's keys, or NULL */
    const float *v_scales;
    int32_t first_key;  /* of the tile */
    int32_t first, end; /* keys, from the tile's first */
    int32_t first_row;  /* of the group */
    int32_t is_edge;    /* some lane of the vectors is not to be seen */
    fv_score_scale scale;
    float weight_factor; /* of all weights, a power of two */
} fv_softmax_span;

static inline int32_t fv_rows_in_group(int32_t num_rows) { return num_rows <= 2 ? num_rows : 4; }

static inline void fv_row_group_init(fv_row_group *group, const fv_attend_job *job, int32_t kv_head, int32_t first_row,
                                     int32_t num_rows)
{
    group->max = fv_splat(-INFINITY);
    group->sum = fv_splat(0.0f);
    group->excess = fv_splat(0.0f);
    group->slope = fv_splat(0.0f);
    group->some = (fv_key_range){INT32_MAX, 0};
    group->all = (fv_key_range){0, fv_attend_tree_first(job)};
    for (int32_t i = 0; i < FV_LANES; i++) {
        const int32_t row = fv_min_i32(first_row + i % num_rows, job->num_rows - 1);
        const fv_key_range keys = fv_attend_row_keys(job, row);
        group->first[i] = keys.first;
        group->end[i] = keys.end;
        group->position[i] = (int32_t)(job->context + job->item->first_token + row / job->group);
        if (job->params->alibi != FV_ALIBI_NONE) {
            group->slope[i] = job->params->alibi_slopes[kv_head * job->group + row % job->group] * FV_LOG2E;
        }
        group->some.first = fv_min_i32(group->some.first, keys.first);
        group->some.end = fv_max_i32(group->some.end, keys.end);
        group->all.first = fv_max_i32(group->all.first, keys.first);
        group->all.end = fv_min_i32(group->all.end, keys.end);
    }
}

/* --- the lanes of a vector of scores ---------------------------------------------------------------- */

/* The lane's key, counted from the first key of the vector. */
FV_ALWAYS_INLINE fv_i32x8 fv_lane_keys(const int32_t num_rows)
{
    fv_i32x8 keys;
    for (int32_t i = 0; i < FV_LANES; i++) keys[i] = i / num_rows;
    return keys;
}

FV_ALWAYS_INLINE fv_f32x8 fv_lane_values(const float *of_keys, const int32_t num_rows)
{
#if defined(__AVX2__)
    if (num_rows == 4) { /* GCC puts the lanes together one by one */
        double keys;
        memcpy(&keys, of_keys, sizeof(keys));
        const fv_f32x8 pairs = (fv_f32x8)_mm256_set1_pd(keys);
        return __builtin_shufflevector(pairs, pairs, 0, 0, 0, 0, 5, 5, 5, 5);
    }
    if (num_rows == 2) {
        fv_f32x4 keys;
        memcpy(&keys, of_keys, sizeof(keys));
        return __builtin_shufflevector(keys, keys, 0, 0, 1, 1, 2, 2, 3, 3);
    }
    if (num_rows == 1) return fv_load_f32(of_keys);
#endif
    fv_f32x8 values;
    for (int32_t i = 0; i < FV_LANES; i++) values[i] = of_keys[i / num_rows];
    return values;
}

FV_ALWAYS_INLINE fv_i32x8 fv_lane_positions(const fv_context_parallel *context_parallel, fv_i32x8 keys)
{
    if (context_parallel->world <= 1) return keys;
    for (int32_t i = 0; i < FV_LANES; i++) keys[i] = (int32_t)fv_key_position(context_parallel, keys[i]);
    return keys;
}

static inline fv_i32x8 fv_lane_tree_visible(const fv_attend_job *job, int32_t first_row, int32_t num_rows,
                                            fv_i32x8 positions)
{
    fv_i32x8 visible;
    for (int32_t i = 0; i < FV_LANES; i++) {
        const int32_t row = fv_min_i32(first_row + i % num_rows, job->num_rows - 1);
        visible[i] = -fv_attend_tree_sees(job, row, positions[i]);
    }
    return visible;
}

/* --- softmax ------------------------------------------------------------------------------------------- */

/* One vector of scores after mask and ALiBi. Lanes of the vector whose keys lie beyond the span are masked too: they
 * are another span's. */
FV_ALWAYS_INLINE fv_f32x8 fv_row_group_mask(fv_f32x8 score, const fv_row_group *group, const fv_softmax_span *span,
                                            int32_t first_key, const int32_t num_rows)
{
    const fv_attend_params *params = span->job->params;
    const fv_i32x8 in_tile = fv_lane_keys(num_rows) + first_key;
    const fv_i32x8 keys = in_tile + span->first_key;
    const fv_i32x8 positions = fv_lane_positions(&params->context_parallel, keys);
    fv_i32x8 visible = (fv_i32x8)(keys >= group->first) & (fv_i32x8)(keys < group->end);
    visible &= (fv_i32x8)(in_tile >= span->first) & (fv_i32x8)(in_tile < span->end);
    if (params->tree_mask) visible &= fv_lane_tree_visible(span->job, span->first_row, num_rows, positions);
    score = fv_select(visible, score, fv_splat(-INFINITY));
    if (params->alibi == FV_ALIBI_NONE) return score;
    return score + fv_attend_alibi(positions - group->position, group->slope, params->alibi);
}

/* What a span asks of its scores, beside the scale of the dot products. */
typedef enum fv_softmax_form {
    FV_SOFTMAX_PLAIN,
    FV_SOFTMAX_SCALED, /* k_scales, v_scales or both */
    FV_SOFTMAX_ANY,
} fv_softmax_form;

/* `num` vectors of scores to weights; returns `sum` and them. */
FV_ALWAYS_INLINE fv_f32x8 fv_row_group_weigh(float *scores, const float *v_scales, fv_f32x8 sum, fv_f32x8 base,
                                             float weight_factor, const int32_t num_rows, const int32_t num)
{
    fv_f32x8 weights[4];
    FV_UNROLL
    for (int32_t i = 0; i < num; i++) weights[i] = fv_load_f32(scores + i * FV_LANES) - base;
    fv_exp2_each(weights, num);
    FV_UNROLL
    for (int32_t i = 0; i < num; i++) {
        fv_f32x8 weight = weights[i];
        sum += weight;
        if (v_scales) {
            const fv_f32x8 scaled = weight * fv_lane_values(v_scales + i * (FV_LANES / num_rows), num_rows);
            weight = fv_select((fv_i32x8)(weight == 0.0f), weight, scaled);
        }
        fv_store_f32(scores + i * FV_LANES, weight * weight_factor);
    }
    return sum;
}

/* Adds the weights of a tile (Kahan's sum): where all are nearly equal each addition rounds to the same side, and the
 * errors of thousands of tiles add up. */
FV_ALWAYS_INLINE void fv_row_group_add(fv_row_group *group, fv_f32x8 sum, fv_f32x8 shrink)
{
    const fv_f32x8 old = group->sum * shrink, more = sum - group->excess * shrink;
    group->sum = old + more;
    group->excess = (group->sum - old) - more;
}

FV_ALWAYS_INLINE int32_t fv_row_group_softmax_as(fv_row_group *group, float *scores, float rescale[FV_LANES],
                                                 const fv_softmax_span *span, const int32_t num_rows,
                                                 const fv_softmax_form form)
{
    const int32_t num_keys = FV_LANES / num_rows;
    const int32_t first = span->first / num_keys * num_keys, end = span->end;
    const float *k_scales = form == FV_SOFTMAX_PLAIN ? NULL : span->k_scales;
    const float *v_scales = form == FV_SOFTMAX_PLAIN ? NULL : span->v_scales;
    const fv_score_scale scale = span->scale;
    const float weight_factor = span->weight_factor;

    fv_f32x8 max = group->max;
    for (int32_t key = first; key < end; key += num_keys) {
        float *at = scores + key * num_rows;
        fv_f32x8 score = fv_load_f32(at);
        if (k_scales) score *= fv_lane_values(k_scales + key, num_rows);
        score = fv_attend_score(score, scale);
        if (form == FV_SOFTMAX_ANY) score = fv_row_group_mask(score, group, span, key, num_rows);
        fv_store_f32(at, score);
        max = fv_max(max, score);
    }
    max = fv_max_by_period(max, num_rows);

    /* Where no key was seen yet, any finite number serves: 2^(-inf - 0) is 0. */
    const fv_f32x8 base = fv_select((fv_i32x8)(max == -INFINITY), fv_splat(0.0f), max);
    const fv_f32x8 shrink = fv_exp2(group->max - base);
    fv_f32x8 sum = fv_splat(0.0f); /* of the tile */
    int32_t key = first;
    for (; key + 4 * num_keys <= end; key += 4 * num_keys) {
        sum = fv_row_group_weigh(scores + key * num_rows, v_scales ? v_scales + key : NULL, sum, base, weight_factor,
                                 num_rows, 4);
    }
    for (; key < end; key += num_keys) {
        sum = fv_row_group_weigh(scores + key * num_rows, v_scales ? v_scales + key : NULL, sum, base, weight_factor,
                                 num_rows, 1);
    }
    group->max = max;
    fv_row_group_add(group, sum, shrink);
    fv_store_f32(rescale, shrink);
    return fv_any((fv_i32x8)(shrink != 1.0f));
}

/* Dot products to weights 2^(s - max) * weight_factor, with the group brought up to date. Scores [key][row] count from
 * the tile's first key. rescale[r] = 2^(old max - new max); returns 0 if all are 1. */
FV_ALWAYS_INLINE int32_t fv_row_group_softmax(fv_row_group *group, float *scores, float rescale[FV_LANES],
                                              const fv_softmax_span *span, const int32_t num_rows)
{
    if (span->is_edge || span->job->params->alibi != FV_ALIBI_NONE)
        return fv_row_group_softmax_as(group, scores, rescale, span, num_rows, FV_SOFTMAX_ANY);
    if (span->k_scales || span->v_scales)
        return fv_row_group_softmax_as(group, scores, rescale, span, num_rows, FV_SOFTMAX_SCALED);
    return fv_row_group_softmax_as(group, scores, rescale, span, num_rows, FV_SOFTMAX_PLAIN);
}

#endif
