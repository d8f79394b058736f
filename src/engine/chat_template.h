/* Chat templates. A model file carries its template as a Jinja program. fovea runs no such program:
 * it recognises the forms that it knows and writes them itself:
 *
 *   ChatML  <|im_start|>system\nTEXT<|im_end|>\n<|im_start|>user\nTEXT<|im_end|>\n<|im_start|>assistant\n
 *   Gemma   <bos><start_of_turn>user\nSYSTEM\n\nTEXT<end_of_turn>\n<start_of_turn>model\n
 */
#ifndef FV_ENGINE_CHAT_TEMPLATE_H
#define FV_ENGINE_CHAT_TEMPLATE_H

#include "engine/tokenizer.h"

typedef struct fv_chat_message {
    const char *role; /* "system", "user", "assistant" */
    const char *content;
} fv_chat_message;

typedef struct fv_chat_template {
    const struct fv_chat_form *form;
    char *default_system;  /* what the file's template puts before a chat without a system message; or NULL */
    int32_t message_start; /* <|im_start|>, <start_of_turn> */
    int32_t message_end;   /* <|im_end|>, <end_of_turn> */
    int32_t bos;           /* where the template begins with it; else FV_NO_TOKEN */
    fv_text bos_text;      /* belongs to the tokenizer */
} fv_chat_template;

/* Reads tokenizer.chat_template; keeps `tokenizer`, in which the form's markers become control tokens.
 * FV_ERR_UNSUPPORTED with the reason when the file has none or one of another form, or when the vocabulary has no
 * special tokens for the form. */
fv_status fv_chat_template_init(fv_chat_template *chat_template, const fv_gguf *gguf, fv_tokenizer *tokenizer);
void fv_chat_template_deinit(fv_chat_template *chat_template);

/* The chat as text, for display: zero-terminated, the caller frees it. With `open_reply` it ends where
 * the assistant's reply begins. */
fv_status fv_chat_template_format(char **text, const fv_chat_template *chat_template, const fv_chat_message *messages,
                                  int32_t num_messages, bool open_reply);

/* Appends the tokens of the chat. FV_ERR_INVALID: a system message that has no other to stand in. Only the template
 * itself writes control tokens: one that stands in a message stays text, so that a message cannot end its turn or speak
 * for another role. */
fv_status fv_chat_template_encode(fv_token_list *list, const fv_chat_template *chat_template,
                                  const fv_tokenizer *tokenizer, const fv_chat_message *messages, int32_t num_messages,
                                  bool open_reply);

#endif
