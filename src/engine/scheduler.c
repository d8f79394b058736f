/* Two lists and a budget. */
#include "engine/scheduler.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"

static void push_back(fv_sequence **list, fv_sequence *sequence)
{
    while (*list) list = &(*list)->next;
    sequence->next = NULL;
    *list = sequence;
}

static void take_out(fv_sequence **list, const fv_sequence *sequence)
{
    while (*list != sequence) list = &(*list)->next;
    *list = sequence->next;
}

fv_status fv_scheduler_init(fv_scheduler *scheduler, const fv_scheduler_limits *limits)
{
    memset(scheduler, 0, sizeof(*scheduler));
    const struct {
        const char *name;
        int32_t value;
    } checked[] = {
        {"block_size", limits->block_size},
        {"max_num_seqs", limits->max_num_seqs},
        {"max_batched_tokens", limits->max_batched_tokens},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(checked); i++) {
        if (checked[i].value >= 1) continue;
        return fv_fail(FV_ERR_INVALID, "%s is %d; accepted: 1 or more", checked[i].name, checked[i].value);
    }
    scheduler->limits = *limits;
    scheduler->limits.max_num_seqs = fv_min_i32(limits->max_num_seqs, limits->max_batched_tokens);
    return fv_block_pool_init(&scheduler->pool, limits->num_blocks);
}

void fv_scheduler_deinit(fv_scheduler *scheduler)
{
    fv_block_pool_deinit(&scheduler->pool);
    memset(scheduler, 0, sizeof(*scheduler));
}

fv_status fv_scheduler_add(fv_scheduler *scheduler, fv_sequence *sequence, int32_t prompt_tokens, int32_t max_tokens)
{
    if (prompt_tokens < 1 || max_tokens < prompt_tokens) {
        return fv_fail(FV_ERR_INVALID, "a prompt of %d tokens in a sequence of at most %d; accepted: 1 to all of them",
                       prompt_tokens, max_tokens);
    }
    const int64_t num_blocks = fv_ceil_div(max_tokens, scheduler->limits.block_size);
    if (num_blocks > scheduler->pool.num_blocks) {
        return fv_fail(FV_ERR_NO_SPACE,
                       "prompt and output may take %d tokens (prompt %d), but the KV cache holds %lld in all",
                       max_tokens, prompt_tokens, (long long)scheduler->pool.num_blocks * scheduler->limits.block_size);
    }
    int32_t *blocks = calloc((size_t)num_blocks, sizeof(*blocks));
    if (!blocks) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a block table of %lld entries", (long long)num_blocks);

    *sequence = (fv_sequence){
        .state = FV_SEQUENCE_WAITING,
        .num_tokens = prompt_tokens,
        .max_tokens = max_tokens,
        .blocks = blocks,
        .num_blocks = (int32_t)num_blocks,
    };
    push_back(&scheduler->waiting, sequence);
    scheduler->num_waiting++;
    return FV_OK;
}

/* Only the first in line is asked, so that a long prompt is not overtaken for ever by short ones. */
static bool admit_next(fv_scheduler *scheduler)
{
    fv_sequence *sequence = scheduler->waiting;
    if (!sequence || scheduler->num_running == scheduler->limits.max_num_seqs) return false;
    if (!fv_block_pool_acquire(sequence->blocks, &scheduler->pool, sequence->num_blocks)) return false;
    take_out(&scheduler->waiting, sequence);
    scheduler->num_waiting--;
    push_back(&scheduler->running, sequence);
    scheduler->num_running++;
    sequence->state = FV_SEQUENCE_RUNNING;
    return true;
}

static bool is_decode(const fv_sequence *sequence)
{
    return sequence->num_computed > 0 && sequence->num_tokens - sequence->num_computed == 1;
}

/* Adds the next tokens of `sequence`, at most `budget`. Returns how many. */
static int32_t add_part(fv_step_part *parts, int32_t *num_parts, fv_sequence *sequence, int32_t budget)
{
    const int32_t left = sequence->num_tokens - sequence->num_computed;
    const int32_t num_tokens = fv_min_i32(left, budget);
    if (num_tokens == 0) return 0;
    parts[(*num_parts)++] = (fv_step_part){
        .sequence = sequence,
        .first_token = sequence->num_computed,
        .num_tokens = num_tokens,
        .is_last = num_tokens == left,
    };
    return num_tokens;
}

int32_t fv_scheduler_next(fv_step_part *parts, fv_scheduler *scheduler)
{
    while (admit_next(scheduler)) {
    }

    int32_t budget = scheduler->limits.max_batched_tokens;
    int32_t num_parts = 0;
    for (fv_sequence *sequence = scheduler->running; sequence; sequence = sequence->next) {
        if (is_decode(sequence)) budget -= add_part(parts, &num_parts, sequence, budget);
    }
    for (fv_sequence *sequence = scheduler->running; sequence; sequence = sequence->next) {
        if (!is_decode(sequence)) budget -= add_part(parts, &num_parts, sequence, budget);
    }
    return num_parts;
}

void fv_scheduler_commit(const fv_step_part *parts, int32_t num_parts)
{
    for (int32_t i = 0; i < num_parts; i++) parts[i].sequence->num_computed += parts[i].num_tokens;
}

void fv_scheduler_append(fv_sequence *sequence)
{
    assert(sequence->num_tokens < sequence->max_tokens);
    sequence->num_tokens++;
}

void fv_scheduler_finish(fv_scheduler *scheduler, fv_sequence *sequence)
{
    if (sequence->state == FV_SEQUENCE_WAITING) {
        take_out(&scheduler->waiting, sequence);
        scheduler->num_waiting--;
    } else if (sequence->state == FV_SEQUENCE_RUNNING) {
        take_out(&scheduler->running, sequence);
        scheduler->num_running--;
        fv_block_pool_release(&scheduler->pool, sequence->blocks, sequence->num_blocks);
    }
    free(sequence->blocks);
    sequence->blocks = NULL;
    sequence->num_blocks = 0;
    sequence->state = FV_SEQUENCE_FINISHED;
}
