/* ROCM_AITER_FA: the batch is routed, in the order decode : extend : prefill, over the shuffled cache. The
 * order is one of work; no token is moved.
 *
 *   decode   query up to the threshold: attend_paged, cut by cost -> reduce
 *   extend   longer, with context: attend_dense of the new tokens among themselves; the context gathered in
 *            chunks, attend_dense against each; merged by LSE, the last merge writes the output
 *   prefill  no context that it sees: attend_dense of the new tokens, straight to the output
 *
 *   extend, one round:   new -> state | gather 0, attend -> context, merge | gather 1, attend, merge -> out
 *
 * With a window only the keys that some token sees are gathered. The sink enters with the write of the
 * output, so it is counted once, whatever the chunks; vLLM hands it to every pass. */
#include "backends/backend.h"
#include "backends/context_chunk.h"
#include "backends/strategy.h"
#include "core/error.h"

static const fv_mha_support support = {
    .types = 1u << FV_ATTENTION_DECODER,
    .layouts = 1u << FV_KV_LAYOUT_STRIDED | 1u << FV_KV_LAYOUT_SHUFFLED | 1u << FV_KV_LAYOUT_PACKED_NHD,
    .layout = FV_KV_LAYOUT_SHUFFLED,
    .min_head_size = 32,
    .head_sizes = "32 to 512 in steps of 8",
    .needs_dense = 1,
    .needs_gather = 1,
};

static void why_not(fv_reasons *reasons, const fv_device *device, const fv_problem *problem)
{
    fv_mha_why_not(reasons, &support, device, problem);
}

static fv_status create(fv_plan *plan)
{
    if (plan->options.batch_invariant) {
        return fv_fail(FV_ERR_UNSUPPORTED, "ROCM_AITER_FA: batch invariance not supported (chunks of gathered context "
                                           "depend on the batch)");
    }
    const fv_status status = fv_strategy_create(plan, &(fv_strategy){.needs_dense = 1, .needs_gather = 1});
    plan->choice = "routed decode : extend : prefill";
    if (plan->problem.context_parallel.world > 1) { /* this rank's share of the new tokens is in the cache only */
        plan->choice = "all as decode: context parallelism";
        plan->decode_threshold = INT32_MAX - 1;
    }
    plan->new_min_query_len = fv_min_i32(plan->decode_threshold, INT32_MAX - 1) + 1;
    return status;
}

/* --- decode ----------------------------------------------------------------------------------------------- */

static fv_status schedule_decodes(fv_schedule *schedule)
{
    fv_plan *plan = schedule->plan;
    int32_t num_runs = 0;
    for (int32_t seq = 0; seq < schedule->step->num_seqs; seq++) {
        if (fv_step_query_len(schedule->step, seq) > plan->decode_threshold) continue;
        plan->runs[num_runs++] = fv_step_whole_query(schedule->step, seq);
    }
    return fv_schedule_attend(schedule, &plan->rule, FV_OP_ATTEND_PAGED, FV_KEYS_CACHE, FV_TARGET_OUT, 0, plan->runs,
                              num_runs);
}

/* --- extend ----------------------------------------------------------------------------------------------- */

/* The new tokens of a round among themselves: those that see some context into the state, the others, which
 * a window keeps from it, straight to the output. */
static fv_status schedule_new_tokens(fv_schedule *schedule, const fv_context_round *round, fv_result_target target)
{
    fv_plan *plan = schedule->plan;
    const fv_split_rule rule = fv_context_whole_rule(plan);
    int32_t num_runs = 0;
    for (int32_t i = 0; i < round->num_runs; i++) {
        fv_query_run run = plan->round_runs[i];
        const int32_t sees_context = run.first_key < run.end_key;
        if (sees_context != (target == FV_TARGET_NEW_STATE)) continue;
        run.first_key = fv_schedule_context(schedule, run.seq);
        run.end_key = schedule->step->seq_lens[run.seq];
        plan->runs[num_runs++] = run;
    }
    return fv_schedule_attend(schedule, &rule, FV_OP_ATTEND_DENSE, FV_KEYS_NEW, target, round->first_token, plan->runs,
                              num_runs);
}

static fv_status schedule_chunk(fv_schedule *schedule, const fv_context_round *round, int32_t num_pieces)
{
    const fv_plan *plan = schedule->plan;
    fv_call chunk;
    fv_status status = fv_context_chunk_gather(&chunk, schedule, plan->pieces, num_pieces);
    if (status == FV_OK) {
        status = fv_context_chunk_attend(schedule, &chunk, round, plan->pieces, num_pieces, FV_TARGET_CONTEXT_STATE);
    }
    return status == FV_OK ? fv_context_chunk_merge(schedule, round, plan->pieces, num_pieces) : status;
}

static fv_status schedule_extends(fv_schedule *schedule, int32_t num_extends)
{
    fv_plan *plan = schedule->plan;
    fv_context_round round = {0};
    while (fv_context_round_next(&round, plan->round_runs, &plan->problem, schedule->step, plan->extends, num_extends,
                                 plan->rule.block_q, &plan->contexts)) {
        plan->num_rounds++;
        fv_status status = schedule_new_tokens(schedule, &round, FV_TARGET_OUT);
        if (status == FV_OK) status = schedule_new_tokens(schedule, &round, FV_TARGET_NEW_STATE);
        fv_context_cursor cursor = {0, -1};
        for (int32_t num_pieces = 1; num_pieces > 0 && status == FV_OK;) {
            num_pieces = fv_context_chunk_next(&cursor, plan->pieces, &plan->problem, plan->round_runs, round.num_runs,
                                               &plan->contexts);
            if (num_pieces > 0) status = schedule_chunk(schedule, &round, num_pieces);
        }
        if (status != FV_OK) return status;
    }
    return FV_OK;
}

/* --- prefill ----------------------------------------------------------------------------------------------- */

/* 1: some new token sees a key of the context. */
static int32_t sees_context(const fv_schedule *schedule, int32_t seq)
{
    const fv_key_range keys = fv_context_keys(&schedule->plan->problem, schedule->step, seq, 0,
                                              fv_step_query_len(schedule->step, seq));
    return keys.first < keys.end;
}

static fv_status schedule_prefills(fv_schedule *schedule)
{
    fv_plan *plan = schedule->plan;
    int32_t num_runs = 0;
    for (int32_t seq = 0; seq < schedule->step->num_seqs; seq++) {
        if (fv_step_query_len(schedule->step, seq) <= plan->decode_threshold || sees_context(schedule, seq)) continue;
        plan->runs[num_runs] = fv_step_whole_query(schedule->step, seq);
        plan->runs[num_runs++].first_key = fv_max_i32(0, fv_schedule_context(schedule, seq));
    }
    return fv_schedule_attend(schedule, &plan->rule, FV_OP_ATTEND_DENSE, FV_KEYS_NEW, FV_TARGET_OUT, 0, plan->runs,
                              num_runs);
}

static fv_status schedule(fv_schedule *schedule)
{
    fv_plan *plan = schedule->plan;
    int32_t num_extends = 0;
    for (int32_t seq = 0; seq < schedule->step->num_seqs; seq++) {
        const int32_t is_decode = fv_step_query_len(schedule->step, seq) <= plan->decode_threshold;
        if (!is_decode && sees_context(schedule, seq)) plan->extends[num_extends++] = seq;
    }
    fv_status status = schedule_decodes(schedule);
    if (status == FV_OK) status = schedule_extends(schedule, num_extends);
    return status == FV_OK ? schedule_prefills(schedule) : status;
}

const fv_backend fv_rocm_aiter_fa = {
    .name = "ROCM_AITER_FA",
    .summary = "routed decode : extend : prefill; extends gather their context in chunks and merge by LSE",
    .layout = FV_KV_LAYOUT_SHUFFLED,
    .why_not = why_not,
    .create = create,
    .schedule = schedule,
};
