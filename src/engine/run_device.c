/* The runner on a device.
 *
 *   host arrays of the step --one copy, and one for each block table--> the same arrays on the device
 *     prompts, mixed steps   plans that fit the step, plain launches
 *     decodes                the captured graph of the next larger batch, its plans updated before it: full graphs,
 *                            attention included, by the static launch grid. Rows past the step's are padding
 *   logits --one copy--> page-locked memory, where the host samples */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "core/device.h"
#include "engine/forward_device.h"
#include "engine/runner.h"

/* A batch of decodes that has been captured: layers and logits of num_seqs rows. */
typedef struct captured_batch {
    int32_t num_seqs;
    fv_plan *plans[FV_MAX_LAYER_GROUPS];
    fv_graph graph;
} captured_batch;

typedef struct device_runner {
    fv_device_forward forward;
    fv_stream stream;
    fv_event copied;         /* the step's arrays have left the host */
    void *arrays;            /* fv_step_arrays.memory on the device */
    float *logits;           /* [max_logit_rows, vocabulary] page-locked */
    bool has_logits;         /* the last step was a graph, which computed them for its rows */
    captured_batch *batches; /* by size */
    int32_t num_batches;
} device_runner;

/* --- the step's arrays on the device ---------------------------------------------------------------------- */

static const void *on_device(const fv_session *session, const void *host_array)
{
    const device_runner *runner = session->runner_state;
    return (const char *)runner->arrays + ((const char *)host_array - (const char *)session->step.memory);
}

static fv_status copy_part(fv_session *session, const void *host_array, size_t bytes)
{
    const device_runner *runner = session->runner_state;
    const size_t offset = (size_t)((const char *)host_array - (const char *)session->step.memory);
    return fv_device_copy_in(session->device, (char *)runner->arrays + offset, host_array, bytes, runner->stream);
}

static fv_status copy_step(fv_session *session)
{
    const fv_step_arrays *step = &session->step;
    const device_runner *runner = session->runner_state;
    const size_t table_bytes = (size_t)step->num_parts * (size_t)step->table_width * sizeof(int32_t);
    fv_status status = copy_part(session, step->memory, step->table_offset);
    for (int32_t i = 0; i < session->num_groups && status == FV_OK; i++) {
        status = copy_part(session, session->groups[i].block_table, table_bytes);
    }
    return status == FV_OK ? fv_event_record(session->device, runner->copied, runner->stream) : status;
}

static fv_status update_plan(fv_plan *plan, fv_session *session, int32_t group, int32_t num_seqs)
{
    const fv_step_arrays *step = &session->step;
    const fv_session_group *of = &session->groups[group];
    const device_runner *runner = session->runner_state;
    const fv_batch batch = {
        .struct_size = sizeof(batch),
        .num_seqs = num_seqs,
        .num_tokens = step->query_start[num_seqs],
        .query_start = on_device(session, step->query_start),
        .seq_lens = on_device(session, step->seq_lens),
        .block_table = on_device(session, of->block_table),
        .block_table_stride = step->table_width,
        .block_table_width = step->table_width,
        .slot_mapping = on_device(session, of->slots),
        .host_query_start = step->query_start,
        .host_seq_lens = step->seq_lens,
    };
    const fv_status status = fv_plan_update(plan, &batch, runner->stream);
    if (status != FV_NEEDS_PLAN) return status;
    return fv_fail(FV_ERR_INTERNAL, "a step of %d tokens outside its plan", batch.num_tokens);
}

static fv_status run_layers(fv_session *session, fv_plan *const *plans, int32_t num_rows)
{
    device_runner *runner = session->runner_state;
    const fv_device_pass pass = {
        .tokens = on_device(session, session->step.tokens),
        .positions = on_device(session, session->step.positions),
        .num_rows = num_rows,
        .plans = plans,
        .workspace = session->workspace,
        .caches = session->cache_views,
        .stream = runner->stream,
    };
    return fv_device_forward_layers(&runner->forward, &pass);
}

/* --- graphs ------------------------------------------------------------------------------------------------ */

static fv_status send_batch(fv_session *session, const captured_batch *batch)
{
    device_runner *runner = session->runner_state;
    const fv_status status = run_layers(session, batch->plans, batch->num_seqs);
    if (status != FV_OK) return status;
    return fv_device_forward_logits(&runner->forward, NULL, batch->num_seqs, runner->stream);
}

static fv_status update_batch(fv_session *session, const captured_batch *batch, int32_t num_seqs)
{
    fv_status status = FV_OK;
    for (int32_t i = 0; i < session->num_groups && status == FV_OK; i++) {
        status = update_plan(batch->plans[i], session, i, num_seqs);
    }
    return status;
}

/* Runs the batch once, without a sequence, so that every GEMM has its algorithm before the capture. */
static fv_status warm_up(fv_session *session, const captured_batch *batch)
{
    const device_runner *runner = session->runner_state;
    fv_status status = update_batch(session, batch, 0);
    if (status == FV_OK) status = send_batch(session, batch);
    return status == FV_OK ? fv_stream_synchronize(session->device, runner->stream) : status;
}

static fv_status capture_batch(captured_batch *batch, fv_session *session)
{
    const device_runner *runner = session->runner_state;
    fv_status status = fv_graph_begin(session->device, runner->stream);
    if (status != FV_OK) return status;
    char cause[512] = "";
    const fv_status sent = send_batch(session, batch);
    if (sent != FV_OK) snprintf(cause, sizeof(cause), "%s", fv_last_error()); /* the end fails, too */
    status = fv_graph_end(&batch->graph, session->device, runner->stream);
    return sent == FV_OK ? status : fv_fail(sent, "capturing a batch of %d: %s", batch->num_seqs, cause);
}

/* Before the workspace is there, which all plans share. */
static fv_status create_batch_plans(fv_session *session, const fv_session_options *options)
{
    device_runner *runner = session->runner_state;
    const int32_t max_num_seqs = session->scheduler.limits.max_num_seqs;
    const int32_t capacity = 4 + (int32_t)fv_ceil_div(max_num_seqs, 8);
    fv_status status = FV_OK;
    runner->batches = calloc((size_t)capacity, sizeof(*runner->batches));
    if (!runner->batches) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d graphs", capacity);
    for (int32_t seqs = 1, last = 0; last < max_num_seqs && status == FV_OK; seqs = fv_session_graph_seqs(last + 1)) {
        captured_batch *batch = &runner->batches[runner->num_batches++];
        batch->num_seqs = last = seqs;
        const fv_plan_size size = {seqs, seqs, true};
        for (int32_t i = 0; i < session->num_groups && status == FV_OK; i++) {
            status = fv_session_create_plan(&batch->plans[i], session, i, &size, options);
        }
        for (int32_t i = 0; i < session->num_groups && status == FV_OK; i++) {
            if (fv_plan_kv_layout(batch->plans[i]) == fv_plan_kv_layout(session->groups[i].plan)) continue;
            status = fv_fail(FV_ERR_INTERNAL, "plans of one layer group want two cache layouts");
        }
    }
    return status;
}

static size_t free_memory(fv_session *session)
{
    size_t free_bytes = 0, total_bytes;
    return fv_device_memory(&free_bytes, &total_bytes, session->device) == FV_OK ? free_bytes : 0;
}

static fv_status capture_batches(fv_session *session)
{
    device_runner *runner = session->runner_state;
    fv_status status = FV_OK;
    for (int32_t i = 0; i < runner->num_batches && status == FV_OK; i++) {
        status = warm_up(session, &runner->batches[i]);
    }
    const size_t before = free_memory(session); /* what GEMMs keep for themselves is taken by now */
    for (int32_t i = 0; i < runner->num_batches && status == FV_OK; i++) {
        status = capture_batch(&runner->batches[i], session);
    }
    const size_t after = free_memory(session);
    session->stats.num_graphs = runner->num_batches;
    session->stats.graph_bytes = before > after ? before - after : 0;
    for (int32_t i = 0; i < runner->num_batches; i++) {
        for (int32_t group = 0; group < session->num_groups; group++) {
            session->stats.graph_bytes += fv_plan_buffer_bytes(runner->batches[i].plans[group]);
        }
    }
    return status;
}

/* NULL: the step is not one of decodes alone, or too large. */
static const captured_batch *find_batch(const fv_session *session)
{
    const device_runner *runner = session->runner_state;
    const fv_step_arrays *step = &session->step;
    for (int32_t i = 0; i < step->num_parts; i++) {
        if (step->parts[i].num_tokens != 1 || !step->parts[i].is_last) return NULL;
    }
    for (int32_t i = 0; i < runner->num_batches; i++) {
        if (runner->batches[i].num_seqs >= step->num_parts) return &runner->batches[i];
    }
    return NULL;
}

/* --- the runner -------------------------------------------------------------------------------------------- */

static fv_status create_buffers(fv_session *session)
{
    device_runner *runner = session->runner_state;
    fv_device *device = session->device;
    const size_t logit_bytes = (size_t)session->max_logit_rows *
                               (size_t)session->engine->model->config.vocabulary_size * sizeof(float);
    void *logits = NULL;
    fv_status status = fv_device_alloc(&session->workspace, device, session->workspace_bytes);
    if (status == FV_OK) status = fv_device_alloc(&runner->arrays, device, session->step.memory_bytes);
    if (status == FV_OK) status = fv_device_alloc_host(&logits, device, logit_bytes);
    runner->logits = logits;
    if (status == FV_OK) {
        status = fv_device_forward_init(&runner->forward, session->engine->model, &session->engine->device_model,
                                        device, session->step.max_tokens, session->max_sequence_tokens,
                                        session->max_logit_rows);
    }
    if (status == FV_OK) status = fv_device_fill(device, runner->arrays, 0, session->step.memory_bytes, NULL);
    if (status == FV_OK) status = fv_stream_synchronize(device, NULL);
    session->stats.activation_bytes += session->workspace_bytes + runner->forward.memory_bytes;
    return status;
}

static fv_status device_create(fv_session *session, const fv_session_options *options)
{
    if (session->batch_invariant) {
        return fv_fail(FV_ERR_UNSUPPORTED,
                       "batch_invariant on %s: its GEMMs choose by the size of the batch; accepted: 0",
                       fv_device_name(session->device));
    }
    device_runner *runner = calloc(1, sizeof(*runner));
    if (!runner) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a forward pass");
    session->runner_state = runner;
    session->max_logit_rows = fv_runner_logit_rows(session);
    const bool has_graphs = !options->no_graphs && session->device->ops->graph_begin;
    fv_status status = fv_stream_create(&runner->stream, session->device);
    if (status == FV_OK) status = fv_event_create(&runner->copied, session->device);
    if (status == FV_OK && has_graphs) status = create_batch_plans(session, options);
    if (status == FV_OK) status = create_buffers(session);
    return status == FV_OK && has_graphs ? capture_batches(session) : status;
}

static void device_destroy(fv_session *session)
{
    device_runner *runner = session->runner_state;
    fv_device *device = session->device;
    if (!runner) return;
    if (runner->stream) (void)fv_stream_synchronize(device, runner->stream);
    for (int32_t i = 0; i < runner->num_batches; i++) {
        fv_graph_destroy(device, runner->batches[i].graph);
        for (int32_t group = 0; group < session->num_groups; group++) fv_plan_destroy(runner->batches[i].plans[group]);
    }
    free(runner->batches);
    fv_device_forward_deinit(&runner->forward);
    fv_device_free(device, runner->arrays);
    fv_device_free_host(device, runner->logits);
    if (runner->copied) fv_event_destroy(device, runner->copied);
    fv_stream_destroy(device, runner->stream);
    free(runner);
}

static fv_status run_plain(fv_session *session)
{
    fv_plan *plans[FV_MAX_LAYER_GROUPS] = {NULL};
    fv_status status = FV_OK;
    for (int32_t i = 0; i < session->num_groups && status == FV_OK; i++) {
        plans[i] = session->groups[i].last_plan = session->groups[i].plan;
        status = update_plan(plans[i], session, i, session->step.num_parts);
    }
    return status == FV_OK ? run_layers(session, plans, session->step.num_tokens) : status;
}

static fv_status run_graph(fv_session *session, const captured_batch *batch)
{
    const device_runner *runner = session->runner_state;
    fv_status status = update_batch(session, batch, session->step.num_parts);
    for (int32_t i = 0; i < session->num_groups; i++) session->groups[i].last_plan = batch->plans[i];
    session->stats.num_graph_steps++;
    return status == FV_OK ? fv_graph_launch(session->device, batch->graph, runner->stream) : status;
}

static fv_status device_run(fv_session *session)
{
    device_runner *runner = session->runner_state;
    const captured_batch *batch = find_batch(session);
    runner->has_logits = batch != NULL;
    fv_status status = copy_step(session);
    if (status == FV_OK) status = batch ? run_graph(session, batch) : run_plain(session);
    return status == FV_OK ? fv_event_synchronize(session->device, runner->copied) : status;
}

/* A graph has computed the logits of all rows of its step, and those are the ones that are asked for. */
static fv_status device_compute_logits(const float **logits, fv_session *session, const int32_t *rows, int32_t num_rows)
{
    device_runner *runner = session->runner_state;
    const size_t row_bytes = (size_t)session->engine->model->config.vocabulary_size * sizeof(float);
    fv_status status = FV_OK;
    if (!runner->has_logits) {
        status = copy_part(session, rows, (size_t)num_rows * sizeof(*rows));
        if (status == FV_OK) {
            status = fv_device_forward_logits(&runner->forward, on_device(session, rows), num_rows, runner->stream);
        }
    }
    if (status == FV_OK) {
        status = fv_device_copy_out(session->device, runner->logits, runner->forward.logits,
                                    (size_t)num_rows * row_bytes, runner->stream);
    }
    if (status == FV_OK) status = fv_stream_synchronize(session->device, runner->stream);
    *logits = runner->logits;
    return status;
}

const fv_runner fv_device_runner = {
    .activation_dtype = FV_DTYPE_BF16,
    .default_kv_dtype = FV_DTYPE_BF16,
    .create = device_create,
    .destroy = device_destroy,
    .run = device_run,
    .compute_logits = device_compute_logits,
};
