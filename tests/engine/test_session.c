/* The edges of the engine's interface: what is refused with which text, what outputs hold then, and what callbacks may
 * do. On the tiny model, whose chats are of Gemma's form. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "engine/tiny_model.h"

static void expect_failure(fv_status status, fv_status expected, const char *text)
{
    if (status == expected && strstr(fv_last_error(), text)) return;
    fail_msg("expected %s with '%s', got %s with '%s'", fv_status_name(expected), text, fv_status_name(status),
             fv_last_error());
}

static fv_session *create_session(fv_engine *engine, const fv_session_options *options)
{
    fv_session *session;
    if (fv_session_create(&session, engine, options) != FV_OK) fail_msg("%s", fv_last_error());
    return session;
}

static void run_steps(fv_session *session)
{
    for (int32_t num_unfinished = 1; num_unfinished > 0;) {
        if (fv_session_step(&num_unfinished, session) != FV_OK) fail_msg("%s", fv_last_error());
    }
}

/* --- callbacks ------------------------------------------------------------------------------------------- */

/* A callback that adds a request the first time, and always tries a step of its own session. */
typedef struct busy_caller {
    fv_session *session;
    int32_t num_told[3], num_added, num_refused;
} busy_caller;

static void add_and_step(void *user, const fv_token_event *event)
{
    busy_caller *caller = user;
    static const int32_t prompt[] = {5, 6, 7};
    const fv_request request = {
        .struct_size = sizeof(request),
        .prompt = prompt,
        .num_prompt_tokens = 3,
        .max_tokens = 3,
        .ignore_eos = 1,
        .on_token = add_and_step,
        .user = caller,
    };
    caller->num_told[event->request]++;
    if (caller->num_added++ == 0) assert_int_equal(fv_session_add(NULL, caller->session, &request), FV_OK);
    int32_t num_unfinished = -1;
    assert_int_equal(fv_session_step(&num_unfinished, caller->session), FV_ERR_INVALID);
    assert_non_null(strstr(fv_last_error(), "a step from inside a callback of this session"));
    assert_int_equal(num_unfinished, -1);
    caller->num_refused++;
}

static void test_no_step_inside_a_callback(void **state)
{
    busy_caller caller = {.session = create_session(*state, NULL)};
    for (int32_t i = 0; i < 2; i++) {
        const int32_t prompt[] = {1 + i, 2, 3};
        const fv_request request = {
            .struct_size = sizeof(request),
            .prompt = prompt,
            .num_prompt_tokens = 3,
            .max_tokens = 3,
            .ignore_eos = 1,
            .on_token = add_and_step,
            .user = &caller,
        };
        assert_int_equal(fv_session_add(NULL, caller.session, &request), FV_OK);
    }
    run_steps(caller.session);
    for (int32_t i = 0; i < 3; i++) assert_int_equal(caller.num_told[i], 3);
    assert_int_equal(caller.num_refused, 9);
    fv_session_destroy(caller.session);
}

/* Events in order: the request, and how it ends; and what the first of them is answered by. */
typedef struct told_order {
    fv_session *session;
    int32_t requests[64], finishes[64], count;
    void (*answer)(struct told_order *order); /* NULL: nothing */
    char rest[8];                             /* the text of the last event */
} told_order;

static void note_order(void *user, const fv_token_event *event)
{
    told_order *order = user;
    assert_in_range(order->count, 0, FV_ARRAY_LEN(order->requests) - 1);
    order->requests[order->count] = event->request;
    order->finishes[order->count++] = (int32_t)event->finish;
    assert_int_equal(event->token == -1, event->finish >= FV_FINISH_CANCELLED);
    snprintf(order->rest, sizeof(order->rest), "%.*s", (int)event->text_bytes, event->text);
    void (*const answer)(told_order *) = order->answer;
    order->answer = NULL;
    if (answer) answer(order);
}

static void add_noted(fv_session *session, told_order *order, int32_t num_prompt, int32_t max_tokens)
{
    static const int32_t prompt[40] = {5, 6, 7};
    static const int32_t half_a_character = 4 + 0xc3; /* of the tokens of bytes */
    const fv_request request = {
        .struct_size = sizeof(request),
        .prompt = prompt,
        .num_prompt_tokens = num_prompt,
        .max_tokens = max_tokens,
        .ignore_eos = 1,
        .forced = &half_a_character,
        .num_forced = 1,
        .on_token = note_order,
        .user = order,
    };
    if (fv_session_add(NULL, session, &request) != FV_OK) fail_msg("%s", fv_last_error());
}

static void expect_order(const told_order *order, const int32_t *requests, int32_t count)
{
    assert_int_equal(order->count, count);
    for (int32_t i = 0; i < count; i++) assert_int_equal(order->requests[i], requests[i]);
}

/* The first, the last or one between ends; who comes then is behind those that are left. */
static void test_keeps_the_order_of_requests(void **state)
{
    for (int32_t ends = 0; ends < 3; ends++) {
        told_order order = {.count = 0};
        const int32_t expected[] = {0, 1, 2, ends == 0 ? 1 : 0, ends == 2 ? 1 : 2, 3};
        fv_session *session = create_session(*state, NULL);
        for (int32_t i = 0; i < 3; i++) add_noted(session, &order, 3, i == ends ? 1 : 2);
        assert_int_equal(fv_session_step(NULL, session), FV_OK);
        add_noted(session, &order, 3, 1);
        run_steps(session);
        expect_order(&order, expected, FV_ARRAY_LEN(expected));
        add_noted(session, &order, 3, 1); /* to an empty line */
        run_steps(session);
        assert_int_equal(order.count, 7);
        fv_session_destroy(session);
    }
}

/* --- chance ----------------------------------------------------------------------------------------------- */

enum { num_drawn = 7, drawn_tokens = 12 };

typedef struct drawn_texts {
    int32_t tokens[num_drawn][drawn_tokens];
    int32_t counts[num_drawn];
} drawn_texts;

static void note_drawn(void *user, const fv_token_event *event)
{
    drawn_texts *drawn = user;
    drawn->tokens[event->request][drawn->counts[event->request]++] = event->token;
}

static void draw_texts(drawn_texts *drawn, fv_engine *engine)
{
    static const int32_t prompt[] = {5, 6, 7};
    const fv_session_options options = {.struct_size = sizeof(options), .batch_invariant = 1};
    fv_session *session = create_session(engine, &options);
    memset(drawn, 0, sizeof(*drawn));
    for (int32_t i = 0; i < num_drawn; i++) {
        const fv_request request = {
            .struct_size = sizeof(request),
            .prompt = prompt,
            .num_prompt_tokens = FV_ARRAY_LEN(prompt),
            .max_tokens = drawn_tokens,
            .temperature = 1.0f,
            .top_k = i % 3 == 1 ? 20 : 0,
            .top_p = i % 3 == 2 ? 0.9f : 0.0f,
            .seed = (uint64_t)i / 2,
            .ignore_eos = 1,
            .on_token = note_drawn,
            .user = drawn,
        };
        assert_int_equal(fv_session_add(NULL, session, &request), FV_OK);
    }
    run_steps(session);
    fv_session_destroy(session);
}

/* Requests draw on several threads at once, each its own numbers. */
static void test_threads_do_not_matter_to_chance(void **state)
{
    (void)state;
    drawn_texts expected, drawn;
    for (int32_t num_threads = 1; num_threads <= 4; num_threads++) {
        fv_engine *engine = tiny_model_load(num_threads);
        draw_texts(num_threads == 1 ? &expected : &drawn, engine);
        if (num_threads > 1) assert_memory_equal(&drawn, &expected, sizeof(drawn));
        fv_engine_destroy(engine);
    }
    for (int32_t i = 0; i < num_drawn; i++) assert_int_equal(expected.counts[i], drawn_tokens);
    assert_memory_not_equal(expected.tokens[0], expected.tokens[3], sizeof(expected.tokens[0]));
}

/* --- cancelling ------------------------------------------------------------------------------------------- */

static fv_session_stats stats_of(const fv_session *session)
{
    fv_session_stats stats = {.struct_size = sizeof(stats)};
    assert_int_equal(fv_session_get_stats(&stats, session), FV_OK);
    return stats;
}

static void expect_empty(const fv_session *session)
{
    const fv_session_stats stats = stats_of(session);
    for (int32_t i = 0; i < stats.num_groups; i++) assert_int_equal(stats.groups[i].num_used_blocks, 0);
    assert_int_equal(stats.num_waiting + stats.num_running, 0);
    assert_int_equal(stats.prompt_tokens_done, stats.prompt_tokens_total);
}

static void must_cancel(fv_session *session, int32_t id)
{
    if (fv_session_cancel(session, id) != FV_OK) fail_msg("%s", fv_last_error());
}

/* One that writes, one whose prompt has begun, one that waits. */
static void test_cancels_between_steps(void **state)
{
    const fv_session_options options = {.struct_size = sizeof(options), .max_num_seqs = 2, .max_batched_tokens = 8};
    for (int32_t cancelled = 0; cancelled < 3; cancelled++) {
        told_order order = {.count = 0};
        fv_session *session = create_session(*state, &options);
        add_noted(session, &order, 3, 4);
        add_noted(session, &order, 40, 4);
        add_noted(session, &order, 3, 4);
        assert_int_equal(fv_session_step(NULL, session), FV_OK);
        const fv_session_stats before = stats_of(session);
        assert_int_equal(order.count, 1);
        must_cancel(session, cancelled);
        const fv_session_stats after = stats_of(session);
        assert_int_equal(order.count, 2);
        assert_int_equal(order.requests[1], cancelled);
        assert_int_equal(order.finishes[1], FV_FINISH_CANCELLED);
        assert_string_equal(order.rest, cancelled == 0 ? "\xc3" : "");
        assert_int_equal(before.num_running - after.num_running, cancelled < 2);
        assert_int_equal(before.num_waiting - after.num_waiting, cancelled == 2);
        assert_int_equal(before.groups[0].num_used_blocks - after.groups[0].num_used_blocks, cancelled < 2);
        expect_failure(fv_session_cancel(session, cancelled), FV_ERR_INVALID, "has ended or is cancelled already");
        add_noted(session, &order, 3, 4);
        run_steps(session);
        assert_int_equal(order.count, 2 + 4 + 4 + (cancelled == 0 ? 4 : 3));
        for (int32_t i = 0; i < order.count; i++) assert_true(i < 2 || order.requests[i] != cancelled);
        expect_empty(session);
        fv_session_destroy(session);
    }
}

/* All that a step has is told before it ends requests, and who ends in it by itself has no other end. */
static void cancel_all(told_order *order)
{
    for (int32_t id = 3; id >= 0; id--) must_cancel(order->session, id);
    expect_failure(fv_session_cancel(order->session, 2), FV_ERR_INVALID, "request 2 has ended or is cancelled already");
}

static void test_cancels_inside_a_callback(void **state)
{
    static const int32_t requests[] = {0, 1, 2, 3, 0, 2, 3};
    told_order order = {.session = create_session(*state, NULL), .answer = cancel_all};
    for (int32_t i = 0; i < 4; i++) add_noted(order.session, &order, 3, i == 1 ? 1 : 5);
    int32_t num_unfinished = -1;
    assert_int_equal(fv_session_step(&num_unfinished, order.session), FV_OK);
    assert_int_equal(num_unfinished, 0);
    expect_order(&order, requests, FV_ARRAY_LEN(requests));
    for (int32_t i = 0; i < order.count; i++) {
        assert_int_equal(order.finishes[i], i == 1 ? FV_FINISH_LENGTH : i < 4 ? FV_FINISH_NONE : FV_FINISH_CANCELLED);
    }
    expect_empty(order.session);
    fv_session_destroy(order.session);
}

/* A request whose logits are no numbers ends alone, and its blocks serve others. */
static void test_weights_that_are_no_numbers(void **state)
{
    (void)state;
    enum { BROKEN = 9 };
    static const int32_t prompts[][3] = {{5, 6, 7}, {5, BROKEN, 7}, {5, 6, 7}};
    fv_engine *engine = tiny_model_load_broken(BROKEN);
    fv_session *session = create_session(engine, NULL);
    told_order order = {.count = 0};
    for (int32_t round = 0; round < 2; round++) {
        for (int32_t i = 0; i < 3; i++) {
            const fv_request request = {
                .struct_size = sizeof(request),
                .prompt = prompts[i],
                .num_prompt_tokens = 3,
                .max_tokens = 4,
                .ignore_eos = 1,
                .on_token = note_order,
                .user = &order,
            };
            assert_int_equal(fv_session_add(NULL, session, &request), FV_OK);
        }
        run_steps(session);
        expect_empty(session);
    }
    assert_int_equal(order.count, 2 * (4 + 1 + 4));
    for (int32_t i = 0; i < order.count; i++)
        assert_int_equal(order.requests[i] % 3 == 1, order.finishes[i] == FV_FINISH_FAILED);
    fv_session_destroy(session);
    fv_engine_destroy(engine);
}

/* The event of the end by cancelling is a callback as others. */
static void answer_the_end(told_order *order)
{
    int32_t num_unfinished;
    assert_int_equal(order->finishes[order->count - 1], FV_FINISH_CANCELLED);
    expect_failure(fv_session_step(&num_unfinished, order->session), FV_ERR_INVALID, "a step from inside a callback");
    expect_failure(fv_session_cancel(order->session, 1), FV_ERR_INVALID, "request 1 has ended or is cancelled already");
    add_noted(order->session, order, 3, 1);
    must_cancel(order->session, 3);
    must_cancel(order->session, 0);
    must_cancel(order->session, 2);
}

static void test_cancels_while_one_ends(void **state)
{
    static const int32_t requests[] = {1, 2, 3, 0};
    told_order order = {.session = create_session(*state, NULL), .answer = answer_the_end};
    for (int32_t i = 0; i < 3; i++) add_noted(order.session, &order, 3, 5);
    must_cancel(order.session, 1);
    expect_order(&order, requests, FV_ARRAY_LEN(requests));
    expect_empty(order.session);
    add_noted(order.session, &order, 3, 2);
    run_steps(order.session);
    assert_int_equal(order.count, 6);
    fv_session_destroy(order.session);
}

/* What ends by itself is not cancelled, from its last event on. */
static void cancel_the_first(told_order *order)
{
    expect_failure(fv_session_cancel(order->session, 0), FV_ERR_INVALID, "request 0 has ended");
}

static void test_refuses_to_cancel(void **state)
{
    told_order order = {.session = create_session(*state, NULL), .answer = cancel_the_first};
    expect_failure(fv_session_cancel(order.session, 0), FV_ERR_INVALID, "request 0 is not known");
    add_noted(order.session, &order, 3, 1);
    expect_failure(fv_session_cancel(order.session, -1), FV_ERR_INVALID, "request -1 is not known");
    expect_failure(fv_session_cancel(order.session, 1), FV_ERR_INVALID, "request 1 is not known");
    run_steps(order.session);
    expect_failure(fv_session_cancel(order.session, 0), FV_ERR_INVALID, "request 0 has ended");
    assert_int_equal(order.count, 1);
    assert_int_equal(order.finishes[0], FV_FINISH_LENGTH);
    fv_session_destroy(order.session);
}

/* --- options --------------------------------------------------------------------------------------------- */

/* Texts name the fields that the caller has set, their values and the default. */
static void test_refuses_options(void **state)
{
    const struct {
        fv_session_options options;
        const char *text;
    } cases[] = {
        {{.block_size = -1}, "block_size is -1; accepted: 0 (the default), or 1 to "},
        {{.cache_tokens = -1}, "cache_tokens is -1; accepted: 0 (the default), or 1 to "},
        {{.max_batched_tokens = -1}, "max_batched_tokens is -1; accepted: 0 (the default), or 1 to "},
        {{.max_num_seqs = 1 << 20}, "max_num_seqs is 1048576; accepted: 0 (the default), or 1 to "},
        {{.attention_dtype = FV_DTYPE_I8}, "attention_dtype is int8 (6); accepted: float32, float16, bfloat16"},
        {{.attention_dtype = (fv_dtype)77}, "attention_dtype is none (77); accepted: float32, "},
        {{.kv_cache_dtype = (fv_dtype)99}, "kv_cache_dtype is 99; accepted: 0 (the default), or "},
        {{.attention_workspace_bytes = 1}, "attention_workspace_bytes is 1; accepted: 0 (chosen), or from "},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(cases); i++) {
        fv_session_options options = cases[i].options;
        fv_session *session = (fv_session *)1;
        options.struct_size = sizeof(options);
        expect_failure(fv_session_create(&session, *state, &options), FV_ERR_INVALID, cases[i].text);
        assert_null(session);
    }
}

static void test_refuses_engine_options(void **state)
{
    (void)state;
    const fv_engine_options old = {.struct_size = 3};
    const fv_engine_options unknown = {
        .struct_size = sizeof(unknown), .random_weights = "tiny", .compute_dtype = (fv_dtype)77};
    const fv_engine_options half = {
        .struct_size = sizeof(half), .random_weights = "tiny", .compute_dtype = FV_DTYPE_F16};
    fv_engine *engine = (fv_engine *)1;
    expect_failure(fv_engine_create(&engine, "model", &old), FV_ERR_INVALID, "struct_size is 3");
    assert_null(engine);
    expect_failure(fv_engine_create(&engine, NULL, &unknown), FV_ERR_INVALID,
                   "compute_dtype is 77 (none of fv_dtype); accepted: 0 (weights as stored), float32, bfloat16");
    expect_failure(fv_engine_create(&engine, NULL, &half), FV_ERR_INVALID, "compute_dtype is 2 (float16); accepted: 0");
}

/* --- arrays that are not there --------------------------------------------------------------------------- */

static void test_refuses_null_requests(void **state)
{
    fv_session *session = create_session(*state, NULL);
    const int32_t prompt[] = {1, 2, 3};
    fv_request request = {.struct_size = sizeof(request), .num_prompt_tokens = 3, .max_tokens = 2};
    expect_failure(fv_session_add(NULL, session, &request), FV_ERR_INVALID, "prompt is NULL; accepted: an array of 3");
    request.prompt = prompt;
    request.num_forced = 2;
    expect_failure(fv_session_add(NULL, session, &request), FV_ERR_INVALID, "forced is NULL; accepted: an array of 2");
    request.num_forced = 0;
    assert_int_equal(fv_session_add(NULL, session, &request), FV_OK);
    run_steps(session);
    fv_session_destroy(session);
}

static void test_refuses_null_texts(void **state)
{
    fv_engine *engine = *state;
    int32_t *tokens = (int32_t *)1, num_tokens = 5;
    fv_message messages[] = {{"user", "hello"}, {"user", NULL}};
    expect_failure(fv_engine_encode_chat(&tokens, &num_tokens, engine, NULL, 2), FV_ERR_INVALID, "messages is NULL");
    assert_true(tokens == NULL && num_tokens == 0);
    expect_failure(fv_engine_encode_chat(&tokens, &num_tokens, engine, messages, 2), FV_ERR_INVALID,
                   "messages[1].content is NULL");
    messages[0].role = NULL;
    expect_failure(fv_engine_encode_chat(&tokens, &num_tokens, engine, messages, 2), FV_ERR_INVALID,
                   "messages[0].role is NULL");
    expect_failure(fv_engine_encode(&tokens, &num_tokens, engine, NULL, 3), FV_ERR_INVALID, "text is NULL");
    char *text = (char *)1;
    size_t bytes = 5;
    expect_failure(fv_engine_decode(&text, &bytes, engine, NULL, 3), FV_ERR_INVALID, "tokens is NULL");
    assert_true(text == NULL && bytes == 0);
    assert_int_equal(fv_engine_decode(&text, &bytes, engine, NULL, 0), FV_OK);
    assert_string_equal(text, "");
    fv_engine_free_text(text);
}

static void test_outputs_without_a_tokenizer(void **state)
{
    (void)state;
    const fv_engine_options options = {.struct_size = sizeof(options), .num_threads = 1, .random_weights = "tiny"};
    fv_engine *engine;
    if (fv_engine_create(&engine, NULL, &options) != FV_OK) fail_msg("%s", fv_last_error());
    const int32_t token = 1;
    char *text = (char *)1;
    size_t bytes = 5;
    expect_failure(fv_engine_decode(&text, &bytes, engine, &token, 1), FV_ERR_UNSUPPORTED, "no tokenizer");
    assert_true(text == NULL && bytes == 0);
    fv_engine_destroy(engine);
}

/* The reason is whole, however long the path before it. */
static void test_long_path_of_a_model_without_chats(void **state)
{
    (void)state;
    char path[] = "/tmp/fovea-tiny-model-XXXXXX", far[1024] = "";
    const fv_engine_options options = {.struct_size = sizeof(options), .num_threads = 1};
    fv_engine *engine;
    tiny_model_write(path, false);
    for (int32_t i = 0; i < 400; i++) memcpy(far + 2 * i, "/.", 3);
    strcat(far, path);
    const fv_status status = fv_engine_create(&engine, far, &options);
    unlink(path);
    if (status != FV_OK) fail_msg("%s", fv_last_error());
    fv_engine_info info = {.struct_size = sizeof(info)};
    assert_int_equal(fv_engine_get_info(&info, engine), FV_OK);
    assert_false(info.has_chat_template);
    assert_non_null(strstr(info.chat_why_not, "the file has no chat template (tokenizer.chat_template)"));
    fv_engine_destroy(engine);
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
        cmocka_unit_test(test_no_step_inside_a_callback),
        cmocka_unit_test(test_keeps_the_order_of_requests),
        cmocka_unit_test(test_threads_do_not_matter_to_chance),
        cmocka_unit_test(test_cancels_between_steps),
        cmocka_unit_test(test_cancels_inside_a_callback),
        cmocka_unit_test(test_cancels_while_one_ends),
        cmocka_unit_test(test_weights_that_are_no_numbers),
        cmocka_unit_test(test_refuses_to_cancel),
        cmocka_unit_test(test_refuses_options),
        cmocka_unit_test(test_refuses_engine_options),
        cmocka_unit_test(test_refuses_null_requests),
        cmocka_unit_test(test_refuses_null_texts),
        cmocka_unit_test(test_outputs_without_a_tokenizer),
        cmocka_unit_test(test_long_path_of_a_model_without_chats),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
