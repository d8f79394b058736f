/* What happens to one token's activations between the GEMMs. Each function works on one row, in a
 * fixed order of operations, so that its result does not depend on the batch. */
#ifndef FV_ENGINE_ROWS_H
#define FV_ENGINE_ROWS_H

#include <stdint.h>

#include "fovea/dtype.h"

/* y = x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich, arXiv 1910.07467). y may be x. */
void fv_rms_norm_row(float *y, const float *x, const float *weight, int32_t size, float epsilon);

/* Cosines and sines of position * frequencies[i], times `magnitude`; i < num_pairs. */
void fv_rope_angles(float *cosines, float *sines, int32_t position, const double *frequencies, int32_t num_pairs,
                    float magnitude);

/* Rotates the first rope_size elements of each head in place (Su et al., arXiv 2104.09864). Element a of
 * pair i is multiplied by the complex number of angle i with element b as its imaginary part: a and b are
 * elements 2i and 2i + 1 (the order in which GGUF files store Q and K of llama models), or i and
 * i + rope_size / 2. */
void fv_rope_row_neighbours(float *heads, const float *cosines, const float *sines, int32_t num_heads,
                            int32_t head_size, int32_t rope_size);
void fv_rope_row_halves(float *heads, const float *cosines, const float *sines, int32_t num_heads, int32_t head_size,
                        int32_t rope_size);

/* y = f(gate) * up, gate_up [2 size]: gate, then up (Shazeer, arXiv 2002.05202). f is silu, or gelu in its
 * form with tanh (Hendrycks and Gimpel, arXiv 1606.08415). */
void fv_swiglu_row(float *y, const float *gate_up, int32_t size);
void fv_geglu_row(float *y, const float *gate_up, int32_t size);

/* y = x as `dtype`, F16 or BF16, rounded to nearest even; and back. */
void fv_narrow_row(uint16_t *y, const float *x, int32_t size, fv_dtype dtype);
void fv_widen_row(float *y, const uint16_t *x, int32_t size, fv_dtype dtype);

/* x *= factor */
void fv_scale_row(float *x, float factor, int32_t size);

/* x += y */
void fv_add_row(float *x, const float *y, int32_t size);

/* x += factor * y */
void fv_add_scaled_row(float *x, const float *y, float factor, int32_t size);

#endif
