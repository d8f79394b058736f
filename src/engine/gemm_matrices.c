/* Tasks of row_block x column_block of each product, each one call of dnnl_sgemm. */
#include "engine/gemm_matrices.h"

#include <oneapi/dnnl/dnnl.h>
#include <stdatomic.h>

#include "core/compiler.h"
#include "engine/gemm_kernel.h"

enum { row_block = 128, column_block = 96, min_packed_rows = 4 }; /* as in gemm_f32.c, where it says why */

typedef struct matrices_job {
    const fv_gemm *gemm;
    bool batch_invariant;
    int64_t row_blocks, column_blocks;
    atomic_int failed; /* oneDNN's status of a task that failed, or 0 */
} matrices_job;

static dnnl_status_t multiply(const fv_gemm *gemm, float *c, const float *a, const float *b, int64_t num_rows,
                              int64_t num_columns)
{
    const int64_t bytes = sizeof(float);
    return dnnl_sgemm('N', gemm->b_is_transposed ? 'T' : 'N', num_rows, num_columns, gemm->k, 1.0f, a,
                      gemm->a_row_stride / bytes, b, gemm->b_row_stride / bytes, 0.0f, c, gemm->c_row_stride / bytes);
}

static void run_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    matrices_job *job = user;
    const fv_gemm *gemm = job->gemm;
    const int64_t column = index % job->column_blocks * column_block;
    const int64_t row = index / job->column_blocks % job->row_blocks * row_block;
    const int64_t matrix = index / job->column_blocks / job->row_blocks;
    const int64_t num_columns = fv_min_i64(column_block, gemm->n - column);
    const int64_t num_rows = fv_min_i64(row_block, gemm->m - row);
    const int64_t b_column_stride = gemm->b_is_transposed ? gemm->b_row_stride : (int64_t)sizeof(float);
    const char *b = (const char *)gemm->b + matrix * gemm->b_matrix_stride + column * b_column_stride;
    const bool is_alone = job->batch_invariant || num_rows < min_packed_rows;
    const int64_t step = is_alone ? 1 : num_rows;

    const int before = fv_gemm_hold_openmp();
    for (int64_t i = row; i < row + num_rows; i += step) {
        const char *a = (const char *)gemm->a + matrix * gemm->a_matrix_stride + i * gemm->a_row_stride;
        char *c = (char *)gemm->c + matrix * gemm->c_matrix_stride + i * gemm->c_row_stride;
        const dnnl_status_t status = multiply(gemm, (float *)(void *)c + column, (const float *)(const void *)a,
                                              (const float *)(const void *)b, step, num_columns);
        if (status != dnnl_success) atomic_store(&job->failed, (int)status);
    }
    fv_gemm_release_openmp(before);
}

fv_status fv_gemm_matrices_run(void *user, const fv_gemm *gemm, fv_stream stream)
{
    (void)stream; /* the engine runs on the CPU */
    const fv_gemm_matrices *on = user;
    const fv_dtype dtypes[] = {gemm->a_dtype, gemm->b_dtype, gemm->c_dtype};
    for (int32_t i = 0; i < FV_ARRAY_LEN(dtypes); i++) {
        if (dtypes[i] == FV_DTYPE_F32) continue;
        return fv_fail(FV_ERR_UNSUPPORTED, "matrix %c of a product is %s; accepted: float32", "abc"[i],
                       fv_dtype_name(dtypes[i]));
    }
    if (gemm->m == 0 || gemm->n == 0 || gemm->k == 0) return FV_OK;
    matrices_job job = {
        .gemm = gemm,
        .batch_invariant = on->batch_invariant,
        .row_blocks = fv_ceil_div(gemm->m, row_block),
        .column_blocks = fv_ceil_div(gemm->n, column_block),
    };
    fv_context_parallel_for(on->context, job.row_blocks * job.column_blocks * gemm->num_matrices, run_task, &job);
    const int failed = atomic_load(&job.failed);
    return failed ? fv_gemm_fail("dnnl_sgemm", failed) : FV_OK;
}
