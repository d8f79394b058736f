/* Element types of tensors and of the KV cache. */
#ifndef FOVEA_DTYPE_H
#define FOVEA_DTYPE_H

#include "fovea/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fv_dtype {
    FV_DTYPE_NONE = 0,
    FV_DTYPE_F32 = 1,
    FV_DTYPE_F16 = 2,     /* IEEE binary16 */
    FV_DTYPE_BF16 = 3,    /* upper half of binary32 */
    FV_DTYPE_F8_E4M3 = 4, /* OCP e4m3fn: bias 7, largest 448, no infinity, NaN 0x7f / 0xff */
    FV_DTYPE_F8_E5M2 = 5, /* OCP e5m2: bias 15, largest 57344, infinity 0x7c, NaN above */
    FV_DTYPE_I8 = 6,
} fv_dtype;

/* Bytes of one element; 0 for FV_DTYPE_NONE or a value that is no dtype. */
FV_API size_t fv_dtype_bytes(fv_dtype dtype);

/* "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"; "none" otherwise. */
FV_API const char *fv_dtype_name(fv_dtype dtype);

/* Reads a name as above, or "f32", "fp32", "float", "f16", "fp16", "half", "bf16", "fp8" (= e4m3).
 * FV_ERR_INVALID with the list of names when there is no such dtype. */
FV_API fv_status fv_dtype_parse(fv_dtype *dtype, const char *name);

#ifdef __cplusplus
}
#endif
#endif
