/* Layers with a window beside layers without: a tiny random model over many windows. Blocks that no token
 * sees any more go back, and the results are those of a step that holds everything. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "engine/tiny_model.h"
#include "fovea/backend.h"
#include "support/thinned.h"

enum { max_requests = 8, long_text = 240 }; /* 12 windows */

/* What a request wrote, and the logits of every position. */
typedef struct transcript {
    int32_t tokens[TINY_CONTEXT];
    int32_t num_tokens; /* prompt and output */
    float *logits;      /* [TINY_CONTEXT, TINY_VOCABULARY] */
} transcript;

static void keep_token(void *user, const fv_token_event *event)
{
    transcript *to = user;
    assert_true(to->num_tokens < TINY_CONTEXT);
    to->tokens[to->num_tokens++] = event->token;
}

static void keep_logits(void *user, int32_t request, int32_t position, const float *logits, int32_t vocabulary_size)
{
    (void)request;
    transcript *to = user;
    assert_int_equal(vocabulary_size, TINY_VOCABULARY);
    memcpy(to->logits + (size_t)position * TINY_VOCABULARY, logits, TINY_VOCABULARY * sizeof(float));
}

static transcript *create_transcript(int32_t seed, int32_t num_prompt)
{
    transcript *made = calloc(1, sizeof(*made));
    made->logits = calloc((size_t)TINY_CONTEXT * TINY_VOCABULARY, sizeof(float));
    for (int32_t i = 0; i < num_prompt; i++) made->tokens[i] = (seed * 31 + i * i * 7 + i) % TINY_VOCABULARY;
    made->num_tokens = num_prompt;
    return made;
}

static void free_transcript(transcript *of)
{
    free(of->logits);
    free(of);
}

static void add_request(fv_session *session, transcript *to, int32_t max_tokens)
{
    const fv_request request = {
        .struct_size = sizeof(request),
        .prompt = to->tokens,
        .num_prompt_tokens = to->num_tokens,
        .max_tokens = max_tokens,
        .ignore_eos = 1,
        .on_token = keep_token,
        .on_logits = keep_logits,
        .user = to,
    };
    if (fv_session_add(NULL, session, &request) != FV_OK) fail_msg("%s", fv_last_error());
}

static fv_session_stats stats_of(const fv_session *session)
{
    fv_session_stats stats = {.struct_size = sizeof(stats)};
    assert_int_equal(fv_session_get_stats(&stats, session), FV_OK);
    return stats;
}

static void run_to_end(fv_session *session)
{
    int32_t num_unfinished = 1;
    while (num_unfinished > 0) {
        if (fv_session_step(&num_unfinished, session) != FV_OK) fail_msg("%s", fv_last_error());
    }
}

static fv_session *create_session(fv_engine *engine, const fv_session_options *options)
{
    fv_session *session;
    if (fv_session_create(&session, engine, options) != FV_OK) fail_msg("%s", fv_last_error());
    return session;
}

static fv_session_options exact_options(void)
{
    return (fv_session_options){.struct_size = sizeof(fv_session_options), .kv_cache_dtype = FV_DTYPE_F32};
}

/* The same tokens as a prompt in one step: no block is given back before its end. */
static void expect_like_one_step(fv_engine *engine, const transcript *written, const char *what)
{
    fv_session_options options = exact_options();
    options.max_batched_tokens = TINY_CONTEXT;
    options.kernels = "reference";
    transcript *whole = create_transcript(0, 0);
    memcpy(whole->tokens, written->tokens, sizeof(whole->tokens));
    whole->num_tokens = written->num_tokens - 1; /* the last token was written, not computed */
    fv_session *session = create_session(engine, &options);
    add_request(session, whole, 1);
    run_to_end(session);
    fv_session_destroy(session);

    float max_error = 0.0f;
    for (size_t i = 0; i < (size_t)(written->num_tokens - 1) * TINY_VOCABULARY; i++) {
        const float error = fabsf(whole->logits[i] - written->logits[i]);
        if (!(error <= max_error)) max_error = error;
    }
    assert_int_equal(whole->tokens[whole->num_tokens - 1], written->tokens[written->num_tokens - 1]);
    print_message("  %-40s logits within %.1e of those of one step\n", what, (double)max_error);
    assert_true(max_error <= 2e-3f);
    free_transcript(whole);
}

static void test_long_generation(void **state)
{
    static const struct {
        int32_t block_size, max_batched_tokens, num_prompt;
    } ways[] = {{16, 512, 10}, {64, 512, 70}, {4, 7, 130}, {1, 50, 60}, {3, 1, 5}};
    fv_engine *engine = *state;
    for (int32_t backend = 0; backend < fv_backend_count(); backend++) {
        for (int32_t i = backend % thinned; i < FV_ARRAY_LEN(ways); i += thinned) {
            fv_session_options options = exact_options();
            options.attention_backend = fv_backend_name(backend);
            options.block_size = ways[i].block_size;
            options.max_batched_tokens = ways[i].max_batched_tokens;
            fv_session *session;
            const fv_status status = fv_session_create(&session, engine, &options);
            if (status == FV_ERR_UNSUPPORTED) {
                print_message("  blocks of %d, left out: %s\n", options.block_size, fv_last_error());
                continue;
            }
            if (status != FV_OK) fail_msg("%s: %s", options.attention_backend, fv_last_error());
            transcript *written = create_transcript(i, ways[i].num_prompt);
            add_request(session, written, long_text - ways[i].num_prompt + 1);
            run_to_end(session);
            fv_session_destroy(session);
            assert_int_equal(written->num_tokens, long_text + 1);
            expect_like_one_step(engine, written, fv_backend_name(backend));
            free_transcript(written);
        }
    }
}

/* While the text grows to many windows the sliding group holds a window, a step and a block at most. */
static void test_sliding_group_stays_small(void **state)
{
    fv_engine *engine = *state;
    enum { block_size = 4, budget = 16 };
    fv_session_options options = exact_options();
    options.block_size = block_size;
    options.max_batched_tokens = budget;
    fv_session *session = create_session(engine, &options);
    transcript *written = create_transcript(3, 100);
    add_request(session, written, long_text - 100 + 1);
    int32_t num_unfinished = 1, max_used = 0;
    while (num_unfinished > 0) {
        assert_int_equal(fv_session_step(&num_unfinished, session), FV_OK);
        const fv_session_stats now = stats_of(session);
        assert_int_equal(now.num_groups, 2);
        assert_in_range(now.groups[1].num_used_blocks * block_size, 0, TINY_WINDOW + budget + block_size);
        max_used = fv_max_i32(max_used, now.groups[0].num_used_blocks);
        if (num_unfinished > 0 && written->num_tokens > 110) { /* decodes: a window, and what its ends cut */
            assert_in_range(now.groups[1].num_used_blocks, 1, TINY_WINDOW / block_size + 1);
        }
    }
    const fv_session_stats stats = stats_of(session);
    assert_int_equal(stats.groups[0].window, 0);
    assert_int_equal(stats.groups[0].num_layers, 2);
    assert_int_equal(stats.groups[1].window, TINY_WINDOW);
    assert_int_equal(stats.groups[1].num_layers, 5);
    assert_int_equal(max_used, long_text / block_size);
    assert_int_equal(stats.groups[0].max_used_blocks, long_text / block_size);
    assert_true(stats.groups[1].max_used_blocks * block_size <= TINY_WINDOW + budget + block_size);
    assert_int_equal(stats.groups[0].num_used_blocks + stats.groups[1].num_used_blocks, 0);
    assert_true(stats.cache_bytes == stats.groups[0].cache_bytes + stats.groups[1].cache_bytes);
    assert_non_null(strstr(fv_session_describe(session, 1), " on cpu"));
    assert_null(fv_session_describe(session, 2));
    fv_session_destroy(session);
    free_transcript(written);
}

/* Blocks that one request gave back are another's soon after. Nobody notices, bit for bit. */
static void test_blocks_change_hands(void **state)
{
    fv_engine *engine = *state;
    fv_session_options options = exact_options();
    options.block_size = 4;
    options.max_batched_tokens = 24;
    options.cache_tokens = 2 * long_text; /* two or three of them at once */
    options.max_num_seqs = 3;
    options.batch_invariant = 1;
    fv_session *session = create_session(engine, &options);
    transcript *crowd[max_requests];
    for (int32_t i = 0; i < max_requests; i++) {
        const int32_t num_prompt = 5 + 23 * i;
        crowd[i] = create_transcript(i, num_prompt);
        add_request(session, crowd[i], 1 + (long_text - num_prompt) / (1 + i % 3));
    }
    run_to_end(session);
    assert_in_range(stats_of(session).max_running, 2, 3);
    fv_session_destroy(session);

    for (int32_t i = 0; i < max_requests; i++) {
        const int32_t num_prompt = 5 + 23 * i;
        transcript *alone = create_transcript(i, num_prompt);
        session = create_session(engine, &options);
        add_request(session, alone, crowd[i]->num_tokens - num_prompt);
        run_to_end(session);
        fv_session_destroy(session);
        assert_int_equal(alone->num_tokens, crowd[i]->num_tokens);
        assert_memory_equal(alone->tokens, crowd[i]->tokens, sizeof(alone->tokens));
        assert_memory_equal(alone->logits, crowd[i]->logits, (size_t)TINY_CONTEXT * TINY_VOCABULARY * sizeof(float));
        free_transcript(alone);
        free_transcript(crowd[i]);
    }
}

/* Logits are asked for from a position on. */
static void test_first_logits(void **state)
{
    fv_engine *engine = *state;
    const fv_session_options options = exact_options();
    transcript *all = create_transcript(1, 90), *late = create_transcript(1, 90);
    fv_session *session = create_session(engine, &options);
    add_request(session, all, 5);
    const fv_request request = {
        .struct_size = sizeof(request),
        .prompt = late->tokens,
        .num_prompt_tokens = late->num_tokens,
        .max_tokens = 5,
        .ignore_eos = 1,
        .on_token = keep_token,
        .on_logits = keep_logits,
        .first_logits = 80,
        .user = late,
    };
    assert_int_equal(fv_session_add(NULL, session, &request), FV_OK);
    run_to_end(session);
    fv_session_destroy(session);
    for (size_t i = 0; i < (size_t)80 * TINY_VOCABULARY; i++) assert_true(late->logits[i] == 0.0f);
    for (size_t i = (size_t)80 * TINY_VOCABULARY; i < (size_t)94 * TINY_VOCABULARY; i++) {
        assert_true(late->logits[i] != 0.0f && fabsf(late->logits[i] - all->logits[i]) < 1e-3f);
    }
    free_transcript(all);
    free_transcript(late);
}

/* None of some positions, for several requests in a step. */
static void test_no_logits(void **state)
{
    fv_engine *engine = *state;
    const fv_session_options options = exact_options();
    transcript *written[2];
    fv_session *session = create_session(engine, &options);
    for (int32_t i = 0; i < 2; i++) {
        written[i] = create_transcript(i, 30);
        const fv_request request = {
            .struct_size = sizeof(request),
            .prompt = written[i]->tokens,
            .num_prompt_tokens = written[i]->num_tokens,
            .max_tokens = 5,
            .ignore_eos = 1,
            .on_token = keep_token,
            .on_logits = keep_logits,
            .first_logits = INT32_MAX,
            .user = written[i],
        };
        assert_int_equal(fv_session_add(NULL, session, &request), FV_OK);
    }
    run_to_end(session);
    fv_session_destroy(session);
    for (int32_t i = 0; i < 2; i++) {
        assert_int_equal(written[i]->num_tokens, 35);
        for (size_t j = 0; j < (size_t)29 * TINY_VOCABULARY; j++) assert_true(written[i]->logits[j] == 0.0f);
        free_transcript(written[i]);
    }
}

static int set_up(void **state)
{
    *state = tiny_model_load(2);
    return *state ? 0 : 1;
}

static int tear_down(void **state)
{
    fv_engine_destroy(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_long_generation),     cmocka_unit_test(test_sliding_group_stays_small),
        cmocka_unit_test(test_blocks_change_hands), cmocka_unit_test(test_first_logits),
        cmocka_unit_test(test_no_logits),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
