/* Rows of every storage type against values worked out one at a time from the format's definition, and
 * against a recording made with another reader of the format (tests/recordings/README.md). */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/float.h"
#include "engine/dequantize.h"
#include "engine/recordings.h"

#ifndef FV_TEST_DATA_DIR
#define FV_TEST_DATA_DIR "tests"
#endif

enum { NUM_BLOCKS = 24, NUM = 32 * NUM_BLOCKS, MAX_BLOCK_BYTES = 128 };

static const int32_t usable_types[] = {FV_GGUF_F32,  FV_GGUF_F16,  FV_GGUF_BF16, FV_GGUF_Q4_0,
                                       FV_GGUF_Q4_1, FV_GGUF_Q5_0, FV_GGUF_Q5_1, FV_GGUF_Q8_0,
                                       FV_GGUF_Q4_K, FV_GGUF_Q5_K, FV_GGUF_Q6_K};

/* `count` bits from bit `first` of memory on, lowest first. */
static int32_t bits_at(const uint8_t *memory, int32_t first, int32_t count)
{
    int32_t value = 0;
    for (int32_t i = 0; i < count; i++) value |= (memory[(first + i) / 8] >> (first + i) % 8 & 1) << i;
    return value;
}

/* Scale (which 0) or minimum (which 1) of part `part` of a block of Q4_K or Q5_K: 6 bits. The first four
 * of each are whole; of the others the low 4 bits are in bytes 8 to 11 and the high 2 on top of the
 * first ones. */
static int32_t six_bits(const uint8_t *packed, int32_t which, int32_t part)
{
    if (part < 4) return bits_at(packed, 8 * (4 * which + part), 6);
    return bits_at(packed, 8 * (part + 4) + 4 * which, 4) | bits_at(packed, 8 * (4 * which + part - 4) + 6, 2) << 4;
}

/* Element `i` of a block of 256 of Q4_K (without `fifth`) or Q5_K. */
static float value_of_parts(const uint8_t *block, const uint8_t *nibbles, const uint8_t *fifth, int32_t i)
{
    const int32_t part = i / 32;
    int32_t q = bits_at(nibbles + part / 2 * 32 + i % 32, part % 2 * 4, 4);
    if (fifth) q |= bits_at(fifth + i % 32, part, 1) << 4;
    const float scale = fv_float_load(block, FV_DTYPE_F16) * (float)six_bits(block + 4, 0, part);
    const float minimum = fv_float_load(block + 2, FV_DTYPE_F16) * (float)six_bits(block + 4, 1, part);
    const float scaled = scale * (float)q;
    return scaled - minimum;
}

/* Element `i` of a block of Q6_K. */
static float value_of_q6_k(const uint8_t *block, int32_t i)
{
    const int32_t half = i / 128, within = i % 128;
    const uint8_t *low = block + 64 * half + within % 64, *high = block + 128 + 32 * half + within % 32;
    const int32_t q = bits_at(low, within / 64 * 4, 4) | bits_at(high, within / 32 * 2, 2) << 4;
    const float scale = fv_float_load(block + 208, FV_DTYPE_F16) * (float)(int8_t)block[192 + i / 16];
    return scale * (float)(q - 32);
}

/* Element `i` of a row, straight from the definition. */
static float expected_value(const uint8_t *row, int32_t type, int64_t i)
{
    const int64_t block = i / 32, within = i % 32;
    const uint8_t *q4_0 = row + block * 18, *q4_1 = row + block * 20, *q8_0 = row + block * 34;
    const uint8_t *q5_0 = row + block * 22, *q5_1 = row + block * 24;
    const uint8_t *q4_k = row + i / 256 * 144, *q5_k = row + i / 256 * 176, *q6_k = row + i / 256 * 210;
    const int32_t nibble = (int32_t)within % 16, shift = (int32_t)within / 16 * 4, fifth = (int32_t)within;
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
    case FV_GGUF_Q5_0: {
        const int32_t q = bits_at(q5_0 + 6 + nibble, shift, 4) | bits_at(q5_0 + 2, fifth, 1) << 4;
        return (float)(q - 16) * fv_float_load(q5_0, FV_DTYPE_F16);
    }
    case FV_GGUF_Q5_1: {
        const int32_t q = bits_at(q5_1 + 8 + nibble, shift, 4) | bits_at(q5_1 + 4, fifth, 1) << 4;
        const float scaled = (float)q * fv_float_load(q5_1, FV_DTYPE_F16);
        return scaled + fv_float_load(q5_1 + 2, FV_DTYPE_F16);
    }
    case FV_GGUF_Q4_K: return value_of_parts(q4_k, q4_k + 16, NULL, (int32_t)(i % 256));
    case FV_GGUF_Q5_K: return value_of_parts(q5_k, q5_k + 48, q5_k + 16, (int32_t)(i % 256));
    case FV_GGUF_Q6_K: return value_of_q6_k(q6_k, (int32_t)(i % 256));
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

/* See tests/recordings/README.md for the format of the file. */
static void test_like_the_recording(void **state)
{
    (void)state;
    size_t bytes;
    uint8_t *file = read_whole_file(&bytes, FV_TEST_DATA_DIR "/recordings/quants.bin");
    assert_non_null(file);
    const int32_t *at = (const int32_t *)(const void *)file, *end = at + bytes / 4;
    assert_memory_equal(at, "FVQT", 4);
    assert_int_equal(at[1], 1);
    int32_t num_types = at[2];
    assert_true(num_types >= 8);
    for (at += 3; num_types > 0; num_types--) {
        const int32_t type = at[0], num = at[1], row_bytes = at[2];
        assert_true(num <= NUM && at + 3 + row_bytes / 4 + num <= end);
        assert_int_equal(fv_gguf_type_bytes(type, num), row_bytes);
        const float *expected = (const float *)(const void *)(at + 3 + row_bytes / 4);
        static float out[NUM];
        assert_int_equal(fv_dequantize_row(out, at + 3, type, num), FV_OK);
        for (int32_t i = 0; i < num; i++) assert_same_float(out[i], expected[i]);
        at += 3 + row_bytes / 4 + num;
    }
    assert_ptr_equal(at, end);
    free(file);
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
    assert_int_equal(fv_dequantize_row(out, row, 10, 256), FV_ERR_UNSUPPORTED);
    assert_non_null(strstr(fv_last_error(), "type Q2_K (10); accepted: F32"));
    assert_int_equal(fv_dequantize_row(out, row, FV_GGUF_Q6_K, 32), FV_ERR_INVALID);
    assert_int_equal(fv_dequantize_row(out, row, FV_GGUF_Q4_1, 31), FV_ERR_INVALID);
    assert_int_equal(fv_dequantize_row(out, row, FV_GGUF_F32, -1), FV_ERR_INVALID);
    assert_int_equal(fv_dequantize_row(out, row, FV_GGUF_Q8_0, 0), FV_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_follow_the_definition),
        cmocka_unit_test(test_like_the_recording),
        cmocka_unit_test(test_every_f16),
        cmocka_unit_test(test_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
