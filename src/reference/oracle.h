/* The oracle: for a few rows of attention the exact result in double, the result of an ideal kernel of
 * the given dtypes, and how much fp32 arithmetic may honestly add to it. docs/numerics.md derives the
 * formulas; tools/check compares every kernel with them.
 *
 *   exact     sum_j p_j v_j / (sum_j p_j + sink),  p_j = e^(s_j - max s), all in double
 *   ideal     the same with p_j rounded to q_dtype in the numerator, and the result to out_dtype
 *   expected  the root mean square of |ideal - exact| over all p_j that would be rounded so: what a kernel
 *             that meets the keys in another order, and so rounds other numbers, may be off by as well; the
 *             two largest of what is rounded count with half of their worst
 *   floors    what rounding in scores, exponentials and sums may move the result by, all in fp32
 *   drift     what that may add where roundings do not average out: tensor cores cut off instead of rounding,, sums of
 *             nearly equal weights without a carry err to one side, and partial results of latents may have 16 bits
 *
 * A row passes when  |out - exact| <= 2 max(|ideal - exact|, expected) + out_floor  (2-norms over the row)
 * and |lse - exact lse| <= lse_floor; with the drifts added on a device that has no carries (tools/check). */
#ifndef FV_REFERENCE_ORACLE_H
#define FV_REFERENCE_ORACLE_H

#include "reference/attend_row.h"
#include "reference/kv_reader.h"

/* Most rows of a call. They share the reading of the keys. */
#define FV_ORACLE_MAX_ROWS 16

typedef struct fv_oracle_row {
    fv_attend_row row; /* in: of fv_attend_row_of */
    double *exact;     /* in: where to put [Dv] */
    double *ideal;     /* in: where to put [Dv] */
    double lse;        /* out; -inf: no key, then exact and ideal are 0 */
    double error;      /* out: max(|ideal - exact|, expected) */
    double odd_weight; /* out: the least p_j, beside the sink, of values that are infinite or NaN; infinity: none is */
    double out_floor;
    double lse_floor;
    double out_drift;
    double lse_drift;
} fv_oracle_row;

/* By how much rounding to `dtype` moves a number of unknown size, relative, in root mean square. */
double fv_oracle_rounding(fv_dtype dtype);

/* Doubles of scratch that rows over at most `num_keys` keys need. */
size_t fv_oracle_scratch_doubles(const fv_attend_params *params, int32_t num_keys);

/* Computes 1..FV_ORACLE_MAX_ROWS rows of one sequence and one KV head. Uses of params: q, the problem
 * and the batch; `reader` reads the keys, the cached ones by row `table_row` of the block table. */
void fv_oracle_attend(fv_oracle_row *rows, int32_t num_rows, const fv_attend_params *params, const fv_kv_reader *reader,
                      int32_t table_row, double *scratch);

#endif
