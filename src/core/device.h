/* A device as the library sees it: memory, streams, graphs, and the kernel tables it brings. The CPU
 * is one, the plugins and the null device of the tests are others; nothing above core/ tells them
 * apart. */
#ifndef FV_CORE_DEVICE_H
#define FV_CORE_DEVICE_H

#include "fovea/device.h"
#include "fovea/gemm.h"

struct fv_kernel_table;  /* ops/kernel_table.h */
struct fv_device_probes; /* core/device_probes.h */
struct fv_layer_table;   /* ops/layer_table.h */

/* What a device can do. Every function may fail with a text. NULL graph functions: no graphs; NULL gemm: no GEMM;
 * NULL memory_info: nobody knows. */
typedef struct fv_device_ops {
    fv_status (*alloc)(void **memory, fv_device *device, size_t bytes);
    void (*free)(fv_device *device, void *memory);
    fv_status (*alloc_host)(void **memory, fv_device *device, size_t bytes);
    void (*free_host)(fv_device *device, void *memory);
    fv_status (*copy_in)(fv_device *device, void *dst, const void *src, size_t bytes, fv_stream stream);
    fv_status (*copy_out)(fv_device *device, void *dst, const void *src, size_t bytes, fv_stream stream);
    fv_status (*fill)(fv_device *device, void *dst, uint8_t value, size_t bytes, fv_stream stream);
    fv_status (*stream_create)(fv_stream *stream, fv_device *device);
    void (*stream_destroy)(fv_device *device, fv_stream stream);
    fv_status (*stream_synchronize)(fv_device *device, fv_stream stream);
    fv_status (*event_create)(fv_event *event, fv_device *device);
    void (*event_destroy)(fv_device *device, fv_event event);
    fv_status (*event_record)(fv_device *device, fv_event event, fv_stream stream);
    fv_status (*event_synchronize)(fv_device *device, fv_event event);
    fv_status (*graph_begin)(fv_device *device, fv_stream stream);
    fv_status (*graph_end)(fv_graph *graph, fv_device *device, fv_stream stream);
    fv_status (*graph_launch)(fv_device *device, fv_graph graph, fv_stream stream);
    void (*graph_destroy)(fv_device *device, fv_graph graph);
    int32_t (*is_capturing)(fv_device *device, fv_stream stream);
    fv_status (*gemm)(fv_device *device, const fv_gemm *gemm, fv_stream stream); /* some size is above 0 */
    fv_status (*memory_info)(size_t *free_bytes, size_t *total_bytes, fv_device *device);
    void (*destroy)(fv_device *device); /* the device itself, with the context */
} fv_device_ops;

struct fv_device {
    const char *name; /* "cpu", "cuda:0" */
    char description[256];
    const fv_device_ops *ops;
    const struct fv_kernel_table *const *tables; /* weakest to strongest, the last is the default */
    int32_t num_tables;
    const struct fv_layer_table *layers;   /* of an engine's forward pass; NULL: none */
    int32_t host_is_device;                /* 1: device arrays may be read on the host (the CPU) */
    int32_t num_workers;                   /* CPU workers or multiprocessors: what a schedule has to fill */
    const struct fv_device_probes *probes; /* NULL: none */
    fv_context *context;
    void *state;
};

/* Where and how a kernel runs. CPU kernels use the executor and run at once; the kernels of other
 * devices go to the stream. */
typedef struct fv_launch {
    fv_device *device;
    const fv_executor *executor;
    fv_stream stream;
} fv_launch;

/* The CPU device of a context: `tables` as in struct fv_device, kept. */
fv_status fv_cpu_device_create(fv_device **device, fv_context *context, const struct fv_kernel_table *const *tables,
                               int32_t num_tables);

#endif
