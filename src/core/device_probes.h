/* What measuring on a device takes beyond the public calls: events that keep the time, a gate that holds a stream
 * until the host has filled it, and kernels that show what the device can do. For `fovea bench`. */
#ifndef FV_CORE_DEVICE_PROBES_H
#define FV_CORE_DEVICE_PROBES_H

#include "core/device.h"

/* A run of bytes from the start of a memory; multiples of 16. */
typedef struct fv_probe_range {
    int64_t offset, bytes;
} fv_probe_range;

#define FV_PROBE_RANGE_BYTES 8192 /* a range is at most so long */
#define FV_PROBE_NUM_READS 8      /* ways to read, of which one is the fastest for a size */

/* A pure read: each range of the memory at `base` once, in the order of the list as far as parallel work has one. */
typedef struct fv_probe_read {
    const void *base;
    const fv_probe_range *ranges; /* [num_ranges], on the device */
    int64_t num_ranges;
    uint64_t *sink; /* on the device; hardly ever written */
    int32_t way;    /* from 0 to FV_PROBE_NUM_READS - 1 */
} fv_probe_read;

typedef struct fv_device_probes {
    int64_t large_bytes; /* a read or copy of so much, and a GEMM of this size, show what the device can do */
    int32_t gemm_size;

    fv_status (*cache_bytes)(int64_t *bytes, fv_device *device); /* of the last-level cache */

    /* An event for fv_event_record, and the time between two that have passed. */
    fv_status (*timer_create)(fv_event *event, fv_device *device);
    fv_status (*timer_elapsed)(double *us, fv_device *device, fv_event start, fv_event end);

    /* Holds the stream until *open is not 0, though not for ever. `open` is of fv_device_alloc_host. */
    fv_status (*gate)(fv_device *device, const int32_t *open, fv_stream stream);

    /* A kernel that does nothing. */
    fv_status (*empty)(fv_device *device, fv_stream stream);

    /* Fills `memory` from random places of a pool, some 8 KiB of whole units at a time; both on the device, multiples
     * of 16 bytes, as `unit` is, up to 8 KiB. */
    fv_status (*fill_random)(fv_device *device, void *memory, size_t bytes, const void *pool, size_t pool_bytes,
                             size_t unit, uint64_t seed, fv_stream stream);

    fv_status (*read)(fv_device *device, const fv_probe_read *read, fv_stream stream);
    fv_status (*copy)(fv_device *device, void *dst, const void *src, size_t bytes, fv_stream stream);
} fv_device_probes;

#endif
