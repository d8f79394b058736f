/* Products of matrices that are no linear layer of the model: what attention asks its caller for
 * (fovea/gemm.h), and the router of experts. Always in fp32, on weights as they lie; rows of a and c may be narrow. */
#ifndef FV_ENGINE_GEMM_MATRICES_H
#define FV_ENGINE_GEMM_MATRICES_H

#include <stdbool.h>
#include <stddef.h>

#include "fovea/context.h"
#include "fovea/gemm.h"

/* What fv_gemm_matrices_run needs to know; outlives the calls. */
typedef struct fv_gemm_matrices {
    fv_context *context;
    bool batch_invariant; /* every row of a is multiplied alone */
    float *scratch; /* of narrow rows: of each of the context's workers fv_gemm_matrices_scratch(max_k); or NULL */
    int32_t max_k;
} fv_gemm_matrices;

/* Floats that a worker needs for rows of fp16 and bf16, whose k is up to max_k. */
size_t fv_gemm_matrices_scratch(int32_t max_k);

/* An fv_gemm_fn; `user` is an fv_gemm_matrices. Cut into tasks for the context's executor, so that a result
 * does not depend on the number of threads. FV_ERR_UNSUPPORTED: b is not fp32; a or c is neither fp32 nor, with scratch and a k
 * of up to max_k, fp16 or bf16. */
fv_status fv_gemm_matrices_run(void *user, const fv_gemm *gemm, fv_stream stream);

#endif
