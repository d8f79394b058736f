/* A step of several sequences with random numbers, in the cache layout of any backend: the same tokens, keys
 * and values whoever computes it. */
#ifndef FV_TESTS_BACKENDS_STEP_FIXTURE_H
#define FV_TESTS_BACKENDS_STEP_FIXTURE_H

#include "fovea/fovea.h"

typedef struct step_lens {
    int32_t query_len, seq_len;
} step_lens;

typedef struct step_fixture {
    fv_context *context;
    fv_device *device;
    fv_problem problem; /* kv_layout_any */
    int32_t num_seqs, num_tokens, max_query_len, max_seq_len, width;
    int32_t *query_start, *seq_lens, *block_table;
    int64_t *slot_mapping;
    int64_t num_blocks;
    void *q, *k, *v; /* q_dtype */
    void *out;
    float *lse;
    float *sinks, *slopes;
    fv_plan *plan;
    void *workspace;
    void *cache;
    fv_kv_view view;
} step_fixture;

/* Sequences `lens`; the first `shared_keys` keys of all are the same blocks. `problem` gives shapes, dtypes
 * and features; block_size 16 where it has none. Takes over `device`'s context, NULL: makes one. */
void step_fixture_init(step_fixture *step, fv_context *context, fv_device *device, const fv_problem *problem,
                       const step_lens *lens, int32_t num_seqs, int32_t shared_keys);
void step_fixture_deinit(step_fixture *step);

/* Makes the plan and a cache in its layout that holds the context. options may be NULL. */
fv_status step_fixture_plan(step_fixture *step, const char *backend, const fv_plan_options *options);

/* The step's batch and layer. */
fv_batch step_fixture_batch(const step_fixture *step);
fv_layer step_fixture_layer(const step_fixture *step);

/* Updates and runs: out and lse are filled. */
fv_status step_fixture_run(step_fixture *step);

/* Output element and LSE as double. */
double step_fixture_out(const step_fixture *step, int32_t token, int32_t head, int32_t element);

/* The row computed in double from q, k and v, sinks and windows included; returns its LSE. */
double step_fixture_expect(double *out, const step_fixture *step, int32_t seq, int32_t token, int32_t head);

#endif
