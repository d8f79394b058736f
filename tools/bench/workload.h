/* A batch with its data: random values (never zeros, which some CPUs multiply faster), randomly
 * permuted pages, and several copies of the cache, as the layers of a model have them. Runs that go
 * round the copies find their pages in memory, not in the processor's cache. */
#ifndef FV_TOOLS_BENCH_WORKLOAD_H
#define FV_TOOLS_BENCH_WORKLOAD_H

#include "bench/batch_spec.h"
#include "bench/ceilings.h"
#include "fovea/plan.h"

#define FV_WORKLOAD_MAX_COPIES 64

typedef struct fv_workload {
    fv_context *context;
    fv_device *device;
    fv_problem problem; /* normal; its layout is that of the views */
    fv_batch_spec spec;
    fv_batch batch;
    fv_bounds bounds;
    fv_layer layers[FV_WORKLOAD_MAX_COPIES]; /* the same but for kv_cache */
    void *caches[FV_WORKLOAD_MAX_COPIES];
    int32_t num_copies;
    int32_t is_cold;    /* 1: the copies together are well beyond the last-level cache */
    int64_t num_blocks; /* of a copy, with the null block */
    size_t cache_bytes; /* of a copy */

    fv_read_range *ranges; /* the pages that a step reads, in the order of the sequences */
    int64_t num_ranges;
    int64_t read_bytes; /* sum of the ranges: K and V of every key that some token sees, once */
    double flops;       /* 2 Hq (D + Dv) for each pair of a token and a key that it sees */

    int32_t *query_start;
    int32_t *block_table;
    int64_t *slot_mapping;
    void *tensors[4]; /* q, k, v, out */
    float *per_head;  /* slopes, sinks, scales */
} fv_workload;

/* Makes the data of `spec_text` for `problem` on the context's CPU. warm: one copy only. The problem
 * has a layout (fv_kv_layout) of its own, or strided where K and V differ in size.
 * FV_ERR_NO_MEMORY says how much was needed. */
fv_status fv_workload_init(fv_workload *workload, fv_context *context, const fv_problem *problem, const char *spec_text,
                           int32_t warm);
void fv_workload_deinit(fv_workload *workload); /* takes a zeroed one */

/* Lays the same memory out as another backend wants it. */
fv_status fv_workload_set_layout(fv_workload *workload, fv_kv_layout layout);

/* Bytes of the last-level cache, as the system says it; 32 MiB where it does not. */
int64_t fv_last_level_cache_bytes(void);

#endif
