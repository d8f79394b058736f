/* Names and sizes of the element types. */
#include <string.h>
#include <strings.h>

#include "core/compiler.h"
#include "core/error.h"
#include "fovea/dtype.h"

static const struct {
    const char *name;
    fv_dtype dtype;
} dtype_names[] = {
    /* the first name of each dtype is the one that is printed */
    {"float32", FV_DTYPE_F32},
    {"float16", FV_DTYPE_F16},
    {"bfloat16", FV_DTYPE_BF16},
    {"fp8_e4m3", FV_DTYPE_F8_E4M3},
    {"fp8_e5m2", FV_DTYPE_F8_E5M2},
    {"int8", FV_DTYPE_I8},
    {"f32", FV_DTYPE_F32},
    {"fp32", FV_DTYPE_F32},
    {"float", FV_DTYPE_F32},
    {"f16", FV_DTYPE_F16},
    {"fp16", FV_DTYPE_F16},
    {"half", FV_DTYPE_F16},
    {"bf16", FV_DTYPE_BF16},
    {"fp8", FV_DTYPE_F8_E4M3},
    {"e4m3", FV_DTYPE_F8_E4M3},
    {"e5m2", FV_DTYPE_F8_E5M2},
    {"i8", FV_DTYPE_I8},
};

size_t fv_dtype_bytes(fv_dtype dtype)
{
    switch (dtype) {
    case FV_DTYPE_F32: return 4;
    case FV_DTYPE_F16:
    case FV_DTYPE_BF16: return 2;
    case FV_DTYPE_F8_E4M3:
    case FV_DTYPE_F8_E5M2:
    case FV_DTYPE_I8: return 1;
    case FV_DTYPE_NONE: return 0;
    }
    return 0;
}

const char *fv_dtype_name(fv_dtype dtype)
{
    for (int32_t i = 0; i < FV_ARRAY_LEN(dtype_names); i++) {
        if (dtype_names[i].dtype == dtype) return dtype_names[i].name;
    }
    return "none";
}

fv_status fv_dtype_parse(fv_dtype *dtype, const char *name)
{
    if (!dtype) return fv_fail(FV_ERR_INVALID, "dtype is NULL");
    for (int32_t i = 0; name && i < FV_ARRAY_LEN(dtype_names); i++) {
        if (strcasecmp(name, dtype_names[i].name) == 0) {
            *dtype = dtype_names[i].dtype;
            return FV_OK;
        }
    }
    return fv_fail(FV_ERR_INVALID, "no dtype '%s'; accepted: float32, float16, bfloat16, fp8_e4m3, fp8_e5m2, int8",
                   name ? name : "");
}
