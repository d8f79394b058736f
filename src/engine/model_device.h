/* What a model has on a device beside the weights of GEMMs: the vectors of its layers, the tables of its experts
 * and the angles of RoPE are small, so they lie in one piece of memory. */
#ifndef FV_ENGINE_MODEL_DEVICE_H
#define FV_ENGINE_MODEL_DEVICE_H

#include "engine/model.h"

/* Device pointers; NULL where the model's layer has none. */
typedef struct fv_device_layer {
    const float *attention_norm; /* as in fv_model_layer */
    const float *q_norm;
    const float *k_norm;
    const float *post_attention_norm;
    const float *ffn_norm;
    const float *post_ffn_norm;
    const void *kv_up; /* bf16 */
    const float *router;
    const float *router_bias;
    const void *const *experts_gate_up; /* [experts] */
    const void *const *experts_down;
} fv_device_layer;

typedef struct fv_device_model {
    fv_device *device;
    void *memory;
    size_t memory_bytes;
    fv_device_layer *layers; /* [num_layers], on the host */
    const float *output_norm;
} fv_device_model;

/* Copies them. The model's weights are on `device` already. */
fv_status fv_device_model_init(fv_device_model *on, const fv_model *model, fv_device *device);
void fv_device_model_deinit(fv_device_model *on); /* takes a zeroed one */

#endif
