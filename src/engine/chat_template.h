/* Chat templates. A model file carries its template as a Jinja program. fovea runs no such program:
 * it recognises ChatML, the form that most small models use, and writes that form itself:
 *
 *   <|im_start|>system\nTEXT<|im_end|>\n<|im_start|>user\nTEXT<|im_end|>\n<|im_start|>assistant\n
 */
#ifndef FV_ENGINE_CHAT_TEMPLATE_H
#define FV_ENGINE_CHAT_TEMPLATE_H

#include "engine/tokenizer.h"

typedef struct fv_chat_message {
    const char *role; /* "system", "user", "assistant" */
    const char *content;
} fv_chat_message;

typedef struct fv_chat_template {
    char *default_system;  /* what the file's template puts before a chat without a system message; or NULL */
    int32_t message_start; /* <|im_start|> */
    int32_t message_end;   /* <|im_end|> */
} fv_chat_template;

/* Reads tokenizer.chat_template. FV_ERR_UNSUPPORTED with the reason when the file has none or its
 * template is not ChatML, or when the tokens of ChatML are not in the vocabulary. */
fv_status fv_chat_template_init(fv_chat_template *chat_template, const fv_gguf *gguf, const fv_tokenizer *tokenizer);
void fv_chat_template_deinit(fv_chat_template *chat_template);

/* The chat as text, for display: zero-terminated, the caller frees it. With `open_reply` it ends where
 * the assistant's reply begins. */
fv_status fv_chat_template_format(char **text, const fv_chat_template *chat_template, const fv_chat_message *messages,
                                  int32_t num_messages, bool open_reply);

/* Appends the tokens of the chat. Only the template itself writes control tokens: one that stands in
 * a message stays text, so that a message cannot end its turn or speak for another role. */
fv_status fv_chat_template_encode(fv_token_list *list, const fv_chat_template *chat_template,
                                  const fv_tokenizer *tokenizer, const fv_chat_message *messages, int32_t num_messages,
                                  bool open_reply);

#endif
