/* cuBLASLt as far as the CUDA plugin calls it, for the emulated GPU: products of fp32, made by the call. FV_FAKE_FAILS: one
 * whose cublasLtCreate fails, as with a driver that is too old for it. */
#include <cublasLt.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

typedef struct fake_matrix { /* in cublasLtMatrixLayoutOpaque_t */
    int64_t num_rows, num_columns, column_stride;
} fake_matrix;

typedef struct fake_product { /* in cublasLtMatmulDescOpaque_t */
    int32_t is_a_transposed;
} fake_product;

EXPORTED cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    *handle = (cublasLtHandle_t)handle;
#ifdef FV_FAKE_FAILS
    return CUBLAS_STATUS_NOT_INITIALIZED;
#else
    return CUBLAS_STATUS_SUCCESS;
#endif
}

EXPORTED cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    (void)handle;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORTED const char *cublasLtGetStatusName(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_NOT_INITIALIZED ? "CUBLAS_STATUS_NOT_INITIALIZED" : "a status of cuBLAS";
}

EXPORTED cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t product, size_t size,
                                                        cublasComputeType_t compute, cudaDataType_t scale)
{
    (void)compute;
    (void)scale;
    memset(product, 0, size);
    return CUBLAS_STATUS_SUCCESS;
}

EXPORTED cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t product,
                                                       cublasLtMatmulDescAttributes_t attribute, const void *value,
                                                       size_t size)
{
    cublasOperation_t operation;
    if (attribute != CUBLASLT_MATMUL_DESC_TRANSA || size != sizeof(operation)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&operation, value, size);
    ((fake_product *)(void *)product)->is_a_transposed = operation == CUBLAS_OP_T;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORTED cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t matrix, size_t size, cudaDataType type,
                                                          uint64_t rows, uint64_t columns, int64_t stride)
{
    const fake_matrix made = {(int64_t)rows, (int64_t)columns, stride};
    if (type != CUDA_R_32F || size < sizeof(made)) return CUBLAS_STATUS_NOT_SUPPORTED;
    memcpy(matrix, &made, sizeof(made));
    return CUBLAS_STATUS_SUCCESS;
}

EXPORTED cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t matrix,
                                                         cublasLtMatrixLayoutAttribute_t attribute, const void *value,
                                                         size_t size)
{
    (void)matrix;
    (void)attribute;
    (void)value;
    (void)size;
    return CUBLAS_STATUS_NOT_SUPPORTED; /* one matrix */
}

EXPORTED cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference, size_t size)
{
    memset(preference, 0, size);
    return CUBLAS_STATUS_SUCCESS;
}

EXPORTED cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                             cublasLtMatmulPreferenceAttributes_t attribute,
                                                             const void *value, size_t size)
{
    (void)preference;
    (void)attribute;
    (void)value;
    (void)size;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORTED cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                       cublasLtMatmulPreference_t preference, int num_asked,
                                                       cublasLtMatmulHeuristicResult_t *results, int *num_found)
{
    (void)handle;
    (void)product;
    (void)a;
    (void)b;
    (void)c;
    (void)d;
    (void)preference;
    if (num_asked < 1) return CUBLAS_STATUS_INVALID_VALUE;
    memset(results, 0, sizeof(*results));
    *num_found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORTED cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algorithm,
                                                             cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                             void *value, size_t size, size_t *written)
{
    const int32_t parts = 1;
    (void)algorithm;
    (void)attribute;
    if (size != sizeof(parts)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(value, &parts, size);
    *written = size;
    return CUBLAS_STATUS_SUCCESS;
}

/* Columns first: element (i, j) of a matrix is at i + j column_stride. The workspace is written, as some algorithm would. */
EXPORTED cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, const void *alpha,
                                       const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                                       cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                                       cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                                       const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t workspace_bytes,
                                       cudaStream_t stream)
{
    (void)handle;
    (void)alpha;
    (void)beta;
    (void)c;
    (void)c_layout;
    (void)algorithm;
    (void)stream;
    const int32_t is_transposed = ((const fake_product *)(const void *)product)->is_a_transposed;
    fake_matrix left, right, out;
    memcpy(&left, a_layout, sizeof(left));
    memcpy(&right, b_layout, sizeof(right));
    memcpy(&out, d_layout, sizeof(out));
    memset(workspace, 0x5a, workspace_bytes < 4096 ? workspace_bytes : 4096);
    const float *x = a, *y = b;
    float *to = d;
    for (int64_t j = 0; j < out.num_columns; j++) {
        for (int64_t i = 0; i < out.num_rows; i++) {
            float sum = 0;
            for (int64_t k = 0; k < right.num_rows; k++) {
                const int64_t at = is_transposed ? k + i * left.column_stride : i + k * left.column_stride;
                sum += x[at] * y[k + j * right.column_stride];
            }
            to[i + j * out.column_stride] = sum;
        }
    }
    return CUBLAS_STATUS_SUCCESS;
}
