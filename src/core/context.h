/* The context's insides: what every layer takes from it. */
#ifndef FV_CORE_CONTEXT_H
#define FV_CORE_CONTEXT_H

#include "core/compiler.h"
#include "core/cpu.h"
#include "core/device.h"
#include "core/executor.h"

#define FV_MAX_DEVICES 32

struct fv_context {
    fv_allocator allocator;
    fv_log_fn log;
    void *log_user;
    fv_executor executor;
    fv_thread_pool *pool;        /* NULL: the executor is the caller's, */
    void *lent;                  /* who has one loop at a time: lent_executor of context.c */
    fv_isa isa;                  /* strongest level that may be used */
    int32_t ahead_tracks;        /* 1 to FV_MAX_AHEAD_TRACKS: fv_cpu_ahead_tracks, or $FOVEA_AHEAD_TRACKS */
    int32_t ahead_is_near;       /* fv_cpu_ahead_is_near, or $FOVEA_AHEAD_NEAR */
    int32_t multiplies_pairs;    /* fv_cpu_multiplies_pairs, or $FOVEA_BF16_PAIRS */
    int32_t subnormals_are_fast; /* fv_cpu_subnormals_are_fast, or $FOVEA_FAST_SUBNORMALS */
    int32_t no_plugins;
    fv_device *devices[FV_MAX_DEVICES]; /* devices[0] is the CPU */
    int32_t num_devices;
    void *devices_lock; /* pthread_mutex_t */
    _Atomic uint64_t next_serial;
};

/* Zeroed memory from the context's allocator, aligned to 64 bytes; NULL with fv_fail's text. */
void *fv_context_alloc(fv_context *context, size_t bytes);
void fv_context_free(fv_context *context, void *memory);

/* Another number for each call. They begin with the time, in ns, at which the context was made, so that a context in the memory
 * of one that is gone gives others, too. */
uint64_t fv_context_next_serial(fv_context *context);

/* Sends one line to the context's log callback; nothing where there is none. */
void fv_log(const fv_context *context, fv_log_level level, const char *format, ...) FV_PRINTF(3, 4);

/* Gives the context a device and takes it over: fv_device_find() then finds it by its name. */
fv_status fv_context_add_device(fv_context *context, fv_device *device);

/* The CPU kernel tables, weakest to strongest up to `limit`; defined above core/, in kernels/. */
int32_t fv_cpu_tables(const struct fv_kernel_table *const **tables, fv_isa limit);

#endif
