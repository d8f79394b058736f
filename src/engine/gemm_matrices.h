/* Products of matrices that are no linear layer of the model: what attention asks its caller for
 * (fovea/gemm.h), and the router of experts. Always in fp32, on weights as they lie. */
#ifndef FV_ENGINE_GEMM_MATRICES_H
#define FV_ENGINE_GEMM_MATRICES_H

#include <stdbool.h>

#include "fovea/context.h"
#include "fovea/gemm.h"

/* What fv_gemm_matrices_run needs to know; outlives the calls. */
typedef struct fv_gemm_matrices {
    fv_context *context;
    bool batch_invariant; /* every row of a is multiplied alone */
} fv_gemm_matrices;

/* An fv_gemm_fn; `user` is an fv_gemm_matrices. Cut into tasks for the context's executor, so that a result
 * does not depend on the number of threads. FV_ERR_UNSUPPORTED: a dtype other than fp32. */
fv_status fv_gemm_matrices_run(void *user, const fv_gemm *gemm, fv_stream stream);

#endif
