/* Plain loops, which the compiler makes vectors of; together a few percent of a step. */
#include "engine/rows.h"

#include <math.h>

#include "core/compiler.h"
#include "core/float.h"

/* Sums in lanes: the compiler may keep them in vector registers, and the error grows less. */
static float mean_square(const float *x, int32_t size)
{
    enum { num_lanes = 16 };
    float lanes[num_lanes] = {0};
    int32_t i = 0;
    for (; i + num_lanes <= size; i += num_lanes) {
        for (int32_t lane = 0; lane < num_lanes; lane++) lanes[lane] += x[i + lane] * x[i + lane];
    }
    for (; i < size; i++) lanes[0] += x[i] * x[i];
    float sum = 0.0f;
    for (int32_t lane = 0; lane < num_lanes; lane++) sum += lanes[lane];
    return sum / (float)size;
}

void fv_rms_norm_row(float *y, const float *x, const float *weight, int32_t size, float epsilon)
{
    const float scale = 1.0f / sqrtf(mean_square(x, size) + epsilon);
    for (int32_t i = 0; i < size; i++) y[i] = x[i] * scale * weight[i];
}

void fv_rope_angles(float *cosines, float *sines, int32_t position, const double *frequencies, int32_t num_pairs,
                    float magnitude)
{
    for (int32_t i = 0; i < num_pairs; i++) {
        const double angle = position * frequencies[i];
        cosines[i] = (float)(cos(angle) * (double)magnitude);
        sines[i] = (float)(sin(angle) * (double)magnitude);
    }
}

void fv_rope_row_neighbours(float *heads, const float *cosines, const float *sines, int32_t num_heads,
                            int32_t head_size, int32_t rope_size)
{
    for (int32_t head = 0; head < num_heads; head++, heads += head_size) {
        for (int32_t i = 0; i < rope_size / 2; i++) {
            const float a = heads[2 * i], b = heads[2 * i + 1];
            heads[2 * i] = a * cosines[i] - b * sines[i];
            heads[2 * i + 1] = a * sines[i] + b * cosines[i];
        }
    }
}

void fv_rope_row_halves(float *heads, const float *cosines, const float *sines, int32_t num_heads, int32_t head_size,
                        int32_t rope_size)
{
    const int32_t half = rope_size / 2;
    for (int32_t head = 0; head < num_heads; head++, heads += head_size) {
        for (int32_t i = 0; i < half; i++) {
            const float a = heads[i], b = heads[i + half];
            heads[i] = a * cosines[i] - b * sines[i];
            heads[i + half] = a * sines[i] + b * cosines[i];
        }
    }
}

/* What exp_of takes. Volatile, for of constants compilers make a path of their own for numbers beyond them, which all pass,
 * slowly: e^88 is one that makes denormal quotients. */
static const volatile float exp_limits[2] = {-87.0f, 88.0f};

/* e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2, e^r by its series up to r^7 / 7!: within 3 units of the last
 * place. Numbers below `least` as that, above `most` and NaN as that. */
FV_ALWAYS_INLINE float exp_of(float x, float least, float most)
{
    const float round_at = 12582912.0f; /* 1.5 x 2^23: a sum with it is rounded to an integer */
    x = x < most ? x : most;
    x = x > least ? x : least;
    const float shifted = x * 1.44269504f + round_at, n = shifted - round_at;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float sum = 1.98412698e-4f;
    sum = sum * r + 1.38888889e-3f;
    sum = sum * r + 8.33333333e-3f;
    sum = sum * r + 4.16666667e-2f;
    sum = sum * r + 1.66666667e-1f;
    sum = sum * r + 0.5f;
    sum = sum * (r * r) + r + 1.0f;
    return fv_f32_of_bits(fv_bits_of_f32(sum) + (fv_bits_of_f32(shifted) << 23));
}

FV_EACH_CPU static void swiglu(float *y, const float *gate_up, int32_t size)
{
    const float *up = gate_up + size;
    const float least = exp_limits[0], most = exp_limits[1];
    for (int32_t i = 0; i < size; i++) y[i] = gate_up[i] / (1.0f + exp_of(-gate_up[i], least, most)) * up[i];
}

void fv_swiglu_row(float *y, const float *gate_up, int32_t size) { swiglu(y, gate_up, size); }

/* (1 + tanh(u)) / 2 = 1 / (1 + e^(-2u)), so one exponential does. */
FV_EACH_CPU static void geglu(float *y, const float *gate_up, int32_t size)
{
    const float two_sqrt_2_over_pi = 1.5957691216057308f;
    const float *up = gate_up + size;
    const float least = exp_limits[0], most = exp_limits[1];
    for (int32_t i = 0; i < size; i++) {
        const float x = gate_up[i];
        const float two_u = two_sqrt_2_over_pi * (x + 0.044715f * x * x * x);
        y[i] = x / (1.0f + exp_of(-two_u, least, most)) * up[i];
    }
}

void fv_geglu_row(float *y, const float *gate_up, int32_t size) { geglu(y, gate_up, size); }

void fv_scale_row(float *x, float factor, int32_t size)
{
    for (int32_t i = 0; i < size; i++) x[i] *= factor;
}

void fv_add_row(float *x, const float *y, int32_t size)
{
    for (int32_t i = 0; i < size; i++) x[i] += y[i];
}

void fv_add_scaled_row(float *x, const float *y, float factor, int32_t size)
{
    for (int32_t i = 0; i < size; i++) x[i] += factor * y[i];
}

/* fv_f16_of_f32 and fv_f32_of_f16 without branches, so that the compiler may do several at a time. Below the smallest normal
 * number an addition leaves the rounded count of units in the low bits, and a product the units' worth. */
static uint16_t half_of(float value)
{
    const uint32_t bits = fv_bits_of_f32(value), magnitude = bits & 0x7fffffffu;
    const uint32_t normal = ((magnitude + 0xfffu + (magnitude >> 13 & 1u)) >> 13) - (112u << 10);
    const uint32_t small = fv_bits_of_f32(fv_f32_of_bits(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = magnitude < 0x38800000u ? small : normal;
    half = magnitude >= 0x47800000u || half > 0x7c00u ? 0x7c00u : half;
    half = magnitude > 0x7f800000u ? 0x7fffu : half;
    return (uint16_t)((bits >> 16 & 0x8000u) | half);
}

static float of_half(uint16_t stored)
{
    const uint32_t magnitude = stored & 0x7fffu;
    const uint32_t wide = fv_bits_of_f32(fv_f32_of_bits(magnitude << 13) * 0x1p112f);
    const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0;
    return fv_f32_of_bits((uint32_t)(stored & 0x8000u) << 16 | special | wide);
}

FV_EACH_CPU static void narrow(uint16_t *y, const float *x, int32_t size, fv_dtype dtype)
{
    if (dtype == FV_DTYPE_F16)
        for (int32_t i = 0; i < size; i++) y[i] = half_of(x[i]);
    else
        for (int32_t i = 0; i < size; i++) y[i] = fv_bf16_of_f32(x[i]);
}

void fv_narrow_row(uint16_t *y, const float *x, int32_t size, fv_dtype dtype) { narrow(y, x, size, dtype); }

void fv_widen_row(float *y, const uint16_t *x, int32_t size, fv_dtype dtype)
{
    if (dtype == FV_DTYPE_F16)
        for (int32_t i = 0; i < size; i++) y[i] = of_half(x[i]);
    else
        for (int32_t i = 0; i < size; i++) y[i] = fv_f32_of_bf16(x[i]);
}
