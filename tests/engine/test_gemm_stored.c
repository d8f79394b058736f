/* Weights as stored: every type and table of kernels against double sums over dequantized rows, for few and many rows
 * of X; neither threads nor, where that is promised, other rows change a bit. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "core/context.h"
#include "core/float.h"
#include "engine/dequantize.h"
#include "engine/gemm.h"
#include "engine/gemm_kernel.h"
#include "engine/stored/stored.h"
#include "stored_panel_emulated.h"
#include "stored_tiles_emulated.h"

enum { max_rows = 130, max_outputs = 203, guard = 16 };

static const int32_t types[] = {FV_GGUF_F16,  FV_GGUF_BF16, FV_GGUF_Q4_0, FV_GGUF_Q4_1, FV_GGUF_Q5_0,
                                FV_GGUF_Q5_1, FV_GGUF_Q8_0, FV_GGUF_Q4_K, FV_GGUF_Q5_K, FV_GGUF_Q6_K};
static const char *const isas[] = {"portable", "avx2", "avx512", NULL}; /* NULL: the best of this CPU */

static bool has_isa(const char *name)
{
    fv_isa isa = FV_ISA_PORTABLE;
    if (name) assert_int_equal(fv_isa_parse(&isa, name), FV_OK);
    return isa <= fv_cpu_isa();
}

static uint32_t hash(uint32_t index, uint32_t salt)
{
    uint32_t bits = index * 2654435761u + salt * 40503u;
    bits ^= bits >> 15;
    bits *= 2246822519u;
    return bits ^ bits >> 13;
}

static float value_at(uint32_t index, uint32_t salt) { return (float)(int32_t)hash(index, salt) * 0x1p-31f; }

/* 16 bits that are a scale: 2^-7 to 2^-6 as fp16, either sign. */
static void put_scale(uint8_t *to, uint32_t seed)
{
    const uint16_t scale = (uint16_t)(0x2000 | (seed & 0x83ff));
    memcpy(to, &scale, sizeof(scale));
}

/* A file's rows of any bits, but for the scales. The caller frees them. */
static uint8_t *create_rows(int32_t type, int64_t num_rows, int64_t in_features)
{
    const fv_stored_layout *layout = fv_stored_find_layout(type);
    const size_t bytes = fv_gguf_type_bytes(type, in_features) * (size_t)num_rows;
    uint8_t *rows = malloc(bytes);
    assert_non_null(rows);
    for (size_t i = 0; i < bytes; i++) rows[i] = (uint8_t)(hash((uint32_t)i, (uint32_t)type) >> 24);
    for (size_t at = 0; at < bytes; at += (size_t)layout->block_bytes) {
        for (int32_t i = 0; i < layout->num_scales; i++) {
            put_scale(rows + at + layout->scales_at + 2 * i, hash((uint32_t)at, 7 + (uint32_t)i));
        }
        if (type == FV_GGUF_BF16) rows[at + 1] = (uint8_t)((rows[at + 1] & 0x80) | 0x3c);
    }
    return rows;
}

/* Those rows as stripes. The caller frees them. */
static uint8_t *create_stripes(const uint8_t *rows, int64_t num_rows, int64_t in_features,
                               const fv_stored_layout *layout)
{
    const size_t stripe_bytes = fv_stored_stripe_bytes(layout, in_features);
    const size_t row_bytes = fv_gguf_type_bytes(layout->type, in_features);
    const int64_t num_stripes = fv_ceil_div(num_rows, FV_STORED_ROWS);
    uint8_t *stripes = malloc((size_t)num_stripes * stripe_bytes);
    assert_non_null(stripes);
    for (int64_t i = 0; i < num_stripes; i++) {
        fv_stored_pack_stripe(stripes + (size_t)i * stripe_bytes, rows + (size_t)(i * FV_STORED_ROWS) * row_bytes,
                              fv_min_i64(FV_STORED_ROWS, num_rows - i * FV_STORED_ROWS), in_features, layout);
    }
    return stripes;
}

/* w . x, and |w| |x|. */
typedef struct exact_product {
    double sum, size;
} exact_product;

static exact_product multiply_exactly(const float *w, const float *x, int64_t in_features)
{
    double sum = 0.0, w_square = 0.0, x_square = 0.0;
    for (int64_t k = 0; k < in_features; k++) {
        sum += (double)w[k] * (double)x[k];
        w_square += (double)w[k] * (double)w[k];
        x_square += (double)x[k] * (double)x[k];
    }
    return (exact_product){sum, sqrt(w_square * x_square)};
}

typedef struct fixture {
    fv_context *context;
    fv_gemm_library *gemm;
    fv_gemm_weight *weight;
    int64_t num_outputs, in_features;
    bool is_kept; /* as the file stores it, which is smaller than the compute type; else the weight is of that type */
    float *w;     /* all rows, exact */
    float *x;     /* [max_rows, in_features], then NaN */
} fixture;

typedef struct part {
    int32_t type;
    int64_t num_rows;
} part;

static void set_up(fixture *f, const char *isa, int32_t num_threads, int64_t in_features, const part *parts,
                   int32_t num_parts)
{
    const fv_context_options options = {
        .struct_size = sizeof(options), .num_threads = num_threads, .no_plugins = 1, .isa = isa};
    *f = (fixture){.in_features = in_features};
    assert_int_equal(fv_context_create(&f->context, &options), FV_OK);
    assert_int_equal(fv_gemm_create(&f->gemm, f->context, FV_DTYPE_NONE), FV_OK);
    fv_gemm_rows rows[FV_GEMM_MAX_PARTS];
    size_t file_bytes = 0;
    for (int32_t i = 0; i < num_parts; i++) {
        rows[i] = (fv_gemm_rows){create_rows(parts[i].type, parts[i].num_rows, in_features), parts[i].type,
                                 parts[i].num_rows};
        f->num_outputs += parts[i].num_rows;
        file_bytes += fv_gguf_type_bytes(parts[i].type, in_features) * (size_t)parts[i].num_rows;
    }
    f->is_kept = file_bytes < (size_t)(f->num_outputs * in_features) * fv_dtype_bytes(fv_gemm_dtype(f->gemm));
    assert_int_equal(fv_gemm_weight_create_of_rows(&f->weight, f->gemm, in_features, rows, num_parts), FV_OK);
    assert_int_equal(fv_gemm_weight_out_features(f->weight), f->num_outputs);
    assert_int_equal(f->is_kept, strstr(fv_gemm_describe(f->gemm), ", weights as stored: ") != NULL);
    assert_int_equal(fv_gemm_reserve(f->gemm, max_rows), FV_OK);

    f->w = malloc((size_t)(f->num_outputs * in_features) * sizeof(float));
    float *to = f->w;
    for (int32_t i = 0; i < num_parts; i++, to += parts[i - 1].num_rows * in_features) {
        assert_int_equal(fv_dequantize_row(to, rows[i].data, rows[i].type, rows[i].num_rows * in_features), FV_OK);
        free((void *)(uintptr_t)rows[i].data);
    }
    const int64_t count = max_rows * in_features;
    f->x = malloc((size_t)(count + guard) * sizeof(float));
    for (int64_t i = 0; i < count; i++) f->x[i] = value_at((uint32_t)i, 2) * (i % 37 == 0 ? 20.0f : 1.0f);
    for (int64_t i = count; i < count + guard; i++) f->x[i] = NAN;
}

static void tear_down(fixture *f)
{
    free(f->x);
    free(f->w);
    fv_gemm_weight_destroy(f->weight);
    fv_gemm_destroy(f->gemm);
    fv_context_destroy(f->context);
}

/* Y of the last num_rows rows of X, with a guard behind it that must stay. The caller frees it. */
static float *run(fixture *f, int64_t num_rows, bool batch_invariant)
{
    const int64_t size = num_rows * f->num_outputs;
    float *y = malloc((size_t)(size + guard) * sizeof(float));
    for (int64_t i = 0; i < size + guard; i++) y[i] = 12345.0f;
    const float *x = f->x + (max_rows - num_rows) * f->in_features;
    assert_int_equal(fv_gemm_run(f->gemm, y, x, f->weight, num_rows, batch_invariant), FV_OK);
    for (int64_t i = size; i < size + guard; i++) assert_true(y[i] == 12345.0f);
    return y;
}

/* Errors are measured in |w| |x|: one of a thousand products left out is 1e-3. X rounded to 16 bits per 32 values
 * is within 3e-5, fp32 sums of exact values within 2e-6, and bf16 within 2^-8: where the compute type is that, panels for
 * many rows are, and weights that are not kept for any number of rows. */
static double tolerance_of(const fixture *f, int64_t num_rows, bool batch_invariant)
{
    if (fv_gemm_dtype(f->gemm) != FV_DTYPE_BF16) return 3e-5;
    if (!f->is_kept) return 0x1p-8;
    const fv_isa isa = f->context->isa;
    const bool has_kernels = isa >= FV_ISA_AVX2 && isa < FV_ISA_AMX; /* for many rows */
    return has_kernels || batch_invariant || num_rows < 16 ? 3e-5 : 0x1p-8;
}

static void check_values(const fixture *f, const float *y, int64_t num_rows, bool batch_invariant)
{
    const double tolerance = tolerance_of(f, num_rows, batch_invariant);
    for (int64_t row = 0; row < num_rows; row += 1 + row / 9) {
        const float *x = f->x + (max_rows - num_rows + row) * f->in_features;
        for (int64_t output = 0; output < f->num_outputs; output += 1 + output / 40) {
            const float *w = f->w + output * f->in_features;
            const exact_product exact = multiply_exactly(w, x, f->in_features);
            const double got = (double)y[row * f->num_outputs + output];
            if (!(fabs(exact.sum - got) <= tolerance * exact.size)) {
                fail_msg("%d rows, row %d output %d: %g instead of %g", (int)num_rows, (int)row, (int)output, got,
                         exact.sum);
            }
        }
    }
}

static const int64_t row_counts[] = {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 65, 127, 128, max_rows};

static void check_all_counts(fixture *f)
{
    for (int32_t r = 0; r < FV_ARRAY_LEN(row_counts); r++) {
        float *y = run(f, row_counts[r], false);
        check_values(f, y, row_counts[r], false);
        free(y);
    }
}

static void test_layout(void **state)
{
    (void)state;
    for (int32_t t = 0; t < FV_ARRAY_LEN(types); t++) {
        const fv_stored_layout *layout = fv_stored_find_layout(types[t]);
        assert_non_null(layout);
        assert_int_equal(fv_gguf_type_bytes(types[t], layout->values), layout->block_bytes);
        assert_int_equal(2 * layout->num_scales + 4 * layout->num_words, layout->block_bytes);
        const int64_t in_features = 3 * 256;
        const size_t row_bytes = fv_gguf_type_bytes(types[t], in_features);
        uint8_t *rows = create_rows(types[t], FV_STORED_ROWS, in_features);
        uint8_t *stripe = malloc(fv_stored_stripe_bytes(layout, in_features)), *row = malloc(row_bytes);
        for (int64_t num_rows = 1; num_rows <= FV_STORED_ROWS; num_rows++) {
            fv_stored_pack_stripe(stripe, rows, num_rows, in_features, layout);
            for (int32_t i = 0; i < FV_STORED_ROWS; i++) {
                fv_stored_unpack_blocks(row, stripe, i, 0, in_features / layout->values, layout);
                if (i >= num_rows) {
                    for (size_t byte = 0; byte < row_bytes; byte++) assert_int_equal(row[byte], 0);
                } else {
                    assert_memory_equal(row, rows + (size_t)i * row_bytes, row_bytes);
                }
            }
        }
        free(rows);
        free(stripe);
        free(row);
    }
}

/* The floats of every table that makes them are those of fv_dequantize_row. */
static void test_expanded_rows(void **state)
{
    (void)state;
    enum { num_rows = 19, in_features = 3 * 256 };
    static const fv_isa limits[] = {FV_ISA_PORTABLE, FV_ISA_AVX2, FV_ISA_AVX512};
    for (int32_t t = 0; t < FV_ARRAY_LEN(types); t++) {
        const fv_stored_layout *layout = fv_stored_find_layout(types[t]);
        uint8_t *rows = create_rows(types[t], num_rows, in_features);
        uint8_t *stripes = create_stripes(rows, num_rows, in_features, layout);
        float *expected = malloc(num_rows * in_features * sizeof(float));
        assert_int_equal(fv_dequantize_row(expected, rows, types[t], num_rows * in_features), FV_OK);
        for (int32_t i = 0; i < FV_ARRAY_LEN(limits) && limits[i] <= fv_cpu_isa(); i++) {
            const fv_stored_table *table = fv_stored_find_table(limits[i]);
            if (!table->expand) continue;
            float *got = malloc((num_rows * in_features + guard) * sizeof(float));
            for (int32_t k = 0; k < guard; k++) got[num_rows * in_features + k] = 12345.0f;
            table->expand(got, &(fv_stored_rows){layout, stripes, num_rows, in_features});
            for (int32_t k = 0; k < num_rows * in_features; k++) {
                if (isnan(expected[k]) ? !isnan(got[k]) : !(got[k] == expected[k])) {
                    fail_msg("type %d, value %d: %a instead of %a", types[t], k, (double)got[k], (double)expected[k]);
                }
            }
            for (int32_t k = 0; k < guard; k++) assert_true(got[num_rows * in_features + k] == 12345.0f);
            free(got);
        }
        free(rows);
        free(stripes);
        free(expected);
    }
}

/* Rows of X as a table's kernels take them. */
typedef struct loaded_rows {
    fv_stored_x *x;
    int64_t num_x;
} loaded_rows;

static loaded_rows load_rows(const fv_stored_table *table, const float *x_values, int64_t num_x, int64_t in_features)
{
    const int64_t num_blocks = in_features / FV_STORED_X_BLOCK;
    const loaded_rows rows = {malloc((size_t)num_x * sizeof(*rows.x)), num_x};
    for (int64_t i = 0; i < num_x; i++) {
        fv_stored_x *x = &rows.x[i];
        x->values = x_values + i * in_features;
        x->integers = malloc((size_t)in_features * sizeof(int16_t));
        x->scales = malloc((size_t)num_blocks * sizeof(float));
        x->sums = malloc((size_t)num_blocks * sizeof(float));
        table->load_x(x, in_features);
    }
    return rows;
}

static void free_rows(loaded_rows rows)
{
    for (int64_t i = 0; i < rows.num_x; i++) {
        free(rows.x[i].integers);
        free(rows.x[i].scales);
        free(rows.x[i].sums);
    }
    free(rows.x);
}

/* y[i * y_stride + j] = x[i] . w[j] by the kernels for few rows, 12345 between rows; the caller frees it. */
static float *multiply_few(const fv_stored_table *table, const fv_stored_rows *w, loaded_rows rows, int64_t y_stride)
{
    float *y = malloc((size_t)(rows.num_x * y_stride) * sizeof(float));
    for (int64_t i = 0; i < rows.num_x * y_stride; i++) y[i] = 12345.0f;
    const fv_stored_multiply_fn multiply = fv_stored_find_kernel(table, w->layout->type)->multiply;
    for (int64_t row = 0; row < rows.num_x; row += FV_STORED_MAX_X) {
        const int64_t count = fv_min_i64(rows.num_x - row, FV_STORED_MAX_X);
        multiply(y + row * y_stride, y_stride, rows.x + row, (int32_t)count, w);
    }
    return y;
}

/* vpdpwssd adds what vpmaddwd and an addition do. */
static void test_vnni(void **state)
{
    (void)state;
    enum { num_rows = 43, in_features = 3 * 256 };
    if (fv_cpu_isa() < FV_ISA_AVX512 || !fv_stored_find_vnni()) skip();
    float x[FV_STORED_MAX_X * in_features];
    for (int32_t i = 0; i < FV_ARRAY_LEN(x); i++) x[i] = value_at((uint32_t)i, 77) * (i % 37 ? 1.0f : 1000.0f);
    for (int32_t t = 0; t < FV_ARRAY_LEN(types); t++) {
        const fv_stored_layout *layout = fv_stored_find_layout(types[t]);
        uint8_t *rows = create_rows(types[t], num_rows, in_features);
        uint8_t *stripes = create_stripes(rows, num_rows, in_features, layout);
        const fv_stored_rows w = {layout, stripes, num_rows, in_features};
        for (int32_t num_x = 1; num_x <= FV_STORED_MAX_X; num_x++) {
            const loaded_rows loaded = load_rows(fv_stored_find_vnni(), x, num_x, in_features);
            float *expected = multiply_few(fv_stored_find_table(FV_ISA_AVX2), &w, loaded, num_rows);
            float *got = multiply_few(fv_stored_find_vnni(), &w, loaded, num_rows);
            assert_memory_equal(got, expected, (size_t)(num_x * num_rows) * sizeof(float));
            free(got);
            free(expected);
            free_rows(loaded);
        }
        free(rows);
        free(stripes);
    }
}

typedef struct many_shape {
    int64_t num_x, num_outputs, in_features;
} many_shape;

/* The kernels for many rows have the bits of those for few by AVX2, from memory that is NaN before. */
static void check_many(const fv_stored_table *table, int32_t type, many_shape of)
{
    const fv_stored_table *avx2 = fv_stored_find_table(FV_ISA_AVX2);
    const fv_stored_layout *layout = fv_stored_find_layout(type);
    const int64_t y_stride = of.num_outputs + 5, y_size = of.num_x * y_stride;
    uint8_t *file_rows = create_rows(type, of.num_outputs, of.in_features);
    uint8_t *stripes = create_stripes(file_rows, of.num_outputs, of.in_features, layout);
    const fv_stored_rows w = {layout, stripes, of.num_outputs, of.in_features};
    float *x = malloc((size_t)(of.num_x * of.in_features) * sizeof(float));
    for (int64_t i = 0; i < of.num_x * of.in_features; i++) x[i] = value_at((uint32_t)i, 5) * (i % 41 ? 1.0f : 500.0f);
    if (of.num_x > 2) x[of.in_features + 3] = NAN;
    const loaded_rows loaded = load_rows(avx2, x, of.num_x, of.in_features);
    const size_t memory_bytes = (size_t)fv_round_up((int64_t)table->many_bytes, FV_CACHE_LINE);
    uint8_t *memory = aligned_alloc(FV_CACHE_LINE, memory_bytes);
    memset(memory, 0xff, memory_bytes);
    float *got = malloc((size_t)y_size * sizeof(float));
    for (int64_t i = 0; i < y_size; i++) got[i] = 12345.0f;
    fv_stored_find_kernel(table, type)->multiply_many(got, y_stride, loaded.x, of.num_x, &w, memory);
    float *expected = multiply_few(avx2, &w, loaded, y_stride);
    for (int64_t i = 0; i < y_size; i++) {
        const bool is_same = isnan(expected[i]) ? isnan(got[i]) : got[i] == expected[i];
        if (!is_same) {
            fail_msg("%s, type %d, row %d of %d, output %d of %d: %a instead of %a", table->name, type,
                     (int)(i / y_stride), (int)of.num_x, (int)(i % y_stride), (int)of.num_outputs, (double)got[i],
                     (double)expected[i]);
        }
    }
    free(expected);
    free(got);
    free(memory);
    free_rows(loaded);
    free(x);
    free(stripes);
    free(file_rows);
}

static void check_many_shapes(const fv_stored_table *table)
{
    for (int32_t t = 0; t < FV_ARRAY_LEN(types); t++) {
        const fv_stored_kernel *kernel = fv_stored_find_kernel(table, types[t]);
        if (!kernel || !kernel->multiply_many) continue;
        const int64_t values = fv_stored_find_layout(types[t])->values;
        const many_shape shapes[] = {{1, 1, values},   {3, 8, 2 * values},          {4, 48, 256},
                                     {5, 49, 3 * 256}, {18, 100, 2 * 256 + values}, {7, FV_STORED_MANY_ROWS, 256},
                                     {9, 171, 512}};
        for (int32_t i = 0; i < FV_ARRAY_LEN(shapes); i++) check_many(table, types[t], shapes[i]);
        if (values > 1) continue;
        check_many(table, types[t], (many_shape){6, 120, 131});
        check_many(table, types[t], (many_shape){5, 20, 385});
    }
    check_many(table, FV_GGUF_Q4_1, (many_shape){FV_STORED_MANY_X, 50, 288});
}

static void test_many_rows(void **state)
{
    (void)state;
    if (fv_cpu_isa() < FV_ISA_AVX2 || !fv_stored_panel_emulated()) skip();
    check_many_shapes(fv_stored_find_table(FV_ISA_AVX2));
    check_many_shapes(fv_stored_panel_emulated());
    if (fv_cpu_isa() >= FV_ISA_AVX512 && fv_stored_find_vnni()) check_many_shapes(fv_stored_find_vnni());
}

typedef struct tile_shape {
    int64_t num_rows, num_outputs, in_features;
} tile_shape;

/* Y of random rows and weights by `tiles`, whose weights' memory is NaN where no weight is. */
static void check_tiles(const fv_stored_tiles *tiles, int32_t type, tile_shape of)
{
    const fv_stored_layout *layout = fv_stored_find_layout(type);
    const int64_t y_stride = of.num_outputs + 5;
    const size_t x_bytes = fv_stored_tiles_bytes(of.num_rows, of.in_features);
    const size_t w_bytes = fv_stored_tiles_bytes(of.num_outputs, of.in_features);
    uint8_t *rows = create_rows(type, of.num_outputs, of.in_features);
    uint8_t *stripes = create_stripes(rows, of.num_outputs, of.in_features, layout);
    float *w = malloc((size_t)(of.num_outputs * of.in_features) * sizeof(float));
    float *x = malloc((size_t)(of.num_rows * of.in_features) * sizeof(float));
    float *y = malloc((size_t)(of.num_rows * y_stride) * sizeof(float));
    char *x_tiles = malloc(x_bytes), *w_tiles = malloc(w_bytes);
    assert_int_equal(fv_dequantize_row(w, rows, type, of.num_outputs * of.in_features), FV_OK);
    for (int64_t i = 0; i < of.num_rows * of.in_features; i++) x[i] = value_at((uint32_t)i, 5);
    for (int64_t i = 0; i < of.num_rows * y_stride; i++) y[i] = 12345.0f;
    memset(w_tiles, 0xff, w_bytes);

    for (int64_t row = 0; row < of.num_rows; row += FV_STORED_TILE_ROWS) {
        tiles->load_x(x_tiles + fv_stored_tiles_bytes(row, of.in_features), x + row * of.in_features,
                      fv_min_i64(of.num_rows - row, FV_STORED_TILE_ROWS), of.in_features);
    }
    for (int64_t feature = 0; feature < of.in_features; feature += 512) {
        const int64_t count = fv_min_i64(of.in_features - feature, 512);
        tiles->expand(w_tiles, &(fv_stored_rows){layout, stripes, of.num_outputs, of.in_features}, feature, count);
        tiles->multiply(&(fv_tile_product){
            y, y_stride, of.num_rows, of.num_outputs, x_tiles + fv_stored_tiles_bytes(1, feature),
            fv_stored_tile_depth(of.in_features), w_tiles, fv_stored_tile_depth(count), feature > 0});
    }
    for (int64_t i = 0; i < of.num_rows * y_stride; i++) {
        const int64_t row = i / y_stride, output = i % y_stride;
        if (output >= of.num_outputs) {
            assert_true(y[i] == 12345.0f);
            continue;
        }
        const exact_product exact = multiply_exactly(w + output * of.in_features, x + row * of.in_features,
                                                     of.in_features);
        if (!(fabs(exact.sum - (double)y[i]) <= 0x1p-8 * exact.size)) {
            fail_msg("%s, type %d, row %d output %d: %g instead of %g", tiles->name, type, (int)row, (int)output,
                     (double)y[i], exact.sum);
        }
    }
    free(x_tiles);
    free(w_tiles);
    free(y);
    free(x);
    free(w);
    free(stripes);
    free(rows);
}

/* In plain C, and native where the CPU has tiles: rows, outputs and features that fill no tile, odd numbers of blocks. */
static void test_tiles(void **state)
{
    (void)state;
    static const tile_shape shapes[] = {{16, 16, 256}, {1, 8, 256}, {33, 40, 768}, {47, 19, 512}, {64, 32, 256}};
    const fv_stored_tiles *const all[] = {fv_stored_tiles_emulated(), fv_stored_find_tiles(fv_cpu_isa())};
    for (int32_t i = 0; i < FV_ARRAY_LEN(all); i++) {
        for (int32_t t = 0; all[i] && t < FV_ARRAY_LEN(types); t++) {
            for (int32_t s = 0; s < FV_ARRAY_LEN(shapes); s++) {
                tile_shape shape = shapes[s];
                if (fv_stored_find_layout(types[t])->values == 1) shape.in_features += 7;
                check_tiles(all[i], types[t], shape);
            }
        }
    }
}

static void test_values(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {{203, 256}, {9, 768}, {1, 256}, {7, 1536}, {96, 256}, {40, 4608}};
    for (int32_t isa = 0; isa < FV_ARRAY_LEN(isas); isa++) {
        if (!has_isa(isas[isa])) continue;
        for (int32_t t = 0; t < FV_ARRAY_LEN(types); t++) {
            for (int32_t s = 0; s < FV_ARRAY_LEN(shapes); s++) {
                fixture f;
                set_up(&f, isas[isa], 2, shapes[s][1], &(part){types[t], shapes[s][0]}, 1);
                const size_t file_bytes = fv_gguf_type_bytes(types[t], f.in_features) * (size_t)(f.num_outputs + 8);
                if (f.is_kept) assert_in_range(fv_gemm_weight_bytes(f.weight), 1, file_bytes + 64);
                check_all_counts(&f);
                tear_down(&f);
            }
        }
    }
}

/* Blocks of 32 that are no multiple of 8 blocks, and floats of any number. */
static void test_short_rows(void **state)
{
    (void)state;
    static const part parts[] = {{FV_GGUF_Q4_0, 20}, {FV_GGUF_Q4_1, 20}, {FV_GGUF_Q5_0, 20}, {FV_GGUF_Q5_1, 20},
                                 {FV_GGUF_Q8_0, 20}, {FV_GGUF_F16, 20},  {FV_GGUF_BF16, 20}};
    for (int32_t isa = 0; isa < FV_ARRAY_LEN(isas); isa++) {
        if (!has_isa(isas[isa])) continue;
        for (int32_t i = 0; i < FV_ARRAY_LEN(parts); i++) {
            const bool is_float = parts[i].type == FV_GGUF_F16 || parts[i].type == FV_GGUF_BF16;
            for (int64_t in_features = 32; in_features <= 352; in_features += 160) {
                fixture f;
                set_up(&f, isas[isa], 2, is_float ? in_features + 1 : in_features, &parts[i], 1);
                check_all_counts(&f);
                tear_down(&f);
            }
        }
    }
}

static void test_parts_of_several_types(void **state)
{
    (void)state;
    static const part parts[] = {{FV_GGUF_Q4_K, 43}, {FV_GGUF_F16, 101}, {FV_GGUF_Q6_K, 59}};
    for (int32_t isa = 0; isa < FV_ARRAY_LEN(isas); isa++) {
        if (!has_isa(isas[isa])) continue;
        fixture f;
        set_up(&f, isas[isa], 2, 512, parts, 3);
        assert_true(f.num_outputs <= max_outputs);
        check_all_counts(&f);
        tear_down(&f);
    }
}

/* Parts of which one has kernels for so many rows and the other has not, and more rows of W than a call of the former takes. */
static void test_parts_that_begin_apart(void **state)
{
    (void)state;
    static const part parts[][2] = {{{FV_GGUF_F16, 8}, {FV_GGUF_Q4_1, 1001}},
                                    {{FV_GGUF_Q4_1, 1001}, {FV_GGUF_BF16, 9}}};
    for (int32_t isa = 0; isa < FV_ARRAY_LEN(isas); isa++) {
        if (!has_isa(isas[isa])) continue;
        for (int32_t i = 0; i < FV_ARRAY_LEN(parts); i++) {
            fixture f;
            set_up(&f, isas[isa], 1, 32, parts[i], 2);
            check_all_counts(&f);
            tear_down(&f);
        }
    }
}

static void test_threads_do_not_matter(void **state)
{
    (void)state;
    for (int32_t isa = 0; isa < FV_ARRAY_LEN(isas); isa++) {
        if (!has_isa(isas[isa])) continue;
        for (int32_t t = 0; t < FV_ARRAY_LEN(types); t++) {
            fixture one, two;
            set_up(&one, isas[isa], 1, 512, &(part){types[t], 203}, 1);
            set_up(&two, isas[isa], 2, 512, &(part){types[t], 203}, 1);
            for (int32_t r = 0; r < FV_ARRAY_LEN(row_counts); r++) {
                float *a = run(&one, row_counts[r], false), *b = run(&two, row_counts[r], false);
                assert_memory_equal(a, b, (size_t)(row_counts[r] * 203) * sizeof(float));
                free(a);
                free(b);
            }
            tear_down(&one);
            tear_down(&two);
        }
    }
}

static void test_other_rows_do_not_matter(void **state)
{
    (void)state;
    for (int32_t isa = 0; isa < FV_ARRAY_LEN(isas); isa++) {
        if (!has_isa(isas[isa])) continue;
        for (int32_t t = 0; t < FV_ARRAY_LEN(types); t++) {
            fixture f;
            set_up(&f, isas[isa], 2, 256, &(part){types[t], 41}, 1);
            float *all = run(&f, max_rows, true);
            check_values(&f, all, max_rows, true);
            for (int64_t num_rows = 1; num_rows <= 7; num_rows++) {
                float *few = run(&f, num_rows, true);
                assert_memory_equal(few, all + (max_rows - num_rows) * 41, (size_t)(num_rows * 41) * sizeof(float));
                free(few);
            }
            free(all);
            tear_down(&f);
        }
    }
}

/* A value that is not finite spoils its row, and no other; nothing comes of zeros. */
static void test_unusual_rows(void **state)
{
    (void)state;
    static const float spoils[] = {NAN, INFINITY, -INFINITY};
    for (int32_t isa = 0; isa < FV_ARRAY_LEN(isas); isa++) {
        if (!has_isa(isas[isa])) continue;
        for (int32_t t = 0; t < FV_ARRAY_LEN(types); t++) {
            fixture f;
            set_up(&f, isas[isa], 2, 256, &(part){types[t], 19}, 1);
            float *clean = run(&f, 4, false);
            float *row = f.x + (max_rows - 3) * f.in_features; /* the second of four */
            for (int32_t i = 0; i < FV_ARRAY_LEN(spoils); i++) {
                const float kept = row[77];
                row[77] = spoils[i];
                float *y = run(&f, 4, false);
                row[77] = kept;
                for (int64_t output = 0; output < 19; output++) {
                    if (f.w[output * f.in_features + 77] == 0.0f) continue;
                    assert_false(isfinite(y[19 + output]));
                }
                assert_memory_equal(y, clean, 19 * sizeof(float));
                assert_memory_equal(y + 2 * 19, clean + 2 * 19, 2 * 19 * sizeof(float));
                free(y);
            }
            for (int64_t k = 0; k < f.in_features; k++) row[k] = k % 2 ? 0.0f : 1e-40f;
            float *y = run(&f, 4, false);
            for (int64_t output = 0; output < 19; output++) assert_true(fabsf(y[19 + output]) < 1e-36f);
            free(y);
            free(clean);
            tear_down(&f);
        }
    }
}

/* Weights that come after room for rows was made, with more features; a type that is not kept; refusals. */
static void test_creation(void **state)
{
    (void)state;
    fixture f;
    set_up(&f, NULL, 2, 256, &(part){FV_GGUF_Q4_0, 40}, 1);
    uint8_t *rows = create_rows(FV_GGUF_Q8_0, 40, 2048);
    fv_gemm_weight *wide;
    const fv_gemm_rows part_of_wide = {rows, FV_GGUF_Q8_0, 40};
    assert_int_equal(fv_gemm_weight_create_of_rows(&wide, f.gemm, 2048, &part_of_wide, 1), FV_OK);
    float *x = calloc(max_rows * 2048, sizeof(float)), *y = malloc(max_rows * 40 * sizeof(float));
    for (int32_t row = 0; row < max_rows; row++) x[row * 2048 + 2047] = 1.0f;
    float *w = malloc(2048 * sizeof(float));
    assert_int_equal(fv_gemm_run(f.gemm, y, x, wide, max_rows, false), FV_OK);
    for (int32_t output = 0; output < 40; output++) {
        assert_int_equal(fv_dequantize_row(w, rows + (size_t)output * 2176, FV_GGUF_Q8_0, 2048), FV_OK);
        assert_true(fabsf(y[(max_rows - 1) * 40 + output] - w[2047]) <= 0.01f * fabsf(w[2047]));
    }
    assert_int_equal(fv_gemm_run(f.gemm, y, x, wide, max_rows + 1, false), FV_ERR_INVALID);
    fv_gemm_weight_destroy(wide);

    fv_gemm_weight *weight;
    const fv_gemm_rows floats = {x, FV_GGUF_F32, 40}; /* no smaller than the compute type */
    assert_int_equal(fv_gemm_weight_create_of_rows(&weight, f.gemm, 2048, &floats, 1), FV_OK);
    assert_in_range(fv_gemm_weight_bytes(weight), 40 * 2048 * fv_dtype_bytes(fv_gemm_dtype(f.gemm)), 40 * 2048 * 4);
    assert_int_equal(fv_gemm_run(f.gemm, y, x, weight, 3, false), FV_OK);
    assert_true(y[0] == 1.0f);
    fv_gemm_weight_destroy(weight);

    assert_int_equal(fv_gemm_weight_create_of_rows(&weight, f.gemm, 40, &part_of_wide, 1), FV_ERR_INVALID);
    assert_null(weight);
    assert_int_equal(fv_gemm_weight_create_of_rows(&weight, f.gemm, 2048, &part_of_wide, 0), FV_ERR_INVALID);
    const fv_gemm_rows none = {rows, FV_GGUF_Q8_0, 0};
    assert_int_equal(fv_gemm_weight_create_of_rows(&weight, f.gemm, 2048, &none, 1), FV_ERR_INVALID);
    free(rows);
    free(x);
    free(y);
    free(w);
    tear_down(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout),
        cmocka_unit_test(test_expanded_rows),
        cmocka_unit_test(test_vnni),
        cmocka_unit_test(test_many_rows),
        cmocka_unit_test(test_tiles),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_short_rows),
        cmocka_unit_test(test_parts_of_several_types),
        cmocka_unit_test(test_parts_that_begin_apart),
        cmocka_unit_test(test_threads_do_not_matter),
        cmocka_unit_test(test_other_rows_do_not_matter),
        cmocka_unit_test(test_unusual_rows),
        cmocka_unit_test(test_creation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
