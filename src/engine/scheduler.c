/* Two lists, a budget, and a pool of blocks for each group. */
#include "engine/scheduler.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"

static void push_back(fv_sequence_list *list, fv_sequence *sequence)
{
    fv_sequence **end = list->last ? &list->last->next : &list->first;
    sequence->next = NULL;
    *end = list->last = sequence;
}

static void take_out(fv_sequence_list *list, const fv_sequence *sequence)
{
    fv_sequence *before = NULL, **at = &list->first;
    for (; *at != sequence; at = &before->next) before = *at;
    *at = sequence->next;
    if (list->last == sequence) list->last = before;
}

int32_t fv_scheduler_blocks_at_once(const fv_scheduler_limits *limits, int32_t window, int32_t max_tokens)
{
    const int32_t all = (int32_t)fv_ceil_div(max_tokens, limits->block_size);
    if (window == 0) return all;
    /* During a step: its tokens and the window - 1 before the first of them, which may begin at the end
     * of a block. */
    const int64_t seen = (int64_t)window - 1 + fv_min_i32(limits->max_batched_tokens, max_tokens);
    return (int32_t)fv_min_i64(all, fv_ceil_div(seen - 1, limits->block_size) + 1);
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
    assert(limits->chunk_tokens <= limits->max_batched_tokens - scheduler->limits.max_num_seqs + 1);
    fv_status status = FV_OK;
    for (int32_t i = 0; i < limits->num_groups && status == FV_OK; i++) {
        status = fv_block_pool_init(&scheduler->groups[i].pool, limits->groups[i].num_blocks);
    }
    if (status != FV_OK) fv_scheduler_deinit(scheduler);
    return status;
}

void fv_scheduler_deinit(fv_scheduler *scheduler)
{
    for (int32_t i = 0; i < FV_MAX_LAYER_GROUPS; i++) fv_block_pool_deinit(&scheduler->groups[i].pool);
    memset(scheduler, 0, sizeof(*scheduler));
}

/* Whether it fits when it runs alone. */
static fv_status check_room(const fv_scheduler *scheduler, int32_t prompt_tokens, int32_t max_tokens)
{
    const fv_scheduler_limits *limits = &scheduler->limits;
    for (int32_t i = 0; i < limits->num_groups; i++) {
        const int32_t num_blocks = fv_scheduler_blocks_at_once(limits, limits->groups[i].window, max_tokens);
        if (num_blocks <= limits->groups[i].num_blocks) continue;
        return fv_fail(
            FV_ERR_NO_SPACE,
            "prompt and output may take %d tokens (prompt %d), %lld at one time, but the KV cache holds %lld",
            max_tokens, prompt_tokens, (long long)fv_min_i64(max_tokens, (int64_t)num_blocks * limits->block_size),
            (long long)limits->groups[i].num_blocks * limits->block_size);
    }
    if (limits->max_sequence_tokens > 0 && max_tokens > limits->max_sequence_tokens) {
        return fv_fail(FV_ERR_NO_SPACE,
                       "prompt and output may take %d tokens (prompt %d); accepted: up to %d, the context or the cache",
                       max_tokens, prompt_tokens, limits->max_sequence_tokens);
    }
    return FV_OK;
}

static void free_rows(fv_sequence *sequence)
{
    for (int32_t i = 0; i < FV_MAX_LAYER_GROUPS; i++) {
        free(sequence->rows[i].blocks);
        sequence->rows[i] = (fv_block_row){0};
    }
}

fv_status fv_scheduler_add(fv_scheduler *scheduler, fv_sequence *sequence, int32_t prompt_tokens, int32_t max_tokens)
{
    if (prompt_tokens < 1 || max_tokens < prompt_tokens) {
        return fv_fail(FV_ERR_INVALID, "a prompt of %d tokens in a sequence of at most %d; accepted: 1 to all of them",
                       prompt_tokens, max_tokens);
    }
    fv_status status = check_room(scheduler, prompt_tokens, max_tokens);
    if (status != FV_OK) return status;
    *sequence = (fv_sequence){
        .state = FV_SEQUENCE_WAITING,
        .num_prompt = prompt_tokens,
        .num_tokens = prompt_tokens,
        .max_tokens = max_tokens,
    };
    const size_t num_entries = (size_t)fv_ceil_div(max_tokens, scheduler->limits.block_size);
    for (int32_t i = 0; i < scheduler->limits.num_groups; i++) {
        sequence->rows[i].blocks = calloc(num_entries, sizeof(int32_t));
        if (sequence->rows[i].blocks) continue;
        free_rows(sequence);
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for a block table of %zu entries", num_entries);
    }
    push_back(&scheduler->waiting, sequence);
    scheduler->num_waiting++;
    return FV_OK;
}

/* All groups or none. */
static bool reserve_blocks(fv_scheduler *scheduler, fv_sequence *sequence)
{
    const fv_scheduler_limits *limits = &scheduler->limits;
    for (int32_t i = 0; i < limits->num_groups; i++) {
        const int32_t num_blocks = fv_scheduler_blocks_at_once(limits, limits->groups[i].window, sequence->max_tokens);
        if (scheduler->groups[i].num_reserved + num_blocks > limits->groups[i].num_blocks) return false;
        sequence->rows[i].num_reserved = num_blocks;
    }
    for (int32_t i = 0; i < limits->num_groups; i++) {
        scheduler->groups[i].num_reserved += sequence->rows[i].num_reserved;
    }
    return true;
}

/* Blocks for the tokens before `end_token`. They are there: see the admission. */
static void acquire_blocks(fv_scheduler *scheduler, fv_sequence *sequence, int32_t end_token)
{
    const int32_t end = (int32_t)fv_ceil_div(end_token, scheduler->limits.block_size);
    for (int32_t i = 0; i < scheduler->limits.num_groups; i++) {
        fv_block_row *row = &sequence->rows[i];
        if (end <= row->end_held) continue;
        const bool acquired = fv_block_pool_acquire(row->blocks + row->end_held, &scheduler->groups[i].pool,
                                                    end - row->end_held);
        row->end_held = end;
        assert(acquired && row->end_held - row->first_held <= row->num_reserved);
        (void)acquired;
    }
}

/* Gives back the blocks before block `end`. */
static void release_before(fv_scheduler_group *group, fv_block_row *row, int32_t end)
{
    const int32_t count = end - row->first_held;
    if (count <= 0) return;
    int32_t *blocks = row->blocks + row->first_held;
    fv_block_pool_release(&group->pool, blocks, count);
    memset(blocks, 0, (size_t)count * sizeof(*blocks));
    row->first_held = end;
}

/* Only the first in line is asked, so that a long prompt is not overtaken for ever by short ones. */
static bool admit_next(fv_scheduler *scheduler)
{
    fv_sequence *sequence = scheduler->waiting.first;
    if (!sequence || scheduler->num_running == scheduler->limits.max_num_seqs) return false;
    if (!reserve_blocks(scheduler, sequence)) return false;
    take_out(&scheduler->waiting, sequence);
    scheduler->num_waiting--;
    push_back(&scheduler->running, sequence);
    scheduler->num_running++;
    sequence->state = FV_SEQUENCE_RUNNING;
    return true;
}

/* The last chunk of a prompt is none, even where it has one token. */
static bool is_decode(const fv_sequence *sequence) { return sequence->num_computed >= sequence->num_prompt; }

/* Adds the next tokens of `sequence`, at most `budget`. Returns how many. With fixed chunks all of one or
 * none, so that where a prompt is cut says nothing of the others. */
static int32_t add_part(fv_step_part *parts, int32_t *num_parts, fv_scheduler *scheduler, fv_sequence *sequence,
                        int32_t budget)
{
    const int32_t left = sequence->num_tokens - sequence->num_computed;
    const int32_t chunk_tokens = scheduler->limits.chunk_tokens;
    const int32_t num_tokens = fv_min_i32(left, chunk_tokens > 0 ? chunk_tokens : budget);
    if (num_tokens == 0 || num_tokens > budget) return 0;
    acquire_blocks(scheduler, sequence, sequence->num_computed + num_tokens);
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
    for (fv_sequence *sequence = scheduler->running.first; sequence; sequence = sequence->next) {
        if (is_decode(sequence)) budget -= add_part(parts, &num_parts, scheduler, sequence, budget);
    }
    for (fv_sequence *sequence = scheduler->running.first; sequence; sequence = sequence->next) {
        if (!is_decode(sequence)) budget -= add_part(parts, &num_parts, scheduler, sequence, budget);
    }
    return num_parts;
}

void fv_scheduler_commit(fv_scheduler *scheduler, const fv_step_part *parts, int32_t num_parts)
{
    for (int32_t i = 0; i < num_parts; i++) {
        fv_sequence *sequence = parts[i].sequence;
        sequence->num_computed += parts[i].num_tokens;
        for (int32_t g = 0; g < scheduler->limits.num_groups; g++) {
            const int32_t window = scheduler->limits.groups[g].window;
            const int32_t first_seen = sequence->num_computed - window + 1; /* by the next token */
            if (window == 0 || first_seen <= 0) continue;
            release_before(&scheduler->groups[g], &sequence->rows[g], first_seen / scheduler->limits.block_size);
        }
    }
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
        for (int32_t i = 0; i < scheduler->limits.num_groups; i++) {
            release_before(&scheduler->groups[i], &sequence->rows[i], sequence->rows[i].end_held);
            scheduler->groups[i].num_reserved -= sequence->rows[i].num_reserved;
        }
    }
    free_rows(sequence);
    sequence->state = FV_SEQUENCE_FINISHED;
}
