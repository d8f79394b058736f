/* The shape of a model, from the metadata of its file, all values checked. */
#ifndef FV_ENGINE_MODEL_CONFIG_H
#define FV_ENGINE_MODEL_CONFIG_H

#include "engine/gguf.h"

/* Llama and models alike: RMSNorm before attention and feed-forward, RoPE, GQA, SwiGLU, no biases. */
typedef struct fv_model_config {
    int32_t num_layers;
    int32_t hidden_size;
    int32_t num_heads;    /* Hq */
    int32_t num_kv_heads; /* Hkv, divides num_heads */
    int32_t head_size;    /* D */
    int32_t ffn_size;
    int32_t vocabulary_size;
    int32_t context_length;
    int32_t rope_size; /* elements of a head that are rotated; even, at most head_size */
    float rope_base;
    float rms_epsilon;
} fv_model_config;

/* FV_ERR_UNSUPPORTED: another architecture (the text lists those accepted) or a feature that is not
 * built, with its name. FV_ERR_IO: a value that is missing or makes no sense, with its key. */
fv_status fv_model_config_read(fv_model_config *config, const fv_gguf *gguf);

#endif
