/* Time for statistics. */
#ifndef FV_ENGINE_CLOCK_H
#define FV_ENGINE_CLOCK_H

#include <time.h>

/* Seconds on a clock that never jumps. */
static inline double fv_clock_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#endif
