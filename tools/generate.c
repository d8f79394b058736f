/* fovea generate: prompts in, text out. One prompt streams to standard output as it is written;
 * several run together and each is printed when it and those before it are done. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"

#include "args.h"
#include "core/error.h"
#include "engine/engine.h"
#include "generate/options.h"
#include "generate/progress.h"
#include "generate/random_run.h"
#include "generate/replies.h"
#include "generate/report.h"

typedef struct generate_run {
    const generate_options *options;
    fv_engine *engine;
    fv_session *session;
    generate_replies replies;
    int32_t num_printed; /* of several prompts */
    generate_progress progress;
    fv_status failure; /* inside a callback */
} generate_run;

static void show_prefill(generate_run *run)
{
    fv_session_stats stats = {.struct_size = sizeof(stats)};
    if (!run->progress.is_wanted || fv_session_get_stats(&stats, run->session) != FV_OK) return;
    if (stats.prompt_tokens_done < stats.prompt_tokens_total) {
        run->progress.is_shown = true;
        fprintf(stderr, "\rprefill %lld of %lld tokens", (long long)stats.prompt_tokens_done,
                (long long)stats.prompt_tokens_total);
    } else {
        generate_progress_erase(&run->progress);
    }
    fflush(stderr);
}

/* Text that nobody takes is not worth its time: the run ends after the step. */
static void flush_text(generate_run *run)
{
    const fv_status status = fv_output_flush();
    if (status != FV_OK) run->failure = status;
}

static void print_done(generate_run *run)
{
    for (; run->num_printed < run->replies.count; run->num_printed++) {
        const generate_reply *reply = &run->replies.all[run->num_printed];
        if (reply->error) continue;
        if (reply->finish == FV_FINISH_NONE) return;
        printf("[%d] %s\n", run->num_printed + 1, reply->prompt);
        fwrite(reply->text, 1, reply->text_bytes, stdout);
        printf("\n\n");
        flush_text(run);
    }
}

static void take_token(void *user, const fv_token_event *event)
{
    generate_run *run = user;
    generate_reply *reply = &run->replies.all[run->replies.of_requests[event->request]];
    const fv_status status = generate_reply_append(reply, event);
    if (status != FV_OK) run->failure = status;
    if (status != FV_OK || run->options->json) return;
    generate_progress_erase(&run->progress);
    if (run->replies.count > 1) {
        print_done(run);
        return;
    }
    if (event->text_bytes > 0) fwrite(event->text, 1, event->text_bytes, stdout);
    if (event->finish != FV_FINISH_NONE) fputc('\n', stdout);
    flush_text(run);
}

static fv_status encode_prompt(int32_t **tokens, int32_t *num_tokens, const generate_run *run, bool is_chat,
                               const char *prompt)
{
    if (!is_chat) return fv_engine_encode(tokens, num_tokens, run->engine, prompt, strlen(prompt));
    fv_message messages[2];
    int32_t num_messages = 0;
    if (run->options->system) messages[num_messages++] = (fv_message){"system", run->options->system};
    messages[num_messages++] = (fv_message){"user", prompt};
    return fv_engine_encode_chat(tokens, num_tokens, run->engine, messages, num_messages);
}

/* Says where the model does not see all of a text. */
static fv_status note_dropped(const generate_run *run, const char *name, const char *text)
{
    int64_t num_dropped;
    const fv_status status = fv_engine_count_dropped(&num_dropped, run->engine, text, strlen(text));
    if (num_dropped > 0) {
        fprintf(stderr, "fovea generate: note: bytes of %s that no token stands for, left out: %lld\n", name,
                (long long)num_dropped);
    }
    return status;
}

/* One of several prompts that cannot be answered is kept with its error, and the others are. */
static fv_status add_prompt(generate_run *run, bool is_chat, int32_t index)
{
    int32_t *tokens = NULL, num_tokens = 0;
    const char *prompt = run->replies.all[index].prompt;
    char name[32] = "the prompt";
    if (run->replies.count > 1) snprintf(name, sizeof(name), "prompt %d", index + 1);
    fv_status status = encode_prompt(&tokens, &num_tokens, run, is_chat, prompt);
    if (status == FV_OK) status = note_dropped(run, name, prompt);
    if (status == FV_OK && num_tokens == 0) status = fv_fail(FV_ERR_INVALID, "the prompt is empty");
    if (status == FV_OK) {
        fv_request request = run->options->sampling;
        request.prompt = tokens;
        request.num_prompt_tokens = num_tokens;
        request.on_token = take_token;
        request.user = run;
        status = fv_session_add(NULL, run->session, &request);
    }
    fv_engine_free_tokens(tokens);
    if (status == FV_OK) generate_replies_take(&run->replies, index);
    const bool is_of_prompt = status == FV_ERR_INVALID || status == FV_ERR_NO_SPACE;
    if (status == FV_OK || run->replies.count == 1) return status;
    if (!is_of_prompt) return fv_fail(status, "%s: %s", name, fv_last_error());
    fprintf(stderr, "fovea generate: note: %s is not answered: %s\n", name, fv_last_error());
    return generate_replies_refuse(&run->replies, index);
}

static fv_status add_prompts(generate_run *run)
{
    fv_engine_info info = {.struct_size = sizeof(info)};
    fv_status status = fv_engine_get_info(&info, run->engine);
    if (status != FV_OK) return status;
    const bool is_chat = !run->options->raw && info.has_chat_template;
    if (!run->options->raw && !is_chat) {
        if (run->options->system) return fv_fail(FV_ERR_UNSUPPORTED, "--system: %s", info.chat_why_not);
        fprintf(stderr, "fovea generate: note: no chat, the prompt is continued as it is: %s\n", info.chat_why_not);
    }
    if (run->options->system) status = note_dropped(run, "the system message", run->options->system);
    for (int32_t i = 0; i < run->replies.count && status == FV_OK; i++) status = add_prompt(run, is_chat, i);
    return status;
}

static fv_status write_replies(generate_run *run)
{
    int32_t num_unfinished = run->replies.num_requests;
    while (num_unfinished > 0) {
        const fv_status status = fv_session_step(&num_unfinished, run->session);
        if (status != FV_OK) return status;
        if (run->failure != FV_OK) return run->failure;
        show_prefill(run);
    }
    return FV_OK;
}

/* Of replies that ended early or never began; the others are told all the same. */
static fv_status find_failed(const generate_run *run)
{
    for (int32_t i = 0; i < run->replies.count; i++) {
        if (run->replies.all[i].finish != FV_FINISH_FAILED) continue;
        return fv_fail(
            FV_ERR_INTERNAL,
            "prompt %d: no logit is a number after %d tokens, nothing to sample from: the model's weights are "
            "damaged, or too large for --dtype or the cache's dtype",
            i + 1, run->replies.all[i].num_tokens);
    }
    const int32_t num_refused = run->replies.count - run->replies.num_requests;
    if (num_refused == 0) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "%d of %d prompts are not answered, as noted above", num_refused,
                   run->replies.count);
}

static fv_status report(generate_run *run)
{
    generate_summary summary = {.model = run->options->model};
    for (int32_t i = 0; i < FV_MAX_LAYER_GROUPS; i++) summary.attention[i] = fv_session_describe(run->session, i);
    summary.engine.struct_size = sizeof(summary.engine);
    summary.session.struct_size = sizeof(summary.session);
    fv_status status = fv_engine_get_info(&summary.engine, run->engine);
    if (status == FV_OK) status = fv_session_get_stats(&summary.session, run->session);
    if (status == FV_OK && run->options->json) generate_print_json(stdout, &summary, &run->replies);
    if (status == FV_OK) status = fv_output_flush(); /* before what goes to standard error */
    if (status != FV_OK) return status;
    if (!run->options->json) fputc('\n', stderr);
    generate_print_summary(stderr, &summary, run->options->profile);
    return FV_OK;
}

static fv_status run_generate(generate_run *run)
{
    fv_status status = generate_replies_init(&run->replies, run->options);
    if (status != FV_OK) return status;
    fv_engine_options engine_options = run->options->engine;
    engine_options.progress = generate_progress_load;
    engine_options.progress_user = &run->progress;
    status = fv_engine_create(&run->engine, run->options->model, &engine_options);
    if (status == FV_OK) status = fv_session_create(&run->session, run->engine, &run->options->session);
    if (status == FV_OK) status = add_prompts(run);
    if (status == FV_OK) status = write_replies(run);
    if (status == FV_OK) status = report(run);
    if (status == FV_OK) status = find_failed(run);
    generate_progress_erase(&run->progress);
    fv_session_destroy(run->session);
    fv_engine_destroy(run->engine);
    generate_replies_deinit(&run->replies);
    return status;
}

int fv_cmd_generate(int argc, char **argv)
{
    generate_options options;
    generate_action action;
    int code = 0;
    if (generate_options_init(&options, &action, argc, argv) != FV_OK) {
        code = fv_args_fail("generate");
        goto done;
    }
    if (action == GENERATE_HELP) {
        generate_print_help();
        goto done;
    }
    if (action == GENERATE_VERSION) {
        printf("fovea %s\n", fv_version());
        goto done;
    }
    if (options.backend_is_from_environment) {
        fprintf(stderr, "fovea generate: note: attention backend %s from VLLM_ATTENTION_BACKEND\n", options.backend);
    }
    generate_run run = {
        .options = &options,
        .progress = {.loads = "loading", .is_wanted = options.progress},
    };
    const fv_status status = options.engine.random_weights ? generate_random_run(&options) : run_generate(&run);
    if (status != FV_OK) code = fv_run_fail("generate");

done:
    generate_options_deinit(&options);
    return code;
}
