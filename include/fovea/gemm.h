/* Matrix products that the library asks its caller for: MLA multiplies by weights, and an engine has a GEMM
 * of its own already. */
#ifndef FOVEA_GEMM_H
#define FOVEA_GEMM_H

#include "fovea/device.h"
#include "fovea/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* c[i] = a[i] b[i] for num_matrices independent row-major products, or a[i] b[i]^T where b is transposed.
 * The last dimension of each is dense; other strides in bytes. No matrix of c overlaps anything. Sums in
 * fp32 at least. Sizes of 0 occur and do nothing. */
typedef struct fv_gemm {
    uint32_t struct_size; /* sizeof(fv_gemm) */
    int32_t num_matrices;
    int32_t m, n, k;
    int32_t b_is_transposed; /* b is [n, k], else [k, n] */
    fv_dtype a_dtype, b_dtype, c_dtype;
    const void *a; /* [num_matrices, m, k] */
    int64_t a_row_stride, a_matrix_stride;
    const void *b; /* weights */
    int64_t b_row_stride, b_matrix_stride;
    void *c; /* [num_matrices, m, n] */
    int64_t c_row_stride, c_matrix_stride;
} fv_gemm;

/* Called from fv_plan_run on its thread. Under a stream the product is put into the stream. */
typedef fv_status (*fv_gemm_fn)(void *user, const fv_gemm *gemm, fv_stream stream);

#ifdef __cplusplus
}
#endif
#endif
