/* The context: allocator, log, executor and devices. One context per user of the library; several
 * may live in one process, and one context may be used from several threads. */
#ifndef FOVEA_CONTEXT_H
#define FOVEA_CONTEXT_H

#include "fovea/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Host memory. `alloc` returns memory aligned to `alignment` (a power of two) or NULL; `free` takes
 * what alloc returned, or NULL. Both may be called from any thread. */
typedef struct fv_allocator {
    void *(*alloc)(void *user, size_t bytes, size_t alignment);
    void (*free)(void *user, void *memory);
    void *user;
} fv_allocator;

typedef enum fv_log_level {
    FV_LOG_ERROR = 0,
    FV_LOG_WARNING = 1,
    FV_LOG_INFO = 2,
    FV_LOG_DEBUG = 3,
} fv_log_level;

/* Called from any thread; `text` is valid during the call. */
typedef void (*fv_log_fn)(void *user, fv_log_level level, const char *text);

/* A task of a parallel loop: index in [0, num_tasks), worker in [0, num_workers). Tasks of a loop that
 * run at the same time have different workers. */
typedef void (*fv_task_fn)(void *task_user, int64_t index, int32_t worker);

/* How CPU work is spread. `parallel_for` runs task(task_user, i, worker) for every i in
 * [0, num_tasks) exactly once, in any order, and returns when all have ended. It is called from one
 * thread at a time per context (a loop that comes meanwhile runs in its own thread, as worker 0); tasks
 * never call it again. */
typedef struct fv_executor {
    void (*parallel_for)(void *user, int64_t num_tasks, fv_task_fn task, void *task_user);
    int32_t num_workers;
    void *user;
} fv_executor;

/* Zero means default in every field. */
typedef struct fv_context_options {
    uint32_t struct_size; /* sizeof(fv_context_options) */
    int32_t num_threads;  /* own threads; 0 = CPUs that this process may use: affinity, time of its control groups */
    fv_allocator allocator;
    fv_log_fn log;
    void *log_user;
    fv_executor executor; /* parallel_for != NULL: used instead of an own pool */
    const char *isa;      /* limits the CPU kernels: "portable", "avx2", "avx512", "avx512_bf16", "amx", a level that
                             the CPU has; NULL: $FOVEA_ISA, or all */
    int32_t no_plugins;   /* 1: do not look for device plugins */
} fv_context_options;

typedef struct fv_context fv_context;

/* Creates a context; `options` may be NULL. The caller destroys it after all that was made from it. NULL where it fails.
 * FV_ERR_INVALID: options of a size this library does not know, an unknown isa, num_threads < 0.
 * FV_ERR_UNSUPPORTED: an isa above what the CPU has. */
FV_API fv_status fv_context_create(fv_context **context, const fv_context_options *options);
FV_API void fv_context_destroy(fv_context *context); /* takes NULL */

/* Workers of the context's executor. */
FV_API int32_t fv_context_num_workers(const fv_context *context);

/* Runs a loop on the context's executor, for callers who want to share its threads. */
FV_API void fv_context_parallel_for(fv_context *context, int64_t num_tasks, fv_task_fn task, void *task_user);

#ifdef __cplusplus
}
#endif
#endif
