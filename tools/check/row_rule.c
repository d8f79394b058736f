/* One row against its exact result. */
#include "check/row_rule.h"

#include <math.h>

#include "core/float.h"

int32_t check_row_good(double *worst, const void *row, const double *exact, int32_t size, fv_dtype dtype, double floor)
{
    double error2 = 0, ideal2 = 0;
    for (int32_t d = 0; d < size; d++) {
        uint32_t nearest;
        fv_float_store(&nearest, (float)exact[d], dtype);
        const double ideal = fv_float_load(&nearest, dtype) - exact[d];
        const double error = fv_float_load((const char *)row + (size_t)d * fv_dtype_bytes(dtype), dtype) - exact[d];
        ideal2 += ideal * ideal;
        error2 += error * error;
    }
    const double tolerance = 2 * sqrt(ideal2) + floor;
    if (tolerance > 0) *worst = fmax(*worst, sqrt(error2) / tolerance);
    return sqrt(error2) <= tolerance;
}

int32_t check_lse_good(float lse, double exact, int32_t num_sides)
{
    if (exact == -INFINITY) return lse == -INFINITY;
    return fabs(lse - exact) <= CHECK_UNIT * (6 + num_sides + 2 * fabs(exact));
}

double check_row_norm(const double *row, int32_t size)
{
    double sum = 0;
    for (int32_t d = 0; d < size; d++) sum += row[d] * row[d];
    return sqrt(sum);
}
