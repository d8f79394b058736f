/* The command line of `fovea generate`. */
#ifndef FV_TOOLS_GENERATE_OPTIONS_H
#define FV_TOOLS_GENERATE_OPTIONS_H

#include <stdbool.h>

#include "fovea/engine.h"

typedef struct generate_options {
    char *model; /* owned: given, or the default file */
    bool model_is_given;
    int32_t prompt_tokens; /* with engine.random_weights: of a random prompt; 0 else */
    const char *prompt;    /* NULL: prompts_file is given, or random weights */
    const char *prompts_file;
    const char *system; /* NULL: what the model's own template says */
    bool raw;           /* no chat template */
    bool json;
    bool profile;
    bool progress;
    fv_engine_options engine;
    fv_session_options session;
    char backend[64]; /* session.attention_backend, in upper case */
    bool backend_is_from_environment;
    fv_request sampling; /* max_tokens, temperature, top_k, top_p, seed, ignore_eos */
} generate_options;

typedef enum generate_action {
    GENERATE_RUN = 0,
    GENERATE_HELP,
    GENERATE_VERSION,
} generate_action;

/* Reads the arguments. FV_ERR_INVALID: wrong usage, with a text for the user. */
fv_status generate_options_init(generate_options *options, generate_action *action, int argc, char **argv);
void generate_options_deinit(generate_options *options);

void generate_print_help(void);

#endif
