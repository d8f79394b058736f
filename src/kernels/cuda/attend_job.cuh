/* What the attention kernels share: the parameters as they see them, the rows of a block, the way from keys
 * to their places in memory, and the score after the dot product.
 *
 * Row m of an item and a KV head is query token m / G with query head m % G of the group. A block of threads
 * takes the rows of an item in blocks of its own, one after the other. Scores are kept in base 2:
 * s = score * log2(e). */
#ifndef FV_KERNELS_CUDA_ATTEND_JOB_CUH
#define FV_KERNELS_CUDA_ATTEND_JOB_CUH

#include <math.h>

#include "kernels/cuda/grid_item.cuh"
#include "kernels/cuda/narrow_index.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kvcache/kv_address.h"
#include "kvcache/latent_entry.h"

/* Scores are clamped to this, so that an overflow of the dot product cannot end in inf - inf. */
#define FV_SCORE_LIMIT 3e38f

/* Scores may pass the maximum that a row's sums are relative to by so much, in base 2, before those are rescaled: P up
 * to 2^8 loses nothing, and most rows are never rescaled after their first tile. The largest weight is rounded then, too:
 * not where the output is finer than P (attend_args.max_slack). */
#define FV_MAX_SLACK 8.0f

/* How eight neighbouring elements of a row come to shared memory. */
enum {
    FV_READ_ELEMENTS = 0, /* one by one: any dtype, and strides that are multiples of it */
    FV_READ_COPY = 1,     /* 16 bytes of the kernel's own 16-bit dtype: an asynchronous copy */
    FV_READ_CONVERT = 2,  /* 8 bytes of a 1-byte dtype, widened on the way */
    FV_READ_TRANSPOSE = 3 /* the same element of eight keys lies together instead: 16 or 8 bytes */
};

typedef struct attend_source {
    fv_kv_plane plane; /* dense rows: a slot is a row */
    fv_dtype dtype;
    int32_t read;
    int32_t chunk_shift;  /* FV_READ_COPY, _CONVERT: 2^chunk_shift chunks of 8 elements lie together, ... */
    int64_t chunk_stride; /* ... and the next ones so many bytes on */
    int32_t keys_first;   /* FV_READ_ELEMENTS: neighbours in memory are the same element of the next key */
} attend_source;

/* What a block of decode needs first follows what params ends with: parameters come to a multiprocessor a line at a time. */
typedef struct attend_args {
    fv_attend_params params;
    index_divisor block;     /* slots of a block */
    index_divisor row_parts; /* blocks of threads, neighbours in the grid, that share an item's rows; or the fours
                              * that each of those that share its keys ends (hopper/attend_few_meeting.cuh) */
    index_divisor kv_heads, group, segments; /* num_kv_heads, their query heads, num_segments */
    int32_t num_jobs; /* items times KV heads, or cells; -1: those of the sequences of whole queries in the batch */
    int32_t pages_hold_tiles; /* 1: 16 keys from a multiple of 16 on lie in one page of a plain cache */
    int32_t planes_alike;     /* 1: values of a plain cache lie as its keys do, at strides of 32 bits */
    float max_slack;          /* FV_MAX_SLACK; 0: the largest weight is to be 1 */
    int32_t num_whole;        /* of a list: blocks of threads of items that no two blocks share, the first ones, ... */
    int32_t first_split;      /* ... and the first of the others, a multiple of 2; INT32_MAX: there is none */
    int32_t out_pairs;        /* 1: two neighbouring elements of out can be written at once */
    attend_source k[3], v[2]; /* [0] in the cache, [1] dense rows, [2] what the heads of dense keys share */
    index_divisor tile;       /* tile_keys */
    int32_t own_size;         /* elements of a dense key that are its head's own */
    int32_t key_scales;       /* 1: scales are those of single keys, else of the head */
    float p_factor;           /* with key_scales: P carries it, to stay clear of fp16's subnormals */
    int32_t is_narrow;        /* 1: all entries are of one byte, and in chunks: see widen_tile */
    int32_t is_special;       /* 1: scores need more than scale and mask */
    int32_t is_latent;        /* 1: the value is the start of the key */
    int32_t is_ds;            /* 1: entries of FV_KV_LAYOUT_LATENT_FP8_DS */
    float inverse_soft_cap;
    int32_t q_vectors; /* 1: rows of q can be read 16 bytes at a time */
    fv_rescaling rescaling;
    /* Maps of a cache's keys and values, as [block][slot][element]; element d of head h, block b is at x = d + h map_head_x,
     * z = b map_block_z + h map_head_z. Of latents [0] alone, at x = d, z = b. */
    int32_t map_rows; /* slots of a box, of one page; 0: there are no maps */
    int32_t map_head_x, map_head_z, map_block_z;
    fv_tensor_map maps[2];
} attend_args;

/* One row of a block, in shared memory. */
typedef struct attend_row {
    int32_t first, end; /* keys of the item that it sees, before a tree mask; none: no row, or nothing to see */
    int32_t token;      /* of the batch */
    int32_t head;
    int32_t position; /* global */
    float slope;      /* ALiBi, times log2(e) */
    uint64_t tree;
} attend_row;

/* The keys that a block of rows has to go through, in shared memory. */
typedef struct attend_keys {
    int32_t first, end;           /* that some row sees */
    int32_t full_first, full_end; /* that all rows see */
} attend_keys;

/* An item and one of its KV heads. */
typedef struct attend_job {
    fv_work_item item;
    int32_t kv_head;
    int32_t group;    /* G */
    int32_t num_rows; /* of the item */
    int32_t query_start, seq_len, causal;
    int32_t context; /* global position of the sequence's first new token */
    int32_t dense_from;
    int64_t dense_row; /* of key 0, were it one */
    const int32_t *table;
    float k_head_scale, v_head_scale;
} attend_job;

/* Which of the blocks that share an item's rows this one is. */
static __device__ __forceinline__ int32_t row_part_of_block(const attend_args *args)
{
    const int32_t block = (int32_t)blockIdx.x;
    return block - divide_index(block, args->row_parts) * (int32_t)args->row_parts.by;
}

/* One head of an item of the list; false: the item has fewer. */
static __device__ __forceinline__ bool find_list_item(fv_work_item *item, const attend_args *args, int32_t at,
                                                      int32_t head)
{
    *item = args->params.items[at];
    if (head >= item->num_kv_heads) return false;
    item->first_kv_head += head;
    item->num_kv_heads = 1;
    return true;
}

static __device__ __forceinline__ bool find_item(fv_work_item *item, const attend_args *args)
{
    const fv_attend_params *params = &args->params;
    const int32_t block = divide_index((int32_t)blockIdx.x, args->row_parts);
    if (params->items) { /* heads of an item side by side */
        const int32_t at = divide_index(block, args->kv_heads);
        return find_list_item(item, args, at, block - at * params->num_kv_heads);
    }
    /* Last Q blocks first: causal ones have the most keys. */
    return find_grid_item(item, params, params->num_q_blocks - 1 - block, (int32_t)blockIdx.y, (int32_t)blockIdx.z);
}

/* The number of the next job of a block that stays and had number `number`. The last of all blocks to find none leaves the
 * counter as it was. */
static __device__ __forceinline__ int32_t claim_job(const attend_args *args, int32_t number, int32_t num_jobs)
{
    int32_t *claims = args->params.claims;
    if (!claims) return number + (int32_t)gridDim.x;
    const int32_t taken = atomicAdd(claims, 1);
    if (taken == num_jobs - 1) *claims = 0;
    return taken + (int32_t)gridDim.x;
}

/* What the batch says of a sequence, and the scales of a head. */
typedef struct attend_lengths {
    int32_t query_start, query_end, seq_len, causal;
    float k_head_scale, v_head_scale;
} attend_lengths;

static __device__ __forceinline__ attend_lengths load_lengths(const attend_args *args, const fv_work_item *item)
{
    const fv_attend_params *params = &args->params;
    const int32_t seq = item->seq, kv_head = item->first_kv_head;
    attend_lengths lengths = {item->query_start, item->query_end, item->seq_len};
    lengths.causal = params->causal ? params->causal[seq] : 1;
    lengths.k_head_scale = fv_scale_of_head(params->k_scale, params->num_kv_scales, kv_head);
    lengths.v_head_scale = args->is_latent ? lengths.k_head_scale
                                           : fv_scale_of_head(params->v_scale, params->num_kv_scales, kv_head);
    return lengths;
}

/* The job of an item's KV head, where all keys are in the cache. */
static __device__ __forceinline__ attend_job cached_job_of(const attend_args *args, const fv_work_item *item,
                                                           int32_t kv_head, const attend_lengths *lengths)
{
    const fv_attend_params *params = &args->params;
    attend_job job;
    job.item = *item;
    job.kv_head = kv_head;
    job.group = (int32_t)args->group.by;
    job.num_rows = item->num_tokens * job.group;
    job.query_start = lengths->query_start;
    job.seq_len = lengths->seq_len;
    job.causal = lengths->causal;
    job.context = job.seq_len - (lengths->query_end - job.query_start);
    job.dense_from = INT32_MAX;
    job.dense_row = 0;
    job.table = params->block_table + item->table_row * params->block_table_stride;
    job.k_head_scale = lengths->k_head_scale;
    job.v_head_scale = lengths->v_head_scale;
    return job;
}

static __device__ __forceinline__ attend_job job_of(const attend_args *args, const fv_work_item *item, int32_t kv_head,
                                                    const attend_lengths *lengths)
{
    const fv_attend_params *params = &args->params;
    attend_job job = cached_job_of(args, item, kv_head, lengths);
    if (params->dense.k) {
        job.dense_from = params->dense.key_row ? 0 : job.context;
        job.dense_row = params->dense.key_row ? params->dense.key_row[item->seq]
                                              : (int64_t)job.query_start - job.context;
    }
    return job;
}

/* The job of an item's first KV head. */
static __device__ __forceinline__ attend_job job_of_item(const attend_args *args, const fv_work_item *item)
{
    const attend_lengths lengths = load_lengths(args, item);
    return job_of(args, item, item->first_kv_head, &lengths);
}

/* The job of a block of threads; false: there is none for it. */
static __device__ __forceinline__ bool find_job(attend_job *job, const attend_args *args)
{
    fv_work_item item;
    if (!find_item(&item, args)) return false;
    *job = job_of_item(args, &item);
    return true;
}

/* Row `r` of a job; all zeros behind its last one. */
static __device__ __forceinline__ attend_row row_of(const attend_args *args, const attend_job *job, int32_t r)
{
    const fv_attend_params *params = &args->params;
    attend_row row = {};
    if (r >= job->num_rows) return row;
    const int32_t token = divide_index(r, args->group), new_token = job->item.first_token + token;
    row.token = job->query_start + new_token;
    row.head = job->kv_head * job->group + r - token * job->group;
    row.position = job->context + new_token;
    const fv_key_range seen = row_keys(&params->context_parallel, job->seq_len, row.position, job->causal,
                                       params->window);
    row.first = fv_max_i32(seen.first, job->item.first_key);
    row.end = fv_max_i32(row.first, fv_min_i32(seen.end, job->item.end_key));
    row.slope = params->alibi != FV_ALIBI_NONE && params->alibi_slopes ? params->alibi_slopes[row.head] * FV_LOG2E
                                                                       : 0.0f;
    row.tree = params->tree_mask ? params->tree_mask[row.token] : 0;
    return row;
}

/* Fills the rows [row0, row0 + num_threads' share) of a block and what keys they have; two barriers. */
template <int BLOCK_M>
static __device__ __forceinline__ void find_rows(attend_row *rows, attend_keys *keys, const attend_args *args,
                                                 const attend_job *job, int32_t row0)
{
    if (threadIdx.x == 0) {
        keys->first = keys->full_end = INT32_MAX;
        keys->end = keys->full_first = 0;
    }
    __syncthreads();
    for (int32_t r = threadIdx.x; r < BLOCK_M; r += blockDim.x) {
        const attend_row row = row_of(args, job, row0 + r);
        if (row0 + r < job->num_rows) {
            if (row.first < row.end) {
                atomicMin(&keys->first, row.first);
                atomicMax(&keys->end, row.end);
            }
            atomicMax(&keys->full_first, row.first);
            atomicMin(&keys->full_end, row.end);
        }
        rows[r] = row;
    }
    __syncthreads();
}

/* Where a row of q begins. */
static __device__ __forceinline__ const char *query_row(const fv_attend_params *params, const attend_row *row)
{
    return (const char *)params->q + row->token * params->q_token_stride + row->head * params->q_head_stride;
}

/* --- keys ---------------------------------------------------------------------------------------------- */

/* Where the rows of a tile's keys begin, and their scales, in shared memory. */
template <int TILE> struct attend_tile {
    const char *k[TILE]; /* NULL: no key of the block of rows; zeros stand for it */
    const char *v[TILE];
    const char *shared[TILE]; /* the end of a dense key that all heads share */
    float k_scale[TILE];      /* with key_scales only */
    float v_scale[TILE];
    int32_t position[TILE]; /* global; with is_special only */
    uint8_t is_dense[TILE];
};

static __device__ __forceinline__ float load_key_scale(const fv_scale_plane *plane, int64_t block, int64_t slot,
                                                       int32_t head)
{
    if (!plane->data) return 1.0f;
    const uint8_t *from = (const uint8_t *)fv_scale_address(plane, block, slot, head); /* at any alignment */
    return __uint_as_float((uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 |
                           (uint32_t)from[3] << 24);
}

/* Where a dense row of a head begins. */
static __device__ __forceinline__ const char *dense_row(const attend_source *source, int64_t row, int32_t head)
{
    return (const char *)source->plane.data + row * source->plane.slot_stride + head * source->plane.head_stride;
}

/* The keys first_key .. first_key + TILE - 1, a thread for each. */
template <int TILE>
static __device__ __forceinline__ void find_keys(attend_tile<TILE> *tile, const attend_args *args,
                                                 const attend_job *job, const attend_keys *keys, int32_t first_key)
{
    const fv_attend_params *params = &args->params;
    for (int32_t i = threadIdx.x; i < TILE; i += blockDim.x) {
        const int32_t key = first_key + i;
        const char *k = NULL, *v = NULL, *shared = NULL;
        float k_scale = 1, v_scale = 1;
        const bool is_dense = key >= job->dense_from;
        if (key < keys->first || key >= keys->end) { /* nothing */
        } else if (is_dense) {
            k = dense_row(&args->k[1], job->dense_row + key, job->kv_head);
            v = dense_row(&args->v[1], job->dense_row + key, job->kv_head);
            shared = dense_row(&args->k[2], job->dense_row + key, 0);
        } else {
            const int32_t at = (int32_t)((uint32_t)key / (uint32_t)params->cache.block_size),
                          slot = key - at * params->cache.block_size;
            const int64_t block = job->table[at];
            k = (const char *)args->k[0].plane.data + row_offset(&args->k[0].plane, block, job->kv_head, slot);
            v = (const char *)args->v[0].plane.data + row_offset(&args->v[0].plane, block, job->kv_head, slot);
            if (args->key_scales) {
                k_scale = job->k_head_scale * load_key_scale(&params->cache.k_scales, block, slot, job->kv_head);
                v_scale = args->is_latent
                              ? k_scale
                              : job->v_head_scale * load_key_scale(&params->cache.v_scales, block, slot, job->kv_head);
            }
        }
        tile->k[i] = k;
        tile->v[i] = v;
        tile->shared[i] = shared;
        tile->k_scale[i] = k_scale;
        tile->v_scale[i] = v_scale * args->p_factor;
        tile->is_dense[i] = is_dense;
        if (args->is_special) tile->position[i] = key_position(&params->context_parallel, key);
    }
}

/* Block and slot of a key. */
static __device__ __forceinline__ int2 split_key(const attend_args *args, int32_t key)
{
    const int32_t at = divide_index(key, args->block);
    return make_int2(at, key - at * (int32_t)args->block.by);
}

/* Where a row of a plain cache begins. */
static __device__ __forceinline__ const char *plain_row(const fv_kv_plane *plane, int64_t block, int32_t head,
                                                        int32_t slot)
{
    return (const char *)plane->data + block * plane->block_stride + head * plane->head_stride +
           slot * plane->slot_stride;
}

/* --- scores -------------------------------------------------------------------------------------------- */

/* cap * tanh(score / cap), finite for any number. */
static __device__ __forceinline__ float cap_score(const attend_args *args, float score)
{
    const float number = ptx_min_or_nan(ptx_max_or_nan(score, -FV_SCORE_LIMIT), FV_SCORE_LIMIT);
    return args->params.soft_cap * tanhf(number * args->inverse_soft_cap);
}

/* What ALiBi adds to a score, in base 2. */
static __device__ __forceinline__ float alibi_of(fv_alibi alibi, float slope, int32_t key_at, int32_t position)
{
    const float distance = (float)(key_at - position);
    if (alibi == FV_ALIBI_LINEAR) return slope * distance;
    return distance < 0 ? -slope * ptx_sqrt(-distance) : 0.0f;
}

/* 0 where the tree mask of a row hides the key at global position `key_at`. */
static __device__ __forceinline__ bool tree_shows(uint64_t tree, int32_t context, int32_t key_at)
{
    const int32_t new_token = key_at - context;
    return new_token < 0 || (new_token < 64 && (tree >> new_token & 1));
}

/* --- the end of a row ---------------------------------------------------------------------------------- */

/* Maximum, sum and the factor that the sums of values still lack. */
typedef struct attend_end {
    float max, sum;   /* base 2; of the row */
    float out_factor; /* 0: the row has no key */
    int64_t partial;  /* place of the partial result, -1: none */
    int64_t out_row;  /* of out and lse */
} attend_end;

/* Where it goes; the rest says that it has no key. */
static __device__ __forceinline__ attend_end place_row(const attend_args *args, const attend_job *job,
                                                       const attend_row *row)
{
    attend_end end = {-INFINITY, 0.0f, 0.0f, -1, (int64_t)row->token - args->params.out_first_token};
    if (job->item.partial < 0) return end;
    const int32_t token = row->token - job->query_start - job->item.first_token;
    end.partial = ((int64_t)job->item.partial + token) * args->params.num_heads + row->head;
    return end;
}

/* `values_factor`: what all values still have to be multiplied by. */
static __device__ __forceinline__ void finish_row(attend_end *end, const attend_args *args, const attend_row *row,
                                                  float max, float sum, float values_factor)
{
    const fv_attend_params *params = &args->params;
    if (max == -INFINITY && sum != sum)
        max = 0; /* maxima pass NaN by: a row of nothing else has keys, at any maximum */
    const bool has_keys = max > -INFINITY;
    end->max = max;
    end->sum = sum;
    if (end->partial >= 0) {
        end->out_factor = has_keys ? values_factor : 0.0f;
        return;
    }
    if (!has_keys) return;
    float factor = 1;
    if (params->sinks) {
        const float sink = params->sinks[row->head] * FV_LOG2E;
        end->max = fmaxf(max, sink);
        factor = exp2f(max - end->max);
        end->sum = sum * factor + exp2f(sink - end->max);
    }
    end->out_factor = __fdividef(values_factor * factor, end->sum); /* no call: registers are full of sums */
}

/* Both. */
static __device__ __forceinline__ attend_end end_row(const attend_args *args, const attend_job *job,
                                                     const attend_row *row, float max, float sum, float values_factor)
{
    attend_end end = place_row(args, job, row);
    finish_row(&end, args, row, max, sum, values_factor);
    return end;
}

/* Maximum and sum of a partial result, in natural units. */
static __device__ __forceinline__ void store_partial_sums(float *max, float *sum, const attend_end *end)
{
    const bool has_keys = end->max > -INFINITY;
    *max = has_keys ? end->max * FV_LN2 : -INFINITY;
    *sum = has_keys ? end->sum : 0.0f;
}

/* LSE, or maximum and sum of a partial result: by one thread of a row. */
static __device__ __forceinline__ void store_sums(const attend_args *args, const attend_row *row, const attend_end *end)
{
    const fv_attend_params *params = &args->params;
    const bool has_keys = end->max > -INFINITY;
    if (end->partial >= 0) {
        store_partial_sums(&params->partial_max[end->partial], &params->partial_sum[end->partial], end);
    } else if (params->lse) {
        *(float *)((char *)params->lse + end->out_row * params->lse_token_stride +
                   row->head * params->lse_head_stride) = has_keys ? (end->max + log2f(end->sum)) * FV_LN2 : -INFINITY;
    }
}

/* Where the elements of a row go. */
typedef struct attend_target {
    char *to;
    fv_dtype dtype;
    int32_t pairs;    /* 1: two elements at once */
    float out_factor; /* of what is stored */
} attend_target;

static __device__ __forceinline__ attend_target target_of(const attend_args *args, const attend_row *row,
                                                          const attend_end *end)
{
    const fv_attend_params *params = &args->params;
    attend_target target = {(char *)params->out + end->out_row * params->out_token_stride +
                                row->head * params->out_head_stride,
                            params->out_dtype, args->out_pairs && params->out_dtype != FV_DTYPE_F32, end->out_factor};
    if (end->partial < 0) return target;
    target.to = (char *)(params->partial_out + end->partial * params->v_head_size);
    target.dtype = FV_DTYPE_F32;
    target.pairs = 1;
    return target;
}

/* One element; a row without keys is 0, whatever its sums are. */
static __device__ __forceinline__ void store_element(const attend_target *target, int32_t d, float value)
{
    value = target->out_factor == 0.0f ? 0.0f : value * target->out_factor;
    if (target->dtype == FV_DTYPE_F32)
        ((float *)target->to)[d] = value;
    else if (target->dtype == FV_DTYPE_F16)
        ((__half *)target->to)[d] = fv_narrow<__half>(value);
    else
        ((__nv_bfloat16 *)target->to)[d] = fv_narrow<__nv_bfloat16>(value);
}

/* Elements d and d + 1 at once: of 16 bits, or of a partial result. */
static __device__ __forceinline__ void store_pair(const attend_target *target, int32_t d, float low, float high)
{
    low = target->out_factor == 0.0f ? 0.0f : low * target->out_factor;
    high = target->out_factor == 0.0f ? 0.0f : high * target->out_factor;
    if (target->dtype == FV_DTYPE_F32) {
        *(float2 *)(target->to + 4 * d) = make_float2(low, high);
        return;
    }
    *(uint32_t *)(target->to + 2 * d) = target->dtype == FV_DTYPE_F16 ? fv_narrow_pair<__half>(low, high)
                                                                      : fv_narrow_pair<__nv_bfloat16>(low, high);
}

#endif
