/* Text and tokens of a chat come from one walk over its parts, so that they cannot differ. */
#include "engine/chat_template.h"

#include <stdlib.h>
#include <string.h>

#define MESSAGE_START "<|im_start|>"
#define MESSAGE_END "<|im_end|>"

/* --- recognising --------------------------------------------------------------------------------- */

static const char *find_in(fv_text text, const char *wanted)
{
    return memmem(text.data, text.length, wanted, strlen(wanted));
}

/* The part of `text` from `begin` on. */
static fv_text from_pointer(fv_text text, const char *begin)
{
    return (fv_text){begin, text.length - (size_t)(begin - text.data)};
}

/* The system message that the template writes by itself: it stands there literally between the markers,
 * where the message of a caller would be an expression with quotes or braces around it. */
static fv_text find_default_system(fv_text source)
{
    /* The line end is a real one, or the two characters of a Jinja escape. */
    static const char *const openings[] = {MESSAGE_START "system\n", MESSAGE_START "system\\n"};
    for (int32_t i = 0; i < FV_ARRAY_LEN(openings); i++) {
        fv_text rest = source;
        for (const char *found; (found = find_in(rest, openings[i])) != NULL;) {
            rest = from_pointer(rest, found + strlen(openings[i]));
            const char *end = find_in(rest, MESSAGE_END);
            if (!end) break;
            const fv_text literal = {rest.data, (size_t)(end - rest.data)};
            bool is_literal = literal.length > 0;
            for (size_t at = 0; at < literal.length && is_literal; at++) {
                is_literal = memchr("'\"{}\\", literal.data[at], 5) == NULL;
            }
            if (is_literal) return literal;
        }
    }
    return (fv_text){NULL, 0};
}

fv_status fv_chat_template_init(fv_chat_template *chat_template, const fv_gguf *gguf, const fv_tokenizer *tokenizer)
{
    *chat_template = (fv_chat_template){0};
    static const char key[] = "tokenizer.chat_template";
    if (!fv_gguf_has(gguf, key)) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: the file has no chat template (%s)", fv_gguf_path(gguf), key);
    }
    fv_text source;
    const fv_status status = fv_gguf_find_string(&source, gguf, key);
    if (status != FV_OK) return status;
    if (!find_in(source, MESSAGE_START)) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: the chat template is not ChatML; accepted: templates with %s",
                       fv_gguf_path(gguf), MESSAGE_START);
    }
    chat_template->message_start = fv_tokenizer_find_special(tokenizer, MESSAGE_START);
    chat_template->message_end = fv_tokenizer_find_special(tokenizer, MESSAGE_END);
    if (chat_template->message_start == FV_NO_TOKEN || chat_template->message_end == FV_NO_TOKEN) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: the chat template is ChatML, but the vocabulary lacks %s or %s",
                       fv_gguf_path(gguf), MESSAGE_START, MESSAGE_END);
    }
    const fv_text system = find_default_system(source);
    if (!system.data) return FV_OK;
    chat_template->default_system = strndup(system.data, system.length);
    if (!chat_template->default_system) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a chat template");
    return FV_OK;
}

void fv_chat_template_deinit(fv_chat_template *chat_template)
{
    free(chat_template->default_system);
    *chat_template = (fv_chat_template){0};
}

/* --- writing ------------------------------------------------------------------------------------- */

/* Where the parts of a chat go. `token` is one of the two markers, or FV_NO_TOKEN for plain text. */
typedef fv_status take_part(void *context, int32_t token, fv_text text);

static fv_status write_message(const fv_chat_template *chat_template, const char *role, const char *content,
                               take_part *take, void *context)
{
    const size_t role_length = strlen(role), content_length = strlen(content);
    char *body = malloc(role_length + content_length + 2);
    if (!body) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a chat message of %zu bytes", content_length);
    memcpy(body, role, role_length);
    body[role_length] = '\n';
    memcpy(body + role_length + 1, content, content_length);

    /* One part: tokens may cross from the line end into the content. */
    fv_status status = take(context, chat_template->message_start, (fv_text){MESSAGE_START, strlen(MESSAGE_START)});
    if (status == FV_OK) status = take(context, FV_NO_TOKEN, (fv_text){body, role_length + 1 + content_length});
    if (status == FV_OK) {
        status = take(context, chat_template->message_end, (fv_text){MESSAGE_END, strlen(MESSAGE_END)});
    }
    if (status == FV_OK) status = take(context, FV_NO_TOKEN, (fv_text){"\n", 1});
    free(body);
    return status;
}

static fv_status write_chat(const fv_chat_template *chat_template, const fv_chat_message *messages,
                            int32_t num_messages, bool open_reply, take_part *take, void *context)
{
    fv_status status = FV_OK;
    const bool has_system = num_messages > 0 && strcmp(messages[0].role, "system") == 0;
    if (num_messages > 0 && !has_system && chat_template->default_system) {
        status = write_message(chat_template, "system", chat_template->default_system, take, context);
    }
    for (int32_t i = 0; i < num_messages && status == FV_OK; i++) {
        status = write_message(chat_template, messages[i].role, messages[i].content, take, context);
    }
    if (status != FV_OK || !open_reply) return status;
    status = take(context, chat_template->message_start, (fv_text){MESSAGE_START, strlen(MESSAGE_START)});
    return status == FV_OK ? take(context, FV_NO_TOKEN, (fv_text){"assistant\n", strlen("assistant\n")}) : status;
}

typedef struct growing_text {
    char *data;
    size_t length;
} growing_text;

static fv_status append_text(void *context, int32_t token, fv_text text)
{
    (void)token;
    growing_text *grown = context;
    char *data = realloc(grown->data, grown->length + text.length + 1);
    if (!data) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a chat of %zu bytes", grown->length + text.length);
    grown->data = data;
    memcpy(grown->data + grown->length, text.data, text.length);
    grown->length += text.length;
    grown->data[grown->length] = '\0';
    return FV_OK;
}

fv_status fv_chat_template_format(char **text, const fv_chat_template *chat_template, const fv_chat_message *messages,
                                  int32_t num_messages, bool open_reply)
{
    *text = NULL;
    growing_text grown = {0};
    fv_status status = append_text(&grown, FV_NO_TOKEN, (fv_text){"", 0}); /* an empty chat is an empty text */
    if (status == FV_OK) status = write_chat(chat_template, messages, num_messages, open_reply, append_text, &grown);
    if (status != FV_OK) {
        free(grown.data);
        return status;
    }
    *text = grown.data;
    return FV_OK;
}

typedef struct growing_tokens {
    fv_token_list *list;
    const fv_tokenizer *tokenizer;
} growing_tokens;

static fv_status append_tokens(void *context, int32_t token, fv_text text)
{
    growing_tokens *grown = context;
    if (token != FV_NO_TOKEN) return fv_token_list_append(grown->list, token);
    return fv_tokenizer_encode(grown->list, NULL, grown->tokenizer, text, FV_ENCODE_PLAIN);
}

fv_status fv_chat_template_encode(fv_token_list *list, const fv_chat_template *chat_template,
                                  const fv_tokenizer *tokenizer, const fv_chat_message *messages, int32_t num_messages,
                                  bool open_reply)
{
    growing_tokens grown = {list, tokenizer};
    return write_chat(chat_template, messages, num_messages, open_reply, append_tokens, &grown);
}
