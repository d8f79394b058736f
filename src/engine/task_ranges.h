/* Tasks dealt out in even ranges, one for each worker, who takes its own in order, so that it goes through memory as the tasks
 * do; who has none left takes the last one of somebody else's. */
#ifndef FV_ENGINE_TASK_RANGES_H
#define FV_ENGINE_TASK_RANGES_H

#include <stdatomic.h>
#include <stdint.h>

#include "core/compiler.h"

/* A range's next task, and in the upper half its end. A line each, as workers write them all the time. */
typedef struct fv_task_range {
    _Alignas(FV_CACHE_LINE) atomic_ullong left;
} fv_task_range;

typedef struct fv_task_ranges {
    fv_task_range *ranges; /* the caller's memory */
    int64_t count;
} fv_task_ranges;

/* Tasks [0, num_tasks), fewer than 2^32, in of->count ranges. */
static inline void fv_task_ranges_fill(const fv_task_ranges *of, int64_t num_tasks)
{
    for (int64_t i = 0; i < of->count; i++) {
        const uint64_t next = (uint64_t)(num_tasks * i / of->count), end = (uint64_t)(num_tasks * (i + 1) / of->count);
        atomic_store_explicit(&of->ranges[i].left, end << 32 | next, memory_order_relaxed);
    }
}

/* A task of that range, the first or the last one; -1: none is left. */
static inline int64_t fv_task_range_take(fv_task_range *range, int32_t is_own)
{
    unsigned long long left = atomic_load_explicit(&range->left, memory_order_relaxed);
    for (;;) {
        const uint32_t next = (uint32_t)left, end = (uint32_t)(left >> 32);
        if (next >= end) return -1;
        const unsigned long long then = is_own ? left + 1 : left - (1ull << 32);
        if (atomic_compare_exchange_weak_explicit(&range->left, &left, then, memory_order_relaxed,
                                                  memory_order_relaxed))
            return is_own ? next : end - 1;
    }
}

/* A task for the worker of range `own`; -1: none is left. */
static inline int64_t fv_task_ranges_take(const fv_task_ranges *of, int64_t own)
{
    int64_t task = fv_task_range_take(&of->ranges[own], 1);
    for (int64_t i = 1; i < of->count && task < 0; i++)
        task = fv_task_range_take(&of->ranges[(own + i) % of->count], 0);
    return task;
}

#endif
