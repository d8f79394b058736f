/* MLA: decodes attend latents, longer queries attend what the latents expand to.
 *
 *   kv_write ->  decode   absorb -> mla_decode, cut -> reduce -> project
 *            ->  extend   one round:   gather 0, expand, attend -> state | gather 1, expand, attend, merge -> out
 *
 * Absorbed a token and a key cost 2 H (2 L + R) operations, expanded 2 H (P + R + V) and once for each key
 * 2 H L (P + V): for DeepSeek-V3 the two meet at 170 tokens of a query, the threshold (docs/mla.md). New tokens
 * have been written before anything attends, so they are gathered with their context. A problem that comes
 * absorbed is all decode. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C. */
#include "backends/mla_schedule.h"

#include "backends/context_chunk.h"
#include "core/error.h"
#include "kvcache/latent_entry.h"

fv_status fv_mla_create(fv_plan *plan, const fv_strategy *strategy)
{
    const int32_t is_absorbed = plan->problem.mla.absorbed;
    fv_strategy asked = *strategy;
    const int32_t all_decode = plan->problem.context_parallel.world > 1 || plan->options.batch_invariant;
    asked.needs_gather = !is_absorbed && !all_decode;
    const fv_status status = fv_strategy_create(plan, &asked);
    if (is_absorbed) {
        plan->choice = "absorbed by the caller: all decode";
        plan->decode_threshold = INT32_MAX;
    } else if (all_decode) {
        plan->choice = plan->options.batch_invariant ? "all as decode: batch invariance"
                                                     : "all as decode: context parallelism";
        plan->decode_threshold = INT32_MAX;
    } else {
        plan->choice = "routed decode : extend";
    }
    return status;
}

/* --- why not ---------------------------------------------------------------------------------------------- */

static void check_features(fv_reasons *reasons, const fv_problem *problem)
{
    const struct {
        const char *feature;
        int32_t is_used;
    } features[] = {
        {"attention types encoder and cross", problem->type != FV_ATTENTION_DECODER},
        {"logits_soft_cap", problem->soft_cap > 0},
        {"alibi_slopes", problem->alibi != FV_ALIBI_NONE},
        {"sinks", problem->sinks},
        {"scales of heads, and of tokens and heads",
         problem->kv_scaling == FV_KV_SCALING_PER_HEAD || problem->kv_scaling == FV_KV_SCALING_PER_TOKEN_HEAD},
        {"int8 latents", problem->kv_dtype == FV_DTYPE_I8},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(features); i++) {
        if (features[i].is_used) fv_reasons_add(reasons, "MLA does not support %s", features[i].feature);
    }
}

static void check_latent_layout(fv_reasons *reasons, const fv_problem *problem)
{
    const int32_t is_ds = !problem->kv_layout_any && problem->kv_layout == FV_KV_LAYOUT_LATENT_FP8_DS;
    if (!problem->kv_layout_any && !fv_kv_layout_is_latent(problem->kv_layout)) {
        fv_reasons_add(reasons, "layout %s not supported (accepted: latent, latent_fp8_ds)",
                       fv_kv_layout_name(problem->kv_layout));
    }
    if (!is_ds) return;
    const fv_mla_shape *mla = &problem->mla;
    if (mla->kv_lora_rank != FV_DS_LATENT || mla->qk_rope_head_dim != FV_DS_ROPE) {
        fv_reasons_add(reasons, "layout latent_fp8_ds wants latents of %d + %d, not %d + %d", FV_DS_LATENT, FV_DS_ROPE,
                       mla->kv_lora_rank, mla->qk_rope_head_dim);
    }
    if (problem->kv_dtype != FV_DTYPE_F8_E4M3 || problem->kv_scaling != FV_KV_SCALING_NONE) {
        fv_reasons_add(reasons, "layout latent_fp8_ds wants kv_dtype fp8_e4m3 without scales of the problem's");
    }
}

/* NULL: some variant serves. */
static const char *why_no_variant(const fv_attend_variant *variants, int32_t num_variants, const fv_problem *problem,
                                  fv_rescaling rescaling)
{
    const char *reason = "the device has no mla_decode kernel that rescales so";
    for (int32_t i = 0; i < num_variants; i++) {
        if (variants[i].rescaling != rescaling) continue;
        reason = variants[i].why_not(problem);
        if (!reason) return NULL;
    }
    return reason;
}

static void check_mla_kernels(fv_reasons *reasons, const fv_device *device, const fv_problem *problem,
                              fv_rescaling rescaling)
{
    const fv_kernel_table *kernels = fv_default_kernels(device);
    if (!kernels || kernels->num_mla_decode == 0) {
        fv_reasons_add(reasons, "the device has no mla_decode kernel");
        return;
    }
    const char *reason = why_no_variant(kernels->mla_decode, kernels->num_mla_decode, problem, rescaling);
    if (reason) fv_reasons_add(reasons, "%s", reason);
    if (problem->mla.absorbed) return;
    if (!kernels->kv_gather || !kernels->merge_states || !kernels->copy_rows) {
        fv_reasons_add(reasons, "the device has no kv_gather, merge_states or copy_rows kernel");
    }
    const fv_problem dense = fv_dense_problem(problem);
    reason = why_no_variant(kernels->attend_dense, kernels->num_attend_dense, &dense, FV_RESCALING_MULTIPLY);
    if (reason) fv_reasons_add(reasons, "expanded: %s", reason);
}

void fv_mla_why_not(fv_reasons *reasons, const fv_device *device, const fv_problem *problem, fv_rescaling rescaling)
{
    if (problem->kind != FV_ATTENTION_MLA) {
        fv_reasons_add(reasons, "non-MLA not supported");
        return;
    }
    check_latent_layout(reasons, problem);
    check_features(reasons, problem);
    if (reasons->used == 0) check_mla_kernels(reasons, device, problem, rescaling);
}

/* --- decode ----------------------------------------------------------------------------------------------- */

/* Decodes whose tokens lie within absorb_rows of each other. */
typedef struct decode_round {
    int32_t first_token;
    int32_t num_runs;
    int32_t seq, token; /* where the next round goes on */
} decode_round;

/* Sequences without keys too: their rows of zeros leave no chunk to write them. */
static int32_t is_decode(const fv_schedule *schedule, int32_t seq)
{
    if (schedule->step->seq_lens[seq] == 0) return 1;
    return fv_step_query_len(schedule->step, seq) <= schedule->plan->decode_threshold;
}

/* Fills plan->runs with the next round; 0: nothing is left. Queries are cut where Q blocks end. */
static int32_t next_decodes(decode_round *round, const fv_schedule *schedule)
{
    fv_plan *plan = schedule->plan;
    const fv_step *step = schedule->step;
    round->num_runs = 0;
    for (; round->seq < step->num_seqs; round->seq++, round->token = 0) {
        const int32_t query_len = fv_step_query_len(step, round->seq);
        if (query_len == 0 || !is_decode(schedule, round->seq)) continue;
        const int32_t start = step->query_start[round->seq] + round->token;
        if (round->num_runs == 0) round->first_token = start;
        const int32_t room = plan->absorbs ? round->first_token + plan->absorb_rows - start : INT32_MAX;
        const int32_t rest = query_len - round->token;
        int32_t num_tokens = rest;
        if (rest > room) {
            num_tokens = fv_query_is_short(&plan->problem, query_len) ? 0
                                                                      : room / plan->rule.block_q * plan->rule.block_q;
        }
        if (num_tokens <= 0) break;
        plan->runs[round->num_runs] = fv_step_whole_query(schedule->step, round->seq);
        plan->runs[round->num_runs].first_token = round->token;
        plan->runs[round->num_runs++].num_tokens = num_tokens;
        if (num_tokens < rest) {
            round->token += num_tokens;
            break;
        }
    }
    return round->num_runs;
}

/* Absorb, or project, for each run of tokens that follow each other. */
static fv_status schedule_products(fv_schedule *schedule, fv_operation operation, const decode_round *round)
{
    const fv_plan *plan = schedule->plan;
    fv_call call = {.operation = operation, .first_token = round->first_token};
    fv_status status = FV_OK;
    for (int32_t i = 0; i < round->num_runs && status == FV_OK; i++) {
        const fv_query_run *run = &plan->runs[i];
        const int32_t token = schedule->step->query_start[run->seq] + run->first_token;
        if (call.num_tokens > 0 && call.token + call.num_tokens != token) {
            status = fv_schedule_add(schedule, &call);
            call.num_tokens = 0;
        }
        if (call.num_tokens == 0) call.token = token;
        call.num_tokens += run->num_tokens;
    }
    return status == FV_OK ? fv_schedule_add(schedule, &call) : status;
}

static fv_status schedule_decodes(fv_schedule *schedule, const fv_split_rule *rule)
{
    const fv_plan *plan = schedule->plan;
    const fv_result_target target = plan->absorbs ? FV_TARGET_LATENTS : FV_TARGET_OUT;
    decode_round round = {0};
    fv_status status = FV_OK;
    while (status == FV_OK && next_decodes(&round, schedule) > 0) {
        if (plan->absorbs) status = schedule_products(schedule, FV_OP_ABSORB, &round);
        if (status == FV_OK) {
            status = fv_schedule_attend(schedule, rule, FV_OP_ATTEND_PAGED, FV_KEYS_CACHE, target,
                                        plan->absorbs ? round.first_token : 0, plan->runs, round.num_runs);
        }
        if (plan->absorbs && status == FV_OK) status = schedule_products(schedule, FV_OP_PROJECT, &round);
    }
    return status;
}

/* --- extend and prefill -------------------------------------------------------------------------------------- */

/* Where a piece's result goes: its run's only piece writes the output, the first one of several the running
 * state, later ones are merged into it. */
static fv_result_target target_of(const fv_plan *plan, const fv_context_piece *piece)
{
    const int32_t is_first = piece->first_key == plan->round_runs[piece->run].first_key;
    if (is_first) return piece->is_last ? FV_TARGET_OUT : FV_TARGET_NEW_STATE;
    return FV_TARGET_CONTEXT_STATE;
}

/* Pieces of a chunk that go to the same place follow each other: the first may continue a run, the last may
 * be continued. */
static fv_status schedule_chunk(fv_schedule *schedule, const fv_context_round *round, int32_t num_pieces)
{
    const fv_plan *plan = schedule->plan;
    fv_call chunk;
    fv_status status = fv_context_chunk_gather(&chunk, schedule, plan->pieces, num_pieces);
    for (int32_t first = 0, end; first < num_pieces && status == FV_OK; first = end) {
        const fv_result_target target = target_of(plan, &plan->pieces[first]);
        for (end = first + 1; end < num_pieces && target_of(plan, &plan->pieces[end]) == target;) end++;
        status = fv_context_chunk_attend(schedule, &chunk, round, plan->pieces + first, end - first, target);
        if (status != FV_OK || target != FV_TARGET_CONTEXT_STATE) continue;
        status = fv_context_chunk_merge(schedule, round, plan->pieces + first, end - first);
    }
    return status;
}

static fv_status schedule_extends(fv_schedule *schedule)
{
    fv_plan *plan = schedule->plan;
    int32_t num_extends = 0;
    for (int32_t seq = 0; seq < schedule->step->num_seqs; seq++) {
        if (!is_decode(schedule, seq)) plan->extends[num_extends++] = seq;
    }
    fv_context_round round = {0};
    while (fv_context_round_next(&round, plan->round_runs, &plan->dense_problem, schedule->step, plan->extends,
                                 num_extends, plan->dense_rule.block_q, &plan->contexts)) {
        plan->num_rounds++;
        fv_context_cursor cursor = {0, -1};
        fv_status status = FV_OK;
        for (int32_t num_pieces = 1; num_pieces > 0 && status == FV_OK;) {
            num_pieces = fv_context_chunk_next(&cursor, plan->pieces, &plan->problem, plan->round_runs, round.num_runs,
                                               &plan->contexts);
            if (num_pieces > 0) status = schedule_chunk(schedule, &round, num_pieces);
        }
        if (status != FV_OK) return status;
    }
    return FV_OK;
}

fv_status fv_mla_schedule(fv_schedule *schedule, const fv_split_rule *rule)
{
    const fv_status status = schedule_decodes(schedule, rule);
    return status == FV_OK ? schedule_extends(schedule) : status;
}
