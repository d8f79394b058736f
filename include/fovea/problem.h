/* The problem: what stays fixed for a layer group, that is for layers with the same shapes, window
 * and block table. Which backend and kernel serve it is the plan's business. */
#ifndef FOVEA_PROBLEM_H
#define FOVEA_PROBLEM_H

#include "fovea/view.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fv_attention_kind {
    FV_ATTENTION_MHA = 1, /* MHA, GQA and MQA */
    FV_ATTENTION_MLA = 2, /* multi-head latent attention */
} fv_attention_kind;

typedef enum fv_attention_type {
    FV_ATTENTION_DECODER = 0,
    FV_ATTENTION_ENCODER = 1, /* encoder or encoder-only: dense, no cache, not causal */
    FV_ATTENTION_CROSS = 2,
} fv_attention_type;

typedef enum fv_kv_scaling {
    FV_KV_SCALING_NONE = 0,
    FV_KV_SCALING_PER_TENSOR = 1,     /* fv_layer.k_scale, v_scale: [1] */
    FV_KV_SCALING_PER_HEAD = 2,       /* fv_layer.k_scale, v_scale: [Hkv] */
    FV_KV_SCALING_PER_TOKEN_HEAD = 3, /* fv_kv_view.k_scales, v_scales; kv_dtype int8, fp8_e4m3 or fp8_e5m2 */
} fv_kv_scaling;

typedef enum fv_alibi {
    FV_ALIBI_NONE = 0,
    FV_ALIBI_LINEAR = 1, /* score + slope * (key position - query position) */
    FV_ALIBI_SQRT = 2,   /* score - slope * sqrt(query position - key position), 0 for later keys */
} fv_alibi;

/* Shape of MHA, GQA, MQA. */
typedef struct fv_mha_shape {
    int32_t num_heads;    /* Hq, a multiple of num_kv_heads */
    int32_t num_kv_heads; /* Hkv */
    int32_t head_size;    /* D of Q and K: 32 (ROCM_ATTN 16) to 512 in steps of 8; x_packed, shuffled: of 16 bytes */
    int32_t v_head_size;  /* of V and the output; 0 = head_size */
} fv_mha_shape;

/* Shape of MLA: DeepSeek-V2 (arXiv 2405.04434), section 2.1; the values of DeepSeek-V3 beside. */
typedef struct fv_mla_shape {
    int32_t num_heads;         /* 128 */
    int32_t kv_lora_rank;      /* 512 */
    int32_t qk_rope_head_dim;  /* 64 */
    int32_t qk_nope_head_dim;  /* 128 */
    int32_t v_head_dim;        /* 128 */
    int32_t rotate_at_reading; /* 1: keys lie unrotated in the cache; fv_layer.rope_cos, rope_sin rotate them */
    int32_t absorbed; /* 1: q comes with W_UK folded in, [T', H, kv_lora_rank + rope], and the output leaves before
                       * W_UV, [T', H, kv_lora_rank]; all queries attend latents, no weights are needed */
} fv_mla_shape;

/* Context parallelism: the keys of a sequence are dealt out to `world` ranks in runs of `interleave`
 * tokens; key position p lives on rank (p / interleave) % world. seq_lens stay global. */
typedef struct fv_context_parallel {
    int32_t world; /* 0 or 1 = none */
    int32_t rank;
    int32_t interleave; /* 0 = 1 */
} fv_context_parallel;

/* Zero means "none" or the default in every field but kind, shape, q_dtype and block_size. */
typedef struct fv_problem {
    uint32_t struct_size; /* sizeof(fv_problem) */
    fv_attention_kind kind;
    fv_attention_type type;
    fv_mha_shape mha; /* kind == FV_ATTENTION_MHA; of MLA fv_problem_normalize fills in the shape over latents */
    fv_mla_shape mla; /* kind == FV_ATTENTION_MLA */
    fv_dtype q_dtype;
    fv_dtype kv_dtype;  /* of the cache; NONE = q_dtype */
    fv_dtype out_dtype; /* NONE = q_dtype */
    fv_kv_layout kv_layout;
    int32_t kv_layout_any; /* 1: take the layout that the chosen backend wants (fv_plan_kv_layout) */
    int32_t block_size;
    float scale;         /* of the scores; 0 = 1 / sqrt(head_size), MLA: 1 / sqrt(nope + rope) */
    float soft_cap;      /* 0 = none; else cap * tanh(score / cap) */
    int32_t window;      /* 0 = none; else a query sees its own key, window - 1 before it and, not causal, behind it */
    int32_t not_causal;  /* 1: batches may carry fv_batch.causal flags that are 0 */
    fv_alibi alibi;      /* slopes in fv_layer */
    int32_t sinks;       /* 1: fv_layer.sinks is used; 0 of a rank (context_parallel): fv_merge_ranks takes them */
    int32_t returns_lse; /* 1: fv_layer.lse may be given */
    int32_t tree_mask;   /* 1: fv_batch.tree_mask is used */
    fv_kv_scaling kv_scaling;
    fv_context_parallel context_parallel;
} fv_problem;

/* Checks what can be checked without a backend and fills in the defaults. FV_ERR_INVALID names the
 * field, its value and what is accepted. */
FV_API fv_status fv_problem_normalize(fv_problem *normal, const fv_problem *problem);

#ifdef __cplusplus
}
#endif
#endif
