/* Staging ring and device buffer of a plan. */
#include "planner/step_buffers.h"

#include <string.h>

#include "core/compiler.h"

static size_t reduces_offset(const fv_step_buffers *buffers)
{
    return (size_t)fv_round_up(
        (int64_t)sizeof(fv_step_header) + (int64_t)buffers->item_capacity * (int64_t)sizeof(fv_work_item), 64);
}

static fv_step_view view_of(const fv_step_buffers *buffers, char *base)
{
    return (fv_step_view){(fv_step_header *)(void *)base, (fv_work_item *)(void *)(base + sizeof(fv_step_header)),
                          (fv_reduce_item *)(void *)(base + reduces_offset(buffers))};
}

fv_status fv_step_buffers_init(fv_step_buffers *buffers, fv_device *device, int32_t item_capacity,
                               int32_t reduce_capacity)
{
    *buffers = (fv_step_buffers){.device = device, .item_capacity = item_capacity, .reduce_capacity = reduce_capacity};
    buffers->bytes = reduces_offset(buffers) + (size_t)reduce_capacity * sizeof(fv_reduce_item);
    fv_status status = fv_device_alloc((void **)&buffers->on_device, device, buffers->bytes);
    const int32_t ring = device->host_is_device ? 0 : FV_STAGING_RING;
    for (int32_t i = 0; i < ring && status == FV_OK; i++) {
        status = fv_device_alloc_host((void **)&buffers->ring[i].host, device, buffers->bytes);
        if (status == FV_OK) status = fv_event_create(&buffers->ring[i].copied, device);
    }
    if (status != FV_OK) fv_step_buffers_deinit(buffers);
    return status;
}

void fv_step_buffers_deinit(fv_step_buffers *buffers)
{
    if (!buffers->device) return;
    for (int32_t i = 0; i < FV_STAGING_RING; i++) {
        if (buffers->ring[i].in_flight) (void)fv_event_synchronize(buffers->device, buffers->ring[i].copied);
        fv_event_destroy(buffers->device, buffers->ring[i].copied);
        fv_device_free_host(buffers->device, buffers->ring[i].host);
    }
    fv_device_free(buffers->device, buffers->on_device);
    memset(buffers, 0, sizeof(*buffers));
}

fv_status fv_step_buffers_begin(fv_step_view *host, fv_step_buffers *buffers)
{
    if (buffers->device->host_is_device) {
        *host = view_of(buffers, buffers->on_device);
        return FV_OK;
    }
    if (buffers->ring[buffers->next].in_flight) {
        const fv_status status = fv_event_synchronize(buffers->device, buffers->ring[buffers->next].copied);
        if (status != FV_OK) return status;
        buffers->ring[buffers->next].in_flight = 0;
    }
    *host = view_of(buffers, buffers->ring[buffers->next].host);
    return FV_OK;
}

fv_status fv_step_buffers_commit(fv_step_buffers *buffers, int32_t num_items, int32_t num_reduces, fv_stream stream)
{
    if (buffers->device->host_is_device) return FV_OK;
    char *host = buffers->ring[buffers->next].host;
    const fv_step_view view = view_of(buffers, host);
    const char *end = num_reduces ? (char *)(view.reduces + num_reduces) : (char *)(view.items + num_items);
    fv_status status = fv_device_copy_in(buffers->device, buffers->on_device, host, (size_t)(end - host), stream);
    if (status == FV_OK) status = fv_event_record(buffers->device, buffers->ring[buffers->next].copied, stream);
    if (status != FV_OK) return status;
    buffers->ring[buffers->next].in_flight = 1;
    buffers->next = (buffers->next + 1) % FV_STAGING_RING;
    return FV_OK;
}

fv_step_view fv_step_buffers_on_device(const fv_step_buffers *buffers) { return view_of(buffers, buffers->on_device); }
