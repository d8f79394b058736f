#include "generate/replies.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/error.h"

static fv_status append_prompt(generate_replies *replies, const char *prompt, size_t bytes)
{
    if (replies->count == replies->capacity) {
        const int32_t capacity = replies->capacity ? 2 * replies->capacity : 16;
        generate_reply *grown = realloc(replies->all, (size_t)capacity * sizeof(*grown));
        if (!grown) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d prompts", capacity);
        replies->all = grown;
        replies->capacity = capacity;
    }
    char *copy = malloc(bytes + 1);
    if (!copy) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a prompt of %zu bytes", bytes);
    memcpy(copy, prompt, bytes);
    copy[bytes] = '\0';
    replies->all[replies->count++] = (generate_reply){.prompt = copy};
    return FV_OK;
}

/* 1: a byte order mark begins the line, as some editors begin a file. */
static bool has_mark(const char *line, size_t bytes) { return bytes >= 3 && memcmp(line, "\xef\xbb\xbf", 3) == 0; }

static fv_status read_lines(generate_replies *replies, FILE *file, const char *path)
{
    char *line = NULL;
    size_t capacity = 0;
    ssize_t length;
    bool is_first = true;
    fv_status status = FV_OK;
    while (status == FV_OK && (length = getline(&line, &capacity, file)) >= 0) {
        size_t bytes = (size_t)length;
        while (bytes > 0 && (line[bytes - 1] == '\n' || line[bytes - 1] == '\r')) bytes--;
        const size_t mark = is_first && has_mark(line, bytes) ? 3 : 0;
        is_first = false;
        if (memchr(line, '\0', bytes)) {
            status = fv_fail(FV_ERR_IO, "%s: a zero byte in prompt %d; accepted: text", path, replies->count + 1);
        } else if (bytes > mark) {
            status = append_prompt(replies, line + mark, bytes - mark);
        }
    }
    if (status == FV_OK && !feof(file)) /* no memory for a line is no error of the stream */
        status = fv_fail(errno == ENOMEM ? FV_ERR_NO_MEMORY : FV_ERR_IO, "%s: prompt %d: %s", path, replies->count + 1,
                         strerror(errno));
    free(line);
    return status;
}

static fv_status read_file(generate_replies *replies, const char *path)
{
    const bool is_stdin = strcmp(path, "-") == 0;
    FILE *file = is_stdin ? stdin : fopen(path, "r");
    if (!file) return fv_fail(FV_ERR_IO, "%s: %s", path, strerror(errno));
    fv_status status = read_lines(replies, file, path);
    if (!is_stdin) fclose(file);
    if (status == FV_OK && replies->count == 0) status = fv_fail(FV_ERR_IO, "%s: no prompt in it", path);
    return status;
}

fv_status generate_replies_init(generate_replies *replies, const generate_options *options)
{
    *replies = (generate_replies){0};
    fv_status status = options->prompt ? append_prompt(replies, options->prompt, strlen(options->prompt))
                                       : read_file(replies, options->prompts_file);
    if (status == FV_OK) replies->of_requests = calloc((size_t)replies->count, sizeof(*replies->of_requests));
    if (status == FV_OK && !replies->of_requests)
        status = fv_fail(FV_ERR_NO_MEMORY, "no memory for %d requests", replies->count);
    if (status != FV_OK) generate_replies_deinit(replies);
    return status;
}

void generate_replies_deinit(generate_replies *replies)
{
    for (int32_t i = 0; i < replies->count; i++) {
        free(replies->all[i].prompt);
        free(replies->all[i].text);
        free(replies->all[i].tokens);
        free(replies->all[i].error);
    }
    free(replies->all);
    free(replies->of_requests);
    *replies = (generate_replies){0};
}

void generate_replies_take(generate_replies *replies, int32_t index)
{
    replies->of_requests[replies->num_requests++] = index;
}

fv_status generate_replies_refuse(generate_replies *replies, int32_t index)
{
    replies->all[index].error = strdup(fv_last_error());
    return replies->all[index].error ? FV_OK : fv_fail(FV_ERR_NO_MEMORY, "no memory for an error");
}

fv_status generate_reply_append(generate_reply *reply, const fv_token_event *event)
{
    if (reply->text_bytes + event->text_bytes + 1 > reply->text_capacity) {
        const size_t capacity = 2 * (reply->text_bytes + event->text_bytes + 1);
        char *grown = realloc(reply->text, capacity);
        if (!grown) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %zu bytes of text", capacity);
        reply->text = grown;
        reply->text_capacity = capacity;
    }
    if (event->text_bytes > 0) memcpy(reply->text + reply->text_bytes, event->text, event->text_bytes);
    reply->text_bytes += event->text_bytes;
    reply->text[reply->text_bytes] = '\0';

    reply->finish = event->finish;
    if (event->token < 0) return FV_OK; /* an end without a token */
    if (reply->num_tokens == reply->token_capacity) {
        const int32_t capacity = reply->token_capacity ? 2 * reply->token_capacity : 64;
        int32_t *grown = realloc(reply->tokens, (size_t)capacity * sizeof(*grown));
        if (!grown) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d tokens", capacity);
        reply->tokens = grown;
        reply->token_capacity = capacity;
    }
    reply->tokens[reply->num_tokens++] = event->token;
    return FV_OK;
}
