/* The CPU as a device: its memory is host memory, its streams run at once, it has no graphs. Large areas ask for
 * huge pages: a cache in random blocks would have a miss of the TLB for each. The pages belong to the NUMA node
 * of the thread that writes them first. */
#include <stdio.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "core/context.h"
#include "core/error.h"

#define DEVICE_ALIGNMENT 256
#define HUGE_PAGE_BYTES ((uintptr_t)2 << 20)

/* A hint for the whole huge pages inside the area; where they are not allowed nothing changes. */
static void advise_huge_pages(void *memory, size_t bytes)
{
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t first = ((uintptr_t)memory + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    const uintptr_t end = ((uintptr_t)memory + bytes) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    if (first < end) (void)madvise((char *)memory + (first - (uintptr_t)memory), end - first, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

static fv_status cpu_alloc(void **memory, fv_device *device, size_t bytes)
{
    const fv_allocator *allocator = &device->context->allocator;
    *memory = allocator->alloc(allocator->user, bytes ? bytes : 1, DEVICE_ALIGNMENT);
    if (!*memory) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %zu bytes on the cpu", bytes);
    advise_huge_pages(*memory, bytes);
    return FV_OK;
}

static void cpu_free(fv_device *device, void *memory) { fv_context_free(device->context, memory); }

static fv_status cpu_copy(fv_device *device, void *dst, const void *src, size_t bytes, fv_stream stream)
{
    (void)device, (void)stream;
    memmove(dst, src, bytes);
    return FV_OK;
}

static fv_status cpu_fill(fv_device *device, void *dst, uint8_t value, size_t bytes, fv_stream stream)
{
    (void)device, (void)stream;
    memset(dst, value, bytes);
    return FV_OK;
}

/* Streams and events are never waited for: what was sent has run. A handle that is not NULL. */
static fv_status cpu_handle_create(void **handle, fv_device *device)
{
    *handle = device;
    return FV_OK;
}

static void cpu_handle_destroy(fv_device *device, void *handle) { (void)device, (void)handle; }

static fv_status cpu_synchronize(fv_device *device, void *handle)
{
    (void)device, (void)handle;
    return FV_OK;
}

static fv_status cpu_event_record(fv_device *device, fv_event event, fv_stream stream)
{
    (void)device, (void)event, (void)stream;
    return FV_OK;
}

static void cpu_destroy(fv_device *device) { fv_context_free(device->context, device); }

static const fv_device_ops cpu_ops = {
    .alloc = cpu_alloc,
    .free = cpu_free,
    .alloc_host = cpu_alloc,
    .free_host = cpu_free,
    .copy_in = cpu_copy,
    .copy_out = cpu_copy,
    .fill = cpu_fill,
    .stream_create = cpu_handle_create,
    .stream_destroy = cpu_handle_destroy,
    .stream_synchronize = cpu_synchronize,
    .event_create = cpu_handle_create,
    .event_destroy = cpu_handle_destroy,
    .event_record = cpu_event_record,
    .event_synchronize = cpu_synchronize,
    .destroy = cpu_destroy,
};

fv_status fv_cpu_device_create(fv_device **out, fv_context *context, const struct fv_kernel_table *const *tables,
                               int32_t num_tables)
{
    fv_device *device = fv_context_alloc(context, sizeof(*device));
    if (!device) return FV_ERR_NO_MEMORY;
    *device = (fv_device){
        .name = "cpu",
        .ops = &cpu_ops,
        .tables = tables,
        .num_tables = num_tables,
        .host_is_device = 1,
        .num_workers = context->executor.num_workers,
        .context = context,
    };
    char model[128];
    fv_cpu_model(model, sizeof(model));
    snprintf(device->description, sizeof(device->description), "%s, %d threads, kernels %s", model,
             context->executor.num_workers, fv_isa_name(context->isa));
    *out = device;
    return FV_OK;
}
