/* A batch with its data: random values (never zeros, which some CPUs multiply faster), randomly
 * permuted pages, and several copies of the cache, as the layers of a model have them. Runs that go
 * round the copies find their pages in memory, not in the processor's cache. */
#ifndef FV_TOOLS_BENCH_WORKLOAD_H
#define FV_TOOLS_BENCH_WORKLOAD_H

#include "bench/batch_spec.h"
#include "bench/ceilings.h"
#include "bench/mla_products.h"
#include "fovea/plan.h"

#define FV_WORKLOAD_MAX_COPIES 256

typedef struct fv_workload {
    fv_context *context;
    fv_device *device;  /* where the kernels run */
    fv_problem problem; /* normal */
    fv_batch_spec spec;
    fv_batch batch;
    fv_bounds bounds;
    int32_t shared_prefix; /* keys asked for */
    int64_t num_blocks;    /* of a copy, with the null block */
    double flops;          /* 2 Hq (D + Dv) for each pair of a token and a key that it sees; MLA with weights:
                            * absorbed or expanded, whichever is less for the sequence */

    fv_layer layer; /* without its cache */
    void *caches[FV_WORKLOAD_MAX_COPIES];
    int32_t num_copies;
    int32_t is_cold;    /* 1: the copies together are well beyond the last-level cache */
    size_t cache_bytes; /* of a copy: K, V and, where each token has its scales, these */
    size_t kv_bytes;    /* of K and V alone */

    fv_read_range *ranges; /* the pages that a step reads, in the order of the sequences */
    int64_t num_ranges;
    int64_t read_bytes; /* sum of the ranges: K and V of every key that some token sees, shared ones once */

    int32_t *query_start; /* on the host, as all up to `causal` */
    int32_t *block_table;
    int64_t *slot_mapping;
    int32_t *shared_blocks;    /* [num_seqs]: first blocks that are those of the sequence before it */
    uint64_t *tree_mask;       /* NULL: the problem has none */
    uint8_t *causal;           /* NULL: all are */
    void *sent[6];             /* copies of the batch's arrays on a device */
    void *tensors[5];          /* q, k, v, out, kv_up */
    fv_mla_products *products; /* MLA with weights: the GEMM; else NULL */
    void *per_head;            /* slopes, sinks, scales */
} fv_workload;

/* The batch alone, on the host: what fv_plan_update takes for the CPU. `spec_text` as in batch_spec.h. The sequences of a group of
 * the text have the blocks of their first `shared_prefix` keys in common, as far as these are whole blocks
 * before the new tokens. */
fv_status fv_workload_init_batch(fv_workload *workload, fv_context *context, const fv_problem *problem,
                                 const char *spec_text, int32_t shared_prefix);

/* Its two parts: lengths and how many blocks they take, and the tables. Where the second fails the caller deinits. */
fv_status fv_workload_read_batch(fv_workload *workload, fv_context *context, fv_device *device,
                                 const fv_problem *problem, const char *spec_text, int32_t shared_prefix);
fv_status fv_workload_fill_batch(fv_workload *workload);

/* To be asked between the parts. FV_ERR_NO_MEMORY: the device has no room for a cache and tensors of so many bytes
 * and the tables. */
fv_status fv_workload_check_memory(const fv_workload *workload, double cache_bytes, double tensor_bytes);

/* Bytes of the device that may be taken. */
int64_t fv_workload_memory_limit(fv_device *device);

typedef struct fv_workload_options {
    int32_t shared_prefix; /* as above */
    int32_t warm;          /* 1: one copy of the cache only */
    int32_t stored;        /* 1: the new keys are in the cache already; a run writes none */
} fv_workload_options;

/* The batch and its data, on `device` of the context. FV_ERR_NO_MEMORY says how much was needed. */
fv_status fv_workload_init(fv_workload *workload, fv_context *context, fv_device *device, const fv_problem *problem,
                           const char *spec_text, const fv_workload_options *options);
void fv_workload_deinit(fv_workload *workload); /* takes a zeroed one */

/* The layer of copy `copy` as a plan with `layout` wants it. Random bytes are random in any layout, so every
 * layout is a view of the same memory, and views of several layouts live side by side. */
fv_status fv_workload_view(fv_layer *layer, const fv_workload *workload, int32_t copy, fv_kv_layout layout);

/* Lists the pages in the order of `layout`. */
fv_status fv_workload_list_ranges(fv_workload *workload, fv_kv_layout layout);

/* 1: a token sees no key after its own. */
int32_t fv_workload_is_causal(const fv_workload *workload);

/* Bytes of the device's last-level cache, as the system says it; 32 MiB where it does not. */
int64_t fv_last_level_cache_bytes(fv_device *device);

#endif
