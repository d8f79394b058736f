/* One row of attention, query token x query head: which keys it sees, what a score becomes, and the
 * softmax state that a run of keys leaves. Shared by the kernels and the oracle. */
#ifndef FV_REFERENCE_ATTEND_ROW_H
#define FV_REFERENCE_ATTEND_ROW_H

#include "ops/attend_paged.h"

typedef struct fv_attend_row {
    int32_t seq;
    int32_t token; /* of the batch */
    int32_t head;
    int32_t kv_head;
    int64_t context;   /* global position of the sequence's first new token */
    int64_t position;  /* of this one */
    fv_key_range keys; /* local keys; a tree mask may take some of them away */
} fv_attend_row;

/* The row of new token `token` (relative to the sequence) and query head `head`. */
fv_attend_row fv_attend_row_of(const fv_attend_params *params, int32_t seq, int32_t token, int32_t head);

/* 0 where the tree mask hides local key `key` from the row. */
int32_t fv_attend_row_sees(const fv_attend_row *row, const fv_attend_params *params, int32_t key);

/* The score of a key whose dot product with the query is `dot`: scale, soft cap, clamp to fp32, ALiBi. */
double fv_attend_row_score(const fv_attend_row *row, const fv_attend_params *params, int32_t key, double dot);

/* What ALiBi adds to the score of `key`. */
double fv_attend_row_alibi(const fv_attend_row *row, const fv_attend_params *params, int32_t key);

/* The row's query as double. */
void fv_attend_row_query(double *q, const fv_attend_row *row, const fv_attend_params *params);

/* sum_j e^(s_j - max) and the same sum of values: no key yet is max -inf, sum 0, out 0. */
typedef struct fv_softmax_state {
    double max;
    double sum;
    double *out; /* [size], the caller's */
    int32_t size;
} fv_softmax_state;

void fv_softmax_state_init(fv_softmax_state *state, double *out, int32_t size);

/* Takes in one key; v NULL is the value 0 (a sink). */
void fv_softmax_state_add(fv_softmax_state *state, double score, const double *v);

/* Takes in another run of keys, given as such a state in fp32. */
void fv_softmax_state_merge(fv_softmax_state *state, float max, float sum, const float *out);

/* Divides out by the sum and returns the LSE. `sink` NULL: none. Without a key 0 and -inf, sink or not. */
double fv_softmax_state_finish(fv_softmax_state *state, const float *sink);

/* `size` elements of `dtype`, one behind the other, as double. */
void fv_row_load(double *row, const void *from, int32_t size, fv_dtype dtype);

/* Rounds size doubles to `dtype` at `to`. */
void fv_row_store(void *to, const double *row, int32_t size, fv_dtype dtype);

#endif
