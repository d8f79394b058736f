/* What `fovea generate` says at the end: speeds, cache, who ran; as text or with the replies as JSON. */
#ifndef FV_TOOLS_GENERATE_REPORT_H
#define FV_TOOLS_GENERATE_REPORT_H

#include <stdio.h>

#include "generate/replies.h"

typedef struct generate_summary {
    const char *model;
    fv_engine_info engine;
    fv_session_stats session;
    const char *attention[FV_MAX_LAYER_GROUPS];
} generate_summary;

void generate_print_summary(FILE *file, const generate_summary *summary, bool with_profile);
void generate_print_json(FILE *file, const generate_summary *summary, const generate_replies *replies);

#endif
