/* Rows of a model file as fp32 or bf16. Values are exactly those of the format's definition in fp32
 * arithmetic (multiplications first, then one addition or subtraction, each rounded), so that another reader of the
 * same file has the same weights bit for bit. */
#ifndef FV_ENGINE_DEQUANTIZE_H
#define FV_ENGINE_DEQUANTIZE_H

#include "engine/gguf.h"

/* Converts `num` elements of `row`, stored as `type` (one that fv_gguf_type_is_usable), to `out`.
 * `num` is a multiple of the block of the type: 32 for Q4_0 to Q8_0, 256 for the K types. `row` needs
 * no alignment.
 * FV_ERR_UNSUPPORTED for another type, FV_ERR_INVALID for a wrong `num`; then `out` is untouched. */
fv_status fv_dequantize_row(float *out, const void *row, int32_t type, int64_t num);

/* The same, rounded to bfloat16 (nearest, ties to even; NaN stays NaN). */
fv_status fv_dequantize_row_bf16(uint16_t *out, const void *row, int32_t type, int64_t num);

#endif
