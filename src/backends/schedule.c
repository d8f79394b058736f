/* Writing the calls of a step. */
#include "backends/schedule.h"

#include <string.h>

#include "backends/backend.h"
#include "backends/static_list.h"
#include "core/error.h"
#include "planner/worker_order.h"

fv_status fv_schedule_add(fv_schedule *schedule, const fv_call *call)
{
    fv_plan *plan = schedule->plan;
    if (plan->num_calls >= plan->call_capacity) {
        return fv_fail(FV_ERR_NO_SPACE, "the plan has room for %d kernel calls; the step needs more",
                       plan->call_capacity);
    }
    plan->calls[plan->num_calls++] = *call;
    return FV_OK;
}

/* The prefix groups of a pass over the cache, where the host can read the block table. */
static int32_t find_groups(const fv_schedule *schedule, const fv_split_rule *rule, fv_key_source source,
                           const fv_query_run *runs, int32_t num_runs)
{
    const fv_plan *plan = schedule->plan;
    const fv_batch *batch = &plan->batch;
    const int32_t from_cache = source == FV_KEYS_CACHE || source == FV_KEYS_CACHE_AND_NEW;
    if (!from_cache || !rule->cascade || !plan->device->host_is_device) return 0;
    const fv_block_rows rows = {batch->block_table, batch->block_table_stride, batch->block_table_width};
    return fv_prefix_groups_find(plan->groups, &plan->problem, schedule->step, runs, num_runs, &rows,
                                 plan->options.cascade == FV_CASCADE_ALWAYS);
}

/* Of the items from `first` on, at most. */
static int32_t item_tokens(const fv_work_list *list, int32_t first)
{
    int32_t most = 0;
    for (int32_t i = first; i < list->num_items; i++) most = fv_max_i32(most, list->items[i].num_tokens);
    return most;
}

/* Of the reductions from `first` on. */
static int32_t most_segments(const fv_work_list *list, int32_t first)
{
    int32_t most = 0;
    for (int32_t i = first; i < list->num_reduces; i++) most = fv_max_i32(most, list->reduces[i].num_segments);
    return most;
}

/* fv_schedule_attend, of runs whose prefix groups are known: the first `num_groups` of plan->groups. */
static fv_status attend_runs(fv_schedule *schedule, const fv_split_rule *rule, fv_operation operation,
                             fv_key_source source, fv_result_target target, int32_t first_token,
                             const fv_query_run *runs, int32_t num_runs, int32_t num_groups)
{
    fv_plan *plan = schedule->plan;
    const int32_t first_item = schedule->list.num_items, first_reduce = schedule->list.num_reduces;
    const fv_pass pass = {runs, num_runs, plan->groups, num_groups};
    fv_status status = fv_work_list_append(&schedule->list, rule, schedule->step, &pass);
    if (status != FV_OK || schedule->list.num_items == first_item) return status;
    plan->num_groups += num_groups;
    if (schedule->list.num_meeting > 0) plan->piece_keys = schedule->list.piece_keys;
    for (int32_t i = 0; i < num_groups; i++) plan->num_shared_keys += plan->groups[i].num_keys;

    const fv_call attend = {
        .operation = operation,
        .source = source,
        .target = target,
        .first = first_item,
        .count = schedule->list.num_items - first_item,
        .num_split = schedule->list.num_split,
        .num_meeting = schedule->list.num_meeting,
        .lane_heads = schedule->list.lane_heads,
        .item_tokens = item_tokens(&schedule->list, first_item),
        .first_token = first_token,
        .indices = schedule->num_indices,
    };
    const fv_call reduce = {
        .operation = FV_OP_REDUCE_SEGMENTS,
        .source = source,
        .target = target,
        .first = first_reduce,
        .count = schedule->list.num_reduces - first_reduce,
        .most_segments = most_segments(&schedule->list, first_reduce),
        .partials_of = operation,
        .first_token = first_token,
    };
    status = fv_schedule_add(schedule, &attend);
    if (status == FV_OK && reduce.count > 0) status = fv_schedule_add(schedule, &reduce);
    return status;
}

fv_status fv_schedule_attend(fv_schedule *schedule, const fv_split_rule *rule, fv_operation operation,
                             fv_key_source source, fv_result_target target, int32_t first_token,
                             const fv_query_run *runs, int32_t num_runs)
{
    const int32_t num_groups = find_groups(schedule, rule, source, runs, num_runs);
    return attend_runs(schedule, rule, operation, source, target, first_token, runs, num_runs, num_groups);
}

fv_status fv_schedule_attend_all(fv_schedule *schedule, fv_operation operation, fv_key_source source)
{
    fv_plan *plan = schedule->plan;
    const int32_t num_seqs = schedule->step->num_seqs;
    for (int32_t seq = 0; seq < num_seqs; seq++) plan->runs[seq] = fv_step_whole_query(schedule->step, seq);
    const int32_t num_groups = find_groups(schedule, &plan->rule, source, plan->runs, num_seqs);
    if (num_groups == 0) fv_worker_order(plan->runs, &plan->rule, schedule->step); /* a group's runs stay neighbours */
    return attend_runs(schedule, &plan->rule, operation, source, FV_TARGET_OUT, 0, plan->runs, num_seqs, num_groups);
}

static fv_status schedule_grid(fv_schedule *schedule)
{
    const fv_plan *plan = schedule->plan;
    const int32_t is_encoder = plan->problem.type == FV_ATTENTION_ENCODER, is_list = plan->static_list;
    if (is_list) {
        const fv_status filled = fv_static_list_fill(schedule);
        if (filled != FV_OK) return filled;
    }
    /* Tokens of no sequence have no latents. A device projects them all the same: another step's may have. */
    const int32_t knows_tokens = plan->device->host_is_device && schedule->step->query_start;
    const int32_t num_projected = knows_tokens ? schedule->step->query_start[schedule->step->num_seqs] : -1;
    const fv_call attend = {
        .operation = is_encoder ? FV_OP_ATTEND_DENSE : FV_OP_ATTEND_PAGED,
        .source = is_encoder ? FV_KEYS_NEW : FV_KEYS_CACHE,
        .target = plan->absorbs ? FV_TARGET_LATENTS : FV_TARGET_OUT,
        .count = is_list ? schedule->list.num_items : -1,
        .item_tokens = fv_min_i32(plan->bounds.max_query_len, plan->rule.block_q),
    };
    const fv_call reduce = {
        .operation = FV_OP_REDUCE_SEGMENTS,
        .source = attend.source,
        .target = attend.target,
        .count = is_list ? schedule->list.num_reduces : -1,
        .most_segments = is_list ? fv_static_list_segments(plan) : 0,
        .partials_of = attend.operation,
    };
    const fv_call calls[] = {
        {.operation = FV_OP_ABSORB, .num_tokens = -1},
        attend,
        reduce,
        {.operation = FV_OP_PROJECT, .num_tokens = num_projected},
    };
    const int32_t is_needed[] = {plan->absorbs, 1, plan->num_segments > 1 || is_list, plan->absorbs};
    fv_status status = FV_OK;
    for (int32_t i = 0; i < FV_ARRAY_LEN(calls) && status == FV_OK; i++) {
        if (is_needed[i]) status = fv_schedule_add(schedule, &calls[i]);
    }
    return status;
}

/* Where all attend all, the kernels read flags that say so, kept in the first indices. */
static void write_causal_flags(fv_schedule *schedule)
{
    const fv_plan *plan = schedule->plan;
    if (plan->problem.type == FV_ATTENTION_DECODER || plan->batch.causal) return;
    memset(schedule->host.indices, 0, (size_t)plan->bounds.max_num_seqs);
    schedule->num_indices = (int32_t)fv_ceil_div(plan->bounds.max_num_seqs, (int64_t)sizeof(int32_t));
}

static fv_status schedule_calls(fv_schedule *schedule)
{
    const fv_plan *plan = schedule->plan;
    if (plan->problem.type == FV_ATTENTION_DECODER) {
        const fv_status status = fv_schedule_add(schedule, &(fv_call){.operation = FV_OP_KV_WRITE});
        if (status != FV_OK) return status;
    }
    if (plan->static_grid || !schedule->step->query_start) return schedule_grid(schedule);
    if (plan->problem.type == FV_ATTENTION_ENCODER) { /* every token is new, and there is no cache */
        return fv_schedule_attend_all(schedule, FV_OP_ATTEND_DENSE, FV_KEYS_NEW);
    }
    return plan->backend->schedule(schedule);
}

fv_status fv_schedule_step(fv_plan *plan, const fv_step *step, fv_stream stream)
{
    fv_schedule schedule = {.plan = plan, .step = step, .list = plan->room};
    fv_status status = fv_step_buffers_begin(&schedule.host, &plan->buffers);
    if (status != FV_OK) return status;
    schedule.host.header->num_seqs = plan->batch.num_seqs;
    schedule.host.header->num_tokens = plan->batch.num_tokens;
    schedule.list.items = schedule.host.items;
    schedule.list.reduces = schedule.host.reduces;
    plan->num_calls = plan->num_empty = plan->num_groups = plan->num_shared_keys = plan->num_rounds = plan->num_chunks =
        0;
    write_causal_flags(&schedule);
    if (plan->batch.num_seqs > 0 || plan->static_grid) status = schedule_calls(&schedule);
    if (status != FV_OK) return status;
    plan->used = (fv_step_sizes){schedule.list.num_items, schedule.list.num_reduces, schedule.num_indices};
    return fv_step_buffers_commit(&plan->buffers, &plan->used, stream);
}
