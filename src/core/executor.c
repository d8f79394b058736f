/* The thread pool: one loop at a time, its tasks handed out by an atomic counter.
 *
 * A loop is opened under the lock; workers join it under the lock and leave by an atomic count, so a
 * worker that wakes late finds the loop closed and nobody waits for it. Idle workers spin first,
 * because a decode step is a chain of short loops; then they sleep. A second loop that comes while
 * one is running (another thread, or a task) runs in its own thread, alone. */
#include "core/executor.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "core/compiler.h"
#include "core/error.h"

#define SPIN_ROUNDS 4000 /* of 10 to 50 ns each, by the CPU's pause: 40 to 200 us */

typedef struct loop {
    fv_task_fn task;
    void *user;
    int64_t num_tasks;
} loop;

struct fv_thread_pool {
    fv_allocator allocator; /* of this memory */
    pthread_mutex_t lock;
    pthread_cond_t start;
    pthread_mutex_t caller; /* held by the thread whose loop is running */
    loop current;
    int32_t open;
    int32_t stop;
    int32_t num_sleeping;
    atomic_uint generation; /* counts loops, and the stop */
    _Atomic int64_t next;
    atomic_int num_inside; /* joined workers that have not left */
    pid_t owner;           /* a forked child has no threads */
    int32_t num_workers;
    int32_t num_started;
    struct worker {
        fv_thread_pool *pool;
        pthread_t thread;
        int32_t index;
    } workers[];
};

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void run_tasks(fv_thread_pool *pool, const loop *current, int32_t worker)
{
    for (;;) {
        const int64_t index = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (index >= current->num_tasks) return;
        current->task(current->user, index, worker);
    }
}

static void *worker_main(void *argument)
{
    struct worker *self = argument;
    fv_thread_pool *pool = self->pool;
    unsigned seen = 0;
    for (;;) {
        for (int32_t i = 0; i < SPIN_ROUNDS; i++) {
            if (atomic_load_explicit(&pool->generation, memory_order_acquire) != seen) break;
            relax();
        }
        pthread_mutex_lock(&pool->lock);
        while (atomic_load_explicit(&pool->generation, memory_order_relaxed) == seen) {
            pool->num_sleeping++;
            pthread_cond_wait(&pool->start, &pool->lock);
            pool->num_sleeping--;
        }
        seen = atomic_load_explicit(&pool->generation, memory_order_relaxed);
        const int32_t stop = pool->stop, join = pool->open;
        const loop current = pool->current;
        if (join) atomic_fetch_add_explicit(&pool->num_inside, 1, memory_order_relaxed);
        pthread_mutex_unlock(&pool->lock);
        if (stop) return NULL;
        if (!join) continue;
        run_tasks(pool, &current, self->index);
        atomic_fetch_sub_explicit(&pool->num_inside, 1, memory_order_release);
    }
}

static void pool_parallel_for(void *user, int64_t num_tasks, fv_task_fn task, void *task_user)
{
    fv_thread_pool *pool = user;
    if (pool->owner != getpid() || pthread_mutex_trylock(&pool->caller) != 0) {
        for (int64_t i = 0; i < num_tasks; i++) task(task_user, i, 0);
        return;
    }
    const loop current = {task, task_user, num_tasks};
    pthread_mutex_lock(&pool->lock);
    pool->current = current;
    pool->open = 1;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    atomic_fetch_add_explicit(&pool->generation, 1, memory_order_release);
    if (pool->num_sleeping > 0) pthread_cond_broadcast(&pool->start);
    pthread_mutex_unlock(&pool->lock);

    run_tasks(pool, &current, 0);

    pthread_mutex_lock(&pool->lock);
    pool->open = 0;
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; atomic_load_explicit(&pool->num_inside, memory_order_acquire) > 0; i++) {
        if (i < SPIN_ROUNDS)
            relax();
        else
            sched_yield();
    }
    pthread_mutex_unlock(&pool->caller);
}

/* Starts a worker that takes no signals of the process: those are for the caller's threads, which may block them to wait
 * for them. A thread's own faults and a profiler's clock stay. Returns an errno. */
static int start_worker(struct worker *worker)
{
    static const int kept[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGPROF};
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (int32_t i = 0; i < FV_ARRAY_LEN(kept); i++) sigdelset(&blocked, kept[i]);
    pthread_sigmask(SIG_BLOCK, &blocked, &before);
    const int error = pthread_create(&worker->thread, NULL, worker_main, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static void free_pool(fv_thread_pool *pool)
{
    const fv_allocator allocator = pool->allocator;
    allocator.free(allocator.user, pool);
}

fv_status fv_thread_pool_create(fv_thread_pool **out, const fv_allocator *allocator, int32_t num_threads)
{
    const size_t bytes = sizeof(fv_thread_pool) + (size_t)(num_threads - 1) * sizeof(struct worker);
    fv_thread_pool *pool = allocator->alloc(allocator->user, bytes, FV_CACHE_LINE);
    if (!pool) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a pool of %d threads", num_threads);
    memset(pool, 0, bytes);
    pool->allocator = *allocator;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_mutex_init(&pool->caller, NULL);
    pthread_cond_init(&pool->start, NULL);
    pool->owner = getpid();
    pool->num_workers = num_threads;
    for (int32_t i = 0; i < num_threads - 1; i++) {
        pool->workers[i].pool = pool;
        pool->workers[i].index = i + 1;
        const int error = start_worker(&pool->workers[i]);
        if (error) {
            fv_thread_pool_destroy(pool);
            return fv_fail(FV_ERR_NO_MEMORY, "cannot start thread %d of the %d beside the caller's: %s", i + 1,
                           num_threads - 1, strerror(error));
        }
        pool->num_started++;
    }
    *out = pool;
    return FV_OK;
}

void fv_thread_pool_destroy(fv_thread_pool *pool)
{
    if (!pool) return;
    if (pool->owner != getpid()) { /* a forked child: destroying `start` would wait for sleepers that are not there */
        free_pool(pool);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->stop = 1;
    atomic_fetch_add_explicit(&pool->generation, 1, memory_order_release);
    pthread_cond_broadcast(&pool->start);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < pool->num_started; i++) pthread_join(pool->workers[i].thread, NULL);
    pthread_cond_destroy(&pool->start);
    pthread_mutex_destroy(&pool->caller);
    pthread_mutex_destroy(&pool->lock);
    free_pool(pool);
}

fv_executor fv_thread_pool_executor(fv_thread_pool *pool)
{
    return (fv_executor){.parallel_for = pool_parallel_for, .num_workers = pool->num_workers, .user = pool};
}
