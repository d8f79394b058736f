/* Vectors whose lanes are rows of W, for stored_panel.h: 16 lanes with AVX-512 and VNNI, 8 with AVX2, or for tests 16 in
 * plain C. All forms give the same bits. */
#ifndef FV_ENGINE_STORED_STORED_LANES_H
#define FV_ENGINE_STORED_STORED_LANES_H

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "core/compiler.h"
#include "engine/stored/stored_unroll.h"

#if defined(FV_STORED_LANES_EMULATED)
#define FV_STORED_KEEP_ORDER(v)

enum { FV_STORED_LANES = 16, FV_STORED_GROUPS = 3 }; /* vectors of lanes that a row of X meets at once */

typedef struct fv_stored_ints {
    int32_t of[FV_STORED_LANES];
} fv_stored_ints;

typedef struct fv_stored_floats {
    float of[FV_STORED_LANES];
} fv_stored_floats;

static inline fv_stored_ints fv_stored_ints_zero(void) { return (fv_stored_ints){{0}}; }

static inline fv_stored_ints fv_stored_ints_load(const int32_t *from)
{
    fv_stored_ints to;
    memcpy(&to, from, sizeof(to));
    return to;
}

static inline fv_stored_ints fv_stored_ints_splat(int32_t value)
{
    fv_stored_ints to;
    for (int32_t i = 0; i < FV_STORED_LANES; i++) to.of[i] = value;
    return to;
}

/* Two numbers of 16 bits of each lane with those of b, added to the lane's sum. */
static inline fv_stored_ints fv_stored_ints_dot(fv_stored_ints sum, fv_stored_ints a, fv_stored_ints b)
{
    for (int32_t i = 0; i < FV_STORED_LANES; i++) {
        const int32_t low = (int16_t)(uint16_t)a.of[i] * (int16_t)(uint16_t)b.of[i];
        sum.of[i] += low + (int16_t)(a.of[i] >> 16) * (int16_t)(b.of[i] >> 16);
    }
    return sum;
}

/* Words of the stripes whose rows the lanes are, one after the other. */
static inline void fv_stored_lanes_store(void *to, const __m256i *stripes)
{
    _mm256_storeu_si256((__m256i *)to, stripes[0]);
    _mm256_storeu_si256((__m256i *)to + 1, stripes[1]);
}

static inline fv_stored_floats fv_stored_floats_load(const float *from)
{
    fv_stored_floats to;
    memcpy(&to, from, sizeof(to));
    return to;
}

static inline void fv_stored_floats_store(float *to, fv_stored_floats from) { memcpy(to, &from, sizeof(from)); }

static inline fv_stored_floats fv_stored_floats_splat(float value)
{
    fv_stored_floats to;
    for (int32_t i = 0; i < FV_STORED_LANES; i++) to.of[i] = value;
    return to;
}

static inline fv_stored_floats fv_stored_floats_of(fv_stored_ints from)
{
    fv_stored_floats to;
    for (int32_t i = 0; i < FV_STORED_LANES; i++) to.of[i] = (float)from.of[i];
    return to;
}

static inline fv_stored_floats fv_stored_floats_mul(fv_stored_floats a, fv_stored_floats b)
{
    for (int32_t i = 0; i < FV_STORED_LANES; i++) a.of[i] *= b.of[i];
    return a;
}

static inline fv_stored_floats fv_stored_floats_add(fv_stored_floats a, fv_stored_floats b)
{
    for (int32_t i = 0; i < FV_STORED_LANES; i++) a.of[i] += b.of[i];
    return a;
}

static inline fv_stored_floats fv_stored_floats_fma(fv_stored_floats a, fv_stored_floats b, fv_stored_floats c)
{
    for (int32_t i = 0; i < FV_STORED_LANES; i++) c.of[i] = fmaf(a.of[i], b.of[i], c.of[i]);
    return c;
}

#elif defined(__AVX512VNNI__)
#define FV_STORED_KEEP_ORDER(v)

enum { FV_STORED_LANES = 16, FV_STORED_GROUPS = 3 };

typedef __m512i fv_stored_ints;
typedef __m512 fv_stored_floats;

static inline __m512i fv_stored_ints_zero(void) { return _mm512_setzero_si512(); }
static inline __m512i fv_stored_ints_load(const int32_t *from) { return _mm512_loadu_si512(from); }
static inline __m512i fv_stored_ints_splat(int32_t value) { return _mm512_set1_epi32(value); }
static inline __m512i fv_stored_ints_dot(__m512i sum, __m512i a, __m512i b) { return _mm512_dpwssd_epi32(sum, a, b); }
static inline void fv_stored_lanes_store(void *to, const __m256i *stripes)
{
    _mm512_storeu_si512(to, _mm512_inserti64x4(_mm512_castsi256_si512(stripes[0]), stripes[1], 1));
}
static inline __m512 fv_stored_floats_load(const float *from) { return _mm512_loadu_ps(from); }
static inline void fv_stored_floats_store(float *to, __m512 from) { _mm512_storeu_ps(to, from); }
static inline __m512 fv_stored_floats_splat(float value) { return _mm512_set1_ps(value); }
static inline __m512 fv_stored_floats_of(__m512i from) { return _mm512_cvtepi32_ps(from); }
static inline __m512 fv_stored_floats_mul(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
static inline __m512 fv_stored_floats_add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
static inline __m512 fv_stored_floats_fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }

#else
#define FV_STORED_KEEP_ORDER(v) __asm__("" : "+v"(v))

enum { FV_STORED_LANES = 8, FV_STORED_GROUPS = 2 };

typedef __m256i fv_stored_ints;
typedef __m256 fv_stored_floats;

static inline __m256i fv_stored_ints_zero(void) { return _mm256_setzero_si256(); }
static inline __m256i fv_stored_ints_load(const int32_t *from)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)from);
}
static inline __m256i fv_stored_ints_splat(int32_t value) { return _mm256_set1_epi32(value); }
static inline __m256i fv_stored_ints_dot(__m256i sum, __m256i a, __m256i b)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
static inline void fv_stored_lanes_store(void *to, const __m256i *stripes)
{
    _mm256_storeu_si256((__m256i *)to, stripes[0]);
}
static inline __m256 fv_stored_floats_load(const float *from) { return _mm256_loadu_ps(from); }
static inline void fv_stored_floats_store(float *to, __m256 from) { _mm256_storeu_ps(to, from); }
static inline __m256 fv_stored_floats_splat(float value) { return _mm256_set1_ps(value); }
static inline __m256 fv_stored_floats_of(__m256i from) { return _mm256_cvtepi32_ps(from); }
static inline __m256 fv_stored_floats_mul(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
static inline __m256 fv_stored_floats_add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
static inline __m256 fv_stored_floats_fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }

#endif
#endif
