/* The static launch grid: from a cell to its work item by binary search. */
#include <assert.h>

#include "ops/attend_paged.h"

int32_t fv_grid_find_seq(const int32_t *query_start, int32_t num_seqs, int32_t block_q, int32_t q_block)
{
    /* Last r with query_start[r] / block_q + r <= q_block. The sums grow strictly with r. */
    int32_t low = 0, high = num_seqs;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (query_start[middle] / block_q + middle <= q_block)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* First token of Q block `q_block` within its sequence; -1 where no sequence has such a block. */
static int32_t find_block(int32_t *seq, const int32_t *query_start, int32_t num_seqs, int32_t block_q, int32_t q_block,
                          int32_t whole_queries)
{
    if (num_seqs <= 0) return -1;
    if (whole_queries) {
        *seq = q_block;
        return q_block < num_seqs && query_start[q_block] < query_start[q_block + 1] ? 0 : -1;
    }
    *seq = fv_grid_find_seq(query_start, num_seqs, block_q, q_block);
    const int32_t first_token = (q_block - (query_start[*seq] / block_q + *seq)) * block_q;
    return first_token < query_start[*seq + 1] - query_start[*seq] ? first_token : -1;
}

int32_t fv_grid_item(fv_work_item *item, const fv_attend_params *params, int32_t q_block, int32_t kv_head,
                     int32_t segment)
{
    assert(params->block_q > 0 && params->num_segments > 0);
    const int32_t num_seqs = params->num_seqs_at ? *params->num_seqs_at : params->num_seqs;
    int32_t seq;
    const int32_t first_token = find_block(&seq, params->query_start, num_seqs, params->block_q, q_block,
                                           params->whole_queries);
    if (first_token < 0) return 0;

    const int32_t start = params->query_start[seq];
    const int32_t query_len = params->query_start[seq + 1] - start;
    const int32_t num_tokens = fv_min_i32(params->block_q, query_len - first_token);
    const int32_t seq_len = params->seq_lens[seq];
    const int32_t local_len = fv_local_keys(&params->context_parallel, seq_len);
    const int64_t num_tiles = fv_ceil_div(local_len, params->tile_keys);
    const int32_t segment_keys = (int32_t)(fv_ceil_div(num_tiles, params->num_segments) * params->tile_keys);
    *item = (fv_work_item){
        .seq = seq,
        .table_row = seq,
        .first_token = first_token,
        .num_tokens = num_tokens,
        .first_kv_head = kv_head,
        .num_kv_heads = 1,
        .first_key = (int32_t)fv_min_i64((int64_t)segment * segment_keys, local_len),
        .end_key = (int32_t)fv_min_i64(((int64_t)segment + 1) * segment_keys, local_len),
        .partial = params->num_segments == 1 ? -1 : (start + first_token) * params->num_segments + segment * num_tokens,
    };
    return 1;
}

int32_t fv_grid_reduce_item(fv_reduce_item *item, const fv_reduce_params *params, int32_t q_block)
{
    const int32_t num_seqs = params->num_seqs_at ? *params->num_seqs_at : params->num_seqs;
    int32_t seq;
    const int32_t first_token = find_block(&seq, params->query_start, num_seqs, params->block_q, q_block,
                                           params->whole_queries);
    if (first_token < 0) return 0;
    const int32_t start = params->query_start[seq];
    *item = (fv_reduce_item){
        .first_token = start + first_token,
        .num_tokens = fv_min_i32(params->block_q, params->query_start[seq + 1] - start - first_token),
        .partial = (start + first_token) * params->num_segments,
        .num_segments = params->num_segments,
    };
    return 1;
}
