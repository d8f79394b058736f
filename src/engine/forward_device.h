/* The forward pass on a device: as forward.h draws it, with
 *
 *   weights, inputs of GEMMs, queries, keys and values   bf16
 *   residual stream, outputs of GEMMs, router, logits    fp32
 *
 * All of it goes to one stream: GEMMs by fv_device_gemm, attention by plans, MLA by fv_mla_run, and the rest by the
 * device's table of layers (ops/layer_table.h). Nothing is decided, allocated or waited for, so that a pass can
 * be captured. */
#ifndef FV_ENGINE_FORWARD_DEVICE_H
#define FV_ENGINE_FORWARD_DEVICE_H

#include "engine/model_device.h"
#include "fovea/plan.h"

/* Device memory, [T, ...]. bf16 where it is void, else fp32. */
typedef struct fv_device_forward {
    const fv_model *model;
    const fv_device_model *weights;
    fv_device *device;
    void *memory; /* all that follows */
    size_t memory_bytes;
    float *hidden;                       /* [T, hidden] the residual stream */
    void *normed;                        /* [T, hidden] */
    float *normed_f32;                   /* [T, hidden] of models with experts: what the router sees */
    float *qkv;                          /* [T, (Hq + 2 Hkv) D]; not with MLA, as the next */
    void *heads;                         /* the same, normed and rotated */
    void *attended;                      /* [T, Hq D] */
    void *attention;                     /* [T, hidden] what attention adds: fp32, with MLA bf16 */
    float *projected;                    /* [T, hidden] what the feed-forward part adds */
    float *gate_up;                      /* [T, 2 ffn], ffn the largest of a layer and of shared experts */
    void *activated;                     /* [T, ffn] */
    float *route_scratch;                /* [T, 3 experts] */
    int32_t *experts;                    /* [T, used] */
    float *expert_weights;               /* [T, used] */
    float *expert_parts;                 /* [T, used, hidden] */
    float *cosines[FV_MAX_LAYER_GROUPS]; /* [max_position, rope / 2] */
    float *sines[FV_MAX_LAYER_GROUPS];
    int32_t max_position;
    void *logit_hidden; /* [max_logit_rows, hidden] */
    float *logits;      /* [max_logit_rows, vocabulary] */
} fv_device_forward;

/* One pass. The plans have been updated. */
typedef struct fv_device_pass {
    const int32_t *tokens; /* [num_rows], device memory as the next; rows of padding hold any token */
    const int32_t *positions;
    int32_t num_rows;      /* of the step, or of the captured batch */
    fv_plan *const *plans; /* of each layer group */
    void *workspace;
    const fv_kv_view *caches; /* [num_layers] */
    fv_stream stream;
} fv_device_pass;

/* Room for max_tokens rows, and for positions below max_position, whose angles are copied. */
fv_status fv_device_forward_init(fv_device_forward *forward, const fv_model *model, const fv_device_model *weights,
                                 fv_device *device, int32_t max_tokens, int32_t max_position, int32_t max_logit_rows);
void fv_device_forward_deinit(fv_device_forward *forward); /* takes a zeroed one */

/* All layers, but what the last one adds to the residual stream. */
fv_status fv_device_forward_layers(fv_device_forward *forward, const fv_device_pass *pass);

/* After them: logits [num_rows, vocabulary] of `rows` (device memory), or with NULL of the first num_rows. With
 * rows it may be called again. */
fv_status fv_device_forward_logits(fv_device_forward *forward, const int32_t *rows, int32_t num_rows, fv_stream stream);

#endif
