/* The forward pass of llama models for a batch of tokens of several sequences:
 *
 *   embed -> [ norm -> qkv -> RoPE -> attention -> output, add -> norm -> gate, up -> SwiGLU -> down, add ]
 *         -> norm -> head
 *
 * Activations are fp32. Attention is a plan of libfovea on the paged cache; everything else is GEMMs
 * and a few loops over rows. */
#ifndef FV_ENGINE_LLAMA_H
#define FV_ENGINE_LLAMA_H

#include "engine/model.h"
#include "fovea/plan.h"

/* Seconds, summed since creation. */
typedef struct fv_llama_profile {
    double gemm;
    double attention;
} fv_llama_profile;

/* One user's activations for a model that several may share. */
typedef struct fv_llama {
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
    float *cosines;      /* [T, rope / 2] */
    float *sines;        /* [T, rope / 2] */
    float *logit_hidden; /* [max_logit_rows, hidden] */
    float *logits;       /* [max_logit_rows, vocabulary] */
    size_t memory_bytes;
    fv_llama_profile profile;
} fv_llama;

/* One step. The plan has been updated with the step's batch, and its KV writes go to `caches`. */
typedef struct fv_llama_step {
    const int32_t *tokens;    /* [T], in the vocabulary */
    const int32_t *positions; /* [T] */
    int32_t num_tokens;       /* T, up to max_tokens */
    fv_plan *plan;
    void *workspace;
    const fv_kv_view *caches; /* [num_layers] */
    bool batch_invariant;
} fv_llama_step;

/* Allocates for steps of max_tokens and max_logit_rows rows of logits. Keeps the rest. */
fv_status fv_llama_init(fv_llama *llama, const fv_model *model, fv_context *context, fv_gemm *gemm, int32_t max_tokens,
                        int32_t max_logit_rows);
void fv_llama_deinit(fv_llama *llama); /* takes a zeroed one */

/* Runs all layers: leaves hidden [T, hidden], not yet normed. */
fv_status fv_llama_forward(fv_llama *llama, const fv_llama_step *step);

/* logits [num_rows, vocabulary] of `rows` of the last step; num_rows up to max_logit_rows. */
fv_status fv_llama_compute_logits(fv_llama *llama, const int32_t *rows, int32_t num_rows, bool batch_invariant);

#endif
