/* fv_device_gemm and the layers of an engine's forward pass (ops/layer_table.h) on a device against the
 * reference. On the null device this tests that parameters arrive; on a GPU, where there is one, the kernels. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "core/float.h"
#include "fovea/context.h"
#include "reference/reference.h"

enum { rows = 5, max_arrays = 12 };

/* A device, and arrays that lie on the host and on it, in pairs. */
typedef struct lab {
    fv_context *context;
    fv_device *device;
    void *host[max_arrays], *on_device[max_arrays];
    size_t bytes[max_arrays];
    int32_t num_arrays;
    uint32_t random;
} lab;

static void must(fv_status status)
{
    if (status != FV_OK) fail_msg("%s: %s", fv_status_name(status), fv_last_error());
}

static fv_launch launch_of(const lab *of) { return (fv_launch){of->device, NULL, NULL}; }

static int32_t add_array(lab *to, size_t bytes)
{
    const int32_t index = to->num_arrays++;
    assert_true(index < max_arrays);
    to->bytes[index] = bytes;
    to->host[index] = calloc(1, bytes);
    assert_non_null(to->host[index]);
    must(fv_device_alloc(&to->on_device[index], to->device, bytes));
    return index;
}

static float next_number(lab *from)
{
    from->random = from->random * 1664525u + 1013904223u;
    return (float)(int32_t)from->random * 0x1p-31f;
}

/* Waits: the null device copies no sooner, and the host's side is changed by the reference. */
static void send_array(lab *to, int32_t index)
{
    must(fv_device_copy_in(to->device, to->on_device[index], to->host[index], to->bytes[index], NULL));
    must(fv_stream_synchronize(to->device, NULL));
}

static int32_t add_numbers(lab *to, int64_t count, fv_dtype dtype)
{
    const size_t bytes = fv_dtype_bytes(dtype);
    const int32_t index = add_array(to, (size_t)count * bytes);
    for (int64_t i = 0; i < count; i++) {
        fv_float_store((char *)to->host[index] + (size_t)i * bytes, next_number(to), dtype);
    }
    send_array(to, index);
    return index;
}

static int32_t add_integers(lab *to, const int32_t *values, int32_t count)
{
    const int32_t index = add_array(to, (size_t)count * sizeof(*values));
    memcpy(to->host[index], values, (size_t)count * sizeof(*values));
    send_array(to, index);
    return index;
}

/* Both are to have the same numbers, up to `tolerance` of the largest and one step of the dtype. */
static void expect_same(lab *of, const char *what, int32_t index, fv_dtype dtype, double tolerance)
{
    const size_t bytes = fv_dtype_bytes(dtype), count = of->bytes[index] / bytes;
    char *got = malloc(of->bytes[index]);
    assert_non_null(got);
    must(fv_device_copy_out(of->device, got, of->on_device[index], of->bytes[index], NULL));
    must(fv_stream_synchronize(of->device, NULL));
    const double step = dtype == FV_DTYPE_BF16 ? 0x1p-8 : 0x1p-22;
    double largest = 0;
    for (size_t i = 0; i < count; i++) {
        largest = fmax(largest, fabs((double)fv_float_load((char *)of->host[index] + i * bytes, dtype)));
    }
    for (size_t i = 0; i < count; i++) {
        const double a = (double)fv_float_load(got + i * bytes, dtype);
        const double b = (double)fv_float_load((char *)of->host[index] + i * bytes, dtype);
        if (fabs(a - b) <= tolerance * largest + step * fabs(b)) continue;
        fail_msg("%s: element %zu is %g, expected %g", what, i, a, b);
    }
    free(got);
}

static void forget_arrays(lab *of)
{
    for (int32_t i = 0; i < of->num_arrays; i++) {
        free(of->host[i]);
        fv_device_free(of->device, of->on_device[i]);
    }
    of->num_arrays = 0;
}

/* --- products ------------------------------------------------------------------------------------------- */

typedef struct tried_product {
    int32_t num_matrices, m, n, k;
    int32_t b_is_transposed;
    fv_dtype dtype, c_dtype;
    int32_t padding; /* elements behind each row of a and b */
} tried_product;

static const tried_product products[] = {
    {1, 1, 512, 1024, 1, FV_DTYPE_BF16, FV_DTYPE_F32, 0},  {1, 1, 7, 8, 1, FV_DTYPE_BF16, FV_DTYPE_F32, 0},
    {1, 2, 130, 2056, 1, FV_DTYPE_BF16, FV_DTYPE_BF16, 8}, {1, 3, 65, 4096, 1, FV_DTYPE_BF16, FV_DTYPE_F32, 0},
    {1, 4, 96, 576, 1, FV_DTYPE_BF16, FV_DTYPE_F32, 0},    {1, 5, 96, 576, 1, FV_DTYPE_BF16, FV_DTYPE_F32, 8},
    {1, 1, 33, 50, 1, FV_DTYPE_BF16, FV_DTYPE_F32, 0},     {1, 40, 264, 136, 1, FV_DTYPE_BF16, FV_DTYPE_BF16, 0},
    {3, 6, 64, 48, 0, FV_DTYPE_BF16, FV_DTYPE_BF16, 16},   {4, 1, 32, 40, 1, FV_DTYPE_BF16, FV_DTYPE_F32, 0},
    {1, 17, 24, 32, 1, FV_DTYPE_F32, FV_DTYPE_F32, 0},     {2, 8, 24, 32, 0, FV_DTYPE_F16, FV_DTYPE_F16, 0},
};

static void try_product(lab *on, const tried_product *tried)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(tried->dtype), c_bytes = (int64_t)fv_dtype_bytes(tried->c_dtype);
    const int64_t a_row = tried->k + tried->padding;
    const int64_t b_rows = tried->b_is_transposed ? tried->n : tried->k;
    const int64_t b_row = (tried->b_is_transposed ? tried->k : tried->n) + tried->padding;
    const int32_t a = add_numbers(on, tried->num_matrices * tried->m * a_row, tried->dtype);
    const int32_t b = add_numbers(on, tried->num_matrices * b_rows * b_row, tried->dtype);
    const int32_t c = add_numbers(on, (int64_t)tried->num_matrices * tried->m * tried->n, tried->c_dtype);
    fv_gemm gemm = {
        .struct_size = sizeof(gemm),
        .num_matrices = tried->num_matrices,
        .m = tried->m,
        .n = tried->n,
        .k = tried->k,
        .b_is_transposed = tried->b_is_transposed,
        .a_dtype = tried->dtype,
        .b_dtype = tried->dtype,
        .c_dtype = tried->c_dtype,
        .a = on->on_device[a],
        .a_row_stride = a_row * bytes,
        .a_matrix_stride = tried->m * a_row * bytes,
        .b = on->on_device[b],
        .b_row_stride = b_row * bytes,
        .b_matrix_stride = b_rows * b_row * bytes,
        .c = on->on_device[c],
        .c_row_stride = tried->n * c_bytes,
        .c_matrix_stride = (int64_t)tried->m * tried->n * c_bytes,
    };
    for (int32_t i = 0; i < 2; i++) must(fv_device_gemm(on->device, &gemm, NULL)); /* with and without a plan */
    gemm.a = on->host[a];
    gemm.b = on->host[b];
    gemm.c = on->host[c];
    fv_reference_gemm(&gemm);
    char what[96];
    snprintf(what, sizeof(what), "product %d x %d x %d x %d", tried->num_matrices, tried->m, tried->n, tried->k);
    expect_same(on, what, c, tried->c_dtype, 1e-5);
    forget_arrays(on);
}

static void try_products(lab *on)
{
    for (int32_t i = 0; i < FV_ARRAY_LEN(products); i++) try_product(on, &products[i]);
    const fv_gemm empty = {.struct_size = sizeof(empty), .num_matrices = 1, .m = 0, .n = 8, .k = 8};
    must(fv_device_gemm(on->device, &empty, NULL));
}

/* --- layers --------------------------------------------------------------------------------------------- */

static void try_embed(lab *on)
{
    enum { size = 72, vocabulary = 9 };
    static const int32_t tokens[rows] = {3, 0, 8, -1, 9}; /* the last two are outside */
    const fv_launch launch = launch_of(on);
    const int32_t weights = add_numbers(on, vocabulary * size, FV_DTYPE_BF16);
    const int32_t hidden = add_numbers(on, rows * size, FV_DTYPE_F32), ids = add_integers(on, tokens, rows);
    fv_embed_params params = {
        .hidden = on->on_device[hidden],
        .weights = on->on_device[weights],
        .tokens = on->on_device[ids],
        .scale = 1.5f,
        .num_rows = rows,
        .size = size,
        .num_weights = vocabulary,
    };
    must(on->device->layers->embed(&launch, &params));
    params.hidden = on->host[hidden];
    params.weights = on->host[weights];
    params.tokens = on->host[ids];
    must(fv_reference_layers.embed(&launch, &params));
    expect_same(on, "embed", hidden, FV_DTYPE_F32, 0);
    forget_arrays(on);
}

/* `size` of the row; which parts are there. */
static void try_add_norm(lab *on, int32_t size, int32_t has_added, fv_dtype added_dtype, int32_t has_added_norm,
                         int32_t has_rows)
{
    static const int32_t picked[rows] = {4, 1, 1, 0, 3};
    const fv_launch launch = launch_of(on);
    const int32_t hidden = add_numbers(on, (int64_t)rows * size, FV_DTYPE_F32);
    const int32_t added = add_numbers(on, (int64_t)rows * size, added_dtype);
    const int32_t added_norm = add_numbers(on, size, FV_DTYPE_F32), weight = add_numbers(on, size, FV_DTYPE_F32);
    const int32_t ids = add_integers(on, picked, rows);
    const int32_t normed = add_numbers(on, (int64_t)rows * size, FV_DTYPE_BF16);
    const int32_t wide = add_numbers(on, (int64_t)rows * size, FV_DTYPE_F32);
    for (int32_t side = 0; side < 2; side++) {
        void *const *at = side == 0 ? on->on_device : on->host;
        const fv_add_norm_params params = {
            .hidden = at[hidden],
            .added = has_added ? at[added] : NULL,
            .added_dtype = added_dtype,
            .added_norm = has_added_norm ? at[added_norm] : NULL,
            .weight = at[weight],
            .rows = has_rows ? at[ids] : NULL,
            .normed = at[normed],
            .normed_f32 = at[wide],
            .epsilon = 1e-5f,
            .num_rows = rows,
            .size = size,
        };
        must((side == 0 ? on->device->layers : &fv_reference_layers)->add_norm(&launch, &params));
    }
    expect_same(on, "add_norm: hidden", hidden, FV_DTYPE_F32, 1e-6);
    expect_same(on, "add_norm: normed", normed, FV_DTYPE_BF16, 1e-6);
    expect_same(on, "add_norm: normed in fp32", wide, FV_DTYPE_F32, 2e-6);
    forget_arrays(on);
}

static void try_split_heads(lab *on, fv_rope_style style, int32_t head_size, int32_t rope_dim, int32_t has_norms)
{
    enum { heads = 6, kv_heads = 2, max_position = 20 };
    static const int32_t at_positions[rows] = {0, 19, 7, 20, -1}; /* the last two are outside */
    const int64_t all = (int64_t)rows * (heads + 2 * kv_heads) * head_size;
    const fv_launch launch = launch_of(on);
    const int32_t qkv = add_numbers(on, all, FV_DTYPE_F32), out = add_numbers(on, all, FV_DTYPE_BF16);
    const int32_t q_norm = add_numbers(on, head_size, FV_DTYPE_F32), k_norm = add_numbers(on, head_size, FV_DTYPE_F32);
    const int32_t cosines = add_numbers(on, max_position * rope_dim / 2, FV_DTYPE_F32);
    const int32_t sines = add_numbers(on, max_position * rope_dim / 2, FV_DTYPE_F32);
    const int32_t positions = add_integers(on, at_positions, rows);
    for (int32_t side = 0; side < 2; side++) {
        void *const *at = side == 0 ? on->on_device : on->host;
        const fv_split_heads_params params = {
            .out = at[out],
            .qkv = at[qkv],
            .q_norm = has_norms ? at[q_norm] : NULL,
            .k_norm = has_norms ? at[k_norm] : NULL,
            .cos = at[cosines],
            .sin = at[sines],
            .positions = at[positions],
            .max_position = max_position,
            .style = style,
            .rope_dim = rope_dim,
            .epsilon = 1e-6f,
            .num_rows = rows,
            .num_heads = heads,
            .num_kv_heads = kv_heads,
            .head_size = head_size,
        };
        must((side == 0 ? on->device->layers : &fv_reference_layers)->split_heads(&launch, &params));
    }
    expect_same(on, "split_heads", out, FV_DTYPE_BF16, 1e-6);
    forget_arrays(on);
}

static void try_activate(lab *on, int32_t is_gelu)
{
    enum { size = 700 };
    const fv_launch launch = launch_of(on);
    const int32_t gate_up = add_numbers(on, 2 * rows * size, FV_DTYPE_F32);
    const int32_t out = add_numbers(on, rows * size, FV_DTYPE_BF16);
    for (int32_t side = 0; side < 2; side++) {
        void *const *at = side == 0 ? on->on_device : on->host;
        const fv_activate_params params = {at[out], at[gate_up], is_gelu, rows, size};
        must((side == 0 ? on->device->layers : &fv_reference_layers)->activate(&launch, &params));
    }
    expect_same(on, "activate", out, FV_DTYPE_BF16, 1e-6);
    forget_arrays(on);
}

static void try_experts(lab *on, int32_t is_sigmoid, int32_t num_groups)
{
    enum { size = 40, ffn = 24, num_experts = 8, num_used = 3 };
    const fv_launch launch = launch_of(on);
    const void *host_tables[2 * num_experts], *device_tables[2 * num_experts];
    const int32_t wide = add_numbers(on, rows * size, FV_DTYPE_F32), x = add_numbers(on, rows * size, FV_DTYPE_BF16);
    const int32_t router = add_numbers(on, num_experts * size, FV_DTYPE_F32);
    const int32_t bias = add_numbers(on, num_experts, FV_DTYPE_F32);
    const int32_t weights = add_numbers(on, num_experts * 3 * size * ffn, FV_DTYPE_BF16);
    const int32_t tables = add_array(on, sizeof(device_tables)), experts = add_array(on, rows * num_used * 4);
    const int32_t factors = add_array(on, rows * num_used * 4), scratch = add_array(on, 3 * rows * num_experts * 4);
    const int32_t parts = add_array(on, rows * num_used * size * 4), sum = add_numbers(on, rows * size, FV_DTYPE_F32);
    for (int32_t i = 0; i < num_experts; i++) {
        const size_t gate_up = (size_t)i * 3 * size * ffn * 2, down = gate_up + 2 * size * ffn * 2;
        host_tables[i] = (char *)on->host[weights] + gate_up;
        host_tables[num_experts + i] = (char *)on->host[weights] + down;
        device_tables[i] = (char *)on->on_device[weights] + gate_up;
        device_tables[num_experts + i] = (char *)on->on_device[weights] + down;
    }
    memcpy(on->host[tables], host_tables, sizeof(host_tables));
    must(fv_device_copy_in(on->device, on->on_device[tables], device_tables, sizeof(device_tables), NULL));
    must(fv_stream_synchronize(on->device, NULL));
    for (int32_t side = 0; side < 2; side++) {
        void *const *at = side == 0 ? on->on_device : on->host;
        const fv_layer_table *layers = side == 0 ? on->device->layers : &fv_reference_layers;
        const fv_route_params route = {
            .experts = at[experts],
            .weights = at[factors],
            .scratch = at[scratch],
            .x = at[wide],
            .router = at[router],
            .bias = is_sigmoid ? at[bias] : NULL,
            .weights_scale = 2.5f,
            .is_sigmoid = is_sigmoid,
            .normalises = is_sigmoid,
            .num_experts = num_experts,
            .num_used = num_used,
            .num_groups = num_groups,
            .num_used_groups = (num_groups + 1) / 2,
            .num_rows = rows,
            .size = size,
        };
        const fv_run_experts_params run = {
            .out = at[parts],
            .x = at[x],
            .experts = at[experts],
            .gate_up = at[tables],
            .down = (const void *const *)at[tables] + num_experts,
            .num_rows = rows,
            .num_used = num_used,
            .size = size,
            .ffn_size = ffn,
            .num_experts = num_experts,
        };
        const fv_add_experts_params add = {at[sum], at[parts], at[factors], is_sigmoid, rows, num_used, size};
        must(layers->route(&launch, &route));
        must(layers->run_experts(&launch, &run));
        must(layers->add_experts(&launch, &add));
    }
    int32_t chosen[rows * num_used];
    must(fv_device_copy_out(on->device, chosen, on->on_device[experts], sizeof(chosen), NULL));
    must(fv_stream_synchronize(on->device, NULL));
    assert_memory_equal(chosen, on->host[experts], sizeof(chosen));
    expect_same(on, "route", factors, FV_DTYPE_F32, 1e-5);
    expect_same(on, "run_experts", parts, FV_DTYPE_F32, 5e-3); /* a rounding to bf16 in between */
    expect_same(on, "add_experts", sum, FV_DTYPE_F32, 5e-3);
    forget_arrays(on);
}

static void try_memory(lab *on)
{
    enum { count = 1000 };
    const fv_launch launch = launch_of(on);
    const int32_t out = add_array(on, count * 2), sum = add_array(on, 4);
    for (int32_t side = 0; side < 2; side++) {
        void *const *at = side == 0 ? on->on_device : on->host;
        const fv_fill_random_params params = {.out = at[out], .first = 3, .count = count, .seed = 9, .scale = 0.25f};
        must((side == 0 ? on->device->layers : &fv_reference_layers)->fill_random(&launch, &params));
    }
    expect_same(on, "fill_random", out, FV_DTYPE_BF16, -1e-12); /* the same bits */
    const fv_read_memory_params read = {on->on_device[out], count * 2, on->on_device[sum]};
    must(on->device->layers->read_memory(&launch, &read));
    must(fv_stream_synchronize(on->device, NULL));
    forget_arrays(on);
}

static void try_layers(lab *on)
{
    try_embed(on);
    try_add_norm(on, 64, 0, FV_DTYPE_F32, 0, 0);
    try_add_norm(on, 576, 1, FV_DTYPE_F32, 0, 0);
    try_add_norm(on, 2052, 1, FV_DTYPE_F32, 1, 0);
    try_add_norm(on, 8192, 1, FV_DTYPE_BF16, 0, 0);
    try_add_norm(on, 640, 1, FV_DTYPE_BF16, 1, 1);
    try_split_heads(on, FV_ROPE_INTERLEAVED, 64, 64, 0);
    try_split_heads(on, FV_ROPE_HALF, 256, 256, 1);
    try_split_heads(on, FV_ROPE_HALF, 128, 32, 1);
    try_split_heads(on, FV_ROPE_INTERLEAVED, 40, 24, 0);
    try_activate(on, 0);
    try_activate(on, 1);
    try_experts(on, 0, 1);
    try_experts(on, 1, 4);
    try_memory(on);
}

static void try_device(const char *name)
{
    lab on = {.random = 7};
    must(fv_context_create(&on.context, NULL));
    const fv_status status = fv_device_find(&on.device, on.context, name);
    if (status == FV_ERR_UNSUPPORTED) {
        print_message("  skipped: %s\n", fv_last_error());
        fv_context_destroy(on.context);
        skip();
    }
    must(status);
    try_products(&on);
    try_layers(&on);
    fv_context_destroy(on.context);
}

static void test_null_device(void **state)
{
    (void)state;
    try_device("null");
}

static void test_gpu(void **state)
{
    (void)state;
    try_device("cuda");
}

/* The CPU's engine has a GEMM of its own. */
static void test_cpu(void **state)
{
    (void)state;
    fv_context *context;
    fv_device *cpu;
    size_t free_bytes, total_bytes;
    const fv_gemm gemm = {.struct_size = sizeof(gemm), .num_matrices = 1, .m = 1, .n = 1, .k = 1};
    must(fv_context_create(&context, NULL));
    must(fv_device_find(&cpu, context, "cpu"));
    assert_int_equal(fv_device_gemm(cpu, &gemm, NULL), FV_ERR_UNSUPPORTED);
    assert_non_null(strstr(fv_last_error(), "no GEMM"));
    assert_int_equal(fv_device_gemm(NULL, &gemm, NULL), FV_ERR_INVALID);
    assert_int_equal(fv_device_memory(&free_bytes, &total_bytes, cpu), FV_ERR_UNSUPPORTED);
    fv_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cpu),
        cmocka_unit_test(test_null_device),
        cmocka_unit_test(test_gpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
