/* The engine on a real model, against what another implementation computed with the same file: the
 * same next token wherever the recorded best two logits differ by more than 0.05, logits close on
 * average, the same perplexity; and the same on every block size, chunk size, cache type, number of
 * threads, with others in the batch, and on a cache that cannot hold all at once. */
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
#include "engine/recordings.h"
#include "fovea/engine.h"

#ifndef FV_TEST_DATA_DIR
#define FV_TEST_DATA_DIR "tests"
#endif

/* The rule for tokens: see the recording's README for how many positions are within the margin. */
static const double close_call = 0.05;

/* Mean absolute difference of the recorded logits; fp32 against fp32 in another order of summation. */
static const double max_mean_error_f32 = 2e-4;
static const double max_mean_error_f16 = 4e-3; /* keys and values rounded by 2^-11 */
static const double max_mean_error_bf16 = 0.1; /* weights and activations rounded by 2^-9 */

typedef struct fixture {
    fv_engine *engine; /* NULL: no model file */
    recorded_logits logits;
    recorded_essay essay;
} fixture;

/* What one run over some prompts has seen. */
typedef struct outcome {
    const recorded_logits *recorded;
    int32_t first_prompt; /* of request 0 */
    int64_t num_positions;
    int64_t num_wrong; /* another best token, and no close call */
    double error_sum;
    int64_t num_errors;
    double max_error;
    uint64_t hash[32]; /* of all logits of each request, bit for bit */
} outcome;

static void compare_position(void *user, int32_t request, int32_t position, const float *logits,
                             int32_t vocabulary_size)
{
    outcome *seen = user;
    const recorded_logits *recorded = seen->recorded;
    const int32_t prompt = seen->first_prompt + request;
    if (position >= recorded->prompts[prompt].num_tokens) return;
    const recorded_position *expected = recorded_position_at(recorded, prompt, position);

    int32_t best = 0;
    uint64_t hash = seen->hash[request] ^ (uint64_t)position;
    for (int32_t i = 0; i < vocabulary_size; i++) {
        if (logits[i] > logits[best]) best = i;
        uint32_t bits;
        memcpy(&bits, &logits[i], sizeof(bits));
        hash = (hash ^ bits) * UINT64_C(0x100000001b3);
    }
    seen->hash[request] = hash;
    seen->num_positions++;
    const double margin = (double)expected->best_logit - (double)expected->second_logit;
    if (best != expected->best_id && margin > close_call) seen->num_wrong++;

    for (int32_t i = -2; i < recorded->num_probes; i++) {
        const int32_t id = i == -2 ? expected->best_id : i == -1 ? expected->second_id : recorded->probe_ids[i];
        const float value = i == -2 ? expected->best_logit : i == -1 ? expected->second_logit : expected->probes[i];
        const double error = fabs((double)logits[id] - (double)value);
        seen->error_sum += error;
        seen->num_errors++;
        if (!(error <= seen->max_error)) seen->max_error = error;
    }
}

/* How the tokens of a prompt come in: all as a prompt, or the recorded continuation one by one. */
typedef enum feeding { FEED_AS_PROMPT, FEED_AS_DECODES } feeding;

static void add_prompt(fv_session *session, outcome *seen, int32_t prompt, feeding fed)
{
    const recorded_prompt *from = &seen->recorded->prompts[prompt];
    const int32_t num_prompt = fed == FEED_AS_PROMPT ? from->num_tokens : from->num_prompt_tokens;
    const fv_request request = {
        .struct_size = sizeof(request),
        .prompt = from->ids,
        .num_prompt_tokens = num_prompt,
        .max_tokens = from->num_tokens - num_prompt + 1,
        .forced = from->ids + num_prompt,
        .num_forced = from->num_tokens - num_prompt,
        .ignore_eos = 1,
        .on_logits = compare_position,
        .user = seen,
    };
    if (fv_session_add(NULL, session, &request) != FV_OK) fail_msg("%s", fv_last_error());
}

static void run_to_end(fv_session *session)
{
    int32_t num_unfinished = 1;
    while (num_unfinished > 0) {
        if (fv_session_step(&num_unfinished, session) != FV_OK) fail_msg("%s", fv_last_error());
    }
}

/* Runs prompts [first, first + count) and returns what was seen; `stats` may be NULL. */
static outcome run_prompts(const fixture *f, fv_engine *engine, const fv_session_options *options, int32_t first,
                           int32_t count, feeding fed, fv_session_stats *stats)
{
    outcome seen = {.recorded = &f->logits, .first_prompt = first};
    fv_session *session;
    if (fv_session_create(&session, engine, options) != FV_OK) fail_msg("%s", fv_last_error());
    for (int32_t i = 0; i < count; i++) add_prompt(session, &seen, first + i, fed);
    run_to_end(session);
    if (stats) {
        stats->struct_size = sizeof(*stats);
        assert_int_equal(fv_session_get_stats(stats, session), FV_OK);
    }
    fv_session_destroy(session);
    return seen;
}

static void check(const char *name, const outcome *seen, double max_mean_error)
{
    const double mean = seen->error_sum / (double)seen->num_errors;
    print_message("  %-28s %4d positions, %d wrong, logit error %.2e on average, %.2e at most\n", name,
                  (int)seen->num_positions, (int)seen->num_wrong, mean, seen->max_error);
    assert_true(seen->num_positions > 0);
    assert_int_equal(seen->num_wrong, 0);
    assert_true(mean <= max_mean_error);
}

static fv_session_options session_options(void)
{
    return (fv_session_options){.struct_size = sizeof(fv_session_options), .cache_tokens = 8192};
}

static const fixture *fixture_or_skip(void **state)
{
    const fixture *f = *state;
    if (!f->engine) skip();
    return f;
}

static void test_prompts_like_the_recording(void **state)
{
    const fixture *f = fixture_or_skip(state);
    fv_session_options options = session_options();
    options.kv_cache_dtype = FV_DTYPE_F32;
    outcome seen = run_prompts(f, f->engine, &options, 0, f->logits.num_prompts, FEED_AS_PROMPT, NULL);
    assert_int_equal(seen.num_positions, 20 * 208);
    check("prefill, fp32 cache", &seen, max_mean_error_f32);
    options.kv_cache_dtype = FV_DTYPE_NONE;
    seen = run_prompts(f, f->engine, &options, 0, f->logits.num_prompts, FEED_AS_PROMPT, NULL);
    check("prefill, default cache", &seen, max_mean_error_f16);
}

static void test_decodes_like_the_recording(void **state)
{
    const fixture *f = fixture_or_skip(state);
    fv_session_options options = session_options();
    options.max_num_seqs = f->logits.num_prompts;
    fv_session_stats stats;
    outcome seen = run_prompts(f, f->engine, &options, 0, f->logits.num_prompts, FEED_AS_DECODES, &stats);
    assert_int_equal(seen.num_positions, 20 * 208);
    assert_true(stats.decode_tokens > 3000);
    check("decode, default cache", &seen, max_mean_error_f16);
}

/* One way to run that must not change the tokens. */
typedef struct variation {
    const char *name;
    int32_t block_size, max_batched_tokens, cache_tokens, batch_invariant;
    fv_dtype kv_cache_dtype;
    feeding fed;
    int32_t num_prompts; /* 0: the usual number */
} variation;

static void test_tokens_do_not_depend_on_how(void **state)
{
    enum { first = 4, usual = 3 };
    static const variation variations[] = {
        {.name = "block size 1", .block_size = 1},
        {.name = "block size 1, decodes", .block_size = 1, .fed = FEED_AS_DECODES},
        {.name = "block size 17", .block_size = 17},
        {.name = "block size 17, decodes", .block_size = 17, .fed = FEED_AS_DECODES},
        {.name = "block size 544", .block_size = 544},
        {.name = "chunks of 1", .max_batched_tokens = 1, .num_prompts = 1},
        {.name = "chunks of 7", .max_batched_tokens = 7},
        {.name = "chunks of 64", .max_batched_tokens = 64},
        {.name = "small cache", .cache_tokens = 230, .fed = FEED_AS_DECODES, .num_prompts = 2},
        {.name = "small cache, chunks", .cache_tokens = 450, .max_batched_tokens = 50},
        {.name = "batch invariant", .batch_invariant = 1},
        {.name = "fp32 cache", .kv_cache_dtype = FV_DTYPE_F32},
    };
    const fixture *f = fixture_or_skip(state);
    for (int32_t i = 0; i < FV_ARRAY_LEN(variations); i++) {
        const variation *way = &variations[i];
        fv_session_options options = session_options();
        if (way->cache_tokens) options.cache_tokens = way->cache_tokens;
        options.block_size = way->block_size;
        options.max_batched_tokens = way->max_batched_tokens;
        options.batch_invariant = way->batch_invariant;
        options.kv_cache_dtype = way->kv_cache_dtype;
        const int32_t count = way->num_prompts ? way->num_prompts : usual;
        fv_session_stats stats;
        const outcome seen = run_prompts(f, f->engine, &options, first, count, way->fed, &stats);
        assert_int_equal(seen.num_positions, count * 208);
        if (way->cache_tokens) assert_in_range(stats.max_running, 1, 2); /* the others had to wait */
        check(way->name, &seen, max_mean_error_f16);
    }
}

static void test_one_thread(void **state)
{
    const fixture *f = fixture_or_skip(state);
    const fv_engine_options one = {.struct_size = sizeof(one), .num_threads = 1, .compute_dtype = FV_DTYPE_F32};
    const fv_session_options options = session_options();
    fv_engine *engine;
    if (fv_engine_create(&engine, getenv("FOVEA_MODEL"), &one) != FV_OK) fail_msg("%s", fv_last_error());
    outcome seen = run_prompts(f, engine, &options, 8, 3, FEED_AS_PROMPT, NULL);
    check("1 thread", &seen, max_mean_error_f16);
    seen = run_prompts(f, engine, &options, 8, 3, FEED_AS_DECODES, NULL);
    check("1 thread, decodes", &seen, max_mean_error_f16);
    fv_engine_destroy(engine);
}

/* bf16 weights and activations, on CPUs that have bf16 instructions: further off, but no worse a model. */
static void test_bf16(void **state)
{
    const fixture *f = fixture_or_skip(state);
    const fv_engine_options bf16 = {.struct_size = sizeof(bf16), .num_threads = 2, .compute_dtype = FV_DTYPE_BF16};
    const fv_session_options options = session_options();
    fv_engine *engine;
    const fv_status status = fv_engine_create(&engine, getenv("FOVEA_MODEL"), &bf16);
    if (status == FV_ERR_UNSUPPORTED) {
        print_message("  left out: %s\n", fv_last_error());
        skip();
    }
    if (status != FV_OK) fail_msg("%s", fv_last_error());
    for (int32_t fed = FEED_AS_PROMPT; fed <= FEED_AS_DECODES; fed++) {
        const outcome seen = run_prompts(f, engine, &options, 0, f->logits.num_prompts, (feeding)fed, NULL);
        const double mean = seen.error_sum / (double)seen.num_errors;
        print_message("  bf16: %d positions, %d wrong, logit error %.2e on average, %.2e at most\n",
                      (int)seen.num_positions, (int)seen.num_wrong, mean, seen.max_error);
        assert_true(mean <= max_mean_error_bf16);
        assert_true(seen.num_wrong <= seen.num_positions / 50);
    }
    fv_engine_destroy(engine);
}

/* A prompt of the recording alone, then between others, in steps that cut it elsewhere. */
static void test_batch_mates_do_not_change_a_bit(void **state)
{
    enum { prompt = 2, num_mates = 5 };
    const fixture *f = fixture_or_skip(state);
    fv_session_options options = session_options();
    options.batch_invariant = 1;
    for (int32_t fed = FEED_AS_PROMPT; fed <= FEED_AS_DECODES; fed++) {
        options.max_batched_tokens = 512;
        const outcome alone = run_prompts(f, f->engine, &options, prompt, 1, (feeding)fed, NULL);
        assert_int_equal(alone.num_positions, 208);
        options.max_batched_tokens = 100;
        const outcome crowd = run_prompts(f, f->engine, &options, prompt - 2, num_mates + 1, (feeding)fed, NULL);
        assert_int_equal(crowd.num_wrong, 0);
        if (alone.hash[0] != crowd.hash[2]) fail_msg("feeding %d: the logits differ", fed);
    }
}

typedef struct likelihood {
    const recorded_essay *essay;
    double sum;
    int32_t count;
} likelihood;

static void add_likelihood(void *user, int32_t request, int32_t position, const float *logits, int32_t vocabulary_size)
{
    (void)request;
    likelihood *seen = user;
    if (position + 1 >= seen->essay->num_tokens) return;
    double total = 0.0;
    for (int32_t i = 0; i < vocabulary_size; i++) total += exp((double)logits[i]);
    seen->sum += log(total) - (double)logits[seen->essay->ids[position + 1]];
    seen->count++;
}

static void test_perplexity(void **state)
{
    const fixture *f = fixture_or_skip(state);
    likelihood seen = {.essay = &f->essay};
    const fv_session_options options = session_options();
    const fv_request request = {
        .struct_size = sizeof(request),
        .prompt = f->essay.ids,
        .num_prompt_tokens = f->essay.num_tokens,
        .max_tokens = 1,
        .on_logits = add_likelihood,
        .user = &seen,
    };
    fv_session *session;
    assert_int_equal(fv_session_create(&session, f->engine, &options), FV_OK);
    assert_int_equal(fv_session_add(NULL, session, &request), FV_OK);
    run_to_end(session);
    fv_session_destroy(session);

    double recorded = 0.0;
    for (int32_t i = 0; i < f->essay.num_tokens - 1; i++) recorded += (double)f->essay.nll[i];
    assert_int_equal(seen.count, f->essay.num_tokens - 1);
    const double expected = exp(recorded / seen.count), got = exp(seen.sum / seen.count);
    print_message("  perplexity over %d tokens: %.6f, recorded %.6f\n", seen.count, got, expected);
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

static void check_chat(const fixture *f, fv_session *session, const cJSON *chat)
{
    const cJSON *messages = cJSON_GetObjectItem(chat, "messages"), *ids = cJSON_GetObjectItem(chat, "ids");
    const cJSON *margins = cJSON_GetObjectItem(chat, "margins");
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
    reply got = {0};
    const fv_request request = {
        .struct_size = sizeof(request),
        .prompt = tokens,
        .num_prompt_tokens = num_tokens,
        .max_tokens = cJSON_GetArraySize(ids),
        .on_token = append_token,
        .user = &got,
    };
    assert_int_equal(fv_session_add(NULL, session, &request), FV_OK);
    run_to_end(session);
    fv_engine_free_tokens(tokens);

    /* Comparable up to the first close call; after another token the texts go their own ways. */
    int32_t same = 0;
    while (same < got.num_tokens && got.tokens[same] == cJSON_GetArrayItem(ids, same)->valueint) same++;
    if (same < cJSON_GetArraySize(ids)) {
        assert_true(cJSON_GetArrayItem(margins, same)->valuedouble <= close_call);
        return;
    }
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(chat, "text"));
    assert_int_equal(got.text_bytes, strlen(text));
    assert_memory_equal(got.text, text, got.text_bytes);
    assert_int_equal(got.finish, cJSON_IsTrue(cJSON_GetObjectItem(chat, "ended")) ? FV_FINISH_STOP : FV_FINISH_LENGTH);
}

static void test_chats(void **state)
{
    const fixture *f = fixture_or_skip(state);
    size_t bytes;
    uint8_t *file = read_whole_file(&bytes, FV_TEST_DATA_DIR "/recordings/chats.json");
    assert_non_null(file);
    cJSON *json = cJSON_Parse((const char *)file);
    assert_non_null(json);
    const fv_session_options options = session_options();
    fv_session *session;
    assert_int_equal(fv_session_create(&session, f->engine, &options), FV_OK);
    const cJSON *chat;
    cJSON_ArrayForEach(chat, cJSON_GetObjectItem(json, "chats")) check_chat(f, session, chat);
    fv_session_destroy(session);
    cJSON_Delete(json);
    free(file);
}

static void test_sampling_is_reproducible(void **state)
{
    const fixture *f = fixture_or_skip(state);
    const recorded_prompt *prompt = &f->logits.prompts[0];
    const fv_session_options options = session_options();
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
    fv_session_options options = session_options();
    options.attention_backend = "NOPE";
    expect(fv_session_create(&session, f->engine, &options), FV_ERR_INVALID, "TRITON_ATTN");
    options = session_options();
    options.block_size = -3;
    expect(fv_session_create(&session, f->engine, &options), FV_ERR_INVALID, "block_size is -3");
    options = session_options();
    options.kv_cache_dtype = FV_DTYPE_I8;
    assert_int_not_equal(fv_session_create(&session, f->engine, &options), FV_OK);

    options = session_options();
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
    request.num_prompt_tokens = 3;
    request.temperature = -1.0f;
    expect(fv_session_add(NULL, session, &request), FV_ERR_INVALID, "temperature");
    request.temperature = 0.0f;
    many[5] = 0;
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
    const char *path = getenv("FOVEA_MODEL");
    if (!path || !path[0]) {
        print_message("FOVEA_MODEL is not set: the tests of the model are skipped\n");
        return 0;
    }
    if (!recorded_logits_read(&f.logits, FV_TEST_DATA_DIR "/recordings/logits.bin")) return 1;
    if (!recorded_essay_read(&f.essay, FV_TEST_DATA_DIR "/recordings/essay.bin")) return 1;
    const fv_engine_options two = {.struct_size = sizeof(two), .num_threads = 2, .compute_dtype = FV_DTYPE_F32};
    if (fv_engine_create(&f.engine, path, &two) == FV_OK) return 0;
    print_message("%s\n", fv_last_error());
    return 1;
}

static int tear_down(void **state)
{
    fixture *f = *state;
    fv_engine_destroy(f->engine);
    recorded_logits_free(&f->logits);
    recorded_essay_free(&f->essay);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prompts_like_the_recording),
        cmocka_unit_test(test_decodes_like_the_recording),
        cmocka_unit_test(test_tokens_do_not_depend_on_how),
        cmocka_unit_test(test_one_thread),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_batch_mates_do_not_change_a_bit),
        cmocka_unit_test(test_perplexity),
        cmocka_unit_test(test_chats),
        cmocka_unit_test(test_sampling_is_reproducible),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
