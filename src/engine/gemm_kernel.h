/* What a compute type brings to gemm.c: how a chunk of weight rows is stored, and how rows of X are
 * multiplied with one. Both are called from several workers at once, with OpenMP held to one thread. */
#ifndef FV_ENGINE_GEMM_KERNEL_H
#define FV_ENGINE_GEMM_KERNEL_H

#include "engine/gemm.h"

/* One chunk of a weight: num_outputs rows of in_features elements. */
typedef struct fv_gemm_chunk {
    void *data;
    int64_t num_outputs;
    int64_t in_features;
} fv_gemm_chunk;

typedef struct fv_gemm_kernel {
    fv_dtype dtype;
    int64_t chunk_outputs;                                  /* output features of a task */
    int64_t row_block;                                      /* rows of X of a task */
    fv_status (*create)(void **state, int32_t num_workers); /* NULL: there is none, or it is made by hand */
    void (*destroy)(void *state);                           /* takes NULL */
    /* Memory for a weight; both NULL: host memory. */
    fv_status (*alloc)(void **data, void *state, size_t bytes);
    void (*free)(void *state, void *data); /* takes NULL */
    /* Fills a weight, all chunks of it, with fv_gemm_weight_create_random's numbers; NULL: rows are read. */
    fv_status (*fill_random)(void *state, void *data, int64_t out_features, int64_t in_features, uint64_t seed);
    /* Room for X of num_rows x in_features; called before the first run of that size. */
    fv_status (*reserve)(void *state, int64_t num_rows, int64_t in_features);
    /* Gets ready for chunks of this shape and says how many bytes one takes. Not called in parallel. */
    fv_status (*prepare)(size_t *chunk_bytes, void *state, int64_t num_outputs, int64_t in_features);
    fv_status (*pack)(void *state, const fv_gemm_chunk *chunk, const float *rows, int32_t worker);
    /* Sees X once before the tasks of a run: rows [first_row, first_row + num_rows). */
    void (*load_rows)(void *state, const float *x, int64_t first_row, int64_t num_rows, int64_t in_features);
    /* Columns [0, num_outputs) of y, row stride y_stride; x is all of X, the rows as in load_rows. */
    fv_status (*run)(void *state, float *y, int64_t y_stride, const float *x, int64_t first_row, int64_t num_rows,
                     const fv_gemm_chunk *chunk, bool batch_invariant, int32_t worker);
} fv_gemm_kernel;

extern const fv_gemm_kernel fv_gemm_kernel_f32;
extern const fv_gemm_kernel fv_gemm_kernel_bf16;
extern const fv_gemm_kernel fv_gemm_kernel_device;

/* The state of fv_gemm_kernel_device. */
fv_status fv_gemm_device_create(void **state, fv_device *device, int32_t num_workers);

/* NULL when oneDNN can run bf16 fast on this CPU, else why not. Static text. */
const char *fv_gemm_bf16_why_not(void);

/* Keeps oneDNN's calls on the calling thread; returns what was set before, for the caller's own use of
 * OpenMP. */
int fv_gemm_hold_openmp(void);
void fv_gemm_release_openmp(int before);

/* FV_ERR_INTERNAL with oneDNN's status; FV_ERR_NO_MEMORY where that is the reason. */
fv_status fv_gemm_fail(const char *call, int onednn_status);

#endif
