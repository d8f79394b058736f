/* Laid out twice: first to learn the size, then into an image on the host that is copied in one go. */
#include "engine/model_device.h"

#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "core/float.h"

enum { alignment = 256 };

typedef struct model_image {
    const uint8_t *device; /* where it will lie; NULL: only sizes are wanted */
    uint8_t *host;
    size_t bytes;
} model_image;

/* Takes room; *at is where on the host to fill it, NULL in the first round. Returns its place on the device. */
static const void *take(uint8_t **at, model_image *image, size_t bytes)
{
    const size_t offset = image->bytes;
    image->bytes += (size_t)fv_round_up((int64_t)bytes, alignment);
    *at = image->host ? image->host + offset : NULL;
    return image->device ? image->device + offset : NULL;
}

static const float *put_floats(model_image *image, const float *values, int64_t count)
{
    if (!values || count == 0) return NULL;
    uint8_t *at;
    const void *place = take(&at, image, (size_t)count * sizeof(*values));
    if (at) memcpy(at, values, (size_t)count * sizeof(*values));
    return place;
}

static const void *put_bf16(model_image *image, const float *values, int64_t count)
{
    if (!values) return NULL;
    uint8_t *at;
    const void *place = take(&at, image, (size_t)count * sizeof(uint16_t));
    for (int64_t i = 0; at && i < count; i++) {
        const uint16_t value = fv_bf16_of_f32(values[i]);
        memcpy(at + (size_t)i * sizeof(value), &value, sizeof(value));
    }
    return place;
}

static const void *const *put_weights(model_image *image, fv_gemm_weight *const *weights, int32_t count)
{
    if (!weights) return NULL;
    uint8_t *at;
    const void *place = take(&at, image, (size_t)count * sizeof(void *));
    for (int32_t i = 0; at && i < count; i++) {
        const void *data = fv_gemm_weight_data(weights[i]);
        memcpy(at + (size_t)i * sizeof(data), &data, sizeof(data));
    }
    return place;
}

static fv_device_layer put_layer(model_image *image, const fv_model_layer *layer, const fv_model_config *config)
{
    const bool is_mla = config->attention == FV_ATTENTION_MLA;
    const fv_mla_shape *mla = &config->mla;
    const int64_t hidden = config->hidden_size, num_experts = config->experts.num_experts;
    return (fv_device_layer){
        .attention_norm = put_floats(image, layer->attention_norm, hidden),
        .q_norm = put_floats(image, layer->q_norm, is_mla ? config->q_lora_rank : config->head_size),
        .k_norm = put_floats(image, layer->k_norm, is_mla ? mla->kv_lora_rank : config->head_size),
        .post_attention_norm = put_floats(image, layer->post_attention_norm, hidden),
        .ffn_norm = put_floats(image, layer->ffn_norm, hidden),
        .post_ffn_norm = put_floats(image, layer->post_ffn_norm, hidden),
        .kv_up = put_bf16(image, layer->kv_up,
                          (int64_t)mla->num_heads * (mla->qk_nope_head_dim + mla->v_head_dim) * mla->kv_lora_rank),
        .router = put_floats(image, layer->router, num_experts * hidden),
        .router_bias = put_floats(image, layer->router_bias, num_experts),
        .experts_gate_up = put_weights(image, layer->experts_gate_up, config->experts.num_experts),
        .experts_down = put_weights(image, layer->experts_down, config->experts.num_experts),
    };
}

static void lay_out(fv_device_model *on, model_image *image, const fv_model *model)
{
    on->output_norm = put_floats(image, model->output_norm, model->config.hidden_size);
    for (int32_t i = 0; i < model->config.num_layers; i++) {
        on->layers[i] = put_layer(image, &model->layers[i], &model->config);
    }
}

fv_status fv_device_model_init(fv_device_model *on, const fv_model *model, fv_device *device)
{
    *on = (fv_device_model){.device = device};
    model_image sizes = {0};
    on->layers = calloc((size_t)model->config.num_layers, sizeof(*on->layers));
    if (!on->layers) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d layers", model->config.num_layers);
    lay_out(on, &sizes, model);
    on->memory_bytes = sizes.bytes;
    model_image image = {.host = calloc(1, sizes.bytes)};
    fv_status status = image.host ? fv_device_alloc(&on->memory, device, sizes.bytes)
                                  : fv_fail(FV_ERR_NO_MEMORY, "no memory for %zu bytes of weights", sizes.bytes);
    if (status == FV_OK) {
        image.device = on->memory;
        lay_out(on, &image, model);
        status = fv_device_copy_in(device, on->memory, image.host, image.bytes, NULL);
        if (status == FV_OK) status = fv_stream_synchronize(device, NULL);
    }
    free(image.host);
    if (status != FV_OK) fv_device_model_deinit(on);
    return status;
}

void fv_device_model_deinit(fv_device_model *on)
{
    if (on->device) fv_device_free(on->device, on->memory);
    free(on->layers);
    memset(on, 0, sizeof(*on));
}
