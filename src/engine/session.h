/* What a session is made of; its functions are in three files:
 *
 *   session.c          cache, plan and buffers: creation and end
 *   session_request.c  requests: checks, creation, end
 *   session_step.c     a step: batch, forward pass, logits, tokens */
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
    void *cache;          /* of all its layers */
    int64_t *slots;       /* [max_batched_tokens], of a step */
    int32_t *block_table; /* [max_num_seqs, table_width], of a step */
} fv_session_group;

/* The arrays of a step, [max_batched_tokens] or [max_num_seqs]. */
typedef struct fv_step_arrays {
    int32_t *tokens;
    int32_t *positions;
    int32_t *query_start; /* [max_num_seqs + 1] */
    int32_t *seq_lens;
    int32_t *logit_rows;  /* rows of the step whose logits are wanted */
    int32_t *logit_parts; /* the part of each */
    fv_step_part *parts;
    int32_t num_parts;
    int32_t num_tokens;
    int32_t table_width;
} fv_step_arrays;

struct fv_session {
    fv_engine *engine;
    fv_device *device;
    fv_scheduler scheduler;
    int32_t max_sequence_tokens; /* the context, or the cache if that is smaller */
    bool batch_invariant;
    fv_session_group groups[FV_MAX_LAYER_GROUPS];
    int32_t num_groups;
    void *workspace;         /* of the plans, which run one after the other */
    fv_kv_view *cache_views; /* [num_layers] */
    fv_forward forward;
    void *sampler_scratch;
    fv_step_arrays step;
    fv_session_request *requests;
    int32_t num_unfinished;
    int32_t next_id;
    fv_status failure; /* of a step: the cache is in an unknown state */
    fv_session_stats stats;
};

/* Takes the request out of the session and frees it. */
void fv_session_finish_request(fv_session *session, fv_session_request *request);

#endif
