#include "bench/device_clock.h"

#include <stdlib.h>

#include "core/error.h"

fv_status fv_device_clock_create(fv_device_clock **out, fv_device *device)
{
    *out = NULL;
    if (!device->probes) {
        return fv_fail(FV_ERR_UNSUPPORTED, "device %s has nothing to measure with; accepted: cpu, cuda", device->name);
    }
    fv_device_clock *clock = calloc(1, sizeof(*clock));
    if (!clock) return fv_fail(FV_ERR_NO_MEMORY, "no memory for events");
    clock->device = device;
    void *gate = NULL;
    fv_status status = fv_stream_create(&clock->stream, device);
    if (status == FV_OK) status = fv_device_alloc_host(&gate, device, sizeof(*clock->gate));
    clock->gate = gate;
    for (int32_t i = 0; i < FV_CLOCK_MAX_SAMPLES && status == FV_OK; i++) {
        status = device->probes->timer_create(&clock->starts[i], device);
        if (status == FV_OK) status = device->probes->timer_create(&clock->ends[i], device);
    }
    if (status != FV_OK) {
        fv_device_clock_destroy(clock);
        return status;
    }
    *out = clock;
    return FV_OK;
}

void fv_device_clock_destroy(fv_device_clock *clock)
{
    if (!clock) return;
    for (int32_t i = 0; i < FV_CLOCK_MAX_SAMPLES; i++) {
        if (clock->starts[i]) fv_event_destroy(clock->device, clock->starts[i]);
        if (clock->ends[i]) fv_event_destroy(clock->device, clock->ends[i]);
    }
    fv_device_free_host(clock->device, clock->gate);
    fv_stream_destroy(clock->device, clock->stream);
    free(clock);
}

static void set_gate(fv_device_clock *clock, int32_t open) { __atomic_store_n(clock->gate, open, __ATOMIC_RELEASE); }

fv_status fv_device_clock_begin(fv_device_clock *clock)
{
    clock->num_samples = 0;
    set_gate(clock, 0);
    return clock->device->probes->gate(clock->device, clock->gate, clock->stream);
}

fv_status fv_device_clock_start(fv_device_clock *clock)
{
    if (clock->num_samples == FV_CLOCK_MAX_SAMPLES) {
        return fv_fail(FV_ERR_NO_SPACE, "a round of more than %d samples", FV_CLOCK_MAX_SAMPLES);
    }
    return fv_event_record(clock->device, clock->starts[clock->num_samples], clock->stream);
}

fv_status fv_device_clock_stop(fv_device_clock *clock)
{
    return fv_event_record(clock->device, clock->ends[clock->num_samples++], clock->stream);
}

fv_status fv_device_clock_end(fv_device_clock *clock, double *times_us)
{
    fv_device *device = clock->device;
    set_gate(clock, 1);
    fv_status status = fv_stream_synchronize(device, clock->stream);
    for (int32_t i = 0; i < clock->num_samples && status == FV_OK; i++) {
        status = device->probes->timer_elapsed(&times_us[i], device, clock->starts[i], clock->ends[i]);
    }
    return status;
}
