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
    char *error; /* why the prompt is not answered; NULL: it is */
} generate_reply;

typedef struct generate_replies {
    generate_reply *all;
    int32_t count;
    int32_t capacity;
    int32_t *of_requests; /* [count]: the reply of each request that the session took */
    int32_t num_requests;
} generate_replies;

/* One reply for each prompt of the options: the one given, or the lines of the file that are not
 * empty, without a byte order mark at its begin. FV_ERR_IO: the file cannot be read or has no prompt. */
fv_status generate_replies_init(generate_replies *replies, const generate_options *options);
void generate_replies_deinit(generate_replies *replies);

/* The session took the prompt of reply `index` as its next request, or refused it for the last failure. */
void generate_replies_take(generate_replies *replies, int32_t index);
fv_status generate_replies_refuse(generate_replies *replies, int32_t index);

/* Appends what an event brings. */
fv_status generate_reply_append(generate_reply *reply, const fv_token_event *event);

#endif
