/* The forward pass for a batch of tokens of several sequences:
 *
 *   embed, (scale)
 *     -> [ norm -> qkv -> (norm of each head) -> RoPE -> attention -> output -> (norm), add
 *       -> norm -> gate, up -> SwiGLU or GeGLU -> down -> (norm), add ]
 *     -> norm -> head
 *
 * What is in brackets is for the models whose config has it. Activations are fp32. Attention is a plan of
 * libfovea for each layer group, on the group's paged cache; everything else is GEMMs and a few loops over
 * rows. */
#ifndef FV_ENGINE_FORWARD_H
#define FV_ENGINE_FORWARD_H

#include "engine/model.h"
#include "fovea/plan.h"

/* Seconds, summed since creation. */
typedef struct fv_forward_profile {
    double gemm;
    double attention;
} fv_forward_profile;

/* One user's activations for a model that several may share. */
typedef struct fv_forward {
    const fv_model *model;
    fv_context *context;
    fv_gemm *gemm;
    int32_t max_tokens;
    int32_t max_logit_rows;
    float *memory;       /* all that follows */
    float *hidden;       /* [T, hidden] the residual stream */
    float *normed;       /* [T, hidden] */
    float *qkv;          /* [T, (Hq + 2 Hkv) D] */
    float *attended;     /* [T, Hq D] */
    float *projected;    /* [T, hidden] what is added to the residual stream next */
    float *gate_up;      /* [T, 2 ffn] */
    float *activated;    /* [T, ffn] */
    float *cosines;      /* [groups, T, rope / 2] */
    float *sines;        /* [groups, T, rope / 2] */
    float *logit_hidden; /* [max_logit_rows, hidden] */
    float *logits;       /* [max_logit_rows, vocabulary] */
    size_t memory_bytes;
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

/* Allocates for steps of max_tokens and max_logit_rows rows of logits. Keeps the rest. */
fv_status fv_forward_init(fv_forward *forward, const fv_model *model, fv_context *context, fv_gemm *gemm,
                          int32_t max_tokens, int32_t max_logit_rows);
void fv_forward_deinit(fv_forward *forward); /* takes a zeroed one */

/* Runs all layers: leaves hidden [T, hidden], not yet normed. */
fv_status fv_forward_run(fv_forward *forward, const fv_forward_step *step);

/* logits [num_rows, vocabulary] of `rows` of the last step; num_rows up to max_logit_rows. */
fv_status fv_forward_compute_logits(fv_forward *forward, const int32_t *rows, int32_t num_rows, bool batch_invariant);

#endif
