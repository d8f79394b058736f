/* The vector operations of the CPU kernels, at each ISA level that this CPU has: every bit pattern of the
 * narrow formats against core/float.h, functions against libm, reductions against plain sums. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "core/float.h"
#include "kernels/simd_probe.h"

static const simd_probe *const all_probes[] = {
    &simd_probe_portable,
#if defined(__x86_64__)
    &simd_probe_avx2,
    &simd_probe_avx512,
#endif
};

static const fv_dtype dtypes[] = {FV_DTYPE_F32,     FV_DTYPE_F16,     FV_DTYPE_BF16,
                                  FV_DTYPE_F8_E4M3, FV_DTYPE_F8_E5M2, FV_DTYPE_I8};

/* Runs `body` with each `probe` of a level that this CPU runs. */
#define FOR_EACH_PROBE(probe)                                 \
    for (int32_t i_ = 0; i_ < FV_ARRAY_LEN(all_probes); i_++) \
        for (const simd_probe *probe = all_probes[i_]; probe && probe->isa <= fv_cpu_isa(); probe = NULL)

/* Equal bits, or both NaN. */
static int32_t same(float a, float b) { return (a != a && b != b) || fv_bits_of_f32(a) == fv_bits_of_f32(b); }

static uint32_t next_random(uint32_t *state) { return *state = *state * 1664525u + 1013904223u; }

static int32_t num_patterns(fv_dtype dtype) { return fv_dtype_bytes(dtype) == 1 ? 256 : 65536; }

static void test_decodes_every_pattern(void **state)
{
    (void)state;
    FOR_EACH_PROBE(probe)
    {
        for (int32_t t = 1; t < FV_ARRAY_LEN(dtypes); t++) {
            const size_t bytes = fv_dtype_bytes(dtypes[t]);
            for (int32_t first = 0; first < num_patterns(dtypes[t]); first += 16) {
                uint8_t stored[32 + 1];
                uint8_t *at = stored + 1; /* at an odd address */
                float decoded[16], halves[16];
                for (int32_t i = 0; i < 16; i++) {
                    const uint16_t pattern = (uint16_t)(first + i);
                    memcpy(at + (size_t)i * bytes, &pattern, bytes);
                }
                probe->load16(decoded, at, dtypes[t]);
                probe->load8(halves, at, dtypes[t]);
                probe->load8(halves + 8, at + 8 * bytes, dtypes[t]);
                for (int32_t i = 0; i < 16; i++) {
                    const float expected = fv_float_load(at + (size_t)i * bytes, dtypes[t]);
                    assert_true(same(decoded[i], expected));
                    assert_true(same(halves[i], expected));
                }
            }
        }
    }
}

static void test_lane_order_is_undone(void **state)
{
    (void)state;
    float natural[16], back[16];
    for (int32_t i = 0; i < 16; i++) natural[i] = (float)i;
    FOR_EACH_PROBE(probe)
    {
        for (int32_t t = 0; t < FV_ARRAY_LEN(dtypes); t++) {
            probe->reorder(back, natural, dtypes[t]);
            assert_memory_equal(back, natural, sizeof(natural));
        }
    }
}

static void check_encoding(const simd_probe *probe, const float values[8], fv_dtype dtype)
{
    const size_t bytes = fv_dtype_bytes(dtype);
    uint8_t stored[32], expected[4];
    probe->store8(stored, values, dtype);
    for (int32_t i = 0; i < 8; i++) {
        if (values[i] != values[i]) {
            if (dtype != FV_DTYPE_I8) assert_true(isnan(fv_float_load(stored + (size_t)i * bytes, dtype)));
            continue;
        }
        fv_float_store(expected, values[i], dtype);
        assert_memory_equal(stored + (size_t)i * bytes, expected, bytes);
    }
}

/* Each value of the format, the middle between it and the next, and their neighbours in fp32. */
static void test_encodes_to_nearest_even(void **state)
{
    (void)state;
    FOR_EACH_PROBE(probe)
    {
        for (int32_t t = 1; t < FV_ARRAY_LEN(dtypes); t++) {
            for (int32_t pattern = 0; pattern + 1 < num_patterns(dtypes[t]); pattern++) {
                const uint32_t a = (uint32_t)pattern, b = a + 1; /* little endian */
                const float value = fv_float_load(&a, dtypes[t]), next = fv_float_load(&b, dtypes[t]);
                const float middle = (float)(((double)value + next) / 2);
                const float values[8] = {
                    value,  nextafterf(value, INFINITY),  nextafterf(value, -INFINITY),  next,
                    middle, nextafterf(middle, INFINITY), nextafterf(middle, -INFINITY), -value,
                };
                check_encoding(probe, values, dtypes[t]);
            }
        }
    }
}

static void test_encodes_any_float(void **state)
{
    (void)state;
    uint32_t random = 1;
    const float special[8] = {INFINITY, -INFINITY, NAN, 0.0f, -0.0f, 3.4e38f, 1e-45f, -1e-40f};
    FOR_EACH_PROBE(probe)
    {
        for (int32_t t = 0; t < FV_ARRAY_LEN(dtypes); t++) {
            check_encoding(probe, special, dtypes[t]);
            for (int32_t round = 0; round < 20000; round++) {
                float values[8];
                for (int32_t i = 0; i < 8; i++) values[i] = fv_f32_of_bits(next_random(&random));
                if (dtypes[t] == FV_DTYPE_I8) {
                    for (int32_t i = 0; i < 8; i++) values[i] = (float)(int32_t)next_random(&random) / 0x1p23f;
                }
                check_encoding(probe, values, dtypes[t]);
            }
        }
    }
}

static void test_exp2(void **state)
{
    (void)state;
    FOR_EACH_PROBE(probe)
    {
        float x[8], y[8];
        for (double from = -126.0; from <= 0.0; from += 0.0137) {
            for (int32_t i = 0; i < 8; i++) x[i] = (float)fmin(0.0, from + i * 0.0017);
            probe->exp2(y, x);
            for (int32_t i = 0; i < 8; i++) {
                const double exact = exp2((double)x[i]);
                assert_true(fabs(y[i] - exact) <= 2.4e-7 * exact);
            }
        }
        const float special[8] = {-INFINITY, NAN, 0.0f, -126.5f, -3e38f, -1.0f, 10.0f, fv_f32_of_bits(0x7fc12345u)};
        probe->exp2(y, special);
        assert_true(y[0] == 0.0f && y[1] != y[1] && y[2] == 1.0f && y[3] == 0.0f);
        assert_true(y[4] == 0.0f && y[5] == 0.5f && y[6] == 1024.0f && y[7] != y[7]);
    }
}

/* Vectors of 16 have the bits of vectors of 8: finite numbers up to 127 of every size, and those at the ends. */
static void test_exp2_of_sixteen(void **state)
{
    (void)state;
    FOR_EACH_PROBE(probe)
    {
        static const float ends[32] = {-INFINITY, NAN,     0.0f,           -0.0f,   127.0f,  126.5f,  -0.5f,  -1.5f,
                                       -125.5f,   -126.0f, -0x1.f80002p6f, -126.5f, -127.0f, -150.0f, -3e38f, 0.5f};
        float x[32], y[32], eight[8];
        memcpy(x, ends, sizeof(x));
        for (uint32_t bits = 0; bits < 0xff800000u - 32 * 4099u; bits += 32 * 4099u) {
            probe->exp2_16(y, x);
            for (int32_t i = 0; i < 32; i += 8) {
                probe->exp2(eight, x + i);
                for (int32_t j = 0; j < 8; j++)
                    assert_true(memcmp(&y[i + j], &eight[j], sizeof(float)) == 0 ||
                                (x[i + j] != x[i + j] && y[i + j] != y[i + j]));
            }
            for (int32_t i = 0; i < 32; i++) x[i] = fminf(127.0f, fv_f32_of_bits(bits + (uint32_t)i * 4099u));
        }
    }
}

static void test_tanh(void **state)
{
    (void)state;
    FOR_EACH_PROBE(probe)
    {
        float x[16], y[16], z[16];
        for (double from = -12.0; from <= 12.0; from += 0.00071) {
            for (int32_t i = 0; i < 16; i++) x[i] = (float)(from + i * 0.00009);
            probe->tanh(y, x);
            probe->tanh16(z, x);
            for (int32_t i = 0; i < 16; i++) {
                const double exact = tanh((double)x[i]);
                if (i < 8) assert_true(fabs(y[i] - exact) <= 2.4e-7 * fabs(exact) && fabsf(y[i]) <= 1.0f);
                assert_true(fabs(z[i] - exact) <= 3e-7 && fabsf(z[i]) <= 1.0f);
            }
        }
        const float special[16] = {INFINITY, -INFINITY, NAN, 3e38f, -3e38f, 1e-30f, 0.0f, -1e-20f};
        probe->tanh(y, special);
        probe->tanh16(z, special);
        for (const float *at = y; at; at = at == y ? z : NULL)
            assert_true(at[0] == 1.0f && at[1] == -1.0f && at[2] != at[2] && at[3] == 1.0f && at[4] == -1.0f);
        assert_true(y[5] == 1e-30f && y[6] == 0.0f && y[7] == -1e-20f);
    }
}

static void test_max_keeps_nan_of_the_second(void **state)
{
    (void)state;
    const float a[8] = {1, 2, NAN, 4, -INFINITY, 0, 7, NAN};
    const float b[8] = {2, 1, 3, NAN, -1, -0.0f, INFINITY, NAN};
    FOR_EACH_PROBE(probe)
    {
        float max[8], min[8];
        probe->max(max, a, b);
        probe->min(min, a, b);
        assert_true(max[0] == 2 && max[1] == 2 && max[2] == 3 && max[3] != max[3] && max[4] == -1);
        assert_true(max[6] == INFINITY && max[7] != max[7]);
        assert_true(min[0] == 1 && min[1] == 1 && min[2] == 3 && min[3] != min[3] && min[4] == -INFINITY);
        assert_true(min[6] == 7 && min[7] != min[7]);
    }
}

static void test_reductions(void **state)
{
    (void)state;
    uint32_t random = 7;
    float values[64], sums[8];
    for (int32_t i = 0; i < 64; i++) values[i] = (float)(next_random(&random) >> 16); /* sums are exact */
    FOR_EACH_PROBE(probe)
    {
        probe->reduce8(sums, values);
        for (int32_t i = 0; i < 8; i++) {
            float sum = 0;
            for (int32_t j = 0; j < 8; j++) sum += values[8 * i + j];
            assert_true(sums[i] == sum);
        }
        for (int32_t period = 1; period <= 8; period *= 2) {
            float maxima[8];
            probe->max_by_period(maxima, values, period);
            probe->sum_by_period(sums, values, period);
            for (int32_t i = 0; i < 8; i++) {
                float max = -INFINITY, sum = 0;
                for (int32_t j = i % period; j < 8; j += period) {
                    max = values[j] > max ? values[j] : max;
                    sum += values[j];
                }
                assert_true(maxima[i] == max && sums[i] == sum);
            }
        }
        for (int32_t lane = 0; lane < 8; lane++) {
            int32_t mask[8] = {0};
            assert_false(probe->any(mask));
            mask[lane] = lane % 2 ? -1 : 0x400000; /* a NaN's mantissa bit alone is enough */
            assert_true(probe->any(mask));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decodes_every_pattern),
        cmocka_unit_test(test_lane_order_is_undone),
        cmocka_unit_test(test_encodes_to_nearest_even),
        cmocka_unit_test(test_encodes_any_float),
        cmocka_unit_test(test_exp2),
        cmocka_unit_test(test_exp2_of_sixteen),
        cmocka_unit_test(test_tanh),
        cmocka_unit_test(test_max_keeps_nan_of_the_second),
        cmocka_unit_test(test_reductions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
