/* The batch: what one step works on. */
#ifndef FOVEA_BATCH_H
#define FOVEA_BATCH_H

#include "fovea/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* R sequences with T new tokens in all. The arrays are where the kernels run (device memory on a
 * GPU) and are borrowed until the stream has passed the last run of the step. Host copies of the
 * lengths are optional, but for plans with a static list: with them the schedule fits the step,
 * without them it fits the bounds. MLA that is not absorbed and has no static grid takes, without them,
 * only as many tokens as its workspace has room for at once; more are FV_ERR_INVALID. On the CPU both are
 * the same memory and the copies need not be given.
 *
 * Two kinds of padding: tokens from query_start[R] on are of no sequence, and their rows of outputs are left
 * untouched, as those past T (fv_layer has the exception); a sequence with seq_lens[r] = 0 has no keys, and
 * its rows become 0 with an LSE of -inf. New K/V of both go where slot_mapping says. */
typedef struct fv_batch {
    uint32_t struct_size;  /* sizeof(fv_batch) */
    int32_t num_seqs;      /* R */
    int32_t num_tokens;    /* T; may be below the rows of the tensors, the rest is padding; 0 where R is */
    int32_t max_query_len; /* upper bounds on the host; 0 = those of the plan */
    int32_t max_seq_len;

    const int32_t *query_start;  /* [R + 1]: sequence r owns tokens query_start[r] .. query_start[r + 1] - 1 */
    const int32_t *seq_lens;     /* [R]: context + query length, global under context parallelism; or 0 */
    const int32_t *block_table;  /* [R, block_table_stride]: from 1 on; entries without a seen key may hold anything */
    int64_t block_table_stride;  /* in elements */
    int32_t block_table_width;   /* entries of a row that may be read */
    const int64_t *slot_mapping; /* [T]: where the new K/V go; negative = do not write; NULL: nothing is written */
    const uint8_t *causal;       /* [R]: 1 causal, 0 not; NULL: all of a decoder, none of encoder and cross layers */
    const uint64_t *tree_mask;   /* [T]: bit j of token i: it sees new token j of its sequence, j < 64. NULL just where
                                  * the problem has no tree_mask */

    const int32_t *host_query_start; /* [R + 1], host copy or NULL */
    const int32_t *host_seq_lens;    /* [R], host copy or NULL */
    const uint8_t *host_causal;      /* [R], host copy or NULL */
} fv_batch;

#ifdef __cplusplus
}
#endif
#endif
