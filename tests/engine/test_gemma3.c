/* The engine on Gemma-3-270M, against what another implementation computed with the same file, as
 * test_smollm2.c does for the other model: quantised weights of four types, heads of 256, MQA, norms of
 * each head, and windows of 512 in five of six layers, which two of the prompts and the essay exceed. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "engine/model_runs.h"
#include "fovea/backend.h"

/* Of the recording: short prompts, then two that are longer than the window. Of the long ones only
 * positions beyond it are compared: a row of logits costs more than the rest of the model. */
enum { num_short = 8, long_prompt = 8, num_prompts = 10, short_tokens = 64, window = 512 };

static fv_session_options session_options(void)
{
    return (fv_session_options){.struct_size = sizeof(fv_session_options), .cache_tokens = 4096};
}

static void test_prompts_like_the_recording(void **state)
{
    const fixture *f = fixture_or_skip(state);
    assert_int_equal(f->logits.num_prompts, num_prompts);
    fv_session_options options = session_options();
    options.kv_cache_dtype = FV_DTYPE_F32;
    const prompt_range all_short = {0, num_short, FEED_AS_PROMPT, 0, 0};
    outcome seen = run_prompts(f, f->engine, &options, all_short, NULL);
    assert_int_equal(seen.num_positions, num_short * short_tokens);
    check_outcome("short prompts, fp32 cache", &seen, MAX_MEAN_ERROR_F32);

    const prompt_range all_long = {long_prompt, 2, FEED_AS_PROMPT, 700, 0};
    seen = run_prompts(f, f->engine, &options, all_long, NULL);
    assert_int_equal(seen.num_positions, 61 + 211);
    check_outcome("long prompts, fp32 cache", &seen, MAX_MEAN_ERROR_F32);
}

/* Every backend that serves the model, with two block sizes: decodes that go on behind a window, and a
 * prompt in chunks that begin in the middle of blocks. */
static void test_every_backend(void **state)
{
    static const struct {
        const char *name;
        int32_t block_size, max_batched_tokens;
        prompt_range range;
        int32_t num_positions;
    } ways[] = {
        {"blocks of 16, decodes", 16, 0, {long_prompt - 2, 3, FEED_AS_DECODES, 690, 0}, 71},
        {"blocks of 64, chunks of 100", 64, 100, {long_prompt, 1, FEED_AS_PROMPT, 700, 0}, 61},
    };
    const fixture *f = fixture_or_skip(state);
    int32_t num_served = 0;
    for (int32_t backend = 0; backend < fv_backend_count(); backend++) {
        bool is_served = true;
        for (int32_t i = 0; i < FV_ARRAY_LEN(ways); i++) {
            fv_session_options options = session_options();
            options.block_size = ways[i].block_size;
            options.max_batched_tokens = ways[i].max_batched_tokens;
            fv_session *session = create_session_on(f->engine, options, backend);
            is_served = session != NULL;
            if (!is_served) break;
            print_message("  %s\n", fv_backend_name(backend));
            const outcome seen = run_prompts_on(session, f, ways[i].range, NULL);
            fv_session_destroy(session);
            assert_int_equal(seen.num_positions, ways[i].num_positions);
            check_outcome(ways[i].name, &seen, MAX_MEAN_ERROR_F16);
        }
        num_served += is_served;
    }
    assert_true(num_served >= 1);
}

static void test_short_decodes(void **state)
{
    const fixture *f = fixture_or_skip(state);
    const fv_session_options options = session_options();
    const prompt_range all_short = {0, num_short, FEED_AS_DECODES, 0, 0};
    fv_session_stats stats;
    const outcome seen = run_prompts(f, f->engine, &options, all_short, &stats);
    assert_int_equal(seen.num_positions, num_short * short_tokens);
    assert_true(stats.decode_tokens > 200);
    check_outcome("decodes, default cache", &seen, MAX_MEAN_ERROR_F16);
}

/* Five types in one file: Q4_K, Q5_0, Q6_K, Q8_0 and F32, two of them in one weight. */
static void test_weights_as_stored(void **state)
{
    const fixture *f = fixture_or_skip(state);
    const fv_session_options options = session_options();
    check_weights_as_stored(f, &options, num_short, short_tokens);
}

/* Four windows of text in small steps: what the sliding layers no longer see goes back, and the
 * perplexity is that of an implementation which keeps it. */
static void test_perplexity(void **state)
{
    enum { block_size = 16, budget = 128 };
    const fixture *f = fixture_or_skip(state);
    fv_session_options options = session_options();
    options.max_batched_tokens = budget;
    fv_session_stats stats;
    double expected;
    const double got = measure_perplexity(&expected, f, &options, &stats);
    print_message("  perplexity over %d tokens: %.6f, recorded %.6f\n", f->essay.num_tokens - 1, got, expected);
    assert_true(fabs(got / expected - 1.0) <= 0.005);

    assert_int_equal(stats.num_groups, 2);
    assert_int_equal(stats.groups[0].num_layers, 3);
    assert_int_equal(stats.groups[1].num_layers, 15);
    assert_int_equal(stats.groups[1].window, window);
    print_message("  blocks used at most: %d in full layers, %d in those with a window\n",
                  stats.groups[0].max_used_blocks, stats.groups[1].max_used_blocks);
    assert_int_equal(stats.groups[0].max_used_blocks, (f->essay.num_tokens + block_size - 1) / block_size);
    assert_true(stats.groups[1].max_used_blocks * block_size <= window + budget + block_size);
}

static void test_facts(void **state)
{
    const fixture *f = fixture_or_skip(state);
    fv_engine_info info = {.struct_size = sizeof(info)};
    assert_int_equal(fv_engine_get_info(&info, f->engine), FV_OK);
    assert_string_equal(info.architecture, "gemma3");
    assert_int_equal(info.vocabulary_size, 262144);
    assert_int_equal(info.context_length, 32768);
    assert_int_equal(info.head_size, 256);
    assert_int_equal(info.num_kv_heads, 1);
    assert_int_equal(info.has_chat_template, 0); /* the file is of the base model */
    assert_non_null(strstr(info.chat_why_not, "no chat template"));
}

static int set_up(void **state)
{
    static fixture f;
    *state = &f;
    return fixture_open(&f, "FOVEA_GEMMA_MODEL", "gemma3_logits.bin", "gemma3_essay.bin");
}

static int tear_down(void **state)
{
    fixture_close(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_facts),         cmocka_unit_test(test_prompts_like_the_recording),
        cmocka_unit_test(test_every_backend), cmocka_unit_test(test_short_decodes),
        cmocka_unit_test(test_perplexity),    cmocka_unit_test(test_weights_as_stored),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
