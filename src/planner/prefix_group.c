/* Finding prefix groups: each sequence is compared with the first of the group that it may join. The group
 * with the larger gain wins: a longer run with fewer shared blocks, or the run so far with more. */
#include "planner/prefix_group.h"

#include "core/compiler.h"
#include "planner/query_block.h"

/* A group that grows. */
typedef struct growing_group {
    int32_t first_run, num_runs;
    int32_t num_blocks; /* shared by all */
    int32_t num_tokens;
    int64_t gain;
} growing_group;

typedef struct search {
    const fv_problem *problem;
    const fv_step *step;
    const fv_query_run *runs;
    const fv_block_rows *rows;
    int32_t always;
} search;

static int32_t sees_one_prefix(const fv_problem *problem)
{
    return problem->window == 0 && problem->alibi == FV_ALIBI_NONE && problem->context_parallel.world <= 1;
}

/* Blocks of the run's context that lie wholly before its new tokens; 0 for a run that may not join. */
static int32_t whole_context_blocks(const search *at, const fv_query_run *run)
{
    const int32_t query_len = fv_step_query_len(at->step, run->seq);
    const int32_t is_whole = run->first_token == 0 && run->num_tokens == query_len && run->first_key == 0;
    if (!is_whole || query_len == 0) return 0;
    const int32_t context = at->step->seq_lens[run->seq] - query_len;
    return fv_max_i32(0, fv_min_i32(context / at->problem->block_size, at->rows->width));
}

static int32_t common_blocks(const search *at, int32_t seq_a, int32_t seq_b, int32_t most)
{
    const int32_t *a = at->rows->table + seq_a * at->rows->stride;
    const int32_t *b = at->rows->table + seq_b * at->rows->stride;
    int32_t count = 0;
    while (count < most && a[count] == b[count]) count++;
    return count;
}

static int64_t gain_of(const search *at, const growing_group *group)
{
    const int64_t keys = (int64_t)group->num_blocks * at->problem->block_size;
    if (group->num_runs < 2 || keys == 0) return INT64_MIN;
    if (at->always) return keys * group->num_runs;
    return fv_work_cascade_gain(at->problem, keys, group->num_runs, group->num_tokens);
}

/* 0: what the next one brings costs more than it saves, whoever it is; blocks only get fewer. */
static int32_t may_gain(const search *at, const growing_group *group)
{
    const int64_t keys = (int64_t)group->num_blocks * at->problem->block_size;
    return keys > 0 && (at->always || fv_work_cascade_gain(at->problem, keys, 2, 1) > 0);
}

static growing_group start_group(const search *at, int32_t run)
{
    return (growing_group){run, 1, whole_context_blocks(at, &at->runs[run]), at->runs[run].num_tokens, INT64_MIN};
}

/* The group with run `run`, or one that is no better. */
static growing_group join(const search *at, const growing_group *group, int32_t run)
{
    const fv_query_run *first = &at->runs[group->first_run], *next = &at->runs[run];
    const int32_t follows = next->seq == at->runs[run - 1].seq + 1;
    const int32_t most = follows ? fv_min_i32(group->num_blocks, whole_context_blocks(at, next)) : 0;
    growing_group joined = *group;
    joined.num_runs++;
    joined.num_tokens += next->num_tokens;
    joined.num_blocks = most > 0 ? common_blocks(at, first->seq, next->seq, most) : 0;
    joined.gain = gain_of(at, &joined);
    return joined;
}

int32_t fv_prefix_groups_find(fv_prefix_group *groups, const fv_problem *problem, const fv_step *step,
                              const fv_query_run *runs, int32_t num_runs, const fv_block_rows *rows, int32_t always)
{
    if (!sees_one_prefix(problem)) return 0;
    const search at = {problem, step, runs, rows, always};
    int32_t num_groups = 0;
    for (int32_t run = 0; run < num_runs;) {
        growing_group group = start_group(&at, run), best = group;
        while (group.first_run + group.num_runs < num_runs && may_gain(&at, &group)) {
            group = join(&at, &group, group.first_run + group.num_runs);
            if (group.gain > best.gain) best = group;
        }
        const int32_t is_worth = best.gain > 0;
        if (is_worth) {
            groups[num_groups++] = (fv_prefix_group){
                .first_run = best.first_run,
                .num_runs = best.num_runs,
                .num_keys = best.num_blocks * problem->block_size,
            };
        }
        run += is_worth ? best.num_runs : 1;
    }
    return num_groups;
}
