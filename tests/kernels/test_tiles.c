/* The AMX kernels' tile operations in plain C, against the formula of the instruction, and what stands between two
 * products. Their native forms run in `fovea check` on a CPU that has them. */
#define FV_TILES_EMULATED 1

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <float.h>
#include <math.h>

#include "kernels/bf16_words.h"
#include "kernels/cpu/amx/stream_words.h"
#include "kernels/cpu/amx/tile.h"
#include "kernels/cpu/lanes.h"

static void dot_is_the_instruction(void **state)
{
    (void)state;
    static fv_tiles tiles;
    uint16_t a[16][32], b[16][32];
    float sums[16][16];
    uint32_t random = 7;
    for (int32_t round = 0; round < 20; round++) {
        fill(a[0], 512, &random);
        fill(b[0], 512, &random);
        for (int32_t i = 0; i < 256; i++) sums[i / 16][i % 16] = (float)(int32_t)next_random(&random) * 0x1p-28f;
        fv_tiles_configure(&tiles, FV_TILE_ROWS);
        fv_tile_load(&tiles, 1, a, 64);
        fv_tile_load(&tiles, 2, b, 64);
        fv_tile_load(&tiles, 0, sums, 64);
        fv_tile_dot(&tiles, 0, 1, 2);
        float results[16][16];
        fv_tile_store(&tiles, 0, results, 64);
        for (int32_t i = 0; i < 256; i++) {
            const int32_t row = i / 16, column = i % 16;
            float even = 0, odd = 0;
            for (int32_t k = 0; k < 16; k++) {
                even = flushed(fmaf(value_of(a[row][2 * k]), value_of(b[k][2 * column]), even));
                odd = flushed(fmaf(value_of(a[row][2 * k + 1]), value_of(b[k][2 * column + 1]), odd));
            }
            assert_true(results[row][column] == flushed(sums[row][column] + flushed(even + odd)));
        }
    }
}

static void tiles_are_loaded_with_strides(void **state)
{
    (void)state;
    static fv_tiles tiles;
    char from[16 * 100], to[16 * 80];
    for (int32_t i = 0; i < (int32_t)sizeof(from); i++) from[i] = (char)(i * 7);
    memset(to, 1, sizeof(to));
    fv_tiles_configure(&tiles, FV_TILE_ROWS);
    fv_tile_load(&tiles, 3, from, 100);
    fv_tile_store(&tiles, 3, to, 80);
    for (int32_t row = 0; row < 16; row++) {
        assert_memory_equal(to + row * 80, from + row * 100, 64);
        if (row < 15) assert_int_equal(to[row * 80 + 64], 1);
    }
    fv_tile_zero(&tiles, 3);
    fv_tile_store(&tiles, 3, to, 64);
    for (int32_t i = 0; i < 1024; i++) assert_int_equal(to[i], 0);
}

static void weights_are_transposed(void **state)
{
    (void)state;
    float weights[32][16];
    fv_words words[16];
    uint16_t tile[16][32];
    for (int32_t i = 0; i < 512; i++) weights[i / 16][i % 16] = (float)(i + 1) * 0.37f;
    for (int32_t p = 0; p < 16; p++) {
        words[p] = fv_words_of(fv_lanes_load(weights[fv_words_key(p, 0)]), fv_lanes_load(weights[fv_words_key(p, 1)]));
    }
    fv_words_store_transposed((char *)tile, words);
    for (int32_t i = 0; i < 512; i++) assert_int_equal(tile[i % 16][i / 16], fv_bf16_of_f32(weights[i / 16][i % 16]));
}

/* Weights of a row as they come, and those of the other order brought to theirs. */
static void weights_are_packed(void **state)
{
    (void)state;
    fv_lanes low, high;
    uint16_t words[32], ordered[32];
    for (int32_t i = 0; i < 16; i++) {
        low[i] = 1.0f + (float)i * 0x1.07p-6f;
        high[i] = 0x1.8p-9f * (float)(i * i);
        ordered[i] = (uint16_t)(fv_lanes_rounded(low)[i]);
        ordered[16 + i] = (uint16_t)(fv_lanes_rounded(high)[i]);
        assert_true(fv_lanes_as_bf16(low)[i] == fv_f32_of_bf16(ordered[i]));
    }
    assert_true(fv_lanes_as_bf16(fv_lanes_splat(INFINITY))[3] == INFINITY);
    const fv_words made = fv_words_packed(fv_lanes_rounded(low), fv_lanes_rounded(high));
    memcpy(words, &made, sizeof(words));
    const fv_lanes sums = fv_words_add_to(fv_lanes_splat(3.0f), made);
    for (int32_t pair = 0; pair < 16; pair++) {
        const int32_t key = fv_words_packed_key(pair);
        float sum = 0;
        for (int32_t i = 0; i < 2; i++) {
            const float weight = key + i < 16 ? low[key + i] : high[key + i - 16];
            const float rounded = fv_f32_of_bf16(words[2 * pair + i]);
            assert_true(fabsf(rounded - weight) <= 0x1p-8f * weight);
            sum += rounded;
        }
        assert_true(sums[pair] == 3.0f + sum);
    }
    fv_words_pack_order((char *)ordered);
    assert_memory_equal(ordered, words, sizeof(words));
    const fv_words bounded = fv_words_packed((fv_lane_bits){0x80000000u, 0x10000u, 0xffffu},
                                             (fv_lane_bits){0xffffffffu});
    assert_true(bounded[0] == 0 && bounded[1] == 0xffff && bounded[2] == 0xffff && bounded[4] == 0);
}

/* All finite fp16. */
static void halves_are_sums_of_pieces(void **state)
{
    (void)state;
    for (uint32_t first = 0; first < 0x10000; first += 32) {
        uint16_t high[32], low[32];
        fv_words halves;
        for (int32_t i = 0; i < 32; i++) halves[i] = (uint16_t)(first + (uint32_t)i);
        const fv_word_pieces pieces = fv_word_pieces_of_f16(halves);
        memcpy(high, &pieces.high, sizeof(high));
        memcpy(low, &pieces.low, sizeof(low));
        for (int32_t i = 0; i < 32 && (first & 0x7c00) < 0x7c00; i++)
            assert_true(fv_f32_of_bf16(high[i]) + fv_f32_of_bf16(low[i]) == fv_f32_of_f16(halves[i]));
    }
}

/* Of fp32 16 bits. */
static void pieces_are_near(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 1000; i++) {
        const float weights[2] = {expf(-0.0137f * (float)i), 1.0f - 0x1p-10f * (float)i};
        const fv_word_pieces pieces = fv_word_pieces_of(fv_lanes_splat(weights[0]), fv_lanes_splat(weights[1]));
        for (int32_t half = 0; half < 2; half++) {
            const int32_t at = 16 * half + i % 16;
            const float sum = fv_f32_of_bf16(pieces.high[at]) + fv_f32_of_bf16(pieces.low[at]);
            assert_true(fabsf(sum - weights[half]) <= 0x1p-17f * weights[half]);
        }
    }
    const fv_word_pieces exact = fv_word_pieces_of(fv_lanes_splat(1.0f), fv_lanes_splat(0.0f));
    for (int32_t i = 0; i < 32; i++) assert_true(exact.low[i] == 0 && exact.high[i] == (i < 16 ? 0x3f80 : 0));
}

static void pieces_take_turns(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 1000; i++) {
        fv_lanes weights[2];
        for (int32_t lane = 0; lane < 16; lane++) {
            weights[0][lane] = expf(-0.0137f * (float)(i + lane));
            weights[1][lane] = 1.0f + 0x1.01p-11f * (float)(i * 16 + lane);
        }
        fv_word_pieces pieces = fv_word_pieces_in_turn(weights[0], weights[1]);
        for (int32_t at = 0; at < 32; at++) {
            const float weight = weights[at % 2][at / 2], high = fv_f32_of_bf16(pieces.high[at]);
            assert_true(fabsf(high - weight) <= 0x1p-8f * weight);
            assert_true(fabsf(high + fv_f32_of_bf16(pieces.low[at]) - weight) <= 0x1p-17f * weight);
        }
        fv_words ordered;
        for (int32_t at = 0; at < 32; at++) ordered[at / 2 + at % 2 * 16] = pieces.high[at];
        fv_words_take_turns((char *)&ordered);
        assert_memory_equal(&ordered, &pieces.high, sizeof(ordered));
    }
}

/* Pairs of columns, a product's worth of sums, and back. */
static void pairs_come_back_in_order(void **state)
{
    (void)state;
    uint16_t rows[2][32], low[32], high[32];
    float of_low[16], of_high[16], natural[32];
    for (int32_t i = 0; i < 32; i++) {
        rows[0][i] = (uint16_t)i;
        rows[1][i] = (uint16_t)(100 + i);
    }
    fv_words_store_pairs((char *)low, (char *)high, (const char *)rows[0], (const char *)rows[1]);
    for (int32_t pair = 0; pair < 16; pair++) {
        assert_int_equal(low[2 * pair + 1], low[2 * pair] + 100);
        assert_int_equal(high[2 * pair + 1], high[2 * pair] + 100);
        of_low[pair] = low[2 * pair];
        of_high[pair] = high[2 * pair];
    }
    fv_lanes_store_natural(natural, of_low, of_high);
    for (int32_t i = 0; i < 32; i++) assert_true(natural[i] == (float)i);
    const fv_words words = fv_words_natural(of_low, of_high, fv_lanes_splat(3.0f));
    const fv_words halves = fv_halves_natural(of_low, of_high, fv_lanes_splat(3.0f));
    for (int32_t i = 0; i < 32; i++) {
        assert_int_equal(words[i], fv_bf16_of_f32(3.0f * (float)i));
        assert_int_equal(halves[i], fv_f16_of_f32(3.0f * (float)i));
    }
    _Alignas(FV_CACHE_LINE) uint16_t line[32];
    fv_words_stream((char *)line, words);
    fv_words_stream_end();
    assert_memory_equal(line, &words, sizeof(line));
}

static void queries_are_transposed(void **state)
{
    (void)state;
    uint32_t rows[16][16], tile[16][16];
    const char *at[16];
    for (int32_t i = 0; i < 256; i++) rows[i / 16][i % 16] = (uint32_t)i;
    for (int32_t i = 0; i < 16; i++) at[i] = (const char *)rows[i];
    fv_lanes_store_transposed((char *)tile, at);
    for (int32_t i = 0; i < 256; i++) assert_int_equal(tile[i % 16][i / 16], i);
}

static void powers_are_right(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 20000; i++) {
        const float x = 127.9f - (float)i * 0.0126f;
        const double exact = exp2(x), error = fabs(fv_lanes_exp2(fv_lanes_splat(x))[i % 16] / exact - 1);
        assert_true(error <= 3 * 0x1p-24);
    }
    const fv_lanes special = {0.0f, -INFINITY, NAN, -126.5f, -1e30f, -3.0f, 128.0f, 1e30f};
    const fv_lanes powers = fv_lanes_exp2(special);
    assert_true(powers[0] == 1.0f && powers[1] == 0.0f && powers[3] < 0x1p-125f && powers[4] == 0.0f);
    assert_true(powers[2] != powers[2] && powers[5] == 0.125f);
    assert_true(powers[6] == INFINITY && powers[7] == INFINITY);
}

static float fixed_power(float x)
{
    const fv_exp2_constants constants = fv_exp2_constants_make();
    const fv_words words = fv_words_exp2_of(fv_lanes_splat(x + FV_FIXED_ONE), fv_lanes_splat(0.0f), &constants);
    return fv_f32_of_bf16(words[8]);
}

static void powers_in_fixed_point_are_near(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 20000; i++) {
        const float x = 127.9f - (float)i * 0.0126f;
        if (x < -126) break;
        assert_true(fabs(fixed_power(x) / exp2(x) - 1) <= 5.3e-3);
    }
    static const float zeros[] = {-127, -128, -1000, -32000, -40000, -99000, -1e6f, -0x1p120f, -INFINITY};
    for (int32_t i = 0; i < FV_ARRAY_LEN(zeros); i++) assert_true(fixed_power(zeros[i]) == 0);
    assert_true(fixed_power(0) == 1 && fixed_power(-3) == 0.125f);
    static const float overflows[] = {128, 129, 1e6f, 1e30f, INFINITY, -49300, -60000, -98000};
    for (int32_t i = 0; i < FV_ARRAY_LEN(overflows); i++) assert_false(fixed_power(overflows[i]) < FLT_MAX);
}

static void words_are_compared(void **state)
{
    (void)state;
    uint16_t numbers[32] = {0};
    numbers[5] = 0xc000;
    numbers[6] = 0xffc0;
    const fv_words magnitudes = fv_words_magnitudes(numbers), top = fv_words_max(magnitudes, (fv_words){3});
    assert_true(magnitudes[5] == 0x4000 && magnitudes[6] == 0x7fc0 && top[0] == 3 && top[6] == 0x7fc0);
    assert_true(fv_words_all_below(top, 0x7fc1));
    assert_false(fv_words_all_below(top, 0x7fc0));
}

static void overflows_are_seen(void **state)
{
    (void)state;
    uint16_t words[32] = {0};
    words[31] = 0x7f7f;
    assert_false(fv_words_not_finite((const char *)words));
    words[31] = 0xff80;
    assert_true(fv_words_not_finite((const char *)words));
    fv_lanes lanes = fv_lanes_splat(1.0f);
    assert_true(fv_lanes_all_below(lanes, 2.0f));
    lanes[9] = NAN;
    assert_false(fv_lanes_all_below(lanes, 2.0f));
}

/* As fv_exponent_add, which test_amla.c holds to ldexp, whatever the bits and the addend are. */
static void additions_to_exponents_are_guarded(void **state)
{
    (void)state;
    static const int32_t addends[] = {INT32_MIN, -FV_EXPONENT_INFINITY, -FV_EXPONENT_ONE,     -1,       0,
                                      1,         FV_EXPONENT_ONE,       FV_EXPONENT_INFINITY, INT32_MAX};
    uint32_t random = 11;
    for (int32_t i = 0; i < 20000; i++) {
        uint32_t bits = next_random(&random);
        if (i % 4 == 0) bits &= 0x807fffffu;
        if (i % 4 == 1) bits |= 0x7f000000u;
        int32_t addend = (int32_t)next_random(&random) >> (i % 5 * 4);
        if (i % 3 == 0) addend = addends[i / 3 % FV_ARRAY_LEN(addends)];
        const float value = fv_f32_of_bits(bits);
        const float added = fv_lanes_exponent_add(fv_lanes_splat(value), addend)[i % 16];
        const float expected = fv_exponent_add(fv_splat(value), addend)[i % 8];
        assert_int_equal(fv_bits_of_f32(added), fv_bits_of_f32(expected));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dot_is_the_instruction), cmocka_unit_test(tiles_are_loaded_with_strides),
        cmocka_unit_test(weights_are_transposed), cmocka_unit_test(pairs_come_back_in_order),
        cmocka_unit_test(queries_are_transposed), cmocka_unit_test(powers_are_right),
        cmocka_unit_test(overflows_are_seen),     cmocka_unit_test(additions_to_exponents_are_guarded),
        cmocka_unit_test(weights_are_packed),     cmocka_unit_test(powers_in_fixed_point_are_near),
        cmocka_unit_test(words_are_compared),     cmocka_unit_test(halves_are_sums_of_pieces),
        cmocka_unit_test(pieces_are_near),        cmocka_unit_test(pieces_take_turns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
