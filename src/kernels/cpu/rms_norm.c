/* rms_norm: a task for each few rows; two passes over a row, which the first brings into the cache. */
#include <math.h>

#include "core/compiler.h"
#include "core/executor.h"
#include "core/float.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"

#define ROWS_PER_TASK 4

FV_ALWAYS_INLINE float sum_of_squares(const char *row, int32_t size, fv_dtype dtype)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(dtype);
    fv_f32x8 sums[2] = {fv_splat(0), fv_splat(0)};
    int32_t i = 0;
    for (; i + 16 <= size; i += 16) {
        const fv_f32x8 low = fv_load8(row + i * bytes, dtype), high = fv_load8(row + (i + 8) * bytes, dtype);
        sums[0] = fv_fma(low, low, sums[0]);
        sums[1] = fv_fma(high, high, sums[1]);
    }
    const fv_f32x8 both = sums[0] + sums[1];
    float sum = 0;
    for (int32_t lane = 0; lane < 8; lane++) sum += both[lane];
    for (; i < size; i++) {
        const float x = fv_float_load(row + i * bytes, dtype);
        sum += x * x;
    }
    return sum;
}

/* The dtypes are known to the compiler. */
FV_ALWAYS_INLINE void norm_row(char *row, const fv_rms_norm_params *params, fv_dtype dtype, fv_dtype weight_dtype)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(dtype), weight_bytes = (int64_t)fv_dtype_bytes(weight_dtype);
    const char *weight = params->weight;
    const int32_t size = params->size;
    const float factor = 1.0f / sqrtf(sum_of_squares(row, size, dtype) / (float)size + params->epsilon);
    int32_t i = 0;
    for (; i + 8 <= size; i += 8) {
        const fv_f32x8 y = fv_load8(row + i * bytes, dtype) * factor *
                           fv_load8(weight + i * weight_bytes, weight_dtype);
        fv_store8(row + i * bytes, y, dtype);
    }
    for (; i < size; i++) {
        const float y = fv_float_load(row + i * bytes, dtype) * factor *
                        fv_float_load(weight + i * weight_bytes, weight_dtype);
        fv_float_store(row + i * bytes, y, dtype);
    }
}

FV_ALWAYS_INLINE void norm_row_by(char *row, const fv_rms_norm_params *params, fv_dtype dtype)
{
    switch (params->weight_dtype) {
    case FV_DTYPE_BF16: norm_row(row, params, dtype, FV_DTYPE_BF16); return;
    case FV_DTYPE_F16: norm_row(row, params, dtype, FV_DTYPE_F16); return;
    default: norm_row(row, params, dtype, FV_DTYPE_F32); return;
    }
}

static void norm_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const fv_rms_norm_params *params = user;
    const int64_t end = fv_min_i64((index + 1) * ROWS_PER_TASK, params->num_rows);
    for (int64_t i = index * ROWS_PER_TASK; i < end; i++) {
        char *row = (char *)params->rows + i * params->row_stride;
        switch (params->dtype) {
        case FV_DTYPE_BF16: norm_row_by(row, params, FV_DTYPE_BF16); break;
        case FV_DTYPE_F16: norm_row_by(row, params, FV_DTYPE_F16); break;
        default: norm_row_by(row, params, FV_DTYPE_F32); break;
        }
    }
}

fv_status FV_ISA_SYMBOL(fv_rms_norm)(const fv_launch *launch, const fv_rms_norm_params *params)
{
    fv_executor_run(launch->executor, fv_ceil_div(params->num_rows, ROWS_PER_TASK), norm_task, (void *)params);
    return FV_OK;
}
