#include "planner/worker_order.h"

#include "planner/query_block.h"

/* Cost of an item that is not cut any further: with few rows of all KV heads. */
static int64_t item_cost(const fv_split_rule *rule, const fv_step *step, const fv_query_run *run)
{
    const fv_query_block block = fv_query_block_at(rule, step, run, 0);
    const int32_t is_few = fv_takes_several_heads(rule, block.num_tokens);
    return fv_query_block_cost(rule, &block) / (is_few ? 1 : rule->problem->mha.num_kv_heads);
}

/* 1: short queries come first. The last item of a long query is that of its first tokens, which see the fewest keys. */
static int32_t begins_with_short(const fv_split_rule *rule, const fv_step *step)
{
    int64_t of_short = 0, of_long = INT64_MAX;
    for (int32_t seq = 0; seq < step->num_seqs; seq++) {
        const fv_query_run run = fv_step_whole_query(step, seq);
        if (run.num_tokens == 0) continue;
        const int64_t cost = item_cost(rule, step, &run);
        if (fv_query_is_short(rule->problem, run.num_tokens))
            of_short = fv_max_i64(of_short, cost);
        else
            of_long = fv_min_i64(of_long, cost);
    }
    return of_short >= of_long;
}

void fv_worker_order(fv_query_run *runs, const fv_split_rule *rule, const fv_step *step)
{
    if (rule->num_lanes) return;
    const int32_t short_first = begins_with_short(rule, step);
    int32_t num_runs = 0;
    for (int32_t round = 0; round < 2; round++) {
        for (int32_t seq = 0; seq < step->num_seqs; seq++) {
            const fv_query_run run = fv_step_whole_query(step, seq);
            const int32_t comes_first = fv_query_is_short(rule->problem, run.num_tokens) == short_first;
            if (comes_first == (round == 0)) runs[num_runs++] = run;
        }
    }
}
