/* Times work of a device by events in a stream of its own. A gate holds the stream until the host has sent a whole
 * round, so that no time contains the host's:
 *
 *   stream   gate | start A end | start B end | ...        host   sends all, opens the gate, waits, reads the times */
#ifndef FV_TOOLS_BENCH_DEVICE_CLOCK_H
#define FV_TOOLS_BENCH_DEVICE_CLOCK_H

#include "core/device_probes.h"

#define FV_CLOCK_MAX_SAMPLES 256 /* of a round */

typedef struct fv_device_clock {
    fv_device *device;
    fv_stream stream;
    int32_t *gate; /* page-locked */
    fv_event starts[FV_CLOCK_MAX_SAMPLES], ends[FV_CLOCK_MAX_SAMPLES];
    int32_t num_samples;
} fv_device_clock;

/* FV_ERR_UNSUPPORTED: the device has no probes. */
fv_status fv_device_clock_create(fv_device_clock **clock, fv_device *device);
void fv_device_clock_destroy(fv_device_clock *clock); /* takes NULL */

/* Begins a round: closes the gate. */
fv_status fv_device_clock_begin(fv_device_clock *clock);

/* Around the work of a sample, which goes to clock->stream. */
fv_status fv_device_clock_start(fv_device_clock *clock);
fv_status fv_device_clock_stop(fv_device_clock *clock);

/* Ends a round: opens the gate, waits for the stream, and fills times_us [number of samples] in their order. After a
 * failure within a round it is called as well. */
fv_status fv_device_clock_end(fv_device_clock *clock, double *times_us);

#endif
