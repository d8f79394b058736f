/* What happens to one token's activations between the GEMMs. Each function works on one row, in a
 * fixed order of operations, so that its result does not depend on the batch. */
#ifndef FV_ENGINE_ROWS_H
#define FV_ENGINE_ROWS_H

#include <stdint.h>

/* y = x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich, arXiv 1910.07467). */
void fv_rms_norm_row(float *y, const float *x, const float *weight, int32_t size, float epsilon);

/* The angles of a position: cosines and sines of position * base^(-2i / rope_size), i < rope_size / 2. */
void fv_rope_angles(float *cosines, float *sines, int32_t position, int32_t rope_size, float base);

/* Rotates the first rope_size elements of each head in place (Su et al., arXiv 2104.09864). Pairs are
 * (2i, 2i + 1), the order in which GGUF files store the rows of Q and K of llama models. */
void fv_rope_row(float *heads, const float *cosines, const float *sines, int32_t num_heads, int32_t head_size,
                 int32_t rope_size);

/* y = silu(gate) * up, gate_up [2 size]: gate, then up (Shazeer, arXiv 2002.05202). */
void fv_swiglu_row(float *y, const float *gate_up, int32_t size);

/* x += y */
void fv_add_row(float *x, const float *y, int32_t size);

#endif
