/* Scales of each token and head: kv_write computes and stores them, in every layout and table the same
 * bits, and what is read back is near what was written. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "core/float.h"
#include "kvcache/kv_address.h"
#include "ops/ops_fixture.h"

enum { TOKENS = 7, HEADS = 2, D = 32, ROW = HEADS * D, NUM_BLOCKS = 4 };

static const fv_dtype dtypes[] = {FV_DTYPE_I8, FV_DTYPE_F8_E4M3, FV_DTYPE_F8_E5M2};
static const float limits[] = {127.0f, 448.0f, 57344.0f};

static fv_kv_write_params write_of(const fv_kv_view *cache, const void *k, const void *v, fv_dtype dtype,
                                   const int64_t *slots)
{
    const int64_t element = (int64_t)fv_dtype_bytes(dtype);
    return (fv_kv_write_params){
        .k = k,
        .k_token_stride = ROW * element,
        .k_head_stride = D * element,
        .v = v,
        .v_token_stride = ROW * element,
        .v_head_stride = D * element,
        .src_dtype = dtype,
        .cache = *cache,
        .slot_mapping = slots,
        .num_tokens = TOKENS,
    };
}

/* Rows of very different sizes, one of zeros. */
static void make_rows(float *rows, uint32_t seed)
{
    for (int32_t row = 0; row < TOKENS * HEADS; row++) {
        fill_random(rows + row * D, FV_DTYPE_F32, D, row == 5 ? 0.0f : exp2f((float)(row % 9) - 4.0f), &seed);
    }
}

static double stored_value(const fv_kv_view *view, const fv_kv_plane *plane, const fv_scale_plane *scales, int64_t slot,
                           int32_t head, int32_t d)
{
    const int64_t block = slot / view->block_size, at = slot % view->block_size;
    const char *element = (const char *)plane->data + fv_kv_offset(plane, block, head, at, d);
    return (double)fv_scale_at(scales, block, at, head) * fv_float_load(element, view->dtype);
}

static void test_tables_agree_and_read_back(void **state)
{
    (void)state;
    static char cache[CACHE_BYTES], expected[CACHE_BYTES];
    static float k[TOKENS * ROW], v[TOKENS * ROW];
    const int64_t slots[TOKENS] = {9, 8, -1, 31, 12, 17, 1 << 20};
    const fv_kernel_table *const *tables;
    const int32_t num_tables = cpu_tables(&tables);
    const fv_launch launch = serial_launch();
    make_rows(k, 1);
    make_rows(v, 2);
    for (int32_t kind = 9; kind < NUM_CACHE_KINDS; kind++) {
        for (int32_t t = 0; t < 3; t++) {
            fv_kv_view view;
            make_cache(&view, cache, kind, dtypes[t], NUM_BLOCKS);
            const fv_kv_write_params params = write_of(&view, k, v, FV_DTYPE_F32, slots);
            for (int32_t table = 0; table < num_tables; table++) {
                memset(cache, 0x5a, sizeof(cache));
                must(tables[table]->kv_write(&launch, &params));
                if (table == 0) memcpy(expected, cache, sizeof(cache));
                assert_memory_equal(cache, expected, sizeof(cache));
            }
            for (int32_t token = 0; token < TOKENS; token++) {
                if (slots[token] < 0 || slots[token] >= NUM_BLOCKS * view.block_size) continue;
                for (int32_t head = 0; head < HEADS; head++) {
                    const float *row = k + token * ROW + head * D, *v_row = v + token * ROW + head * D;
                    float largest = 0;
                    for (int32_t d = 0; d < D; d++) largest = fmaxf(largest, fabsf(row[d]));
                    const float scale = fv_scale_at(&view.k_scales, slots[token] / view.block_size,
                                                    slots[token] % view.block_size, head);
                    assert_true(scale == fmaxf(largest / limits[t], 1e-6f));
                    const double step = t == 0 ? 0.5 * scale : largest / (t == 1 ? 16 : 8);
                    for (int32_t d = 0; d < D; d++) {
                        const double got = stored_value(&view, &view.k, &view.k_scales, slots[token], head, d);
                        assert_true(fabs(got - row[d]) <= 1.001 * step);
                        const double got_v = stored_value(&view, &view.v, &view.v_scales, slots[token], head, d);
                        assert_true(t == 0 || fabs(got_v - v_row[d]) <= fabs(v_row[d]) / (t == 1 ? 15 : 7) + 1e-6);
                    }
                }
            }
        }
    }
}

/* Half away from zero: with a largest of 127 the scale is 1. */
static void test_int8_rounding(void **state)
{
    (void)state;
    static char cache[CACHE_BYTES];
    static float k[TOKENS * ROW];
    const float given[] = {127, 0.5f, -0.5f, 1.5f, -1.5f, 2.4f, -126.5f, 0.49f};
    const int8_t stored[] = {127, 1, -1, 2, -2, 2, -127, 0};
    const int64_t slots[TOKENS] = {3, -1, -1, -1, -1, -1, -1};
    const fv_kernel_table *const *tables;
    const int32_t num_tables = cpu_tables(&tables);
    const fv_launch launch = serial_launch();
    memcpy(k, given, sizeof(given));
    for (int32_t table = 0; table < num_tables; table++) {
        fv_kv_view view;
        make_cache(&view, cache, 10, FV_DTYPE_I8, NUM_BLOCKS);
        const fv_kv_write_params params = write_of(&view, k, k, FV_DTYPE_F32, slots);
        must(tables[table]->kv_write(&launch, &params));
        const char *row = (const char *)view.k.data + fv_kv_row_offset(&view.k, 0, 0, 3);
        assert_memory_equal(row, stored, sizeof(stored));
        assert_true(fv_scale_at(&view.k_scales, 0, 3, 0) == 1.0f);
        assert_true(fv_scale_at(&view.k_scales, 0, 3, 1) == 1e-6f); /* zeros */
    }
}

/* NaN and infinity stay in their own element: the rest of the row is what it is with zeros there. */
static void test_wild_numbers(void **state)
{
    (void)state;
    static char cache[CACHE_BYTES], calm[CACHE_BYTES];
    static float k[TOKENS * ROW], tame[TOKENS * ROW];
    const int64_t slots[TOKENS] = {0, 1, 2, 3, 4, 5, 6};
    const fv_kernel_table *const *tables;
    const int32_t num_tables = cpu_tables(&tables);
    const fv_launch launch = serial_launch();
    make_rows(k, 3);
    const int32_t nan_at = 1 * ROW + 7, inf_at = 1 * ROW + 20, minus_at = 3 * ROW + D + 31;
    k[nan_at] = k[inf_at] = k[minus_at] = 0;
    memcpy(tame, k, sizeof(k));
    k[nan_at] = NAN;
    k[inf_at] = INFINITY;
    k[minus_at] = -INFINITY;
    for (int32_t table = 0; table < num_tables; table++) {
        for (int32_t t = 0; t < 3; t++) {
            fv_kv_view view, calm_view;
            make_cache(&view, cache, 11, dtypes[t], NUM_BLOCKS);
            make_cache(&calm_view, calm, 11, dtypes[t], NUM_BLOCKS);
            const fv_kv_write_params wild = write_of(&view, k, tame, FV_DTYPE_F32, slots);
            const fv_kv_write_params without = write_of(&calm_view, tame, tame, FV_DTYPE_F32, slots);
            must(tables[table]->kv_write(&launch, &wild));
            must(tables[table]->kv_write(&launch, &without));
            int32_t num_different = 0;
            for (int32_t i = 0; i < CACHE_BYTES; i++) num_different += cache[i] != calm[i];
            assert_int_equal(num_different, t == 0 ? 2 : 3); /* int8 has no NaN: it is 0 */
            const double at_nan = stored_value(&view, &view.k, &view.k_scales, 1, 0, 7);
            if (t == 0)
                assert_true(at_nan == 0);
            else
                assert_true(isnan(at_nan));
            const float scale = fv_scale_at(&view.k_scales, 0, 1, 0), other = fv_scale_at(&view.k_scales, 0, 3, 1);
            assert_true(stored_value(&view, &view.k, &view.k_scales, 1, 0, 20) == (double)limits[t] * scale);
            assert_true(stored_value(&view, &view.k, &view.k_scales, 3, 1, 31) == -(double)limits[t] * other);
        }
    }
}

static void test_inline_views(void **state)
{
    (void)state;
    fv_kv_view view;
    size_t bytes;
    char *memory = NULL;
    must(fv_kv_view_inline_scales_bytes(&bytes, FV_KV_LAYOUT_PACKED_NHD, FV_DTYPE_I8, 10, 16, 4, 130));
    assert_int_equal(bytes, 10 * 16 * 4 * 2 * (132 + 4));
    must(fv_kv_view_init_inline_scales(&view, memory, FV_KV_LAYOUT_PACKED_HND, FV_DTYPE_F8_E4M3, 10, 16, 4, 64));
    assert_int_equal(view.k.block_stride, 16 * 4 * 136);
    assert_int_equal(view.k.head_stride, 16 * 136);
    assert_int_equal(view.k.slot_stride, 136);
    assert_ptr_equal(view.k_scales.data, memory + 64);
    assert_ptr_equal(view.v.data, memory + 68);
    assert_ptr_equal(view.v_scales.data, memory + 132);
    refused(fv_kv_view_inline_scales_bytes(&bytes, FV_KV_LAYOUT_SHUFFLED, FV_DTYPE_I8, 1, 1, 1, 1), FV_ERR_INVALID,
            "order shuffled; accepted: packed_nhd, packed_hnd");
    refused(fv_kv_view_inline_scales_bytes(&bytes, FV_KV_LAYOUT_PACKED_NHD, FV_DTYPE_BF16, 1, 1, 1, 1), FV_ERR_INVALID,
            "bfloat16 with their scales; accepted: int8, fp8_e4m3, fp8_e5m2");
    refused(fv_kv_view_inline_scales_bytes(&bytes, FV_KV_LAYOUT_PACKED_NHD, FV_DTYPE_I8, 1, 0, 1, 1), FV_ERR_INVALID,
            "0 slots");
    refused(fv_kv_view_inline_scales_bytes(&bytes, FV_KV_LAYOUT_PACKED_NHD, FV_DTYPE_I8, INT64_MAX, 8, 8, 64),
            FV_ERR_INVALID, "beyond 2^63");
}

/* The public write refuses scale planes that it could not fill. */
static void test_refusals(void **state)
{
    (void)state;
    static char cache[CACHE_BYTES];
    static float k[TOKENS * ROW];
    const int64_t slots[TOKENS] = {0};
    fv_context *context;
    fv_device *device;
    fv_kv_view view;
    must(fv_context_create(&context, NULL));
    must(fv_device_find(&device, context, "cpu"));
    const fv_tensor rows = fv_tensor_3d(k, FV_DTYPE_F32, TOKENS, HEADS, D);
    make_cache(&view, cache, 10, FV_DTYPE_I8, NUM_BLOCKS);
    must(fv_kv_write(device, &view, &rows, &rows, slots, 1, NULL, NULL, 0, NULL));
    view.v_scales.head_stride = 0;
    refused(fv_kv_write(device, &view, &rows, &rows, slots, 1, NULL, NULL, 0, NULL), FV_ERR_INVALID,
            "v_scales has strides of");
    make_cache(&view, cache, FV_KV_LAYOUT_PACKED_NHD, FV_DTYPE_F16, NUM_BLOCKS);
    view.k_scales = (fv_scale_plane){cache, 4, 4, 4};
    refused(fv_kv_write(device, &view, &rows, &rows, slots, 1, NULL, NULL, 0, NULL), FV_ERR_INVALID,
            "k_scales of a cache of float16; accepted: int8, fp8_e4m3, fp8_e5m2");
    fv_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tables_agree_and_read_back),
        cmocka_unit_test(test_int8_rounding),
        cmocka_unit_test(test_wild_numbers),
        cmocka_unit_test(test_inline_views),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
