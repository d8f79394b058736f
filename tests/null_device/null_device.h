/* What a test may ask the null device. */
#ifndef FV_TESTS_NULL_DEVICE_H
#define FV_TESTS_NULL_DEVICE_H

#include "fovea/device.h"

/* Counts since the device was opened: what device->state of core/device.h points to. */
typedef struct fv_null_counters {
    int64_t num_allocations;
    int64_t num_synchronizations;
    int64_t num_event_waits;
    int64_t num_copies, num_copied_bytes;
    int64_t num_launches;
} fv_null_counters;

#endif
