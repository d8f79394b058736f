/* What the files of the forward pass share. */
#ifndef FV_ENGINE_FORWARD_PRIVATE_H
#define FV_ENGINE_FORWARD_PRIVATE_H

#include "engine/forward.h"

/* What the row functions of a step see. */
typedef struct fv_pass {
    fv_forward *forward;
    const fv_forward_step *step;
    const fv_model_layer *layer;
    int32_t index;          /* of the layer */
    int32_t group;          /* of the layer */
    const float *norm;      /* of the residual stream, comes next */
    const float *post_norm; /* of what is added to it before that, or NULL */
    int32_t ffn_size;       /* of what is being computed: a dense part, an expert */
    int32_t expert_begin;   /* in fv_forward_experts.rows: of the expert being computed */
    int64_t num_rows;
    void (*row)(const struct fv_pass *pass, int64_t row);
} fv_pass;

/* Calls `row` for rows [0, num_rows). A few are done sooner than another thread is awake: they stay in this
 * one. */
void fv_pass_for_rows(fv_pass *pass, int64_t num_rows, void (*row)(const fv_pass *pass, int64_t row));

/* y = x W^T, its time counted. */
fv_status fv_pass_multiply(const fv_pass *pass, float *y, const float *x, const fv_gemm_weight *weight,
                           int64_t num_rows);

/* Cosines of a row in a layer group; the sines lie at the same place in fv_forward.sines. */
int64_t fv_pass_angles_at(const fv_pass *pass, int32_t group, int64_t row);

/* Where attention leaves its results, [num_rows, Hq, Dv]. */
fv_tensor fv_pass_attended(const fv_pass *pass, int64_t num_rows);

/* Runs the layer's plan on `tensors`, its time counted; what fv_pass_attended leaves becomes fv_forward.attended. */
fv_status fv_pass_attend(fv_pass *pass, const fv_layer *tensors);

/* out = down(silu(gate(x)) * up(x)) of ffn_size, which is fv_pass.ffn_size. */
fv_status fv_pass_feed_forward(fv_pass *pass, float *out, const float *x, const fv_gemm_weight *gate_up,
                               const fv_gemm_weight *down, int64_t num_rows);

/* MLA (forward_latents.c): `normed` to `attended`. */
fv_status fv_pass_attend_latents(fv_pass *pass);

/* Experts (forward_experts.c): what they make of `normed` is added to `projected`. */
fv_status fv_pass_add_experts(fv_pass *pass);
fv_status fv_forward_experts_init(fv_forward_experts *experts, const fv_model_config *config, int32_t max_tokens);
void fv_forward_experts_deinit(fv_forward_experts *experts); /* takes a zeroed one */

#endif
