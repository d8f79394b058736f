/* The public plan: finds who serves the problem, checks what comes in, passes it on. */
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "backends/backend.h"
#include "core/error.h"
#include "fovea/backend.h"

static fv_status check_bounds(fv_bounds *out, const fv_bounds *bounds)
{
    if (!bounds) return fv_fail(FV_ERR_INVALID, "bounds is NULL");
    const fv_status status = fv_check_struct_size("fv_bounds", bounds->struct_size, sizeof(*bounds));
    if (status != FV_OK) return status;
    *out = *bounds;
    if (out->max_query_len == 0) out->max_query_len = out->max_num_tokens;
    const struct {
        const char *name;
        int32_t value;
    } all[] = {{"max_num_seqs", out->max_num_seqs},
               {"max_num_tokens", out->max_num_tokens},
               {"max_query_len", out->max_query_len},
               {"max_seq_len", out->max_seq_len}};
    for (int32_t i = 0; i < FV_ARRAY_LEN(all); i++) {
        if (all[i].value < 1 || all[i].value > 1 << 30) {
            return fv_fail(FV_ERR_INVALID, "%s is %d; accepted: 1 to %d", all[i].name, all[i].value, 1 << 30);
        }
    }
    return FV_OK;
}

static fv_status check_options(const fv_plan_options *options, const fv_context *context)
{
    const fv_status status = fv_check_struct_size("fv_plan_options", options->struct_size, sizeof(*options));
    if (status != FV_OK) return status;
    if (options->device && options->device->context != context) {
        return fv_fail(FV_ERR_INVALID,
                       "fv_plan_options.device is %s of another context; accepted: a device that "
                       "fv_device_find found in the plan's",
                       options->device->name);
    }
    if (options->path < FV_PATH_AUTO || options->path > FV_PATH_3D) {
        return fv_fail(FV_ERR_INVALID, "path is %d; accepted: 0 (auto), 1 (2D), 2 (3D)", (int)options->path);
    }
    if (options->segment_keys < 0 || options->segment_keys > 1 << 30) {
        return fv_fail(FV_ERR_INVALID, "segment_keys is %d; accepted: 0 (chosen) to %d", options->segment_keys,
                       1 << 30);
    }
    if (options->cascade < FV_CASCADE_AUTO || options->cascade > FV_CASCADE_ALWAYS) {
        return fv_fail(FV_ERR_INVALID, "cascade is %d; accepted: 0 (auto), 1 (off), 2 (always)", (int)options->cascade);
    }
    if (options->decode_threshold < 0) {
        return fv_fail(FV_ERR_INVALID, "decode_threshold is %d; accepted: 0 (chosen) or more",
                       options->decode_threshold);
    }
    return FV_OK;
}

/* The named backend if it can, or the first of those preferred that can. */
static fv_status choose_backend(fv_plan *plan, const char *name)
{
    char text[1024] = "";
    if (name && strcmp(name, "auto") != 0) {
        plan->backend = fv_backend_find(name, 1);
        if (!plan->backend) return FV_ERR_INVALID;
        fv_reasons reasons = {text, sizeof(text), 0};
        plan->backend->why_not(&reasons, plan->device, &plan->problem);
        if (reasons.used == 0) return FV_OK;
        return fv_fail(FV_ERR_UNSUPPORTED, "Selected backend %s is not valid for this configuration. Reason: [%s]",
                       plan->backend->name, text);
    }
    size_t used = 0;
    for (int32_t i = 0; (plan->backend = fv_backend_preferred(i, plan->device, &plan->problem)); i++) {
        char reason[512] = "";
        fv_reasons reasons = {reason, sizeof(reason), 0};
        plan->backend->why_not(&reasons, plan->device, &plan->problem);
        if (reasons.used == 0) return FV_OK;
        if (used < sizeof(text)) {
            used += (size_t)snprintf(text + used, sizeof(text) - used, "%s%s: [%s]", used ? ", " : "",
                                     plan->backend->name, reason);
        }
    }
    return fv_fail(FV_ERR_UNSUPPORTED, "No valid attention backend found for %s. Reasons: {%s}", plan->device->name,
                   text);
}

static fv_status choose_kernels(fv_plan *plan, const char *name)
{
    const fv_device *device = plan->device;
    char names[256] = "";
    size_t used = 0;
    for (int32_t i = 0; i < device->num_tables; i++) {
        if (!name || strcmp(device->tables[i]->name, name) == 0) plan->kernels = device->tables[i];
        if (used < sizeof(names)) {
            used += (size_t)snprintf(names + used, sizeof(names) - used, "%s%s", i ? ", " : "",
                                     device->tables[i]->name);
        }
    }
    if (plan->kernels) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "no kernels '%s' on device %s; accepted: %s", name ? name : "", device->name, names);
}

fv_status fv_plan_create(fv_plan **out, fv_context *context, const fv_problem *problem, const fv_bounds *bounds,
                         const fv_plan_options *options)
{
    const fv_plan_options defaults = {.struct_size = sizeof(defaults)};
    if (out) *out = NULL;
    if (!out || !context) return fv_fail(FV_ERR_INVALID, "plan or context is NULL");
    if (!options) options = &defaults;
    fv_status status = check_options(options, context);
    if (status != FV_OK) return status;
    fv_plan *plan = fv_context_alloc(context, sizeof(*plan));
    if (!plan) return FV_ERR_NO_MEMORY;
    plan->context = context;
    plan->serial = fv_context_next_serial(context);
    plan->device = options->device ? options->device : context->devices[0];
    plan->options = *options;
    plan->max_block = plan->max_slot = -1;
    status = check_bounds(&plan->bounds, bounds);
    if (status == FV_OK) status = fv_problem_normalize(&plan->problem, problem);
    if (status == FV_OK) status = choose_backend(plan, options->backend);
    if (status == FV_OK) status = choose_kernels(plan, options->kernels);
    if (status == FV_OK) {
        if (plan->problem.kv_layout_any) plan->problem.kv_layout = plan->backend->layout;
        status = plan->backend->create(plan);
    }
    if (status != FV_OK) {
        fv_plan_destroy(plan);
        return status;
    }
    plan->options.backend = plan->options.variant = plan->options.kernels = NULL;
    fv_log(context, FV_LOG_INFO, "%s", fv_plan_describe(plan));
    *out = plan;
    return FV_OK;
}

void fv_plan_destroy(fv_plan *plan)
{
    if (!plan) return;
    fv_step_buffers_deinit(&plan->buffers);
    fv_context_free(plan->context, plan->schedule_memory);
    fv_context_free(plan->context, plan);
}

size_t fv_plan_workspace_bytes(const fv_plan *plan) { return plan ? plan->workspace.bytes : 0; }

size_t fv_plan_buffer_bytes(const fv_plan *plan)
{
    if (!plan) return 0;
    return sizeof(*plan) + plan->schedule_bytes + fv_step_buffers_bytes(&plan->buffers);
}

fv_kv_layout fv_plan_kv_layout(const fv_plan *plan) { return plan ? plan->problem.kv_layout : FV_KV_LAYOUT_STRIDED; }

/* FNV-1a, byte by byte. */
static uint64_t hash_bytes(uint64_t hash, const void *data, size_t num_bytes)
{
    const uint8_t *bytes = data;
    for (size_t i = 0; i < num_bytes; i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

uint64_t fv_plan_graph_key(const fv_plan *plan)
{
    if (!plan) return 0;
    /* What a captured graph keeps: functions, sizes and pointers. Sizes of a static plan are those of its bounds. */
    const fv_batch *batch = &plan->batch;
    const uint64_t parts[] = {
        (uint64_t)(uintptr_t)plan->context,
        plan->serial,
        (uint64_t)(uintptr_t)plan->paged,
        (uint64_t)(uintptr_t)plan->dense,
        (uint64_t)plan->static_grid,
        (uint64_t)plan->static_list,
        (uint64_t)plan->num_segments,
        plan->static_grid ? 0 : (uint64_t)plan->used.num_items,
        plan->static_grid ? 0 : (uint64_t)plan->used.num_reduces,
        (uint64_t)plan->num_calls,
        (uint64_t)(uintptr_t)batch->query_start,
        (uint64_t)(uintptr_t)batch->seq_lens,
        (uint64_t)(uintptr_t)batch->block_table,
        (uint64_t)(uintptr_t)batch->slot_mapping,
        (uint64_t)(uintptr_t)batch->causal,
        plan->problem.tree_mask ? (uint64_t)(uintptr_t)batch->tree_mask : 0,
        (uint64_t)batch->block_table_stride,
        (uint64_t)batch->block_table_width,
    };
    uint64_t hash = hash_bytes(0xcbf29ce484222325u, parts, sizeof(parts));
    if (plan->static_grid || plan->static_list) return hash;
    const int32_t sizes[] = {batch->num_seqs, batch->num_tokens};
    hash = hash_bytes(hash, sizes, sizeof(sizes));
    static_assert(sizeof(fv_call) == 18 * sizeof(int32_t), "padding has no value");
    return hash_bytes(hash, plan->calls, (size_t)plan->num_calls * sizeof(*plan->calls));
}

/* Largest block id that the step uses: one pass over the used part of the table, on the host. The null block
 * and what is no block are reported at once. */
static fv_status find_max_block(fv_plan *plan, const fv_step *step)
{
    plan->max_block = -1;
    const int32_t is_encoder = plan->problem.type == FV_ATTENTION_ENCODER;
    if (!step->query_start || !plan->device->host_is_device || is_encoder) return FV_OK;
    for (int32_t seq = 0; seq < step->num_seqs; seq++) {
        if (step->query_start[seq + 1] == step->query_start[seq]) continue;
        const int32_t query_len = step->query_start[seq + 1] - step->query_start[seq];
        const int32_t causal = step->causal ? step->causal[seq] : 1;
        const fv_key_range keys = fv_block_keys(&plan->problem.context_parallel, step->seq_lens[seq],
                                                step->seq_lens[seq] - query_len, 0, query_len, causal,
                                                plan->problem.window);
        const int32_t *row = plan->batch.block_table + seq * plan->batch.block_table_stride;
        int32_t largest = -1;
        const int32_t end = (int32_t)fv_ceil_div(keys.end, plan->problem.block_size);
        for (int32_t i = keys.first / plan->problem.block_size; i < end; i++) {
            if (row[i] < 1) {
                return fv_fail(FV_ERR_INVALID,
                               "block_table[%d][%d] is %d, and keys in it are seen; accepted: from 1 on (0 is the null "
                               "block)",
                               seq, i, row[i]);
            }
            largest = fv_max_i32(largest, row[i]);
        }
        plan->max_block = fv_max_i64(plan->max_block, largest);
    }
    return FV_OK;
}

/* Largest slot that a new token may be written to, where the host can read them: the cache comes with the layer. */
static void find_max_slot(fv_plan *plan)
{
    const int64_t *slots = plan->batch.slot_mapping;
    plan->max_slot = -1;
    if (!slots || !plan->device->host_is_device) return;
    for (int32_t token = 0; token < plan->batch.num_tokens; token++) {
        if (slots[token] <= plan->max_slot) continue;
        plan->max_slot = slots[token];
        plan->max_slot_token = token;
    }
}

/* A graph would fill the buffers again at each launch, from staging memory that is another step's by then. */
static fv_status check_stream(const fv_plan *plan, fv_stream stream)
{
    fv_device *device = plan->device;
    if (!device->ops->is_capturing || !device->ops->is_capturing(device, stream)) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "fv_plan_update on a stream that is being captured; accepted: before fv_graph_begin "
                                   "or after fv_graph_end");
}

fv_status fv_plan_update(fv_plan *plan, const fv_batch *batch, fv_stream stream)
{
    if (!plan || !batch) return fv_fail(FV_ERR_INVALID, "plan or batch is NULL");
    plan->updated = 0;
    fv_step step;
    fv_status status = check_stream(plan, stream);
    if (status == FV_OK) status = fv_plan_check_batch(&step, plan, batch);
    if (status != FV_OK) return status;
    plan->batch = *batch;
    find_max_slot(plan);
    status = find_max_block(plan, &step);
    if (status == FV_OK) status = fv_schedule_step(plan, &step, stream);
    plan->updated = status == FV_OK;
    return status;
}

fv_status fv_plan_run(fv_plan *plan, const fv_layer *layer, void *workspace, fv_stream stream)
{
    return fv_plan_run_behind(plan, layer, NULL, workspace, stream);
}

fv_status fv_plan_run_behind(fv_plan *plan, const fv_layer *layer, const fv_before_layer *before, void *workspace,
                             fv_stream stream)
{
    if (!plan || !layer) return fv_fail(FV_ERR_INVALID, "plan or layer is NULL");
    if (!plan->updated) return fv_fail(FV_ERR_INVALID, "fv_plan_run before a successful fv_plan_update");
    if (!workspace && plan->workspace.bytes > 0) {
        return fv_fail(FV_ERR_INVALID, "workspace is NULL; %zu bytes are needed", plan->workspace.bytes);
    }
    fv_status status = fv_plan_check_workspace(workspace);
    if (status == FV_OK) status = fv_plan_check_layer(plan, layer);
    if (status != FV_OK) return status;
    if (plan->batch.num_seqs == 0 && !plan->static_grid) return FV_OK;
    return fv_schedule_run(plan, layer, before, workspace, stream);
}
