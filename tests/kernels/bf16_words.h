/* Random bf16 for the tests of instructions that multiply them: denormal numbers count as 0 there. */
#ifndef FV_TESTS_KERNELS_BF16_WORDS_H
#define FV_TESTS_KERNELS_BF16_WORDS_H

#include <math.h>

#include "kernels/cpu/simd.h"

static inline uint32_t next_random(uint32_t *state) { return *state = *state * 1664525u + 1013904223u; }

/* bf16 of either sign, about 2^-8 to 2^8; every eighth is a denormal number. */
static inline void fill(uint16_t *to, int32_t num, uint32_t *random)
{
    for (int32_t i = 0; i < num; i++) {
        const uint32_t bits = next_random(random) >> 8;
        to[i] = (uint16_t)((bits & 0x8000u) |
                           (i % 8 == 7 ? bits & 0x7fu : (119u + (bits >> 16) % 16u) << 7 | (bits & 0x7fu)));
    }
}

static inline float value_of(uint16_t stored) { return stored & 0x7f80u ? fv_f32_of_bf16(stored) : 0.0f; }

static inline float flushed(float value) { return fabsf(value) < 0x1p-126f ? 0.0f : value; }

#endif
