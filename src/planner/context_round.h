/* Context rounds: how extends are served within bounded memory.
 *
 * The new tokens of an extend attend each other, and their context in chunks that are gathered from the
 * cache first; the results are merged by LSE. Two buffers bound the memory: `state_tokens` rows of results
 * and `gather_rows` rows of K and V. More tokens than that make more rounds, more context more chunks.
 *
 *   round: tokens t0 .. t1 of the batch (at most state_tokens)
 *     chunk 0   seq 2 keys 0..4095 | seq 3 keys 0..100      at most gather_rows rows
 *     chunk 1   seq 3 keys 101..900                         only the first piece continues a sequence
 *
 * Host arithmetic only; allocates nothing. */
#ifndef FV_PLANNER_CONTEXT_ROUND_H
#define FV_PLANNER_CONTEXT_ROUND_H

#include "planner/pass.h"

typedef struct fv_context_limits {
    int32_t state_tokens; /* a multiple of the Q block */
    int32_t gather_rows;  /* a multiple of block_size where that is possible */
    int32_t gathers_new;  /* 1: new tokens are gathered with their context, as keys of the same run */
} fv_context_limits;

/* A run of extends' tokens that fits the state buffers. */
typedef struct fv_context_round {
    int32_t first_token; /* of the batch: row 0 of the state buffers */
    int32_t num_runs;    /* of `runs` that the caller gave room for */
    int32_t next_extend; /* where the next round goes on: extend and its token */
    int32_t next_token;
} fv_context_round;

/* Some keys of one run's context, in rows [first_row, first_row + end_key - first_key) of the chunk. */
typedef struct fv_context_piece {
    int32_t run;
    int32_t first_key, end_key;
    int32_t first_row;
    int32_t is_last; /* the run's context ends here */
} fv_context_piece;

/* Where the gathering of a round stands. */
typedef struct fv_context_cursor {
    int32_t run;
    int32_t key; /* first key of `run` not gathered yet; -1: from its first */
} fv_context_cursor;

/* Fills `runs` (room for num_extends) with the next tokens of `extends`, sequence numbers in the order of the
 * batch, from round->next_extend and next_token on. The runs' keys are those of the context that some of
 * their tokens see; with limits->gathers_new of all keys that they see. Returns 0 where nothing is left. */
int32_t fv_context_round_next(fv_context_round *round, fv_query_run *runs, const fv_problem *problem,
                              const fv_step *step, const int32_t *extends, int32_t num_extends, int32_t block_q,
                              const fv_context_limits *limits);

/* Fills `pieces` (room for num_runs) with the next chunk; returns their number, 0 at the end. */
int32_t fv_context_chunk_next(fv_context_cursor *cursor, fv_context_piece *pieces, const fv_problem *problem,
                              const fv_query_run *runs, int32_t num_runs, const fv_context_limits *limits);

/* The keys of the context that tokens [first_token, first_token + num_tokens) of a sequence see. */
fv_key_range fv_context_keys(const fv_problem *problem, const fv_step *step, int32_t seq, int32_t first_token,
                             int32_t num_tokens);

#endif
