/* Where the numbers of a JSON file come from. */
#ifndef FV_TOOLS_BENCH_ORIGIN_H
#define FV_TOOLS_BENCH_ORIGIN_H

#include "json.h"

/* The command as it was typed, date, version and, where scripts set FOVEA_COMMIT, the commit. */
void fv_json_origin(fv_json *json, int argc, char **argv);

#endif
