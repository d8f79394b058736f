/* Linear layers: Y = X W^T, with weights that are read once and kept as the file stores them, or in the compute type
 * where that is no larger.
 *
 * The rest of the engine knows nothing of the library behind it, which is oneDNN:
 *
 *   compute type bf16   CPUs with AVX512_BF16 or AMX, inner_product primitives (gemm_bf16.c)
 *   compute type fp32   all others, dnnl_sgemm on rows as in the file (gemm_f32.c)
 *   as stored           kernels of ours (stored/); without AVX2 many rows by panels for the above (gemm_stored.c)
 *   on a device         weights only, in bf16 (gemm_device.c)
 *
 * oneDNN would spread a call over threads of OpenMP, which spin and fight the context's own. So each
 * call runs on one thread, and the output features are cut into chunks of a fixed size that are dealt
 * out on the context's executor: a result does not depend on the number of threads.
 *
 *              out features
 *             | chunk | chunk | chunk |
 *   rows of X +-------+-------+-------+
 *   row block |  task |  task |  task |
 *   row block |  task |  task |  task |
 */
#ifndef FV_ENGINE_GEMM_H
#define FV_ENGINE_GEMM_H

#include <stdbool.h>

#include "core/error.h"
#include "fovea/device.h"
#include "fovea/dtype.h"

typedef struct fv_gemm_library fv_gemm_library;
typedef struct fv_gemm_weight fv_gemm_weight;

/* Fills rows [first_row, first_row + num_rows) of a weight matrix: num_rows * in_features floats.
 * Called from several threads at once. */
typedef fv_status (*fv_read_rows_fn)(float *rows, void *user, int64_t first_row, int64_t num_rows);

/* `dtype` is FV_DTYPE_F32 or FV_DTYPE_BF16 for weights of that type, or FV_DTYPE_NONE for the best of this CPU: weights
 * as they are stored where that is smaller. FV_ERR_UNSUPPORTED with the reason when the CPU has no bf16 instructions.
 * Keeps `context`; used by one thread at a time. */
fv_status fv_gemm_create(fv_gemm_library **gemm, fv_context *context, fv_dtype dtype);

/* Keeps weights in the memory of `device` in bf16, dense and row-major, for those who multiply there
 * (fv_device_gemm); fv_gemm_run refuses them. Files are read on the context's executor. */
fv_status fv_gemm_create_on(fv_gemm_library **gemm, fv_context *context, fv_device *device);
void fv_gemm_destroy(fv_gemm_library *gemm); /* takes NULL; the weights go first */

fv_dtype fv_gemm_dtype(const fv_gemm_library *gemm);

/* "onednn 2.6.3 float32", and ", weights as stored: avx2" once there is such a weight. Valid as long as `gemm`. */
const char *fv_gemm_describe(const fv_gemm_library *gemm);

/* Reads W [out_features, in_features] in parallel and keeps it in the compute type. Beside the weight
 * itself this needs one chunk of rows for each worker. */
fv_status fv_gemm_weight_create(fv_gemm_weight **weight, fv_gemm_library *gemm, int64_t out_features,
                                int64_t in_features, fv_read_rows_fn read_rows, void *user);

/* Rows of a model file, one after the other. */
typedef struct fv_gemm_rows {
    const void *data;
    int32_t type; /* fv_gguf_type */
    int64_t num_rows;
} fv_gemm_rows;

enum { FV_GEMM_MAX_PARTS = 3 };

/* W of the rows of up to three parts, in the compute type, or with FV_DTYPE_NONE a copy of them as they are stored
 * (engine/stored/) where that is smaller. in_features is a multiple of each type's block. */
fv_status fv_gemm_weight_create_of_rows(fv_gemm_weight **weight, fv_gemm_library *gemm, int64_t in_features,
                                        const fv_gemm_rows *parts, int32_t num_parts);

/* The same of numbers that depend on `seed` alone, uniform with a variance of 1 / in_features, rounded to bf16
 * whatever the compute type; on a device they are made there. */
fv_status fv_gemm_weight_create_random(fv_gemm_weight **weight, fv_gemm_library *gemm, int64_t out_features,
                                       int64_t in_features, uint64_t seed);
void fv_gemm_random_rows(float *rows, uint64_t seed, int64_t in_features, int64_t first_row, int64_t num_rows);
void fv_gemm_weight_destroy(fv_gemm_weight *weight); /* takes NULL */

bool fv_gemm_is_on_device(const fv_gemm_library *gemm);

/* Of fv_gemm_create_on: [out_features, in_features] in device memory. */
const void *fv_gemm_weight_data(const fv_gemm_weight *weight);
int64_t fv_gemm_weight_out_features(const fv_gemm_weight *weight);
int64_t fv_gemm_weight_in_features(const fv_gemm_weight *weight);
size_t fv_gemm_weight_bytes(const fv_gemm_weight *weight);

/* Makes room for calls of up to num_rows rows, so that none of them allocates. */
fv_status fv_gemm_reserve(fv_gemm_library *gemm, int64_t num_rows);

/* y [num_rows, out_features] = x [num_rows, in_features] W^T, both dense. num_rows within what was
 * reserved. batch_invariant: every row is computed alone, so that its bits do not depend on the
 * others. */
fv_status fv_gemm_run(fv_gemm_library *gemm, float *y, const float *x, const fv_gemm_weight *weight, int64_t num_rows,
                      bool batch_invariant);

#endif
