/* What the files of the GEMM share: libraries, weights, and loops over tasks that can fail. */
#ifndef FV_ENGINE_GEMM_PRIVATE_H
#define FV_ENGINE_GEMM_PRIVATE_H

#include <stdatomic.h>

#include "engine/gemm_kernel.h"
#include "engine/stored/stored.h"
#include "engine/stored/stored_tiles.h"
#include "engine/task_ranges.h"

enum { FV_GEMM_ALIGNMENT = 64 };

/* What weights as stored need beside themselves (gemm_stored.c). */
typedef struct fv_gemm_stored {
    const fv_stored_table *table; /* NULL: all weights are in the compute type */
    const fv_stored_tiles *tiles; /* for many rows, in place of the library; NULL: there are none */
    bool is_used;                 /* there is such a weight */
    int64_t max_in_features;
    size_t max_packed_bytes; /* of a chunk of the library's kernel */
    fv_stored_x *x;          /* [x_rows], into x_memory */
    void *x_memory;          /* x_bytes for each row */
    uint8_t *x_tiles;        /* of x_rows rows, where there are tiles */
    uint8_t *panels;         /* panel_bytes for each worker: floats and packed, tiles, or the kernels' memory */
    fv_task_range *ranges;   /* one for each worker */
    int64_t x_rows;
    size_t x_bytes;
    size_t panel_bytes;
} fv_gemm_stored;

struct fv_gemm_library {
    fv_context *context;
    const fv_gemm_kernel *kernel;
    void *state; /* of the kernel; NULL if it has none */
    int64_t max_in_features;
    int64_t max_rows;
    fv_gemm_stored stored;
    char description[96];
};

struct fv_gemm_weight {
    const fv_gemm_library *gemm;
    uint8_t *data;
    size_t bytes;
    int64_t out_features;
    int64_t in_features;
    size_t chunk_bytes;                      /* of a whole chunk, in the compute type */
    fv_stored_rows parts[FV_GEMM_MAX_PARTS]; /* as stored */
    int32_t num_parts;                       /* 0: in the compute type */
};

/* The first failure's text goes to the calling thread. */
typedef struct fv_gemm_job {
    fv_gemm_library *gemm;
    const fv_gemm_weight *weight;
    int64_t num_chunks;
    fv_read_rows_fn read_rows; /* packing */
    void *user;
    float *scratch; /* packing: one chunk of rows for each worker; NULL: read in place */
    float *y;       /* running */
    const float *x;
    int64_t num_rows;
    bool batch_invariant;
    int64_t chunk_stripes;   /* of weights as stored: of a task */
    int64_t blocks_per_task; /* of rows of X, for panels */
    int64_t rows_of_task;    /* of X, for the kernels of weights as stored */
    bool is_many;            /* these are those for many rows, and so are the tasks */
    atomic_int status;
    char text[256];
} fv_gemm_job;

void fv_gemm_keep_failure(fv_gemm_job *job, fv_status status);
fv_status fv_gemm_run_job(fv_gemm_job *job, int64_t num_tasks, fv_task_fn task);

/* Hands all of X to the kernel's load_rows. */
void fv_gemm_load_rows(fv_gemm_job *job);

/* Gets the kernel ready for chunks of a weight of that shape, whole ones and the rest; returns the larger's bytes. */
fv_status fv_gemm_prepare_shapes(size_t *chunk_bytes, fv_gemm_library *gemm, int64_t out_features, int64_t in_features);

/* Weights as stored (gemm_stored.c). The kernels up to `limit`. */
void fv_gemm_stored_init(fv_gemm_stored *stored, fv_isa limit);

/* Is keeping these rows so possible, and smaller than in the compute type? */
bool fv_gemm_stored_is_smaller(const fv_gemm_library *gemm, int64_t in_features, const fv_gemm_rows *parts,
                               int32_t num_parts);

/* Sets parts and bytes of a weight; its memory comes after that, then its contents. */
fv_status fv_gemm_stored_prepare(fv_gemm_weight *weight, fv_gemm_library *gemm, const fv_gemm_rows *parts,
                                 int32_t num_parts);
void fv_gemm_stored_fill(fv_gemm_weight *weight, fv_gemm_library *gemm, const fv_gemm_rows *parts);

/* Room for runs of the library's max_rows; nothing where there is no such weight. */
fv_status fv_gemm_stored_make_room(fv_gemm_library *gemm);
void fv_gemm_stored_deinit(fv_gemm_stored *stored);

/* As fv_gemm_run, of a weight with parts. */
fv_status fv_gemm_stored_run(fv_gemm_job *job);

#endif
