#include "bench/bench_memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "core/compiler.h"
#include "core/device.h"
#include "core/error.h"

#define ALIGNMENT 256
#define HUGE_PAGE_BYTES (2 << 20)

static fv_status alloc_on_host(void **memory, size_t bytes)
{
    const int64_t alignment = bytes < HUGE_PAGE_BYTES ? ALIGNMENT : HUGE_PAGE_BYTES;
    *memory = aligned_alloc((size_t)alignment, (size_t)fv_round_up((int64_t)(bytes ? bytes : 1), alignment));
    if (!*memory) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %zu bytes", bytes);
    if (bytes >= HUGE_PAGE_BYTES) madvise(*memory, bytes, MADV_HUGEPAGE);
    return FV_OK;
}

fv_status fv_bench_alloc(void **memory, fv_device *device, size_t bytes)
{
    *memory = NULL;
    return device->host_is_device ? alloc_on_host(memory, bytes) : fv_device_alloc(memory, device, bytes);
}

void fv_bench_free(fv_device *device, void *memory)
{
    if (!memory) return;
    if (device->host_is_device) {
        free(memory);
    } else {
        fv_device_free(device, memory);
    }
}

fv_status fv_bench_copy_in(fv_device *device, void *memory, const void *host, size_t bytes)
{
    if (bytes == 0) return FV_OK;
    const fv_status status = fv_device_copy_in(device, memory, host, bytes, NULL);
    return status == FV_OK ? fv_stream_synchronize(device, NULL) : status;
}

fv_status fv_bench_send(void **memory, fv_device *device, const void *host, size_t bytes)
{
    *memory = NULL;
    if (!host) return FV_OK;
    const fv_status status = fv_bench_alloc(memory, device, bytes);
    return status == FV_OK ? fv_bench_copy_in(device, *memory, host, bytes) : status;
}
