/* The MLA decoding problem as data: random weights that keep the variance, one new token for each sequence, a
 * cache of unrotated keys in randomly ordered blocks, and rotation tables of base 10000. */
#ifndef FV_TOOLS_BENCH_MLA_WORKLOAD_H
#define FV_TOOLS_BENCH_MLA_WORKLOAD_H

#include "bench/mla_products.h"
#include "bench/mla_stages.h"
#include "fovea/fovea.h"

#define FV_MLA_BLOCK_SIZE 64
#define FV_MLA_MAX_TENSORS 8
#define FV_MLA_NUM_ARRAYS 5

typedef struct fv_mla_workload {
    fv_mla_sizes sizes;
    fv_context *context;
    fv_device *device;
    fv_mla_products *products;
    fv_mla_timer timer;                /* around the products */
    fv_mla_layer layer;                /* multiplies through `timer`: the struct must not move */
    void *tensors[FV_MLA_MAX_TENSORS]; /* what `layer` points to */
    int32_t num_tensors;
    void *cos, *sin; /* fp32 [max_keys, R / 2] */
    struct {
        void *host, *on_device; /* on the CPU the same */
        size_t bytes;
    } arrays[FV_MLA_NUM_ARRAYS];                 /* of the batch */
    int32_t *query_start, *seq_lens, *positions; /* these on the host */
    int32_t *block_table;                        /* [batch, width] */
    int64_t *slots;
    int32_t max_keys; /* of a sequence, with the new one */
    int32_t width;    /* blocks of a sequence */
    void *cache, *workspace;
    fv_plan *plan; /* of the length at hand */
} fv_mla_workload;

/* Where and with what a workload runs. */
typedef struct fv_mla_machine {
    const char *device;     /* a name of fv_device_find */
    int32_t num_threads;    /* 0: all CPUs */
    int32_t plain_products; /* 1: the CPU multiplies with fv_mla_plain_gemm, for comparing */
} fv_mla_machine;

/* Room for caches of up to max_length tokens before the new one. The data are the same on every device.
 * FV_ERR_UNSUPPORTED on the CPU in a build without the engine, unless the products are plain. */
fv_status fv_mla_workload_init(fv_mla_workload *workload, const fv_mla_sizes *sizes, int32_t max_length,
                               const fv_mla_machine *machine);
void fv_mla_workload_deinit(fv_mla_workload *workload); /* also after a failed init */

/* Makes the plan and workspace for sequences of `length` cached tokens, ready for fv_mla_run. `backend` NULL:
 * the one that auto takes. static_grid: as under a captured graph. */
fv_status fv_mla_workload_plan(fv_mla_workload *workload, int32_t length, const char *backend, int32_t static_grid);

#endif
