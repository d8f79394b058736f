/* A CPU device whose kernels count what they are called for, and then do it: what a plan really does. */
#ifndef FV_TESTS_BACKENDS_COUNTING_KERNELS_H
#define FV_TESTS_BACKENDS_COUNTING_KERNELS_H

#include "core/device.h"

typedef struct kernel_counts {
    int32_t kv_write, kv_gather, merge_states, reduce_segments;
    int32_t paged;          /* attend_paged: calls over the cache alone */
    int32_t paged_and_new;  /* over the cache and the new tokens */
    int32_t dense_new;      /* attend_dense: calls over the new tokens */
    int32_t dense_gathered; /* over gathered context */
    int32_t gathered_rows;
    int32_t partial_items; /* items of cut Q blocks */
    int32_t shared_items;  /* items with tokens of several sequences */
    int32_t longer_items;  /* items of more tokens than the call says that its items have */
    int64_t keys_read;     /* keys x KV heads of all items: what schedules differ in */
} kernel_counts;

/* Counts since the last reset, of the whole process. */
extern kernel_counts counted;

/* The device, in a context of its own, as "counting". */
fv_status counting_device_create(fv_context **context, fv_device **device);

#endif
