/* What the strategies of attend_paged share: the item as they see it, the way from keys to their rows,
 * the score after the dot product, and the end of a row.
 *
 * Row m of an item and a KV head is query token m / G with query head m % G of the group. Scores
 * are kept in base 2: s = score * log2(e). */
#ifndef FV_KERNELS_CPU_ATTEND_ITEM_H
#define FV_KERNELS_CPU_ATTEND_ITEM_H

#include <assert.h>
#include <float.h>
#include <math.h>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/kv_row.h"
#include "ops/attend_paged.h"

/* Scores are clamped to this, so that an overflow of the dot product cannot end in inf - inf. */
#define FV_SCORE_LIMIT 3e38f

/* Where rows of keys and values lie: in the cache, or dense. */
typedef struct fv_key_source {
    fv_kv_plane k, v;     /* of dense rows: a slot is a row */
    fv_kv_plane k_shared; /* the last shared_size elements of each key, of dense rows only */
    int32_t shared_size;  /* 0: `k` has whole keys */
    fv_dtype stored;
    fv_dtype dtype;                 /* as the kernels read the rows: `stored`, or fp32 */
    int32_t k_in_place, v_in_place; /* 0: rows are copied first, see fv_attend_copy_row */
} fv_key_source;                    /* k_in_place: each part of a key is in lane order by itself */

typedef struct fv_attend_job {
    const fv_attend_params *params;
    const fv_work_item *item;
    const int32_t *table; /* the sequence's row of the block table; NULL: no cache */
    int64_t context;      /* global position of the sequence's first new token */
    int32_t batch_token;  /* of the batch: the item's first */
    int32_t seq_len;
    int32_t causal;
    int32_t group;     /* G */
    int32_t num_rows;  /* for each KV head */
    fv_key_range keys; /* of the item that some row sees */

    fv_key_source cache; /* of the keys before dense_from */
    fv_key_source dense; /* of the others */
    int32_t dense_from;  /* INT32_MAX: no key is a dense row */
    int64_t dense_row;   /* of key 0, were it one; often negative */
    fv_dtype lane_dtype; /* whose lane order queries, keys and sums have */

    /* Scales of whole heads. Where only a part of the keys has scales all are those of single keys
     * (fv_attend_find_scales), and these are NULL. */
    const float *k_head_scale, *v_head_scale;
    int32_t has_k_scales, has_v_scales; /* of single keys */
    int32_t is_asked_for;               /* 1: its first keys, by who did the item before */
} fv_attend_job;

/* Constants of the score of one KV head, finite where those of the call are: 0 times infinity is no number. */
typedef struct fv_score_scale {
    float dot; /* factor of the dot product; with a soft cap, of its argument */
    float cap; /* 0: none; else cap * log2(e) */
} fv_score_scale;

static inline fv_key_source fv_cache_source(const fv_kv_view *cache)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(cache->dtype);
    return (fv_key_source){
        .k = cache->k,
        .v = cache->v,
        .stored = cache->dtype,
        .dtype = cache->dtype,
        .k_in_place = fv_plane_is_dense(&cache->k, bytes),
        .v_in_place = fv_plane_is_dense(&cache->v, bytes),
    };
}

static inline fv_key_source fv_dense_source(const fv_dense_keys *dense, int32_t head_size, fv_dtype lane_dtype)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(dense->dtype);
    const int32_t is_native = dense->dtype == lane_dtype;
    const int32_t shared_size = dense->k_shared ? dense->shared_size : 0;
    assert(shared_size % FV_LANES == 0 && shared_size <= head_size);
    return (fv_key_source){
        .k = {.data = (void *)dense->k,
              .head_stride = dense->k_head_stride,
              .slot_stride = dense->k_token_stride,
              .element_stride = bytes},
        .v = {.data = (void *)dense->v,
              .head_stride = dense->v_head_stride,
              .slot_stride = dense->v_token_stride,
              .element_stride = bytes},
        .k_shared = {.data = (void *)dense->k_shared,
                     .slot_stride = dense->k_shared_token_stride,
                     .element_stride = bytes},
        .shared_size = shared_size,
        .stored = dense->dtype,
        .dtype = is_native ? dense->dtype : FV_DTYPE_F32,
        .k_in_place = is_native && (shared_size == 0 || (head_size - shared_size) % 16 == 0),
        .v_in_place = is_native,
    };
}

static inline void fv_attend_job_set_sources(fv_attend_job *job)
{
    const fv_attend_params *params = job->params;
    const fv_dense_keys *dense = &params->dense;
    const fv_kv_view *cache = &params->cache;
    const int32_t seq = job->item->seq;
    const int32_t has_cache = cache->dtype != FV_DTYPE_NONE;
    const int32_t has_head_scales = params->num_kv_scales > 0;

    job->lane_dtype = has_cache ? cache->dtype : dense->dtype;
    job->dense_from = INT32_MAX;
    if (has_cache) job->cache = fv_cache_source(cache);
    if (params->block_table) job->table = params->block_table + job->item->table_row * params->block_table_stride;
    if (dense->k) {
        assert(params->context_parallel.world <= 1);
        job->dense = fv_dense_source(dense, params->head_size, job->lane_dtype);
        job->dense_from = dense->key_row ? 0 : (int32_t)job->context;
        job->dense_row = dense->key_row ? dense->key_row[seq] : params->query_start[seq] - job->context;
    }
    assert(job->keys.first >= job->keys.end || job->keys.first >= job->dense_from || (has_cache && job->table));

    const int32_t mixes = dense->k && has_head_scales;
    job->k_head_scale = mixes ? NULL : params->k_scale;
    job->v_head_scale = mixes ? NULL : params->v_scale;
    job->has_k_scales = cache->k_scales.data || (mixes && params->k_scale);
    job->has_v_scales = cache->v_scales.data || (mixes && params->v_scale);
}

static inline fv_attend_job fv_attend_job_of(const fv_attend_params *params, const fv_work_item *item)
{
    const int32_t seq = item->seq;
    const int32_t start = params->query_start[seq];
    const int32_t query_len = params->query_start[seq + 1] - start;
    fv_attend_job job = {
        .params = params,
        .item = item,
        .context = (int64_t)params->seq_lens[seq] - query_len,
        .batch_token = start + item->first_token,
        .seq_len = params->seq_lens[seq],
        .causal = params->causal ? params->causal[seq] : 1,
        .group = params->num_heads / params->num_kv_heads,
    };
    job.num_rows = item->num_tokens * job.group;
    assert(job.num_rows <= fv_max_i32(params->block_q * job.group, FV_DECODE_ROWS)); /* scratch has room for no more */
    job.keys = fv_block_keys(&params->context_parallel, job.seq_len, job.context, item->first_token, item->num_tokens,
                             job.causal, params->window);
    job.keys.first = fv_max_i32(job.keys.first, item->first_key);
    job.keys.end = fv_min_i32(job.keys.end, item->end_key);
    if (job.keys.first >= job.keys.end) job.keys = (fv_key_range){0, 0};
    fv_attend_job_set_sources(&job);
    return job;
}

/* Keys of the item that its token `token` sees, before a tree mask. */
static inline fv_key_range fv_attend_token_keys(const fv_attend_job *job, int32_t token)
{
    const int64_t position = job->context + job->item->first_token + token;
    fv_key_range keys = fv_row_keys(&job->params->context_parallel, job->seq_len, position, job->causal,
                                    job->params->window);
    keys.first = fv_max_i32(keys.first, job->keys.first);
    keys.end = fv_min_i32(keys.end, job->keys.end);
    return keys;
}

/* The same for row `row`. */
static inline fv_key_range fv_attend_row_keys(const fv_attend_job *job, int32_t row)
{
    return fv_attend_token_keys(job, row / job->group);
}

static inline const char *fv_attend_q_row(const fv_attend_job *job, int32_t kv_head, int32_t row)
{
    const int32_t token = job->batch_token + row / job->group;
    const int32_t head = kv_head * job->group + row % job->group;
    return (const char *)job->params->q + token * job->params->q_token_stride + head * job->params->q_head_stride;
}

/* --- from keys to their rows ----------------------------------------------------------------------- */

/* The end of the run of keys [first, ...) that share a source, at most `end`. */
static inline int32_t fv_attend_source_end(const fv_attend_job *job, int32_t first, int32_t end)
{
    return first < job->dense_from ? fv_min_i32(end, job->dense_from) : end;
}

/* Where key `key` lies. */
static inline const fv_key_source *fv_attend_source_of(const fv_attend_job *job, int32_t key)
{
    return key < job->dense_from ? &job->cache : &job->dense;
}

/* rows[i] = element 0 of key first + i, KV head 0. The keys share a source, `plane` is of it. */
static inline void fv_attend_find_rows(const char **rows, const fv_attend_job *job, const fv_kv_plane *plane,
                                       int32_t first, int32_t end)
{
    if (first >= job->dense_from) {
        for (int32_t key = first; key < end; key++) {
            *rows++ = (const char *)plane->data + (job->dense_row + key) * plane->slot_stride;
        }
        return;
    }
    const int32_t block_size = job->params->cache.block_size;
    int32_t index = first / block_size;
    int32_t slot = first % block_size;
    for (int32_t key = first; key < end; index++, slot = 0) {
        const char *block = (const char *)plane->data + job->table[index] * plane->block_stride;
        const int32_t num = fv_min_i32(block_size - slot, end - key);
        for (int32_t i = 0; i < num; i++) *rows++ = block + fv_kv_slot_offset(plane, slot + i);
        key += num;
    }
}

/* Copies a row that the kernels cannot read in place: side by side, as source->dtype, lane order. */
static inline void fv_attend_copy_row(void *to, const char *row, const fv_attend_job *job, const fv_key_source *source,
                                      const fv_kv_plane *plane, int32_t num_elements)
{
    if (source->stored == job->lane_dtype)
        fv_row_gather(to, row, plane, 0, num_elements, fv_dtype_bytes(source->stored));
    else
        fv_row_load_lanes(to, row, num_elements, source->stored, job->lane_dtype);
}

/* The same for the whole key `key`, whose own part is `row`. */
static inline void fv_attend_copy_key(void *to, const char *row, const fv_attend_job *job, const fv_key_source *source,
                                      int32_t key)
{
    const int32_t head_size = job->params->head_size;
    if (source->shared_size == 0) {
        fv_attend_copy_row(to, row, job, source, &source->k, head_size);
        return;
    }
    const int32_t own_size = head_size - source->shared_size;
    const char *shared = (const char *)source->k_shared.data + (job->dense_row + key) * source->k_shared.slot_stride;
    const size_t bytes = fv_dtype_bytes(source->stored);
    if (source->stored == job->lane_dtype) {
        memcpy(to, row, (size_t)own_size * bytes);
        memcpy((char *)to + (size_t)own_size * bytes, shared, (size_t)source->shared_size * bytes);
        return;
    }
    float *natural = to;
    fv_row_load_lanes(natural, row, own_size, source->stored, FV_DTYPE_F32);
    fv_row_load_lanes(natural + own_size, shared, source->shared_size, source->stored, FV_DTYPE_F32);
    fv_row_load_lanes(natural, natural, head_size, FV_DTYPE_F32, job->lane_dtype);
}

/* Those of four slots. */
static inline fv_f32x4 fv_scales_at4(const fv_scale_plane *plane, int64_t block, int64_t slot, int64_t head)
{
    const char *at = fv_scale_address(plane, block, slot, head);
    float scales[4];
    for (int32_t i = 0; i < 4; i++) memcpy(&scales[i], at + i * plane->slot_stride, sizeof(float));
    return (fv_f32x4){scales[0], scales[1], scales[2], scales[3]};
}

/* Scales of the keys [first, end) of one head where the job has such: those of `plane`, times that of
 * the head if only a part of the keys has scales; 1 for dense rows. */
static inline void fv_attend_find_scales(float *scales, const fv_attend_job *job, const fv_scale_plane *plane,
                                         const float *head_scale, int32_t kv_head, int32_t first, int32_t end)
{
    const fv_attend_params *params = job->params;
    const int32_t block_size = params->cache.block_size;
    const int32_t cache_end = fv_min_i32(end, job->dense_from);
    const float of_head = params->dense.k ? fv_head_scale_of(head_scale, params->num_kv_scales, kv_head) : 1.0f;
    int32_t key = first, num;
    for (; key < cache_end; key += num) {
        const int32_t slot = key % block_size;
        num = fv_min_i32(block_size - slot, cache_end - key);
        const int64_t block = plane->data ? job->table[key / block_size] : 0;
        int32_t i = 0;
        for (; plane->data && i + 4 <= num; i += 4, scales += 4) {
            const fv_f32x4 of_keys = of_head * fv_scales_at4(plane, block, slot + i, kv_head);
            memcpy(scales, &of_keys, sizeof(of_keys));
        }
        for (; i < num; i++) *scales++ = of_head * fv_scale_at(plane, block, slot + i, kv_head);
    }
    for (; key < end; key++) *scales++ = 1.0f;
}

/* --- the score -------------------------------------------------------------------------------------- */

static inline fv_score_scale fv_attend_score_scale(const fv_attend_job *job, int32_t kv_head)
{
    const fv_attend_params *params = job->params;
    const float scale = params->scale * fv_head_scale_of(job->k_head_scale, params->num_kv_scales, kv_head);
    const float dot = params->soft_cap > 0 ? scale / params->soft_cap : scale * FV_LOG2E;
    return (fv_score_scale){
        .dot = isinf(dot) ? copysignf(FLT_MAX, dot) : dot,
        .cap = params->soft_cap > 0 ? params->soft_cap * FV_LOG2E : 0.0f,
    };
}

FV_ALWAYS_INLINE fv_f32x8 fv_attend_score(fv_f32x8 dot, fv_score_scale scale)
{
    fv_f32x8 score = dot * scale.dot;
    if (scale.cap > 0) score = fv_tanh(score) * scale.cap;
    return fv_max(fv_splat(-FV_SCORE_LIMIT), fv_min(fv_splat(FV_SCORE_LIMIT), score));
}

/* What ALiBi adds, in base 2: `slope` includes log2(e), `distance` = key position - query position. */
FV_ALWAYS_INLINE fv_f32x8 fv_attend_alibi(fv_i32x8 distance, fv_f32x8 slope, fv_alibi alibi)
{
    if (alibi == FV_ALIBI_LINEAR) return slope * __builtin_convertvector(distance, fv_f32x8);
    fv_f32x8 root;
    for (int32_t i = 0; i < FV_LANES; i++) root[i] = distance[i] < 0 ? sqrtf(-(float)distance[i]) : 0.0f;
    return -slope * root;
}

/* The first of the sequence's keys that a tree mask may hide. */
static inline int32_t fv_attend_tree_first(const fv_attend_job *job)
{
    const fv_attend_params *params = job->params;
    return params->tree_mask ? fv_local_keys(&params->context_parallel, job->context) : INT32_MAX;
}

/* The least number of keys that a row with these sees: a tree mask may hide some. */
static inline int32_t fv_attend_least_keys(const fv_attend_job *job, int32_t first, int32_t end)
{
    return job->params->tree_mask ? fv_max_i32(end - first - FV_TREE_TOKENS, 1) : end - first;
}

/* 1: `mask`, of a query token, lets it see number new_token of the sequence's new tokens, or a key before them. */
FV_ALWAYS_INLINE int32_t fv_tree_sees(uint64_t mask, int64_t new_token)
{
    if (new_token < 0) return 1;
    return new_token < FV_TREE_TOKENS ? (int32_t)(mask >> new_token & 1) : 0;
}

/* The same of the row's token and the key at a global position. */
static inline int32_t fv_attend_tree_sees(const fv_attend_job *job, int32_t row, int64_t key_position)
{
    return fv_tree_sees(job->params->tree_mask[job->batch_token + row / job->group], key_position - job->context);
}

/* --- the end of a row --------------------------------------------------------------------------------- */

/* Writes the row's result: `sums` are its unnormalised outputs in lane order, `max` its largest score
 * in base 2 (-inf: no key, or NaN alone), `sum` its denominator. */
static inline void fv_attend_finish_row(const fv_attend_job *job, int32_t kv_head, int32_t row, const float *sums,
                                        float max, float sum)
{
    const fv_attend_params *params = job->params;
    const int32_t head = kv_head * job->group + row % job->group;
    const int64_t token = row / job->group;
    if (sum != sum) max = sum; /* maxima pass NaN by: a row that sees nothing else is not one without keys */
    const int32_t is_empty = max == -INFINITY;
    const float v_scale = fv_head_scale_of(job->v_head_scale, params->num_kv_scales, kv_head);

    if (job->item->partial >= 0) {
        const int64_t at = (job->item->partial + token) * params->num_heads + head;
        fv_row_store_lanes(params->partial_out + at * params->v_head_size, sums, is_empty ? 0.0f : v_scale,
                           params->v_head_size, FV_DTYPE_F32, job->lane_dtype);
        params->partial_max[at] = max * FV_LN2;
        params->partial_sum[at] = is_empty ? 0.0f : sum;
        return;
    }

    float weight = 1.0f;
    if (params->sinks && !is_empty) {
        const float sink = params->sinks[head] * FV_LOG2E;
        const float total_max = sink > max ? sink : max;
        weight = exp2f(max - total_max);
        sum = sum * weight + exp2f(sink - total_max);
        max = total_max;
    }
    const int64_t out_row = job->batch_token + token - params->out_first_token;
    char *out = (char *)params->out + out_row * params->out_token_stride + head * params->out_head_stride;
    fv_row_store_lanes(out, sums, is_empty ? 0.0f : v_scale * weight / sum, params->v_head_size, params->out_dtype,
                       job->lane_dtype);
    if (!params->lse) return;
    char *lse = (char *)params->lse + out_row * params->lse_token_stride + head * params->lse_head_stride;
    *(float *)(void *)lse = is_empty ? -INFINITY : max * FV_LN2 + logf(sum);
}

/* A part of the scratch memory; with `base` NULL only counts. Parts are aligned to cache lines. */
static inline void *fv_scratch_take(void *base, size_t *used, size_t bytes)
{
    void *part = base ? (char *)base + *used : NULL;
    *used += (size_t)fv_round_up((int64_t)bytes, FV_CACHE_LINE);
    return part;
}

/* The same, aligned to a multiple of FV_CACHE_LINE, whatever `base` is. */
static inline void *fv_scratch_take_aligned(void *base, size_t *used, size_t bytes, size_t alignment)
{
    const uintptr_t part = (uintptr_t)fv_scratch_take(base, used, bytes + alignment);
    return (void *)((part + alignment - 1) / alignment * alignment);
}

/* --- the strategies ------------------------------------------------------------------------------------ */

/* FV_DECODE_ROWS and below: few. An item has at most the larger of that and block_q tokens of rows. */
size_t FV_ISA_SYMBOL(fv_attend_few_scratch)(const fv_attend_params *params);

/* `next`: whose first keys are prefetched at the end, that of the worker's next item; without keys there is none. */
void FV_ISA_SYMBOL(fv_attend_few_rows)(const fv_attend_job *job, const fv_attend_job *next, void *scratch);

/* 0: not by this level, whose base takes the item. `num_rows` are those of the item's query. */
int32_t FV_ISA_SYMBOL(fv_attend_few_serves)(const fv_attend_job *job, int64_t num_rows);
/* The same of a level with pairs, of queries of any dtype over fp8; the scratch is that of few rows. */
int32_t FV_ISA_SYMBOL(fv_attend_few_bytes_serves)(const fv_attend_job *job, int64_t num_rows);
void FV_ISA_SYMBOL(fv_attend_few_bytes)(const fv_attend_job *job, const fv_attend_job *next, void *scratch);

size_t FV_BASE_SYMBOL(fv_attend_few_scratch)(const fv_attend_params *params);
void FV_BASE_SYMBOL(fv_attend_few_rows)(const fv_attend_job *job, const fv_attend_job *next, void *scratch);

size_t FV_ISA_SYMBOL(fv_attend_many_scratch)(const fv_attend_params *params);
void FV_ISA_SYMBOL(fv_attend_many_rows)(const fv_attend_job *job, void *scratch);

/* 0: not by this level, whose base takes the item. */
int32_t FV_ISA_SYMBOL(fv_attend_many_serves)(const fv_attend_job *job);
size_t FV_BASE_SYMBOL(fv_attend_many_scratch)(const fv_attend_params *params);
void FV_BASE_SYMBOL(fv_attend_many_rows)(const fv_attend_job *job, void *scratch);

/* The static grid as workers take it: cells of some KV heads each. */
typedef struct fv_attend_grid {
    const fv_attend_params *params;
    int32_t head_run;  /* KV heads of a cell */
    int32_t head_runs; /* cells of a segment */
    int64_t num_cells;
} fv_attend_grid;

/* Where all queries are short cells are of so many heads that each worker still has a few of them: so rows of the cache are read
 * whole. Else of one. */
static inline fv_attend_grid fv_attend_grid_of(const fv_attend_params *params, int32_t num_workers)
{
    enum { CELLS_OF_WORKER = 4 };
    const int32_t num_seqs = params->num_seqs_at ? *params->num_seqs_at : params->num_seqs;
    int32_t longest = 0, num_queries = 0;
    for (int32_t seq = 0; seq < num_seqs; seq++) {
        const int32_t query_len = params->query_start[seq + 1] - params->query_start[seq];
        longest = fv_max_i32(longest, query_len);
        num_queries += query_len > 0;
    }
    fv_attend_grid grid = {params, 1, params->num_kv_heads, 0};
    const int64_t segments = (int64_t)num_queries * params->num_segments,
                  wanted = (int64_t)CELLS_OF_WORKER * num_workers;
    if ((int64_t)longest * (params->num_heads / params->num_kv_heads) <= FV_DECODE_ROWS) {
        grid.head_runs = (int32_t)fv_min_i64(params->num_kv_heads, fv_ceil_div(wanted, fv_max_i64(1, segments)));
        grid.head_run = (int32_t)fv_ceil_div(params->num_kv_heads, grid.head_runs);
        grid.head_runs = (int32_t)fv_ceil_div(params->num_kv_heads, grid.head_run);
    }
    grid.num_cells = (int64_t)params->num_q_blocks * params->num_segments * grid.head_runs;
    return grid;
}

/* The item of cell `index`, those of a segment side by side; 0: the cell has none. */
static inline int32_t fv_attend_grid_item(fv_work_item *item, const fv_attend_grid *grid, int64_t index)
{
    const fv_attend_params *params = grid->params;
    const int32_t kv_head = (int32_t)(index % grid->head_runs) * grid->head_run;
    const int64_t cell = index / grid->head_runs;
    const int32_t has_work = fv_grid_item(item, params, (int32_t)(cell / params->num_segments), kv_head,
                                          (int32_t)(cell % params->num_segments));
    item->num_kv_heads = fv_min_i32(grid->head_run, params->num_kv_heads - kv_head);
    return has_work;
}

/* Without the cache, whose dtype and scales would have a say in how dense rows are read. */
static inline fv_attend_params fv_attend_without_cache(const fv_attend_params *params)
{
    fv_attend_params dense = *params;
    dense.cache = (fv_kv_view){0};
    dense.block_table = NULL;
    dense.k_scale = dense.v_scale = NULL;
    dense.num_kv_scales = 0;
    return dense;
}

#endif
