/* Rows of every storage type against values worked out one at a time from the format's definition. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/float.h"
#include "engine/dequantize.h"

enum { NUM_BLOCKS = 21, NUM = 32 * NUM_BLOCKS, MAX_BLOCK_BYTES = 128 };

static const int32_t usable_types[] = {FV_GGUF_F32,  FV_GGUF_F16,  FV_GGUF_BF16,
                                       FV_GGUF_Q4_0, FV_GGUF_Q4_1, FV_GGUF_Q8_0};

/* Element `i` of a row, straight from the definition. */
static float expected_value(const uint8_t *row, int32_t type, int64_t i)
{
    const int64_t block = i / 32, within = i % 32;
    const uint8_t *q4_0 = row + block * 18, *q4_1 = row + block * 20, *q8_0 = row + block * 34;
    switch (type) {
    case FV_GGUF_F32: return fv_float_load(row + 4 * i, FV_DTYPE_F32);
    case FV_GGUF_F16: return fv_float_load(row + 2 * i, FV_DTYPE_F16);
    case FV_GGUF_BF16: return fv_float_load(row + 2 * i, FV_DTYPE_BF16);
    case FV_GGUF_Q4_0: {
        const uint8_t pair = q4_0[2 + within % 16];
        const int32_t q = within < 16 ? pair & 15 : pair >> 4;
        return (float)(q - 8) * fv_float_load(q4_0, FV_DTYPE_F16);
    }
    case FV_GGUF_Q4_1: {
        const uint8_t pair = q4_1[4 + within % 16];
        const int32_t q = within < 16 ? pair & 15 : pair >> 4;
        const float scaled = (float)q * fv_float_load(q4_1, FV_DTYPE_F16);
        return scaled + fv_float_load(q4_1 + 2, FV_DTYPE_F16);
    }
    case FV_GGUF_Q8_0: return (float)(int8_t)q8_0[2 + within] * fv_float_load(q8_0, FV_DTYPE_F16);
    default: fail_msg("type %d has no definition here", type); return 0;
    }
}

static void assert_same_float(float got, float expected)
{
    if (isnan(expected) ? !isnan(got) : fv_bits_of_f32(got) != fv_bits_of_f32(expected)) {
        fail_msg("got %a, expected %a", (double)got, (double)expected);
    }
}

static void test_rows_follow_the_definition(void **state)
{
    (void)state;
    static uint8_t memory[NUM_BLOCKS * MAX_BLOCK_BYTES + 1];
    uint32_t seed = 1;
    for (size_t i = 0; i < sizeof(memory); i++) memory[i] = (uint8_t)((seed = seed * 1664525u + 1013904223u) >> 24);
    const uint8_t *row = memory + 1; /* no alignment is asked for */
    static float out[NUM + 1];
    static uint16_t out_bf16[NUM + 1];
    for (int32_t t = 0; t < FV_ARRAY_LEN(usable_types); t++) {
        out[NUM] = 42.0f;
        out_bf16[NUM] = 42;
        assert_int_equal(fv_dequantize_row(out, row, usable_types[t], NUM), FV_OK);
        assert_int_equal(fv_dequantize_row_bf16(out_bf16, row, usable_types[t], NUM), FV_OK);
        for (int32_t i = 0; i < NUM; i++) {
            const float expected = expected_value(row, usable_types[t], i);
            assert_same_float(out[i], expected);
            assert_same_float(fv_f32_of_bf16(out_bf16[i]), fv_f32_of_bf16(fv_bf16_of_f32(expected)));
        }
        assert_true(out[NUM] == 42.0f);
        assert_int_equal(out_bf16[NUM], 42);
    }
}

static void test_every_f16(void **state)
{
    (void)state;
    uint16_t *row = malloc(65536 * sizeof(*row));
    float *out = malloc(65536 * sizeof(*out));
    assert_non_null(row);
    assert_non_null(out);
    for (uint32_t i = 0; i < 65536; i++) row[i] = (uint16_t)i;
    assert_int_equal(fv_dequantize_row(out, row, FV_GGUF_F16, 65536), FV_OK);
    for (uint32_t i = 0; i < 65536; i++) assert_same_float(out[i], fv_f32_of_f16((uint16_t)i));
    free(row);
    free(out);
}

static void test_refuses(void **state)
{
    (void)state;
    static const uint8_t row[64];
    float out[32];
    assert_int_equal(fv_dequantize_row(out, row, 14, 32), FV_ERR_UNSUPPORTED);
    assert_non_null(strstr(fv_last_error(), "Q6_K"));
    assert_int_equal(fv_dequantize_row(out, row, FV_GGUF_Q4_1, 31), FV_ERR_INVALID);
    assert_int_equal(fv_dequantize_row(out, row, FV_GGUF_F32, -1), FV_ERR_INVALID);
    assert_int_equal(fv_dequantize_row(out, row, FV_GGUF_Q8_0, 0), FV_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_follow_the_definition),
        cmocka_unit_test(test_every_f16),
        cmocka_unit_test(test_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
