/* rms_norm against its formula in every table: all dtypes of rows and weights, sizes with a rest, gaps between
 * rows that stay as they were; on a GPU where there is one. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "core/float.h"
#include "ops/ops_fixture.h"

enum { ROWS = 7, MAX_SIZE = 1000, GAP = 5, MAX_BYTES = ROWS * (MAX_SIZE + GAP) * 4 };

static const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_F16, FV_DTYPE_BF16};

/* Half a unit in the last place of `dtype`, and the fp32 arithmetic before it. */
static double tolerance(fv_dtype dtype, double value)
{
    const double unit = dtype == FV_DTYPE_BF16 ? 0x1p-8 : dtype == FV_DTYPE_F16 ? 0x1p-11 : 0x1p-24;
    return 1.01 * unit * fabs(value) + 0x1p-21 * fabs(value) + 1e-7;
}

static void assert_normed(const char *got, const char *given, const fv_rms_norm_params *params)
{
    const size_t bytes = fv_dtype_bytes(params->dtype), weight_bytes = fv_dtype_bytes(params->weight_dtype);
    double squares = 0;
    for (int32_t i = 0; i < params->size; i++) {
        const double x = fv_float_load(given + (size_t)i * bytes, params->dtype);
        squares += x * x;
    }
    for (int32_t i = 0; i < params->size; i++) {
        const double weight = fv_float_load((const char *)params->weight + (size_t)i * weight_bytes,
                                            params->weight_dtype);
        const double expected = fv_float_load(given + (size_t)i * bytes, params->dtype) /
                                sqrt(squares / params->size + params->epsilon) * weight;
        const double found = fv_float_load(got + (size_t)i * bytes, params->dtype);
        if (!(fabs(found - expected) <= tolerance(params->dtype, expected))) {
            fail_msg("element %d of %d: %g for %g", i, params->size, found, expected);
        }
    }
    assert_memory_equal(got + (size_t)params->size * bytes, given + (size_t)params->size * bytes, GAP * bytes);
}

/* Where the kernels of `table` run: page-locked memory, which host and device see at one address. */
typedef struct place {
    fv_launch launch;
    const fv_kernel_table *table;
    char *rows, *weight;
} place;

static void check(const place *at, fv_dtype dtype, fv_dtype weight_dtype, int32_t size, uint32_t *seed)
{
    static char given[MAX_BYTES];
    const int64_t row_stride = (size + GAP) * (int64_t)fv_dtype_bytes(dtype);
    fill_random(given, dtype, (int64_t)ROWS * (size + GAP), 3, seed);
    fill_random(at->weight, weight_dtype, size, 1, seed);
    memset(given, 0, (size_t)size * fv_dtype_bytes(dtype)); /* a row of zeros: epsilon keeps it 0 */
    memcpy(at->rows, given, MAX_BYTES);
    const fv_rms_norm_params params = {
        .rows = at->rows,
        .row_stride = row_stride,
        .dtype = dtype,
        .weight = at->weight,
        .weight_dtype = weight_dtype,
        .epsilon = 1e-6f,
        .num_rows = ROWS,
        .size = size,
    };
    must(at->table->rms_norm(&at->launch, &params));
    if (at->launch.device) must(fv_stream_synchronize(at->launch.device, NULL));
    for (int64_t row = 0; row < ROWS; row++) {
        assert_normed(at->rows + row * row_stride, given + row * row_stride, &params);
    }
}

static void check_all(const place *at)
{
    static const int32_t sizes[] = {1, 7, 8, 24, 64, 100, 1000};
    uint32_t seed = 11;
    for (int32_t i = 0; i < 9 * FV_ARRAY_LEN(sizes); i++) {
        check(at, dtypes[i % 3], dtypes[i / 3 % 3], sizes[i / 9], &seed);
    }
}

static void test_norms(void **state)
{
    (void)state;
    static char rows[MAX_BYTES], weight[MAX_SIZE * 4];
    const fv_kernel_table *const *tables;
    const int32_t num_tables = cpu_tables(&tables);
    for (int32_t i = 0; i < num_tables; i++) {
        const place at = {serial_launch(), tables[i], rows, weight};
        check_all(&at);
    }
}

static void test_norms_on_gpu(void **state)
{
    (void)state;
    fv_context *context = NULL;
    fv_device *device = NULL;
    must(fv_context_create(&context, NULL));
    if (fv_device_find(&device, context, "cuda") != FV_OK) {
        fv_context_destroy(context);
        skip();
    }
    place at = {.launch = {.device = device}, .table = device->tables[device->num_tables - 1]};
    must(fv_device_alloc_host((void **)&at.rows, device, MAX_BYTES));
    must(fv_device_alloc_host((void **)&at.weight, device, MAX_SIZE * 4));
    check_all(&at);
    fv_device_free_host(device, at.rows);
    fv_device_free_host(device, at.weight);
    fv_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_norms), cmocka_unit_test(test_norms_on_gpu)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
