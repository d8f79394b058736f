/* The weights of a model, in memory in the compute type. Query, key and value projections are one
 * weight, and so are the gate and up projections: fewer, larger GEMMs. */
#ifndef FV_ENGINE_MODEL_H
#define FV_ENGINE_MODEL_H

#include "engine/gemm.h"
#include "engine/model_config.h"

typedef struct fv_model_layer {
    float *attention_norm;            /* [hidden] */
    float *q_norm;                    /* [D], or NULL: as the next; MLA: [q_lora_rank], or NULL */
    float *k_norm;                    /* [D]; MLA: [L] */
    float *post_attention_norm;       /* [hidden], or NULL */
    float *ffn_norm;                  /* [hidden] */
    float *post_ffn_norm;             /* [hidden], or NULL */
    fv_gemm_weight *qkv;              /* [(Hq + 2 Hkv) D, hidden]: rows of q, then k, then v; MLA: of the query's
                                   latent, or q, then of what the cache keeps, L + R */
    fv_gemm_weight *q_up;             /* MLA: [Hq D, q_lora_rank], or NULL */
    float *kv_up;                     /* MLA: [Hq, P + V, L], as in fv_layer */
    fv_gemm_weight *output;           /* [hidden, Hq Dv] */
    fv_gemm_weight *gate_up;          /* [2 ffn, hidden]: rows of gate, then up; NULL where all is done by experts */
    fv_gemm_weight *down;             /* [hidden, ffn] */
    float *router;                    /* [experts, hidden], or NULL: no experts, as all that follows */
    float *router_bias;               /* [experts], or NULL */
    fv_gemm_weight **experts_gate_up; /* [experts] of [2 expert ffn, hidden] */
    fv_gemm_weight **experts_down;    /* [experts] of [hidden, expert ffn] */
} fv_model_layer;

typedef struct fv_model {
    fv_model_config config;
    const fv_gguf_tensor
        *embedding;                 /* [vocabulary, hidden], in the file: a step reads a few rows of it; NULL: random */
    uint64_t embedding_seed;        /* of random ones */
    fv_gemm_weight *embedding_rows; /* on a device: the same there, or NULL: the head's */
    fv_model_layer *layers;         /* [num_layers] */
    float *output_norm;             /* [hidden] */
    fv_gemm_weight *head;           /* [vocabulary, hidden]; of the embedding where the file has no other */
    size_t weight_bytes;
} fv_model;

/* Told after each weight; called from the loading thread. */
typedef void (*fv_model_progress_fn)(void *user, int32_t done, int32_t total);

/* Reads config and weights. Keeps `gguf`; the weights belong to `gemm`, which outlives the model.
 * FV_ERR_IO: a tensor is missing or has another shape than the config says; the text names it. */
fv_status fv_model_load(fv_model **model, const fv_gguf *gguf, fv_gemm_library *gemm, fv_model_progress_fn progress,
                        void *progress_user);
void fv_model_destroy(fv_model *model); /* takes NULL */

/* A model of a named shape without a file: norms of 1, other weights of fv_gemm_weight_create_random.
 * FV_ERR_INVALID: no such shape, with the names that there are. */
fv_status fv_model_create_random(fv_model **model, const char *shape, uint64_t seed, fv_gemm_library *gemm,
                                 fv_model_progress_fn progress, void *progress_user);

/* Names of shapes from index 0; NULL past the last. */
const char *fv_model_random_shape(int32_t index);

/* The config of a shape: FV_ERR_INVALID as above. */
fv_status fv_model_config_of_shape(fv_model_config *config, const char *shape);

/* Bytes of the weights that a step of one token reads on the CPU or on a device, where kv_up is bf16: of experts as
 * many as are used. */
uint64_t fv_model_decode_bytes(const fv_model *model, bool is_on_device);

/* Bytes of all weights in bf16; `has_head`: it is not the embedding. */
uint64_t fv_model_config_bf16_bytes(const fv_model_config *config, bool has_head);

/* Values of the embedding of `token`, which is in the vocabulary, scaled as the model wants: out [hidden]. */
fv_status fv_model_embed(float *out, const fv_model *model, int32_t token);

#endif
