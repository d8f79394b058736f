/* The room that a plan keeps for gathered context holds every step within its bounds, and is not out of proportion. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fovea/fovea.h"

enum { MAX_SEQS = 24, BLOCK_SIZE = 16, MAX_LEN = 3000, WIDTH = (MAX_LEN + BLOCK_SIZE - 1) / BLOCK_SIZE };

static uint32_t next_random(uint32_t *random) { return *random = *random * 1664525u + 1013904223u, *random >> 8; }

static int32_t below(uint32_t *random, int32_t end) { return (int32_t)(next_random(random) % (uint32_t)end); }

static fv_problem problem_of(int32_t is_mla)
{
    fv_problem problem = {.struct_size = sizeof(problem),
                          .kind = is_mla ? FV_ATTENTION_MLA : FV_ATTENTION_MHA,
                          .mha = {8, 2, 64, 0},
                          .q_dtype = FV_DTYPE_F32,
                          .block_size = BLOCK_SIZE,
                          .kv_layout_any = 1};
    if (is_mla) problem.mla = (fv_mla_shape){4, 64, 32, 32, 32, 0, 0};
    return problem;
}

/* The least workspace that the problem can have, of the error's text; else all. */
static size_t least_workspace(fv_context *context, const fv_problem *problem, const fv_bounds *bounds,
                              const char *backend)
{
    fv_plan *plan = NULL;
    const fv_plan_options options = {.struct_size = sizeof(options), .backend = backend, .max_workspace_bytes = 1};
    assert_int_equal(fv_plan_create(&plan, context, problem, bounds, &options), FV_ERR_INVALID);
    const char *from = strstr(fv_last_error(), "or from ");
    assert_non_null(from);
    return (size_t)strtoull(from + strlen("or from "), NULL, 10);
}

/* A step within the bounds, with as many tokens and keys as there can be, mostly; queries of `usual` tokens. */
static void fill_step(fv_batch *batch, int32_t *query_start, int32_t *seq_lens, const fv_bounds *bounds, int32_t usual,
                      uint32_t *random)
{
    batch->num_seqs = 0;
    for (int32_t tokens = 0; batch->num_seqs < bounds->max_num_seqs && tokens < bounds->max_num_tokens;) {
        const int32_t seq = batch->num_seqs++;
        int32_t query_len = below(random, 3) ? usual : 1 + below(random, bounds->max_query_len);
        if (query_len > bounds->max_num_tokens - tokens) query_len = bounds->max_num_tokens - tokens;
        if (query_len > bounds->max_query_len) query_len = bounds->max_query_len;
        const int32_t most = bounds->max_seq_len - query_len;
        seq_lens[seq] = query_len + (below(random, 3) ? most : below(random, most + 1));
        query_start[seq + 1] = tokens += query_len;
    }
    batch->num_tokens = query_start[batch->num_seqs];
}

static void check_plan(fv_context *context, int32_t is_mla, const fv_bounds *bounds, int32_t is_tight, uint32_t *random)
{
    static int32_t table[MAX_SEQS * WIDTH], query_start[MAX_SEQS + 1], seq_lens[MAX_SEQS];
    for (int32_t i = 0; i < MAX_SEQS * WIDTH; i++) table[i] = 1;
    const fv_problem problem = problem_of(is_mla);
    fv_plan_options options = {.struct_size = sizeof(options),
                               .backend = is_mla ? "ROCM_AITER_MLA" : "ROCM_AITER_FA",
                               .decode_threshold = below(random, 2) ? 1 + below(random, 40) : 0};
    if (is_tight) options.max_workspace_bytes = least_workspace(context, &problem, bounds, options.backend);
    if (is_tight && below(random, 2)) options.max_workspace_bytes += (size_t)below(random, 1 << 18);
    fv_plan *plan = NULL;
    if (fv_plan_create(&plan, context, &problem, bounds, &options) != FV_OK) fail_msg("%s", fv_last_error());
    fv_batch batch = {.struct_size = sizeof(batch),
                      .query_start = query_start,
                      .seq_lens = seq_lens,
                      .block_table = table,
                      .block_table_stride = WIDTH,
                      .block_table_width = WIDTH};
    for (int32_t i = 0; i < 12; i++) {
        const int32_t usual = i == 0 ? options.decode_threshold + 1 : 1 + below(random, bounds->max_query_len);
        fill_step(&batch, query_start, seq_lens, bounds, usual, random);
        if (fv_plan_update(plan, &batch, NULL) != FV_OK)
            fail_msg("%d sequences, %d tokens: %s", batch.num_seqs, batch.num_tokens, fv_last_error());
    }
    fv_plan_destroy(plan);
}

static void test_steps_find_room(void **state)
{
    (void)state;
    fv_context *context = NULL;
    const fv_context_options options = {.struct_size = sizeof(options), .num_threads = 2, .no_plugins = 1};
    assert_int_equal(fv_context_create(&context, &options), FV_OK);
    uint32_t random = 11;
    for (int32_t i = 0; i < 240; i++) {
        fv_bounds bounds = {.struct_size = sizeof(bounds),
                            .max_num_seqs = 1 + below(&random, MAX_SEQS),
                            .max_num_tokens = 1 + below(&random, i % 3 ? 300 : 1500),
                            .max_seq_len = 1 + below(&random, MAX_LEN)};
        if (bounds.max_num_seqs > bounds.max_num_tokens) bounds.max_num_seqs = bounds.max_num_tokens;
        const int32_t longest = bounds.max_num_tokens < bounds.max_seq_len ? bounds.max_num_tokens : bounds.max_seq_len;
        bounds.max_query_len = below(&random, 2) ? longest : 1 + below(&random, longest);
        check_plan(context, i % 2, &bounds, i % 4 > 1, &random);
    }
    fv_context_destroy(context);
}

/* DeepSeek-V3's shape, steps of 8192 tokens and 256 sequences of 128k keys: some ten thousand queries' worth, not millions. */
static void test_room_is_in_proportion(void **state)
{
    (void)state;
    fv_context *context = NULL;
    fv_plan *plan = NULL;
    const fv_context_options options = {.struct_size = sizeof(options), .num_threads = 1, .no_plugins = 1};
    const fv_problem problem = {.struct_size = sizeof(problem),
                                .kind = FV_ATTENTION_MLA,
                                .mla = {128, 512, 64, 128, 128, 0, 0},
                                .q_dtype = FV_DTYPE_BF16,
                                .block_size = 64,
                                .kv_layout_any = 1};
    fv_bounds bounds = {sizeof(bounds), 256, 8192, 0, 131072};
    assert_int_equal(fv_context_create(&context, &options), FV_OK);
    assert_int_equal(fv_plan_create(&plan, context, &problem, &bounds, NULL), FV_OK);
    assert_true(fv_plan_buffer_bytes(plan) < (size_t)100 << 20);
    fv_plan_destroy(plan);
    bounds.max_query_len = 4;
    assert_int_equal(fv_plan_create(&plan, context, &problem, &bounds, NULL), FV_OK);
    assert_true(fv_plan_buffer_bytes(plan) < (size_t)8 << 20);
    fv_plan_destroy(plan);
    fv_context_destroy(context);
}

/* Runs tasks one after the other, as an executor of any number of workers may. */
static void one_by_one(void *user, int64_t num_tasks, fv_task_fn task, void *task_user)
{
    (void)user;
    for (int64_t i = 0; i < num_tasks; i++) task(task_user, i, 0);
}

/* A plan at the least is made, whoever its workers are, and holds no more in items than it saves in workspace. */
static void check_least(int32_t num_workers, const fv_problem *problem, const fv_bounds *bounds, const char *backend)
{
    fv_context *context = NULL;
    fv_plan *plan = NULL;
    const fv_context_options workers = {
        .struct_size = sizeof(workers), .no_plugins = 1, .executor = {one_by_one, num_workers, NULL}};
    assert_int_equal(fv_context_create(&context, &workers), FV_OK);
    fv_plan_options options = {.struct_size = sizeof(options), .backend = backend};
    assert_int_equal(fv_plan_create(&plan, context, problem, bounds, &options), FV_OK);
    const size_t roomy = fv_plan_workspace_bytes(plan), roomy_buffers = fv_plan_buffer_bytes(plan);
    fv_plan_destroy(plan);
    options.max_workspace_bytes = least_workspace(context, problem, bounds, backend);
    for (int32_t i = 0; i < 8; i++) {
        if (fv_plan_create(&plan, context, problem, bounds, &options) != FV_OK) fail_msg("%s", fv_last_error());
        const size_t workspace = fv_plan_workspace_bytes(plan), buffers = fv_plan_buffer_bytes(plan);
        assert_true(workspace <= options.max_workspace_bytes && workspace < roomy);
        assert_true(workspace + buffers < roomy + roomy_buffers && buffers < (size_t)64 << 20);
        fv_plan_destroy(plan);
        options.max_workspace_bytes += (size_t)1 << (16 + i);
    }
    fv_context_destroy(context);
}

static void test_least_workspace_is_worth_it(void **state)
{
    (void)state;
    fv_problem problem = problem_of(0);
    problem.q_dtype = FV_DTYPE_BF16;
    problem.mha = (fv_mha_shape){32, 8, 128, 0};
    fv_bounds bounds = {sizeof(bounds), 256, 8192, 0, 131072};
    for (int32_t workers = 2; workers <= 256; workers *= 128) {
        check_least(workers, &problem, &bounds, "ROCM_AITER_FA");
    }
    problem = problem_of(1);
    problem.q_dtype = FV_DTYPE_BF16;
    problem.mla = (fv_mla_shape){128, 512, 64, 128, 128, 0, 0};
    bounds = (fv_bounds){sizeof(bounds), 64, 8192, 0, 32768};
    for (int32_t workers = 2; workers <= 256; workers *= 128) {
        check_least(workers, &problem, &bounds, "ROCM_AITER_MLA");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steps_find_room),
        cmocka_unit_test(test_room_is_in_proportion),
        cmocka_unit_test(test_least_workspace_is_worth_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
