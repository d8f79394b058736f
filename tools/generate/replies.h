/* The prompts of a run and what came back. */
#ifndef FV_TOOLS_GENERATE_REPLIES_H
#define FV_TOOLS_GENERATE_REPLIES_H

#include "fovea/engine.h"
#include "generate/options.h"

typedef struct generate_reply {
    char *prompt;
    char *text; /* what was written so far, terminated */
    size_t text_bytes;
    size_t text_capacity;
    int32_t *tokens;
    int32_t num_tokens;
    int32_t token_capacity;
    fv_finish finish;
} generate_reply;

typedef struct generate_replies {
    generate_reply *all;
    int32_t count;
    int32_t capacity;
} generate_replies;

/* One reply for each prompt of the options: the one given, or the lines of the file that are not
 * empty, without a byte order mark at its begin. FV_ERR_IO: the file cannot be read or has no prompt. */
fv_status generate_replies_init(generate_replies *replies, const generate_options *options);
void generate_replies_deinit(generate_replies *replies);

/* Appends what an event brings. */
fv_status generate_reply_append(generate_reply *reply, const fv_token_event *event);

#endif
