/* Rows are read by the GEMM's packing, in parallel, straight from the mapped file. */
#include "engine/model_loader.h"

#include <stdio.h>
#include <stdlib.h>

#include "core/compiler.h"
#include "engine/dequantize.h"

enum { max_parts = 3 };

/* Rows [first, first + count) of a tensor whose matrices, if it has several, lie one after the other. */
typedef struct tensor_rows {
    const fv_gguf_tensor *tensor;
    int64_t first, count;
} tensor_rows;

typedef struct stacked_rows {
    tensor_rows parts[max_parts];
    int32_t num_parts;
} stacked_rows;

typedef struct tensor_name {
    char text[64];
} tensor_name;

static tensor_name name_of(int32_t layer, const char *suffix)
{
    tensor_name name;
    if (layer < 0) {
        snprintf(name.text, sizeof(name.text), "%s", suffix);
    } else {
        snprintf(name.text, sizeof(name.text), "blk.%d.%s", layer, suffix);
    }
    return name;
}

static int64_t total_rows(const fv_gguf_tensor *tensor) { return tensor->num_elements / tensor->shape[0]; }

static const uint8_t *row_data(const fv_gguf_tensor *tensor, int64_t row)
{
    return (const uint8_t *)tensor->data + (size_t)row * fv_gguf_type_bytes(tensor->type, tensor->shape[0]);
}

static fv_status read_stacked_rows(float *rows, void *user, int64_t first_row, int64_t num_rows)
{
    const stacked_rows *stack = user;
    for (int32_t i = 0; i < stack->num_parts && num_rows > 0; i++) {
        const tensor_rows *part = &stack->parts[i];
        const int64_t columns = part->tensor->shape[0];
        const int64_t count = fv_min_i64(num_rows, part->count - first_row);
        if (count > 0) {
            /* Rows lie one after the other: many are read as one. */
            const fv_status status = fv_dequantize_row(rows, row_data(part->tensor, part->first + first_row),
                                                       part->tensor->type, count * columns);
            if (status != FV_OK) return status;
            rows += count * columns;
            first_row += count;
            num_rows -= count;
        }
        first_row -= part->count;
    }
    return FV_OK;
}

fv_status fv_model_find_tensor(const fv_gguf_tensor **tensor, const fv_model_loader *from, int32_t layer,
                               const char *suffix, int64_t columns, int64_t rows, int64_t num_matrices)
{
    const tensor_name name = name_of(layer, suffix);
    const fv_status status = fv_gguf_find_tensor(tensor, from->gguf, name.text);
    if (status != FV_OK) return status;
    const int64_t *shape = (*tensor)->shape;
    if (shape[0] == columns && shape[1] == rows && shape[2] == num_matrices && shape[3] == 1) return FV_OK;
    char matrices[24] = "";
    if (num_matrices > 1) snprintf(matrices, sizeof(matrices), " x %lld", (long long)num_matrices);
    return fv_fail(FV_ERR_IO, "%s: tensor %s is %lld x %lld x %lld x %lld, the metadata says %lld x %lld%s",
                   fv_gguf_path(from->gguf), name.text, (long long)shape[0], (long long)shape[1], (long long)shape[2],
                   (long long)shape[3], (long long)columns, (long long)rows, matrices);
}

bool fv_model_has_tensor(const fv_model_loader *from, int32_t layer, const char *suffix)
{
    const fv_gguf_tensor *tensor;
    return fv_gguf_find_tensor(&tensor, from->gguf, name_of(layer, suffix).text) != FV_ERR_IO;
}

fv_status fv_model_load_floats(float **values, fv_model_loader *from, const fv_gguf_tensor *tensor)
{
    float *made = malloc((size_t)tensor->num_elements * sizeof(float));
    if (!made) {
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for %s", fv_text_printable(tensor->name).text);
    }
    const fv_status status = fv_dequantize_row(made, tensor->data, tensor->type, tensor->num_elements);
    if (status != FV_OK) {
        free(made);
        return status;
    }
    fv_gguf_release_tensor(from->gguf, tensor);
    *values = made;
    return FV_OK;
}

fv_status fv_model_load_vector(float **vector, fv_model_loader *from, int32_t layer, const char *suffix, int32_t length)
{
    const fv_gguf_tensor *tensor;
    const fv_status status = fv_model_find_tensor(&tensor, from, layer, suffix, length, 1, 1);
    return status == FV_OK ? fv_model_load_floats(vector, from, tensor) : status;
}

static void tell_progress(fv_model_loader *from)
{
    from->num_done++;
    if (from->progress) from->progress(from->progress_user, from->num_done, from->num_weights);
}

fv_status fv_model_load_weight(fv_gemm_weight **weight, fv_model_loader *from, int32_t layer, int64_t columns,
                               const fv_weight_part *parts, int32_t num_parts)
{
    stacked_rows stack = {.num_parts = num_parts};
    int64_t num_rows = 0;
    for (int32_t i = 0; i < num_parts; i++) {
        tensor_rows *to = &stack.parts[i];
        const fv_status status = fv_model_find_tensor(&to->tensor, from, layer, parts[i].suffix, columns, parts[i].rows,
                                                      fv_max_i32(parts[i].num_matrices, 1));
        if (status != FV_OK) return status;
        to->first = parts[i].matrix * parts[i].rows;
        to->count = parts[i].rows;
        num_rows += to->count;
    }
    const fv_status status = fv_gemm_weight_create(weight, from->gemm, num_rows, columns, read_stacked_rows, &stack);
    if (status != FV_OK) return status;
    from->model->weight_bytes += fv_gemm_weight_bytes(*weight);
    for (int32_t i = 0; i < num_parts; i++) {
        const tensor_rows *part = &stack.parts[i];
        if (part->first + part->count == total_rows(part->tensor)) fv_gguf_release_tensor(from->gguf, part->tensor);
    }
    tell_progress(from);
    return FV_OK;
}
