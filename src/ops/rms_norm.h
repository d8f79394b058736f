/* rms_norm: rows divided by their root mean square and multiplied by a weight, in place: what DeepSeek's MLA
 * does to the latents of queries and of keys.
 *
 *   y[i] = x[i] / sqrt(sum_j x[j]^2 / size + epsilon) * weight[i]
 *
 * Zhang and Sennrich, arXiv 1910.07467, equation 4, with the epsilon that models add. Arithmetic in fp32 at
 * least, rounded once; a row's bits do not depend on other rows. */
#ifndef FV_OPS_RMS_NORM_H
#define FV_OPS_RMS_NORM_H

#include "core/device.h"
#include "fovea/dtype.h"

typedef struct fv_rms_norm_params {
    void *rows;            /* [num_rows, size], last dimension dense */
    int64_t row_stride;    /* in bytes */
    fv_dtype dtype;        /* fp32, fp16 or bf16 */
    const void *weight;    /* [size], dense */
    fv_dtype weight_dtype; /* fp32, fp16 or bf16 */
    float epsilon;
    int32_t num_rows, size;
} fv_rms_norm_params;

typedef fv_status (*fv_rms_norm_fn)(const fv_launch *launch, const fv_rms_norm_params *params);

#endif
