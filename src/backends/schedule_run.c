/* Making the calls of a step for one layer: parameters from the plan, the batch, the layer and the
 * workspace, and no decision but one: where the layer brings no new K/V, or under context parallelism, new
 * tokens are read from the cache. */
#include "backends/schedule.h"

#include <assert.h>

#include "core/error.h"

#define SCRATCH_GUARD 0xa5 /* each byte of a guard */

typedef struct layer_run {
    const fv_plan *plan;
    const fv_layer *layer;
    const fv_before_layer *before; /* NULL: q and k come as they are attended */
    char *workspace;
    fv_launch launch;
    fv_step_view step; /* on the device */
    int32_t *claims;   /* of the attention kernels, one after the other */
    int32_t has_new;   /* 1: new tokens can be read as they came */
    int32_t copies_q;  /* 1: the rotation puts the rope parts of all queries behind their absorbed parts */
    int32_t makes_q;   /* 1: absorbed queries are made with the write of the keys */
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

static fv_key_rotation key_rotation(const fv_plan *plan, const fv_layer *layer)
{
    const fv_mla_shape *mla = &plan->problem.mla;
    if (plan->problem.kind != FV_ATTENTION_MLA || !mla->rotate_at_reading) return (fv_key_rotation){0};
    return (fv_key_rotation){layer->rope_cos, layer->rope_sin, mla->qk_rope_head_dim, layer->num_rope_positions};
}

/* --- state and gather buffers ------------------------------------------------------------------------ */

/* Strides of a state buffer [state_tokens, Hq, Dv] fp32 with lse [state_tokens, Hq] or [Hq, state_tokens]. */
static int64_t state_head_stride(const fv_plan *plan)
{
    return plan->dense_problem.mha.v_head_size * (int64_t)sizeof(float);
}

static int64_t state_token_stride(const fv_plan *plan) { return plan->problem.mha.num_heads * state_head_stride(plan); }

static int64_t state_lse_token_stride(const fv_plan *plan)
{
    return (plan->lse_by_head ? 1 : plan->problem.mha.num_heads) * (int64_t)sizeof(float);
}

static int64_t state_lse_head_stride(const fv_plan *plan)
{
    return (plan->lse_by_head ? plan->contexts.state_tokens : 1) * (int64_t)sizeof(float);
}

/* Of absorbed queries, and of attended latents. */
static int64_t absorbed_head_stride(const fv_plan *plan)
{
    return plan->problem.mha.head_size * (int64_t)fv_dtype_bytes(plan->problem.q_dtype);
}

static int64_t latent_head_stride(const fv_plan *plan)
{
    return plan->problem.mha.v_head_size * (int64_t)fv_dtype_bytes(plan->problem.q_dtype);
}

static int32_t state_index(fv_result_target target) { return target == FV_TARGET_CONTEXT_STATE; }

/* Latents and what they expand to: the nope parts and values of a head side by side, one rope part for all. */
static fv_dense_keys expanded_keys(const layer_run *run, const int32_t *key_row)
{
    const fv_plan *plan = run->plan;
    const fv_mla_shape *mla = &plan->problem.mla;
    const int64_t bytes = (int64_t)fv_dtype_bytes(plan->gather_dtype);
    const int64_t head_stride = (mla->qk_nope_head_dim + mla->v_head_dim) * bytes;
    const char *expanded = run->workspace + plan->workspace.gather_v;
    return (fv_dense_keys){
        .k = expanded,
        .k_token_stride = mla->num_heads * head_stride,
        .k_head_stride = head_stride,
        .k_shared = run->workspace + plan->workspace.gather_k + mla->kv_lora_rank * bytes,
        .k_shared_token_stride = plan->problem.mha.head_size * bytes,
        .shared_size = mla->qk_rope_head_dim,
        .v = expanded + mla->qk_nope_head_dim * bytes,
        .v_token_stride = mla->num_heads * head_stride,
        .v_head_stride = head_stride,
        .dtype = plan->gather_dtype,
        .key_row = key_row,
    };
}

static fv_dense_keys gathered_keys(const layer_run *run, const fv_call *call)
{
    const fv_plan *plan = run->plan;
    const fv_mha_shape *mha = &plan->problem.mha;
    const int64_t bytes = (int64_t)fv_dtype_bytes(plan->gather_dtype);
    const int32_t *key_row = run->step.indices + call->indices + 2 * call->num_seqs + 1 - call->first_seq;
    if (plan->absorbs) return expanded_keys(run, key_row);
    return (fv_dense_keys){
        .k = run->workspace + plan->workspace.gather_k,
        .k_token_stride = mha->num_kv_heads * mha->head_size * bytes,
        .k_head_stride = mha->head_size * bytes,
        .v = run->workspace + plan->workspace.gather_v,
        .v_token_stride = mha->num_kv_heads * mha->v_head_size * bytes,
        .v_head_stride = mha->v_head_size * bytes,
        .dtype = plan->gather_dtype,
        .key_row = key_row,
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

/* Rope parts of the absorbed queries, row 0 = token first_token of the batch. */
static fv_rope_rows absorbed_rope_parts(const layer_run *run)
{
    const fv_plan *plan = run->plan;
    const fv_mla_shape *mla = &plan->problem.mla;
    const int64_t latent_bytes = mla->kv_lora_rank * (int64_t)fv_dtype_bytes(plan->problem.q_dtype);
    return (fv_rope_rows){
        .data = run->workspace + plan->workspace.absorbed_q + latent_bytes,
        .token_stride = absorbed_head_stride(plan) * mla->num_heads,
        .head_stride = absorbed_head_stride(plan),
        .num_heads = mla->num_heads,
    };
}

/* --- the calls ---------------------------------------------------------------------------------------- */

static fv_kv_write_params write_params(const layer_run *run)
{
    const fv_plan *plan = run->plan;
    const fv_layer *layer = run->layer;
    return (fv_kv_write_params){
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
}

static fv_rope_kv_write_params rotated_write_params(const layer_run *run)
{
    fv_rope_kv_write_params params = {.rope = *run->before->rope, .write = write_params(run)};
    params.rope.num_tokens_at = params.write.num_tokens_at;
    return params;
}

/* The queries of all tokens, absorbed. */
static fv_mla_query_params query_params(const layer_run *run)
{
    const fv_plan *plan = run->plan;
    const fv_mla_shape *mla = &plan->problem.mla;
    const fv_tensor *x = run->before->x, *q_up = run->before->q_up, *kv_up = &run->layer->kv_up;
    fv_mla_query_params params = {
        .x = x->data,
        .x_row_stride = x->stride_bytes[0],
        .q_up = q_up->data,
        .q_up_row_stride = q_up->stride_bytes[0],
        .kv_up = kv_up->data,
        .kv_up_row_stride = kv_up->stride_bytes[1],
        .kv_up_head_stride = kv_up->stride_bytes[0],
        .out = run->workspace + plan->workspace.absorbed_q,
        .dtype = plan->problem.q_dtype,
        .num_rows = launch_tokens(plan),
        .num_heads = mla->num_heads,
        .depth = (int32_t)x->shape[1],
        .nope_size = mla->qk_nope_head_dim,
        .rope_size = mla->qk_rope_head_dim,
        .latent_size = mla->kv_lora_rank,
        .keys = rotated_write_params(run),
    };
    params.keys.rope.q.data = NULL;
    return params;
}

static fv_status write_new(const layer_run *run, const fv_call *call)
{
    (void)call;
    const fv_kernel_table *kernels = run->plan->kernels;
    if (!run->layer->k.data) return FV_OK; /* already in the cache */
    if (run->makes_q) {
        const fv_mla_query_params params = query_params(run);
        return kernels->mla_query->run(&run->launch, &params);
    }
    if (run->before) {
        fv_rope_kv_write_params params = rotated_write_params(run);
        if (run->copies_q) params.q_copy = absorbed_rope_parts(run);
        return kernels->rope_kv_write(&run->launch, &params);
    }
    const fv_kv_write_params params = write_params(run);
    return kernels->kv_write(&run->launch, &params);
}

static const uint8_t *causal_flags(const layer_run *run)
{
    const fv_plan *plan = run->plan;
    if (plan->problem.type == FV_ATTENTION_DECODER || plan->batch.causal) return plan->batch.causal;
    return (const uint8_t *)run->step.indices;
}

/* Attended latents, row 0 = token first_token; their LSE is that of the output. */
static void set_latent_target(fv_attend_params *params, const layer_run *run, const fv_call *call)
{
    const fv_plan *plan = run->plan;
    const fv_tensor *lse = &run->layer->lse;
    params->out = run->workspace + plan->workspace.latents;
    params->out_token_stride = latent_head_stride(plan) * plan->problem.mha.num_heads;
    params->out_head_stride = latent_head_stride(plan);
    params->out_dtype = plan->problem.q_dtype;
    params->lse = lse->data ? (float *)(void *)((char *)lse->data + call->first_token * lse->stride_bytes[0]) : NULL;
    params->lse_token_stride = lse->stride_bytes[0];
    params->lse_head_stride = lse->stride_bytes[1];
    params->out_first_token = call->first_token;
}

static void set_target(fv_attend_params *params, const layer_run *run, const fv_call *call)
{
    const fv_plan *plan = run->plan;
    const fv_layer *layer = run->layer;
    if (call->target == FV_TARGET_LATENTS) {
        set_latent_target(params, run, call);
        return;
    }
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
    params->lse_token_stride = state_lse_token_stride(plan);
    params->lse_head_stride = state_lse_head_stride(plan);
    params->out_first_token = call->first_token;
}

static void set_query(fv_attend_params *params, const layer_run *run, const fv_call *call)
{
    const fv_plan *plan = run->plan;
    const fv_tensor *q = &run->layer->q;
    if (call->target != FV_TARGET_LATENTS) {
        params->q = q->data;
        params->q_token_stride = q->stride_bytes[0];
        params->q_head_stride = q->stride_bytes[1];
        return;
    }
    params->q_head_stride = absorbed_head_stride(plan);
    params->q_token_stride = absorbed_head_stride(plan) * plan->problem.mha.num_heads;
    params->q = run->workspace + plan->workspace.absorbed_q - call->first_token * params->q_token_stride;
}

static void set_cache(fv_attend_params *params, const layer_run *run)
{
    const fv_plan *plan = run->plan;
    const fv_layer *layer = run->layer;
    const fv_batch *batch = &plan->batch;
    params->cache = layer->kv_cache;
    params->k_scale = layer->k_scale;
    params->v_scale = layer->v_scale;
    params->num_kv_scales = num_scales(&plan->problem);
    params->rotation = key_rotation(plan, layer);
    params->block_table = batch->block_table;
    params->block_table_stride = batch->block_table_stride;
    params->block_table_width = batch->block_table_width;
}

static fv_attend_params attend_params(const layer_run *run, const fv_call *call)
{
    const fv_plan *plan = run->plan;
    const fv_layer *layer = run->layer;
    const int32_t is_dense = call->operation == FV_OP_ATTEND_DENSE;
    const fv_problem *problem = is_dense ? &plan->dense_problem : &plan->problem;
    const fv_split_rule *rule = is_dense ? &plan->dense_rule : &plan->rule;
    const fv_batch *batch = &plan->batch;
    const int32_t reads_new = call->source == FV_KEYS_NEW || call->source == FV_KEYS_CACHE_AND_NEW;
    fv_attend_params params = {
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
        .batch_invariant = plan->options.batch_invariant,
        .block_q = rule->block_q,
        .tile_keys = rule->tile_keys,
        .partial_out = (float *)(void *)(run->workspace + plan->workspace.partial_out),
        .partial_max = (float *)(void *)(run->workspace + plan->workspace.partial_max),
        .partial_sum = (float *)(void *)(run->workspace + plan->workspace.partial_sum),
        .claims = run->claims,
        .max_seq_len = plan->bounds.max_seq_len,
        .ahead_tracks = plan->context->ahead_tracks,
        .ahead_is_near = (int16_t)plan->context->ahead_is_near,
        .subnormals_are_fast = (int16_t)plan->context->subnormals_are_fast,
        .multiplies_pairs = plan->context->multiplies_pairs,
        .scratch = run->workspace + plan->workspace.scratch,
        .scratch_bytes = plan->workspace.scratch_bytes,
    };
    set_query(&params, run, call);
    set_target(&params, run, call);
    if (call->source == FV_KEYS_GATHERED) {
        params.dense = gathered_keys(run, call);
    } else if (problem->type != FV_ATTENTION_ENCODER) {
        set_cache(&params, run);
    }
    if (reads_new && run->has_new) params.dense = new_keys(layer);
    if (call->count >= 0) {
        params.items = run->step.items + call->first;
        params.num_items = call->count;
        params.num_split = call->num_split;
        params.num_segments = call->num_meeting;
        params.piece_pages = plan->piece_keys / plan->problem.block_size;
        params.lane_heads = call->lane_heads;
        if (plan->static_list) {
            params.num_items_at = &run->step.header->num_items;
            params.num_seqs = plan->bounds.max_num_seqs;
        }
    } else {
        const int32_t num_seqs = sized_by_bounds(plan) ? plan->bounds.max_num_seqs : batch->num_seqs;
        params.whole_queries = plan->bounds.max_query_len <= params.block_q;
        params.num_q_blocks = num_seqs + (params.whole_queries ? 0 : launch_tokens(plan) / params.block_q);
        params.num_segments = plan->num_segments;
        params.num_split = plan->splits_cells ? params.num_q_blocks : 0;
    }
    if (!params.batch_invariant) params.item_tokens = call->item_tokens;
    return params;
}

/* The guards behind all workers' scratch: is_check 0 writes them, 1 says whether they are as they were. */
static int32_t guard_scratch(const layer_run *run, int32_t is_check)
{
    const fv_plan *plan = run->plan;
    int32_t is_whole = 1;
    for (int32_t worker = 0; worker < plan->device->num_workers && plan->device->host_is_device; worker++) {
        unsigned char *end = (unsigned char *)run->workspace + plan->workspace.scratch +
                             (size_t)(worker + 1) * plan->workspace.scratch_bytes;
        for (unsigned char *at = end - FV_SCRATCH_GUARD_BYTES; at < end; at++) {
            if (!is_check) *at = SCRATCH_GUARD;
            is_whole = is_whole && *at == SCRATCH_GUARD;
        }
    }
    return is_whole;
}

static fv_status launch_guarded(const layer_run *run, const fv_attend_variant *variant, const fv_attend_params *params)
{
    (void)guard_scratch(run, 0);
    const fv_status status = variant->launch(&run->launch, params);
    assert(guard_scratch(run, 1)); /* an item of more rows than its kernel's scratch_bytes() knew of */
    return status;
}

static fv_status attend_paged(const layer_run *run, const fv_call *call)
{
    const fv_attend_params params = attend_params(run, call);
    return launch_guarded(run, run->plan->paged, &params);
}

static fv_status attend_dense(const layer_run *run, const fv_call *call)
{
    if (call->source == FV_KEYS_NEW && !run->has_new) return attend_paged(run, call);
    const fv_attend_params params = attend_params(run, call);
    return launch_guarded(run, run->plan->dense, &params);
}

static int32_t narrows_partials(const layer_run *run, const fv_call *call, const fv_attend_params *attend)
{
    const fv_attend_variant *variant = run->plan->paged;
    if (call->partials_of != FV_OP_ATTEND_PAGED || !variant->narrows_partials) return 0;
    return variant->narrows_partials(&run->launch, attend);
}

static fv_status reduce_segments(const layer_run *run, const fv_call *call)
{
    const fv_attend_params attend = attend_params(run, call);
    const int64_t first_token = attend.out_first_token; /* reductions count tokens of the batch */
    const int32_t of_call = call->count >= 0 ? call->most_segments : attend.num_segments;
    const int32_t most_segments = run->plan->options.batch_invariant ? 0 : of_call;
    char *lse = (char *)attend.lse;
    const fv_reduce_params params = {
        .out = (char *)attend.out - first_token * attend.out_token_stride,
        .out_token_stride = attend.out_token_stride,
        .out_head_stride = attend.out_head_stride,
        .out_dtype = attend.out_dtype,
        .lse = lse ? (float *)(void *)(lse - first_token * attend.lse_token_stride) : NULL,
        .lse_token_stride = attend.lse_token_stride,
        .lse_head_stride = attend.lse_head_stride,
        .sinks = attend.sinks,
        .num_heads = attend.num_heads,
        .v_head_size = attend.v_head_size,
        .items = call->count >= 0 ? run->step.reduces + call->first : NULL,
        .num_items = call->count,
        .num_items_at = run->plan->static_list ? &run->step.header->num_reduces : NULL,
        .num_seqs = attend.num_seqs,
        .num_seqs_at = attend.num_seqs_at,
        .query_start = attend.query_start,
        .block_q = attend.block_q,
        .num_q_blocks = attend.num_q_blocks,
        .num_segments = attend.num_segments,
        .whole_queries = attend.whole_queries,
        .partial_out = attend.partial_out,
        .partial_max = attend.partial_max,
        .partial_sum = attend.partial_sum,
        .most_segments = most_segments,
        .narrow_partials = narrows_partials(run, call, &attend),
    };
    return run->plan->kernels->reduce_segments(&run->launch, &params);
}

static fv_status gather_context(const layer_run *run, const fv_call *call)
{
    const fv_plan *plan = run->plan;
    const fv_batch *batch = &plan->batch;
    const fv_mha_shape *mha = &plan->problem.mha;
    const int64_t bytes = (int64_t)fv_dtype_bytes(plan->gather_dtype);
    const int32_t *indices = run->step.indices + call->indices;
    const fv_kv_gather_params params = {
        .k = run->workspace + plan->workspace.gather_k,
        .k_token_stride = mha->num_kv_heads * mha->head_size * bytes,
        .k_head_stride = mha->head_size * bytes,
        .v = plan->absorbs ? NULL : run->workspace + plan->workspace.gather_v,
        .v_token_stride = mha->num_kv_heads * mha->v_head_size * bytes,
        .v_head_stride = mha->v_head_size * bytes,
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
        .context_parallel = plan->problem.context_parallel,
        .rotation = key_rotation(plan, run->layer),
    };
    return plan->kernels->kv_gather(&run->launch, &params);
}

static fv_merge_side state_side(const layer_run *run, fv_result_target target, int64_t row)
{
    const fv_plan *plan = run->plan;
    const int32_t state = state_index(target);
    const char *lse = run->workspace + plan->workspace.state_lse[state] + row * state_lse_token_stride(plan);
    return (fv_merge_side){
        .out = run->workspace + plan->workspace.state_out[state] + row * state_token_stride(plan),
        .token_stride = state_token_stride(plan),
        .head_stride = state_head_stride(plan),
        .lse = (const float *)(const void *)lse,
        .lse_token_stride = state_lse_token_stride(plan),
        .lse_head_stride = state_lse_head_stride(plan),
    };
}

static fv_status merge_states(const layer_run *run, const fv_call *call)
{
    const fv_plan *plan = run->plan;
    fv_attend_params target = {0};
    set_target(&target, run, call);
    const int64_t state_row = (int64_t)call->token - call->first_token;
    const int64_t out_row = call->token - target.out_first_token;
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
        .head_size = plan->dense_problem.mha.v_head_size,
        .nan_stays = 1, /* both sides are our own: without keys their LSE is -inf */
    };
    return plan->kernels->merge_states(&run->launch, &params);
}

/* --- MLA ---------------------------------------------------------------------------------------------- */

static int32_t call_tokens(const layer_run *run, const fv_call *call)
{
    return call->num_tokens >= 0 ? call->num_tokens : launch_tokens(run->plan);
}

/* The product of num_matrices heads by the weights W_UK or W_UV of the layer. */
static fv_status multiply(const layer_run *run, fv_gemm *gemm, int32_t first_weight_row)
{
    const fv_tensor *weights = &run->layer->kv_up;
    gemm->struct_size = sizeof(*gemm);
    gemm->b_dtype = weights->dtype;
    gemm->b = (const char *)weights->data + first_weight_row * weights->stride_bytes[1];
    gemm->b_row_stride = weights->stride_bytes[1];
    gemm->b_matrix_stride = weights->stride_bytes[0];
    if (gemm->m == 0) return FV_OK;
    return run->layer->gemm(run->layer->gemm_user, gemm, run->launch.stream);
}

/* 1: one product absorbs the queries of all tokens. */
static int32_t absorbs_all(const fv_plan *plan)
{
    for (int32_t i = 0; i < plan->num_calls; i++) {
        const fv_call *call = &plan->calls[i];
        if (call->operation != FV_OP_ABSORB) continue;
        return call->token == 0 && (call->num_tokens < 0 || call->num_tokens == plan->batch.num_tokens);
    }
    return 0;
}

/* [q_nope W_UK | q_rope] of some tokens. */
static fv_status absorb(const layer_run *run, const fv_call *call)
{
    if (run->makes_q) return FV_OK;
    const fv_plan *plan = run->plan;
    const fv_mla_shape *mla = &plan->problem.mla;
    const fv_tensor *q = &run->layer->q;
    const int64_t head_stride = absorbed_head_stride(plan), token_stride = head_stride * mla->num_heads;
    const int64_t bytes = (int64_t)fv_dtype_bytes(plan->problem.q_dtype);
    const char *from = (const char *)q->data + call->token * q->stride_bytes[0];
    char *to = run->workspace + plan->workspace.absorbed_q + (call->token - call->first_token) * token_stride;
    fv_gemm gemm = {
        .num_matrices = mla->num_heads,
        .m = call_tokens(run, call),
        .n = mla->kv_lora_rank,
        .k = mla->qk_nope_head_dim,
        .a_dtype = plan->problem.q_dtype,
        .c_dtype = plan->problem.q_dtype,
        .a = from,
        .a_row_stride = q->stride_bytes[0],
        .a_matrix_stride = q->stride_bytes[1],
        .c = to,
        .c_row_stride = token_stride,
        .c_matrix_stride = head_stride,
    };
    const fv_status status = multiply(run, &gemm, 0);
    if (status != FV_OK || mla->qk_rope_head_dim == 0 || run->copies_q) return status;
    const fv_rope_rows parts = absorbed_rope_parts(run);
    const fv_copy_rows_params copy = {
        .dst = (char *)parts.data + (call->token - call->first_token) * parts.token_stride,
        .dst_token_stride = parts.token_stride,
        .dst_head_stride = parts.head_stride,
        .src = from + mla->qk_nope_head_dim * bytes,
        .src_token_stride = q->stride_bytes[0],
        .src_head_stride = q->stride_bytes[1],
        .num_tokens = gemm.m,
        .num_heads = mla->num_heads,
        .row_bytes = mla->qk_rope_head_dim * bytes,
    };
    return plan->kernels->copy_rows(&run->launch, &copy);
}

/* Attended latents of some tokens times W_UV: the output. */
static fv_status project(const layer_run *run, const fv_call *call)
{
    const fv_plan *plan = run->plan;
    const fv_mla_shape *mla = &plan->problem.mla;
    const fv_tensor *out = &run->layer->out;
    const int64_t token_stride = latent_head_stride(plan) * mla->num_heads;
    fv_gemm gemm = {
        .num_matrices = mla->num_heads,
        .m = call_tokens(run, call),
        .n = mla->v_head_dim,
        .k = mla->kv_lora_rank,
        .b_is_transposed = 1,
        .a_dtype = plan->problem.q_dtype,
        .c_dtype = plan->problem.out_dtype,
        .a = run->workspace + plan->workspace.latents + (call->token - call->first_token) * token_stride,
        .a_row_stride = token_stride,
        .a_matrix_stride = latent_head_stride(plan),
        .c = (char *)out->data + call->token * out->stride_bytes[0],
        .c_row_stride = out->stride_bytes[0],
        .c_matrix_stride = out->stride_bytes[1],
    };
    return multiply(run, &gemm, mla->qk_nope_head_dim);
}

/* Gathered latents times W_UK and W_UV of all heads: one product where the weights lie dense. */
static fv_status expand(const layer_run *run, const fv_call *call)
{
    const fv_plan *plan = run->plan;
    const fv_mla_shape *mla = &plan->problem.mla;
    const fv_tensor *weights = &run->layer->kv_up;
    const int64_t bytes = (int64_t)fv_dtype_bytes(plan->gather_dtype);
    const int32_t head_rows = mla->qk_nope_head_dim + mla->v_head_dim;
    const int32_t is_one = weights->stride_bytes[0] == head_rows * weights->stride_bytes[1];
    fv_gemm gemm = {
        .num_matrices = is_one ? 1 : mla->num_heads,
        .m = call->num_rows,
        .n = is_one ? mla->num_heads * head_rows : head_rows,
        .k = mla->kv_lora_rank,
        .b_is_transposed = 1,
        .a_dtype = plan->gather_dtype,
        .c_dtype = plan->gather_dtype,
        .a = run->workspace + plan->workspace.gather_k,
        .a_row_stride = plan->problem.mha.head_size * bytes,
        .c = run->workspace + plan->workspace.gather_v,
        .c_row_stride = mla->num_heads * head_rows * bytes,
        .c_matrix_stride = head_rows * bytes,
    };
    return multiply(run, &gemm, 0);
}

/* 1: all that a step attends is absorbed at once. */
static int32_t attends_absorbed(const fv_plan *plan)
{
    for (int32_t i = 0; i < plan->num_calls; i++) {
        const fv_call *call = &plan->calls[i];
        const int32_t attends = call->operation == FV_OP_ATTEND_PAGED || call->operation == FV_OP_ATTEND_DENSE;
        if (attends && call->target != FV_TARGET_LATENTS) return 0;
    }
    return absorbs_all(plan);
}

int32_t fv_plan_makes_queries(const fv_plan *plan, const fv_layer *layer, const fv_before_layer *before)
{
    const fv_mla_query_step *step = plan->kernels->mla_query;
    const fv_dtype dtype = plan->problem.q_dtype;
    if (!step || !layer->k.data || !before->x || layer->gemm != fv_device_gemm || layer->gemm_user != plan->device)
        return 0;
    if (plan->options.batch_invariant) return 0; /* the choice is by the number of tokens */
    if (before->x->dtype != dtype || before->q_up->dtype != dtype || layer->kv_up.dtype != dtype) return 0;
    if (!attends_absorbed(plan)) return 0;
    const layer_run run = {
        .plan = plan,
        .layer = layer,
        .before = before,
        .launch = {plan->device, &plan->context->executor, NULL},
        .step = fv_step_buffers_on_device(&plan->buffers),
    };
    const fv_mla_query_params params = query_params(&run);
    return !step->why_not(&run.launch, &params) && !step->slower(&run.launch, &params);
}

fv_status fv_schedule_run(fv_plan *plan, const fv_layer *layer, const fv_before_layer *before, char *workspace,
                          fv_stream stream)
{
    static fv_status (*const operations[FV_NUM_OPERATIONS])(const layer_run *, const fv_call *) = {
        [FV_OP_KV_WRITE] = write_new,
        [FV_OP_ATTEND_PAGED] = attend_paged,
        [FV_OP_ATTEND_DENSE] = attend_dense,
        [FV_OP_REDUCE_SEGMENTS] = reduce_segments,
        [FV_OP_KV_GATHER] = gather_context,
        [FV_OP_MERGE_STATES] = merge_states,
        [FV_OP_ABSORB] = absorb,
        [FV_OP_EXPAND] = expand,
        [FV_OP_PROJECT] = project,
    };
    const layer_run run = {
        .plan = plan,
        .layer = layer,
        .before = before,
        .workspace = workspace,
        .launch = {plan->device, &plan->context->executor, stream},
        .step = fv_step_buffers_on_device(&plan->buffers),
        .claims = fv_step_buffers_take_claims(&plan->buffers),
        .has_new = layer->k.data && plan->problem.context_parallel.world <= 1,
        .copies_q = before && absorbs_all(plan),
        .makes_q = before && before->x,
    };
    fv_status status = FV_OK;
    for (int32_t i = 0; i < plan->num_calls && status == FV_OK; i++) {
        status = operations[plan->calls[i].operation](&run, &plan->calls[i]);
    }
    return status;
}
