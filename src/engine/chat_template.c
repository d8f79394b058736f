/* Text and tokens of a chat come from one walk over its parts, so that they cannot differ. */
#include "engine/chat_template.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A message is  start role \n content end \n  in all forms. */
typedef struct fv_chat_form {
    const char *name;
    const char *start; /* also what the form is recognised by */
    const char *end;
    const char *assistant;       /* the name of that role */
    bool puts_system_in_message; /* the system message is the beginning of the first other one */
    bool trims;                  /* content without white space around it */
} fv_chat_form;

static const fv_chat_form forms[] = {
    {"ChatML", "<|im_start|>", "<|im_end|>", "assistant", false, false},
    {"Gemma", "<start_of_turn>", "<end_of_turn>", "model", true, true},
};

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
static fv_text find_default_system(fv_text source, const fv_chat_form *form)
{
    /* The line end is a real one, or the two characters of a Jinja escape. */
    static const char *const line_ends[] = {"\n", "\\n"};
    for (int32_t i = 0; i < FV_ARRAY_LEN(line_ends); i++) {
        char opening[64];
        snprintf(opening, sizeof(opening), "%ssystem%s", form->start, line_ends[i]);
        fv_text rest = source;
        for (const char *found; (found = find_in(rest, opening)) != NULL;) {
            rest = from_pointer(rest, found + strlen(opening));
            const char *end = find_in(rest, form->end);
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

static fv_status find_form(const fv_chat_form **form, fv_text source, const char *path)
{
    char accepted[128] = "";
    for (int32_t i = 0; i < FV_ARRAY_LEN(forms); i++) {
        *form = &forms[i];
        if (find_in(source, forms[i].start)) return FV_OK;
        const size_t used = strlen(accepted);
        snprintf(accepted + used, sizeof(accepted) - used, "%s%s (%s)", i > 0 ? ", " : "", forms[i].name,
                 forms[i].start);
    }
    return fv_fail(FV_ERR_UNSUPPORTED, "%s: the chat template has a form that is not known; accepted: %s", path,
                   accepted);
}

static fv_status find_markers(fv_chat_template *chat_template, fv_text source, fv_tokenizer *tokenizer,
                              const char *path)
{
    const fv_chat_form *form = chat_template->form;
    chat_template->message_start = fv_tokenizer_find_special(tokenizer, form->start);
    chat_template->message_end = fv_tokenizer_find_special(tokenizer, form->end);
    if (chat_template->message_start == FV_NO_TOKEN || chat_template->message_end == FV_NO_TOKEN) {
        return fv_fail(FV_ERR_UNSUPPORTED,
                       "%s: the chat template is %s, but the vocabulary lacks %s or %s of kind control or user-defined",
                       path, form->name, form->start, form->end);
    }
    /* Some files call them user-defined, which is found in any text: a message could forge a turn. */
    fv_tokenizer_make_control(tokenizer, form->start);
    fv_tokenizer_make_control(tokenizer, form->end);
    chat_template->bos = find_in(source, "bos_token") ? fv_tokenizer_bos(tokenizer) : FV_NO_TOKEN;
    chat_template->bos_text = fv_tokenizer_token_bytes(tokenizer, chat_template->bos);
    return FV_OK;
}

fv_status fv_chat_template_init(fv_chat_template *chat_template, const fv_gguf *gguf, fv_tokenizer *tokenizer)
{
    *chat_template = (fv_chat_template){0};
    static const char key[] = "tokenizer.chat_template";
    const char *path = fv_gguf_path(gguf);
    if (!fv_gguf_has(gguf, key)) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: the file has no chat template (%s)", path, key);
    }
    fv_text source;
    fv_status status = fv_gguf_find_string(&source, gguf, key);
    if (status == FV_OK) status = find_form(&chat_template->form, source, path);
    if (status == FV_OK) status = find_markers(chat_template, source, tokenizer, path);
    if (status != FV_OK) return status;
    const fv_text system = find_default_system(source, chat_template->form);
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

/* The content, without white space around it if the form wants it so. */
static fv_text content_of(const fv_chat_form *form, const char *content)
{
    static const char spaces[] = " \t\n\v\f\r";
    fv_text text = {content, strlen(content)};
    while (form->trims && text.length > 0 && strchr(spaces, text.data[text.length - 1])) text.length--;
    while (form->trims && text.length > 0 && strchr(spaces, text.data[0])) text = from_pointer(text, text.data + 1);
    return text;
}

static const char *name_of_role(const fv_chat_form *form, const char *role)
{
    return strcmp(role, "assistant") == 0 ? form->assistant : role;
}

/* `system` is put before the content, or NULL. */
static fv_status write_message(const fv_chat_template *chat_template, const char *system,
                               const fv_chat_message *message, take_part *take, void *context)
{
    const fv_chat_form *form = chat_template->form;
    const char *role = name_of_role(form, message->role);
    const fv_text content = content_of(form, message->content);
    const size_t body_bytes = strlen(role) + 1 + (system ? strlen(system) + 2 : 0) + content.length;
    char *body = malloc(body_bytes + 1);
    if (!body) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a chat message of %zu bytes", content.length);
    snprintf(body, body_bytes + 1, "%s\n%s%s", role, system ? system : "", system ? "\n\n" : "");
    memcpy(body + body_bytes - content.length, content.data, content.length);

    /* One part: tokens may cross from the line end into the content. */
    fv_status status = take(context, chat_template->message_start, (fv_text){form->start, strlen(form->start)});
    if (status == FV_OK) status = take(context, FV_NO_TOKEN, (fv_text){body, body_bytes});
    if (status == FV_OK) status = take(context, chat_template->message_end, (fv_text){form->end, strlen(form->end)});
    if (status == FV_OK) status = take(context, FV_NO_TOKEN, (fv_text){"\n", 1});
    free(body);
    return status;
}

static fv_status write_reply_opening(const fv_chat_template *chat_template, take_part *take, void *context)
{
    const fv_chat_form *form = chat_template->form;
    char opening[32];
    const int length = snprintf(opening, sizeof(opening), "%s\n", form->assistant);
    const fv_status status = take(context, chat_template->message_start, (fv_text){form->start, strlen(form->start)});
    return status == FV_OK ? take(context, FV_NO_TOKEN, (fv_text){opening, (size_t)length}) : status;
}

static fv_status write_chat(const fv_chat_template *chat_template, const fv_chat_message *messages,
                            int32_t num_messages, bool open_reply, take_part *take, void *context)
{
    fv_status status = FV_OK;
    const fv_chat_message by_default = {"system", chat_template->default_system};
    const char *system = NULL; /* that goes into the next message */
    if (chat_template->bos != FV_NO_TOKEN) status = take(context, chat_template->bos, chat_template->bos_text);
    const bool has_system = num_messages > 0 && strcmp(messages[0].role, "system") == 0;
    if (status == FV_OK && num_messages > 0 && !has_system && by_default.content) {
        status = write_message(chat_template, NULL, &by_default, take, context);
    }
    if (has_system && chat_template->form->puts_system_in_message) {
        if (num_messages == 1)
            return fv_fail(FV_ERR_INVALID, "a chat of a system message alone; accepted: with another");
        system = messages[0].content;
    }
    for (int32_t i = system ? 1 : 0; i < num_messages && status == FV_OK; i++) {
        status = write_message(chat_template, system, &messages[i], take, context);
        system = NULL;
    }
    if (status != FV_OK || !open_reply) return status;
    return write_reply_opening(chat_template, take, context);
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
