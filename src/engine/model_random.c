/* Models without a file, for measuring: the shapes of llama models. Every weight has a stream of random numbers of
 * its own, so that CPU and GPU have the same ones. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "engine/model.h"

typedef struct random_shape {
    const char *name;
    int32_t num_layers, hidden_size, num_heads, num_kv_heads, head_size, ffn_size, vocabulary_size, context_length;
    float rope_base;
} random_shape;

static const random_shape shapes[] = {
    {"tiny", 2, 64, 4, 2, 32, 128, 512, 2048, 10000.0f},
    {"llama-8b", 32, 4096, 32, 8, 128, 14336, 128256, 131072, 500000.0f}, /* Llama-3.1-8B */
};

const char *fv_model_random_shape(int32_t index)
{
    return index >= 0 && index < FV_ARRAY_LEN(shapes) ? shapes[index].name : NULL;
}

fv_status fv_model_config_of_shape(fv_model_config *config, const char *name)
{
    char accepted[128] = "";
    for (int32_t i = 0; i < FV_ARRAY_LEN(shapes); i++) {
        const random_shape *shape = &shapes[i];
        const size_t used = strlen(accepted);
        snprintf(accepted + used, sizeof(accepted) - used, "%s%s", i > 0 ? ", " : "", shape->name);
        if (strcmp(shape->name, name) != 0) continue;
        *config = (fv_model_config){
            .architecture = "llama",
            .num_layers = shape->num_layers,
            .hidden_size = shape->hidden_size,
            .num_heads = shape->num_heads,
            .num_kv_heads = shape->num_kv_heads,
            .head_size = shape->head_size,
            .ffn_size = shape->ffn_size,
            .vocabulary_size = shape->vocabulary_size,
            .context_length = shape->context_length,
            .rope_size = shape->head_size,
            .rms_epsilon = 1e-5f,
            .embedding_scale = 1.0f,
            .attention_scale = 1.0f / sqrtf((float)shape->head_size),
            .attention = FV_ATTENTION_MHA,
            .full_every = 1,
            .num_groups = 1,
            .groups = {{.num_layers = shape->num_layers,
                        .rope = {.base = shape->rope_base, .factor = 1.0f, .magnitude = 1.0f}}},
        };
        return FV_OK;
    }
    return fv_fail(FV_ERR_INVALID, "random weights of shape '%s'; accepted: %s", name, accepted);
}

typedef struct random_maker {
    fv_model *model;
    fv_gemm_library *gemm;
    uint64_t seed;
    int32_t num_done, num_weights;
    fv_model_progress_fn progress;
    void *progress_user;
} random_maker;

/* The stream of the next weight. */
static uint64_t next_stream(const random_maker *maker)
{
    return (maker->seed + 1) * 0xd1342543de82ef95u + (uint64_t)maker->num_done * 0xaf251af3b0f025b5u;
}

static fv_status make_weight(fv_gemm_weight **weight, random_maker *maker, int64_t rows, int64_t columns)
{
    const fv_status status = fv_gemm_weight_create_random(weight, maker->gemm, rows, columns, next_stream(maker));
    if (status != FV_OK) return status;
    maker->model->weight_bytes += fv_gemm_weight_bytes(*weight);
    maker->num_done++;
    if (maker->progress) maker->progress(maker->progress_user, maker->num_done, maker->num_weights);
    return FV_OK;
}

static fv_status make_ones(float **vector, int32_t size)
{
    *vector = malloc((size_t)size * sizeof(float));
    if (!*vector) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a norm");
    for (int32_t i = 0; i < size; i++) (*vector)[i] = 1.0f;
    return FV_OK;
}

static fv_status make_layer(fv_model_layer *layer, random_maker *maker)
{
    const fv_model_config *config = &maker->model->config;
    const int64_t hidden = config->hidden_size, q_size = (int64_t)config->num_heads * config->head_size;
    const int64_t kv_size = (int64_t)config->num_kv_heads * config->head_size;
    fv_status status = make_ones(&layer->attention_norm, config->hidden_size);
    if (status == FV_OK) status = make_ones(&layer->ffn_norm, config->hidden_size);
    if (status == FV_OK) status = make_weight(&layer->qkv, maker, q_size + 2 * kv_size, hidden);
    if (status == FV_OK) status = make_weight(&layer->output, maker, hidden, q_size);
    if (status == FV_OK) status = make_weight(&layer->gate_up, maker, 2 * (int64_t)config->ffn_size, hidden);
    return status == FV_OK ? make_weight(&layer->down, maker, hidden, config->ffn_size) : status;
}

static fv_status make_model(random_maker *maker)
{
    fv_model *model = maker->model;
    const fv_model_config *config = &model->config;
    model->layers = calloc((size_t)config->num_layers, sizeof(*model->layers));
    if (!model->layers) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d layers", config->num_layers);
    fv_status status = make_ones(&model->output_norm, config->hidden_size);
    for (int32_t i = 0; i < config->num_layers && status == FV_OK; i++) status = make_layer(&model->layers[i], maker);
    if (status == FV_OK) status = make_weight(&model->head, maker, config->vocabulary_size, config->hidden_size);
    model->embedding_seed = next_stream(maker);
    if (status != FV_OK || !fv_gemm_is_on_device(maker->gemm)) return status;
    return make_weight(&model->embedding_rows, maker, config->vocabulary_size, config->hidden_size);
}

fv_status fv_model_create_random(fv_model **model, const char *shape, uint64_t seed, fv_gemm_library *gemm,
                                 fv_model_progress_fn progress, void *progress_user)
{
    *model = NULL;
    fv_model *made = calloc(1, sizeof(*made));
    if (!made) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a model");
    fv_status status = fv_model_config_of_shape(&made->config, shape);
    if (status == FV_OK) {
        random_maker maker = {
            .model = made,
            .gemm = gemm,
            .seed = seed,
            .num_weights = 4 * made->config.num_layers + (fv_gemm_is_on_device(gemm) ? 2 : 1),
            .progress = progress,
            .progress_user = progress_user,
        };
        status = make_model(&maker);
    }
    if (status != FV_OK) {
        fv_model_destroy(made);
        return status;
    }
    *model = made;
    return FV_OK;
}
