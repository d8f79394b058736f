/* The forward pass for a batch of tokens of several sequences:
 *
 *   embed, (scale)
 *     -> [ norm -> qkv -> (norm of each head) -> RoPE -> attention -> output -> (norm), add
 *       -> norm -> gate, up -> SwiGLU or GeGLU -> down, (experts) -> (norm), add ]
 *     -> norm -> head
 *
 * What is in brackets is for the models whose config has it; MLA has another way from norm to attention
 * (forward_latents.c). Activations are fp32, those around attention bf16 where a session asks for it. Attention is a plan of
 * libfovea for each layer group, on the group's paged cache; everything else is GEMMs and a few loops over
 * rows. */
#ifndef FV_ENGINE_FORWARD_H
#define FV_ENGINE_FORWARD_H

#include "engine/expert_router.h"
#include "engine/gemm_matrices.h"
#include "engine/model.h"
#include "fovea/plan.h"

/* Seconds, summed since creation. */
typedef struct fv_forward_profile {
    double gemm;
    double attention;
} fv_forward_profile;

/* Of models with experts. Float arrays are part of fv_forward.memory. */
typedef struct fv_forward_experts {
    float *logits;           /* [T, experts] of the router, then scores */
    float *scratch;          /* [T, experts] */
    float *gathered;         /* [T, hidden] the tokens of one expert */
    float *out;              /* [T, hidden] what it makes of them */
    fv_expert_route *routes; /* [T, used] */
    int32_t *rows;           /* [T used] places in routes, sorted by expert */
    int32_t *begin;          /* [experts + 1] in rows */
} fv_forward_experts;

/* One user's activations for a model that several may share. */
typedef struct fv_forward {
    const fv_model *model;
    fv_context *context;
    fv_gemm_library *gemm;
    int32_t max_tokens;
    int32_t max_logit_rows;
    float *memory;                          /* all floats that follow */
    float *hidden;                          /* [T, hidden] the residual stream */
    float *normed;                          /* [T, hidden] */
    float *qkv;                             /* [T, (Hq + 2 Hkv) D]; MLA: [T, q_lora_rank + L + R], or Hq D + L + R */
    float *q_latent;                        /* [T, q_lora_rank]: MLA with one */
    float *q;                               /* [T, Hq D]: the same */
    float *attended;                        /* [T, Hq Dv] */
    fv_dtype attention_dtype;               /* of what attention takes and leaves */
    uint16_t *narrow_qkv, *narrow_attended; /* of that; NULL: it is fp32. MLA: [T, Hq D + L + R] */
    fv_gemm_matrices matrices;              /* MLA: for the products that attention asks for */
    float *projected;                       /* [T, hidden] what is added to the residual stream next */
    float *gate_up;      /* [T, 2 ffn], ffn the largest of a layer, of shared experts, and of an expert */
    float *activated;    /* [T, ffn] */
    double *frequencies; /* [groups, rope / 2] */
    float *cosines;      /* [groups, T, rope / 2] */
    float *sines;        /* [groups, T, rope / 2] */
    float *logit_hidden; /* [max_logit_rows, hidden] */
    float *logits;       /* [max_logit_rows, vocabulary] */
    size_t memory_bytes;
    fv_forward_experts experts;
    fv_forward_profile profile;
} fv_forward;

/* One step. The plan of each group has been updated with the step's batch, and its KV writes go to the
 * caches of the group's layers. */
typedef struct fv_forward_step {
    const int32_t *tokens;    /* [T], in the vocabulary */
    const int32_t *positions; /* [T] */
    int32_t num_tokens;       /* T, up to max_tokens */
    fv_plan *plans[FV_MAX_LAYER_GROUPS];
    void *workspace;          /* enough for each of the plans */
    const fv_kv_view *caches; /* [num_layers] */
    bool batch_invariant;
} fv_forward_step;

/* Allocates for steps of max_tokens and max_logit_rows rows of logits. attention_dtype of the plans' queries and outputs: F32,
 * or F16 or BF16 (not for MLA). Keeps the rest. */
fv_status fv_forward_init(fv_forward *forward, const fv_model *model, fv_context *context, fv_gemm_library *gemm,
                          int32_t max_tokens, int32_t max_logit_rows, fv_dtype attention_dtype);
void fv_forward_deinit(fv_forward *forward); /* takes a zeroed one */

/* Runs all layers: leaves hidden [T, hidden], not yet normed. */
fv_status fv_forward_run(fv_forward *forward, const fv_forward_step *step);

/* logits [num_rows, vocabulary] of `rows` of the last step; num_rows up to max_logit_rows. */
fv_status fv_forward_compute_logits(fv_forward *forward, const int32_t *rows, int32_t num_rows, bool batch_invariant);

#endif
