/* The runner on the CPU: plans and forward pass read the step's arrays where they are. */
#include <stdlib.h>

#include "engine/runner.h"

static fv_status cpu_create(fv_session *session, const fv_session_options *options)
{
    const fv_engine *engine = session->engine;
    fv_forward *forward = calloc(1, sizeof(*forward));
    if (!forward) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a forward pass");
    session->runner_state = forward;
    session->max_logit_rows = fv_runner_logit_rows(session);
    fv_status status = fv_device_alloc(&session->workspace, session->device, session->workspace_bytes);
    if (status == FV_OK) {
        status = fv_forward_init(forward, engine->model, engine->context, engine->gemm, options->max_batched_tokens,
                                 session->max_logit_rows, options->attention_dtype);
    }
    session->stats.activation_bytes += session->workspace_bytes + forward->memory_bytes;
    return status;
}

static void cpu_destroy(fv_session *session)
{
    if (session->runner_state) fv_forward_deinit(session->runner_state);
    free(session->runner_state);
}

static fv_status update_plan(fv_session *session, int32_t group)
{
    const fv_step_arrays *step = &session->step;
    const fv_batch batch = {
        .struct_size = sizeof(batch),
        .num_seqs = step->num_parts,
        .num_tokens = step->num_tokens,
        .query_start = step->query_start,
        .seq_lens = step->seq_lens,
        .block_table = session->groups[group].block_table,
        .block_table_stride = step->table_width,
        .block_table_width = step->table_width,
        .slot_mapping = session->groups[group].slots,
    };
    const fv_status status = fv_plan_update(session->groups[group].plan, &batch, NULL);
    if (status != FV_NEEDS_PLAN) return status;
    return fv_fail(FV_ERR_INTERNAL, "a step of %d tokens outside its plan", step->num_tokens);
}

static fv_status cpu_run(fv_session *session)
{
    fv_forward *forward = session->runner_state;
    fv_forward_step step = {
        .tokens = session->step.tokens,
        .positions = session->step.positions,
        .num_tokens = session->step.num_tokens,
        .workspace = session->workspace,
        .caches = session->cache_views,
        .batch_invariant = session->batch_invariant,
    };
    for (int32_t i = 0; i < session->num_groups; i++) {
        const fv_status status = update_plan(session, i);
        if (status != FV_OK) return status;
        step.plans[i] = session->groups[i].plan;
        session->groups[i].last_plan = session->groups[i].plan;
    }
    const fv_status status = fv_forward_run(forward, &step);
    session->profile = forward->profile;
    return status;
}

static fv_status cpu_compute_logits(const float **logits, fv_session *session, const int32_t *rows, int32_t num_rows)
{
    fv_forward *forward = session->runner_state;
    const fv_status status = fv_forward_compute_logits(forward, rows, num_rows, session->batch_invariant);
    session->profile = forward->profile;
    *logits = forward->logits;
    return status;
}

const fv_runner fv_cpu_runner = {
    .activation_dtype = FV_DTYPE_F32,
    /* Half of what a decode reads in fp32. On SmolLM2 logits move by 2e-3 on average (fp32 cache: 1e-5);
     * bf16 keeps 3 bits less. */
    .default_kv_dtype = FV_DTYPE_F16,
    .create = cpu_create,
    .destroy = cpu_destroy,
    .run = cpu_run,
    .compute_logits = cpu_compute_logits,
};
