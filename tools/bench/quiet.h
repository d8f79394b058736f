/* Whether a worker has its core to itself. On a shared machine the core's other hardware thread may be somebody else's: it takes no
 * multiply-adds from a loop of nothing else, but a third to a half of everything else a core does, for milliseconds to minutes
 * (docs/notes/cpu-portable.md, cpu-amx.md). A loop of integer additions tells. */
#ifndef FV_TOOLS_BENCH_QUIET_H
#define FV_TOOLS_BENCH_QUIET_H

#include "fovea/context.h"

/* A loop of integer additions on all workers at once: microseconds of the slowest one, some five; infinite where the workers do
 * not come together within ten milliseconds. */
double fv_quiet_probe(fv_context *context);

/* A probe of at most so many microseconds found nobody beside the workers: 1.1 times the least of all probes of this process. A
 * process that never had its cores to itself cannot know; limits of several, on one machine, tell.
 * 0: the workers never came together. */
double fv_quiet_limit(void);

#endif
