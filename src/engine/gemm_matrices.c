/* Tasks of row_block x column_block of each product, each one call of dnnl_sgemm. */
#include "engine/gemm_matrices.h"

#include <oneapi/dnnl/dnnl.h>
#include <stdatomic.h>

#include "core/compiler.h"
#include "engine/gemm_kernel.h"
#include "engine/rows.h"

enum { row_block = 128, column_block = 96, min_packed_rows = 4 }; /* as in gemm_f32.c, where it says why */

typedef struct matrices_job {
    const fv_gemm_matrices *on;
    const fv_gemm *gemm;
    int64_t row_blocks, column_blocks;
    atomic_int failed; /* oneDNN's status of a task that failed, or 0 */
} matrices_job;

/* Rows of a matrix as fp32: where they lie, or in scratch. */
typedef struct wide_rows {
    float *data;
    int64_t size; /* from one to the next, in floats */
} wide_rows;

static dnnl_status_t multiply(const fv_gemm *gemm, wide_rows c, wide_rows a, const float *b, int64_t num_rows,
                              int64_t num_columns)
{
    return dnnl_sgemm('N', gemm->b_is_transposed ? 'T' : 'N', num_rows, num_columns, gemm->k, 1.0f, a.data, a.size, b,
                      gemm->b_row_stride / (int64_t)sizeof(float), 0.0f, c.data, c.size);
}

/* Rows at `rows`, which are read where they are narrow and `widens` is set. */
static wide_rows wide_rows_of(const char *rows, int64_t stride, fv_dtype dtype, float *scratch, int64_t num_rows,
                              int64_t num_columns, bool widens)
{
    if (dtype == FV_DTYPE_F32) return (wide_rows){(float *)(uintptr_t)rows, stride / (int64_t)sizeof(float)};
    for (int64_t i = 0; widens && i < num_rows; i++)
        fv_widen_row(scratch + i * num_columns, (const uint16_t *)(const void *)(rows + i * stride),
                     (int32_t)num_columns, dtype);
    return (wide_rows){scratch, num_columns};
}

static void run_task(void *user, int64_t index, int32_t worker)
{
    matrices_job *job = user;
    const fv_gemm *gemm = job->gemm;
    const int64_t column = index % job->column_blocks * column_block;
    const int64_t row = index / job->column_blocks % job->row_blocks * row_block;
    const int64_t matrix = index / job->column_blocks / job->row_blocks;
    const int64_t num_columns = fv_min_i64(column_block, gemm->n - column);
    const int64_t num_rows = fv_min_i64(row_block, gemm->m - row);
    const int64_t b_column_stride = gemm->b_is_transposed ? gemm->b_row_stride : (int64_t)sizeof(float);
    const char *b = (const char *)gemm->b + matrix * gemm->b_matrix_stride + column * b_column_stride;
    const bool is_alone = job->on->batch_invariant || num_rows < min_packed_rows;
    const int64_t step = is_alone ? 1 : num_rows;
    const int64_t max_k = job->on->max_k, worker_floats = (int64_t)fv_gemm_matrices_scratch(job->on->max_k);
    float *a_scratch = job->on->scratch ? job->on->scratch + worker * worker_floats : NULL;
    float *c_scratch = job->on->scratch ? a_scratch + row_block * max_k : NULL;
    const char *a_rows = (const char *)gemm->a + matrix * gemm->a_matrix_stride + row * gemm->a_row_stride;
    char *c_rows = (char *)gemm->c + matrix * gemm->c_matrix_stride + row * gemm->c_row_stride +
                   column * (int64_t)fv_dtype_bytes(gemm->c_dtype);
    const wide_rows a = wide_rows_of(a_rows, gemm->a_row_stride, gemm->a_dtype, a_scratch, num_rows, gemm->k, true);
    const wide_rows c = wide_rows_of(c_rows, gemm->c_row_stride, gemm->c_dtype, c_scratch, num_rows, num_columns,
                                     false);

    const int before = fv_gemm_hold_openmp();
    for (int64_t i = 0; i < num_rows; i += step) {
        const dnnl_status_t status = multiply(gemm, (wide_rows){c.data + i * c.size, c.size},
                                              (wide_rows){a.data + i * a.size, a.size}, (const float *)(const void *)b,
                                              step, num_columns);
        if (status != dnnl_success) atomic_store(&job->failed, (int)status);
    }
    fv_gemm_release_openmp(before);
    for (int64_t i = 0; gemm->c_dtype != FV_DTYPE_F32 && i < num_rows; i++)
        fv_narrow_row((uint16_t *)(void *)(c_rows + i * gemm->c_row_stride), c.data + i * c.size, (int32_t)num_columns,
                      gemm->c_dtype);
}

size_t fv_gemm_matrices_scratch(int32_t max_k) { return (size_t)row_block * (size_t)(max_k + column_block); }

static fv_status check_dtypes(const fv_gemm_matrices *on, const fv_gemm *gemm)
{
    const fv_dtype dtypes[] = {gemm->a_dtype, gemm->b_dtype, gemm->c_dtype};
    for (int32_t i = 0; i < FV_ARRAY_LEN(dtypes); i++) {
        const bool may_be_narrow = i != 1 && on->scratch;
        const bool is_narrow = dtypes[i] == FV_DTYPE_F16 || dtypes[i] == FV_DTYPE_BF16;
        if (is_narrow && may_be_narrow && gemm->k > on->max_k)
            return fv_fail(FV_ERR_UNSUPPORTED, "k of a product of narrow rows is %d; accepted: up to %d", gemm->k,
                           on->max_k);
        if (dtypes[i] == FV_DTYPE_F32 || (is_narrow && may_be_narrow)) continue;
        return fv_fail(FV_ERR_UNSUPPORTED, "matrix %c of a product is %s; accepted: %s", "abc"[i],
                       fv_dtype_name(dtypes[i]), may_be_narrow ? "float32, float16, bfloat16" : "float32");
    }
    return FV_OK;
}

fv_status fv_gemm_matrices_run(void *user, const fv_gemm *gemm, fv_stream stream)
{
    (void)stream; /* the engine runs on the CPU */
    const fv_gemm_matrices *on = user;
    const fv_status status = check_dtypes(on, gemm);
    if (status != FV_OK) return status;
    if (gemm->m == 0 || gemm->n == 0 || gemm->k == 0) return FV_OK;
    matrices_job job = {
        .on = on,
        .gemm = gemm,
        .row_blocks = fv_ceil_div(gemm->m, row_block),
        .column_blocks = fv_ceil_div(gemm->n, column_block),
    };
    fv_context_parallel_for(on->context, job.row_blocks * job.column_blocks * gemm->num_matrices, run_task, &job);
    const int failed = atomic_load(&job.failed);
    return failed ? fv_gemm_fail("dnnl_sgemm", failed) : FV_OK;
}
