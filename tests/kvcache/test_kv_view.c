/* Cache layouts: each element has a place of its own, all places together are the stated bytes, and the
 * order is that of the layout's name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kvcache/kv_address.h"

static const fv_kv_layout layouts[] = {
    FV_KV_LAYOUT_NB_2_BS_H_D, FV_KV_LAYOUT_2_NB_BS_H_D, FV_KV_LAYOUT_X_PACKED,
    FV_KV_LAYOUT_SHUFFLED,    FV_KV_LAYOUT_PACKED_NHD,  FV_KV_LAYOUT_PACKED_HND,
};

static void mark(char *used, const fv_kv_view *view, const fv_kv_plane *plane)
{
    const int64_t element = (int64_t)fv_dtype_bytes(view->dtype);
    const int64_t base = (char *)plane->data - (char *)view->k.data;
    for (int64_t block = 0; block < view->num_blocks; block++) {
        for (int32_t head = 0; head < view->num_kv_heads; head++) {
            for (int32_t slot = 0; slot < view->block_size; slot++) {
                for (int32_t d = 0; d < view->head_size; d++) {
                    const int64_t at = base + fv_kv_offset(plane, block, head, slot, d);
                    for (int64_t i = 0; i < element; i++) used[at + i]++;
                }
            }
        }
    }
}

static void test_each_layout_is_a_bijection(void **state)
{
    (void)state;
    const fv_dtype dtypes[] = {FV_DTYPE_F32, FV_DTYPE_BF16, FV_DTYPE_F8_E4M3};
    for (int32_t l = 0; l < FV_ARRAY_LEN(layouts); l++) {
        for (int32_t t = 0; t < FV_ARRAY_LEN(dtypes); t++) {
            size_t bytes = 0;
            assert_int_equal(fv_kv_view_bytes(&bytes, layouts[l], dtypes[t], 3, 16, 2, 32), FV_OK);
            assert_int_equal(bytes, 2 * 3 * 16 * 2 * 32 * fv_dtype_bytes(dtypes[t]));
            char *used = calloc(bytes, 1);
            fv_kv_view view;
            assert_int_equal(fv_kv_view_init(&view, used, layouts[l], dtypes[t], 3, 16, 2, 32), FV_OK);
            mark(used, &view, &view.k);
            mark(used, &view, &view.v);
            for (size_t i = 0; i < bytes; i++) assert_int_equal(used[i], 1);
            free(used);
        }
    }
}

/* One element of each layout by its published index formula: block 2, head 1, slot 5, element 19. */
static void test_published_orders(void **state)
{
    (void)state;
    enum { NB = 4, BS = 16, H = 3, D = 32, X = 8, b = 2, h = 1, s = 5, d = 19 };
    const int64_t plane = NB * BS * H * D;
    const struct {
        fv_kv_layout layout;
        int64_t k, v; /* element index from the start of the memory */
    } expected[] = {
        {FV_KV_LAYOUT_NB_2_BS_H_D, (((b * 2 + 0) * BS + s) * H + h) * D + d, (((b * 2 + 1) * BS + s) * H + h) * D + d},
        {FV_KV_LAYOUT_2_NB_BS_H_D, ((b * BS + s) * H + h) * D + d, plane + ((b * BS + s) * H + h) * D + d},
        {FV_KV_LAYOUT_X_PACKED, (((b * H + h) * (D / X) + d / X) * BS + s) * X + d % X,
         plane + ((b * H + h) * D + d) * BS + s},
        {FV_KV_LAYOUT_SHUFFLED, (((b * H + h) * (D / X) + d / X) * BS + s) * X + d % X,
         plane + (((b * H + h) * (BS / X) + s / X) * D + d) * X + s % X},
        {FV_KV_LAYOUT_PACKED_NHD, ((b * BS + s) * H + h) * 2 * D + d, ((b * BS + s) * H + h) * 2 * D + D + d},
        {FV_KV_LAYOUT_PACKED_HND, ((b * H + h) * BS + s) * 2 * D + d, ((b * H + h) * BS + s) * 2 * D + D + d},
    };
    char *memory = malloc(2 * (size_t)plane * 2);
    for (int32_t i = 0; i < FV_ARRAY_LEN(expected); i++) {
        fv_kv_view view;
        assert_int_equal(fv_kv_view_init(&view, memory, expected[i].layout, FV_DTYPE_BF16, NB, BS, H, D), FV_OK);
        assert_int_equal((char *)view.k.data - memory + fv_kv_offset(&view.k, b, h, s, d), 2 * expected[i].k);
        assert_int_equal((char *)view.v.data - memory + fv_kv_offset(&view.v, b, h, s, d), 2 * expected[i].v);
    }
    free(memory);
}

static void test_latent_entries(void **state)
{
    (void)state;
    size_t bytes = 0;
    assert_int_equal(fv_kv_view_bytes(&bytes, FV_KV_LAYOUT_LATENT, FV_DTYPE_BF16, 10, 7, 1, 576), FV_OK);
    assert_int_equal(bytes, 10 * 7 * 576 * 2);
    assert_int_equal(fv_kv_view_bytes(&bytes, FV_KV_LAYOUT_LATENT_FP8_DS, FV_DTYPE_F8_E4M3, 10, 7, 1, 576), FV_OK);
    assert_int_equal(bytes, 10 * 7 * 656);
    char memory[1];
    fv_kv_view view;
    assert_int_equal(fv_kv_view_init(&view, memory, FV_KV_LAYOUT_LATENT_FP8_DS, FV_DTYPE_F8_E4M3, 10, 7, 1, 576),
                     FV_OK);
    assert_int_equal(fv_kv_row_offset(&view.k, 3, 0, 2), (3 * 7 + 2) * 656);
    assert_int_equal(view.v_head_size, 512);
}

/* Offsets beyond 2^32 stay exact. */
static void test_offsets_are_64_bit(void **state)
{
    (void)state;
    char memory[1];
    fv_kv_view view;
    assert_int_equal(fv_kv_view_init(&view, memory, FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_BF16, 1 << 20, 128, 8, 128),
                     FV_OK);
    assert_true(fv_kv_offset(&view.k, (1 << 20) - 1, 7, 127, 127) ==
                (((int64_t)((1 << 20) - 1) * 2 * 128 + 127) * 8 + 7) * 256 + 254);
}

static void test_wrong_sizes_are_refused_by_name(void **state)
{
    (void)state;
    size_t bytes;
    const struct {
        fv_kv_layout layout;
        fv_dtype dtype;
        int64_t num_blocks;
        int32_t block_size, heads, head_size;
        const char *says;
    } cases[] = {
        {FV_KV_LAYOUT_STRIDED, FV_DTYPE_F16, 1, 16, 1, 64, "strided"},
        {(fv_kv_layout)77, FV_DTYPE_F16, 1, 16, 1, 64, "77"},
        {FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_NONE, 1, 16, 1, 64, "dtype 0"},
        {FV_KV_LAYOUT_NB_2_BS_H_D, (fv_dtype)99, 1, 16, 1, 64, "dtype 99"},
        {FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_F16, 0, 16, 1, 64, "0 blocks"},
        {FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_F16, 1, -5, 1, 64, "-5"},
        {FV_KV_LAYOUT_X_PACKED, FV_DTYPE_F16, 1, 16, 1, 36, "multiples of 8"},
        {FV_KV_LAYOUT_SHUFFLED, FV_DTYPE_F8_E4M3, 1, 24, 1, 64, "multiples of 16"},
        {FV_KV_LAYOUT_LATENT, FV_DTYPE_F16, 1, 16, 2, 576, "1 head"},
        {FV_KV_LAYOUT_LATENT_FP8_DS, FV_DTYPE_F16, 1, 16, 1, 576, "fp8_e4m3"},
        {FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_F32, INT64_MAX / 2, 1 << 20, 1 << 10, 512, "2^63"},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(cases); i++) {
        assert_int_equal(fv_kv_view_bytes(&bytes, cases[i].layout, cases[i].dtype, cases[i].num_blocks,
                                          cases[i].block_size, cases[i].heads, cases[i].head_size),
                         FV_ERR_INVALID);
        if (!strstr(fv_last_error(), cases[i].says)) fail_msg("'%s' lacks '%s'", fv_last_error(), cases[i].says);
    }
    assert_int_equal(fv_kv_view_bytes(NULL, FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_F16, 1, 16, 1, 64), FV_ERR_INVALID);
    assert_int_equal(fv_kv_view_init(NULL, &bytes, FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_F16, 1, 16, 1, 64),
                     FV_ERR_INVALID);
    assert_string_equal(fv_last_error(), "view is NULL");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_layout_is_a_bijection),
        cmocka_unit_test(test_published_orders),
        cmocka_unit_test(test_latent_entries),
        cmocka_unit_test(test_offsets_are_64_bit),
        cmocka_unit_test(test_wrong_sizes_are_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
