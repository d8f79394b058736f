/* Plans for a batch, and the prefixes that its sequences share. */
#include <stdio.h>
#include <stdlib.h>

#include "backends/answers.h"
#include "bench/workload.h"
#include "core/error.h"
#include "planner/plan.h"
#include "planner/query_block.h"

static void describe_plan(fv_answer *a, const fv_answers *t, const fv_workload *w, fv_context *context)
{
    fv_plan_options plan_options = t->args->plan;
    plan_options.device = t->device;
    plan_options.backend = a->name;
    fv_plan *plan = NULL;
    fv_status status = fv_plan_create(&plan, context, &w->problem, &w->bounds, &plan_options);
    if (status == FV_OK) status = fv_plan_update(plan, &w->batch, NULL);
    if (status != FV_OK) {
        snprintf(a->plan, sizeof(a->plan), "no plan: %s", fv_last_error());
    } else {
        snprintf(a->plan, sizeof(a->plan), "%s", fv_plan_describe(plan));
        a->workspace_bytes = fv_plan_workspace_bytes(plan);
        a->buffer_bytes = fv_plan_buffer_bytes(plan);
    }
    fv_plan_destroy(plan);
}

static fv_status find_prefixes(fv_answers *t, const fv_workload *w)
{
    static const int32_t always = 1; /* the longest there are, so that those not worth it are seen too */
    const fv_step step = {w->spec.num_seqs, w->query_start, w->spec.seq_lens, w->causal};
    const fv_block_rows blocks = {w->block_table, w->batch.block_table_stride, w->batch.block_table_width};
    fv_query_run *runs = calloc((size_t)step.num_seqs, sizeof(*runs));
    fv_prefix_group *groups = calloc((size_t)step.num_seqs / 2 + 1, sizeof(*groups));
    if (!runs || !groups) {
        free(runs);
        free(groups);
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d sequences", step.num_seqs);
    }
    int64_t cost = 0;
    for (int32_t seq = 0; seq < step.num_seqs; seq++) {
        runs[seq] = (fv_query_run){seq, 0, fv_step_query_len(&step, seq), 0, step.seq_lens[seq]};
        cost += fv_work_cost(&w->problem, step.seq_lens[seq], runs[seq].num_tokens);
    }
    const int32_t found = fv_prefix_groups_find(groups, &w->problem, &step, runs, step.num_seqs, &blocks, always);
    for (int32_t i = 0; i < found && t->num_prefixes < FV_ANSWERS_MAX_PREFIXES; i++) {
        const fv_prefix_group *group = &groups[i];
        const int32_t first = group->first_run, end = first + group->num_runs;
        const int64_t gain = fv_work_cascade_gain(&w->problem, group->num_keys, group->num_runs,
                                                  w->query_start[end] - w->query_start[first]);
        t->prefixes[t->num_prefixes++] = (fv_prefix_row){first, group->num_runs, group->num_keys, gain,
                                                         (double)gain / (double)cost};
    }
    free(runs);
    free(groups);
    return FV_OK;
}

fv_status fv_answers_add_batch(fv_answers *t, fv_context *context, const char *spec)
{
    t->batch = spec;
    fv_workload w;
    fv_status status = fv_workload_init_batch(&w, context, &t->args->problem, spec, t->args->shared_prefix);
    if (status != FV_OK) return status;
    for (int32_t i = 0; i < t->num_all; i++) {
        if (t->all[i].num_reasons == 0) describe_plan(&t->all[i], t, &w, context);
    }
    if (w.problem.kind == FV_ATTENTION_MHA) status = find_prefixes(t, &w);
    fv_workload_deinit(&w);
    return status;
}

const char *fv_answers_cascade_verdict(const fv_answers *t, const fv_prefix_row *row)
{
    const fv_plan_options *plan = &t->args->plan;
    if (plan->cascade == FV_CASCADE_OFF || plan->batch_invariant || plan->static_grid) return "not asked for";
    if (plan->cascade == FV_CASCADE_ALWAYS) return "taken, as asked for";
    return row->gain > 0 ? "worth it" : "not worth it";
}
