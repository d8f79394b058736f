/* What a plan refuses: batches and layers that do not fit it. */
#include "planner/plan.h"

#include "core/error.h"
#include "kvcache/latent_entry.h"
#include "ops/attend_paged.h"
#include "ops/ops_check.h"

static fv_status needs_plan(const char *what, int64_t value, int64_t bound)
{
    return fv_fail(FV_NEEDS_PLAN, "%s is %lld; the plan was made for up to %lld", what, (long long)value,
                   (long long)bound);
}

static fv_status check_counts(const fv_plan *plan, const fv_batch *batch)
{
    const fv_bounds *bounds = &plan->bounds;
    const fv_status status = fv_check_struct_size("fv_batch", batch->struct_size, sizeof(*batch));
    if (status != FV_OK) return status;
    if (batch->num_seqs < 0 || batch->num_tokens < 0 || batch->max_query_len < 0 || batch->max_seq_len < 0) {
        return fv_fail(FV_ERR_INVALID, "batch of %d sequences, %d tokens, lengths up to %d and %d; accepted: 0 or more",
                       batch->num_seqs, batch->num_tokens, batch->max_query_len, batch->max_seq_len);
    }
    if (batch->num_seqs > bounds->max_num_seqs) return needs_plan("num_seqs", batch->num_seqs, bounds->max_num_seqs);
    if (batch->num_tokens > bounds->max_num_tokens) {
        return needs_plan("num_tokens", batch->num_tokens, bounds->max_num_tokens);
    }
    if (batch->max_query_len > bounds->max_query_len) {
        return needs_plan("max_query_len", batch->max_query_len, bounds->max_query_len);
    }
    if (batch->max_seq_len > bounds->max_seq_len) {
        return needs_plan("max_seq_len", batch->max_seq_len, bounds->max_seq_len);
    }
    if (batch->num_seqs == 0 && batch->num_tokens > 0) {
        return fv_fail(FV_ERR_INVALID, "a batch of no sequences has %d tokens; accepted: 0", batch->num_tokens);
    }
    if (batch->num_seqs == 0) return FV_OK;
    const int32_t needs_table = plan->problem.type != FV_ATTENTION_ENCODER;
    if (!batch->query_start || !batch->seq_lens || (needs_table && !batch->block_table)) {
        return fv_fail(FV_ERR_INVALID, "query_start, seq_lens or block_table is NULL in a batch of %d sequences",
                       batch->num_seqs);
    }
    if (batch->block_table_width < 0 || batch->block_table_stride < batch->block_table_width) {
        return fv_fail(FV_ERR_INVALID, "block_table_stride %lld and width %d; accepted: 0 <= width <= stride",
                       (long long)batch->block_table_stride, batch->block_table_width);
    }
    if (plan->problem.tree_mask && !batch->tree_mask) {
        return fv_fail(FV_ERR_INVALID, "the problem has a tree mask; the batch's tree_mask is NULL");
    }
    if (!plan->problem.tree_mask && batch->tree_mask) {
        return fv_fail(FV_ERR_INVALID, "the batch's tree_mask is given; the problem says tree_mask 0");
    }
    return FV_OK;
}

static fv_status check_lengths(const fv_plan *plan, const fv_batch *batch, const fv_step *step)
{
    const fv_bounds *bounds = &plan->bounds;
    if (step->query_start[0] != 0) {
        return fv_fail(FV_ERR_INVALID, "query_start[0] is %d; accepted: 0", step->query_start[0]);
    }
    for (int32_t seq = 0; seq < step->num_seqs; seq++) {
        const int64_t query_len = (int64_t)step->query_start[seq + 1] - step->query_start[seq];
        const int64_t seq_len = step->seq_lens[seq];
        if (query_len < 0) {
            return fv_fail(FV_ERR_INVALID, "query_start[%d] is %d after %d; it must not fall", seq + 1,
                           step->query_start[seq + 1], step->query_start[seq]);
        }
        if (plan->problem.type == FV_ATTENTION_ENCODER && seq_len != query_len) {
            return fv_fail(FV_ERR_INVALID, "seq_lens[%d] is %lld; accepted of an encoder: its query length, %lld", seq,
                           (long long)seq_len, (long long)query_len);
        }
        if (seq_len < 0 || (seq_len < query_len && seq_len != 0 && plan->problem.type != FV_ATTENTION_CROSS)) {
            return fv_fail(FV_ERR_INVALID, "seq_lens[%d] is %lld; accepted: 0, or from its query length %lld on", seq,
                           (long long)seq_len, (long long)query_len);
        }
        if (plan->problem.tree_mask && query_len > FV_TREE_TOKENS) {
            return fv_fail(FV_ERR_INVALID, "query %d has %lld tokens with a tree mask; accepted: up to %d, its bits",
                           seq, (long long)query_len, FV_TREE_TOKENS);
        }
        if (query_len > bounds->max_query_len) return needs_plan("a query length", query_len, bounds->max_query_len);
        if (seq_len > bounds->max_seq_len) return needs_plan("a sequence length", seq_len, bounds->max_seq_len);
        const int64_t local = fv_local_keys(&plan->problem.context_parallel, seq_len);
        const int64_t blocks = fv_ceil_div(local, plan->problem.block_size);
        if (plan->problem.type == FV_ATTENTION_ENCODER) continue;
        if (query_len > 0 && blocks > batch->block_table_width) {
            return fv_fail(FV_ERR_INVALID,
                           "sequence %d has %lld keys in %lld blocks of %d; the block table has %d a row", seq,
                           (long long)local, (long long)blocks, plan->problem.block_size, batch->block_table_width);
        }
    }
    if (step->query_start[step->num_seqs] > batch->num_tokens) {
        return fv_fail(FV_ERR_INVALID, "query_start ends at %d; the batch has %d tokens",
                       step->query_start[step->num_seqs], batch->num_tokens);
    }
    return FV_OK;
}

fv_status fv_plan_check_batch(fv_step *step, const fv_plan *plan, const fv_batch *batch)
{
    *step = (fv_step){0};
    const fv_status status = check_counts(plan, batch);
    if (status != FV_OK || batch->num_seqs == 0) return status;
    const int32_t host = plan->device->host_is_device;
    fv_step lengths = {
        .num_seqs = batch->num_seqs,
        .query_start = batch->host_query_start || !host ? batch->host_query_start : batch->query_start,
        .seq_lens = batch->host_seq_lens || !host ? batch->host_seq_lens : batch->seq_lens,
        .causal = batch->host_causal || !host ? batch->host_causal : batch->causal,
    };
    const int32_t are_known = lengths.query_start && lengths.seq_lens && (!batch->causal || lengths.causal);
    if (!are_known && plan->static_list) {
        return fv_fail(FV_ERR_INVALID, "the batch of a plan with static_list has no host_query_start, host_seq_lens or "
                                       "host_causal; accepted: all that the batch has on the device");
    }
    if (!are_known && plan->absorbs && batch->num_tokens > plan->absorb_rows) { /* the grid absorbs all at once */
        return fv_fail(
            FV_ERR_INVALID,
            "a batch of %d tokens without host_query_start, host_seq_lens or host_causal; accepted: up to %d, "
            "or all that the batch has on the device",
            batch->num_tokens, plan->absorb_rows);
    }
    if (!are_known) return FV_OK; /* not enough for a list */
    const int32_t is_decoder = plan->problem.type == FV_ATTENTION_DECODER;
    if (!is_decoder && !batch->causal) lengths.causal = plan->not_causal;
    if (batch->causal && is_decoder && !plan->problem.not_causal) {
        for (int32_t seq = 0; seq < batch->num_seqs; seq++) {
            if (lengths.causal[seq]) continue;
            return fv_fail(FV_ERR_INVALID, "causal[%d] is 0; the problem says all are causal (not_causal 0)", seq);
        }
    }
    *step = lengths;
    return check_lengths(plan, batch, step);
}

typedef struct tensor_rule {
    const char *name;
    fv_dtype dtype;
    int64_t heads, elements; /* elements 0: two dimensions only */
} tensor_rule;

static fv_status check_tensor(const fv_tensor *tensor, const tensor_rule *rule, int64_t num_tokens)
{
    const int32_t num_dims = rule->elements ? 3 : 2;
    if (tensor->dtype != rule->dtype) {
        return fv_fail(FV_ERR_INVALID, "%s is %s; the problem says %s", rule->name, fv_dtype_name(tensor->dtype),
                       fv_dtype_name(rule->dtype));
    }
    if (tensor->num_dims != num_dims || tensor->shape[0] < num_tokens || tensor->shape[1] != rule->heads ||
        (num_dims == 3 && tensor->shape[2] != rule->elements)) {
        return fv_fail(FV_ERR_INVALID,
                       "%s has %d dimensions [%lld, %lld, %lld]; accepted: %d, [%lld or more, %lld, %lld]", rule->name,
                       tensor->num_dims, (long long)tensor->shape[0], (long long)tensor->shape[1],
                       (long long)(tensor->num_dims > 2 ? tensor->shape[2] : 1), num_dims, (long long)num_tokens,
                       (long long)rule->heads, (long long)(num_dims == 3 ? rule->elements : 1));
    }
    if (num_dims == 3 && tensor->stride_bytes[2] != (int64_t)fv_dtype_bytes(tensor->dtype)) {
        return fv_fail(FV_ERR_INVALID, "the last stride of %s is %lld bytes; accepted: %zu (dense)", rule->name,
                       (long long)tensor->stride_bytes[2], fv_dtype_bytes(tensor->dtype));
    }
    return FV_OK;
}

static fv_status check_scale_planes(const fv_problem *problem, const fv_kv_view *cache)
{
    const int32_t of_tokens = problem->kv_scaling == FV_KV_SCALING_PER_TOKEN_HEAD;
    const char *given = cache->k_scales.data ? "k_scales" : cache->v_scales.data ? "v_scales" : NULL;
    if (of_tokens && (!cache->k_scales.data || !cache->v_scales.data)) {
        return fv_fail(FV_ERR_INVALID, "the problem has scales of tokens and heads; the KV cache has no scale planes");
    }
    if (!of_tokens && given) {
        return fv_fail(FV_ERR_INVALID,
                       "fv_kv_view.%s is given; the problem says kv_scaling %d, not 3 (tokens and heads)", given,
                       (int)problem->kv_scaling);
    }
    return FV_OK;
}

static fv_status check_cache(const fv_plan *plan, const fv_kv_view *cache, int32_t writes)
{
    const fv_problem *problem = &plan->problem;
    fv_status status = fv_check_struct_size("fv_kv_view", cache->struct_size, sizeof(*cache));
    if (status != FV_OK) return status;
    if (!cache->k.data || !cache->v.data) return fv_fail(FV_ERR_INVALID, "the KV cache has no data");
    if (problem->kv_layout != FV_KV_LAYOUT_STRIDED && cache->layout != problem->kv_layout) {
        return fv_fail(FV_ERR_INVALID, "the KV cache has layout %s; the plan was made for %s",
                       fv_kv_layout_name(cache->layout), fv_kv_layout_name(problem->kv_layout));
    }
    if (fv_kv_layout_is_latent(cache->layout) != (problem->kind == FV_ATTENTION_MLA)) {
        return fv_fail(FV_ERR_INVALID, "the KV cache has layout %s; accepted: latent and latent_fp8_ds of MLA only",
                       fv_kv_layout_name(cache->layout));
    }
    if (cache->dtype != problem->kv_dtype || cache->block_size != problem->block_size ||
        cache->num_kv_heads != problem->mha.num_kv_heads || cache->head_size != problem->mha.head_size ||
        cache->v_head_size != problem->mha.v_head_size) {
        return fv_fail(
            FV_ERR_INVALID,
            "the KV cache is %s, %d slots x %d heads x %d and %d; the plan was made for %s, %d x %d x %d and %d",
            fv_dtype_name(cache->dtype), cache->block_size, cache->num_kv_heads, cache->head_size, cache->v_head_size,
            fv_dtype_name(problem->kv_dtype), problem->block_size, problem->mha.num_kv_heads, problem->mha.head_size,
            problem->mha.v_head_size);
    }
    status = check_scale_planes(problem, cache);
    if (status == FV_OK) status = fv_ops_check_cache_alignment(plan->device, cache);
    if (status == FV_OK && writes) status = fv_ops_check_scale_planes(cache);
    if (status != FV_OK) return status;
    if (plan->max_block >= cache->num_blocks) {
        return fv_fail(FV_ERR_INVALID, "the block table names block %lld; the KV cache has %lld blocks",
                       (long long)plan->max_block, (long long)cache->num_blocks);
    }
    return writes ? fv_ops_check_slot(cache, plan->max_slot, plan->max_slot_token) : FV_OK;
}

/* What a problem leaves out would be left out of the result, too: forgotten in the problem, not meant. */
static fv_status check_left_out(const fv_problem *problem, const fv_layer *layer)
{
    if (layer->sinks && !problem->sinks) {
        return fv_fail(FV_ERR_INVALID, "fv_layer.sinks is given; the problem says sinks 0");
    }
    if (layer->alibi_slopes && !problem->alibi) {
        return fv_fail(FV_ERR_INVALID, "fv_layer.alibi_slopes is given; the problem says alibi 0 (none)");
    }
    if (layer->lse.data && !problem->returns_lse) {
        return fv_fail(FV_ERR_INVALID, "fv_layer.lse is given; the problem says returns_lse 0");
    }
    const char *scale = layer->k_scale ? "k_scale" : layer->v_scale ? "v_scale" : NULL;
    if (scale && problem->kv_scaling == FV_KV_SCALING_NONE) {
        return fv_fail(FV_ERR_INVALID, "fv_layer.%s is given; the problem says kv_scaling 0 (none)", scale);
    }
    if (scale && problem->kv_scaling == FV_KV_SCALING_PER_TOKEN_HEAD) {
        return fv_fail(FV_ERR_INVALID,
                       "fv_layer.%s is given; scales of tokens and heads (kv_scaling 3) are in the KV cache", scale);
    }
    return FV_OK;
}

static fv_status check_pointers(const fv_plan *plan, const fv_layer *layer)
{
    const fv_problem *problem = &plan->problem;
    const fv_status status = check_left_out(problem, layer);
    if (status != FV_OK) return status;
    if (problem->sinks && !layer->sinks)
        return fv_fail(FV_ERR_INVALID, "the problem has sinks; fv_layer.sinks is NULL");
    if (problem->alibi && !layer->alibi_slopes) {
        return fv_fail(FV_ERR_INVALID, "the problem has ALiBi; fv_layer.alibi_slopes is NULL");
    }
    const int32_t scaled = problem->kv_scaling == FV_KV_SCALING_PER_TENSOR ||
                           problem->kv_scaling == FV_KV_SCALING_PER_HEAD;
    const int32_t is_mla = problem->kind == FV_ATTENTION_MLA;
    if (scaled && (!layer->k_scale || (!layer->v_scale && !is_mla))) {
        return fv_fail(FV_ERR_INVALID, "the problem has KV scales; fv_layer.k_scale or v_scale is NULL");
    }
    if (is_mla && layer->v.data) return fv_fail(FV_ERR_INVALID, "v is given; the latents of MLA come as k");
    if (!is_mla && !layer->k.data != !layer->v.data) return fv_fail(FV_ERR_INVALID, "only one of k and v is given");
    const int32_t writes = layer->k.data && problem->type == FV_ATTENTION_DECODER;
    if (writes && !plan->batch.slot_mapping && plan->batch.num_tokens) {
        return fv_fail(FV_ERR_INVALID, "new k and v are given; the batch's slot_mapping is NULL");
    }
    return FV_OK;
}

/* The weights of MLA, and the tables that rotate at reading. */
static fv_status check_mla(const fv_plan *plan, const fv_layer *layer)
{
    const fv_mla_shape *mla = &plan->problem.mla;
    if (mla->rotate_at_reading && mla->qk_rope_head_dim > 0) {
        if (!layer->rope_cos || !layer->rope_sin) {
            return fv_fail(FV_ERR_INVALID, "the problem rotates at reading; fv_layer.rope_cos or rope_sin is NULL");
        }
        if (layer->num_rope_positions < plan->bounds.max_seq_len) {
            return fv_fail(FV_ERR_INVALID, "num_rope_positions is %lld; the plan was made for sequences of up to %d",
                           (long long)layer->num_rope_positions, plan->bounds.max_seq_len);
        }
    }
    if (mla->absorbed) return FV_OK;
    if (!layer->gemm) return fv_fail(FV_ERR_INVALID, "fv_layer.gemm is NULL; MLA that is not absorbed needs one");
    const fv_tensor *kv_up = &layer->kv_up;
    const int64_t head_rows = mla->qk_nope_head_dim + mla->v_head_dim;
    if (!kv_up->data) return fv_fail(FV_ERR_INVALID, "kv_up has no data; MLA that is not absorbed needs it");
    if (kv_up->num_dims != 3 || kv_up->shape[0] != mla->num_heads || kv_up->shape[1] != head_rows ||
        kv_up->shape[2] != mla->kv_lora_rank || kv_up->stride_bytes[2] != (int64_t)fv_dtype_bytes(kv_up->dtype)) {
        return fv_fail(FV_ERR_INVALID,
                       "kv_up has %d dimensions [%lld, %lld, %lld]; accepted: 3, [%d, %lld, %d], dense rows",
                       kv_up->num_dims, (long long)kv_up->shape[0], (long long)kv_up->shape[1],
                       (long long)kv_up->shape[2], mla->num_heads, (long long)head_rows, mla->kv_lora_rank);
    }
    return fv_ops_check_alignment(plan->device, "kv_up", kv_up);
}

fv_status fv_plan_check_layer(const fv_plan *plan, const fv_layer *layer)
{
    fv_status status = fv_check_struct_size("fv_layer", layer->struct_size, sizeof(*layer));
    if (status != FV_OK) return status;
    const fv_problem *problem = &plan->problem;
    const fv_mha_shape *mha = &problem->mha;
    const int32_t is_encoder = problem->type == FV_ATTENTION_ENCODER;
    const fv_mha_shape *outer = plan->absorbs ? &plan->dense_problem.mha : mha; /* of q and out */
    /* Under a captured graph a later step may have as many tokens as the bounds allow. */
    const int64_t num_tokens = plan->static_grid && !plan->device->host_is_device ? plan->bounds.max_num_tokens
                                                                                  : plan->batch.num_tokens;
    const struct {
        const fv_tensor *tensor;
        tensor_rule rule;
        int32_t optional;
    } tensors[] = {
        {&layer->q, {"q", problem->q_dtype, outer->num_heads, outer->head_size}, 0},
        {&layer->k, {"k", problem->q_dtype, mha->num_kv_heads, mha->head_size}, !is_encoder},
        {&layer->v, {"v", problem->q_dtype, mha->num_kv_heads, mha->v_head_size}, !is_encoder},
        {&layer->out, {"out", problem->out_dtype, outer->num_heads, outer->v_head_size}, 0},
        {&layer->lse, {"lse", FV_DTYPE_F32, mha->num_heads, 0}, 1},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(tensors); i++) {
        if (!tensors[i].tensor->data && tensors[i].optional) continue;
        if (!tensors[i].tensor->data) return fv_fail(FV_ERR_INVALID, "%s has no data", tensors[i].rule.name);
        status = check_tensor(tensors[i].tensor, &tensors[i].rule, num_tokens);
        if (status == FV_OK) status = fv_ops_check_alignment(plan->device, tensors[i].rule.name, tensors[i].tensor);
        if (status != FV_OK) return status;
    }
    if (problem->type == FV_ATTENTION_CROSS && layer->k.data) {
        return fv_fail(FV_ERR_INVALID, "k is given; cross attention reads keys that are in the cache already");
    }
    status = is_encoder ? FV_OK : check_cache(plan, &layer->kv_cache, layer->k.data != NULL);
    if (status == FV_OK && problem->kind == FV_ATTENTION_MLA) status = check_mla(plan, layer);
    return status == FV_OK ? check_pointers(plan, layer) : status;
}

fv_status fv_plan_check_workspace(const void *workspace)
{
    if ((uintptr_t)workspace % FV_WORKSPACE_ALIGNMENT == 0) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "workspace is %p; accepted: multiples of %d bytes", workspace,
                   FV_WORKSPACE_ALIGNMENT);
}
