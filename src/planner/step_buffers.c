/* Staging ring and device buffer of a plan. */
#include "planner/step_buffers.h"

#include <string.h>

#include "core/compiler.h"

/* Room between used parts that takes longer to copy than a second copy takes to ask for. */
#define FAR_BYTES ((size_t)64 << 10)

static size_t after(size_t offset, int32_t count, size_t entry_bytes)
{
    return (size_t)fv_round_up((int64_t)offset + (int64_t)count * (int64_t)entry_bytes, FV_CACHE_LINE);
}

static size_t reduces_offset(const fv_step_buffers *buffers)
{
    return after(sizeof(fv_step_header), buffers->room.num_items, sizeof(fv_work_item));
}

static size_t indices_offset(const fv_step_buffers *buffers)
{
    return after(reduces_offset(buffers), buffers->room.num_reduces, sizeof(fv_reduce_item));
}

static size_t claims_offset(const fv_step_buffers *buffers)
{
    return after(indices_offset(buffers), buffers->room.num_indices, sizeof(int32_t));
}

static fv_step_view view_of(const fv_step_buffers *buffers, char *base)
{
    return (fv_step_view){(fv_step_header *)(void *)base, (fv_work_item *)(void *)(base + sizeof(fv_step_header)),
                          (fv_reduce_item *)(void *)(base + reduces_offset(buffers)),
                          (int32_t *)(void *)(base + indices_offset(buffers))};
}

static fv_status clear_claims(fv_step_buffers *buffers)
{
    const size_t offset = claims_offset(buffers);
    char *zeros = buffers->ring[0].host + offset;
    memset(zeros, 0, buffers->bytes - offset);
    const fv_status status = fv_device_copy_in(buffers->device, buffers->on_device + offset, zeros,
                                               buffers->bytes - offset, NULL);
    return status == FV_OK ? fv_stream_synchronize(buffers->device, NULL) : status;
}

/* Where host memory is device memory there are none. */
static int32_t num_staging(const fv_device *device) { return device->host_is_device ? 0 : FV_STAGING_RING; }

fv_status fv_step_buffers_init(fv_step_buffers *buffers, fv_device *device, const fv_step_sizes *room)
{
    *buffers = (fv_step_buffers){.device = device, .room = *room};
    buffers->bytes = after(claims_offset(buffers), FV_NUM_CLAIMS, sizeof(int32_t));
    fv_status status = fv_device_alloc((void **)&buffers->on_device, device, buffers->bytes);
    const int32_t ring = num_staging(device);
    for (int32_t i = 0; i < ring && status == FV_OK; i++) {
        status = fv_device_alloc_host((void **)&buffers->ring[i].host, device, buffers->bytes);
        if (status == FV_OK) status = fv_event_create(&buffers->ring[i].copied, device);
    }
    if (status == FV_OK && ring > 0) status = clear_claims(buffers);
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

size_t fv_step_buffers_bytes(const fv_step_buffers *buffers)
{
    return buffers->bytes * (size_t)(1 + num_staging(buffers->device));
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

/* What is used of a part. */
typedef struct used_bytes {
    size_t first, end;
} used_bytes;

static used_bytes used_of(size_t offset, int32_t count, size_t entry_bytes)
{
    return (used_bytes){offset, offset + (size_t)count * entry_bytes};
}

/* The used parts in one copy each, or several in one that are near. */
static fv_status copy_used(fv_step_buffers *buffers, const char *host, const fv_step_sizes *used, fv_stream stream)
{
    const used_bytes parts[] = {
        used_of(sizeof(fv_step_header), used->num_items, sizeof(fv_work_item)),
        used_of(reduces_offset(buffers), used->num_reduces, sizeof(fv_reduce_item)),
        used_of(indices_offset(buffers), used->num_indices, sizeof(int32_t)),
    };
    used_bytes next = {0, parts[0].end}; /* with the header */
    fv_status status = FV_OK;
    for (int32_t i = 1; i < FV_ARRAY_LEN(parts) && status == FV_OK; i++) {
        if (parts[i].first == parts[i].end) continue;
        if (parts[i].first - next.end > FAR_BYTES) {
            status = fv_device_copy_in(buffers->device, buffers->on_device + next.first, host + next.first,
                                       next.end - next.first, stream);
            next.first = parts[i].first;
        }
        next.end = parts[i].end;
    }
    if (status != FV_OK) return status;
    return fv_device_copy_in(buffers->device, buffers->on_device + next.first, host + next.first, next.end - next.first,
                             stream);
}

fv_status fv_step_buffers_commit(fv_step_buffers *buffers, const fv_step_sizes *used, fv_stream stream)
{
    if (buffers->device->host_is_device) return FV_OK;
    fv_status status = copy_used(buffers, buffers->ring[buffers->next].host, used, stream);
    if (status == FV_OK) status = fv_event_record(buffers->device, buffers->ring[buffers->next].copied, stream);
    if (status != FV_OK) return status;
    buffers->ring[buffers->next].in_flight = 1;
    buffers->next = (buffers->next + 1) % FV_STAGING_RING;
    return FV_OK;
}

fv_step_view fv_step_buffers_on_device(const fv_step_buffers *buffers) { return view_of(buffers, buffers->on_device); }

int32_t *fv_step_buffers_take_claims(fv_step_buffers *buffers)
{
    if (buffers->device->host_is_device) return NULL;
    int32_t *claims = (int32_t *)(void *)(buffers->on_device + claims_offset(buffers)) + buffers->next_claims;
    buffers->next_claims = (buffers->next_claims + 1) % FV_NUM_CLAIMS;
    return claims;
}
