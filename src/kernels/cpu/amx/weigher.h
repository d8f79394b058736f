/* From scores to weights: the online softmax of a strip, whose lanes are rows. */
#ifndef FV_KERNELS_CPU_AMX_WEIGHER_H
#define FV_KERNELS_CPU_AMX_WEIGHER_H

#include "kernels/cpu/amx/tile_scale.h"

/* The largest dot product, and the largest factor of one, with which 2^(scaled - max) needs no clamp. */
#define FV_MAX_PLAIN_DOT 1e30f
#define FV_MAX_PLAIN_FACTOR 1e8f
#define FV_MIN_PLAIN_FACTOR 0x1p-80f /* the least: slopes of ALiBi over it are no infinities */

/* The rows that a tree mask lets see a key of the sequence. */
static inline fv_lane_ints fv_tree_seen(const fv_row_strip *rows, const fv_attend_job *job, int32_t local_key)
{
    const int64_t new_token = fv_key_position(&job->params->context_parallel, local_key) - job->context;
    fv_lane_ints seen = {0};
    for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++) seen[i] = -fv_tree_sees(rows->tree[i], new_token);
    return seen;
}

/* Hides the keys [first, end) from the rows that do not see them. */
static inline void fv_hide_keys(const fv_row_strip *rows, const fv_attend_job *job, float *scores, int32_t first_key,
                                int32_t first, int32_t end)
{
    const fv_lane_ints first_seen = fv_lane_ints_load(rows->first), end_seen = fv_lane_ints_load(rows->end);
    const int32_t tree_first = fv_attend_tree_first(job);
    for (int32_t key = first; key < end; key++) {
        const int32_t local = first_key + key;
        fv_lane_ints seen = (first_seen <= local) & (end_seen > local);
        if (local >= tree_first) seen &= fv_tree_seen(rows, job, local);
        float *at = scores + key * FV_TILE_STRIP_ROWS;
        fv_lanes_store(at, fv_lanes_select(seen, fv_lanes_load(at), fv_lanes_splat(-INFINITY)));
    }
}

/* The same for those of the steps [first_step, end_step) of a block that starts at first_key. */
static inline void fv_weigher_hide(const fv_row_strip *rows, const fv_attend_job *job, float *scores, int32_t first_key,
                                   int32_t first_step, int32_t end_step)
{
    const int32_t first = first_step * FV_STEP_KEYS, end = end_step * FV_STEP_KEYS;
    const int32_t all_first = fv_min_i32(rows->all.first - first_key, end);
    const int32_t all_end = rows->all.end - first_key;
    fv_hide_keys(rows, job, scores, first_key, first, all_first);
    fv_hide_keys(rows, job, scores, first_key, fv_max_i32(all_end, fv_max_i32(first, all_first)), end);
}

static inline fv_lanes fv_max_of_keys(const float *scores, int32_t first, int32_t end)
{
    fv_lanes max[4];
    for (int32_t i = 0; i < 4; i++) max[i] = fv_lanes_splat(-INFINITY);
    for (int32_t key = first; key < end; key += 4) {
        FV_UNROLL
        for (int32_t i = 0; i < 4; i++)
            max[i] = fv_lanes_max(max[i], fv_lanes_load(scores + (key + i) * FV_TILE_STRIP_ROWS));
    }
    return fv_lanes_max(fv_lanes_max(max[0], max[1]), fv_lanes_max(max[2], max[3]));
}

/* Have all rows of a strip a reference, a number near their scores that weights are taken against? */
static inline int32_t fv_strip_has_reference(const fv_row_strip *rows)
{
    return fv_lanes_all_below(-fv_lanes_load(rows->max), FV_MAX_PLAIN_DOT);
}

/* `reference` for those that have none, where `top` is the largest of their dot products. 0: a row sees no key, or an
 * overflow is near; nothing has changed. */
static inline int32_t fv_strip_take_reference(fv_row_strip *rows, fv_lanes top, fv_lanes reference)
{
    if (!fv_lanes_all_below(top, FV_MAX_PLAIN_DOT) || !fv_lanes_all_below(-top, FV_MAX_PLAIN_DOT)) return 0;
    const fv_lanes max = fv_lanes_load(rows->max); /* stays where there is one, as the row's sums do */
    fv_lanes_store(rows->max, fv_lanes_select(max == -INFINITY, reference, max));
    return 1;
}

/* 1: a score is a multiple of its dot product, or of what fv_scores_prepare makes of it. */
static inline int32_t fv_scores_are_multiples(fv_score_scale scale)
{
    const int32_t fits_cap = scale.cap == 0 || (scale.cap >= FV_MIN_PLAIN_FACTOR && scale.cap <= FV_MAX_PLAIN_FACTOR);
    return scale.dot >= FV_MIN_PLAIN_FACTOR && scale.dot <= FV_MAX_PLAIN_FACTOR && fits_cap;
}

/* How a strip's dot products become what scores are multiples of. */
typedef struct fv_score_form {
    int32_t is_capped;
    fv_lanes dot_factors; /* of the cap's argument */
    fv_alibi alibi;
    fv_lanes slopes;        /* of ALiBi, as parts of what scores are multiples of */
    fv_lane_ints positions; /* of the rows' tokens */
} fv_score_form;

/* dot_factors: what a dot product of each row is multiplied by; multiples: what its score is a multiple of in the end. */
static inline fv_score_form fv_score_form_of(const fv_row_strip *rows, const fv_attend_params *params,
                                             fv_lanes dot_factors, fv_lanes multiples)
{
    return (fv_score_form){
        .is_capped = params->soft_cap > 0,
        .dot_factors = dot_factors,
        .alibi = params->alibi,
        .slopes = fv_lanes_load(rows->slope) / multiples,
        .positions = fv_lane_ints_load(rows->position),
    };
}

/* What scores are multiples of then: the cap, if there is one. */
static inline float fv_score_multiple(fv_score_scale scale) { return scale.cap > 0 ? scale.cap : scale.dot; }

/* 1: dot products are that already, but for scales of keys. */
static inline int32_t fv_score_form_is_plain(const fv_attend_params *params)
{
    return !(params->soft_cap > 0) && params->alibi == FV_ALIBI_NONE;
}

/* What ALiBi adds at distances of keys from queries. */
FV_ALWAYS_INLINE fv_lanes fv_lanes_alibi(fv_lanes slopes, fv_lane_ints distances, fv_alibi alibi)
{
    const fv_lanes steps = __builtin_convertvector(distances, fv_lanes);
    if (alibi == FV_ALIBI_LINEAR) return slopes * steps;
    return -slopes * fv_lanes_sqrt(fv_lanes_max(-steps, fv_lanes_splat(0.0f)));
}

/* 16 dot products with a key of the sequence: times its scale, with a soft cap the part of the cap that the score is, and with
 * what ALiBi adds. */
FV_ALWAYS_INLINE void fv_score_prepare(float *scores, fv_lanes k_scale, const fv_score_form *form,
                                       const fv_attend_job *job, int32_t local_key)
{
    fv_lanes score = fv_lanes_load(scores) * k_scale;
    if (form->is_capped) score = fv_lanes_tanh(score * form->dot_factors);
    if (form->alibi != FV_ALIBI_NONE) {
        const int32_t position = (int32_t)fv_key_position(&job->params->context_parallel, local_key);
        score += fv_lanes_alibi(form->slopes, position - form->positions, form->alibi);
    }
    fv_lanes_store(scores, score);
}

/* The dot products of the steps [first_step, end_step) of a block that starts at first_key so that scores are multiples of
 * them; returns of what. k_scales: of the block's keys, or NULL. */
static inline fv_score_scale fv_scores_prepare(float *scores, const fv_row_strip *rows, const fv_attend_job *job,
                                               int32_t first_key, int32_t first_step, int32_t end_step,
                                               const float *k_scales, fv_score_scale scale)
{
    if (!k_scales && fv_score_form_is_plain(job->params)) return scale;
    const fv_score_scale multiple = {.dot = fv_score_multiple(scale)};
    const fv_score_form form = fv_score_form_of(rows, job->params, fv_lanes_splat(scale.dot),
                                                fv_lanes_splat(multiple.dot));
    for (int32_t key = first_step * FV_STEP_KEYS; key < end_step * FV_STEP_KEYS; key++)
        fv_score_prepare(scores + key * FV_TILE_STRIP_ROWS, fv_lanes_splat(k_scales ? k_scales[key] : 1.0f), &form, job,
                         first_key + key);
    return multiple;
}

/* What turns dot products into weights: 2^(dot * factor - base). */
typedef struct fv_weigher {
    fv_lanes factor, base;
    fv_lanes sum, other_sum; /* of the step's weights: fv_tile_scale_of times what the row sum counts */
    fv_lanes steps_sum;      /* the same of the steps before */
    fv_lanes rounded_sum;    /* of the weights as they are multiplied, where it is asked for */
} fv_weigher;

/* Where a score is a multiple of its dot product and no overflow is near: the new maxima over the steps [first_step,
 * end_step) of a block that starts at first_key. Returns 0 where an overflow is near: nothing has changed but hidden
 * scores. */
static inline int32_t fv_weigher_begin(fv_weigher *weigh, fv_tile_strip *strip, const fv_attend_job *job, float *scores,
                                       int32_t first_key, int32_t first_step, int32_t end_step, fv_lanes factor,
                                       fv_rescaling rescaling)
{
    fv_row_strip *rows = &strip->rows;
    fv_weigher_hide(rows, job, scores, first_key, first_step, end_step);
    const fv_lanes top = fv_max_of_keys(scores, first_step * FV_STEP_KEYS, end_step * FV_STEP_KEYS);
    if (!fv_lanes_all_below(top, FV_MAX_PLAIN_DOT)) return 0;

    const fv_lanes old_max = fv_lanes_load(rows->max);
    const fv_lanes max = fv_lanes_max(old_max, top * factor);
    /* Where no key was seen yet, any finite number serves: 2^(-inf - 0) is 0. */
    weigh->base = fv_lanes_select(max == -INFINITY, fv_lanes_splat(0.0f), max);
    weigh->factor = factor;
    const fv_lanes shrink = fv_lanes_exp2(old_max - weigh->base);
    fv_lanes_store(rows->max, max);
    fv_lanes_store(rows->rescale, shrink);
    if (fv_rescaling_adds(rescaling)) {
        float old[FV_TILE_STRIP_ROWS];
        fv_lanes_store(old, old_max);
        fv_tile_scale_move(strip, old, job->params->q_dtype, rescaling);
        weigh->base = fv_tile_scale_base(strip);
    }
    weigh->sum = weigh->other_sum = weigh->steps_sum = fv_lanes_splat(0.0f);
    return 1;
}

/* After a step: what roundings of nearly equal weights lose pulls one way, and the more of them a sum has the more. */
FV_ALWAYS_INLINE void fv_weigher_end_step(fv_weigher *weigh)
{
    weigh->steps_sum += weigh->sum + weigh->other_sum;
    weigh->sum = weigh->other_sum = fv_lanes_splat(0.0f);
}

/* Of all weights so far. */
static inline fv_lanes fv_weigher_sum(const fv_weigher *weigh)
{
    return weigh->steps_sum + (weigh->sum + weigh->other_sum);
}

/* Adds the weights to the row sums, as fv_row_strip_add. */
static inline void fv_weigher_end(const fv_weigher *weigh, fv_tile_strip *strip)
{
    fv_row_strip *rows = &strip->rows;
    const fv_lanes shrink = fv_lanes_load(rows->rescale), old = fv_lanes_load(rows->sum) * shrink;
    const fv_lanes block = fv_weigher_sum(weigh) / fv_tile_scale_of(strip);
    const fv_lanes more = block - fv_lanes_load(rows->excess) * shrink, total = old + more;
    fv_lanes_store(rows->sum, total);
    fv_lanes_store(rows->excess, (total - old) - more);
}

/* The weights of words p of a step: two keys, whose first one's scores are at `scores`. */
FV_ALWAYS_INLINE void fv_weigher_pair(fv_weigher *weigh, fv_lanes *low, fv_lanes *high, const float *scores)
{
    const float *other = scores + (fv_words_key(0, 1) - fv_words_key(0, 0)) * FV_TILE_STRIP_ROWS;
    *low = fv_lanes_exp2(fv_lanes_load(scores) * weigh->factor - weigh->base);
    *high = fv_lanes_exp2(fv_lanes_load(other) * weigh->factor - weigh->base);
    weigh->sum += *low;
    weigh->other_sum += *high;
}

/* As words. sums_rounded: rounded_sum too. */
FV_ALWAYS_INLINE fv_words fv_weigher_words(fv_weigher *weigh, const float *scores, const int32_t sums_rounded)
{
    fv_lanes low, high;
    fv_weigher_pair(weigh, &low, &high, scores);
    if (sums_rounded) {
        low = fv_lanes_as_bf16(low);
        high = fv_lanes_as_bf16(high);
        weigh->rounded_sum += low + high;
    }
    return fv_words_of(low, high);
}

/* A weight times the scale of its key's value; 0 stays 0. */
FV_ALWAYS_INLINE fv_lanes fv_weight_scaled(fv_lanes weight, fv_lanes v_scale)
{
    return fv_lanes_select(weight == 0.0f, weight, weight * v_scale);
}

/* Words p times the scales of both keys' values, which row sums do not count. */
FV_ALWAYS_INLINE fv_words fv_weigher_scaled_words(fv_weigher *weigh, const float *scores, fv_lanes v_scale,
                                                  fv_lanes other_v_scale)
{
    fv_lanes low, high;
    fv_weigher_pair(weigh, &low, &high, scores);
    return fv_words_of(fv_weight_scaled(low, v_scale), fv_weight_scaled(high, other_v_scale));
}

/* Words p in pieces, times those scales if there are any. */
FV_ALWAYS_INLINE fv_word_pieces fv_weigher_pieces(fv_weigher *weigh, const float *scores, const float *v_scales,
                                                  const int32_t p)
{
    fv_lanes low, high;
    fv_weigher_pair(weigh, &low, &high, scores);
    if (v_scales) {
        low = fv_weight_scaled(low, fv_lanes_splat(v_scales[fv_words_key(p, 0)]));
        high = fv_weight_scaled(high, fv_lanes_splat(v_scales[fv_words_key(p, 1)]));
    }
    return fv_word_pieces_of(low, high);
}

/* A quarter of a step: eight of its keys, to words[4 * quarter] and the next three. v_scales: of the step's values, or
 * NULL. */
FV_ALWAYS_INLINE void fv_weigher_quarter(fv_weigher *weigh, fv_words words[16], const float *scores,
                                         const float *v_scales, const int32_t quarter, const int32_t sums_rounded)
{
    if (v_scales) {
        FV_UNROLL
        for (int32_t p = 4 * quarter; p < 4 * quarter + 4; p++)
            words[p] = fv_weigher_scaled_words(weigh, scores + fv_words_key(p, 0) * FV_TILE_STRIP_ROWS,
                                               fv_lanes_splat(v_scales[fv_words_key(p, 0)]),
                                               fv_lanes_splat(v_scales[fv_words_key(p, 1)]));
        return;
    }
    FV_UNROLL
    for (int32_t p = 4 * quarter; p < 4 * quarter + 4; p++)
        words[p] = fv_weigher_words(weigh, scores + fv_words_key(p, 0) * FV_TILE_STRIP_ROWS, sums_rounded);
}

/* The same in pieces. */
FV_ALWAYS_INLINE void fv_weigher_quarter_pieces(fv_weigher *weigh, fv_words words[16], fv_words low_words[16],
                                                const float *scores, const float *v_scales, const int32_t quarter)
{
    FV_UNROLL
    for (int32_t p = 4 * quarter; p < 4 * quarter + 4; p++) {
        const fv_word_pieces pieces = fv_weigher_pieces(weigh, scores + fv_words_key(p, 0) * FV_TILE_STRIP_ROWS,
                                                        v_scales, p);
        words[p] = pieces.high;
        low_words[p] = pieces.low;
    }
}

/* One step. */
FV_ALWAYS_INLINE void fv_weigher_step(fv_weigher *weigh, char *weights, const float *scores, const float *v_scales,
                                      const int32_t sums_rounded)
{
    fv_weigher weigher = *weigh;
    fv_words words[16];
    FV_UNROLL
    for (int32_t quarter = 0; quarter < 4; quarter++)
        fv_weigher_quarter(&weigher, words, scores, v_scales, quarter, sums_rounded);
    fv_words_store_transposed(weights, words);
    fv_weigher_end_step(&weigher);
    *weigh = weigher;
}

#endif
