/* TRITON_ATTN: the unified strategy. The new K/V go to the cache, then one kernel serves prefill, extend
 * and decode: Q blocks of several tokens x the query heads of a KV head, against tiles of keys.
 *
 *   kv_write  ->  attend_paged                              2D: a Q block sees all its keys in one go
 *   kv_write  ->  attend_paged (segments)  ->  reduce       3D: keys cut into segments, then merged
 *
 * Source: "The Anatomy of a Triton Attention Kernel" (Ringlein et al.): Q blocks 4.3, parallel tiled
 * softmax 4.4, adjustable tiles 4.5, static launch grid 4.7. Differences: where the host knows the
 * lengths, 2D or 3D is decided for each Q block by cost (planner/work_list.c), so queries of several
 * tokens are cut too and nothing jumps at a batch size; the sink is added at the end, once. The static
 * grid, with binary search over the prefix sums of Q blocks, serves where lengths are on the device only
 * and under captured graphs. */
#include <stdio.h>
#include <string.h>

#include "backends/backend.h"
#include "core/error.h"

#define STATIC_SEGMENTS 16
#define STATIC_SLOTS_LIMIT_BYTES (64ll << 20)

static const fv_kernel_table *default_kernels(const fv_device *device)
{
    const fv_kernel_table *const *tables = device ? device->tables : NULL;
    const int32_t num_tables = device ? device->num_tables : fv_cpu_tables(&tables, fv_cpu_isa());
    return num_tables > 0 ? tables[num_tables - 1] : NULL;
}

static int32_t layout_fits(fv_kv_layout layout)
{
    return layout == FV_KV_LAYOUT_STRIDED || layout == FV_KV_LAYOUT_NB_2_BS_H_D || layout == FV_KV_LAYOUT_PACKED_NHD ||
           layout == FV_KV_LAYOUT_PACKED_HND;
}

static int32_t head_size_fits(int32_t head_size) { return head_size >= 32 && head_size <= 512 && head_size % 8 == 0; }

static void why_not(fv_reasons *reasons, const fv_device *device, const fv_problem *problem)
{
    static const char *const types[] = {"decoder", "encoder", "cross"};
    if (problem->kind != FV_ATTENTION_MHA) {
        fv_reasons_add(reasons, "MLA not supported");
        return;
    }
    if (problem->type != FV_ATTENTION_DECODER) {
        fv_reasons_add(reasons, "attention type %s not supported", types[problem->type]);
    }
    if (!head_size_fits(problem->mha.head_size) || !head_size_fits(problem->mha.v_head_size)) {
        fv_reasons_add(reasons, "head_size not supported (%d, values %d; accepted: 32 to 512 in steps of 8)",
                       problem->mha.head_size, problem->mha.v_head_size);
    }
    if (problem->kv_dtype == FV_DTYPE_I8) fv_reasons_add(reasons, "kv_cache_dtype not supported (int8)");
    if (!problem->kv_layout_any && !layout_fits(problem->kv_layout)) {
        fv_reasons_add(reasons, "layout %s not supported (accepted: nb_2_bs_h_d, packed_nhd, packed_hnd, strided)",
                       fv_kv_layout_name(problem->kv_layout));
    }
    const fv_kernel_table *kernels = default_kernels(device);
    if (!kernels || kernels->num_attend_paged == 0) {
        fv_reasons_add(reasons, "the device has no attend_paged kernel");
        return;
    }
    const char *reason = kernels->attend_paged[0].why_not(problem);
    if (reason) fv_reasons_add(reasons, "%s", reason);
}

/* The variant that was asked for, or the smallest Q block that takes the longest query at once. */
static fv_status choose_variant(fv_plan *plan, const char *asked)
{
    const fv_kernel_table *kernels = plan->kernels;
    const int64_t rows = (int64_t)plan->bounds.max_query_len * plan->group;
    const char *reason = "the table has none";
    for (int32_t i = 0; i < kernels->num_attend_paged; i++) {
        const fv_attend_variant *variant = &kernels->attend_paged[i];
        const char *refusal = variant->why_not(&plan->problem);
        if (refusal) {
            reason = refusal;
            continue;
        }
        if (asked) {
            if (strcmp(variant->name, asked) == 0) plan->variant = variant;
            continue;
        }
        const fv_attend_variant *best = plan->variant;
        const int32_t fits = variant->block_m >= rows;
        if (!best || (fits && (best->block_m < rows || variant->block_m < best->block_m)) ||
            (!fits && best->block_m < rows && variant->block_m > best->block_m)) {
            plan->variant = variant;
        }
    }
    if (plan->variant) return FV_OK;
    if (!asked) {
        return fv_fail(FV_ERR_UNSUPPORTED, "no attend_paged of kernels %s serves the problem: %s", kernels->name,
                       reason);
    }
    char names[256] = "";
    size_t used = 0;
    for (int32_t i = 0; i < kernels->num_attend_paged && used < sizeof(names); i++) {
        used += (size_t)snprintf(names + used, sizeof(names) - used, "%s%s", i ? ", " : "",
                                 kernels->attend_paged[i].name);
    }
    return fv_fail(FV_ERR_INVALID, "no variant '%s' of attend_paged; kernels %s have: %s", asked, kernels->name, names);
}

static size_t slot_bytes(const fv_plan *plan)
{
    return (size_t)plan->problem.mha.num_heads * (size_t)(plan->problem.mha.v_head_size + 2) * sizeof(float);
}

/* Parameters that do not change after creation. */
static fv_attend_params attend_template(const fv_plan *plan)
{
    const fv_problem *problem = &plan->problem;
    return (fv_attend_params){
        .q_dtype = problem->q_dtype,
        .out_dtype = problem->out_dtype,
        .num_heads = problem->mha.num_heads,
        .num_kv_heads = problem->mha.num_kv_heads,
        .head_size = problem->mha.head_size,
        .v_head_size = problem->mha.v_head_size,
        .scale = problem->scale,
        .soft_cap = problem->soft_cap,
        .window = problem->window,
        .alibi = problem->alibi,
        .context_parallel = problem->context_parallel,
        .block_q = plan->rule.block_q,
        .tile_keys = plan->rule.tile_keys,
        .scratch_bytes = plan->workspace.scratch_bytes,
    };
}

static void lay_out_workspace(fv_plan *plan)
{
    const fv_mha_shape *mha = &plan->problem.mha;
    const size_t slots = (size_t)plan->room.slot_capacity;
    const fv_attend_params params = attend_template(plan);
    fv_workspace_layout *layout = &plan->workspace;
    size_t at = 0;
    layout->partial_out = at;
    at += (size_t)fv_round_up((int64_t)(slots * (size_t)mha->num_heads * (size_t)mha->v_head_size * sizeof(float)),
                              256);
    layout->partial_max = at;
    at += (size_t)fv_round_up((int64_t)(slots * (size_t)mha->num_heads * sizeof(float)), 256);
    layout->partial_sum = at;
    at += (size_t)fv_round_up((int64_t)(slots * (size_t)mha->num_heads * sizeof(float)), 256);
    layout->scratch = at;
    layout->scratch_bytes = (size_t)fv_round_up((int64_t)plan->variant->scratch_bytes(&params), 256);
    at += layout->scratch_bytes * (size_t)plan->device->num_workers;
    layout->bytes = at;
}

/* Segments of the static grid: only for decode-like bounds, within a memory limit. */
static void size_static_grid(fv_plan *plan)
{
    const fv_bounds *bounds = &plan->bounds;
    const int64_t slots = (int64_t)bounds->max_num_tokens * STATIC_SEGMENTS;
    const int32_t decode = bounds->max_query_len * plan->group <= FV_DECODE_ROWS &&
                           slots * (int64_t)slot_bytes(plan) <= STATIC_SLOTS_LIMIT_BYTES;
    const int32_t cut = plan->options.path == FV_PATH_3D || (plan->options.path == FV_PATH_AUTO && decode);
    plan->num_segments = cut ? STATIC_SEGMENTS : 1;
    if (plan->options.path == FV_PATH_3D && plan->options.segment_keys > 0) {
        plan->num_segments = (int32_t)fv_ceil_div(bounds->max_seq_len, plan->options.segment_keys);
    }
    const int64_t needed = cut ? (int64_t)bounds->max_num_tokens * plan->num_segments : 0;
    plan->room.slot_capacity = fv_max_i32(plan->room.slot_capacity, (int32_t)fv_min_i64(needed, INT32_MAX));
}

static fv_status create(fv_plan *plan)
{
    plan->group = plan->problem.mha.num_heads / plan->problem.mha.num_kv_heads;
    fv_status status = choose_variant(plan, plan->options.variant);
    if (status != FV_OK) return status;

    plan->static_grid = plan->options.static_grid;
    plan->rule = (fv_split_rule){
        .problem = &plan->problem,
        .block_q = fv_max_i32(1, plan->variant->block_m / plan->group),
        .tile_keys = plan->variant->tile_keys,
        .num_workers = plan->device->num_workers,
        .path = plan->options.path,
        .batch_invariant = plan->options.batch_invariant,
        .segment_keys = plan->options.segment_keys,
    };
    fv_split_rule_fix(&plan->rule, &plan->bounds, slot_bytes(plan));
    fv_work_list_room(&plan->room, &plan->rule, &plan->bounds, slot_bytes(plan));
    size_static_grid(plan);
    lay_out_workspace(plan);
    return fv_step_buffers_init(&plan->buffers, plan->device, plan->static_grid ? 0 : plan->room.item_capacity,
                                plan->static_grid ? 0 : plan->room.reduce_capacity);
}

static fv_status update(fv_plan *plan, const fv_step *step, fv_stream stream)
{
    fv_step_view host;
    fv_status status = fv_step_buffers_begin(&host, &plan->buffers);
    if (status != FV_OK) return status;
    host.header->num_seqs = plan->batch.num_seqs;
    host.header->num_tokens = plan->batch.num_tokens;
    plan->num_items = plan->num_reduces = 0;
    if (!plan->static_grid && step->query_start) {
        fv_work_list list = plan->room;
        list.items = host.items;
        list.reduces = host.reduces;
        status = fv_work_list_build(&list, &plan->rule, step);
        if (status != FV_OK) return status;
        plan->num_items = list.num_items;
        plan->num_reduces = list.num_reduces;
    }
    return fv_step_buffers_commit(&plan->buffers, plan->num_items, plan->num_reduces, stream);
}

/* 1 where this step's schedule is the static grid. */
static int32_t on_grid(const fv_plan *plan)
{
    return plan->static_grid || (plan->num_items == 0 && plan->batch.num_seqs > 0);
}

/* On a device the launch is sized by the bounds, so that a captured graph serves every step. */
static int32_t launch_tokens(const fv_plan *plan)
{
    const int32_t fixed = plan->static_grid && !plan->device->host_is_device;
    return fixed ? plan->bounds.max_num_tokens : plan->batch.num_tokens;
}

static int32_t num_scales(const fv_problem *problem)
{
    switch (problem->kv_scaling) {
    case FV_KV_SCALING_PER_TENSOR: return 1;
    case FV_KV_SCALING_PER_HEAD: return problem->mha.num_kv_heads;
    case FV_KV_SCALING_NONE:
    case FV_KV_SCALING_PER_TOKEN_HEAD: break;
    }
    return 0;
}

static fv_status write_new(const fv_plan *plan, const fv_launch *launch, const fv_layer *layer)
{
    const fv_kv_write_params params = {
        .k = layer->k.data,
        .k_token_stride = layer->k.stride_bytes[0],
        .k_head_stride = layer->k.stride_bytes[1],
        .v = layer->v.data,
        .v_token_stride = layer->v.stride_bytes[0],
        .v_head_stride = layer->v.stride_bytes[1],
        .src_dtype = layer->k.dtype,
        .cache = layer->kv_cache,
        .slot_mapping = plan->batch.slot_mapping,
        .num_tokens = launch_tokens(plan),
        .num_tokens_at = &fv_step_buffers_on_device(&plan->buffers).header->num_tokens,
        .k_scale = layer->k_scale,
        .v_scale = layer->v_scale,
        .num_kv_scales = num_scales(&plan->problem),
    };
    return plan->kernels->kv_write(launch, &params);
}

static fv_attend_params attend_params(const fv_plan *plan, const fv_layer *layer, char *workspace)
{
    const fv_step_view step = fv_step_buffers_on_device(&plan->buffers);
    const fv_batch *batch = &plan->batch;
    fv_attend_params params = attend_template(plan);
    params.q = layer->q.data;
    params.q_token_stride = layer->q.stride_bytes[0];
    params.q_head_stride = layer->q.stride_bytes[1];
    params.out = layer->out.data;
    params.out_token_stride = layer->out.stride_bytes[0];
    params.out_head_stride = layer->out.stride_bytes[1];
    params.lse = layer->lse.data;
    params.lse_token_stride = layer->lse.stride_bytes[0];
    params.lse_head_stride = layer->lse.stride_bytes[1];
    params.cache = layer->kv_cache;
    params.sinks = plan->problem.sinks ? layer->sinks : NULL;
    params.alibi_slopes = plan->problem.alibi ? layer->alibi_slopes : NULL;
    params.k_scale = layer->k_scale;
    params.v_scale = layer->v_scale;
    params.num_kv_scales = num_scales(&plan->problem);
    params.num_seqs = batch->num_seqs;
    params.num_seqs_at = &step.header->num_seqs;
    params.query_start = batch->query_start;
    params.seq_lens = batch->seq_lens;
    params.block_table = batch->block_table;
    params.block_table_stride = batch->block_table_stride;
    params.block_table_width = batch->block_table_width;
    params.causal = batch->causal;
    params.tree_mask = plan->problem.tree_mask ? batch->tree_mask : NULL;
    if (on_grid(plan)) {
        const int32_t fixed = plan->static_grid && !plan->device->host_is_device;
        params.num_q_blocks = launch_tokens(plan) / params.block_q +
                              (fixed ? plan->bounds.max_num_seqs : batch->num_seqs);
        params.num_segments = plan->num_segments;
    } else {
        params.items = step.items;
        params.num_items = plan->num_items;
    }
    params.partial_out = (float *)(void *)(workspace + plan->workspace.partial_out);
    params.partial_max = (float *)(void *)(workspace + plan->workspace.partial_max);
    params.partial_sum = (float *)(void *)(workspace + plan->workspace.partial_sum);
    params.scratch = workspace + plan->workspace.scratch;
    return params;
}

static fv_reduce_params reduce_params(const fv_plan *plan, const fv_attend_params *attend)
{
    return (fv_reduce_params){
        .out = attend->out,
        .out_token_stride = attend->out_token_stride,
        .out_head_stride = attend->out_head_stride,
        .out_dtype = attend->out_dtype,
        .lse = attend->lse,
        .lse_token_stride = attend->lse_token_stride,
        .lse_head_stride = attend->lse_head_stride,
        .sinks = attend->sinks,
        .num_heads = attend->num_heads,
        .v_head_size = attend->v_head_size,
        .items = on_grid(plan) ? NULL : fv_step_buffers_on_device(&plan->buffers).reduces,
        .num_items = plan->num_reduces,
        .num_seqs = attend->num_seqs,
        .num_seqs_at = attend->num_seqs_at,
        .query_start = attend->query_start,
        .block_q = attend->block_q,
        .num_q_blocks = attend->num_q_blocks,
        .num_segments = attend->num_segments,
        .partial_out = attend->partial_out,
        .partial_max = attend->partial_max,
        .partial_sum = attend->partial_sum,
    };
}

static fv_status run(fv_plan *plan, const fv_layer *layer, char *workspace, fv_stream stream)
{
    const fv_launch launch = {plan->device, &plan->context->executor, stream};
    if (layer->k.data) {
        const fv_status status = write_new(plan, &launch, layer);
        if (status != FV_OK) return status;
    }
    const fv_attend_params attend = attend_params(plan, layer, workspace);
    const fv_status status = plan->variant->launch(&launch, &attend);
    const int32_t cut = on_grid(plan) ? plan->num_segments > 1 : plan->num_reduces > 0;
    if (status != FV_OK || !cut) return status;
    const fv_reduce_params reduce = reduce_params(plan, &attend);
    return plan->kernels->reduce_segments(&launch, &reduce);
}

const fv_backend fv_triton_attn = {
    .name = "TRITON_ATTN",
    .summary = "unified: writes the new K/V, then one kernel for prefill, extend and decode; 2D or 3D",
    .layout = FV_KV_LAYOUT_NB_2_BS_H_D,
    .why_not = why_not,
    .create = create,
    .update = update,
    .run = run,
};
