#include "bench/samples.h"

#include <stdlib.h>
#include <time.h>

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of two in the middle their mean. */
static double median_of(const double *sorted, int32_t count)
{
    return (sorted[(count - 1) / 2] + sorted[count / 2]) / 2;
}

fv_samples fv_samples_of(double *values, int32_t count)
{
    if (count == 0) return (fv_samples){0};
    qsort(values, (size_t)count, sizeof(*values), compare_doubles);
    const double median = median_of(values, count);
    return (fv_samples){
        .median_us = median,
        .min_us = values[0],
        .quartile_us = values[count / 4],
        .spread = median > 0 ? (values[count * 3 / 4] - values[count / 4]) / median : 0,
        .count = count,
    };
}

double fv_now_us(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}
