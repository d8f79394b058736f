/* ROCM_ATTN: two kernels over the x-packed cache.
 *
 *   kv_write  ->  prefix prefill      the cached context, then the new tokens as they came, in one pass of
 *                                     the online softmax; never cut
 *             ->  partitioned decode  queries of up to decode_threshold tokens: partitions of 256 keys, each
 *                                     with its maximum, sum and output; then a reduction
 *
 * vLLM has a special decode kernel with narrow conditions, and a general one that does not split the keys
 * and is ten times slower at 32k. Here both are attend_paged: where the conditions hold the partitions are
 * 256 keys (more where the partial results would not fit their memory), elsewhere the keys are cut by cost.
 * Window, soft cap and small heads are right on both paths. */
#include "backends/backend.h"
#include "backends/strategy.h"

#define PARTITION_KEYS 256
#define MAX_PARTITIONED_KEYS (128 * 1024)

static const fv_mha_support support = {
    .types = 1u << FV_ATTENTION_DECODER | 1u << FV_ATTENTION_ENCODER,
    .layouts = 1u << FV_KV_LAYOUT_STRIDED | 1u << FV_KV_LAYOUT_X_PACKED,
    .layout = FV_KV_LAYOUT_X_PACKED,
    .min_head_size = 16,
    .head_sizes = "16 to 512 in steps of 8",
    .needs_dense = 1,
};

static void why_not(fv_reasons *reasons, const fv_device *device, const fv_problem *problem)
{
    fv_mha_why_not(reasons, &support, device, problem);
}

/* NULL where the special decode applies: vLLM's use_rocm_custom_paged_attention for CDNA. */
static const char *why_not_partitioned(const fv_plan *plan)
{
    const fv_problem *problem = &plan->problem;
    if (problem->window > 0) return "general decode: a sliding window";
    if (problem->sinks) return "general decode: sinks";
    if (problem->q_dtype == FV_DTYPE_F32) return "general decode: float32 queries";
    if (problem->mha.head_size != 64 && problem->mha.head_size != 128) return "general decode: head size not 64 or 128";
    if (problem->block_size != 16 && problem->block_size != 32) return "general decode: block size not 16 or 32";
    if (fv_group_of(problem) > 16) return "general decode: more than 16 query heads a KV head";
    if (plan->bounds.max_seq_len > MAX_PARTITIONED_KEYS) return "general decode: sequences beyond 128k";
    return NULL;
}

static fv_status create(fv_plan *plan)
{
    const char *reason = why_not_partitioned(plan);
    const fv_strategy strategy = {.partition_keys = reason ? 0 : PARTITION_KEYS, .needs_dense = 1};
    const fv_status status = fv_strategy_create(plan, &strategy);
    plan->choice = reason ? reason : "partitioned decode";
    plan->decode_threshold = fv_min_i32(plan->decode_threshold, fv_short_query_tokens(&plan->problem));
    plan->new_min_query_len = plan->decode_threshold + 1;
    return status;
}

static fv_status schedule_prefix_prefill(fv_schedule *schedule)
{
    fv_plan *plan = schedule->plan;
    fv_split_rule rule = plan->rule;
    rule.path = FV_PATH_2D;
    int32_t num_runs = 0;
    for (int32_t seq = 0; seq < schedule->step->num_seqs; seq++) {
        if (fv_step_query_len(schedule->step, seq) < plan->new_min_query_len) continue;
        plan->runs[num_runs++] = fv_step_whole_query(schedule->step, seq);
    }
    return fv_schedule_attend(schedule, &rule, FV_OP_ATTEND_PAGED, FV_KEYS_CACHE_AND_NEW, FV_TARGET_OUT, 0, plan->runs,
                              num_runs);
}

static fv_status schedule_decode(fv_schedule *schedule)
{
    fv_plan *plan = schedule->plan;
    int32_t num_runs = 0;
    for (int32_t seq = 0; seq < schedule->step->num_seqs; seq++) {
        if (fv_step_query_len(schedule->step, seq) >= plan->new_min_query_len) continue;
        plan->runs[num_runs++] = fv_step_whole_query(schedule->step, seq);
    }
    const fv_split_rule rule = fv_strategy_partition_rule(plan, schedule->step, plan->runs, num_runs);
    return fv_schedule_attend(schedule, &rule, FV_OP_ATTEND_PAGED, FV_KEYS_CACHE, FV_TARGET_OUT, 0, plan->runs,
                              num_runs);
}

static fv_status schedule(fv_schedule *schedule)
{
    const fv_status status = schedule_prefix_prefill(schedule);
    return status == FV_OK ? schedule_decode(schedule) : status;
}

const fv_backend fv_rocm_attn = {
    .name = "ROCM_ATTN",
    .summary = "two kernels: prefix prefill (cached context, then the new tokens); decode in partitions of 256 keys",
    .layout = FV_KV_LAYOUT_X_PACKED,
    .why_not = why_not,
    .create = create,
    .schedule = schedule,
};
