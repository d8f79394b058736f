/* One function for each storage type that writes fp32, in loops of fixed length that the compiler
 * turns into vector code; bf16 goes through a small fp32 buffer that stays in the cache. */
#include "engine/dequantize.h"

#include <string.h>

#include "core/float.h"

enum { QUANT_BLOCK = 32, CHUNK = 256 };

static float load_f16(const uint8_t *from)
{
    uint16_t stored;
    memcpy(&stored, from, sizeof(stored));
    return fv_f32_of_f16(stored);
}

static void from_f32(float *restrict out, const uint8_t *restrict row, int64_t num)
{
    memcpy(out, row, (size_t)num * sizeof(*out));
}

/* Without branches, so that it vectorises: the exponent moves by a multiplication, which is exact and
 * also normalises subnormals; infinity and NaN are the values at or above 2^16 after it. */
static void from_f16(float *restrict out, const uint8_t *restrict row, int64_t num)
{
    const float exponent_shift = 0x1p112f; /* the biases differ by 127 - 15 */
    for (int64_t i = 0; i < num; i++) {
        uint16_t stored;
        memcpy(&stored, row + 2 * i, sizeof(stored));
        const uint32_t magnitude = (uint32_t)(stored & 0x7fffu) << 13;
        const uint32_t bits = fv_bits_of_f32(fv_f32_of_bits(magnitude) * exponent_shift);
        const uint32_t top_exponent = magnitude >= 0x0f800000u ? 0x7f800000u : 0;
        const uint32_t quiet = magnitude > 0x0f800000u ? 0x00400000u : 0;
        out[i] = fv_f32_of_bits((uint32_t)(stored & 0x8000u) << 16 | bits | top_exponent | quiet);
    }
}

static void from_bf16(float *restrict out, const uint8_t *restrict row, int64_t num)
{
    for (int64_t i = 0; i < num; i++) {
        uint16_t stored;
        memcpy(&stored, row + 2 * i, sizeof(stored));
        out[i] = fv_f32_of_bf16(stored);
    }
}

/* Low nibbles are the first half of a block, high nibbles the second. */
static void from_q4_0(float *restrict out, const uint8_t *restrict row, int64_t num)
{
    for (int64_t block = 0; block < num / QUANT_BLOCK; block++, row += 18, out += QUANT_BLOCK) {
        const float scale = load_f16(row);
        for (int32_t i = 0; i < QUANT_BLOCK / 2; i++) {
            out[i] = (float)((row[2 + i] & 15) - 8) * scale;
            out[i + QUANT_BLOCK / 2] = (float)((row[2 + i] >> 4) - 8) * scale;
        }
    }
}

static void from_q4_1(float *restrict out, const uint8_t *restrict row, int64_t num)
{
    for (int64_t block = 0; block < num / QUANT_BLOCK; block++, row += 20, out += QUANT_BLOCK) {
        const float scale = load_f16(row);
        const float minimum = load_f16(row + 2);
        for (int32_t i = 0; i < QUANT_BLOCK / 2; i++) {
            out[i] = (float)(row[4 + i] & 15) * scale + minimum;
            out[i + QUANT_BLOCK / 2] = (float)(row[4 + i] >> 4) * scale + minimum;
        }
    }
}

static void from_q8_0(float *restrict out, const uint8_t *restrict row, int64_t num)
{
    for (int64_t block = 0; block < num / QUANT_BLOCK; block++, row += 34, out += QUANT_BLOCK) {
        const float scale = load_f16(row);
        for (int32_t i = 0; i < QUANT_BLOCK; i++) out[i] = (float)(int8_t)row[2 + i] * scale;
    }
}

typedef struct conversion {
    fv_gguf_type type;
    int32_t block;
    int32_t block_bytes;
    void (*convert)(float *restrict out, const uint8_t *restrict row, int64_t num);
} conversion;

static const conversion conversions[] = {
    {FV_GGUF_F32, 1, 4, from_f32},
    {FV_GGUF_F16, 1, 2, from_f16},
    {FV_GGUF_BF16, 1, 2, from_bf16},
    {FV_GGUF_Q4_0, QUANT_BLOCK, 18, from_q4_0},
    {FV_GGUF_Q4_1, QUANT_BLOCK, 20, from_q4_1},
    {FV_GGUF_Q8_0, QUANT_BLOCK, 34, from_q8_0},
};

static fv_status find_conversion(const conversion **found, int32_t type, int64_t num)
{
    for (int32_t i = 0; i < FV_ARRAY_LEN(conversions); i++) {
        if ((int32_t)conversions[i].type != type) continue;
        if (num < 0 || num % conversions[i].block != 0) {
            return fv_fail(FV_ERR_INVALID, "%lld elements of type %s; accepted: multiples of %d", (long long)num,
                           fv_gguf_type_name(type), conversions[i].block);
        }
        *found = &conversions[i];
        return FV_OK;
    }
    return fv_fail(FV_ERR_UNSUPPORTED, "cannot convert type %s (%d); accepted: F32, F16, BF16, Q8_0, Q4_0, Q4_1",
                   fv_gguf_type_name(type), type);
}

fv_status fv_dequantize_row(float *out, const void *row, int32_t type, int64_t num)
{
    const conversion *found = NULL;
    const fv_status status = find_conversion(&found, type, num);
    if (status != FV_OK) return status;
    found->convert(out, row, num);
    return FV_OK;
}

fv_status fv_dequantize_row_bf16(uint16_t *out, const void *row, int32_t type, int64_t num)
{
    const conversion *found = NULL;
    const fv_status status = find_conversion(&found, type, num);
    if (status != FV_OK) return status;

    float buffer[CHUNK];
    for (int64_t begin = 0; begin < num; begin += CHUNK) {
        const int64_t count = fv_min_i64(CHUNK, num - begin);
        found->convert(buffer, (const uint8_t *)row + begin / found->block * found->block_bytes, count);
        for (int64_t i = 0; i < count; i++) out[begin + i] = fv_bf16_of_f32(buffer[i]);
    }
    return FV_OK;
}
