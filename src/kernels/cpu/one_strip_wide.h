/* One strip with vectors of 16 lanes, always over panels (one_strip_panels.h). */
#ifndef FV_KERNELS_CPU_ONE_STRIP_WIDE_H
#define FV_KERNELS_CPU_ONE_STRIP_WIDE_H

#include "kernels/cpu/one_strip_panels.h"

enum {
    FV_ONE_MOST_ROWS = FV_PANELS_MOST_ROWS,
    FV_ONE_STEP_KEYS = FV_PANELS_STEP_KEYS,
    FV_ONE_STEP_COLUMNS = FV_STRIP_PANEL,
    FV_ONE_STEP_DEPTH = FV_STRIP_PANEL,
};

/* Fewer are groups of four, three where the cache is slow to convert: empty lanes take as long as others. */
static inline int32_t fv_one_least_rows(const fv_attend_params *params)
{
    return params->cache.dtype == FV_DTYPE_F8_E4M3 ? 9 : 13;
}

static inline int32_t fv_one_num_vectors(int32_t num_rows) { return fv_strip_num_vectors(num_rows); }

static inline int32_t fv_one_serves(const fv_attend_job *job, int64_t num_rows)
{
    return (void)num_rows, fv_panels_serve(job);
}

static inline int32_t fv_one_in_panels(const fv_attend_job *job) { return (void)job, 1; }

#endif
