/* Context: creation from options, memory, log. */
#include "core/context.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/error.h"

static void *default_alloc(void *user, size_t bytes, size_t alignment)
{
    (void)user;
    void *memory = NULL;
    return posix_memalign(&memory, alignment, bytes) == 0 ? memory : NULL;
}

static void default_free(void *user, void *memory)
{
    (void)user;
    free(memory);
}

void *fv_context_alloc(fv_context *context, size_t bytes)
{
    void *memory = context->allocator.alloc(context->allocator.user, bytes ? bytes : 1, FV_CACHE_LINE);
    if (!memory) {
        fv_fail(FV_ERR_NO_MEMORY, "no memory for %zu bytes", bytes);
        return NULL;
    }
    return memset(memory, 0, bytes);
}

void fv_context_free(fv_context *context, void *memory)
{
    if (memory) context->allocator.free(context->allocator.user, memory);
}

uint64_t fv_context_next_serial(fv_context *context)
{
    return atomic_fetch_add_explicit(&context->next_serial, 1, memory_order_relaxed);
}

void fv_log(const fv_context *context, fv_log_level level, const char *format, ...)
{
    if (!context->log) return;
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    context->log(context->log_user, level, text);
}

/* The ISA limit: what the caller asks, else the environment, else what the CPU has. */
static fv_status choose_isa(fv_isa *isa, const char *asked)
{
    const char *name = asked ? asked : getenv("FOVEA_ISA");
    *isa = fv_cpu_isa();
    if (!name || !*name) return FV_OK;
    fv_isa limit;
    const fv_status status = fv_isa_parse(&limit, name);
    if (status != FV_OK) return status;
    if (limit > *isa) {
        return fv_fail(FV_ERR_UNSUPPORTED, "ISA level %s is not available on this CPU; the strongest is %s",
                       fv_isa_name(limit), fv_isa_name(*isa));
    }
    *isa = limit;
    return FV_OK;
}

/* A number of the environment takes the place of *value. */
static fv_status take_variable(int32_t *value, const char *name, int32_t least, int32_t most)
{
    const char *text = getenv(name);
    if (!text || !*text) return FV_OK;
    char *end;
    const long asked = strtol(text, &end, 10);
    if (*end || asked < least || asked > most)
        return fv_fail(FV_ERR_INVALID, "%s is '%s'; accepted: %d to %d", name, text, least, most);
    *value = (int32_t)asked;
    return FV_OK;
}

static fv_status check_options(const fv_context_options *options)
{
    const fv_status status = fv_check_struct_size("fv_context_options", options->struct_size, sizeof(*options));
    if (status != FV_OK) return status;
    if (options->num_threads < 0 || options->num_threads > 4096) {
        return fv_fail(FV_ERR_INVALID, "num_threads is %d; accepted: 0 (all CPUs) to 4096", options->num_threads);
    }
    if (!options->allocator.alloc != !options->allocator.free) {
        return fv_fail(FV_ERR_INVALID, "allocator has only one of alloc and free; give both or neither");
    }
    if (options->executor.parallel_for && options->executor.num_workers < 1) {
        return fv_fail(FV_ERR_INVALID, "executor.num_workers is %d; accepted: 1 or more",
                       options->executor.num_workers);
    }
    return FV_OK;
}

static uint64_t first_serial(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The caller's executor. A second loop, of another thread or of a task, runs in its own thread, as with the own pool. */
typedef struct lent_executor {
    fv_executor executor;
    pthread_mutex_t one_loop;
} lent_executor;

static void lent_parallel_for(void *user, int64_t num_tasks, fv_task_fn task, void *task_user)
{
    lent_executor *lent = user;
    if (pthread_mutex_trylock(&lent->one_loop) != 0) {
        for (int64_t i = 0; i < num_tasks; i++) task(task_user, i, 0);
        return;
    }
    lent->executor.parallel_for(lent->executor.user, num_tasks, task, task_user);
    pthread_mutex_unlock(&lent->one_loop);
}

static fv_status lend_executor(fv_context *context, const fv_executor *executor)
{
    lent_executor *lent = fv_context_alloc(context, sizeof(*lent));
    if (!lent) return FV_ERR_NO_MEMORY;
    lent->executor = *executor;
    pthread_mutex_init(&lent->one_loop, NULL);
    context->lent = lent;
    context->executor = (fv_executor){lent_parallel_for, executor->num_workers, lent};
    return FV_OK;
}

static void take_back_executor(fv_context *context)
{
    lent_executor *lent = context->lent;
    if (lent) pthread_mutex_destroy(&lent->one_loop);
    fv_context_free(context, lent);
}

fv_status fv_context_create(fv_context **out, const fv_context_options *options)
{
    const fv_context_options defaults = {.struct_size = sizeof(defaults)};
    if (!out) return fv_fail(FV_ERR_INVALID, "context is NULL");
    *out = NULL;
    if (!options) options = &defaults;
    fv_status status = check_options(options);
    if (status != FV_OK) return status;
    fv_isa isa;
    int32_t ahead_tracks = fv_cpu_ahead_tracks(), ahead_is_near = fv_cpu_ahead_is_near();
    int32_t multiplies_pairs = fv_cpu_multiplies_pairs(), subnormals_are_fast = fv_cpu_subnormals_are_fast();
    status = choose_isa(&isa, options->isa);
    if (status == FV_OK) status = take_variable(&ahead_tracks, "FOVEA_AHEAD_TRACKS", 1, FV_MAX_AHEAD_TRACKS);
    if (status == FV_OK) status = take_variable(&ahead_is_near, "FOVEA_AHEAD_NEAR", 0, 1);
    if (status == FV_OK) status = take_variable(&multiplies_pairs, "FOVEA_BF16_PAIRS", 0, 1);
    if (status == FV_OK) status = take_variable(&subnormals_are_fast, "FOVEA_FAST_SUBNORMALS", 0, 1);
    if (status != FV_OK) return status;

    const fv_allocator plain = {default_alloc, default_free, NULL};
    const fv_allocator allocator = options->allocator.alloc ? options->allocator : plain;
    fv_context *context = allocator.alloc(allocator.user, sizeof(*context), FV_CACHE_LINE);
    if (!context) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a context");
    *context = (fv_context){.allocator = allocator,
                            .log = options->log,
                            .log_user = options->log_user,
                            .isa = isa,
                            .ahead_tracks = ahead_tracks,
                            .ahead_is_near = ahead_is_near,
                            .multiplies_pairs = multiplies_pairs,
                            .subnormals_are_fast = subnormals_are_fast,
                            .no_plugins = options->no_plugins,
                            .next_serial = first_serial()};

    const struct fv_kernel_table *const *tables;
    const int32_t num_tables = fv_cpu_tables(&tables, isa);
    fv_device *cpu = NULL;
    pthread_mutex_t *lock = fv_context_alloc(context, sizeof(*lock));
    if (!lock) {
        status = FV_ERR_NO_MEMORY;
        goto fail;
    }
    pthread_mutex_init(lock, NULL);
    context->devices_lock = lock;
    if (options->executor.parallel_for) {
        status = lend_executor(context, &options->executor);
        if (status != FV_OK) goto fail;
    } else {
        const int32_t num_threads = options->num_threads ? options->num_threads : fv_cpu_count();
        status = fv_thread_pool_create(&context->pool, &context->allocator, num_threads);
        if (status != FV_OK) goto fail;
        context->executor = fv_thread_pool_executor(context->pool);
    }
    status = fv_cpu_device_create(&cpu, context, tables, num_tables);
    if (status != FV_OK) goto fail;
    status = fv_context_add_device(context, cpu);
    if (status != FV_OK) goto fail;
    *out = context;
    return FV_OK;

fail:
    fv_context_destroy(context);
    return status;
}

void fv_context_destroy(fv_context *context)
{
    if (!context) return;
    for (int32_t i = context->num_devices - 1; i >= 0; i--) context->devices[i]->ops->destroy(context->devices[i]);
    fv_thread_pool_destroy(context->pool);
    take_back_executor(context);
    if (context->devices_lock) pthread_mutex_destroy(context->devices_lock);
    fv_context_free(context, context->devices_lock);
    const fv_allocator allocator = context->allocator;
    allocator.free(allocator.user, context);
}

int32_t fv_context_num_workers(const fv_context *context) { return context->executor.num_workers; }

void fv_context_parallel_for(fv_context *context, int64_t num_tasks, fv_task_fn task, void *task_user)
{
    fv_executor_run(&context->executor, num_tasks, task, task_user);
}
