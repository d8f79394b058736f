#include "planner/query_block.h"

#define KEY_COST 4
#define MERGE_COST 2 /* of one partial row, in rows x keys */

fv_query_block fv_query_block_at(const fv_split_rule *rule, const fv_step *step, const fv_query_run *run,
                                 int32_t first_token)
{
    const int32_t query_len = fv_step_query_len(step, run->seq);
    const int32_t is_short = fv_query_is_short(rule->problem, query_len);
    const int32_t rest = run->first_token + run->num_tokens - first_token;
    const int32_t num_tokens = is_short ? rest : fv_min_i32(rule->block_q, rest);
    const int32_t causal = step->causal ? step->causal[run->seq] : 1;
    const fv_key_range keys = fv_block_keys(&rule->problem->context_parallel, step->seq_lens[run->seq],
                                            step->seq_lens[run->seq] - query_len, first_token, num_tokens, causal,
                                            rule->problem->window);
    const int32_t first_key = fv_max_i32(keys.first / rule->tile_keys * rule->tile_keys, run->first_key);
    const int32_t end_key = fv_min_i32(keys.end, run->end_key);
    return (fv_query_block){run->seq, first_token, num_tokens, first_key, fv_max_i32(first_key, end_key), is_short};
}

int64_t fv_query_block_cost(const fv_split_rule *rule, const fv_query_block *block)
{
    const fv_problem *problem = rule->problem;
    if (rule->num_lanes) {
        const int64_t keys = fv_max_i32(1, block->end_key - block->first_key);
        return keys * problem->mha.num_kv_heads * (FV_LANE_KEY_COST + block->num_tokens * fv_group_of(problem));
    }
    const int32_t row_cost = fv_takes_several_heads(rule, block->num_tokens) ? fv_few_row_cost(rule) : 1;
    return row_cost * fv_work_cost(problem, fv_max_i32(1, block->end_key - block->first_key), block->num_tokens);
}

int64_t fv_work_cost(const fv_problem *problem, int64_t num_keys, int64_t num_tokens)
{
    return num_keys * problem->mha.num_kv_heads * (KEY_COST + num_tokens * fv_group_of(problem));
}

int64_t fv_work_cascade_gain(const fv_problem *problem, int64_t num_keys, int64_t num_seqs, int64_t num_tokens)
{
    const int64_t saved = (num_seqs - 1) * num_keys * problem->mha.num_kv_heads * KEY_COST;
    const int64_t partial_rows = 2 * num_tokens * problem->mha.num_heads; /* prefix and suffix of each */
    return saved - partial_rows * MERGE_COST;
}

int64_t fv_query_run_cost(const fv_split_rule *rule, const fv_step *step, const fv_query_run *run)
{
    int64_t cost = 0;
    for (int32_t token = run->first_token; token < run->first_token + run->num_tokens;) {
        const fv_query_block block = fv_query_block_at(rule, step, run, token);
        cost += fv_query_block_cost(rule, &block);
        token += block.num_tokens;
    }
    return cost;
}

int32_t fv_query_run_repeats(const fv_step *step, const fv_pass *pass, int32_t i)
{
    if (i == 0) return 0;
    const fv_query_run *run = &pass->runs[i], *last = &pass->runs[i - 1];
    return run->num_tokens == last->num_tokens && run->first_token == last->first_token &&
           run->first_key == last->first_key && run->end_key == last->end_key &&
           step->seq_lens[run->seq] == step->seq_lens[last->seq] &&
           fv_step_query_len(step, run->seq) == fv_step_query_len(step, last->seq) &&
           (!step->causal || step->causal[run->seq] == step->causal[last->seq]);
}
