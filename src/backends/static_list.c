#include "backends/static_list.h"

#include <string.h>

#define LEAST_SEGMENTS 8 /* of a reduction, about, if it has few: sequences differ */

int32_t fv_plan_decodes(const fv_plan *plan)
{
    const int32_t query_len = plan->bounds.max_query_len;
    if (plan->problem.kind == FV_ATTENTION_MLA) return query_len <= plan->decode_threshold;
    return query_len == 1 || (int64_t)query_len * plan->group <= FV_DECODE_ROWS;
}

int32_t fv_static_list_serves(const fv_plan *plan)
{
    const fv_plan_options *options = &plan->options;
    return options->static_list && !plan->device->host_is_device && plan->rule.num_lanes > 0 && fv_plan_decodes(plan) &&
           plan->problem.type == FV_ATTENTION_DECODER && !options->batch_invariant && options->path == FV_PATH_AUTO;
}

/* Pieces of a list of fixed length beside one for each sequence. Empty items cost nothing where lanes take items from the list as
 * they come; elsewhere each is a launch of its own, so those of several heads fill one round of the lanes, and not much more. */
static int32_t spare_pieces(const fv_plan *plan)
{
    const fv_split_rule *rule = &plan->rule;
    const int32_t parts = plan->problem.mha.num_kv_heads, round = (int32_t)fv_ceil_div(rule->num_lanes, parts);
    if (rule->num_lanes > rule->num_workers) return 2 * round;
    return parts == 1 ? round : fv_max_i32(round - plan->bounds.max_num_seqs, (round + 1) / 2);
}

void fv_static_list_fix(fv_plan *plan)
{
    fv_split_rule *rule = &plan->rule;
    const int64_t items = (int64_t)plan->bounds.max_num_seqs * plan->problem.mha.num_kv_heads;
    rule->lane_heads = 1;
    rule->splits_items = 0;
    rule->num_segments = 0;
    rule->spare_pieces = spare_pieces(plan);
    if (items <= rule->num_lanes) rule->half_rows = 0;
    const int32_t are_few = items <= rule->num_workers;
    if (are_few && fv_one_lane_suffices(plan->problem.kv_dtype, plan->problem.mha.head_size))
        rule->num_lanes = fv_min_i32(rule->num_lanes, rule->num_workers);
}

int32_t fv_static_list_segments(const fv_plan *plan)
{
    return fv_max_i32(LEAST_SEGMENTS, plan->room.item_capacity / plan->bounds.max_num_seqs);
}

fv_status fv_static_list_fill(fv_schedule *schedule)
{
    fv_plan *plan = schedule->plan;
    const fv_step *step = schedule->step;
    fv_work_list *list = &schedule->list;
    int32_t num_runs = 0;
    for (int32_t seq = 0; seq < step->num_seqs; seq++) {
        const fv_query_run run = fv_step_whole_query(schedule->step, seq);
        if (run.num_tokens > 0) plan->runs[num_runs++] = run;
    }
    const fv_pass pass = {.runs = plan->runs, .num_runs = num_runs};
    const fv_status status = num_runs > 0 ? fv_work_list_append(list, &plan->rule, step, &pass) : FV_OK;
    if (status != FV_OK) return status;
    schedule->host.header->num_items = list->num_items;
    schedule->host.header->num_reduces = list->num_reduces;
    plan->num_empty = list->item_capacity - list->num_items;
    memset(list->items + list->num_items, 0, (size_t)(list->item_capacity - list->num_items) * sizeof(*list->items));
    memset(list->reduces + list->num_reduces, 0,
           (size_t)(list->reduce_capacity - list->num_reduces) * sizeof(*list->reduces));
    list->num_items = list->item_capacity;
    list->num_reduces = list->reduce_capacity;
    return FV_OK;
}
