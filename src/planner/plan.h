/* The plan's insides, shared by the backends.
 *
 * fv_plan_create (backends/plan.c) fills in who and what; the backend's create() chooses kernels and
 * sizes; its schedule() writes the calls of a step, and the run makes them, in order, for every layer:
 *
 *   kv_write | attend_paged items 0..63 | reduce_segments | kv_gather | attend_dense | merge_states | ... */
#ifndef FV_PLANNER_PLAN_H
#define FV_PLANNER_PLAN_H

#include "core/context.h"
#include "fovea/plan.h"
#include "ops/kernel_table.h"
#include "planner/context_round.h"
#include "planner/prefix_group.h"
#include "planner/step_buffers.h"
#include "planner/work_list.h"

struct fv_backend; /* backends/backend.h */

#define FV_WORKSPACE_ALIGNMENT 256 /* bytes */

typedef enum fv_operation {
    FV_OP_KV_WRITE = 0,
    FV_OP_ATTEND_PAGED,
    FV_OP_ATTEND_DENSE,
    FV_OP_REDUCE_SEGMENTS,
    FV_OP_KV_GATHER,
    FV_OP_MERGE_STATES,
    FV_OP_ABSORB,  /* MLA: queries times W_UK */
    FV_OP_EXPAND,  /* MLA: gathered latents times W_UK and W_UV */
    FV_OP_PROJECT, /* MLA: attended latents times W_UV */
    FV_NUM_OPERATIONS,
} fv_operation;

/* Where an attention kernel finds keys and values. */
typedef enum fv_key_source {
    FV_KEYS_CACHE = 0,     /* all in the cache */
    FV_KEYS_CACHE_AND_NEW, /* the context in the cache, the new tokens as they came */
    FV_KEYS_NEW,           /* new tokens as they came; the items hold no other keys */
    FV_KEYS_GATHERED,      /* in the gather buffers */
} fv_key_source;

/* Where a call writes its result: the layer's output, or a state buffer of the workspace (fp32 rows with
 * LSE, row 0 = token first_token). */
typedef enum fv_result_target {
    FV_TARGET_OUT = 0,
    FV_TARGET_NEW_STATE,     /* of the new tokens among themselves; then the running merge */
    FV_TARGET_CONTEXT_STATE, /* of one chunk of the context */
    FV_TARGET_LATENTS,       /* MLA: attended latents, to be projected; the LSE goes to the layer's */
} fv_result_target;

/* One kernel call of a step. */
typedef struct fv_call {
    fv_operation operation;
    fv_key_source source;
    fv_result_target target;
    int32_t first, count; /* work items, or reductions; count -1: the static grid */
    int32_t num_split;    /* of those items, the last ones: for two lanes each, or for num_meeting */
    int32_t num_meeting;
    int32_t lane_heads;          /* of those items: fv_work_list.lane_heads */
    int32_t item_tokens;         /* of those items, at most */
    int32_t most_segments;       /* of those reductions */
    fv_operation partials_of;    /* reduce_segments: what wrote them, from `source` */
    int32_t first_token;         /* of the batch: row 0 of the state buffers, or of the absorbed queries */
    int32_t token;               /* merge_states, absorb, project: tokens of the batch [token, token + num_tokens) */
    int32_t num_tokens;          /* -1: all */
    int32_t first_seq, num_seqs; /* kv_gather: sequences whose index arrays follow */
    int32_t num_rows;            /* kv_gather, expand */
    int32_t indices;             /* attend_dense, kv_gather: offset of key_start [num_seqs], out_start
                                  * [num_seqs + 1] and key_row [num_seqs] of the chunk */
} fv_call;

/* Behind the scratch of each worker in builds with assertions: what no kernel may write. */
#if defined(NDEBUG)
#define FV_SCRATCH_GUARD_BYTES 0
#else
#define FV_SCRATCH_GUARD_BYTES 4096
#endif

/* Byte offsets into the workspace that the caller brings. */
typedef struct fv_workspace_layout {
    size_t partial_out, partial_max, partial_sum;
    size_t gather_k, gather_v;         /* MLA: gathered latents; expanded [rows, Hq, P + V] */
    size_t absorbed_q;                 /* MLA: [absorb_rows, Hq, L + R] */
    size_t latents;                    /* MLA: [absorb_rows, Hq, L] */
    size_t state_out[2], state_lse[2]; /* of FV_TARGET_NEW_STATE and FV_TARGET_CONTEXT_STATE */
    size_t scratch;
    size_t scratch_bytes; /* for each worker, its guard with it */
    size_t bytes;         /* of all */
} fv_workspace_layout;

struct fv_plan {
    fv_context *context;
    uint64_t serial; /* of fv_context_next_serial: an address may be another plan's later */
    fv_device *device;
    const struct fv_backend *backend;
    const fv_kernel_table *kernels;
    fv_problem problem;       /* normal */
    fv_problem dense_problem; /* of attend_dense: the same, or MLA expanded to MHA */
    fv_bounds bounds;
    fv_plan_options options; /* strings are not kept: backend, variant and kernels are resolved */
    const char *choice;      /* why this backend: static text */

    const fv_attend_variant *paged; /* the kernel variants: attend_paged, or mla_decode */
    const fv_attend_variant *dense; /* NULL: the backend needs none */
    int32_t absorbs;                /* 1: MLA whose queries are absorbed and whose outputs are projected here */
    int32_t absorb_rows;            /* tokens that may be absorbed at once */
    int32_t lse_by_head;            /* 1: the LSE of states lies [Hq, tokens] */
    int32_t group;                  /* query heads of a KV head */
    int32_t decode_threshold;       /* tokens of a query that is served as decode */
    int32_t partition_keys;         /* of a partitioned decode; 0: none */
    int32_t new_min_query_len;      /* queries from this length on attend their new tokens as they came, not as */
                                    /* the cache stores them; INT32_MAX: none do */
    int32_t static_grid;            /* 1: launches are sized by the bounds, counts are read from the step header */
    int32_t static_list;   /* 1: and so, but items are those of the step's lengths, in a list of fixed length */
    int32_t num_segments;  /* of the static grid */
    int32_t splits_cells;  /* 1: two lanes of a device may share each of its cells */
    fv_dtype gather_dtype; /* of the gather buffers */
    fv_split_rule rule;
    fv_split_rule dense_rule;   /* of attend_dense */
    fv_work_list room;          /* capacities */
    fv_context_limits contexts; /* 0: no context is gathered */
    fv_workspace_layout workspace;
    fv_step_buffers buffers;

    /* host memory of the schedule, all in one piece */
    void *schedule_memory;
    size_t schedule_bytes;
    fv_query_run *runs;       /* [max_num_seqs] */
    fv_query_run *round_runs; /* [max_num_seqs] */
    fv_context_piece *pieces; /* [max_num_seqs] */
    fv_prefix_group *groups;  /* [max_num_seqs / 2 + 1] */
    int32_t *extends;         /* [max_num_seqs] */
    uint8_t *not_causal;      /* [max_num_seqs] zeros: the flags of encoders and cross attention */
    fv_call *calls;
    int32_t num_calls, call_capacity;

    /* the step */
    int32_t updated;
    fv_batch batch;
    fv_step_sizes used;
    int32_t num_groups, num_shared_keys; /* prefix groups taken, and their keys */
    int32_t piece_keys;                  /* fv_work_list.piece_keys, of the last pass that has them */
    int32_t num_empty;                   /* items of a static list that are none of the step's */
    int32_t num_rounds, num_chunks;      /* of gathered context */
    int64_t max_block;                   /* largest block id in use; -1 where it was not looked at */
    int64_t max_slot;                    /* largest slot of a new token; the same */
    int32_t max_slot_token;              /* which token */
    char text[768];
};

/* FV_ERR_INVALID for a malformed batch, FV_NEEDS_PLAN for one outside the bounds. With lengths on the
 * host (*step filled, else step->query_start NULL) also their order and the width of the table. */
fv_status fv_plan_check_batch(fv_step *step, const fv_plan *plan, const fv_batch *batch);

/* Shapes, dtypes and pointers of a layer against the problem and the step. */
fv_status fv_plan_check_layer(const fv_plan *plan, const fv_layer *layer);

/* Its address only; NULL passes. */
fv_status fv_plan_check_workspace(const void *workspace);

#endif
