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

/* The device's own GEMM, for callers who have none: an fv_gemm_fn whose user is the fv_device. Matrices are
 * device memory, and the product goes to `stream`, also while that is captured. On CUDA this is cuBLASLt, loaded
 * by the first call, and a kernel of our own for up to 4 rows of bf16:
 *
 *   a, b    fp32, fp16, bf16, fp8_e4m3 (b transposed, k a multiple of 16); both of one dtype
 *   c       fp32, or fp16 or bf16 (of fp8: bf16)
 *
 * The first call for a shape chooses an algorithm; the first on a stream allocates a workspace, which a graph keeps
 * using: make each once before capturing it. After that a call allocates nothing. There are 16 workspaces of 32 MB. The
 * first 8 streams keep theirs until fv_stream_destroy. Later ones share the others: a stream that has none takes that
 * of the oldest product, and the call waits until this has ended. What a capture used stays its stream's: where all 8
 * are such FV_ERR_NO_SPACE. A graph's products use the workspace of the stream that they were captured on: launch it
 * there, or while neither products on that stream nor its other graphs run. cudaStreamPerThread has one for all
 * threads: only one of them may multiply. Streams of the caller's own making are idle when they are destroyed. Products
 * of another m may take another algorithm, so bits depend on m. b may be read before what went to the stream earlier
 * has ended: it is weights; who fills it by a kernel synchronises once before its first product.
 * FV_ERR_UNSUPPORTED: the device has no GEMM (the CPU), cuBLASLt is not installed, or it has no algorithm for these
 * dtypes and strides. FV_ERR_INVALID: sizes below 0; a matrix that is NULL, or it or a stride of it no multiple of its
 * element; a dtype that is none. */
FV_API fv_status fv_device_gemm(void *device, const fv_gemm *gemm, fv_stream stream);

#ifdef __cplusplus
}
#endif
#endif
