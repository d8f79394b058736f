/* Devices, their memory, streams and graphs. The same calls serve the CPU, where device memory is
 * host memory and a stream runs at once, and a GPU behind a plugin.
 *
 * A stream is the device's own handle (CUDA: cudaStream_t); NULL is the default stream. */
#ifndef FOVEA_DEVICE_H
#define FOVEA_DEVICE_H

#include "fovea/context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fv_device fv_device; /* belongs to the context; valid until the context is destroyed */
typedef void *fv_stream;
typedef void *fv_event;
typedef void *fv_graph;

/* Finds a device: "cpu", "cuda", "cuda:1". FV_ERR_UNSUPPORTED with the reason when it is not there
 * (no plugin, no driver, no GPU), and the devices that are; FV_ERR_INVALID for what is no name of a device
 * ("cuda:01"); FV_ERR_NO_SPACE for one more than a context holds. *device is NULL then. */
FV_API fv_status fv_device_find(fv_device **device, fv_context *context, const char *name);

/* One line: what the device is and which kernels it brings. Valid as long as the device. */
FV_API const char *fv_device_describe(const fv_device *device);
FV_API const char *fv_device_name(const fv_device *device); /* with its number: "cpu", "cuda:0" */

/* Device memory that is free now, and all of it. FV_ERR_UNSUPPORTED where the device does not say (the CPU). */
FV_API fv_status fv_device_memory(size_t *free_bytes, size_t *total_bytes, fv_device *device);

/* Device memory, aligned to 256 bytes. free takes NULL. Not for use inside a captured graph. */
FV_API fv_status fv_device_alloc(void **memory, fv_device *device, size_t bytes);
FV_API void fv_device_free(fv_device *device, void *memory);

/* Page-locked host memory that copies at full speed; on the CPU plain memory. */
FV_API fv_status fv_device_alloc_host(void **memory, fv_device *device, size_t bytes);
FV_API void fv_device_free_host(fv_device *device, void *memory);

/* Copies in stream order; host memory must stay as it is until the stream has passed. */
FV_API fv_status fv_device_copy_in(fv_device *device, void *device_dst, const void *host_src, size_t bytes,
                                   fv_stream stream);
FV_API fv_status fv_device_copy_out(fv_device *device, void *host_dst, const void *device_src, size_t bytes,
                                    fv_stream stream);
FV_API fv_status fv_device_fill(fv_device *device, void *device_dst, uint8_t value, size_t bytes, fv_stream stream);

/* A stream: what is sent to it runs in order. The caller destroys streams, events and graphs, before the context, and graphs
 * before the stream that they were captured on, whose memory they use. destroy takes NULL, waits for what is left on a stream if
 * it has to, and says nothing of errors. Others: FV_ERR_DEVICE for what the driver reports, with its words. */
FV_API fv_status fv_stream_create(fv_stream *stream, fv_device *device);
FV_API void fv_stream_destroy(fv_device *device, fv_stream stream);
FV_API fv_status fv_stream_synchronize(fv_device *device, fv_stream stream);

/* An event: a mark on a stream, that the host can wait for. One that was never recorded is passed. */
FV_API fv_status fv_event_create(fv_event *event, fv_device *device);
FV_API void fv_event_destroy(fv_device *device, fv_event event);
FV_API fv_status fv_event_record(fv_device *device, fv_event event, fv_stream stream);
FV_API fv_status fv_event_synchronize(fv_device *device, fv_event event);

/* Capture: what is sent to `stream` between begin and end is recorded, not run. A launch of the graph
 * runs it with the same functions, grids and pointers, on any stream; gemm.h says where graphs with products may run.
 * Where a device has no graphs (the CPU), FV_ERR_UNSUPPORTED. begin: `stream` is one of fv_stream_create,
 * FV_ERR_INVALID for NULL. end: on the thread of begin; FV_ERR_DEVICE where something that was sent cannot be recorded,
 * or nothing was sent; then the graph is NULL. */
FV_API fv_status fv_graph_begin(fv_device *device, fv_stream stream);
FV_API fv_status fv_graph_end(fv_graph *graph, fv_device *device, fv_stream stream);
FV_API fv_status fv_graph_launch(fv_device *device, fv_graph graph, fv_stream stream);
FV_API void fv_graph_destroy(fv_device *device, fv_graph graph);

#ifdef __cplusplus
}
#endif
#endif
