/* The public face of devices: finds them, checks what can be checked, passes on. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "core/context.h"
#include "core/error.h"
#include "core/plugin.h"

fv_status fv_context_add_device(fv_context *context, fv_device *device)
{
    if (context->num_devices == FV_MAX_DEVICES) {
        device->ops->destroy(device);
        return fv_fail(FV_ERR_NO_SPACE, "a context holds at most %d devices", FV_MAX_DEVICES);
    }
    context->devices[context->num_devices++] = device;
    return FV_OK;
}

static fv_device *find_known(const fv_context *context, const char *name)
{
    for (int32_t i = 0; i < context->num_devices; i++) {
        if (strcmp(context->devices[i]->name, name) == 0) return context->devices[i];
    }
    return NULL;
}

fv_status fv_device_find(fv_device **device, fv_context *context, const char *name)
{
    if (device) *device = NULL;
    if (!device || !context || !name) return fv_fail(FV_ERR_INVALID, "device, context or name is NULL");
    char full[32]; /* "cuda" means "cuda:0" */
    const int32_t plain = strcmp(name, "cpu") == 0 || strchr(name, ':') != NULL;
    if (snprintf(full, sizeof(full), plain ? "%s" : "%s:0", name) >= (int)sizeof(full)) {
        return fv_fail(FV_ERR_INVALID, "no device '%.40s...'; accepted: cpu, cuda, cuda:1, ...", name);
    }
    fv_status status = FV_OK;
    pthread_mutex_lock(context->devices_lock);
    fv_device *found = find_known(context, full);
    if (!found) {
        status = fv_plugin_open_device(&found, context, full);
        if (status == FV_OK) status = fv_context_add_device(context, found);
    }
    pthread_mutex_unlock(context->devices_lock);
    if (status == FV_OK) *device = found;
    return status;
}

const char *fv_device_name(const fv_device *device) { return device->name; }
const char *fv_device_describe(const fv_device *device) { return device->description; }

static fv_status null_argument(const char *function)
{
    return fv_fail(FV_ERR_INVALID, "%s: device, or what it writes to, is NULL", function);
}

fv_status fv_device_memory(size_t *free_bytes, size_t *total_bytes, fv_device *device)
{
    if (!device || !free_bytes || !total_bytes) return null_argument("fv_device_memory");
    if (device->ops->memory_info) return device->ops->memory_info(free_bytes, total_bytes, device);
    return fv_fail(FV_ERR_UNSUPPORTED, "device %s does not say how much memory it has", device->name);
}

fv_status fv_device_alloc(void **memory, fv_device *device, size_t bytes)
{
    if (!device || !memory) return null_argument("fv_device_alloc");
    return device->ops->alloc(memory, device, bytes);
}

void fv_device_free(fv_device *device, void *memory)
{
    if (memory) device->ops->free(device, memory);
}

fv_status fv_device_alloc_host(void **memory, fv_device *device, size_t bytes)
{
    if (!device || !memory) return null_argument("fv_device_alloc_host");
    return device->ops->alloc_host(memory, device, bytes);
}

void fv_device_free_host(fv_device *device, void *memory)
{
    if (memory) device->ops->free_host(device, memory);
}

fv_status fv_device_copy_in(fv_device *device, void *device_dst, const void *host_src, size_t bytes, fv_stream stream)
{
    if (!device) return null_argument("fv_device_copy_in");
    return device->ops->copy_in(device, device_dst, host_src, bytes, stream);
}

fv_status fv_device_copy_out(fv_device *device, void *host_dst, const void *device_src, size_t bytes, fv_stream stream)
{
    if (!device) return null_argument("fv_device_copy_out");
    return device->ops->copy_out(device, host_dst, device_src, bytes, stream);
}

fv_status fv_device_fill(fv_device *device, void *device_dst, uint8_t value, size_t bytes, fv_stream stream)
{
    if (!device) return null_argument("fv_device_fill");
    return device->ops->fill(device, device_dst, value, bytes, stream);
}

fv_status fv_stream_create(fv_stream *stream, fv_device *device)
{
    if (!device || !stream) return null_argument("fv_stream_create");
    return device->ops->stream_create(stream, device);
}

void fv_stream_destroy(fv_device *device, fv_stream stream)
{
    if (stream) device->ops->stream_destroy(device, stream);
}

fv_status fv_stream_synchronize(fv_device *device, fv_stream stream)
{
    if (!device) return null_argument("fv_stream_synchronize");
    return device->ops->stream_synchronize(device, stream);
}

fv_status fv_event_create(fv_event *event, fv_device *device)
{
    if (!device || !event) return null_argument("fv_event_create");
    return device->ops->event_create(event, device);
}

void fv_event_destroy(fv_device *device, fv_event event)
{
    if (event) device->ops->event_destroy(device, event);
}

fv_status fv_event_record(fv_device *device, fv_event event, fv_stream stream)
{
    if (!device) return null_argument("fv_event_record");
    return device->ops->event_record(device, event, stream);
}

fv_status fv_event_synchronize(fv_device *device, fv_event event)
{
    if (!device) return null_argument("fv_event_synchronize");
    return device->ops->event_synchronize(device, event);
}

static fv_status no_graphs(const fv_device *device)
{
    return fv_fail(FV_ERR_UNSUPPORTED, "device %s has no graphs; call fv_plan_run directly", device->name);
}

fv_status fv_graph_begin(fv_device *device, fv_stream stream)
{
    if (!device) return null_argument("fv_graph_begin");
    return device->ops->graph_begin ? device->ops->graph_begin(device, stream) : no_graphs(device);
}

fv_status fv_graph_end(fv_graph *graph, fv_device *device, fv_stream stream)
{
    if (!device || !graph) return null_argument("fv_graph_end");
    *graph = NULL;
    return device->ops->graph_end ? device->ops->graph_end(graph, device, stream) : no_graphs(device);
}

fv_status fv_graph_launch(fv_device *device, fv_graph graph, fv_stream stream)
{
    if (!device) return null_argument("fv_graph_launch");
    return device->ops->graph_launch ? device->ops->graph_launch(device, graph, stream) : no_graphs(device);
}

void fv_graph_destroy(fv_device *device, fv_graph graph)
{
    if (graph && device->ops->graph_destroy) device->ops->graph_destroy(device, graph);
}

/* A factor or the result of a product. Strides that do not count may be any. */
typedef struct gemm_matrix {
    const char *name;
    fv_dtype dtype;
    const void *data;
    int32_t rows;
    int64_t row_stride, matrix_stride;
} gemm_matrix;

static fv_status check_gemm_matrix(const gemm_matrix *matrix, int32_t num_matrices)
{
    const char *name = matrix->name, *dtype = fv_dtype_name(matrix->dtype);
    const int64_t bytes = (int64_t)fv_dtype_bytes(matrix->dtype);
    if (bytes == 0) {
        return fv_fail(FV_ERR_INVALID, "fv_gemm.%s_dtype is %d; accepted: the values of fv_dtype but 0 (none)", name,
                       (int)matrix->dtype);
    }
    if (!matrix->data || (uintptr_t)matrix->data % (uintptr_t)bytes != 0) {
        return fv_fail(FV_ERR_INVALID, "fv_gemm.%s is %p; accepted: multiples of %d bytes (%s), not NULL", name,
                       matrix->data, (int)bytes, dtype);
    }
    if ((matrix->rows > 1 && matrix->row_stride % bytes != 0) ||
        (num_matrices > 1 && matrix->matrix_stride % bytes != 0)) {
        return fv_fail(FV_ERR_INVALID,
                       "fv_gemm.%s_row_stride is %lld and %s_matrix_stride %lld; accepted: multiples of %d bytes (%s)",
                       name, (long long)matrix->row_stride, name, (long long)matrix->matrix_stride, (int)bytes, dtype);
    }
    return FV_OK;
}

static fv_status check_gemm(const fv_gemm *gemm)
{
    const gemm_matrix matrices[] = {
        {"a", gemm->a_dtype, gemm->a, gemm->m, gemm->a_row_stride, gemm->a_matrix_stride},
        {"b", gemm->b_dtype, gemm->b, gemm->b_is_transposed ? gemm->n : gemm->k, gemm->b_row_stride,
         gemm->b_matrix_stride},
        {"c", gemm->c_dtype, gemm->c, gemm->m, gemm->c_row_stride, gemm->c_matrix_stride},
    };
    fv_status status = FV_OK;
    for (int32_t i = 0; i < FV_ARRAY_LEN(matrices) && status == FV_OK; i++)
        status = check_gemm_matrix(&matrices[i], gemm->num_matrices);
    return status;
}

fv_status fv_device_gemm(void *device, const fv_gemm *gemm, fv_stream stream)
{
    fv_device *on = device;
    if (!on || !gemm) return fv_fail(FV_ERR_INVALID, "device or gemm is NULL");
    fv_status status = fv_check_struct_size("fv_gemm", gemm->struct_size, sizeof(*gemm));
    if (status != FV_OK) return status;
    if (!on->ops->gemm) return fv_fail(FV_ERR_UNSUPPORTED, "device %s has no GEMM of its own", on->name);
    if (gemm->num_matrices < 0 || gemm->m < 0 || gemm->n < 0 || gemm->k < 0) {
        return fv_fail(FV_ERR_INVALID, "fv_gemm of %d products, m %d, n %d, k %d; accepted: 0 or more",
                       gemm->num_matrices, gemm->m, gemm->n, gemm->k);
    }
    if (gemm->num_matrices == 0 || gemm->m == 0 || gemm->n == 0 || gemm->k == 0) return FV_OK;
    status = check_gemm(gemm);
    return status == FV_OK ? on->ops->gemm(on, gemm, stream) : status;
}
