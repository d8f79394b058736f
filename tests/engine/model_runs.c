#include "engine/model_runs.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fovea/backend.h"

#ifndef FV_TEST_DATA_DIR
#define FV_TEST_DATA_DIR "tests"
#endif

int fixture_open(fixture *f, const char *variable, const char *logits_name, const char *essay_name)
{
    char path[1024];
    f->path = getenv(variable);
    if (!f->path || !f->path[0]) {
        print_message("%s is not set: the tests of the model are skipped\n", variable);
        return 0;
    }
    snprintf(path, sizeof(path), "%s/recordings/%s", FV_TEST_DATA_DIR, logits_name);
    if (!recorded_logits_read(&f->logits, path)) return 1;
    snprintf(path, sizeof(path), "%s/recordings/%s", FV_TEST_DATA_DIR, essay_name);
    if (!recorded_essay_read(&f->essay, path)) return 1;
    const fv_engine_options two = {.struct_size = sizeof(two), .num_threads = 2, .compute_dtype = FV_DTYPE_F32};
    if (fv_engine_create(&f->engine, f->path, &two) == FV_OK) return 0;
    print_message("%s\n", fv_last_error());
    return 1;
}

void fixture_close(fixture *f)
{
    fv_engine_destroy(f->engine);
    recorded_logits_free(&f->logits);
    recorded_essay_free(&f->essay);
}

const fixture *fixture_or_skip(void **state)
{
    const fixture *f = *state;
    if (!f->engine) skip();
    return f;
}

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
    if (best != expected->best_id && margin > CLOSE_CALL) seen->num_wrong++;

    for (int32_t i = -2; i < recorded->num_probes; i++) {
        const int32_t id = i == -2 ? expected->best_id : i == -1 ? expected->second_id : recorded->probe_ids[i];
        const float value = i == -2 ? expected->best_logit : i == -1 ? expected->second_logit : expected->probes[i];
        const double error = fabs((double)logits[id] - (double)value);
        seen->error_sum += error;
        seen->num_errors++;
        if (!(error <= seen->max_error)) seen->max_error = error;
    }
}

static void add_prompt(fv_session *session, outcome *seen, int32_t prompt, const prompt_range *range)
{
    const recorded_prompt *from = &seen->recorded->prompts[prompt];
    const int32_t num_tokens = range->num_tokens ? range->num_tokens : from->num_tokens;
    const int32_t num_prompt = range->fed == FEED_AS_PROMPT ? num_tokens : from->num_prompt_tokens;
    const fv_request request = {
        .struct_size = sizeof(request),
        .prompt = from->ids,
        .num_prompt_tokens = num_prompt,
        .max_tokens = num_tokens - num_prompt + 1,
        .forced = from->ids + num_prompt,
        .num_forced = num_tokens - num_prompt,
        .ignore_eos = 1,
        .on_logits = compare_position,
        .first_logits = range->first_logits,
        .user = seen,
    };
    if (fv_session_add(NULL, session, &request) != FV_OK) fail_msg("%s", fv_last_error());
}

void run_to_end(fv_session *session)
{
    int32_t num_unfinished = 1;
    while (num_unfinished > 0) {
        if (fv_session_step(&num_unfinished, session) != FV_OK) fail_msg("%s", fv_last_error());
    }
}

outcome run_prompts_on(fv_session *session, const fixture *f, prompt_range range, fv_session_stats *stats)
{
    outcome seen = {.recorded = &f->logits, .first_prompt = range.first};
    for (int32_t i = 0; i < range.count; i++) add_prompt(session, &seen, range.first + i, &range);
    run_to_end(session);
    if (stats) {
        stats->struct_size = sizeof(*stats);
        assert_int_equal(fv_session_get_stats(stats, session), FV_OK);
    }
    return seen;
}

outcome run_prompts(const fixture *f, fv_engine *engine, const fv_session_options *options, prompt_range range,
                    fv_session_stats *stats)
{
    fv_session *session;
    if (fv_session_create(&session, engine, options) != FV_OK) fail_msg("%s", fv_last_error());
    const outcome seen = run_prompts_on(session, f, range, stats);
    fv_session_destroy(session);
    return seen;
}

void check_outcome(const char *name, const outcome *seen, double max_mean_error)
{
    const double mean = seen->error_sum / (double)seen->num_errors;
    print_message("  %-36s %4d positions, %d wrong, logit error %.2e on average, %.2e at most\n", name,
                  (int)seen->num_positions, (int)seen->num_wrong, mean, seen->max_error);
    assert_true(seen->num_positions > 0);
    assert_int_equal(seen->num_wrong, 0);
    assert_true(mean <= max_mean_error);
}

/* On a CPU with bf16 instructions many rows are multiplied in that type. */
static void check_stored_outcome(const char *name, const outcome *seen, bool is_bf16)
{
    if (!is_bf16) {
        check_outcome(name, seen, MAX_MEAN_ERROR_STORED);
        return;
    }
    const double mean = seen->error_sum / (double)seen->num_errors;
    print_message("  %s, bf16: %d positions, %d wrong, logit error %.2e on average\n", name, (int)seen->num_positions,
                  (int)seen->num_wrong, mean);
    assert_true(mean <= MAX_MEAN_ERROR_BF16);
    assert_true(seen->num_wrong <= seen->num_positions / 50);
}

void check_weights_as_stored(const fixture *f, const fv_session_options *options, int32_t num_prompts,
                             int32_t num_tokens)
{
    const fv_engine_options best = {.struct_size = sizeof(best), .num_threads = 2};
    fv_session_options exact = *options;
    exact.kv_cache_dtype = FV_DTYPE_F32;
    fv_engine *engine;
    if (fv_engine_create(&engine, f->path, &best) != FV_OK) fail_msg("%s", fv_last_error());
    fv_engine_info expanded = {.struct_size = sizeof(expanded)}, info = {.struct_size = sizeof(info)};
    assert_int_equal(fv_engine_get_info(&expanded, f->engine), FV_OK);
    assert_int_equal(fv_engine_get_info(&info, engine), FV_OK);
    assert_true(info.weight_bytes < expanded.weight_bytes / 3);
    print_message("  %s: %.0f MB, as fp32 %.0f\n", info.gemm, 1e-6 * (double)info.weight_bytes,
                  1e-6 * (double)expanded.weight_bytes);
    const bool is_bf16 = info.compute_dtype == FV_DTYPE_BF16;
    outcome seen = run_prompts(f, engine, &exact, (prompt_range){0, num_prompts, FEED_AS_PROMPT, 0, num_tokens}, NULL);
    check_stored_outcome("prefill, weights as stored", &seen, is_bf16);
    seen = run_prompts(f, engine, &exact, (prompt_range){0, num_prompts, FEED_AS_DECODES, 0, num_tokens}, NULL);
    check_stored_outcome("decode, weights as stored", &seen, is_bf16);
    fv_engine_destroy(engine);
}

fv_session *create_session_on(fv_engine *engine, fv_session_options options, int32_t index)
{
    fv_session *session;
    options.attention_backend = fv_backend_name(index);
    const fv_status status = fv_session_create(&session, engine, &options);
    if (status == FV_OK) return session;
    if (status != FV_ERR_UNSUPPORTED) fail_msg("%s: %s", options.attention_backend, fv_last_error());
    print_message("  left out: %s\n", fv_last_error());
    return NULL;
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

double measure_perplexity(double *expected, const fixture *f, const fv_session_options *options,
                          fv_session_stats *stats)
{
    likelihood seen = {.essay = &f->essay};
    const fv_request request = {
        .struct_size = sizeof(request),
        .prompt = f->essay.ids,
        .num_prompt_tokens = f->essay.num_tokens,
        .max_tokens = 1,
        .on_logits = add_likelihood,
        .user = &seen,
    };
    fv_session *session;
    if (fv_session_create(&session, f->engine, options) != FV_OK) fail_msg("%s", fv_last_error());
    assert_int_equal(fv_session_add(NULL, session, &request), FV_OK);
    run_to_end(session);
    stats->struct_size = sizeof(*stats);
    assert_int_equal(fv_session_get_stats(stats, session), FV_OK);
    fv_session_destroy(session);

    double recorded = 0.0;
    for (int32_t i = 0; i < f->essay.num_tokens - 1; i++) recorded += (double)f->essay.nll[i];
    assert_int_equal(seen.count, f->essay.num_tokens - 1);
    *expected = exp(recorded / seen.count);
    return exp(seen.sum / seen.count);
}
