/* Context parallelism: the keys of a sequence are dealt out to the ranks of a group (fv_context_parallel
 * of problem.h), each rank attends to its own with LSE, and the results are combined. The keys of a rank
 * lie close together in its own cache, under block tables of its own:
 *
 *   world 2, interleave 2    position   0 1 2 3 4 5 6 7 8
 *                            rank       0 0 1 1 0 0 1 1 0
 *                            local key  0 1 0 1 2 3 2 3 4
 *
 * A step of an engine on each rank: fv_context_parallel_slots with its own block tables, the plan with
 * problem.context_parallel and returns_lse set and sinks unset, and then either
 *
 *   all-gather results and LSEs      fv_merge_ranks gives the whole result
 *   all-gather LSEs                  fv_merge_ranks without out gives the total LSE, fv_scale_by_lse the
 *                                    rank's share, and a reduce-scatter adds the shares
 *
 * The transport between ranks is the engine's. seq_lens stay global everywhere. */
#ifndef FOVEA_CONTEXT_PARALLEL_H
#define FOVEA_CONTEXT_PARALLEL_H

#include "fovea/batch.h"
#include "fovea/device.h"
#include "fovea/problem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Number of this rank's keys among the first seq_len: what its block tables must hold. seq_len where
 * `cp` is NULL or has a world of 0 or 1; -1 where it is not sound or seq_len is negative. */
FV_API int32_t fv_context_parallel_local_len(int32_t seq_len, const fv_context_parallel *cp);

/* The same for seq_lens [num_seqs], on the host. */
FV_API fv_status fv_context_parallel_local_lens(int32_t *local_lens, const int32_t *seq_lens, int32_t num_seqs,
                                                const fv_context_parallel *cp);

/* The slot in this rank's cache of the token at global position `position` of a sequence; -1: the token
 * is another rank's, or its block is the null block. block_table [width]: this rank's blocks of the
 * sequence, in host memory. FV_ERR_INVALID: the table is too narrow for the position, or no sequence is so long
 * (lengths are int32_t). */
FV_API fv_status fv_context_parallel_slot(int64_t *slot, int64_t position, const int32_t *block_table, int32_t width,
                                          int32_t block_size, const fv_context_parallel *cp);

/* The slot mapping [T] of a step: the tokens of sequence r are at positions context .. seq_len - 1; those of a
 * sequence without keys (seq_len 0) are padding, -1. Of `batch`, num_seqs, query_start, seq_lens and the block
 * table are used; all arrays are in host memory (host_query_start and host_seq_lens where given), and
 * query_start begins with 0. */
FV_API fv_status fv_context_parallel_slots(int64_t *slot_mapping, const fv_batch *batch, int32_t block_size,
                                           const fv_context_parallel *cp);

/* Combines the results of the ranks by their LSE, natural log:
 *
 *   lse = ln(sum_r e^lse_r + e^sink);    out = sum_r e^(lse_r - lse) out_r
 *
 * rank_out [world, T, H, D] and rank_lse [world, T, H] fp32, any strides but a dense last dimension of
 * rank_out; out [T, H, D], of the same or another dtype, and lse [T, H] fp32. sinks [H] or NULL are
 * counted here, once, so no rank may hold them. An LSE of -inf, +inf or NaN marks a rank without keys;
 * where all are, out is 0 and lse -inf, sink or not. lse may be absent; or out and rank_out, and then
 * only the LSEs are combined. out may be a rank's part of rank_out if the dtypes agree. World 1 to 256. */
FV_API fv_status fv_merge_ranks(fv_device *device, const fv_tensor *out, const fv_tensor *lse,
                                const fv_tensor *rank_out, const fv_tensor *rank_lse, const float *sinks,
                                fv_stream stream);

/* A rank's share of the result: out = e^(lse_in - lse_total) in, [T, H, D], of the same or another dtype;
 * the shares of all ranks add up to what fv_merge_ranks gives. lse_in and lse_total [T, H] fp32; where one
 * of them is -inf, +inf or NaN, the share is 0. out may be `in` if the dtypes agree. */
FV_API fv_status fv_scale_by_lse(fv_device *device, const fv_tensor *out, const fv_tensor *in, const fv_tensor *lse_in,
                                 const fv_tensor *lse_total, fv_stream stream);

#ifdef __cplusplus
}
#endif
#endif
