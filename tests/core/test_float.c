/* Scalar conversions: every pattern of the narrow formats, and rounding against exact arithmetic. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core/float.h"

/* The value of a pattern, by the definition of the format, in double. */
static double value_by_definition(uint32_t stored, int exponent_bits, int mantissa_bits, int bias)
{
    const uint32_t mantissa = stored & ((1u << mantissa_bits) - 1u);
    const int exponent = (int)(stored >> mantissa_bits & ((1u << exponent_bits) - 1u));
    const double sign = stored >> (exponent_bits + mantissa_bits) & 1u ? -1.0 : 1.0;
    const double fraction = mantissa / (double)(1u << mantissa_bits);
    return sign * (exponent ? ldexp(1.0 + fraction, exponent - bias) : ldexp(fraction, 1 - bias));
}

static void test_every_pattern_decodes(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 256; i++) {
        const uint32_t magnitude = i & 0x7f;
        if (magnitude == 0x7f)
            assert_true(isnan(fv_f32_of_e4m3((uint8_t)i)));
        else
            assert_true((double)fv_f32_of_e4m3((uint8_t)i) == value_by_definition(i, 4, 3, 7));
        const float e5m2 = fv_f32_of_e5m2((uint8_t)i);
        if (magnitude > 0x7c)
            assert_true(isnan(e5m2));
        else if (magnitude == 0x7c)
            assert_true(isinf(e5m2) && (e5m2 < 0) == (i > 127));
        else
            assert_true((double)e5m2 == value_by_definition(i, 5, 2, 15));
    }
    for (uint32_t i = 0; i < 65536; i++) {
        const float half = fv_f32_of_f16((uint16_t)i);
        const uint32_t magnitude = i & 0x7fff;
        if (magnitude > 0x7c00)
            assert_true(isnan(half));
        else if (magnitude == 0x7c00)
            assert_true(isinf(half));
        else
            assert_true((double)half == value_by_definition(i, 5, 10, 15));
    }
    assert_true(fv_f32_of_e4m3(0x7e) == 448.0f);
    assert_true(fv_f32_of_e5m2(0x7b) == 57344.0f);
}

static void test_encode_inverts_decode(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 256; i++) {
        const float e4m3 = fv_f32_of_e4m3((uint8_t)i);
        if (!isnan(e4m3)) assert_int_equal(fv_e4m3_of_f32(e4m3), i);
        const float e5m2 = fv_f32_of_e5m2((uint8_t)i);
        if (isfinite(e5m2)) assert_int_equal(fv_e5m2_of_f32(e5m2), i);
    }
    for (uint32_t i = 0; i < 65536; i++) {
        const float half = fv_f32_of_f16((uint16_t)i);
        if (!isnan(half)) assert_int_equal(fv_f16_of_f32(half), i);
        const float brain = fv_f32_of_bf16((uint16_t)i);
        if (!isnan(brain)) assert_int_equal(fv_bf16_of_f32(brain), i);
    }
}

/* Between two neighbours the nearer one is chosen, in the middle the even one. */
static void test_rounds_to_nearest_even(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 0x7e; i++) {
        const float low = fv_f32_of_e4m3((uint8_t)i), high = fv_f32_of_e4m3((uint8_t)(i + 1));
        const float middle = (low + high) / 2;
        assert_int_equal(fv_e4m3_of_f32(middle), i + (i & 1u));
        assert_int_equal(fv_e4m3_of_f32(nextafterf(middle, 0)), i);
        assert_int_equal(fv_e4m3_of_f32(nextafterf(middle, 1e30f)), i + 1);
    }
    for (uint32_t i = 0; i < 0x7bff; i++) {
        const float low = fv_f32_of_f16((uint16_t)i), high = fv_f32_of_f16((uint16_t)(i + 1));
        const float middle = (low + high) / 2;
        assert_int_equal(fv_f16_of_f32(middle), i + (i & 1u));
        assert_int_equal(fv_f16_of_f32(nextafterf(middle, 0)), i);
        assert_int_equal(fv_f16_of_f32(nextafterf(middle, 1e30f)), i + 1);
    }
}

static void test_extremes(void **state)
{
    (void)state;
    assert_int_equal(fv_e4m3_of_f32(1e9f), 0x7e); /* fp8 saturates */
    assert_int_equal(fv_e4m3_of_f32(-INFINITY), 0xfe);
    assert_int_equal(fv_e5m2_of_f32(1e9f), 0x7b);
    assert_int_equal(fv_f16_of_f32(1e9f), 0x7c00); /* fp16 overflows to infinity */
    assert_int_equal(fv_f16_of_f32(65519.0f), 0x7bff);
    assert_int_equal(fv_f16_of_f32(65520.0f), 0x7c00);
    assert_int_equal(fv_bf16_of_f32(INFINITY), 0x7f80);
    assert_true(isnan(fv_f32_of_f16(fv_f16_of_f32(NAN))));
    assert_true(isnan(fv_f32_of_bf16(fv_bf16_of_f32(NAN))));
    assert_true(isnan(fv_f32_of_e4m3(fv_e4m3_of_f32(NAN))));
    assert_true(isnan(fv_f32_of_e5m2(fv_e5m2_of_f32(NAN))));
    assert_int_equal(fv_e4m3_of_f32(-0.0f), 0x80);
    assert_int_equal(fv_f16_of_f32(1e-10f), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_pattern_decodes),
        cmocka_unit_test(test_encode_inverts_decode),
        cmocka_unit_test(test_rounds_to_nearest_even),
        cmocka_unit_test(test_extremes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
