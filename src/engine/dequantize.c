/* One function for each storage type that writes fp32, in loops of fixed length that the compiler
 * turns into vector code; bf16 goes through a small fp32 buffer that stays in the cache. */
#include "engine/dequantize.h"

#include <string.h>

#include "core/float.h"

enum { QUANT_BLOCK = 32, SUPER_BLOCK = 256, CHUNK = 256 };

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

/* As Q4_0 and Q4_1, and the fifth bit of value i is bit i of a word of 32. */
static void fifth_bits(uint8_t *restrict out, const uint8_t *restrict word)
{
    uint32_t bits;
    memcpy(&bits, word, sizeof(bits));
    for (int32_t i = 0; i < QUANT_BLOCK; i++) out[i] = (uint8_t)((bits >> i & 1) << 4);
}

static void from_q5_0(float *restrict out, const uint8_t *restrict row, int64_t num)
{
    uint8_t fifth[QUANT_BLOCK];
    for (int64_t block = 0; block < num / QUANT_BLOCK; block++, row += 22, out += QUANT_BLOCK) {
        const float scale = load_f16(row);
        fifth_bits(fifth, row + 2);
        for (int32_t i = 0; i < QUANT_BLOCK / 2; i++) {
            out[i] = (float)(((row[6 + i] & 15) | fifth[i]) - 16) * scale;
            out[i + QUANT_BLOCK / 2] = (float)(((row[6 + i] >> 4) | fifth[i + QUANT_BLOCK / 2]) - 16) * scale;
        }
    }
}

static void from_q5_1(float *restrict out, const uint8_t *restrict row, int64_t num)
{
    uint8_t fifth[QUANT_BLOCK];
    for (int64_t block = 0; block < num / QUANT_BLOCK; block++, row += 24, out += QUANT_BLOCK) {
        const float scale = load_f16(row);
        const float minimum = load_f16(row + 2);
        fifth_bits(fifth, row + 4);
        for (int32_t i = 0; i < QUANT_BLOCK / 2; i++) {
            out[i] = (float)((row[8 + i] & 15) | fifth[i]) * scale + minimum;
            out[i + QUANT_BLOCK / 2] = (float)((row[8 + i] >> 4) | fifth[i + QUANT_BLOCK / 2]) * scale + minimum;
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

/* Q4_K and Q5_K: the 6-bit scale and minimum of the 8 parts of a block, packed into 12 bytes. Parts 0 to
 * 3 are the low 6 bits of bytes 0 to 3 (scales) and 4 to 7 (minima), whose high 2 bits are the high bits
 * of parts 4 to 7; the low 4 bits of those share bytes 8 to 11. */
static void part_scale(float *scale, float *minimum, const uint8_t *restrict row, int32_t part)
{
    const uint8_t *packed = row + 4;
    uint8_t s, m;
    if (part < 4) {
        s = packed[part] & 63;
        m = packed[part + 4] & 63;
    } else {
        s = (uint8_t)((packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4);
        m = (uint8_t)((packed[part + 4] >> 4) | (packed[part] >> 6) << 4);
    }
    *scale = load_f16(row) * (float)s;
    *minimum = load_f16(row + 2) * (float)m;
}

/* Two parts share 32 bytes: one has the low nibbles, the next the high ones. */
static void from_q4_k(float *restrict out, const uint8_t *restrict row, int64_t num)
{
    for (int64_t block = 0; block < num / SUPER_BLOCK; block++, row += 144) {
        for (int32_t part = 0; part < 8; part++, out += 32) {
            float scale, minimum;
            part_scale(&scale, &minimum, row, part);
            const uint8_t *nibbles = row + 16 + part / 2 * 32;
            const int32_t shift = part % 2 * 4;
            for (int32_t i = 0; i < 32; i++) out[i] = (float)(nibbles[i] >> shift & 15) * scale - minimum;
        }
    }
}

/* The same; bit `part` of byte i of the 32 in front of the nibbles is the fifth bit. */
static void from_q5_k(float *restrict out, const uint8_t *restrict row, int64_t num)
{
    for (int64_t block = 0; block < num / SUPER_BLOCK; block++, row += 176) {
        const uint8_t *fifth = row + 16;
        for (int32_t part = 0; part < 8; part++, out += 32) {
            float scale, minimum;
            part_scale(&scale, &minimum, row, part);
            const uint8_t *nibbles = row + 48 + part / 2 * 32;
            const int32_t shift = part % 2 * 4;
            for (int32_t i = 0; i < 32; i++) {
                const int32_t q = (nibbles[i] >> shift & 15) | (fifth[i] >> part & 1) << 4;
                out[i] = (float)q * scale - minimum;
            }
        }
    }
}

/* 128 bytes of low nibbles, 64 of high pairs of bits, 16 scales, the block's scale. In each half of a
 * block, part p of 32 values has its nibbles in bytes 32 (p % 2) to 32 (p % 2) + 31 of 64, the low ones
 * for p < 2, and bits 2 p and 2 p + 1 of 32 bytes. */
static void from_q6_k(float *restrict out, const uint8_t *restrict row, int64_t num)
{
    for (int64_t block = 0; block < num / SUPER_BLOCK; block++, row += 210) {
        const float block_scale = load_f16(row + 208);
        for (int32_t part = 0; part < 8; part++, out += 32) {
            const int32_t half = part / 4, p = part % 4;
            const uint8_t *nibbles = row + half * 64 + p % 2 * 32;
            const uint8_t *pairs = row + 128 + half * 32;
            const int8_t *scales = (const int8_t *)row + 192 + part * 2;
            for (int32_t i = 0; i < 32; i++) {
                const int32_t q = (nibbles[i] >> (p / 2 * 4) & 15) | (pairs[i] >> (2 * p) & 3) << 4;
                out[i] = (float)(q - 32) * (block_scale * (float)scales[i / 16]);
            }
        }
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
    {FV_GGUF_Q5_0, QUANT_BLOCK, 22, from_q5_0},
    {FV_GGUF_Q5_1, QUANT_BLOCK, 24, from_q5_1},
    {FV_GGUF_Q8_0, QUANT_BLOCK, 34, from_q8_0},
    {FV_GGUF_Q4_K, SUPER_BLOCK, 144, from_q4_k},
    {FV_GGUF_Q5_K, SUPER_BLOCK, 176, from_q5_k},
    {FV_GGUF_Q6_K, SUPER_BLOCK, 210, from_q6_k},
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
    return fv_fail(FV_ERR_UNSUPPORTED, "cannot convert type %s (%d); accepted: %s", fv_gguf_type_name(type), type,
                   FV_GGUF_USABLE_TYPES);
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
