/* The GEMM takes rows in parallel, straight from the mapped file. */
#include "engine/model_loader.h"

#include <stdio.h>
#include <stdlib.h>

#include "core/compiler.h"
#include "engine/dequantize.h"

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
    const fv_gguf_tensor *tensors[FV_GEMM_MAX_PARTS];
    fv_gemm_rows rows[FV_GEMM_MAX_PARTS] = {{0}};
    for (int32_t i = 0; i < num_parts; i++) {
        const fv_weight_part *part = &parts[i];
        const fv_status status = fv_model_find_tensor(&tensors[i], from, layer, part->suffix, columns, part->rows,
                                                      fv_max_i32(part->num_matrices, 1));
        if (status != FV_OK) return status;
        rows[i] = (fv_gemm_rows){row_data(tensors[i], part->matrix * part->rows), tensors[i]->type, part->rows};
    }
    const fv_status status = fv_gemm_weight_create_of_rows(weight, from->gemm, columns, rows, num_parts);
    if (status != FV_OK) return status;
    from->model->weight_bytes += fv_gemm_weight_bytes(*weight);
    for (int32_t i = 0; i < num_parts; i++) {
        if ((parts[i].matrix + 1) * parts[i].rows == total_rows(tensors[i])) {
            fv_gguf_release_tensor(from->gguf, tensors[i]);
        }
    }
    tell_progress(from);
    return FV_OK;
}
