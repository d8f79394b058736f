/* Row strips: up to FV_STRIP_ROWS rows of one KV head, one to a lane, and their online softmax.
 *
 * Scores of a tile lie as [key][row], so that maximum, sum and mask of a row stay in the row's lane and no
 * step of the softmax is a horizontal one. A row's arithmetic is the same in any strip and lane. */
#ifndef FV_KERNELS_CPU_ROW_STRIP_H
#define FV_KERNELS_CPU_ROW_STRIP_H

#include "kernels/cpu/attend_item.h"
#include "kernels/cpu/strip_product.h"

/* Up to FV_STRIP_ROWS rows of one KV head. */
typedef struct fv_row_strip {
    float max[FV_STRIP_ROWS];
    float sum[FV_STRIP_ROWS];
    float excess[FV_STRIP_ROWS];                      /* what rounding has made of sum beyond what was added */
    int32_t first[FV_STRIP_ROWS], end[FV_STRIP_ROWS]; /* keys that each row sees */
    float slope[FV_STRIP_ROWS];                       /* ALiBi, times log2(e) */
    int32_t position[FV_STRIP_ROWS];                  /* global, of the query token */
    uint64_t tree[FV_STRIP_ROWS];                     /* its row of the tree mask, where there is one */
    float rescale[FV_STRIP_ROWS];                     /* of the last softmax: 2^(old max - new max) */
    fv_key_range some;                                /* keys that some row sees */
    fv_key_range all;                                 /* keys that all rows see */
    int32_t first_row;
    int32_t num_vectors;
    float *q;    /* [D][width], d in lane order */
    float *sums; /* [width][padded Dv], lane order */
} fv_row_strip;

/* A call of the softmax: which keys of a tile, counted from its first. */
typedef struct fv_strip_span {
    const fv_attend_job *job;
    const float *k_scales; /* of the tile's keys, or NULL */
    const float *v_scales;
    int32_t first_key; /* of the tile */
    int32_t first, end;
    int32_t is_edge; /* some row does not see some of the keys */
    fv_score_scale scale;
} fv_strip_span;

/* Rows, those that pad its last vector too. */
static inline int32_t fv_row_strip_width(const fv_row_strip *strip) { return strip->num_vectors * FV_STRIP_LANES; }

/* The keys of the tile's [first, end) that some row of the strip sees, and whether all rows see them all. */
static inline fv_strip_span fv_row_strip_span(const fv_row_strip *strip, const fv_attend_job *job, int32_t first_key,
                                              int32_t first, int32_t end)
{
    fv_strip_span span = {.job = job, .first_key = first_key};
    span.first = fv_max_i32(strip->some.first - first_key, first);
    span.end = fv_min_i32(strip->some.end - first_key, end);
    span.is_edge = strip->all.first - first_key > span.first || strip->all.end - first_key < span.end;
    return span;
}

static inline void fv_row_strip_init(fv_row_strip *strip, const fv_attend_job *job, int32_t kv_head, int32_t first_row,
                                     int32_t num_vectors)
{
    strip->first_row = first_row;
    strip->num_vectors = num_vectors;
    strip->some = (fv_key_range){INT32_MAX, 0};
    strip->all = (fv_key_range){0, fv_attend_tree_first(job)};
    int32_t token = first_row / job->group, head = first_row % job->group;
    fv_key_range keys = fv_attend_token_keys(job, token);
    for (int32_t i = 0; i < fv_row_strip_width(strip); i++) {
        if (i > 0 && first_row + i < job->num_rows && ++head == job->group) {
            head = 0;
            keys = fv_attend_token_keys(job, ++token);
        }
        strip->max[i] = -INFINITY;
        strip->sum[i] = strip->excess[i] = 0.0f;
        strip->first[i] = keys.first;
        strip->end[i] = keys.end;
        strip->slope[i] = 0.0f;
        if (job->params->alibi != FV_ALIBI_NONE) {
            strip->slope[i] = job->params->alibi_slopes[kv_head * job->group + head] * FV_LOG2E;
        }
        strip->position[i] = (int32_t)(job->context + job->item->first_token + token);
        strip->tree[i] = job->params->tree_mask ? job->params->tree_mask[job->batch_token + token] : 0;
        strip->some.first = fv_min_i32(strip->some.first, keys.first);
        strip->some.end = fv_max_i32(strip->some.end, keys.end);
        strip->all.first = fv_max_i32(strip->all.first, keys.first);
        strip->all.end = fv_min_i32(strip->all.end, keys.end);
    }
}

/* Elements d .. d + 15 of eight rows, or d .. d + 7, to [d][row], rows `width` apart. */
FV_ALWAYS_INLINE void fv_strip_pack_block(float *to, const char *const rows[FV_LANES], int64_t offset, int32_t width,
                                          fv_dtype dtype, fv_dtype lane_dtype, const int32_t num_vectors)
{
    const int64_t half_bytes = FV_LANES * (int64_t)fv_dtype_bytes(dtype);
    fv_f32x8 block[2][FV_LANES];
    FV_UNROLL
    for (int32_t i = 0; i < FV_LANES; i++) {
        fv_f32x16 value = {fv_load8(rows[i] + offset, dtype), fv_splat(0.0f)};
        if (num_vectors == 2) {
            value.b = fv_load8(rows[i] + offset + half_bytes, dtype);
            value = fv_lanes_of_natural(value, lane_dtype);
        }
        block[0][i] = value.a;
        block[1][i] = value.b;
    }
    for (int32_t v = 0; v < num_vectors; v++) {
        fv_transpose8(block[v]);
        FV_UNROLL
        for (int32_t i = 0; i < FV_LANES; i++) fv_store_f32(to + (int64_t)(v * FV_LANES + i) * width, block[v][i]);
    }
}

/* The strip's queries as [d][row], d in lane order; of pairs, of bf16, in natural order. Rows that pad the strip repeat the last. */
static inline void fv_row_strip_pack_queries(const fv_row_strip *strip, const fv_attend_job *job, int32_t kv_head)
{
    const fv_attend_params *params = job->params;
#if defined(FV_HAS_PAIRS) /* two numbers move as one */
    const fv_dtype dtype = FV_DTYPE_F32, lane_dtype = FV_DTYPE_F32;
    const int32_t head_size = params->head_size / 2;
#else
    const fv_dtype dtype = params->q_dtype, lane_dtype = job->lane_dtype;
    const int32_t head_size = params->head_size;
#endif
    const int32_t width = fv_row_strip_width(strip);
    const int64_t bytes = (int64_t)fv_dtype_bytes(dtype);
    for (int32_t first = 0; first < width; first += FV_LANES) {
        const char *rows[FV_LANES];
        for (int32_t i = 0; i < FV_LANES; i++) {
            rows[i] = fv_attend_q_row(job, kv_head, fv_min_i32(strip->first_row + first + i, job->num_rows - 1));
        }
        float *to = strip->q + first;
        int32_t d = 0;
        for (; d + 16 <= head_size; d += 16) {
            fv_strip_pack_block(to + (int64_t)d * width, rows, d * bytes, width, dtype, lane_dtype, 2);
        }
        if (d < head_size) {
            fv_strip_pack_block(to + (int64_t)d * width, rows, d * bytes, width, dtype, lane_dtype, 1);
        }
    }
}

/* --- softmax ------------------------------------------------------------------------------------------- */

/* The rows from `row` on that see number new_token of the new tokens. */
static inline fv_i32x8 fv_strip_tree_visible(const fv_row_strip *strip, int32_t row, int64_t new_token)
{
    fv_i32x8 visible;
    for (int32_t i = 0; i < FV_LANES; i++) visible[i] = -fv_tree_sees(strip->tree[row + i], new_token);
    return visible;
}

/* The score of a key for the eight rows from `row` on, whatever it is made of. */
static inline fv_f32x8 fv_row_strip_score(const fv_row_strip *strip, int32_t row, fv_f32x8 score,
                                          const fv_strip_span *span, int32_t key)
{
    const fv_attend_job *job = span->job;
    const fv_attend_params *params = job->params;
    const int32_t local_key = span->first_key + key;
    if (span->k_scales) score *= span->k_scales[key];
    score = fv_attend_score(score, span->scale);
    fv_i32x8 visible = (fv_i32x8)(fv_load_i32(strip->first + row) <= local_key) &
                       (fv_i32x8)(fv_load_i32(strip->end + row) > local_key);
    const int32_t position = (int32_t)fv_key_position(&params->context_parallel, local_key);
    if (params->tree_mask) visible &= fv_strip_tree_visible(strip, row, position - job->context);
    score = fv_select(visible, score, fv_splat(-INFINITY));
    if (params->alibi == FV_ALIBI_NONE) return score;
    return score + fv_attend_alibi(position - fv_load_i32(strip->position + row), fv_load_f32(strip->slope + row),
                                   params->alibi);
}

/* The same where it is a multiple of its dot product. */
FV_ALWAYS_INLINE fv_strip_lanes fv_strip_plain_score(fv_strip_lanes dot, fv_score_scale scale)
{
    return fv_strip_max(fv_strip_splat(-FV_SCORE_LIMIT), fv_strip_min(fv_strip_splat(FV_SCORE_LIMIT), dot * scale.dot));
}

/* Adds the weights of a tile to those of the eight or sixteen rows from `row` on, as fv_row_group_add. */
FV_ALWAYS_INLINE void fv_row_strip_add(fv_row_strip *strip, int32_t row, fv_strip_lanes sum)
{
    const fv_strip_lanes shrink = fv_strip_load(strip->rescale + row);
    const fv_strip_lanes old = fv_strip_load(strip->sum + row) * shrink;
    const fv_strip_lanes more = sum - fv_strip_load(strip->excess + row) * shrink;
    const fv_strip_lanes total = old + more;
    fv_strip_store(strip->sum + row, total);
    fv_strip_store(strip->excess + row, (total - old) - more);
}

/* Roundings of sums of nearly equal weights pull one way: no chain is of more than these. */
enum { FV_STRIP_SUM_KEYS = 64 };

/* The vectors of a strip go side by side, for each is a chain of maxima, then of exponentials and sums. */
FV_ALWAYS_INLINE void fv_row_strip_softmax_as(fv_row_strip *strip, float *scores, const fv_strip_span *span,
                                              const int32_t num_vectors, const int32_t is_plain)
{
    const int32_t width = num_vectors * FV_STRIP_LANES;
    fv_strip_lanes max[FV_STRIP_VECTORS], base[FV_STRIP_VECTORS], sum[FV_STRIP_VECTORS], weight[FV_STRIP_VECTORS];
    fv_strip_lanes all[FV_STRIP_VECTORS];
    FV_UNROLL
    for (int32_t v = 0; v < num_vectors; v++) max[v] = fv_strip_load(strip->max + v * FV_STRIP_LANES);
    for (int32_t key = span->first; key < span->end; key++) {
        float *at = scores + key * width;
        for (int32_t row = 0; row < width && !is_plain; row += FV_LANES)
            fv_store_f32(at + row, fv_row_strip_score(strip, row, fv_load_f32(at + row), span, key));
        FV_UNROLL
        for (int32_t v = 0; v < num_vectors; v++, at += FV_STRIP_LANES) {
            const fv_strip_lanes score = is_plain ? fv_strip_plain_score(fv_strip_load(at), span->scale)
                                                  : fv_strip_load(at);
            if (is_plain) fv_strip_store(at, score);
            max[v] = fv_strip_max(max[v], score);
        }
    }

    FV_UNROLL
    for (int32_t v = 0; v < num_vectors; v++) {
        /* Where no key was seen yet, any finite number serves: 2^(-inf - 0) is 0. */
        base[v] = fv_strip_select(max[v] == -INFINITY, fv_strip_splat(0.0f), max[v]);
        weight[v] = fv_strip_load(strip->max + v * FV_STRIP_LANES) - base[v];
        fv_strip_store(strip->max + v * FV_STRIP_LANES, max[v]);
    }
    fv_strip_exp2_each(weight, num_vectors);
    FV_UNROLL
    for (int32_t v = 0; v < num_vectors; v++) {
        all[v] = sum[v] = fv_strip_splat(0.0f); /* of the tile, and of its last keys */
        fv_strip_store(strip->rescale + v * FV_STRIP_LANES, weight[v]);
    }
    for (int32_t key = span->first; key < span->end; key++) {
        float *at = scores + key * width;
        FV_UNROLL
        for (int32_t v = 0; v < num_vectors; v++) weight[v] = fv_strip_load(at + v * FV_STRIP_LANES) - base[v];
        fv_strip_exp2_each(weight, num_vectors);
        FV_UNROLL
        for (int32_t v = 0; v < num_vectors; v++) {
            sum[v] += weight[v];
            if (span->v_scales) weight[v] = fv_strip_seen(weight[v] * span->v_scales[key], weight[v]);
            fv_strip_store(at + v * FV_STRIP_LANES, weight[v]);
        }
        if ((key + 1 - span->first) % FV_STRIP_SUM_KEYS != 0) continue;
        FV_UNROLL
        for (int32_t v = 0; v < num_vectors; v++) {
            all[v] += sum[v];
            sum[v] = fv_strip_splat(0.0f);
        }
    }
    FV_UNROLL
    for (int32_t v = 0; v < num_vectors; v++) fv_row_strip_add(strip, v * FV_STRIP_LANES, all[v] + sum[v]);
}

/* Dot products of the span's keys to weights 2^(s - max), and maxima, sums and rescale to match. */
static inline void fv_row_strip_softmax(fv_row_strip *strip, float *scores, const fv_strip_span *span)
{
    const int32_t is_plain = !span->is_edge && !span->k_scales && span->scale.cap == 0 &&
                             span->job->params->alibi == FV_ALIBI_NONE;
    switch (2 * strip->num_vectors + is_plain) {
    case 2: fv_row_strip_softmax_as(strip, scores, span, 1, 0); break;
    case 3: fv_row_strip_softmax_as(strip, scores, span, 1, 1); break;
    case 4: fv_row_strip_softmax_as(strip, scores, span, 2, 0); break;
    case 5: fv_row_strip_softmax_as(strip, scores, span, 2, 1); break;
    case 6: fv_row_strip_softmax_as(strip, scores, span, 3, 0); break;
    default: fv_row_strip_softmax_as(strip, scores, span, 3, 1); break;
    }
}

#endif
