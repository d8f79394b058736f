/* What a session is made of; its functions are in three files:
 *
 *   session.c          cache, plan and buffers: creation and end
 *   session_request.c  requests: checks, creation, cancelling, end
 *   session_step.c     a step: batch, forward pass, logits, tokens
 *
 * The layers are run by a runner (runner.h). */
#ifndef FV_ENGINE_SESSION_H
#define FV_ENGINE_SESSION_H

#include "engine/engine.h"
#include "engine/forward.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "engine/text_stream.h"

/* A request and its sequence; the sequence comes first, so that one leads to the other. */
typedef struct fv_session_request {
    fv_sequence sequence;
    int32_t id;
    int32_t *tokens; /* prompt, then what was written */
    int32_t num_prompt;
    int32_t num_written;
    int32_t max_written;
    int32_t *forced;
    int32_t num_forced;
    bool ignore_eos;
    fv_finish finish; /* other than NONE: its last event is being told, or will be at the end of the step */
    fv_sampler sampler;
    fv_text_stream text;
    fv_token_fn on_token;
    fv_logits_fn on_logits;
    int32_t first_logits;
    void *user;
    struct fv_session_request *next; /* of those that are not done, in order of arrival */
} fv_session_request;

/* The attention of the layers of a group. */
typedef struct fv_session_group {
    fv_plan *plan;
    fv_plan *last_plan;   /* of the last step, NULL: there was none */
    void *cache;          /* of all its layers */
    int64_t *slots;       /* [max_tokens], of a step */
    int32_t *block_table; /* [max_num_seqs, table_width], of a step */
} fv_session_group;

/* The arrays of a step, [max_tokens] or [max_num_seqs]. Those that a device reads lie in one piece of page-locked
 * memory, the block tables last. */
typedef struct fv_step_arrays {
    void *memory;
    size_t memory_bytes;
    size_t table_offset; /* of the first block table in it */
    int32_t max_tokens;  /* at least max_batched_tokens, and the largest captured batch */
    int32_t *tokens;
    int32_t *positions;
    int32_t *query_start; /* [max_num_seqs + 1] */
    int32_t *seq_lens;
    int32_t *logit_rows;  /* rows of the step whose logits are wanted */
    int32_t *logit_parts; /* the part of each; this and the next two for the host only */
    int32_t *next_tokens; /* [max_logit_rows], what was sampled of each; -1: nothing */
    fv_step_part *parts;
    int32_t num_parts;
    int32_t num_tokens;
    int32_t table_width;
} fv_step_arrays;

typedef struct fv_runner fv_runner; /* engine/runner.h */

struct fv_session {
    fv_engine *engine;
    const fv_runner *runner;
    void *runner_state;
    fv_device *device;
    fv_scheduler scheduler;
    int32_t max_sequence_tokens; /* the context, or the cache if that is smaller */
    bool batch_invariant;
    fv_session_group groups[FV_MAX_LAYER_GROUPS];
    int32_t num_groups;
    void *workspace;         /* of the plans, which run one after the other; the runner allocates it */
    size_t workspace_bytes;  /* that is enough for every plan so far */
    fv_kv_view *cache_views; /* [num_layers] */
    int32_t max_logit_rows;
    fv_forward_profile profile;
    void *sampler_scratch; /* sampler_bytes for each worker */
    size_t sampler_bytes;
    fv_step_arrays step;
    fv_session_request *requests, *last_request; /* NULL: there are none */
    int32_t num_unfinished;
    int32_t next_id;
    fv_status failure; /* of a step: the cache is in an unknown state */
    bool is_stepping;  /* callbacks see a step that is not done, or requests that end */
    bool has_cancelled;
    fv_session_stats stats;
};

/* What a plan of a layer group has to take; the rest is the session's. */
typedef struct fv_plan_size {
    int32_t max_num_seqs;
    int32_t max_num_tokens;
    bool is_graph; /* one token of each sequence, launches as the bounds say */
} fv_plan_size;

/* A plan for a group, for the options that the session is created with; workspace_bytes grows with it. */
fv_status fv_session_create_plan(fv_plan **plan, fv_session *session, int32_t group, const fv_plan_size *size,
                                 const fv_session_options *options);

/* The captured batch that serves num_seqs decodes: 1, 2, 4, then multiples of 8. */
int32_t fv_session_graph_seqs(int32_t num_seqs);

/* Tells the last event of all requests whose finish is CANCELLED and takes them out; not while their step runs. */
void fv_session_end_cancelled(fv_session *session);

/* Takes the request out of the session and frees it. */
void fv_session_finish_request(fv_session *session, fv_session_request *request);

#endif
