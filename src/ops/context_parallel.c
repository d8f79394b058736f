/* Host arithmetic of context parallelism: lengths and slots of a rank. What a kernel does with keys is in
 * ops/attend_paged.h (fv_local_keys, fv_key_position); this is the same rule for engines. */
#include "fovea/context_parallel.h"

#include "core/error.h"
#include "ops/attend_paged.h"

/* Zeros replaced by what they mean. */
static fv_status normalize(fv_context_parallel *normal, const fv_context_parallel *cp)
{
    *normal = cp ? *cp : (fv_context_parallel){0};
    if (normal->world == 0) normal->world = 1;
    if (normal->interleave == 0) normal->interleave = 1;
    if (normal->world < 1 || normal->rank < 0 || normal->rank >= normal->world || normal->interleave < 1) {
        return fv_fail(FV_ERR_INVALID,
                       "rank %d of %d, interleave %d; accepted: a world of 1 or more (0 = 1), a rank from 0 to "
                       "world - 1, an interleave of 1 or more (0 = 1)",
                       normal->rank, normal->world, normal->interleave);
    }
    return FV_OK;
}

int32_t fv_context_parallel_local_len(int32_t seq_len, const fv_context_parallel *cp)
{
    fv_context_parallel normal;
    if (seq_len < 0 || normalize(&normal, cp) != FV_OK) return -1;
    return fv_local_keys(&normal, seq_len);
}

fv_status fv_context_parallel_local_lens(int32_t *local_lens, const int32_t *seq_lens, int32_t num_seqs,
                                         const fv_context_parallel *cp)
{
    fv_context_parallel normal;
    const fv_status status = normalize(&normal, cp);
    if (status != FV_OK) return status;
    if (num_seqs < 0) return fv_fail(FV_ERR_INVALID, "num_seqs is %d; accepted: 0 or more", num_seqs);
    if (num_seqs > 0 && (!local_lens || !seq_lens)) {
        return fv_fail(FV_ERR_INVALID, "local_lens or seq_lens is NULL");
    }
    for (int32_t seq = 0; seq < num_seqs; seq++) {
        if (seq_lens[seq] < 0) {
            return fv_fail(FV_ERR_INVALID, "seq_lens[%d] is %d; accepted: 0 or more", seq, seq_lens[seq]);
        }
        local_lens[seq] = fv_local_keys(&normal, seq_lens[seq]);
    }
    return FV_OK;
}

static fv_status find_slot(int64_t *slot, int64_t position, const int32_t *block_table, int32_t width,
                           int32_t block_size, const fv_context_parallel *cp)
{
    *slot = -1;
    if (position / cp->interleave % cp->world != cp->rank) return FV_OK;
    const int64_t key = fv_local_keys(cp, position);
    if (key / block_size >= width) {
        return fv_fail(FV_ERR_INVALID,
                       "position %lld is key %lld of rank %d, in block %lld of the sequence; accepted: positions in "
                       "the %d blocks of the table",
                       (long long)position, (long long)key, cp->rank, (long long)(key / block_size), width);
    }
    const int64_t block = block_table[key / block_size];
    if (block > 0) *slot = block * block_size + key % block_size;
    return FV_OK;
}

fv_status fv_context_parallel_slot(int64_t *slot, int64_t position, const int32_t *block_table, int32_t width,
                                   int32_t block_size, const fv_context_parallel *cp)
{
    fv_context_parallel normal;
    const fv_status status = normalize(&normal, cp);
    if (status != FV_OK) return status;
    if (!slot || !block_table) return fv_fail(FV_ERR_INVALID, "slot or block_table is NULL");
    if (position < 0 || position >= INT32_MAX || block_size < 1) {
        return fv_fail(FV_ERR_INVALID, "position %lld, block_size %d; accepted: 0 to %d, 1 or more",
                       (long long)position, block_size, INT32_MAX - 1);
    }
    return find_slot(slot, position, block_table, width, block_size, &normal);
}

fv_status fv_context_parallel_slots(int64_t *slot_mapping, const fv_batch *batch, int32_t block_size,
                                    const fv_context_parallel *cp)
{
    fv_context_parallel normal;
    fv_status status = normalize(&normal, cp);
    if (status != FV_OK) return status;
    if (!batch) return fv_fail(FV_ERR_INVALID, "the batch is NULL");
    status = fv_check_struct_size("fv_batch", batch->struct_size, sizeof(*batch));
    if (status != FV_OK) return status;
    if (batch->num_seqs < 0 || block_size < 1) {
        return fv_fail(FV_ERR_INVALID, "num_seqs is %d and block_size is %d; accepted: 0 or more and 1 or more",
                       batch->num_seqs, block_size);
    }
    const int32_t *query_start = batch->host_query_start ? batch->host_query_start : batch->query_start;
    const int32_t *seq_lens = batch->host_seq_lens ? batch->host_seq_lens : batch->seq_lens;
    if (batch->num_seqs > 0 && (!slot_mapping || !query_start || !seq_lens || !batch->block_table)) {
        return fv_fail(FV_ERR_INVALID, "slot_mapping, or query_start, seq_lens or block_table of the batch, is NULL");
    }
    if (batch->num_seqs > 0 && query_start[0] != 0) {
        return fv_fail(FV_ERR_INVALID, "query_start[0] is %d; accepted: 0", query_start[0]);
    }
    for (int32_t seq = 0; seq < batch->num_seqs; seq++) {
        const int32_t start = query_start[seq], end = query_start[seq + 1];
        const int32_t seq_len = seq_lens[seq];
        if (end < start || seq_len < 0 || (seq_len > 0 && seq_len < end - start)) {
            return fv_fail(FV_ERR_INVALID,
                           "sequence %d has %d tokens, %d of them new; accepted: 0 to all of them, or a length of 0",
                           seq, seq_len, end - start);
        }
        const int32_t *row = batch->block_table + seq * batch->block_table_stride;
        for (int32_t token = start; token < end; token++) {
            slot_mapping[token] = -1;
            if (seq_len == 0) continue; /* padding */
            status = find_slot(&slot_mapping[token], (int64_t)seq_len - end + token, row, batch->block_table_width,
                               block_size, &normal);
            if (status != FV_OK) return status;
        }
    }
    return FV_OK;
}
