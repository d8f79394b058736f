/* The line on standard error that says how far a run is. */
#ifndef FV_TOOLS_GENERATE_PROGRESS_H
#define FV_TOOLS_GENERATE_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct generate_progress {
    const char *loads; /* what the weights are called */
    bool is_wanted, is_shown;
} generate_progress;

/* fv_engine_options.progress, with a generate_progress as its user. */
void generate_progress_load(void *user, int32_t done, int32_t total);

/* Takes the line off the terminal, if there is one. */
void generate_progress_erase(generate_progress *progress);

#endif
