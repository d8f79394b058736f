/* The shape of a model, from the metadata of its file, all values checked.
 *
 * One forward pass serves all (forward.h); what models do differently is said here. Two architectures
 * are known:
 *
 *                  llama                         gemma3
 *   norms          before attention and ffn      also after both, and of each head of q and k
 *   ffn            SwiGLU                        GeGLU
 *   embedding      as it is                      times sqrt(hidden size)
 *   RoPE           neighbours (2i, 2i + 1)       halves (i, i + rope / 2), another base in sliding layers
 *   attention      full                          a window, full in every sixth layer */
#ifndef FV_ENGINE_MODEL_CONFIG_H
#define FV_ENGINE_MODEL_CONFIG_H

#include "engine/gguf.h"
#include "fovea/engine.h"

typedef enum fv_activation {
    FV_ACTIVATION_SILU = 0,
    FV_ACTIVATION_GELU, /* with tanh */
} fv_activation;

/* Which two elements of a head turn together. */
typedef enum fv_rope_pairs {
    FV_ROPE_NEIGHBOURS = 0, /* (2i, 2i + 1) */
    FV_ROPE_HALVES,         /* (i, i + rope_size / 2) */
} fv_rope_pairs;

/* Layers that share a problem, a plan, a block table and the angles of RoPE. */
typedef struct fv_layer_group {
    int32_t num_layers;
    int32_t window; /* keys that a query sees, its own included; 0 = all */
    float rope_base;
    float rope_scale; /* positions are divided by it */
} fv_layer_group;

typedef struct fv_model_config {
    const char *architecture;
    int32_t num_layers;
    int32_t hidden_size;
    int32_t num_heads;    /* Hq */
    int32_t num_kv_heads; /* Hkv, divides num_heads */
    int32_t head_size;    /* D */
    int32_t ffn_size;
    int32_t vocabulary_size;
    int32_t context_length;
    int32_t rope_size; /* elements of a head that are rotated; even, at most head_size */
    fv_rope_pairs rope_pairs;
    float rms_epsilon;
    float embedding_scale;
    float attention_scale;
    fv_activation activation;
    bool has_qk_norms;   /* of each head of q and k, before RoPE */
    bool has_post_norms; /* of what attention and feed-forward add */
    int32_t full_every;  /* two groups: layers full_every - 1, 2 full_every - 1, ... are of group 0 */
    int32_t num_groups;
    fv_layer_group groups[FV_MAX_LAYER_GROUPS]; /* full layers come first */
} fv_model_config;

/* FV_ERR_UNSUPPORTED: another architecture (the text lists those accepted) or a feature that is not
 * built, with its name. FV_ERR_IO: a value that is missing or makes no sense, with its key. */
fv_status fv_model_config_read(fv_model_config *config, const fv_gguf *gguf);

/* The group that a layer belongs to. */
int32_t fv_model_config_group_of(const fv_model_config *config, int32_t layer);

#endif
