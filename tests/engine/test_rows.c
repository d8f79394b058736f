/* Rows to narrow formats and back, and activations (engine/rows.c), against one element at a time. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "core/float.h"
#include "engine/rows.h"

enum { NUM = 1000 };

static void all_halves_come_back(void **state)
{
    (void)state;
    uint16_t halves[64], again[64];
    float wide[64];
    for (uint32_t first = 0; first < 0x10000; first += 64) {
        for (int32_t i = 0; i < 64; i++) halves[i] = (uint16_t)(first + (uint32_t)i);
        fv_widen_row(wide, halves, 64, FV_DTYPE_F16);
        fv_narrow_row(again, wide, 64, FV_DTYPE_F16);
        for (int32_t i = 0; i < 64; i++) {
            const float expected = fv_f32_of_f16(halves[i]);
            if (expected != expected) {
                assert_true(wide[i] != wide[i]);
                assert_true((again[i] & 0x7c00) == 0x7c00 && (again[i] & 0x3ff) != 0);
                continue;
            }
            assert_true(fv_bits_of_f32(wide[i]) == fv_bits_of_f32(expected));
            assert_int_equal(again[i], halves[i]);
        }
    }
}

/* Of all exponents, with ties and their neighbours. */
static void floats_round_as_one_by_one(void **state)
{
    (void)state;
    static const fv_dtype dtypes[] = {FV_DTYPE_F16, FV_DTYPE_BF16};
    uint32_t random = 7;
    for (int32_t round = 0; round < 200; round++) {
        float wide[NUM];
        uint16_t narrow[NUM];
        for (int32_t i = 0; i < NUM; i++) {
            random = random * 1664525u + 1013904223u;
            const uint32_t tie = i % 3 == 0 ? random & 0xffffe000u
                                            : (random & 0xffff8000u) + 0x1000u * (uint32_t)(i % 2);
            wide[i] = fv_f32_of_bits(i % 2 ? random : tie + (uint32_t)(i % 5) - 2u);
        }
        for (int32_t d = 0; d < 2; d++) {
            fv_narrow_row(narrow, wide, NUM, dtypes[d]);
            for (int32_t i = 0; i < NUM; i++) {
                const uint16_t expected = d == 0 ? fv_f16_of_f32(wide[i]) : fv_bf16_of_f32(wide[i]);
                if (wide[i] == wide[i]) assert_int_equal(narrow[i], expected);
            }
        }
    }
}

/* silu(gate) * up and gelu(gate) * up against doubles, for gates of -110 to 110 and in any part of a vector; what is not
 * finite stays so. */
static void activations_are_near_doubles(void **state)
{
    (void)state;
    float gate_up[2 * NUM], silu[NUM], gelu[NUM];
    for (int32_t size = NUM; size > NUM - 9; size--) {
        for (int32_t i = 0; i < size; i++) {
            gate_up[i] = (float)(i - size / 2) * (i % 3 == 0 ? 0.22f : 0.0071f);
            gate_up[size + i] = 1.0f + (float)(i % 7);
        }
        fv_swiglu_row(silu, gate_up, size);
        fv_geglu_row(gelu, gate_up, size);
        for (int32_t i = 0; i < size; i++) {
            const double x = (double)gate_up[i], up = (double)gate_up[size + i];
            const double two_u = 1.5957691216057308 * (x + 0.044715 * x * x * x);
            const double of_silu = x / (1 + exp(-x)) * up, of_gelu = x / (1 + exp(-two_u)) * up;
            assert_true(fabs((double)silu[i] - of_silu) <= 6e-7 * fabs(of_silu) + 1e-34);
            /* u itself is rounded, and with it e^(-2u). */
            assert_true(fabs((double)gelu[i] - of_gelu) <= (1e-6 + 4e-7 * fabs(two_u)) * fabs(of_gelu) + 1e-34);
        }
    }
    static const float odd[] = {NAN, INFINITY};
    for (int32_t i = 0; i < 2; i++) {
        gate_up[3] = odd[i];
        fv_swiglu_row(silu, gate_up, 16);
        fv_geglu_row(gelu, gate_up, 16);
        for (int32_t k = 0; k < 16; k++) {
            assert_true(isfinite(silu[k]) == (k != 3));
            assert_true(isfinite(gelu[k]) == (k != 3));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_halves_come_back),
        cmocka_unit_test(floats_round_as_one_by_one),
        cmocka_unit_test(activations_are_near_doubles),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
