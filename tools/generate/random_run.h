/* `fovea generate --random-weights`: how long a token takes along the context. */
#ifndef FV_TOOLS_GENERATE_RANDOM_RUN_H
#define FV_TOOLS_GENERATE_RANDOM_RUN_H

#include "generate/options.h"

/* One random prompt, then max_tokens of decoding, and the report on standard output: a table, or JSON. */
fv_status generate_random_run(const generate_options *options);

#endif
