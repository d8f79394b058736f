/* The executor: how CPU work is spread. Either the caller's, or a pool of threads of our own. */
#ifndef FV_CORE_EXECUTOR_H
#define FV_CORE_EXECUTOR_H

#include "fovea/context.h"

/* Runs task(user, i, worker) for each i in [0, num_tasks); returns when all have ended. A loop of one
 * task, or an executor of one worker, runs in the calling thread. */
static inline void fv_executor_run(const fv_executor *executor, int64_t num_tasks, fv_task_fn task, void *user)
{
    if (num_tasks <= 0) return;
    if (num_tasks == 1 || executor->num_workers <= 1) {
        for (int64_t i = 0; i < num_tasks; i++) task(user, i, 0);
        return;
    }
    executor->parallel_for(executor->user, num_tasks, task, user);
}

typedef struct fv_thread_pool fv_thread_pool;

/* A pool of `num_threads` workers, the caller of the loop among them, in memory of `allocator`. Idle workers
 * spin for some tens of microseconds, then sleep; they take no signals of the process. Survives fork in the child as a
 * pool of one. */
fv_status fv_thread_pool_create(fv_thread_pool **pool, const fv_allocator *allocator, int32_t num_threads);
void fv_thread_pool_destroy(fv_thread_pool *pool); /* takes NULL */

/* The executor that uses the pool; valid as long as the pool. */
fv_executor fv_thread_pool_executor(fv_thread_pool *pool);

#endif
