/* Multi-head latent attention as a layer of DeepSeek-V2 and V3 has it, from the normed hidden state to the
 * sum with the residual, on top of a plan:
 *
 *   x [N] --q_down--> [Lq] --q_norm--> --q_up--> q [H, P + R] --rotate R--+
 *   x [N] --kv_down-> [L + R] --kv_norm L, rotate R--> cache -------------+--> fv_plan_run --> [H, V] --o--> out [N]
 *
 * Without q_down q_up takes x itself, as in DeepSeek-V2-Lite. The plan absorbs kv_up into queries and outputs
 * or expands cached latents with it. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C; norms
 * of the latents: section 3.1.2.
 *
 * N is the hidden size, Lq = q_lora_rank; H, L, R, P, V are num_heads, kv_lora_rank, qk_rope_head_dim,
 * qk_nope_head_dim, v_head_dim of the plan's fv_mla_shape. */
#ifndef FOVEA_MLA_H
#define FOVEA_MLA_H

#include "fovea/ops.h"
#include "fovea/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The tensors of one layer. Their last dimension is dense, other strides are free. Weights have the dtypes
 * that the caller's GEMM takes; of a linear layer, row i makes output i. T' >= T rows, those past T are
 * padding and are left untouched; under a static grid on a device they are multiplied as well. Tokens of no
 * sequence (fv_batch) always are: their rows of `out` have values of no meaning. */
typedef struct fv_mla_layer {
    uint32_t struct_size; /* sizeof(fv_mla_layer) */
    float rms_epsilon;    /* of both norms, 0 or more */
    fv_tensor x;          /* [T', N], q_dtype of the problem */
    fv_tensor out;        /* [T', N], out_dtype of the problem; overlaps nothing */
    fv_kv_view kv_cache;
    fv_tensor q_down;     /* [Lq, N]; data NULL: none */
    fv_tensor q_norm;     /* [Lq], fp32, fp16 or bf16; data NULL: no norm. Only with q_down */
    fv_tensor q_up;       /* [H (P + R), Lq], or [H (P + R), N]: of each head the P plain outputs, then the R rotated */
    fv_tensor kv_down;    /* [L + R, N]: the latent, then the rotated key part. Where its rows follow those of q_down in
                           * memory, and Lq is a multiple of 256 bytes, one product makes both */
    fv_tensor kv_norm;    /* [L], as q_norm */
    fv_tensor kv_up;      /* [H, P + V, L]: fv_layer.kv_up */
    fv_tensor o;          /* [N, H V] */
    fv_rotation rotation; /* rope_dim = R, a position for each token. Where the problem rotates at reading, keys stay
                           * unrotated in the cache and the tables rotate them there: style half, dense rows, as many
                           * as the plan's max_seq_len. Not looked at where R is 0 */
    const float *k_scale; /* [1], fv_layer.k_scale */
    fv_gemm_fn gemm;      /* multiplies with all weights */
    void *gemm_user;      /* its first argument */
    fv_tensor attended;   /* [T', H, V], out_dtype of the problem; given with lse [T', H], fp32, the run ends there: */
    fv_tensor lse;        /* `out` and `o` are not looked at. The problem returns_lse. Data NULL: not given */
} fv_mla_layer;

/* Device memory that a run needs: the plan's own workspace, and what lies between the products, for
 * max_num_tokens of the plan's bounds. 256-byte aligned. q_lora_rank 0: no q_down. plan NULL: 0. */
FV_API size_t fv_mla_workspace_bytes(const fv_plan *plan, int32_t q_lora_rank);

/* One layer over the batch of the plan's last update. Decides, allocates and synchronises nothing.
 *
 * A rank of a context-parallel group gives `attended` and `lse`: all ranks get the same x and run the same
 * tokens, each writes and attends the keys that are its own, the caller merges what they attended
 * (fv_merge_ranks) and multiplies by `o` once. An out_dtype of fp32 keeps what a rank attended unrounded.
 *
 * FV_ERR_INVALID: a tensor of wrong shape, a plan whose problem is no MLA or comes absorbed, or one rank of
 * a context-parallel group without attended and lse. FV_ERR_UNSUPPORTED: the device has no rope_kv_write or no rms_norm
 * and the layer needs it. */
FV_API fv_status fv_mla_run(fv_plan *plan, const fv_mla_layer *layer, void *workspace, fv_stream stream);

#ifdef __cplusplus
}
#endif
#endif
