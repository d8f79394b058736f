/* Scalar conversions between fp32 and the narrow formats, bit-exact, round to nearest even. These
 * are the definition; vector code is tested against them. */
#ifndef FV_CORE_FLOAT_H
#define FV_CORE_FLOAT_H

#include <string.h>

#include "fovea/dtype.h"

static inline uint32_t fv_bits_of_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float fv_f32_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline float fv_f32_of_bf16(uint16_t stored) { return fv_f32_of_bits((uint32_t)stored << 16); }

static inline uint16_t fv_bf16_of_f32(float value)
{
    const uint32_t bits = fv_bits_of_f32(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u); /* keep NaN quiet */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* A format with a sign, `exponent_bits` and `mantissa_bits`, stored in the low bits. has_infinity:
 * the top exponent holds infinity and NaN (IEEE); otherwise only all ones is NaN (e4m3fn). */
typedef struct fv_float_format {
    int32_t exponent_bits;
    int32_t mantissa_bits;
    int32_t bias;
    int32_t has_infinity;
    uint32_t max_finite; /* bits of the largest finite value */
} fv_float_format;

static const fv_float_format fv_format_f16 = {5, 10, 15, 1, 0x7bff};
static const fv_float_format fv_format_e4m3 = {4, 3, 7, 0, 0x7e};
static const fv_float_format fv_format_e5m2 = {5, 2, 15, 1, 0x7b};

static inline float fv_f32_of_narrow(uint32_t stored, const fv_float_format *format)
{
    const int32_t width = format->exponent_bits + format->mantissa_bits;
    const uint32_t sign = (stored >> width & 1u) << 31;
    const uint32_t magnitude = stored & ((1u << width) - 1u);
    const uint32_t exponent = magnitude >> format->mantissa_bits;
    const uint32_t mantissa = magnitude & ((1u << format->mantissa_bits) - 1u);
    if (magnitude > format->max_finite) {
        const int32_t infinite = format->has_infinity && mantissa == 0;
        return fv_f32_of_bits(sign | 0x7f800000u | (infinite ? 0u : 0x400000u));
    }
    const int32_t shift = 23 - format->mantissa_bits;
    if (exponent == 0) { /* zero or subnormal: mantissa * 2^(1 - bias - mantissa_bits), exact in fp32 */
        const float unit = fv_f32_of_bits((uint32_t)(127 + 1 - format->bias - format->mantissa_bits) << 23);
        const float value = (float)mantissa * unit;
        return sign ? -value : value;
    }
    return fv_f32_of_bits(sign | (exponent + 127u - (uint32_t)format->bias) << 23 | mantissa << shift);
}

/* Values beyond the largest finite one become infinity, or, with `saturate` or no infinity, the
 * largest finite value. NaN stays NaN. */
static inline uint32_t fv_narrow_of_f32(float value, const fv_float_format *format, int32_t saturate)
{
    const int32_t width = format->exponent_bits + format->mantissa_bits;
    const uint32_t bits = fv_bits_of_f32(value);
    const uint32_t sign = (bits >> 31) << width;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t infinity = format->has_infinity ? format->max_finite + 1u : format->max_finite;
    const uint32_t overflow = saturate ? format->max_finite : infinity;
    if (magnitude > 0x7f800000u) return sign | ((1u << width) - 1u);
    if (magnitude == 0x7f800000u) return sign | overflow;

    const int32_t shift = 23 - format->mantissa_bits;
    const int32_t exponent = (int32_t)(magnitude >> 23) - 127 + format->bias;
    uint32_t rounded;
    if (exponent <= 0) { /* subnormal in the narrow format, or below it */
        const int32_t drop = shift + 1 - exponent;
        if (drop > 25) return sign;
        const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
        const uint32_t half = 1u << (drop - 1);
        const uint32_t kept = significand >> drop;
        const uint32_t rest = significand & ((1u << drop) - 1u);
        rounded = kept + (rest > half || (rest == half && (kept & 1u)));
    } else {
        const uint32_t kept = ((uint32_t)exponent << format->mantissa_bits) | (magnitude & 0x7fffffu) >> shift;
        const uint32_t half = 1u << (shift - 1);
        const uint32_t rest = magnitude & ((1u << shift) - 1u);
        rounded = kept + (rest > half || (rest == half && (kept & 1u)));
    }
    return sign | (rounded > format->max_finite ? overflow : rounded);
}

static inline float fv_f32_of_f16(uint16_t stored) { return fv_f32_of_narrow(stored, &fv_format_f16); }
static inline uint16_t fv_f16_of_f32(float value) { return (uint16_t)fv_narrow_of_f32(value, &fv_format_f16, 0); }
static inline float fv_f32_of_e4m3(uint8_t stored) { return fv_f32_of_narrow(stored, &fv_format_e4m3); }
static inline float fv_f32_of_e5m2(uint8_t stored) { return fv_f32_of_narrow(stored, &fv_format_e5m2); }
/* fp8 saturates: a cache entry never becomes infinite by rounding. */
static inline uint8_t fv_e4m3_of_f32(float value) { return (uint8_t)fv_narrow_of_f32(value, &fv_format_e4m3, 1); }
static inline uint8_t fv_e5m2_of_f32(float value) { return (uint8_t)fv_narrow_of_f32(value, &fv_format_e5m2, 1); }

/* One element of any dtype, at any alignment. */
static inline float fv_float_load(const void *from, fv_dtype dtype)
{
    uint16_t half;
    uint8_t byte;
    float value;
    switch (dtype) {
    case FV_DTYPE_F32: memcpy(&value, from, 4); return value;
    case FV_DTYPE_F16: memcpy(&half, from, 2); return fv_f32_of_f16(half);
    case FV_DTYPE_BF16: memcpy(&half, from, 2); return fv_f32_of_bf16(half);
    case FV_DTYPE_F8_E4M3: memcpy(&byte, from, 1); return fv_f32_of_e4m3(byte);
    case FV_DTYPE_F8_E5M2: memcpy(&byte, from, 1); return fv_f32_of_e5m2(byte);
    case FV_DTYPE_I8: memcpy(&byte, from, 1); return (float)(int8_t)byte;
    case FV_DTYPE_NONE: break;
    }
    return fv_f32_of_bits(0x7fc00000u);
}

static inline void fv_float_store(void *to, float value, fv_dtype dtype)
{
    uint16_t half;
    uint8_t byte;
    switch (dtype) {
    case FV_DTYPE_F32: memcpy(to, &value, 4); return;
    case FV_DTYPE_F16:
        half = fv_f16_of_f32(value);
        memcpy(to, &half, 2);
        return;
    case FV_DTYPE_BF16:
        half = fv_bf16_of_f32(value);
        memcpy(to, &half, 2);
        return;
    case FV_DTYPE_F8_E4M3:
        byte = fv_e4m3_of_f32(value);
        memcpy(to, &byte, 1);
        return;
    case FV_DTYPE_F8_E5M2:
        byte = fv_e5m2_of_f32(value);
        memcpy(to, &byte, 1);
        return;
    case FV_DTYPE_I8: { /* symmetric, rounds half away from zero, as the per-token-head int8 caches do; NaN is 0 */
        const float number = value == value ? value : 0.0f;
        const float clamped = number > 127.0f ? 127.0f : number < -127.0f ? -127.0f : number;
        byte = (uint8_t)(int8_t)(clamped + (clamped < 0 ? -0.5f : 0.5f));
        memcpy(to, &byte, 1);
        return;
    }
    case FV_DTYPE_NONE: return;
    }
}

#endif
