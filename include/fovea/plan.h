/* The plan: how a problem is solved. problem -> plan -> update (each step) -> run (each layer).
 *
 *   fv_plan_create   once for each layer group and set of bounds; chooses; may allocate
 *   fv_plan_update   once a step; fills the plan's buffers; valid between launches of a captured graph
 *   fv_plan_run      once a layer; decides nothing, allocates nothing, synchronises nothing
 *
 * A plan may be used by one thread at a time, its runs and its graphs on one stream after the other; several plans may share a
 * workspace on one stream. */
#ifndef FOVEA_PLAN_H
#define FOVEA_PLAN_H

#include "fovea/batch.h"
#include "fovea/device.h"
#include "fovea/gemm.h"
#include "fovea/problem.h"
#include "fovea/view.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The largest step that a plan has to take. All but max_query_len must be at least 1. */
typedef struct fv_bounds {
    uint32_t struct_size; /* sizeof(fv_bounds) */
    int32_t max_num_seqs;
    int32_t max_num_tokens;
    int32_t max_query_len; /* 0 = max_num_tokens */
    int32_t max_seq_len;
} fv_bounds;

typedef enum fv_softmax_path {
    FV_PATH_AUTO = 0,
    FV_PATH_2D = 1, /* a Q block sees all its keys in one go */
    FV_PATH_3D = 2, /* keys cut into segments, then a reduction */
} fv_softmax_path;

/* Cascade attention: sequences that follow each other in a batch and share their first blocks have those
 * keys read once for all of them. */
typedef enum fv_cascade {
    FV_CASCADE_AUTO = 0, /* where it saves more than the merge costs */
    FV_CASCADE_OFF = 1,
    FV_CASCADE_ALWAYS = 2, /* wherever two sequences share a block: for tests */
} fv_cascade;

/* Zero means default in every field. */
typedef struct fv_plan_options {
    uint32_t struct_size;       /* sizeof(fv_plan_options) */
    fv_device *device;          /* of the plan's context; NULL = the CPU */
    const char *backend;        /* a name of fv_backend_name; NULL or "auto" = the first that can */
    int32_t batch_invariant;    /* 1: a row's bits do not depend on what else is in the batch; not ROCM_AITER_FA */
    int32_t static_grid;        /* 1: schedule from bounds only, as under a captured graph */
    fv_softmax_path path;       /* what the planner would choose, fixed: for tests and benchmarks */
    int32_t segment_keys;       /* with FV_PATH_3D or batch_invariant; 0 = the planner's choice */
    const char *variant;        /* name of a variant of attend_paged; NULL = the planner's choice */
    const char *kernels;        /* name of a kernel table, e.g. "reference", "portable"; NULL = the device's best */
    fv_cascade cascade;         /* not with batch_invariant or static_grid; needs the block table on the host */
    int32_t decode_threshold;   /* longest query that is decode where a backend tells it apart; 0 = what 16 rows hold,
                                 * MLA: where absorbed and expanded cost the same */
    size_t max_workspace_bytes; /* 0 = the planner's choice. Less leads to more chunks and fewer segments */
    /* 1: as static_grid, for a captured graph too, but each update brings the lengths on the host, and the work is cut and
     * dealt out by them, in a list as long as any within the bounds. For decoders on a device all of whose steps decode:
     * bounds.max_query_len 1 (0 is max_num_tokens) or such that its rows, with the query heads of a KV head, are 16 at
     * most; of MLA up to decode_threshold. Not with batch_invariant or a path other than auto. Elsewhere as static_grid, on
     * the CPU as neither; fv_plan_describe says which. An update without host_query_start and host_seq_lens, and host_causal
     * where causal is given, is FV_ERR_INVALID. */
    int32_t static_list;
} fv_plan_options;

typedef struct fv_plan fv_plan;

/* Chooses backend, kernels and grid for `problem` within `bounds`; the choice never changes after. *plan is NULL where it
 * fails.
 * FV_ERR_UNSUPPORTED: no backend can, or the named backend or variant cannot; the text lists the reasons. FV_ERR_INVALID: bounds,
 * options or a problem that none could take, a backend, variant or table that does not exist. */
FV_API fv_status fv_plan_create(fv_plan **plan, fv_context *context, const fv_problem *problem, const fv_bounds *bounds,
                                const fv_plan_options *options);
FV_API void fv_plan_destroy(fv_plan *plan); /* takes NULL */

/* What follows takes NULL, too, a plan that could not be made: 0 bytes, FV_KV_LAYOUT_STRIDED, key 0 and "no plan". */

/* Device memory that a run needs beside its tensors, 256-byte aligned. The caller brings it; one for
 * each stream is enough for all plans: take the largest. */
FV_API size_t fv_plan_workspace_bytes(const fv_plan *plan);

/* Bytes that the plan itself holds, on the host and on the device: work items, staging. */
FV_API size_t fv_plan_buffer_bytes(const fv_plan *plan);

/* The cache layout that the chosen backend reads and writes. */
FV_API fv_kv_layout fv_plan_kv_layout(const fv_plan *plan);

/* Which captured graph fits: equal keys = same functions, grid and pointers. No other plan of the process has a key
 * of this one, nor has one made when it is gone. A plan with static_grid or static_list keeps its key as long as the
 * batch's arrays stay where they are and block_table_stride and block_table_width what they are. */
FV_API uint64_t fv_plan_graph_key(const fv_plan *plan);

/* One line: backend, kernels, tile sizes, path, the rule that chose, and the last update's schedule.
 * Valid until the next update. */
FV_API const char *fv_plan_describe(fv_plan *plan);

/* Fills the plan's buffers for this step. The batch's arrays are borrowed until the step's last run
 * has passed the stream. FV_NEEDS_PLAN: outside the bounds. Same batch, same schedule. FV_ERR_INVALID while `stream` is
 * captured: a graph has no update in it. */
FV_API fv_status fv_plan_update(fv_plan *plan, const fv_batch *batch, fv_stream stream);

/* The tensors of one layer. Hq, Hkv, D as in the problem; T' >= T rows, those past T are padding and
 * are left untouched. The last dimension of q, k, v and out is dense; out overlaps nothing. What the problem
 * does not have (lse, sinks, slopes, scales) is NULL here, FV_ERR_INVALID otherwise: the result would be without it.
 * With static_grid or static_list on a device other than the CPU T' >= max_num_tokens, for a later step of the
 * captured graph may have as many, and MLA that is not absorbed writes all max_num_tokens rows of out, those past T and those of no sequence with
 * values of no meaning; the latter also without host copies of the lengths.
 *
 * MLA, with L = kv_lora_rank, R = qk_rope_head_dim, P = qk_nope_head_dim, V = v_head_dim: q [T', Hq, P + R]
 * with the last R rotated, k [T', 1, L + R] the new latents (rotated unless the problem rotates at reading),
 * no v, out [T', Hq, V]. Absorbed problems: q [T', Hq, L + R], out [T', Hq, L], neither kv_up nor gemm. */
typedef struct fv_layer {
    uint32_t struct_size;      /* sizeof(fv_layer) */
    fv_tensor q;               /* [T', Hq, D] */
    fv_tensor k;               /* [T', Hkv, D] new keys; data NULL: already in the cache */
    fv_tensor v;               /* [T', Hkv, Dv] */
    fv_kv_view kv_cache;       /* planes of scales with FV_KV_SCALING_PER_TOKEN_HEAD alone */
    fv_tensor out;             /* [T', Hq, Dv] */
    fv_tensor lse;             /* [T', Hq] fp32, natural log, any strides; data NULL: not wanted */
    const float *sinks;        /* [Hq] */
    const float *alibi_slopes; /* [Hq] */
    const float *k_scale;      /* [1] or [Hkv], real = stored * scale */
    const float *v_scale;
    fv_tensor kv_up;       /* MLA: [Hq, P + V, L]; of each head the rows W_UK (P), then those of W_UV^T (V) */
    fv_gemm_fn gemm;       /* MLA: multiplies with kv_up */
    void *gemm_user;       /* its first argument */
    const float *rope_cos; /* MLA, rotate_at_reading: [num_rope_positions, R / 2] */
    const float *rope_sin;
    int64_t num_rope_positions;
} fv_layer;

/* Writes the new K/V to the cache where the batch's slot mapping says, then attends. Arguments of
 * wrong shape or dtype: FV_ERR_INVALID, and so are blocks and slots past the cache where the host can read
 * them; elsewhere nothing is written to such slots. `workspace` has fv_plan_workspace_bytes(). */
FV_API fv_status fv_plan_run(fv_plan *plan, const fv_layer *layer, void *workspace, fv_stream stream);

#ifdef __cplusplus
}
#endif
#endif
