/* merge_states and merge_ranks in every table: empty ranks, sinks once, other output types, only the LSE,
 * and the shares of the ranks; and what the public functions refuse. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "core/float.h"
#include "ops/ops_fixture.h"

enum { WORLD = 5, TOKENS = 7, HEADS = 3, D = 37, ROWS = TOKENS * HEADS, ROW_BYTES = ROWS * D * 4 };

static void must_be_near(double got, double expected, double tolerance)
{
    if (expected == -INFINITY ? got == -INFINITY : fabs(got - expected) <= tolerance * (1 + fabs(expected))) return;
    fail_msg("%.9g, expected %.9g", got, expected);
}

static const float empties[] = {-INFINITY, INFINITY, NAN};

/* Rank results with some ranks empty, and row 4 empty on all of them; garbage where there are no keys. */
static void make_ranks(char *out, float *lse, fv_dtype dtype, uint32_t seed)
{
    const size_t bytes = fv_dtype_bytes(dtype);
    fill_random(out, dtype, WORLD * ROWS * D, 1, &seed);
    for (int32_t i = 0; i < WORLD * ROWS; i++) {
        lse[i] = 8 * next_normal(&seed);
        if (next_random(&seed) % 4 != 0 && i % ROWS != 4) continue;
        lse[i] = empties[i % 3];
        memset(out + (size_t)(i * D) * bytes, 0xff, D * bytes);
    }
}

/* LSE of row `row` over all ranks, in double. */
static double exact_lse(const float *lse, int32_t row, const float *sinks)
{
    double sum = 0;
    for (int32_t rank = 0; rank < WORLD; rank++)
        if (isfinite(lse[rank * ROWS + row])) sum += exp(lse[rank * ROWS + row]);
    if (sum == 0) return -INFINITY;
    return log(sum + (sinks ? exp(sinks[row % HEADS]) : 0));
}

static double exact_element(const char *out, const float *lse, int32_t row, int32_t d, double total, fv_dtype dtype)
{
    double value = 0;
    for (int32_t rank = 0; rank < WORLD; rank++) {
        const float part = lse[rank * ROWS + row];
        if (!isfinite(part)) continue;
        const size_t at = (size_t)((rank * ROWS + row) * D + d) * fv_dtype_bytes(dtype);
        value += exp(part - total) * fv_float_load(out + at, dtype);
    }
    return value;
}

static void test_merge_ranks(void **state)
{
    (void)state;
    static char ranks[WORLD * ROW_BYTES], out[ROW_BYTES];
    static float lse[WORLD * ROWS], merged_lse[ROWS];
    const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_F16, FV_DTYPE_BF16};
    const float sinks[HEADS] = {3, -40, 20};
    const fv_kernel_table *const *tables;
    const int32_t num_tables = cpu_tables(&tables);
    const fv_launch launch = serial_launch();
    for (int32_t round = 0; round < 18 * num_tables; round++) {
        const fv_dtype dtype = dtypes[round % 3], out_dtype = dtypes[round / 3 % 3];
        const int64_t element = (int64_t)fv_dtype_bytes(dtype), out_element = (int64_t)fv_dtype_bytes(out_dtype);
        make_ranks(ranks, lse, dtype, (uint32_t)round);
        fv_merge_ranks_params params = {
            .out = out,
            .token_stride = HEADS * D * out_element,
            .head_stride = D * out_element,
            .lse = merged_lse,
            .lse_token_stride = HEADS * 4,
            .lse_head_stride = 4,
            .ranks = {ranks, HEADS * D * element, D * element, lse, HEADS * 4, 4},
            .rank_stride = ROWS * D * element,
            .lse_rank_stride = ROWS * 4,
            .dtype = dtype,
            .out_dtype = out_dtype,
            .sinks = round / 9 % 2 ? sinks : NULL,
            .num_ranks = WORLD,
            .num_tokens = TOKENS,
            .num_heads = HEADS,
            .head_size = D,
        };
        if (dtype == out_dtype) params.out = ranks + 2 * ROWS * D * element; /* in the place of rank 2 */
        static char given[WORLD * ROW_BYTES];
        memcpy(given, ranks, sizeof(given));
        must(tables[round / 18]->merge_ranks(&launch, &params));
        const double unit = out_dtype == FV_DTYPE_F32 ? 1e-6 : out_dtype == FV_DTYPE_F16 ? 0x1p-11 : 0x1p-8;
        for (int32_t row = 0; row < ROWS; row++) {
            const double total = exact_lse(lse, row, params.sinks);
            must_be_near(merged_lse[row], total, 1e-6);
            for (int32_t d = 0; d < D; d++) {
                const char *at = (const char *)params.out + (row * D + d) * out_element;
                must_be_near(fv_float_load(at, out_dtype),
                             total == -INFINITY ? 0 : exact_element(given, lse, row, d, total, dtype), unit);
            }
        }
    }
}

/* One rank: a merge that only counts the sink, and a share of a given total. */
static void test_scale_by_lse(void **state)
{
    (void)state;
    fv_context *context;
    fv_device *device;
    must(fv_context_create(&context, NULL));
    must(fv_device_find(&device, context, "cpu"));
    float in[4] = {1, 2, NAN, 4}, out[4] = {9, 9, 9, 9}, lse[4] = {0, 1, NAN, 2}, total[4] = {1, INFINITY, 3, 2};
    const fv_tensor in_at = fv_tensor_3d(in, FV_DTYPE_F32, 4, 1, 1), out_at = fv_tensor_3d(out, FV_DTYPE_F32, 4, 1, 1);
    const fv_tensor lse_at = fv_tensor_2d(lse, FV_DTYPE_F32, 4, 1), total_at = fv_tensor_2d(total, FV_DTYPE_F32, 4, 1);
    must(fv_scale_by_lse(device, &out_at, &in_at, &lse_at, &total_at, NULL));
    must_be_near(out[0], exp(-1), 1e-6);
    assert_true(out[1] == 0 && out[2] == 0 && out[3] == 4);
    must(fv_scale_by_lse(device, &in_at, &in_at, &lse_at, &total_at, NULL)); /* in place */
    assert_memory_equal(in, out, sizeof(in));
    refused(fv_scale_by_lse(device, &out_at, &in_at, &lse_at, NULL, NULL), FV_ERR_INVALID, "lse_total has no data");
    refused(fv_scale_by_lse(device, NULL, &in_at, &lse_at, &total_at, NULL), FV_ERR_INVALID, "out has no data");
    refused(fv_scale_by_lse(NULL, &out_at, &in_at, &lse_at, &total_at, NULL), FV_ERR_INVALID, "device is NULL");
    fv_context_destroy(context);
}

static void test_public_merges(void **state)
{
    (void)state;
    fv_context *context;
    fv_device *device;
    must(fv_context_create(&context, NULL));
    must(fv_device_find(&device, context, "cpu"));
    float a[2] = {1, 5}, b[2] = {4, 5}, lse_a[2] = {0, INFINITY}, lse_b[2] = {logf(2), NAN}, lse[2];
    uint16_t half[2];
    const float sink[1] = {0};
    const fv_tensor a_at = fv_tensor_3d(a, FV_DTYPE_F32, 2, 1, 1), b_at = fv_tensor_3d(b, FV_DTYPE_F32, 2, 1, 1);
    const fv_tensor lse_a_at = fv_tensor_2d(lse_a, FV_DTYPE_F32, 2, 1),
                    lse_b_at = fv_tensor_2d(lse_b, FV_DTYPE_F32, 2, 1);
    const fv_tensor lse_at = fv_tensor_2d(lse, FV_DTYPE_F32, 2, 1);
    const fv_tensor half_at = fv_tensor_3d(half, FV_DTYPE_BF16, 2, 1, 1);
    must(fv_merge_states(device, &half_at, &lse_at, &a_at, &lse_a_at, &b_at, &lse_b_at, sink, NULL));
    assert_true(fv_f32_of_bf16(half[0]) == 2.25f && half[1] == 0 && lse[1] == -INFINITY);
    must_be_near(lse[0], log(4), 1e-6);

    fv_tensor over = half_at;
    over.data = a;
    refused(fv_merge_states(device, &over, NULL, &a_at, &lse_a_at, &b_at, &lse_b_at, NULL, NULL), FV_ERR_INVALID,
            "out is bfloat16 in the memory of a side of float32");
    over.dtype = FV_DTYPE_I8;
    refused(fv_merge_states(device, &over, NULL, &a_at, &lse_a_at, &b_at, &lse_b_at, NULL, NULL), FV_ERR_INVALID,
            "out is int8; accepted: float32, float16, bfloat16");
    refused(fv_merge_states(device, &half_at, NULL, &a_at, &lse_a_at, &half_at, &lse_b_at, NULL, NULL), FV_ERR_INVALID,
            "b is bfloat16 [2, 1, 1]; accepted: float32");
    fv_tensor many = half_at, many_a = a_at; /* all rows one: there are not so many in memory */
    many.shape[0] = many_a.shape[0] = (int64_t)1 << 32;
    many.stride_bytes[0] = many_a.stride_bytes[0] = 0;
    refused(fv_merge_states(device, &many, NULL, &many_a, &lse_a_at, &many_a, &lse_b_at, NULL, NULL), FV_ERR_INVALID,
            "dimension 0 of out is 4294967296; accepted: 0 to 2147483647");

    const fv_tensor ranks = {a, FV_DTYPE_F32, 4, {2, 1, 1, 1}, {4, 4, 4, 4}};
    const fv_tensor rank_lse = {lse_b, FV_DTYPE_F32, 3, {2, 1, 1}, {4, 4, 4}};
    const fv_tensor out = fv_tensor_3d(b, FV_DTYPE_F32, 1, 1, 1);
    must(fv_merge_ranks(device, &out, NULL, &ranks, &rank_lse, NULL, NULL));
    assert_true(b[0] == 1.0f);
    over = half_at;
    over.shape[0] = 1;
    for (int32_t rank = 0; rank < 2; rank++) {
        over.data = &a[rank];
        refused(fv_merge_ranks(device, &over, NULL, &ranks, &rank_lse, NULL, NULL), FV_ERR_INVALID,
                rank ? "out is bfloat16 in the memory of rank_out of float32, rank 1" : "of float32, rank 0");
    }
    refused(fv_merge_ranks(device, &out, NULL, &ranks, NULL, NULL, NULL), FV_ERR_INVALID, "rank_lse has no data");
    refused(fv_merge_ranks(device, &out, NULL, NULL, &rank_lse, NULL, NULL), FV_ERR_INVALID, "only out is given");
    refused(fv_merge_ranks(device, NULL, NULL, NULL, &rank_lse, NULL, NULL), FV_ERR_INVALID, "neither out nor lse");
    fv_tensor wrong = ranks;
    wrong.shape[0] = 3;
    refused(fv_merge_ranks(device, &out, NULL, &wrong, &rank_lse, NULL, NULL), FV_ERR_INVALID, "3 ranks; accepted: 4");
    wrong = rank_lse;
    wrong.shape[0] = 257;
    refused(fv_merge_ranks(device, &out, NULL, &ranks, &wrong, NULL, NULL), FV_ERR_INVALID,
            "257 ranks; accepted: 1 to");
    fv_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_merge_ranks),
        cmocka_unit_test(test_scale_by_lse),
        cmocka_unit_test(test_public_merges),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
