/* The fp32 kernel: dnnl_sgemm on weights as they lie in the file, one row for each output feature.
 *
 * On AVX2 oneDNN 2.6 has the same code ("gemm:jit") behind sgemm, matmul and inner_product, and none
 * of them asks for another layout of the weights; sgemm needs no objects and takes any strides.
 * Measured on an EPYC (Zen 3, 2 cores, 21 GB/s one core, 31 GB/s both, peak 200 GFLOP/s), SmolLM2's
 * shapes, both cores:
 *
 *   1 row     22 to 30 GB/s of weights: no need of a GEMV of our own
 *   512 rows  175 GFLOP/s in tasks of 128 x 96; 135 with all rows in one task
 *
 * From 2 rows on sgemm packs both operands on every call, into memory that it allocates and frees; below
 * 4 rows that costs more than it saves. One row at a time allocates nothing. */
#include <oneapi/dnnl/dnnl.h>

#include "engine/gemm_kernel.h"

enum { min_packed_rows = 4 };

static fv_status f32_prepare(size_t *chunk_bytes, void *state, int64_t num_outputs, int64_t in_features)
{
    (void)state;
    *chunk_bytes = (size_t)num_outputs * (size_t)in_features * sizeof(float);
    return FV_OK;
}

static fv_status multiply(float *y, int64_t y_stride, const float *x, int64_t num_rows, const fv_gemm_chunk *chunk)
{
    const int64_t k = chunk->in_features;
    const dnnl_status_t status = dnnl_sgemm('N', 'T', num_rows, chunk->num_outputs, k, 1.0f, x, k, chunk->data, k, 0.0f,
                                            y, y_stride);
    return status == dnnl_success ? FV_OK : fv_gemm_fail("dnnl_sgemm", status);
}

static fv_status f32_run(void *state, float *y, int64_t y_stride, const float *x, int64_t first_row, int64_t num_rows,
                         const fv_gemm_chunk *chunk, bool batch_invariant, int32_t worker)
{
    (void)state;
    (void)worker;
    x += first_row * chunk->in_features;
    if (!batch_invariant && num_rows >= min_packed_rows) return multiply(y, y_stride, x, num_rows, chunk);
    for (int64_t row = 0; row < num_rows; row++) {
        const fv_status status = multiply(y + row * y_stride, y_stride, x + row * chunk->in_features, 1, chunk);
        if (status != FV_OK) return status;
    }
    return FV_OK;
}

const fv_gemm_kernel fv_gemm_kernel_f32 = {
    .dtype = FV_DTYPE_F32,
    .chunk_outputs = 96,
    .row_block = 128,
    .prepare = f32_prepare,
    .run = f32_run,
};
