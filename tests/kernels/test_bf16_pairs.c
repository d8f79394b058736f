/* The products of pairs of bf16 in plain C, against the formula of the instruction, the order of the pairs, and numbers of one
 * byte as bf16. Their native form runs in `fovea check` on a CPU that has it. */
#define FV_PAIRS_EMULATED 1

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>

#include "kernels/bf16_words.h"
#include "kernels/cpu/bf16_pairs.h"
#include "kernels/cpu/byte_words.h"

static void dot_is_the_instruction(void **state)
{
    (void)state;
    uint32_t random = 11;
    for (int32_t round = 0; round < 50; round++) {
        uint16_t a[32], b[32];
        float sums[16], results[16];
        fill(a, 32, &random);
        fill(b, 32, &random);
        for (int32_t i = 0; i < 16; i++) sums[i] = (float)(int32_t)next_random(&random) * 0x1p-28f;
        sums[3] = 0x1p-130f;
        fv_lanes_store(results, fv_pairs_dot(fv_lanes_load(sums), fv_words_load(a), fv_words_load(b)));
        for (int32_t i = 0; i < 16; i++) {
            float sum = flushed(fmaf(value_of(a[2 * i + 1]), value_of(b[2 * i + 1]), flushed(sums[i])));
            sum = flushed(fmaf(value_of(a[2 * i]), value_of(b[2 * i]), sum));
            assert_true(results[i] == sum);
        }
    }
}

static void low_and_high_pair_all_columns(void **state)
{
    (void)state;
    uint16_t even[32], odd[32], pairs[2][32];
    for (int32_t i = 0; i < 32; i++) {
        even[i] = (uint16_t)i;
        odd[i] = (uint16_t)(100 + i);
    }
    fv_words_store(pairs[0], fv_pairs_low(fv_words_load(even), fv_words_load(odd)));
    fv_words_store(pairs[1], fv_pairs_high(fv_words_load(even), fv_words_load(odd)));
    float columns[2][16], natural[32];
    for (int32_t i = 0; i < 32; i++) {
        assert_int_equal(pairs[i / 16][i % 16 * 2] + 100, pairs[i / 16][i % 16 * 2 + 1]);
        columns[i / 16][i % 16] = pairs[i / 16][i % 16 * 2];
    }
    fv_lanes_store_natural(natural, columns[0], columns[1]);
    for (int32_t i = 0; i < 32; i++) assert_true(natural[i] == (float)i);
}

static void lanes_become_pairs(void **state)
{
    (void)state;
    float even[16], odd[16];
    uint32_t pairs[16], splat[16];
    for (int32_t i = 0; i < 16; i++) {
        even[i] = 1.0f + (float)i * 0x1p-10f; /* between two numbers of bf16 */
        odd[i] = -(float)i;
    }
    fv_words_store(pairs, fv_pairs_of(fv_lanes_load(even), fv_lanes_load(odd)));
    for (int32_t i = 0; i < 16; i++)
        assert_int_equal(pairs[i], fv_bf16_of_f32(even[i]) | (uint32_t)fv_bf16_of_f32(odd[i]) << 16);
    fv_words_store(splat, fv_pairs_splat(pairs[5]));
    for (int32_t i = 0; i < 16; i++) assert_int_equal(splat[i], pairs[5]);
}

/* All 256, in lines whose columns come back in order. */
static void bytes_become_words(void **state)
{
    (void)state;
    const fv_dtype dtypes[] = {FV_DTYPE_F8_E4M3, FV_DTYPE_F8_E5M2, FV_DTYPE_I8};
    for (int32_t i = 0; i < FV_ARRAY_LEN(dtypes); i++) {
        for (int32_t first = 0; first < 256; first += 64) {
            uint8_t bytes[64];
            uint16_t stored[64], line[64];
            fv_words words[2];
            for (int32_t d = 0; d < 64; d++) bytes[d] = (uint8_t)(first + d);
            fv_words_of_bytes(words, bytes, dtypes[i]);
            memcpy(stored, words, sizeof(stored));
            fv_words_of_line(words, bytes, dtypes[i]);
            memcpy(line, words, sizeof(line));
            for (int32_t d = 0; d < 64; d++) {
                const float value = fv_float_load(&bytes[d], dtypes[i]);
                const float word = fv_f32_of_bf16(stored[fv_byte_word_place(d)]);
                assert_true(isnan(value) ? isnan(word) : word == value && !signbit(word) == !signbit(value));
                assert_int_equal(line[d], stored[fv_byte_word_place(d)]);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dot_is_the_instruction),
        cmocka_unit_test(low_and_high_pair_all_columns),
        cmocka_unit_test(lanes_become_pairs),
        cmocka_unit_test(bytes_become_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
