/* Making the calls of a step for one layer: parameters from the plan, the batch, the layer and the
 * workspace, and no decision but one: where the layer brings no new K/V, or under context parallelism, new
 * tokens are read from the cache. */
#include "backends/schedule.h"

#include "core/error.h"

typedef struct layer_run {
    const fv_plan *plan;
    const fv_layer *layer;
    char *workspace;
    fv_launch launch;
    fv_step_view step; /* on the device */
    int32_t has_new;   /* 1: new tokens can be read as they came */
} layer_run;

/* On a device the launch is sized by the bounds, so that a captured graph serves every step. */
static int32_t sized_by_bounds(const fv_plan *plan) { return plan->static_grid && !plan->device->host_is_device; }

static int32_t launch_tokens(const fv_plan *plan)
{
    return sized_by_bounds(plan) ? plan->bounds.max_num_tokens : plan->batch.num_tokens;
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

/* --- state and gather buffers ------------------------------------------------------------------------ */

/* Strides of a state buffer [state_tokens, Hq, Dv] fp32 with lse [state_tokens, Hq]. */
static int64_t state_head_stride(const fv_plan *plan) { return plan->problem.mha.v_head_size * (int64_t)sizeof(float); }

static int64_t state_token_stride(const fv_plan *plan) { return plan->problem.mha.num_heads * state_head_stride(plan); }

static int64_t state_lse_stride(const fv_plan *plan) { return plan->problem.mha.num_heads * (int64_t)sizeof(float); }

static int32_t state_index(fv_result_target target) { return target == FV_TARGET_CONTEXT_STATE; }

static fv_dense_keys gathered_keys(const layer_run *run, const fv_call *call)
{
    const fv_plan *plan = run->plan;
    const fv_mha_shape *mha = &plan->problem.mha;
    const int64_t bytes = (int64_t)fv_dtype_bytes(plan->gather_dtype);
    const int32_t *indices = run->step.indices + call->indices;
    return (fv_dense_keys){
        .k = run->workspace + plan->workspace.gather_k,
        .k_token_stride = mha->num_kv_heads * mha->head_size * bytes,
        .k_head_stride = mha->head_size * bytes,
        .v = run->workspace + plan->workspace.gather_v,
        .v_token_stride = mha->num_kv_heads * mha->v_head_size * bytes,
        .v_head_stride = mha->v_head_size * bytes,
        .dtype = plan->gather_dtype,
        .key_row = indices + 2 * call->num_seqs + 1 - call->first_seq,
    };
}

static fv_dense_keys new_keys(const fv_layer *layer)
{
    return (fv_dense_keys){
        .k = layer->k.data,
        .k_token_stride = layer->k.stride_bytes[0],
        .k_head_stride = layer->k.stride_bytes[1],
        .v = layer->v.data,
        .v_token_stride = layer->v.stride_bytes[0],
        .v_head_stride = layer->v.stride_bytes[1],
        .dtype = layer->k.dtype,
    };
}

/* --- the calls ---------------------------------------------------------------------------------------- */

static fv_status write_new(const layer_run *run, const fv_call *call)
{
    (void)call;
    const fv_plan *plan = run->plan;
    const fv_layer *layer = run->layer;
    if (!layer->k.data) return FV_OK; /* already in the cache */
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
        .num_tokens_at = &run->step.header->num_tokens,
        .k_scale = layer->k_scale,
        .v_scale = layer->v_scale,
        .num_kv_scales = num_scales(&plan->problem),
    };
    return plan->kernels->kv_write(&run->launch, &params);
}

static const uint8_t *causal_flags(const layer_run *run)
{
    const fv_plan *plan = run->plan;
    if (plan->problem.type == FV_ATTENTION_DECODER || plan->batch.causal) return plan->batch.causal;
    return (const uint8_t *)run->step.indices;
}

static void set_target(fv_attend_params *params, const layer_run *run, const fv_call *call)
{
    const fv_plan *plan = run->plan;
    const fv_layer *layer = run->layer;
    if (call->target == FV_TARGET_OUT) {
        params->out = layer->out.data;
        params->out_token_stride = layer->out.stride_bytes[0];
        params->out_head_stride = layer->out.stride_bytes[1];
        params->out_dtype = plan->problem.out_dtype;
        params->lse = layer->lse.data;
        params->lse_token_stride = layer->lse.stride_bytes[0];
        params->lse_head_stride = layer->lse.stride_bytes[1];
        params->sinks = plan->problem.sinks ? layer->sinks : NULL;
        return;
    }
    const int32_t state = state_index(call->target); /* the sink enters with the last merge */
    params->out = run->workspace + plan->workspace.state_out[state];
    params->out_token_stride = state_token_stride(plan);
    params->out_head_stride = state_head_stride(plan);
    params->out_dtype = FV_DTYPE_F32;
    params->lse = (float *)(void *)(run->workspace + plan->workspace.state_lse[state]);
    params->lse_token_stride = state_lse_stride(plan);
    params->lse_head_stride = (int64_t)sizeof(float);
    params->out_first_token = call->first_token;
}

static fv_attend_params attend_params(const layer_run *run, const fv_call *call)
{
    const fv_plan *plan = run->plan;
    const fv_layer *layer = run->layer;
    const fv_problem *problem = &plan->problem;
    const fv_batch *batch = &plan->batch;
    const int32_t reads_new = call->source == FV_KEYS_NEW || call->source == FV_KEYS_CACHE_AND_NEW;
    fv_attend_params params = {
        .q = layer->q.data,
        .q_token_stride = layer->q.stride_bytes[0],
        .q_head_stride = layer->q.stride_bytes[1],
        .alibi_slopes = problem->alibi ? layer->alibi_slopes : NULL,
        .q_dtype = problem->q_dtype,
        .num_heads = problem->mha.num_heads,
        .num_kv_heads = problem->mha.num_kv_heads,
        .head_size = problem->mha.head_size,
        .v_head_size = problem->mha.v_head_size,
        .scale = problem->scale,
        .soft_cap = problem->soft_cap,
        .window = problem->window,
        .alibi = problem->alibi,
        .context_parallel = problem->context_parallel,
        .num_seqs = batch->num_seqs,
        .num_seqs_at = &run->step.header->num_seqs,
        .query_start = batch->query_start,
        .seq_lens = batch->seq_lens,
        .causal = causal_flags(run),
        .tree_mask = problem->tree_mask ? batch->tree_mask : NULL,
        .block_q = plan->rule.block_q,
        .tile_keys = plan->rule.tile_keys,
        .partial_out = (float *)(void *)(run->workspace + plan->workspace.partial_out),
        .partial_max = (float *)(void *)(run->workspace + plan->workspace.partial_max),
        .partial_sum = (float *)(void *)(run->workspace + plan->workspace.partial_sum),
        .scratch = run->workspace + plan->workspace.scratch,
        .scratch_bytes = plan->workspace.scratch_bytes,
    };
    set_target(&params, run, call);
    if (call->source == FV_KEYS_GATHERED) {
        params.dense = gathered_keys(run, call);
    } else if (problem->type != FV_ATTENTION_ENCODER) {
        params.cache = layer->kv_cache;
        params.k_scale = layer->k_scale;
        params.v_scale = layer->v_scale;
        params.num_kv_scales = num_scales(problem);
        params.block_table = batch->block_table;
        params.block_table_stride = batch->block_table_stride;
        params.block_table_width = batch->block_table_width;
    }
    if (reads_new && run->has_new) params.dense = new_keys(layer);
    if (call->count >= 0) {
        params.items = run->step.items + call->first;
        params.num_items = call->count;
    } else {
        const int32_t num_seqs = sized_by_bounds(plan) ? plan->bounds.max_num_seqs : batch->num_seqs;
        params.num_q_blocks = launch_tokens(plan) / params.block_q + num_seqs;
        params.num_segments = plan->num_segments;
    }
    return params;
}

static fv_status attend_paged(const layer_run *run, const fv_call *call)
{
    const fv_attend_params params = attend_params(run, call);
    return run->plan->paged->launch(&run->launch, &params);
}

static fv_status attend_dense(const layer_run *run, const fv_call *call)
{
    if (call->source == FV_KEYS_NEW && !run->has_new) return attend_paged(run, call);
    const fv_attend_params params = attend_params(run, call);
    return run->plan->dense->launch(&run->launch, &params);
}

static fv_status reduce_segments(const layer_run *run, const fv_call *call)
{
    const fv_attend_params attend = attend_params(run, call);
    const fv_reduce_params params = {
        .out = attend.out,
        .out_token_stride = attend.out_token_stride,
        .out_head_stride = attend.out_head_stride,
        .out_dtype = attend.out_dtype,
        .lse = attend.lse,
        .lse_token_stride = attend.lse_token_stride,
        .lse_head_stride = attend.lse_head_stride,
        .sinks = attend.sinks,
        .num_heads = attend.num_heads,
        .v_head_size = attend.v_head_size,
        .items = call->count >= 0 ? run->step.reduces + call->first : NULL,
        .num_items = call->count,
        .num_seqs = attend.num_seqs,
        .num_seqs_at = attend.num_seqs_at,
        .query_start = attend.query_start,
        .block_q = attend.block_q,
        .num_q_blocks = attend.num_q_blocks,
        .num_segments = attend.num_segments,
        .partial_out = attend.partial_out,
        .partial_max = attend.partial_max,
        .partial_sum = attend.partial_sum,
    };
    return run->plan->kernels->reduce_segments(&run->launch, &params);
}

static fv_status gather_context(const layer_run *run, const fv_call *call)
{
    const fv_plan *plan = run->plan;
    const fv_batch *batch = &plan->batch;
    const fv_dense_keys rows = gathered_keys(run, call);
    const int32_t *indices = run->step.indices + call->indices;
    const fv_kv_gather_params params = {
        .k = run->workspace + plan->workspace.gather_k,
        .k_token_stride = rows.k_token_stride,
        .k_head_stride = rows.k_head_stride,
        .v = run->workspace + plan->workspace.gather_v,
        .v_token_stride = rows.v_token_stride,
        .v_head_stride = rows.v_head_stride,
        .dst_dtype = plan->gather_dtype,
        .cache = run->layer->kv_cache,
        .num_seqs = call->num_seqs,
        .block_table = batch->block_table + call->first_seq * batch->block_table_stride,
        .block_table_stride = batch->block_table_stride,
        .block_table_width = batch->block_table_width,
        .key_start = indices,
        .out_start = indices + call->num_seqs,
        .num_rows = call->num_rows,
        .k_scale = run->layer->k_scale,
        .v_scale = run->layer->v_scale,
        .num_kv_scales = num_scales(&plan->problem),
    };
    return plan->kernels->kv_gather(&run->launch, &params);
}

static fv_merge_side state_side(const layer_run *run, fv_result_target target, int64_t row)
{
    const fv_plan *plan = run->plan;
    const int32_t state = state_index(target);
    const char *lse = run->workspace + plan->workspace.state_lse[state] + row * state_lse_stride(plan);
    return (fv_merge_side){
        .out = run->workspace + plan->workspace.state_out[state] + row * state_token_stride(plan),
        .token_stride = state_token_stride(plan),
        .head_stride = state_head_stride(plan),
        .lse = (const float *)(const void *)lse,
        .lse_token_stride = state_lse_stride(plan),
        .lse_head_stride = (int64_t)sizeof(float),
    };
}

static fv_status merge_states(const layer_run *run, const fv_call *call)
{
    const fv_plan *plan = run->plan;
    fv_attend_params target = {0};
    set_target(&target, run, call);
    const int64_t state_row = (int64_t)call->merge_token - call->first_token;
    const int64_t out_row = call->merge_token - target.out_first_token;
    char *lse = (char *)target.lse;
    const fv_merge_params params = {
        .out = (char *)target.out + out_row * target.out_token_stride,
        .token_stride = target.out_token_stride,
        .head_stride = target.out_head_stride,
        .lse = lse ? (float *)(void *)(lse + out_row * target.lse_token_stride) : NULL,
        .lse_token_stride = target.lse_token_stride,
        .lse_head_stride = target.lse_head_stride,
        .a = state_side(run, FV_TARGET_NEW_STATE, state_row),
        .b = state_side(run, FV_TARGET_CONTEXT_STATE, state_row),
        .dtype = FV_DTYPE_F32,
        .out_dtype = target.out_dtype,
        .sinks = target.sinks,
        .num_tokens = call->num_tokens,
        .num_heads = plan->problem.mha.num_heads,
        .head_size = plan->problem.mha.v_head_size,
    };
    return plan->kernels->merge_states(&run->launch, &params);
}

fv_status fv_schedule_run(const fv_plan *plan, const fv_layer *layer, char *workspace, fv_stream stream)
{
    static fv_status (*const operations[FV_NUM_OPERATIONS])(const layer_run *, const fv_call *) = {
        [FV_OP_KV_WRITE] = write_new,        [FV_OP_ATTEND_PAGED] = attend_paged,
        [FV_OP_ATTEND_DENSE] = attend_dense, [FV_OP_REDUCE_SEGMENTS] = reduce_segments,
        [FV_OP_KV_GATHER] = gather_context,  [FV_OP_MERGE_STATES] = merge_states,
    };
    const layer_run run = {
        .plan = plan,
        .layer = layer,
        .workspace = workspace,
        .launch = {plan->device, &plan->context->executor, stream},
        .step = fv_step_buffers_on_device(&plan->buffers),
        .has_new = layer->k.data && plan->problem.context_parallel.world <= 1,
    };
    fv_status status = FV_OK;
    for (int32_t i = 0; i < plan->num_calls && status == FV_OK; i++) {
        status = operations[plan->calls[i].operation](&run, &plan->calls[i]);
    }
    return status;
}
