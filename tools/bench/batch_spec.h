/* The batch grammar of vLLM's attention benchmarks: groups joined with '_', each
 *
 *   (count)? q(len)(k)? (s(len)(k)?)?      count sequences of `len` new tokens, `s` tokens long in all
 *
 * k is x 1024; without s the sequence has no context. "32q1s4k" is 32 decodes over 4096 keys, "q2k" a
 * prefill of 2048 tokens, "2q1ks2k_32q1s1k" a mix of both. */
#ifndef FV_TOOLS_BENCH_BATCH_SPEC_H
#define FV_TOOLS_BENCH_BATCH_SPEC_H

#include "fovea/status.h"

#define FV_BATCH_SPEC_MAX_SEQS 65536
#define FV_BATCH_SPEC_MAX_LEN (1 << 24)

typedef struct fv_batch_spec {
    int32_t num_seqs;
    int32_t num_tokens; /* sum of the query lengths */
    int32_t max_query_len;
    int32_t max_seq_len;
    int32_t *query_lens; /* [num_seqs] */
    int32_t *seq_lens;   /* [num_seqs] */
    int32_t *groups;     /* [num_seqs]: which group of the text a sequence comes from */
    int32_t num_groups;
} fv_batch_spec;

/* Reads `text`. FV_ERR_INVALID names the place that is wrong and what is accepted. */
fv_status fv_batch_spec_init(fv_batch_spec *spec, const char *text);
void fv_batch_spec_deinit(fv_batch_spec *spec);

#endif
