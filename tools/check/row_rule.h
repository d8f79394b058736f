/* The accuracy rule of docs/numerics.md for one row whose exact result is known, and the numbers that it
 * needs. */
#ifndef FV_TOOLS_CHECK_ROW_RULE_H
#define FV_TOOLS_CHECK_ROW_RULE_H

#include "fovea/dtype.h"

#define CHECK_UNIT 0x1p-24 /* unit roundoff of fp32 */

/* 1: the error of `row`, `size` elements of `dtype`, against `exact` is at most twice that of `exact` rounded to
 * `dtype`, plus `floor`. *worst grows to the share of the tolerance that it took. */
int32_t check_row_good(double *worst, const void *row, const double *exact, int32_t size, fv_dtype dtype, double floor);

/* 1: an LSE of `num_sides` numbers added in fp32 is near enough; -inf only where that is exact. */
int32_t check_lse_good(float lse, double exact, int32_t num_sides);

/* Euclidean. */
double check_row_norm(const double *row, int32_t size);

#endif
