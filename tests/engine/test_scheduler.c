/* The scheduler, without a model: what a step holds, who waits, and that everyone ends. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "engine/scheduler.h"

enum { max_parts = 64 };

static fv_scheduler_limits limits_of(int32_t block_size, int32_t num_blocks, int32_t max_num_seqs, int32_t budget)
{
    return (fv_scheduler_limits){
        .block_size = block_size,
        .max_num_seqs = max_num_seqs,
        .max_batched_tokens = budget,
        .num_groups = 1,
        .groups = {{.num_blocks = num_blocks}},
    };
}

static void init(fv_scheduler *scheduler, int32_t block_size, int32_t num_blocks, int32_t max_num_seqs, int32_t budget)
{
    const fv_scheduler_limits limits = limits_of(block_size, num_blocks, max_num_seqs, budget);
    assert_int_equal(fv_scheduler_init(scheduler, &limits), FV_OK);
}

/* A group without and one with a window. */
static void init_two_groups(fv_scheduler *scheduler, int32_t block_size, int32_t num_blocks, int32_t sliding_blocks,
                            int32_t window, int32_t max_num_seqs, int32_t budget)
{
    fv_scheduler_limits limits = limits_of(block_size, num_blocks, max_num_seqs, budget);
    limits.num_groups = 2;
    limits.groups[1].num_blocks = sliding_blocks;
    limits.groups[1].window = window;
    assert_int_equal(fv_scheduler_init(scheduler, &limits), FV_OK);
}

/* During a step: all its tokens and what they see have a block of their own, and no sequence holds more
 * than it has reserved. */
static void check_blocks(const fv_scheduler *scheduler, const fv_step_part *part)
{
    const fv_scheduler_limits *limits = &scheduler->limits;
    const int32_t seq_len = part->first_token + part->num_tokens;
    for (int32_t g = 0; g < limits->num_groups; g++) {
        const fv_block_row *row = &part->sequence->rows[g];
        const int32_t window = limits->groups[g].window;
        const int32_t first_seen = window == 0 ? 0 : fv_max_i32(part->first_token - window + 1, 0);
        for (int32_t i = 0; i < seq_len; i++) {
            const int32_t block = row->blocks[i / limits->block_size];
            if (i >= first_seen) assert_in_range(block, 1, limits->groups[g].num_blocks);
            if (i / limits->block_size < first_seen / limits->block_size) assert_int_equal(block, 0);
        }
        assert_in_range(row->end_held - row->first_held, 0, row->num_reserved);
        assert_in_range(scheduler->groups[g].num_reserved, 0, limits->groups[g].num_blocks);
    }
}

/* A step as the session does it: the tokens are computed, those that can write do so, those that have
 * all their tokens leave. Returns the tokens of the step. */
static int32_t run_step(fv_scheduler *scheduler)
{
    fv_step_part parts[max_parts];
    const int32_t num_parts = fv_scheduler_next(parts, scheduler);
    assert_in_range(num_parts, 0, scheduler->limits.max_num_seqs);
    int32_t num_tokens = 0;
    for (int32_t i = 0; i < num_parts; i++) {
        const fv_step_part *part = &parts[i];
        num_tokens += part->num_tokens;
        assert_int_equal(part->sequence->state, FV_SEQUENCE_RUNNING);
        assert_int_equal(part->first_token, part->sequence->num_computed);
        assert_true(part->num_tokens > 0);
        assert_int_equal(part->is_last, part->first_token + part->num_tokens == part->sequence->num_tokens);
        check_blocks(scheduler, part);
    }
    assert_in_range(num_tokens, 0, scheduler->limits.max_batched_tokens);
    fv_scheduler_commit(scheduler, parts, num_parts);
    for (int32_t i = 0; i < num_parts; i++) {
        fv_sequence *sequence = parts[i].sequence;
        if (!parts[i].is_last) continue;
        if (sequence->num_tokens < sequence->max_tokens) {
            fv_scheduler_append(sequence);
        } else {
            fv_scheduler_finish(scheduler, sequence);
        }
    }
    return num_tokens;
}

static void test_cuts_prompts_by_the_budget(void **state)
{
    (void)state;
    fv_scheduler scheduler;
    init(&scheduler, 16, 100, 8, 10);
    fv_sequence a, b;
    assert_int_equal(fv_scheduler_add(&scheduler, &a, 25, 30), FV_OK);
    assert_int_equal(fv_scheduler_add(&scheduler, &b, 4, 8), FV_OK);
    fv_step_part parts[max_parts];

    assert_int_equal(fv_scheduler_next(parts, &scheduler), 1); /* a takes the whole budget */
    assert_ptr_equal(parts[0].sequence, &a);
    assert_int_equal(parts[0].num_tokens, 10);
    assert_false(parts[0].is_last);
    fv_scheduler_commit(&scheduler, parts, 1);
    assert_int_equal(run_step(&scheduler), 10);

    assert_int_equal(fv_scheduler_next(parts, &scheduler), 2); /* the rest of a, then b */
    assert_int_equal(parts[0].num_tokens, 5);
    assert_int_equal(parts[0].first_token, 20);
    assert_true(parts[0].is_last);
    assert_ptr_equal(parts[1].sequence, &b);
    assert_int_equal(parts[1].num_tokens, 4);
    fv_scheduler_finish(&scheduler, &a);
    fv_scheduler_finish(&scheduler, &b);
    fv_scheduler_deinit(&scheduler);
}

static void test_decodes_come_first(void **state)
{
    (void)state;
    fv_scheduler scheduler;
    init(&scheduler, 16, 100, 8, 8);
    fv_sequence a, b, c;
    assert_int_equal(fv_scheduler_add(&scheduler, &a, 3, 20), FV_OK);
    assert_int_equal(run_step(&scheduler), 3);
    assert_int_equal(fv_scheduler_add(&scheduler, &b, 30, 40), FV_OK);
    assert_int_equal(fv_scheduler_add(&scheduler, &c, 2, 9), FV_OK);
    fv_step_part parts[max_parts];
    assert_int_equal(fv_scheduler_next(parts, &scheduler), 2);
    assert_ptr_equal(parts[0].sequence, &a);
    assert_int_equal(parts[0].num_tokens, 1);
    assert_ptr_equal(parts[1].sequence, &b);
    assert_int_equal(parts[1].num_tokens, 7);
    fv_scheduler_finish(&scheduler, &a);
    fv_scheduler_finish(&scheduler, &b);
    fv_scheduler_finish(&scheduler, &c);
    assert_int_equal(scheduler.groups[0].pool.num_free, 100);
    fv_scheduler_deinit(&scheduler);
}

/* Chunks of a fixed length may leave one token: it is a part of the prompt, behind the decodes. */
static void test_a_last_token_of_a_prompt_is_no_decode(void **state)
{
    (void)state;
    fv_scheduler scheduler;
    fv_scheduler_limits limits = limits_of(16, 100, 4, 8);
    limits.chunk_tokens = 5;
    assert_int_equal(fv_scheduler_init(&scheduler, &limits), FV_OK);
    fv_sequence a, b;
    assert_int_equal(fv_scheduler_add(&scheduler, &a, 11, 20), FV_OK);
    assert_int_equal(fv_scheduler_add(&scheduler, &b, 3, 20), FV_OK);
    assert_int_equal(run_step(&scheduler), 8);
    assert_int_equal(run_step(&scheduler), 6);
    fv_step_part parts[max_parts];
    assert_int_equal(fv_scheduler_next(parts, &scheduler), 2);
    assert_ptr_equal(parts[0].sequence, &b);
    assert_ptr_equal(parts[1].sequence, &a);
    assert_int_equal(parts[1].first_token, 10);
    assert_int_equal(parts[1].num_tokens, 1);
    fv_scheduler_finish(&scheduler, &a);
    fv_scheduler_finish(&scheduler, &b);
    fv_scheduler_deinit(&scheduler);
}

/* Whoever leaves, the first, the last or one between, running or not: the others stay in their order, and who comes is
 * behind them. */
static void test_keeps_the_order(void **state)
{
    (void)state;
    enum { num_seqs = 3 };
    for (int32_t round = 0; round < 2 * num_seqs; round++) {
        const int32_t leaves = round / 2;
        fv_scheduler scheduler;
        fv_sequence sequences[num_seqs + 1];
        fv_step_part parts[max_parts];
        init(&scheduler, 16, 100, 8, 64);
        for (int32_t i = 0; i < num_seqs; i++) {
            assert_int_equal(fv_scheduler_add(&scheduler, &sequences[i], 2, 9), FV_OK);
        }
        if (round % 2 > 0) assert_int_equal(fv_scheduler_next(parts, &scheduler), num_seqs);
        fv_scheduler_finish(&scheduler, &sequences[leaves]);
        assert_int_equal(fv_scheduler_add(&scheduler, &sequences[num_seqs], 2, 9), FV_OK);
        assert_int_equal(fv_scheduler_next(parts, &scheduler), num_seqs);
        for (int32_t i = 0, expected = 0; i < num_seqs; i++, expected++) {
            if (expected == leaves) expected++;
            assert_ptr_equal(parts[i].sequence, &sequences[expected]);
        }
        for (int32_t i = num_seqs; i >= 0; i--) {
            if (i != leaves) fv_scheduler_finish(&scheduler, &sequences[i]);
        }
        assert_int_equal(fv_scheduler_add(&scheduler, &sequences[0], 2, 9), FV_OK); /* to an empty line */
        assert_int_equal(fv_scheduler_next(parts, &scheduler), 1);
        assert_ptr_equal(parts[0].sequence, &sequences[0]);
        fv_scheduler_finish(&scheduler, &sequences[0]);
        fv_scheduler_deinit(&scheduler);
    }
}

static void test_waits_for_room_in_order(void **state)
{
    (void)state;
    fv_scheduler scheduler;
    init(&scheduler, 4, 10, 8, 64);
    fv_sequence a, b, c;
    assert_int_equal(fv_scheduler_add(&scheduler, &a, 5, 24), FV_OK); /* 6 blocks */
    assert_int_equal(fv_scheduler_add(&scheduler, &b, 5, 20), FV_OK); /* 5 blocks: waits for a */
    assert_int_equal(fv_scheduler_add(&scheduler, &c, 5, 8), FV_OK);  /* 2 blocks: would fit, but b was first */
    run_step(&scheduler);
    assert_int_equal(a.state, FV_SEQUENCE_RUNNING);
    assert_int_equal(b.state, FV_SEQUENCE_WAITING);
    assert_int_equal(c.state, FV_SEQUENCE_WAITING);
    while (a.state == FV_SEQUENCE_RUNNING) run_step(&scheduler);
    run_step(&scheduler);
    assert_int_equal(b.state, FV_SEQUENCE_RUNNING);
    assert_int_equal(c.state, FV_SEQUENCE_RUNNING);
    fv_scheduler_finish(&scheduler, &b);
    fv_scheduler_finish(&scheduler, &c);
    fv_scheduler_deinit(&scheduler);
}

/* A sequence of many windows holds few blocks of the sliding group, and all of the other. */
static void test_window_gives_blocks_back(void **state)
{
    (void)state;
    enum { block_size = 4, window = 10, budget = 7, max_tokens = 200 };
    const int32_t bound = (window - 1 + budget + block_size - 1) / block_size + 1;
    fv_scheduler scheduler;
    init_two_groups(&scheduler, block_size, max_tokens / block_size, bound, window, 4, budget);
    fv_sequence sequence;
    assert_int_equal(fv_scheduler_add(&scheduler, &sequence, 100, max_tokens), FV_OK);
    while (scheduler.num_running + scheduler.num_waiting > 0) {
        run_step(&scheduler);
        const fv_block_pool *pool = &scheduler.groups[1].pool;
        assert_in_range(pool->num_blocks - pool->num_free, 0, bound);
    }
    assert_int_equal(scheduler.groups[0].pool.max_used, max_tokens / block_size);
    assert_in_range(scheduler.groups[1].pool.max_used, 1, bound);
    assert_int_equal(scheduler.groups[1].pool.num_free, bound);
    assert_int_equal(scheduler.groups[1].num_reserved, 0);
    fv_scheduler_deinit(&scheduler);
}

/* The group with the window may be the one that is full. */
static void test_waits_for_room_in_every_group(void **state)
{
    (void)state;
    fv_scheduler scheduler;
    init_two_groups(&scheduler, 4, 100, 7, 8, 8, 4); /* at once: 7 + 4 tokens, 4 blocks */
    fv_sequence a, b;
    assert_int_equal(fv_scheduler_blocks_at_once(&scheduler.limits, 8, 60), 4);
    assert_int_equal(fv_scheduler_add(&scheduler, &a, 5, 60), FV_OK);
    assert_int_equal(fv_scheduler_add(&scheduler, &b, 5, 60), FV_OK);
    while (a.state != FV_SEQUENCE_FINISHED) {
        run_step(&scheduler);
        if (a.state != FV_SEQUENCE_FINISHED) assert_int_equal(b.state, FV_SEQUENCE_WAITING);
    }
    while (b.state != FV_SEQUENCE_FINISHED) assert_true(run_step(&scheduler) > 0);
    fv_scheduler_deinit(&scheduler);
}

typedef struct random_crowd {
    int32_t block_size, budget, capacity, sliding_capacity, window;
} random_crowd;

static random_crowd next_crowd(uint32_t *random)
{
    uint32_t drawn[5];
    for (int32_t i = 0; i < 5; i++) drawn[i] = (*random = *random * 1664525u + 1013904223u) >> 8;
    return (random_crowd){
        .block_size = 1 + (int32_t)(drawn[0] % 20),
        .budget = 1 + (int32_t)(drawn[1] % 40),
        .capacity = 1 + (int32_t)(drawn[2] % 30),
        .sliding_capacity = 1 + (int32_t)(drawn[3] % 30),
        .window = 1 + (int32_t)(drawn[4] % 40),
    };
}

/* Random crowds on caches that hold a few of them: all end, each after all its tokens, and all blocks
 * are back. */
static void test_everyone_ends(void **state)
{
    (void)state;
    enum { num_rounds = 300, num_seqs = 40 };
    uint32_t random = 7;
    for (int32_t round = 0; round < num_rounds; round++) {
        const random_crowd crowd = next_crowd(&random);
        const bool slides = round % 3 > 0;
        fv_scheduler scheduler;
        if (slides) {
            init_two_groups(&scheduler, crowd.block_size, crowd.capacity, crowd.sliding_capacity, crowd.window,
                            1 + round % 9, crowd.budget);
        } else {
            init(&scheduler, crowd.block_size, crowd.capacity, 1 + round % 9, crowd.budget);
        }
        fv_sequence sequences[num_seqs];
        int64_t expected = 0;
        int32_t num_added = 0;
        for (int32_t i = 0; i < num_seqs; i++) {
            random = random * 1664525u + 1013904223u;
            const int32_t prompt = 1 + (int32_t)(random >> 8 & 0xff) % 50;
            const int32_t max = prompt + (int32_t)(random >> 16 & 0xff) % 20;
            const fv_status status = fv_scheduler_add(&scheduler, &sequences[num_added], prompt, max);
            bool fits = max <= crowd.capacity * crowd.block_size;
            if (slides) {
                fits = fits &&
                       fv_scheduler_blocks_at_once(&scheduler.limits, crowd.window, max) <= crowd.sliding_capacity;
            }
            assert_int_equal(status, fits ? FV_OK : FV_ERR_NO_SPACE);
            if (!fits) continue;
            num_added++;
            expected += max; /* every token is computed once */
        }
        int64_t computed = 0;
        while (scheduler.num_running + scheduler.num_waiting > 0) {
            const int32_t step = run_step(&scheduler);
            assert_true(step > 0);
            computed += step;
        }
        assert_int_equal(computed, expected);
        for (int32_t g = 0; g < scheduler.limits.num_groups; g++) {
            assert_int_equal(scheduler.groups[g].pool.num_free, scheduler.groups[g].pool.num_blocks);
            assert_int_equal(scheduler.groups[g].num_reserved, 0);
        }
        for (int32_t i = 0; i < num_added; i++) assert_int_equal(sequences[i].state, FV_SEQUENCE_FINISHED);
        fv_scheduler_deinit(&scheduler);
    }
}

static void test_refuses_what_never_fits(void **state)
{
    (void)state;
    fv_scheduler scheduler;
    init(&scheduler, 16, 4, 8, 64);
    fv_sequence sequence;
    assert_int_equal(fv_scheduler_add(&scheduler, &sequence, 10, 65), FV_ERR_NO_SPACE);
    assert_non_null(strstr(fv_last_error(), "holds 64"));
    assert_int_equal(fv_scheduler_add(&scheduler, &sequence, 0, 10), FV_ERR_INVALID);
    assert_int_equal(fv_scheduler_add(&scheduler, &sequence, 11, 10), FV_ERR_INVALID);
    assert_int_equal(scheduler.num_waiting, 0);
    fv_scheduler_deinit(&scheduler);

    const fv_scheduler_limits wrong[] = {limits_of(0, 4, 8, 64), limits_of(16, 0, 8, 64), limits_of(16, 4, 0, 64),
                                         limits_of(16, 4, 8, -1)};
    for (int32_t i = 0; i < FV_ARRAY_LEN(wrong); i++) {
        assert_int_equal(fv_scheduler_init(&scheduler, &wrong[i]), FV_ERR_INVALID);
        fv_scheduler_deinit(&scheduler);
    }
}

/* A window leaves few blocks of a long sequence, but its tables are no longer than the session's. */
static void test_refuses_what_tables_do_not_hold(void **state)
{
    (void)state;
    fv_scheduler_limits limits = limits_of(4, 8, 1, 16);
    limits.groups[0].window = 6;
    limits.max_sequence_tokens = 32;
    fv_scheduler scheduler;
    fv_sequence sequence;
    assert_int_equal(fv_scheduler_init(&scheduler, &limits), FV_OK);
    assert_int_equal(fv_scheduler_add(&scheduler, &sequence, 30, 33), FV_ERR_NO_SPACE);
    assert_non_null(strstr(fv_last_error(), "33 tokens (prompt 30); accepted: up to 32"));
    assert_int_equal(fv_scheduler_add(&scheduler, &sequence, 30, 32), FV_OK);
    fv_scheduler_finish(&scheduler, &sequence);
    fv_scheduler_deinit(&scheduler);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cuts_prompts_by_the_budget),
        cmocka_unit_test(test_decodes_come_first),
        cmocka_unit_test(test_keeps_the_order),
        cmocka_unit_test(test_waits_for_room_in_order),
        cmocka_unit_test(test_window_gives_blocks_back),
        cmocka_unit_test(test_waits_for_room_in_every_group),
        cmocka_unit_test(test_everyone_ends),
        cmocka_unit_test(test_refuses_what_never_fits),
        cmocka_unit_test(test_refuses_what_tables_do_not_hold),
        cmocka_unit_test(test_a_last_token_of_a_prompt_is_no_decode),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
