#include "generate/random_run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/compiler.h"
#include "core/error.h"
#include "generate/progress.h"
#include "json.h"

/* Context lengths that are reported, and the end; the time is the mean over so many tokens before it. */
static const int32_t marks[] = {1024, 4096, 12800};
enum { num_averaged = 64, max_rows = FV_ARRAY_LEN(marks) + 1, max_tokens = 1 << 30 };

typedef struct random_run {
    const generate_options *options;
    fv_engine *engine;
    fv_session *session;
    double *seconds; /* [max_tokens, at most what the context holds] when each token came */
    int32_t num_tokens;
    bool has_failed; /* no logit was a number */
    generate_progress progress;
    fv_engine_info info;
    fv_session_stats stats;
    double bytes_per_second; /* 0: not known */
} random_run;

/* A token along the context. */
typedef struct context_time {
    int32_t context;
    double seconds;       /* of a token */
    double cache_bytes;   /* that it reads */
    double bound_seconds; /* 0: not known */
} context_time;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void take_token(void *user, const fv_token_event *event)
{
    random_run *run = user;
    if (event->finish == FV_FINISH_FAILED)
        run->has_failed = true;
    else
        run->seconds[run->num_tokens++] = now();
}

static fv_status add_prompt(random_run *run)
{
    const int32_t count = run->options->prompt_tokens;
    if (count > run->info.context_length) {
        return fv_fail(FV_ERR_INVALID, "--prompt-tokens is %d; accepted: 1 to %d, the context length of %s", count,
                       run->info.context_length, run->options->engine.random_weights);
    }
    int32_t *prompt = malloc((size_t)count * sizeof(*prompt));
    if (!prompt) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a prompt of %d tokens", count);
    uint32_t random = (uint32_t)run->options->sampling.seed + 1;
    for (int32_t i = 0; i < count; i++) {
        random = random * 1664525u + 1013904223u;
        prompt[i] = (int32_t)((uint64_t)random * (uint64_t)run->info.vocabulary_size >> 32);
    }
    fv_request request = run->options->sampling;
    request.prompt = prompt;
    request.num_prompt_tokens = count;
    request.ignore_eos = 1;
    request.on_token = take_token;
    request.user = run;
    const fv_status status = fv_session_add(NULL, run->session, &request);
    free(prompt);
    return status;
}

/* Of one sequence that is `context` long, in all layers. */
static double cache_bytes_at(const fv_session_stats *stats, int32_t context)
{
    double bytes = 0.0;
    for (int32_t i = 0; i < stats->num_groups; i++) {
        const fv_layer_group_stats *group = &stats->groups[i];
        const double capacity = ((double)group->num_blocks + 1) * (double)stats->block_size;
        const int32_t seen = group->window > 0 && group->window < context ? group->window : context;
        bytes += (double)group->cache_bytes / capacity * seen;
    }
    return bytes;
}

/* The mean over the tokens that came before the context was `context` long. Token i is written at a context of
 * prompt + i. */
static bool time_at(context_time *row, const random_run *run, int32_t context)
{
    const int32_t last = context - run->options->prompt_tokens;
    const int32_t count = fv_min_i32(num_averaged, last);
    if (count < 1 || last >= run->num_tokens) return false;
    *row = (context_time){.context = context, .cache_bytes = cache_bytes_at(&run->stats, context)};
    row->seconds = (run->seconds[last] - run->seconds[last - count]) / count;
    if (run->bytes_per_second > 0.0) {
        row->bound_seconds = ((double)run->info.decode_weight_bytes + row->cache_bytes) / run->bytes_per_second;
    }
    return true;
}

static int32_t list_times(context_time *rows, const random_run *run)
{
    int32_t count = 0;
    const int32_t end = run->options->prompt_tokens + run->num_tokens - 1;
    for (int32_t i = 0; i < FV_ARRAY_LEN(marks); i++) {
        if (marks[i] < end && time_at(&rows[count], run, marks[i])) count++;
    }
    if (time_at(&rows[count], run, end)) count++;
    return count;
}

static void print_table(const random_run *run, const context_time *rows, int32_t num_rows)
{
    printf("random weights of %s on %s (%s), %s, prompt of %d tokens\n", run->options->engine.random_weights,
           run->info.device, run->info.device_description, run->info.gemm, run->options->prompt_tokens);
    printf("%s\n", fv_session_describe(run->session, 0));
    printf("prefill    %lld tokens in %.3f s\n", (long long)run->stats.prefill_tokens, run->stats.prefill_seconds);
    printf("decode     %lld tokens in %.3f s, %d of %d steps in %d graphs of %.1f MiB\n",
           (long long)run->stats.decode_tokens, run->stats.decode_seconds, run->stats.num_graph_steps,
           run->stats.num_steps, run->stats.num_graphs, (double)run->stats.graph_bytes / (1 << 20));
    if (run->bytes_per_second > 0.0) {
        printf("bound      %.3f GB of weights and the cache at %.0f GB/s, the speed of a pure read in this run\n",
               1e-9 * (double)run->info.decode_weight_bytes, 1e-9 * run->bytes_per_second);
    }
    printf("\n%8s %14s %12s %12s %12s %10s\n", "context", "ms a token", "tokens/s", "cache, MB", "bound, ms",
           "of bound");
    for (int32_t i = 0; i < num_rows; i++) {
        const context_time *row = &rows[i];
        printf("%8d %14.4f %12.1f %12.1f", row->context, 1e3 * row->seconds, 1.0 / row->seconds,
               1e-6 * row->cache_bytes);
        if (row->bound_seconds > 0.0) {
            printf(" %12.4f %9.1f%%\n", 1e3 * row->bound_seconds, 100.0 * row->bound_seconds / row->seconds);
        } else {
            printf(" %12s %10s\n", "-", "-");
        }
    }
}

static void print_json(const random_run *run, const context_time *rows, int32_t num_rows)
{
    fv_json json;
    fv_json_init(&json, stdout);
    fv_json_begin_object(&json, NULL);
    fv_json_string(&json, "random_weights", run->options->engine.random_weights);
    fv_json_string(&json, "device", run->info.device);
    fv_json_string(&json, "description", run->info.device_description);
    fv_json_string(&json, "gemm", run->info.gemm);
    fv_json_string(&json, "attention", fv_session_describe(run->session, 0));
    fv_json_int(&json, "prompt_tokens", run->options->prompt_tokens);
    fv_json_int(&json, "tokens", run->num_tokens);
    fv_json_double(&json, "prefill_seconds", run->stats.prefill_seconds);
    fv_json_double(&json, "decode_seconds", run->stats.decode_seconds);
    fv_json_int(&json, "graphs", run->stats.num_graphs);
    fv_json_int(&json, "graph_bytes", (int64_t)run->stats.graph_bytes);
    fv_json_int(&json, "graph_steps", run->stats.num_graph_steps);
    fv_json_int(&json, "decode_weight_bytes", (int64_t)run->info.decode_weight_bytes);
    fv_json_double(&json, "read_bytes_per_second", run->bytes_per_second);
    fv_json_begin_array(&json, "contexts");
    for (int32_t i = 0; i < num_rows; i++) {
        fv_json_begin_row(&json);
        fv_json_int(&json, "context", rows[i].context);
        fv_json_double(&json, "seconds_per_token", rows[i].seconds);
        fv_json_double(&json, "tokens_per_second", 1.0 / rows[i].seconds);
        fv_json_double(&json, "cache_bytes", rows[i].cache_bytes);
        fv_json_double(&json, "bound_seconds", rows[i].bound_seconds);
        fv_json_end_object(&json);
    }
    fv_json_end_array(&json);
    fv_json_end_object(&json);
}

static fv_status report(random_run *run)
{
    context_time rows[max_rows];
    run->stats.struct_size = sizeof(run->stats);
    fv_status status = fv_session_get_stats(&run->stats, run->session);
    if (status == FV_OK && strcmp(run->info.device, "cpu") != 0) {
        status = fv_engine_measure_read(&run->bytes_per_second, run->engine);
    }
    if (status != FV_OK) return status;
    const int32_t num_rows = list_times(rows, run);
    if (run->options->json) {
        print_json(run, rows, num_rows);
    } else {
        print_table(run, rows, num_rows);
    }
    return FV_OK;
}

/* Room in the cache and for the times; a text ends where the context does, whatever was asked for. */
static fv_status create_session(random_run *run, int32_t num_tokens)
{
    fv_session_options options = run->options->session;
    const int32_t context_length = run->info.context_length;
    if (options.cache_tokens == 0) options.cache_tokens = fv_min_i32(num_tokens, context_length);
    if (options.max_num_seqs == 0) options.max_num_seqs = 1;
    run->seconds = calloc((size_t)fv_min_i32(run->options->sampling.max_tokens, context_length), sizeof(*run->seconds));
    if (!run->seconds) return fv_fail(FV_ERR_NO_MEMORY, "no memory for the times of the tokens");
    return fv_session_create(&run->session, run->engine, &options);
}

fv_status generate_random_run(const generate_options *options)
{
    random_run run = {
        .options = options,
        .progress = {.loads = "random weights", .is_wanted = options->progress},
        .info = {.struct_size = sizeof(run.info)},
    };
    fv_engine_options engine_options = options->engine;
    int32_t num_unfinished = 1;
    const int64_t num_tokens = (int64_t)options->prompt_tokens + options->sampling.max_tokens;
    if (num_tokens > max_tokens)
        return fv_fail(FV_ERR_INVALID, "--prompt-tokens and --max-tokens are %lld together; accepted: up to %d",
                       (long long)num_tokens, max_tokens);
    engine_options.progress = generate_progress_load;
    engine_options.progress_user = &run.progress;
    fv_status status = fv_engine_create(&run.engine, NULL, &engine_options);
    generate_progress_erase(&run.progress);
    if (status == FV_OK) status = fv_engine_get_info(&run.info, run.engine);
    if (status == FV_OK) status = create_session(&run, (int32_t)num_tokens);
    if (status == FV_OK) status = add_prompt(&run);
    while (status == FV_OK && num_unfinished > 0) status = fv_session_step(&num_unfinished, run.session);
    if (run.has_failed) status = fv_fail(FV_ERR_INTERNAL, "no logit is a number: nothing to sample");
    if (status == FV_OK) status = report(&run);
    fv_session_destroy(run.session);
    fv_engine_destroy(run.engine);
    free(run.seconds);
    return status;
}
