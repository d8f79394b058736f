/* A plan as one line of text. */
#include <stdarg.h>
#include <stdio.h>

#include "backends/backend.h"
#include "core/compiler.h"

static void append(fv_plan *plan, size_t *used, const char *format, ...) FV_PRINTF(3, 4);
static void append(fv_plan *plan, size_t *used, const char *format, ...)
{
    if (*used >= sizeof(plan->text)) return;
    va_list args;
    va_start(args, format);
    const int written = vsnprintf(plan->text + *used, sizeof(plan->text) - *used, format, args);
    va_end(args);
    if (written > 0) *used += (size_t)written;
}

static const char *rule_name(const fv_plan *plan)
{
    if (plan->rule.batch_invariant) return "batch-invariant";
    if (plan->static_list) return "static list";
    return plan->static_grid ? "static grid" : "equal cost";
}

static const char *attend_name(const fv_plan *plan)
{
    return plan->problem.kind == FV_ATTENTION_MLA ? "mla_decode" : "attend_paged";
}

/* "3 attend_dense (40 items)": how often each operation is called, and on how much. */
static void append_calls(fv_plan *plan, size_t *used)
{
    static const char *const names[FV_NUM_OPERATIONS] = {
        [FV_OP_KV_WRITE] = "kv_write",
        [FV_OP_ATTEND_DENSE] = "attend_dense",
        [FV_OP_KV_GATHER] = "kv_gather",
        [FV_OP_REDUCE_SEGMENTS] = "reduce_segments",
        [FV_OP_MERGE_STATES] = "merge_states",
        [FV_OP_ABSORB] = "absorb",
        [FV_OP_EXPAND] = "expand",
        [FV_OP_PROJECT] = "project",
    };
    static const char *const units[FV_NUM_OPERATIONS] = {
        [FV_OP_ATTEND_PAGED] = "items",  [FV_OP_ATTEND_DENSE] = "items",
        [FV_OP_KV_GATHER] = "rows",      [FV_OP_REDUCE_SEGMENTS] = "runs of tokens",
        [FV_OP_MERGE_STATES] = "tokens", [FV_OP_ABSORB] = "tokens",
        [FV_OP_EXPAND] = "rows",         [FV_OP_PROJECT] = "tokens",
    };
    int32_t calls[FV_NUM_OPERATIONS] = {0};
    int64_t amounts[FV_NUM_OPERATIONS] = {0};
    for (int32_t i = 0; i < plan->num_calls; i++) {
        const fv_call *call = &plan->calls[i];
        calls[call->operation]++;
        amounts[call->operation] += call->count + call->num_rows + call->num_tokens;
    }
    const char *separator = ": ";
    for (int32_t op = 0; op < FV_NUM_OPERATIONS; op++) {
        if (calls[op] == 0) continue;
        append(plan, used, "%s%d %s", separator, calls[op], op == FV_OP_ATTEND_PAGED ? attend_name(plan) : names[op]);
        if (units[op] && amounts[op] >= 0) append(plan, used, " (%lld %s)", (long long)amounts[op], units[op]);
        separator = ", ";
    }
}

static void append_step(fv_plan *plan, size_t *used)
{
    append(plan, used, "; last step: %d sequences, %d tokens", plan->batch.num_seqs, plan->batch.num_tokens);
    append_calls(plan, used);
    if (plan->num_empty > 0) append(plan, used, "; %d empty items", plan->num_empty);
    if (plan->num_rounds > 0)
        append(plan, used, "; %d rounds, %d chunks of context", plan->num_rounds, plan->num_chunks);
    if (plan->num_groups > 0) {
        append(plan, used, "; cascade: %d shared prefixes, %d keys", plan->num_groups, plan->num_shared_keys);
    }
}

const char *fv_plan_describe(fv_plan *plan)
{
    static const char *const paths[] = {"auto", "2D", "3D"};
    if (!plan) return "no plan";
    size_t used = 0;
    append(plan, &used, "%s on %s, kernels %s, %s %s (Q block %d x %d, tile %d)", plan->backend->name,
           plan->device->name, plan->kernels->name, attend_name(plan), plan->paged->name, plan->rule.block_q,
           plan->group, plan->rule.tile_keys);
    if (plan->dense) append(plan, &used, ", attend_dense %s", plan->dense->name);
    append(plan, &used, ", layout %s, path %s by %s", fv_kv_layout_name(plan->problem.kv_layout),
           paths[plan->rule.path], rule_name(plan));
    if (plan->choice) append(plan, &used, ", %s", plan->choice);
    if (plan->contexts.state_tokens > 0) {
        append(plan, &used, ", rounds of %d tokens, chunks of %d keys", plan->contexts.state_tokens,
               plan->contexts.gather_rows);
    }
    append(plan, &used, ", workspace %zu KiB", plan->workspace.bytes / 1024);
    if (plan->updated) append_step(plan, &used);
    return plan->text;
}
