/* rms_norm: each row in double, rounded once. */
#include <math.h>

#include "core/float.h"
#include "reference/attend_row.h"
#include "reference/reference.h"

static void norm_row(char *row, const fv_rms_norm_params *params)
{
    const size_t bytes = fv_dtype_bytes(params->dtype), weight_bytes = fv_dtype_bytes(params->weight_dtype);
    double squares = 0;
    for (int32_t i = 0; i < params->size; i++) {
        const double x = fv_float_load(row + (size_t)i * bytes, params->dtype);
        squares += x * x;
    }
    const double root = sqrt(squares / params->size + params->epsilon);
    for (int32_t i = 0; i < params->size; i++) {
        char *at = row + (size_t)i * bytes;
        const double weight = fv_float_load((const char *)params->weight + (size_t)i * weight_bytes,
                                            params->weight_dtype);
        const double y = fv_float_load(at, params->dtype) / root * weight;
        fv_row_store(at, &y, 1, params->dtype);
    }
}

fv_status fv_reference_rms_norm(const fv_launch *launch, const fv_rms_norm_params *params)
{
    (void)launch;
    for (int64_t row = 0; row < params->num_rows; row++) {
        norm_row((char *)params->rows + row * params->row_stride, params);
    }
    return FV_OK;
}
