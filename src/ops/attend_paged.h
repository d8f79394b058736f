/* attend_paged: softmax(scale Q K^T) V of Q blocks against the paged KV cache, whole or one segment of
 * the keys; attend_dense: the same against dense rows; mla_decode: the same against paged latents; and
 * reduce_segments, which merges the segments.
 *
 * Per row (query token i of sequence r, query head h) with p = the token's global position,
 * context + i, over the keys j of the sequence (global position g(j) under context parallelism):
 *
 *   s_j = scale * q . k_j * k_scale;  s_j = cap * tanh(s_j / cap);  masked -> -inf;  s_j += alibi
 *   out = sum_j e^(s_j - m) v_j * v_scale / (sum_j e^(s_j - m) + e^(sink - m));  lse = m + ln(...)
 *
 * The sink is part of the lse. A row with no key: out 0 and lse -inf, sink or not.
 *
 * Masks: causal g(j) <= p; not causal every key of the sequence; window w: g(j) > p - w, and, not
 * causal, g(j) < p + w. As g grows with j, each row sees one run of local keys (fv_row_keys), less
 * what a tree mask takes away among the new tokens.
 *
 * mla_decode is absorbed multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): one KV
 * head, head_size = kv_lora_rank + rope, v_head_size = kv_lora_rank, layout LATENT or LATENT_FP8_DS, and
 *
 *   s_j = scale * (q_latent . c_j + q_rope . R(g(j)) r_j);   out = softmax(s) C
 *
 * with the latent c_j and the rope part r_j of the entry, R the rotation where keys lie plain in the cache
 * (`rotation`), else the identity. Scaled caches have one scale, k_scale; it holds for the values too. */
#ifndef FV_OPS_ATTEND_PAGED_H
#define FV_OPS_ATTEND_PAGED_H

#include "core/compiler.h"
#include "core/device.h"
#include "fovea/problem.h"
#include "ops/key_rotation.h"
#include "ops/work_item.h"

/* Keys and values as dense rows k [N, Hkv, D] and v [N, Hkv, Dv], never scaled. With k_shared the last
 * shared_size elements of each key are the same for all heads: k [N, Hkv, D - shared_size], k_shared
 * [N, shared_size]. Key j of sequence r is
 *
 *   key_row given   row key_row[r] + j: attend_dense over gathered context, no cache is read
 *   key_row NULL    from the context on, row query_start[r] + j - context: the new tokens as they came,
 *                   while the keys before them lie in the cache (attend_paged: prefix prefill; attend_dense:
 *                   there are none, or the items leave them out)
 *
 * Only without context parallelism. `k` NULL: there are no dense rows. */
typedef struct fv_dense_keys {
    const void *k; /* strides in bytes, last dimension dense */
    int64_t k_token_stride, k_head_stride;
    const void *k_shared; /* or NULL: keys are whole */
    int64_t k_shared_token_stride;
    int32_t shared_size;
    const void *v;
    int64_t v_token_stride, v_head_stride;
    fv_dtype dtype;         /* q_dtype, or fp32 */
    const int32_t *key_row; /* [R] or NULL */
} fv_dense_keys;

/* Does one block of threads read rows of so many elements nearly as fast as all of its multiprocessor? Then a list of fixed length, of
 * few sequences, is cut and launched for one. */
static inline int32_t fv_one_lane_suffices(fv_dtype dtype, int32_t head_size)
{
    const int32_t element_bytes = (int32_t)fv_dtype_bytes(dtype);
    return element_bytes > 1 && head_size * element_bytes > 128;
}

enum { FV_TREE_TOKENS = 64 }; /* new tokens of a query, at most, that has a tree mask: bits of a row of it */

/* Seldom used first, what each decode needs first last: parameters come to a GPU's multiprocessors a line at a time. */
typedef struct fv_attend_params {
    fv_dense_keys dense;
    fv_key_rotation rotation; /* mla_decode only */
    fv_alibi alibi;
    const float *alibi_slopes; /* [Hq] or NULL */
    const uint64_t *tree_mask; /* [T] or NULL */
    void *scratch;             /* of the CPU kernels: scratch_bytes for each worker */
    size_t scratch_bytes;
    int32_t max_seq_len; /* the plan's bound on seq_lens, which scratch_bytes may follow; 0: none is known */
    float soft_cap;
    fv_dtype q_dtype;
    /* Of the CPU kernels: places from which keys are asked for ahead, in turn; 1: in order; 0: as a kernel likes. */
    int32_t ahead_tracks;
    int32_t multiplies_pairs;    /* 1: level avx512_bf16 multiplies pairs of bf16, of few rows and of many */
    int16_t ahead_is_near;       /* 1: in order, they are asked for into the cache nearest to the core */
    int16_t subnormals_are_fast; /* 1: level avx2 has e4m3 as subnormal fp32 where it is subnormal */
    fv_kv_view cache;

    /* batch and schedule: a list of items, or (items NULL) the static grid
     * num_q_blocks x num_kv_heads x num_segments, see fv_grid_item */
    int32_t num_items;
    int32_t num_split;  /* each of a list's last items may be shared by two lanes of a device (num_segments, where that
                        * is more than 1), which may do without; of the static grid: 0, or all cells may */
    int32_t lane_heads; /* of a list: KV heads of an item that a lane had best take side by side; 0: as it likes */
    int32_t batch_invariant; /* 1: a row's bits must not depend on how many items there are */
    int32_t item_tokens;     /* of an item, at most; 0: not known, or a kernel must not be chosen by it */
    int32_t block_q;
    int32_t tile_keys;
    int32_t num_q_blocks;
    int32_t num_segments;
    int32_t piece_pages;   /* of a list with num_segments: blocks of each lane's keys, by which a kernel may guess */
    int32_t whole_queries; /* 1: no query has more than block_q tokens; the static grid's Q block r is sequence r */
    int32_t block_table_width;
    int32_t num_seqs;
    const int32_t *num_seqs_at; /* static grid: where the kernel reads the number instead; NULL: num_seqs */
    const int32_t *query_start; /* [R + 1] */
    const int32_t *seq_lens;    /* [R], global */
    int32_t *claims; /* of a GPU's kernels: a counter, 0 between runs, from which blocks of threads take jobs; NULL:
                      * they take every so many-th */

    /* partial results, [num_slots, Hq, Dv] and [num_slots, Hq]; natural units */
    float *partial_out;
    float *partial_max; /* -inf: no key seen, sum 0 and out 0 */
    float *partial_sum;

    /* tensors; strides in bytes, the last dimension dense */
    void *out; /* [T', Hq, Dv] out_dtype */
    int64_t out_token_stride, out_head_stride;
    float *lse; /* [T', Hq] or NULL */
    int64_t lse_token_stride, lse_head_stride;
    int32_t out_first_token; /* of the batch: row 0 of out and lse */
    fv_dtype out_dtype;
    const void *q; /* [T', Hq, D] q_dtype */
    int64_t q_token_stride, q_head_stride;
    const float *k_scale; /* [num_kv_scales] or NULL */
    const float *v_scale;
    const float *sinks; /* [Hq] or NULL */

    /* problem */
    int32_t num_heads, num_kv_heads, head_size, v_head_size;
    float scale;
    int32_t window;
    fv_context_parallel context_parallel; /* world >= 1, interleave >= 1 */
    int32_t num_kv_scales;                /* 0 none, 1 per tensor, Hkv per head */

    const uint8_t *causal; /* [R] or NULL = all causal */
    const int32_t *block_table;
    int64_t block_table_stride;
    /* A list of fixed length: how many of its items are not empty, the first ones; NULL: all. */
    const int32_t *num_items_at;
    const fv_work_item *items;
} fv_attend_params;

typedef struct fv_reduce_params {
    void *out; /* as in fv_attend_params */
    int64_t out_token_stride, out_head_stride;
    fv_dtype out_dtype;
    float *lse;
    int64_t lse_token_stride, lse_head_stride;
    const float *sinks;
    int32_t num_heads, v_head_size;

    const fv_reduce_item *items; /* NULL: static grid; then every token has num_segments segments, the */
    int32_t num_items;           /* slots of sequence r's Q block b start as fv_grid_item says */
    const int32_t *num_items_at; /* as in fv_attend_params */
    int32_t num_seqs;
    const int32_t *num_seqs_at;
    const int32_t *query_start;
    int32_t block_q;
    int32_t num_q_blocks;
    int32_t num_segments;
    int32_t whole_queries;

    const float *partial_out;
    const float *partial_max;
    const float *partial_sum;
    /* Of an item, about, for a GPU to choose how its blocks share a row; 0: a row's bits must not depend on other items. */
    int32_t most_segments;
    int32_t narrow_partials; /* 1: the variant that left them has a form of its own (narrows_partials) */
} fv_reduce_params;

/* The local keys [first, end) that a row sees, before any tree mask. */
typedef struct fv_key_range {
    int32_t first;
    int32_t end;
} fv_key_range;

/* The run of keys of the query token at global position `position` of a sequence of `seq_len`. */
FV_SHARED_INLINE fv_key_range fv_row_keys(const fv_context_parallel *cp, int32_t seq_len, int64_t position,
                                          int32_t causal, int32_t window)
{
    int64_t end = seq_len, first = 0;
    if (causal && position + 1 < end) end = position + 1;
    if (window > 0) {
        first = position - window + 1;
        if (!causal && position + window < end) end = position + window;
    }
    fv_key_range keys = {fv_local_keys(cp, first), fv_local_keys(cp, end)};
    if (keys.first > keys.end) keys.first = keys.end;
    return keys;
}

/* The keys that any of the tokens [first_token, first_token + num_tokens) of a sequence sees. */
FV_SHARED_INLINE fv_key_range fv_block_keys(const fv_context_parallel *cp, int32_t seq_len, int64_t context,
                                            int32_t first_token, int32_t num_tokens, int32_t causal, int32_t window)
{
    const fv_key_range first = fv_row_keys(cp, seq_len, context + first_token, causal, window);
    const fv_key_range last = fv_row_keys(cp, seq_len, context + first_token + num_tokens - 1, causal, window);
    return (fv_key_range){first.first, last.end};
}

/* The static grid of the Triton attention paper: sequence r owns the Q blocks from
 * query_start[r] / block_q + r on, so that a bound on their number, T / block_q + R, needs no lengths,
 * and a worker finds its sequence by binary search over these prefix sums. With whole_queries there is
 * one Q block for each sequence, and nothing to search. Returns 0 where the cell
 * (q_block, segment) has no work, else fills *item for one KV head. Segments cut the keys of the whole
 * sequence into num_segments runs of equally many tiles. */
int32_t fv_grid_item(fv_work_item *item, const fv_attend_params *params, int32_t q_block, int32_t kv_head,
                     int32_t segment);

/* The Q block `q_block` of the static grid as the reduction's unit; 0 where there is none. */
int32_t fv_grid_reduce_item(fv_reduce_item *item, const fv_reduce_params *params, int32_t q_block);

/* The sequence that owns Q block `q_block` of the static grid. */
int32_t fv_grid_find_seq(const int32_t *query_start, int32_t num_seqs, int32_t block_q, int32_t q_block);

/* How a running output follows its running maximum: AMLA (arXiv 2509.25224), section 3 and appendix A. */
typedef enum fv_rescaling {
    FV_RESCALING_MULTIPLY = 0,
    FV_RESCALING_ADD,               /* an integer addition to the exponent, with the error compensation */
    FV_RESCALING_ADD_UNCOMPENSATED, /* to show what the compensation is for */
    FV_RESCALING_MULTIPLY_BF16,     /* multiplied, with P rounded to bf16: what AMLA is compared to */
} fv_rescaling;

/* One compiled form of attend_paged, attend_dense or mla_decode. */
typedef struct fv_attend_variant {
    const char *name;
    int32_t block_m;   /* rows of a Q block that it likes: tokens x heads of a KV head */
    int32_t tile_keys; /* keys of one online-softmax step */
    const char *(*why_not)(const fv_problem *problem);       /* NULL: serves it */
    size_t (*scratch_bytes)(const fv_attend_params *params); /* of each worker; by problem, layout and schedule sizes */
    fv_status (*launch)(const fv_launch *launch, const fv_attend_params *params);
    fv_rescaling rescaling;
    /* Items that a worker of the device holds at a time; NULL: one, and it takes them as they come. */
    int32_t (*items_at_once)(const fv_problem *problem);
    /* Rows of an item up to which a worker holds twice as many at a time where there are more than all workers hold, each in half
     * the room; NULL: none. */
    int32_t (*rows_of_halves)(const fv_problem *problem);
    /* KV heads of an item of one token that a lane can take side by side; NULL: one. */
    int32_t (*heads_at_once)(const fv_problem *problem);
    /* 1: two lanes share the keys of an item where the list says so; more: so many at most, of one token; NULL: none. */
    int32_t (*splits_items)(const fv_problem *problem);
    /* 1: the call leaves partial results in a form of its device's own, in partial_out alone and in no more bytes than
     * as fp32, which reduce_segments is told (narrow_partials). Of the batch this must not depend. NULL: never. */
    int32_t (*narrows_partials)(const fv_launch *launch, const fv_attend_params *params);
    /* 1: each of items_at_once is as fast beside the others as alone; NULL: no, they share their worker's memory. */
    int32_t (*items_keep_pace)(const fv_problem *problem);
    /* 1: workers without keys take those of others' items, where each has one and their keys follow each other, up to
     * FV_DECODE_ROWS rows, or shared_rows. NULL: never. */
    int32_t (*deals_keys)(const fv_problem *problem);
    /* Rows of a KV head, at most, whose items have several KV heads; NULL: FV_DECODE_ROWS. */
    int32_t (*shared_rows)(const fv_problem *problem);
    /* How many times as long such an item takes for a row x key as one of many rows, which arithmetic bounds and not memory;
     * NULL: once. */
    int32_t (*few_row_cost)(const fv_problem *problem);
} fv_attend_variant;

typedef fv_status (*fv_reduce_segments_fn)(const fv_launch *launch, const fv_reduce_params *params);

#endif
