/* What prefill by pairs of bf16 makes of rows: numbers as they are, keys 2i and 2i + 1 side by side, also where a tile or a source
 * has one of them. In plain C. */
#define FV_HAS_PAIRS 1
#define FV_PAIRS_EMULATED 1
#define FV_ISA test

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels/cpu/many_pairs.h"

enum { KEYS = 16, COLUMNS = 80, PANELS = COLUMNS / FV_STRIP_PANEL };

static float float_of(uint16_t word)
{
    const uint32_t bits = (uint32_t)word << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static uint16_t word_of(int32_t key, int32_t column) { return (uint16_t)(0x3f80 + key * COLUMNS + column); }

static const char **rows_of(uint16_t words[KEYS][COLUMNS])
{
    static const char *rows[KEYS];
    for (int32_t key = 0; key < KEYS; key++) {
        rows[key] = (const char *)words[key];
        for (int32_t d = 0; d < COLUMNS; d++) words[key][d] = word_of(key, d);
    }
    return rows;
}

static uint16_t value_at(const float *values, int32_t key, int32_t d)
{
    const uint16_t *words = (const uint16_t *)values;
    return words[((d / FV_STRIP_PANEL * (KEYS / 2) + key / 2) * FV_STRIP_PANEL + d % FV_STRIP_PANEL) * 2 + key % 2];
}

/* All bytes, lines of 64 and a rest of 16. */
static void bytes_are_exact(void **state)
{
    (void)state;
    static const fv_dtype dtypes[] = {FV_DTYPE_F8_E4M3, FV_DTYPE_F8_E5M2, FV_DTYPE_I8};
    for (int32_t i = 0; i < FV_ARRAY_LEN(dtypes); i++) {
        for (int32_t first = 0; first < 256; first += COLUMNS) {
            uint8_t bytes[COLUMNS];
            uint16_t words[COLUMNS];
            for (int32_t d = 0; d < COLUMNS; d++) bytes[d] = (uint8_t)(first + d);
            fv_many_convert_row(words, (const char *)bytes, COLUMNS, dtypes[i]);
            for (int32_t d = 0; d < COLUMNS; d++) {
                const float expected = fv_load8(bytes + d / 8 * 8, dtypes[i])[d % 8], found = float_of(words[d]);
                assert_true(found == expected || (isnan(found) && isnan(expected)));
            }
        }
    }
}

static void values_lie_side_by_side(void **state)
{
    (void)state;
    static const int32_t spans[][2] = {{0, KEYS}, {2, 7}, {5, 6}, {3, 4}, {1, KEYS - 1}};
    static uint16_t words[KEYS][COLUMNS];
    const char **rows = rows_of(words);
    for (int32_t i = 0; i < FV_ARRAY_LEN(spans); i++) {
        const int32_t first = spans[i][0], end = spans[i][1];
        _Alignas(64) float values[KEYS / 2 * COLUMNS];
        memset(values, 0xff, sizeof(values));
        fv_many_begin_values(values, first, end, KEYS, COLUMNS);
        const int32_t middle = (first + end) / 2; /* of two sources */
        fv_many_convert_values(values, rows, first, middle, KEYS, COLUMNS, FV_DTYPE_BF16);
        fv_many_convert_values(values, rows, middle, end, KEYS, COLUMNS, FV_DTYPE_BF16);
        for (int32_t key = 0; key < KEYS; key++) {
            for (int32_t d = 0; d < COLUMNS; d++) {
                const int32_t is_there = key >= first && key < end,
                              has_pair = key / 2 >= first / 2 && key / 2 <= (end - 1) / 2;
                const uint16_t expected = is_there ? word_of(key, d) : has_pair ? 0 : 0xffff;
                assert_int_equal(value_at(values, key, d), expected);
            }
        }
    }
}

/* Infinity and NaN are told, the largest number is not. */
static void not_finite_values_are_found(void **state)
{
    (void)state;
    static const uint16_t odd[] = {0x7f80, 0xff80, 0x7fc0, 0x7f81};
    static uint16_t words[KEYS][COLUMNS];
    const char **rows = rows_of(words);
    static _Alignas(64) float values[KEYS / 2 * COLUMNS];
    words[3][17] = 0x7f7f;
    assert_int_equal(fv_many_convert_values(values, rows, 0, KEYS, KEYS, COLUMNS, FV_DTYPE_BF16), 0);
    for (int32_t i = 0; i < FV_ARRAY_LEN(odd); i++) {
        for (int32_t key = 0; key < KEYS; key += 5) {
            rows_of(words);
            words[key][COLUMNS - 1 - key] = odd[i];
            assert_int_equal(fv_many_convert_values(values, rows, 0, KEYS, KEYS, COLUMNS, FV_DTYPE_BF16), 1);
        }
    }
}

/* A key of a pair that the span does not have weighs nothing, whatever its place holds. */
static void weights_become_pairs(void **state)
{
    (void)state;
    static const int32_t spans[][2] = {{0, KEYS}, {3, 10}, {3, 9}, {4, 5}, {5, 6}};
    enum { WIDTH = 3 * FV_STRIP_LANES };
    for (int32_t i = 0; i < FV_ARRAY_LEN(spans); i++) {
        const int32_t first = spans[i][0], end = spans[i][1];
        static _Alignas(64) float weights[KEYS * WIDTH];
        for (int32_t at = 0; at < KEYS * WIDTH; at++) weights[at] = NAN;
        for (int32_t key = first; key < end; key++)
            for (int32_t row = 0; row < WIDTH; row++) weights[key * WIDTH + row] = float_of(word_of(key, row));
        fv_many_pack_weights(weights, first, end, WIDTH);
        const uint16_t *words = (const uint16_t *)weights;
        for (int32_t key = first / 2 * 2; key < (end + 1) / 2 * 2; key++) {
            for (int32_t row = 0; row < WIDTH; row++) {
                const uint16_t expected = key >= first && key < end ? word_of(key, row) : 0;
                assert_int_equal(words[(key / 2 * WIDTH + row) * 2 + key % 2], expected);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_exact),
        cmocka_unit_test(values_lie_side_by_side),
        cmocka_unit_test(not_finite_values_are_found),
        cmocka_unit_test(weights_become_pairs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
