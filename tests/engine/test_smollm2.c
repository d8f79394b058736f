/* The engine on a real model, against what another implementation computed with the same file: the
 * same next token wherever the recorded best two logits differ by more than 0.05, logits close on
 * average, the same perplexity; and the same on every block size, chunk size, cache type, number of
 * threads, backend, with others in the batch, and on a cache that cannot hold all at once. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "core/compiler.h"
#include "engine/model_runs.h"
#include "fovea/backend.h"

#ifndef FV_TEST_DATA_DIR
#define FV_TEST_DATA_DIR "tests"
#endif

/* Room for the whole recording, and for a few prompts of it: a session clears its cache when it begins. */
enum { all_tokens = 8192, few_tokens = 2048 };

static fv_session_options session_options(int32_t cache_tokens)
{
    return (fv_session_options){.struct_size = sizeof(fv_session_options), .cache_tokens = cache_tokens};
}

/* Every recorded position once as part of a prompt: half of the prompts with each type of cache. */
static void test_prompts_like_the_recording(void **state)
{
    const fixture *f = fixture_or_skip(state);
    const int32_t half = f->logits.num_prompts / 2;
    fv_session_options options = session_options(all_tokens);
    options.kv_cache_dtype = FV_DTYPE_F32;
    outcome seen = run_prompts(f, f->engine, &options, (prompt_range){0, half, FEED_AS_PROMPT, 0, 0}, NULL);
    assert_int_equal(seen.num_positions, 10 * 208);
    check_outcome("prefill, fp32 cache", &seen, MAX_MEAN_ERROR_F32);
    options.kv_cache_dtype = FV_DTYPE_NONE;
    seen = run_prompts(f, f->engine, &options, (prompt_range){half, half, FEED_AS_PROMPT, 0, 0}, NULL);
    assert_int_equal(seen.num_positions, 10 * 208);
    check_outcome("prefill, default cache", &seen, MAX_MEAN_ERROR_F16);
}

/* All prompts go on side by side, token by token. */
static void test_decodes_like_the_recording(void **state)
{
    enum { num_tokens = 104 };
    const fixture *f = fixture_or_skip(state);
    const int32_t num_prompts = f->logits.num_prompts;
    fv_session_options options = session_options(all_tokens);
    options.max_num_seqs = num_prompts;
    fv_session_stats stats;
    const outcome seen = run_prompts(f, f->engine, &options,
                                     (prompt_range){0, num_prompts, FEED_AS_DECODES, 0, num_tokens}, &stats);
    assert_int_equal(seen.num_positions, 20 * num_tokens);
    assert_true(stats.decode_tokens > 1700);
    check_outcome("decode, default cache", &seen, MAX_MEAN_ERROR_F16);
}

/* One way to run that must not change the tokens. */
typedef struct variation {
    const char *name;
    int32_t block_size, max_batched_tokens, cache_tokens, batch_invariant;
    fv_dtype kv_cache_dtype;
    feeding fed;
    int32_t num_prompts, num_tokens; /* 0: the usual numbers */
} variation;

static void test_tokens_do_not_depend_on_how(void **state)
{
    /* The prompts have 6 to 28 tokens, the rest of num_decodes comes one by one: such a step takes as long as
     * dozens of tokens of a prompt. */
    enum { first = 4, usual = 2, num_prefills = 100, num_decodes = 40 };
    static const variation variations[] = {
        {.name = "block size 1", .block_size = 1},
        {.name = "block size 1, decodes", .block_size = 1, .fed = FEED_AS_DECODES},
        {.name = "block size 17", .block_size = 17},
        {.name = "block size 17, decodes", .block_size = 17, .fed = FEED_AS_DECODES},
        {.name = "block size 544", .block_size = 544},
        {.name = "chunks of 1", .max_batched_tokens = 1, .num_prompts = 1, .num_tokens = num_decodes},
        {.name = "chunks of 7", .max_batched_tokens = 7},
        {.name = "chunks of 64", .max_batched_tokens = 64},
        {.name = "small cache", .cache_tokens = 50, .fed = FEED_AS_DECODES},
        {.name = "small cache, chunks", .cache_tokens = 220, .max_batched_tokens = 50, .num_prompts = 3},
        {.name = "batch invariant", .batch_invariant = 1},
        {.name = "fp32 cache", .kv_cache_dtype = FV_DTYPE_F32},
    };
    const fixture *f = fixture_or_skip(state);
    for (int32_t i = 0; i < FV_ARRAY_LEN(variations); i++) {
        const variation *way = &variations[i];
        fv_session_options options = session_options(few_tokens);
        if (way->cache_tokens) options.cache_tokens = way->cache_tokens;
        options.block_size = way->block_size;
        options.max_batched_tokens = way->max_batched_tokens;
        options.batch_invariant = way->batch_invariant;
        options.kv_cache_dtype = way->kv_cache_dtype;
        const int32_t count = way->num_prompts ? way->num_prompts : usual;
        const int32_t num_tokens = way->num_tokens               ? way->num_tokens
                                   : way->fed == FEED_AS_DECODES ? num_decodes
                                                                 : num_prefills;
        fv_session_stats stats;
        const outcome seen = run_prompts(f, f->engine, &options, (prompt_range){first, count, way->fed, 0, num_tokens},
                                         &stats);
        assert_int_equal(seen.num_positions, count * num_tokens);
        if (way->cache_tokens) assert_in_range(stats.max_running, 1, 2); /* the others had to wait */
        check_outcome(way->name, &seen, MAX_MEAN_ERROR_F16);
    }
}

/* Every backend that serves the model: prompts in one step and in chunks, decodes; two block sizes. */
static void test_every_backend(void **state)
{
    static const struct {
        int32_t block_size, max_batched_tokens, num_tokens;
        feeding fed;
    } ways[] = {{16, 0, 100, FEED_AS_PROMPT},
                {16, 20, 34, FEED_AS_DECODES},
                {64, 50, 100, FEED_AS_PROMPT},
                {64, 0, 34, FEED_AS_DECODES}};
    const fixture *f = fixture_or_skip(state);
    int32_t num_served = 0;
    for (int32_t backend = 0; backend < fv_backend_count(); backend++) {
        bool is_served = true;
        for (int32_t i = 0; i < FV_ARRAY_LEN(ways); i++) {
            fv_session_options options = session_options(few_tokens);
            options.block_size = ways[i].block_size;
            options.max_batched_tokens = ways[i].max_batched_tokens;
            fv_session *session = create_session_on(f->engine, options, backend);
            is_served = session != NULL;
            if (!is_served) break;
            const prompt_range range = {11, 2, ways[i].fed, 0, ways[i].num_tokens};
            const outcome seen = run_prompts_on(session, f, range, NULL);
            fv_session_destroy(session);
            assert_int_equal(seen.num_positions, range.count * range.num_tokens);
            check_outcome(fv_backend_name(backend), &seen, MAX_MEAN_ERROR_F16);
        }
        num_served += is_served;
    }
    assert_true(num_served >= 1);
}

/* Caches of 8 bits move logits further than the rule for tokens allows: how far on average, and how many tokens differ
 * where it was no close call. */
typedef struct narrow_cache {
    fv_dtype dtype;
    double max_mean_error, max_share_wrong;
    fv_dtype attention_dtype;
} narrow_cache;

static void check_narrow_cache(const fixture *f, fv_session *session, feeding fed, const narrow_cache *cache)
{
    const prompt_range range = {4, 4, fed, 0, fed == FEED_AS_PROMPT ? 100 : 40};
    const outcome seen = run_prompts_on(session, f, range, NULL);
    fv_session_destroy(session);
    const double mean = seen.error_sum / (double)seen.num_errors;
    print_message("  %s cache, attention in %s: %d positions, %d wrong, logit error %.2e on average\n",
                  fv_dtype_name(cache->dtype),
                  cache->attention_dtype ? fv_dtype_name(cache->attention_dtype) : "float32", (int)seen.num_positions,
                  (int)seen.num_wrong, mean);
    assert_int_equal(seen.num_positions, range.count * range.num_tokens);
    assert_true(mean <= cache->max_mean_error);
    assert_true((double)seen.num_wrong <= cache->max_share_wrong * (double)seen.num_positions);
}

static void test_narrow_caches(void **state)
{
    static const narrow_cache caches[] = {
        {FV_DTYPE_I8, 0.15, 0.01, FV_DTYPE_NONE},    {FV_DTYPE_F8_E4M3, 0.4, 0.04, FV_DTYPE_NONE},
        {FV_DTYPE_F8_E5M2, 0.8, 0.1, FV_DTYPE_NONE}, {FV_DTYPE_BF16, 0.05, 0.005, FV_DTYPE_BF16},
        {FV_DTYPE_F16, 0.05, 0.005, FV_DTYPE_NONE},  {FV_DTYPE_F16, 0.05, 0.005, FV_DTYPE_F16},
        {FV_DTYPE_I8, 0.15, 0.01, FV_DTYPE_BF16},    {FV_DTYPE_F8_E4M3, 0.4, 0.04, FV_DTYPE_BF16},
    };
    const fixture *f = fixture_or_skip(state);
    fv_session_options options = session_options(few_tokens);
    for (int32_t i = 0; i < FV_ARRAY_LEN(caches); i++) {
        options.kv_cache_dtype = caches[i].dtype;
        options.attention_dtype = caches[i].attention_dtype;
        for (int32_t fed = FEED_AS_PROMPT; fed <= FEED_AS_DECODES; fed++) {
            fv_session *session;
            if (fv_session_create(&session, f->engine, &options) != FV_OK) fail_msg("%s", fv_last_error());
            check_narrow_cache(f, session, (feeding)fed, &caches[i]);
        }
    }
    options.attention_dtype = FV_DTYPE_NONE;
    options.kv_cache_dtype = FV_DTYPE_I8; /* has scales beside it, in every layout */
    for (int32_t backend = 0; backend < fv_backend_count(); backend++) {
        fv_session *session = create_session_on(f->engine, options, backend);
        if (session) check_narrow_cache(f, session, FEED_AS_DECODES, &caches[0]);
    }
}

static void test_one_thread(void **state)
{
    const fixture *f = fixture_or_skip(state);
    const fv_engine_options one = {.struct_size = sizeof(one), .num_threads = 1, .compute_dtype = FV_DTYPE_F32};
    const fv_session_options options = session_options(few_tokens);
    fv_engine *engine;
    if (fv_engine_create(&engine, f->path, &one) != FV_OK) fail_msg("%s", fv_last_error());
    outcome seen = run_prompts(f, engine, &options, (prompt_range){8, 2, FEED_AS_PROMPT, 0, 100}, NULL);
    check_outcome("1 thread", &seen, MAX_MEAN_ERROR_F16);
    seen = run_prompts(f, engine, &options, (prompt_range){8, 2, FEED_AS_DECODES, 0, 32}, NULL);
    check_outcome("1 thread, decodes", &seen, MAX_MEAN_ERROR_F16);
    fv_engine_destroy(engine);
}

static void test_weights_as_stored(void **state)
{
    const fixture *f = fixture_or_skip(state);
    const fv_session_options options = session_options(all_tokens);
    check_weights_as_stored(f, &options, f->logits.num_prompts, 104);
}

/* bf16 weights and activations, on CPUs that have bf16 instructions: further off, but no worse a model. */
static void test_bf16(void **state)
{
    const fixture *f = fixture_or_skip(state);
    const fv_engine_options bf16 = {.struct_size = sizeof(bf16), .num_threads = 2, .compute_dtype = FV_DTYPE_BF16};
    const fv_session_options options = session_options(all_tokens);
    fv_engine *engine;
    const fv_status status = fv_engine_create(&engine, f->path, &bf16);
    if (status == FV_ERR_UNSUPPORTED) {
        print_message("  left out: %s\n", fv_last_error());
        skip();
    }
    if (status != FV_OK) fail_msg("%s", fv_last_error());
    for (int32_t fed = FEED_AS_PROMPT; fed <= FEED_AS_DECODES; fed++) {
        const outcome seen = run_prompts(f, engine, &options,
                                         (prompt_range){0, f->logits.num_prompts, (feeding)fed, 0, 0}, NULL);
        const double mean = seen.error_sum / (double)seen.num_errors;
        print_message("  bf16: %d positions, %d wrong, logit error %.2e on average, %.2e at most\n",
                      (int)seen.num_positions, (int)seen.num_wrong, mean, seen.max_error);
        assert_true(mean <= MAX_MEAN_ERROR_BF16);
        assert_true(seen.num_wrong <= seen.num_positions / 50);
    }
    fv_engine_destroy(engine);
}

/* A prompt of the recording alone, then between others, in steps that cut it elsewhere. */
static void check_batch_mates(const fixture *f, fv_dtype attention_dtype)
{
    enum { prompt = 2, num_mates = 3 };
    static const int32_t num_tokens[] = {[FEED_AS_PROMPT] = 110, [FEED_AS_DECODES] = 34};
    fv_session_options options = session_options(few_tokens);
    options.batch_invariant = 1;
    options.attention_dtype = attention_dtype;
    for (int32_t fed = FEED_AS_PROMPT; fed <= FEED_AS_DECODES; fed++) {
        options.max_batched_tokens = 512;
        prompt_range range = {prompt, 1, (feeding)fed, 0, num_tokens[fed]};
        const outcome alone = run_prompts(f, f->engine, &options, range, NULL);
        assert_int_equal(alone.num_positions, num_tokens[fed]);
        options.max_batched_tokens = 100;
        range.first -= 2;
        range.count += num_mates;
        const outcome crowd = run_prompts(f, f->engine, &options, range, NULL);
        assert_int_equal(crowd.num_wrong, 0);
        if (alone.hash[0] != crowd.hash[2]) fail_msg("feeding %d: the logits differ", fed);
    }
}

static void test_batch_mates_do_not_change_a_bit(void **state)
{
    const fixture *f = fixture_or_skip(state);
    check_batch_mates(f, FV_DTYPE_NONE);
    check_batch_mates(f, FV_DTYPE_F16);
    check_batch_mates(f, FV_DTYPE_BF16);
}

static void test_perplexity(void **state)
{
    const fixture *f = fixture_or_skip(state);
    const fv_session_options options = session_options(all_tokens);
    fv_session_stats stats;
    double expected;
    const double got = measure_perplexity(&expected, f, &options, &stats);
    print_message("  perplexity over %d tokens: %.6f, recorded %.6f\n", f->essay.num_tokens - 1, got, expected);
    assert_true(fabs(got / expected - 1.0) <= 0.005);
}

/* --- text ---------------------------------------------------------------------------------------- */

typedef struct reply {
    int32_t tokens[256];
    int32_t num_tokens;
    char text[4096];
    size_t text_bytes;
    fv_finish finish;
} reply;

static void append_token(void *user, const fv_token_event *event)
{
    reply *to = user;
    assert_int_equal(to->finish, FV_FINISH_NONE);
    assert_true(to->num_tokens < 256 && to->text_bytes + event->text_bytes < sizeof(to->text));
    to->tokens[to->num_tokens++] = event->token;
    memcpy(to->text + to->text_bytes, event->text, event->text_bytes);
    to->text_bytes += event->text_bytes;
    to->finish = event->finish;
}

static void add_chat(reply *to, const fixture *f, fv_session *session, const cJSON *chat)
{
    const cJSON *messages = cJSON_GetObjectItem(chat, "messages");
    fv_message list[8];
    const int32_t num_messages = cJSON_GetArraySize(messages);
    assert_in_range(num_messages, 1, 8);
    for (int32_t i = 0; i < num_messages; i++) {
        const cJSON *message = cJSON_GetArrayItem(messages, i);
        list[i].role = cJSON_GetStringValue(cJSON_GetObjectItem(message, "role"));
        list[i].content = cJSON_GetStringValue(cJSON_GetObjectItem(message, "content"));
    }
    int32_t *tokens, num_tokens;
    assert_int_equal(fv_engine_encode_chat(&tokens, &num_tokens, f->engine, list, num_messages), FV_OK);
    assert_int_equal(num_tokens, cJSON_GetArraySize(cJSON_GetObjectItem(chat, "prompt_ids")));
    const fv_request request = {
        .struct_size = sizeof(request),
        .prompt = tokens,
        .num_prompt_tokens = num_tokens,
        .max_tokens = cJSON_GetArraySize(cJSON_GetObjectItem(chat, "ids")),
        .on_token = append_token,
        .user = to,
    };
    assert_int_equal(fv_session_add(NULL, session, &request), FV_OK); /* copies the prompt */
    fv_engine_free_tokens(tokens);
}

static void check_chat(const reply *got, const cJSON *chat)
{
    const cJSON *ids = cJSON_GetObjectItem(chat, "ids"), *margins = cJSON_GetObjectItem(chat, "margins");
    /* Comparable up to the first close call; after another token the texts go their own ways. */
    int32_t same = 0;
    while (same < got->num_tokens && got->tokens[same] == cJSON_GetArrayItem(ids, same)->valueint) same++;
    if (same < cJSON_GetArraySize(ids)) {
        assert_true(cJSON_GetArrayItem(margins, same)->valuedouble <= CLOSE_CALL);
        return;
    }
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(chat, "text"));
    assert_int_equal(got->text_bytes, strlen(text));
    assert_memory_equal(got->text, text, got->text_bytes);
    assert_int_equal(got->finish, cJSON_IsTrue(cJSON_GetObjectItem(chat, "ended")) ? FV_FINISH_STOP : FV_FINISH_LENGTH);
}

/* All chats in one session: each stops where it has to, whoever else goes on. */
static void test_chats(void **state)
{
    enum { max_chats = 16 };
    const fixture *f = fixture_or_skip(state);
    size_t bytes;
    uint8_t *file = read_whole_file(&bytes, FV_TEST_DATA_DIR "/recordings/chats.json");
    assert_non_null(file);
    cJSON *json = cJSON_Parse((const char *)file);
    assert_non_null(json);
    const cJSON *chats = cJSON_GetObjectItem(json, "chats"), *chat;
    assert_in_range(cJSON_GetArraySize(chats), 1, max_chats);
    reply *replies = calloc(max_chats, sizeof(*replies));
    assert_non_null(replies);
    const fv_session_options options = session_options(few_tokens);
    fv_session *session;
    assert_int_equal(fv_session_create(&session, f->engine, &options), FV_OK);
    int32_t num_chats = 0;
    cJSON_ArrayForEach(chat, chats) add_chat(&replies[num_chats++], f, session, chat);
    run_to_end(session);
    fv_session_destroy(session);
    for (int32_t i = 0; i < num_chats; i++) check_chat(&replies[i], cJSON_GetArrayItem(chats, i));
    free(replies);
    cJSON_Delete(json);
    free(file);
}

static void test_sampling_is_reproducible(void **state)
{
    const fixture *f = fixture_or_skip(state);
    const recorded_prompt *prompt = &f->logits.prompts[0];
    const fv_session_options options = session_options(few_tokens);
    reply replies[3] = {0};
    fv_session *session;
    assert_int_equal(fv_session_create(&session, f->engine, &options), FV_OK);
    for (int32_t i = 0; i < 3; i++) {
        const fv_request request = {
            .struct_size = sizeof(request),
            .prompt = prompt->ids,
            .num_prompt_tokens = prompt->num_prompt_tokens,
            .max_tokens = 24,
            .temperature = 1.5f,
            .top_k = 50,
            .seed = i == 2 ? 8 : 7,
            .ignore_eos = 1,
            .on_token = append_token,
            .user = &replies[i],
        };
        assert_int_equal(fv_session_add(NULL, session, &request), FV_OK);
    }
    run_to_end(session);
    fv_session_destroy(session);
    for (int32_t i = 0; i < 3; i++) assert_int_equal(replies[i].num_tokens, 24);
    assert_memory_equal(replies[0].tokens, replies[1].tokens, 24 * sizeof(int32_t));
    assert_memory_not_equal(replies[0].tokens, replies[2].tokens, 24 * sizeof(int32_t));
}

static void expect(fv_status got, fv_status status, const char *cause)
{
    if (got == status && strstr(fv_last_error(), cause)) return;
    fail_msg("expected %s with '%s', got %s with '%s'", fv_status_name(status), cause, fv_status_name(got),
             fv_last_error());
}

static void test_refusals(void **state)
{
    const fixture *f = fixture_or_skip(state);
    fv_session *session;
    fv_session_options options = session_options(few_tokens);
    options.attention_backend = "NOPE";
    expect(fv_session_create(&session, f->engine, &options), FV_ERR_INVALID, "TRITON_ATTN");
    options = session_options(few_tokens);
    options.block_size = -3;
    expect(fv_session_create(&session, f->engine, &options), FV_ERR_INVALID, "block_size is -3");
    options = session_options(few_tokens);
    options.kv_cache_dtype = (fv_dtype)99;
    expect(fv_session_create(&session, f->engine, &options), FV_ERR_INVALID, "kv_cache_dtype is 99");

    options = session_options(few_tokens);
    options.cache_tokens = 64;
    assert_int_equal(fv_session_create(&session, f->engine, &options), FV_OK);
    int32_t *many = calloc(9000, sizeof(*many));
    fv_request request = {.struct_size = sizeof(request), .prompt = many, .num_prompt_tokens = 8193, .max_tokens = 1};
    expect(fv_session_add(NULL, session, &request), FV_ERR_INVALID,
           "8193 tokens, more than the model's context length of 8192");
    request.num_prompt_tokens = 60;
    request.max_tokens = 20;
    expect(fv_session_add(NULL, session, &request), FV_ERR_NO_SPACE, "holds 64");
    many[5] = 49152;
    expect(fv_session_add(NULL, session, &request), FV_ERR_INVALID, "prompt[5] is 49152");
    many[5] = -1;
    expect(fv_session_add(NULL, session, &request), FV_ERR_INVALID, "accepted: 0 to 49151");
    request.num_prompt_tokens = 0;
    expect(fv_session_add(NULL, session, &request), FV_ERR_INVALID, "num_prompt_tokens is 0");
    request.num_prompt_tokens = 50;
    many[5] = 0;
    request.temperature = -1.0f;
    expect(fv_session_add(NULL, session, &request), FV_ERR_INVALID, "temperature");
    request.temperature = 0.0f;
    request.max_tokens = 0; /* until the cache is full */
    request.ignore_eos = 1;
    assert_int_equal(fv_session_add(NULL, session, &request), FV_OK);
    run_to_end(session);
    assert_int_equal(fv_session_add(NULL, session, &request), FV_OK); /* destroyed while it waits */
    fv_session_destroy(session);
    free(many);

    fv_engine *engine;
    expect(fv_engine_create(&engine, "/no/such.gguf", NULL), FV_ERR_IO, "/no/such.gguf");
    assert_null(engine);
}

static int set_up(void **state)
{
    static fixture f;
    *state = &f;
    return fixture_open(&f, "FOVEA_MODEL", "logits.bin", "essay.bin");
}

static int tear_down(void **state)
{
    fixture_close(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prompts_like_the_recording),
        cmocka_unit_test(test_decodes_like_the_recording),
        cmocka_unit_test(test_tokens_do_not_depend_on_how),
        cmocka_unit_test(test_every_backend),
        cmocka_unit_test(test_narrow_caches),
        cmocka_unit_test(test_one_thread),
        cmocka_unit_test(test_weights_as_stored),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_batch_mates_do_not_change_a_bit),
        cmocka_unit_test(test_perplexity),
        cmocka_unit_test(test_chats),
        cmocka_unit_test(test_sampling_is_reproducible),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
