/* Products of strided matrices against double sums; threads and, in batch-invariant mode, other rows must not
 * change a bit. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "engine/gemm_matrices.h"
#include "engine/rows.h"

enum { padding = 3 }; /* elements behind each row and matrix, which stay as they are */

static float value_at(int64_t index, uint32_t salt)
{
    uint32_t bits = (uint32_t)index * 2654435761u + salt * 40503u;
    bits ^= bits >> 15;
    bits *= 2246822519u;
    bits ^= bits >> 13;
    return (float)(int32_t)(bits >> 8) / 8388608.0f - 1.0f;
}

/* One of a, b, c: num_matrices of [rows, columns] with padding. */
typedef struct matrices {
    float *data;
    int64_t row_size, matrix_size;
} matrices;

static matrices create_matrices(int64_t num_matrices, int64_t rows, int64_t columns, uint32_t salt)
{
    matrices made = {.row_size = columns + padding, .matrix_size = rows * (columns + padding) + padding};
    made.data = malloc((size_t)(num_matrices * made.matrix_size) * sizeof(float));
    assert_non_null(made.data);
    for (int64_t i = 0; i < num_matrices * made.matrix_size; i++) made.data[i] = value_at(i, salt);
    return made;
}

typedef struct shape {
    int32_t num_matrices, m, n, k, is_transposed;
} shape;

static fv_gemm gemm_of(const shape *of, const matrices *a, const matrices *b, const matrices *c)
{
    const int64_t bytes = sizeof(float);
    return (fv_gemm){
        .struct_size = sizeof(fv_gemm),
        .num_matrices = of->num_matrices,
        .m = of->m,
        .n = of->n,
        .k = of->k,
        .b_is_transposed = of->is_transposed,
        .a_dtype = FV_DTYPE_F32,
        .b_dtype = FV_DTYPE_F32,
        .c_dtype = FV_DTYPE_F32,
        .a = a->data,
        .a_row_stride = a->row_size * bytes,
        .a_matrix_stride = a->matrix_size * bytes,
        .b = b->data,
        .b_row_stride = b->row_size * bytes,
        .b_matrix_stride = b->matrix_size * bytes,
        .c = c->data,
        .c_row_stride = c->row_size * bytes,
        .c_matrix_stride = c->matrix_size * bytes,
    };
}

static void check_product(const shape *of, const matrices *a, const matrices *b, const matrices *c)
{
    for (int32_t i = 0; i < of->num_matrices; i++) {
        for (int32_t row = 0; row < of->m; row++) {
            for (int32_t column = 0; column < of->n + padding; column++) {
                const int64_t at = i * c->matrix_size + row * c->row_size + column;
                if (column >= of->n) {
                    assert_true(c->data[at] == value_at(at, 3));
                    continue;
                }
                double sum = 0.0;
                for (int32_t x = 0; x < of->k; x++) {
                    const int64_t b_at = of->is_transposed ? column * b->row_size + x : x * b->row_size + column;
                    sum += (double)a->data[i * a->matrix_size + row * a->row_size + x] *
                           (double)b->data[i * b->matrix_size + b_at];
                }
                assert_true(fabs((double)c->data[at] - sum) <= 1e-6 * of->k);
            }
        }
    }
}

static const shape shapes[] = {
    {1, 1, 1, 1, 0},   {3, 5, 7, 11, 1},   {2, 1, 200, 48, 0}, {2, 130, 97, 33, 1}, {1, 300, 8, 64, 1},
    {6, 3, 64, 32, 0}, {6, 64, 48, 64, 1}, {4, 0, 8, 8, 1},    {1, 8, 0, 8, 0},
};

static void test_shapes(void **state)
{
    (void)state;
    for (int32_t threads = 1; threads <= 3; threads += 2) {
        const fv_context_options options = {.struct_size = sizeof(options), .num_threads = threads, .no_plugins = 1};
        fv_gemm_matrices user = {0};
        assert_int_equal(fv_context_create(&user.context, &options), FV_OK);
        for (int32_t i = 0; i < FV_ARRAY_LEN(shapes); i++) {
            const shape *of = &shapes[i];
            const matrices a = create_matrices(of->num_matrices, of->m, of->k, 1);
            const matrices b = of->is_transposed ? create_matrices(of->num_matrices, of->n, of->k, 2)
                                                 : create_matrices(of->num_matrices, of->k, of->n, 2);
            const matrices c = create_matrices(of->num_matrices, of->m, of->n, 3);
            const fv_gemm gemm = gemm_of(of, &a, &b, &c);
            assert_int_equal(fv_gemm_matrices_run(&user, &gemm, NULL), FV_OK);
            check_product(of, &a, &b, &c);
            free(a.data);
            free(b.data);
            free(c.data);
        }
        fv_context_destroy(user.context);
    }
}

/* The matrix in a narrow format, its values rounded to what that holds. */
static uint16_t *narrow(const matrices *of, int64_t num_matrices, fv_dtype dtype)
{
    const int64_t num = num_matrices * of->matrix_size;
    uint16_t *made = malloc((size_t)num * sizeof(uint16_t));
    assert_non_null(made);
    fv_narrow_row(made, of->data, (int32_t)num, dtype);
    fv_widen_row(of->data, made, (int32_t)num, dtype);
    return made;
}

/* Rows of a and c in 16 bits: the bits of the product of the same rows in fp32, rounded, and nothing beside them. */
static void check_narrow(fv_gemm_matrices *user, const shape *of, fv_dtype dtype)
{
    const matrices a = create_matrices(of->num_matrices, of->m, of->k, 1);
    const matrices b = of->is_transposed ? create_matrices(of->num_matrices, of->n, of->k, 2)
                                         : create_matrices(of->num_matrices, of->k, of->n, 2);
    const matrices c = create_matrices(of->num_matrices, of->m, of->n, 3);
    const size_t num = (size_t)(of->num_matrices * c.matrix_size);
    uint16_t *narrow_a = narrow(&a, of->num_matrices, dtype), *narrow_c = narrow(&c, of->num_matrices, dtype);
    uint16_t *expected = malloc(num * sizeof(uint16_t));
    assert_non_null(expected);
    fv_gemm gemm = gemm_of(of, &a, &b, &c);
    assert_int_equal(fv_gemm_matrices_run(user, &gemm, NULL), FV_OK);
    fv_narrow_row(expected, c.data, (int32_t)num, dtype);
    gemm.a_dtype = gemm.c_dtype = dtype;
    gemm.a = narrow_a;
    gemm.c = narrow_c;
    gemm.a_row_stride /= 2;
    gemm.a_matrix_stride /= 2;
    gemm.c_row_stride /= 2;
    gemm.c_matrix_stride /= 2;
    assert_int_equal(fv_gemm_matrices_run(user, &gemm, NULL), FV_OK);
    assert_memory_equal(narrow_c, expected, num * sizeof(uint16_t));
    free(a.data);
    free(b.data);
    free(c.data);
    free(narrow_a);
    free(narrow_c);
    free(expected);
}

static void test_narrow_rows(void **state)
{
    (void)state;
    const fv_context_options options = {.struct_size = sizeof(options), .num_threads = 2, .no_plugins = 1};
    fv_gemm_matrices user = {.max_k = 64};
    assert_int_equal(fv_context_create(&user.context, &options), FV_OK);
    user.scratch = malloc(2 * fv_gemm_matrices_scratch(user.max_k) * sizeof(float));
    assert_non_null(user.scratch);
    for (int32_t alone = 0; alone < 2; alone++) {
        user.batch_invariant = alone;
        for (int32_t i = 0; i < FV_ARRAY_LEN(shapes); i++) {
            check_narrow(&user, &shapes[i], FV_DTYPE_F16);
            check_narrow(&user, &shapes[i], FV_DTYPE_BF16);
        }
    }
    const fv_gemm deep = {.struct_size = sizeof(deep),
                          .k = 65,
                          .a_dtype = FV_DTYPE_F16,
                          .b_dtype = FV_DTYPE_F32,
                          .c_dtype = FV_DTYPE_F16};
    assert_int_equal(fv_gemm_matrices_run(&user, &deep, NULL), FV_ERR_UNSUPPORTED);
    assert_non_null(strstr(fv_last_error(), "k of a product of narrow rows is 65; accepted: up to 64"));
    free(user.scratch);
    fv_context_destroy(user.context);
}

static void test_rows_alone(void **state)
{
    (void)state;
    const shape of = {2, 20, 40, 96, 1};
    const fv_context_options options = {.struct_size = sizeof(options), .num_threads = 2, .no_plugins = 1};
    fv_gemm_matrices user = {.batch_invariant = true};
    assert_int_equal(fv_context_create(&user.context, &options), FV_OK);
    const matrices a = create_matrices(of.num_matrices, of.m, of.k, 1);
    const matrices b = create_matrices(of.num_matrices, of.n, of.k, 2);
    const matrices all = create_matrices(of.num_matrices, of.m, of.n, 3);
    const matrices one = create_matrices(of.num_matrices, of.m, of.n, 3);
    fv_gemm gemm = gemm_of(&of, &a, &b, &all);
    assert_int_equal(fv_gemm_matrices_run(&user, &gemm, NULL), FV_OK);
    for (int32_t row = 0; row < of.m; row++) {
        gemm = gemm_of(&of, &a, &b, &one);
        gemm.m = 1;
        gemm.a = a.data + row * a.row_size;
        gemm.c = one.data + row * one.row_size;
        assert_int_equal(fv_gemm_matrices_run(&user, &gemm, NULL), FV_OK);
    }
    assert_memory_equal(all.data, one.data, (size_t)(of.num_matrices * all.matrix_size) * sizeof(float));
    free(a.data);
    free(b.data);
    free(all.data);
    free(one.data);
    fv_context_destroy(user.context);
}

static void test_other_dtypes(void **state)
{
    (void)state;
    fv_gemm_matrices user = {0};
    const fv_gemm gemm = {.struct_size = sizeof(gemm), .a_dtype = FV_DTYPE_F32, .b_dtype = FV_DTYPE_BF16};
    assert_int_equal(fv_gemm_matrices_run(&user, &gemm, NULL), FV_ERR_UNSUPPORTED);
    assert_non_null(strstr(fv_last_error(), "matrix b of a product is bfloat16; accepted: float32"));
    const fv_gemm narrow = {.struct_size = sizeof(narrow), .a_dtype = FV_DTYPE_F16, .b_dtype = FV_DTYPE_F32};
    assert_int_equal(fv_gemm_matrices_run(&user, &narrow, NULL), FV_ERR_UNSUPPORTED); /* without scratch */
    assert_non_null(strstr(fv_last_error(), "matrix a of a product is float16; accepted: float32"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_narrow_rows),
        cmocka_unit_test(test_rows_alone),
        cmocka_unit_test(test_other_dtypes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
