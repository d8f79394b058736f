/* Multi-head latent attention with its weights: a random batch of decodes, extends and prefills that a plan absorbs or
 * expands, and what DeepSeek-V2's formula makes of it. */
#ifndef FV_TOOLS_CHECK_MLA_WEIGHTS_CASE_H
#define FV_TOOLS_CHECK_MLA_WEIGHTS_CASE_H

#include "check/arena.h"
#include "check/random.h"
#include "fovea/plan.h"
#include "reference/kv_reader.h"

typedef struct check_mla_weights {
    check_arena arena;
    fv_problem problem;      /* normal */
    fv_plan_options options; /* threshold, path, static grid */
    int32_t tight_workspace; /* 1: the least that the plan takes, and so many chunks */
    int32_t num_seqs, num_tokens, max_query_len, max_seq_len;
    int32_t *query_start, *seq_lens, *block_table; /* [R, width], wild past the used entries */
    int32_t width;
    int64_t *slots;
    fv_tensor q, k, out, lse, kv_up;
    float *cos, *sin, *k_scale; /* where the problem uses them, else NULL */
    int64_t num_positions;
    fv_kv_view view;
    char *cache, *cache_after; /* NaN where no key lies; as the reference's kv_write leaves it */
    size_t cache_bytes;
} check_mla_weights;

void check_mla_weights_init(check_mla_weights *test, check_random *random);
void check_mla_weights_deinit(check_mla_weights *test);

/* One row: its result from the cache as it is, and by how much kernels of these dtypes may miss it. */
typedef struct check_mla_row {
    double *out; /* [V] */
    double lse;  /* -inf: no key */
    double error, lse_error;
} check_mla_row;

/* Query head `head` of token `token` of sequence `seq`; `absorbed` says what is rounded on the way: the absorbed
 * query and the attended latents, or keys and values. row->out lies in the case's memory. */
void check_mla_weights_expect(check_mla_row *row, check_mla_weights *test, int32_t seq, int32_t token, int32_t head,
                              int32_t absorbed);

#endif
