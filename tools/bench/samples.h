/* Times of a measurement, and what they come to. */
#ifndef FV_TOOLS_BENCH_SAMPLES_H
#define FV_TOOLS_BENCH_SAMPLES_H

#include "fovea/status.h"

typedef struct fv_samples {
    double median_us;
    double min_us;
    double quartile_us; /* the first */
    double spread;      /* (third quartile - first quartile) / median */
    int32_t count;
} fv_samples;

/* Sorts `values`; count 0 gives zeros. */
fv_samples fv_samples_of(double *values, int32_t count);

/* Monotonic clock. */
double fv_now_us(void);

#endif
