/* The shape of a model, from the metadata of its file, all values checked.
 *
 * One forward pass serves all (forward.h); what models do differently is said here. Three architectures
 * are known:
 *
 *                  llama                  gemma3                             deepseek2
 *   norms          before attention, ffn  also after both, and of each head  also of both latents
 *                                         of q and k
 *   ffn            SwiGLU                 GeGLU                              SwiGLU; experts in later layers
 *   embedding      as it is               times sqrt(hidden size)            as it is
 *   RoPE           neighbours             halves (i, i + rope / 2), another  neighbours, of a part of each
 *                  (2i, 2i + 1)           base in sliding layers             head; YaRN
 *   attention      full                   a window, full in every sixth      full, MLA
 *                                         layer
 *
 * deepseek2 is the name that files have for DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv
 * 2412.19437) alike. */
#ifndef FV_ENGINE_MODEL_CONFIG_H
#define FV_ENGINE_MODEL_CONFIG_H

#include "engine/gguf.h"
#include "engine/rope_frequencies.h"
#include "fovea/engine.h"
#include "fovea/problem.h"

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
    fv_rope_scaling rope;
} fv_layer_group;

/* What the router's logits become. The values are those of the file. */
typedef enum fv_gating {
    FV_GATING_SOFTMAX = 1, /* DeepSeek-V2; a group is as good as its best expert */
    FV_GATING_SIGMOID = 2, /* DeepSeek-V3; a group is as good as its two best experts together */
} fv_gating;

enum { FV_MAX_EXPERT_GROUPS = 64 };

/* The feed-forward part of layers from first_layer on: of num_experts small ones num_used for each token,
 * chosen by a router, and num_shared for all tokens. */
typedef struct fv_expert_config {
    int32_t num_experts; /* 0: all layers are dense */
    int32_t num_used;
    int32_t num_shared;
    int32_t ffn_size; /* of one expert */
    int32_t first_layer;
    int32_t num_groups; /* of equal size, one after the other; 1 = none */
    int32_t num_used_groups;
    fv_gating gating;
    bool normalises; /* the weights of a token's experts add up to 1 before they are scaled */
    float weights_scale;
} fv_expert_config;

typedef struct fv_model_config {
    const char *architecture;
    int32_t num_layers;
    int32_t hidden_size;
    int32_t num_heads;    /* Hq */
    int32_t num_kv_heads; /* Hkv, divides num_heads; MLA: 1, of latents */
    int32_t head_size;    /* D; MLA: of queries and of keys made of latents */
    int32_t ffn_size;
    int32_t vocabulary_size;
    int32_t context_length;
    int32_t rope_size; /* elements of a head that are rotated; even, at most head_size */
    fv_rope_pairs rope_pairs;
    float rms_epsilon;
    float embedding_scale;
    float attention_scale;
    fv_activation activation;
    fv_attention_kind attention;
    fv_mla_shape mla;    /* of MLA */
    int32_t q_lora_rank; /* MLA: queries are made of latents of this size; 0 = of the hidden state */
    fv_expert_config experts;
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

/* Elements of a token and KV head in the cache's K, and of an output head of attention. */
int32_t fv_model_config_cache_head_size(const fv_model_config *config);
int32_t fv_model_config_v_head_size(const fv_model_config *config);

/* Has the layer a router, and experts beside the dense part? */
bool fv_model_config_has_experts(const fv_model_config *config, int32_t layer);

/* Size of the feed-forward part that all tokens of the layer take: dense, or of all shared experts; may
 * be 0. */
int32_t fv_model_config_ffn_size(const fv_model_config *config, int32_t layer);

#endif
