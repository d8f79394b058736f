/* Finding the tensors of a layer by name, checking their shapes, handing their rows to the GEMM: for the files
 * that load the parts of a model. */
#ifndef FV_ENGINE_MODEL_LOADER_H
#define FV_ENGINE_MODEL_LOADER_H

#include "engine/model.h"

typedef struct fv_model_loader {
    const fv_gguf *gguf;
    fv_gemm_library *gemm;
    fv_model *model;
    fv_model_progress_fn progress;
    void *progress_user;
    int32_t num_done;
    int32_t num_weights; /* of the whole model */
} fv_model_loader;

/* A tensor "blk.<layer>.<suffix>" of `rows` rows; one of num_matrices such, if that is above 0. */
typedef struct fv_weight_part {
    const char *suffix;
    int64_t rows;
    int32_t matrix;
    int32_t num_matrices;
} fv_weight_part;

/* The tensor "blk.<layer>.<suffix>", or `suffix` itself where layer is negative. FV_ERR_IO where it is missing or
 * has another shape; num_matrices is 1 for the usual one of two dimensions. */
fv_status fv_model_find_tensor(const fv_gguf_tensor **tensor, const fv_model_loader *from, int32_t layer,
                               const char *suffix, int64_t columns, int64_t rows, int64_t num_matrices);

/* Is there a tensor "blk.<layer>.<suffix>"? */
bool fv_model_has_tensor(const fv_model_loader *from, int32_t layer, const char *suffix);

/* All elements of a tensor in fp32, malloc'd. Failures leave *values NULL. */
fv_status fv_model_load_floats(float **values, fv_model_loader *from, const fv_gguf_tensor *tensor);

/* The same of the vector "blk.<layer>.<suffix>", or `suffix` where layer is negative. */
fv_status fv_model_load_vector(float **vector, fv_model_loader *from, int32_t layer, const char *suffix,
                               int32_t length);

/* A weight of the rows of up to three parts, one after the other. */
fv_status fv_model_load_weight(fv_gemm_weight **weight, fv_model_loader *from, int32_t layer, int64_t columns,
                               const fv_weight_part *parts, int32_t num_parts);

/* What MLA has in place of q, k and v, and a layer's experts (model_latents.c). */
fv_status fv_model_load_latents(fv_model_layer *layer, fv_model_loader *from, int32_t index);
fv_status fv_model_load_experts(fv_model_layer *layer, fv_model_loader *from, int32_t index);

#endif
