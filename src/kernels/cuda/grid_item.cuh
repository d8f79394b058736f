/* The static grid on the GPU: ops/grid.c. */
#ifndef FV_KERNELS_CUDA_GRID_ITEM_CUH
#define FV_KERNELS_CUDA_GRID_ITEM_CUH

#include "kernels/cuda/narrow_index.cuh"
#include "ops/attend_paged.h"

/* First token of Q block `q_block` within its sequence; -1 where no sequence has such a block. */
static __device__ __forceinline__ int32_t find_grid_block(int32_t *seq, const int32_t *query_start, int32_t num_seqs,
                                                          int32_t block_q, int32_t q_block, int32_t whole_queries)
{
    if (num_seqs <= 0) return -1;
    if (whole_queries) {
        *seq = q_block;
        return q_block < num_seqs && query_start[q_block] < query_start[q_block + 1] ? 0 : -1;
    }
    int32_t low = 0, high = num_seqs; /* last r with query_start[r] / block_q + r <= q_block */
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (query_start[middle] / block_q + middle <= q_block)
            low = middle;
        else
            high = middle;
    }
    *seq = low;
    const int32_t first_token = (q_block - (query_start[low] / block_q + low)) * block_q;
    return first_token < query_start[low + 1] - query_start[low] ? first_token : -1;
}

/* A segment of a Q block of which the sequence and the keys of a segment are known. */
static __device__ __forceinline__ fv_work_item grid_item_of(const fv_attend_params *params, int32_t seq, int2 query,
                                                            int32_t seq_len, int32_t first_token, int32_t kv_head,
                                                            int32_t segment, int32_t segment_keys)
{
    const int32_t local_len = local_keys(&params->context_parallel, seq_len);
    fv_work_item item;
    item.seq = seq;
    item.table_row = seq;
    item.first_token = first_token;
    item.num_tokens = fv_min_i32(params->block_q, query.y - query.x - first_token);
    item.first_kv_head = kv_head;
    item.num_kv_heads = 1;
    item.first_key = (int32_t)fv_min_i64((int64_t)segment * segment_keys, local_len);
    item.end_key = (int32_t)fv_min_i64(((int64_t)segment + 1) * segment_keys, local_len);
    item.partial = params->num_segments == 1
                       ? -1
                       : (query.x + first_token) * params->num_segments + segment * item.num_tokens;
    item.query_start = query.x;
    item.query_end = query.y;
    item.seq_len = seq_len;
    return item;
}

static __device__ __forceinline__ bool find_grid_item(fv_work_item *item, const fv_attend_params *params,
                                                      int32_t q_block, int32_t kv_head, int32_t segment)
{
    const int32_t num_seqs = params->num_seqs_at ? *params->num_seqs_at : params->num_seqs;
    int32_t seq;
    const int32_t first_token = find_grid_block(&seq, params->query_start, num_seqs, params->block_q, q_block,
                                                params->whole_queries);
    if (first_token < 0) return false;
    const int32_t seq_len = params->seq_lens[seq];
    const int32_t num_tiles = (local_keys(&params->context_parallel, seq_len) + params->tile_keys - 1) /
                              params->tile_keys;
    const int32_t segment_keys = (num_tiles + params->num_segments - 1) / params->num_segments * params->tile_keys;
    *item = grid_item_of(params, seq, make_int2(params->query_start[seq], params->query_start[seq + 1]), seq_len,
                         first_token, kv_head, segment, segment_keys);
    return true;
}

static __device__ __forceinline__ bool find_grid_reduce_item(fv_reduce_item *item, const fv_reduce_params *params,
                                                             int32_t q_block)
{
    const int32_t num_seqs = params->num_seqs_at ? *params->num_seqs_at : params->num_seqs;
    int32_t seq;
    const int32_t first_token = find_grid_block(&seq, params->query_start, num_seqs, params->block_q, q_block,
                                                params->whole_queries);
    if (first_token < 0) return false;
    const int32_t start = params->query_start[seq];
    item->first_token = start + first_token;
    item->num_tokens = fv_min_i32(params->block_q, params->query_start[seq + 1] - start - first_token);
    item->partial = (start + first_token) * params->num_segments;
    item->num_segments = params->num_segments;
    item->segment_slots = 0;
    return true;
}

#endif
