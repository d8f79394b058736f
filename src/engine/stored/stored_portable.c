/* Plain C for all types at once: a few hundred weights become floats in the first cache, X stays as it is. */
#include "engine/stored/stored.h"

#include <string.h>

#include "core/compiler.h"
#include "engine/dequantize.h"

enum { chunk_values = 256, max_chunk_bytes = 2 * chunk_values, num_lanes = 8 };

/* Sums in lanes, in the registers of two vectors. */
static void add_products(float *sums, const float *restrict w, const float *restrict x, int64_t count)
{
    float lanes[num_lanes];
    memcpy(lanes, sums, sizeof(lanes));
    int64_t i = 0;
    for (; i + num_lanes <= count; i += num_lanes) {
        for (int32_t lane = 0; lane < num_lanes; lane++) lanes[lane] += w[i + lane] * x[i + lane];
    }
    for (; i < count; i++) lanes[0] += w[i] * x[i];
    memcpy(sums, lanes, sizeof(lanes));
}

/* Values [first, first + count) of a row; the first is that of a block. */
static void read_values(float *values, const fv_stored_rows *w, int64_t row, int64_t first, int64_t count)
{
    const fv_stored_layout *layout = w->layout;
    const size_t stripe_bytes = fv_stored_stripe_bytes(layout, w->in_features);
    uint8_t blocks[max_chunk_bytes];
    fv_stored_unpack_blocks(blocks, w->stripes + (size_t)(row / FV_STORED_ROWS) * stripe_bytes,
                            (int32_t)(row % FV_STORED_ROWS), first / layout->values, count / layout->values, layout);
    (void)fv_dequantize_row(values, blocks, layout->type, count); /* cannot fail: it has a layout */
}

static void multiply_row(float *y, int64_t y_stride, const fv_stored_x *x, int32_t num_x, const fv_stored_rows *w,
                         int64_t row)
{
    float sums[FV_STORED_MAX_X][num_lanes] = {{0}};
    for (int64_t first = 0; first < w->in_features; first += chunk_values) {
        float values[chunk_values];
        const int64_t count = fv_min_i64(chunk_values, w->in_features - first);
        read_values(values, w, row, first, count);
        for (int32_t i = 0; i < num_x; i++) add_products(sums[i], values, x[i].values + first, count);
    }
    for (int32_t i = 0; i < num_x; i++) {
        float sum = 0.0f;
        for (int32_t lane = 0; lane < num_lanes; lane++) sum += sums[i][lane];
        y[i * y_stride + row] = sum;
    }
}

static void multiply(float *y, int64_t y_stride, const fv_stored_x *x, int32_t num_x, const fv_stored_rows *w)
{
    for (int64_t row = 0; row < w->num_rows; row++) multiply_row(y, y_stride, x, num_x, w, row);
}

static void expand(float *out, const fv_stored_rows *w)
{
    for (int64_t row = 0; row < w->num_rows; row++, out += w->in_features) {
        for (int64_t first = 0; first < w->in_features; first += chunk_values) {
            read_values(out + first, w, row, first, fv_min_i64(chunk_values, w->in_features - first));
        }
    }
}

static const fv_stored_kernel kernels[] = {
    {.type = FV_GGUF_F16, .multiply = multiply},  {.type = FV_GGUF_BF16, .multiply = multiply},
    {.type = FV_GGUF_Q4_0, .multiply = multiply}, {.type = FV_GGUF_Q4_1, .multiply = multiply},
    {.type = FV_GGUF_Q5_0, .multiply = multiply}, {.type = FV_GGUF_Q5_1, .multiply = multiply},
    {.type = FV_GGUF_Q8_0, .multiply = multiply}, {.type = FV_GGUF_Q4_K, .multiply = multiply},
    {.type = FV_GGUF_Q5_K, .multiply = multiply}, {.type = FV_GGUF_Q6_K, .multiply = multiply},
};

const fv_stored_table fv_stored_table_portable = {
    .isa = FV_ISA_PORTABLE,
    .name = "portable",
    .expand = expand,
    .kernels = kernels,
    .num_kernels = FV_ARRAY_LEN(kernels),
};
