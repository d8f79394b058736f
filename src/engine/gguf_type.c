/* The storage types of GGUF tensors and the types of its metadata values, as tables. */
#include "engine/gguf_private.h"

typedef struct type_info {
    const char *name;
    int32_t type;
    int16_t block; /* elements */
    int16_t block_bytes;
    bool usable;
} type_info;

static const type_info types[] = {
    {"F32", 0, 1, 4, true},          {"F16", 1, 1, 2, true},          {"Q4_0", 2, 32, 18, true},
    {"Q4_1", 3, 32, 20, true},       {"Q5_0", 6, 32, 22, true},       {"Q5_1", 7, 32, 24, true},
    {"Q8_0", 8, 32, 34, true},       {"Q8_1", 9, 32, 40, false},      {"Q2_K", 10, 256, 84, false},
    {"Q3_K", 11, 256, 110, false},   {"Q4_K", 12, 256, 144, true},    {"Q5_K", 13, 256, 176, true},
    {"Q6_K", 14, 256, 210, true},    {"Q8_K", 15, 256, 292, false},   {"IQ2_XXS", 16, 256, 66, false},
    {"IQ2_XS", 17, 256, 74, false},  {"IQ3_XXS", 18, 256, 98, false}, {"IQ1_S", 19, 256, 50, false},
    {"IQ4_NL", 20, 32, 18, false},   {"IQ3_S", 21, 256, 110, false},  {"IQ2_S", 22, 256, 82, false},
    {"IQ4_XS", 23, 256, 136, false}, {"I8", 24, 1, 1, false},         {"I16", 25, 1, 2, false},
    {"I32", 26, 1, 4, false},        {"I64", 27, 1, 8, false},        {"F64", 28, 1, 8, false},
    {"IQ1_M", 29, 256, 56, false},   {"BF16", 30, 1, 2, true},        {"TQ1_0", 34, 256, 54, false},
    {"TQ2_0", 35, 256, 66, false},   {"MXFP4", 39, 32, 17, false},    {"NVFP4", 40, 64, 36, false},
};

static const type_info *find_type(int32_t type)
{
    for (int32_t i = 0; i < FV_ARRAY_LEN(types); i++) {
        if (types[i].type == type) return &types[i];
    }
    return NULL;
}

const char *fv_gguf_type_name(int32_t type)
{
    const type_info *info = find_type(type);
    return info ? info->name : "unknown";
}

int32_t fv_gguf_type_block(int32_t type)
{
    const type_info *info = find_type(type);
    return info ? info->block : 0;
}

bool fv_gguf_type_is_usable(int32_t type)
{
    const type_info *info = find_type(type);
    return info && info->usable;
}

size_t fv_gguf_type_bytes(int32_t type, int64_t num)
{
    const type_info *info = find_type(type);
    if (!info || num < 0 || num % info->block != 0) return 0;
    return (size_t)(num / info->block) * (size_t)info->block_bytes;
}

const char *fv_gguf_value_type_name(uint32_t type)
{
    static const char *const names[FV_GGUF_NUM_VALUE_TYPES] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                               "bool", "string", "array", "u64", "i64", "f64"};
    return type < FV_GGUF_NUM_VALUE_TYPES ? names[type] : "unknown";
}
