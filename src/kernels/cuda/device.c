/* Memory, streams, events and graphs of a CUDA GPU: the CUDA run-time, behind fv_device_ops.
 *
 * The run-time is linked statically and loads the driver itself, so that the plugin opens, and says why it
 * cannot serve, where there is no driver. It works in the GPU's primary context (context.h). Streams do not wait
 * for the default stream. */
#include "kernels/cuda/device.h"

#include <stdio.h>
#include <string.h>

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/layers/layers.h"

/* --- errors -------------------------------------------------------------------------------------------- */

fv_status fv_cuda_status(const fv_device *device, const char *what, cudaError_t error)
{
    if (error == cudaSuccess) return FV_OK;
    (void)cudaGetLastError();
    const fv_status status = error == cudaErrorMemoryAllocation ? FV_ERR_NO_MEMORY : FV_ERR_DEVICE;
    return fv_cuda_state_of(device)->host.fail(status, "%s: %s: %s (%s)", device->name, what, cudaGetErrorString(error),
                                               cudaGetErrorName(error));
}

static fv_status finish(const fv_device *device, int32_t has_entered, const char *what, cudaError_t error)
{
    fv_cuda_leave(device, has_entered);
    return fv_cuda_status(device, what, error);
}

/* --- memory -------------------------------------------------------------------------------------------- */

static fv_status no_memory(const fv_device *device, const char *kind, size_t bytes, cudaError_t error)
{
    if (error != cudaErrorMemoryAllocation) return fv_cuda_status(device, "allocation", error);
    (void)cudaGetLastError();
    return fv_cuda_state_of(device)->host.fail(FV_ERR_NO_MEMORY, "%s: no %s memory for %zu bytes", device->name, kind,
                                               bytes);
}

static fv_status cuda_alloc(void **memory, fv_device *device, size_t bytes)
{
    const int32_t has_entered = fv_cuda_enter(device);
    const cudaError_t error = cudaMalloc(memory, bytes ? bytes : 1);
    fv_cuda_leave(device, has_entered);
    return error == cudaSuccess ? FV_OK : no_memory(device, "device", bytes, error);
}

static void cuda_free(fv_device *device, void *memory)
{
    const int32_t has_entered = fv_cuda_enter(device);
    if (cudaFree(memory) != cudaSuccess) (void)cudaGetLastError();
    fv_cuda_leave(device, has_entered);
}

static fv_status cuda_alloc_host(void **memory, fv_device *device, size_t bytes)
{
    const int32_t has_entered = fv_cuda_enter(device);
    const cudaError_t error = cudaMallocHost(memory, bytes ? bytes : 1);
    fv_cuda_leave(device, has_entered);
    return error == cudaSuccess ? FV_OK : no_memory(device, "page-locked", bytes, error);
}

static void cuda_free_host(fv_device *device, void *memory)
{
    const int32_t has_entered = fv_cuda_enter(device);
    if (cudaFreeHost(memory) != cudaSuccess) (void)cudaGetLastError();
    fv_cuda_leave(device, has_entered);
}

static fv_status cuda_copy_in(fv_device *device, void *dst, const void *src, size_t bytes, fv_stream stream)
{
    const int32_t has_entered = fv_cuda_enter(device);
    return finish(device, has_entered, "copy to the device",
                  cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, (cudaStream_t)stream));
}

static fv_status cuda_copy_out(fv_device *device, void *dst, const void *src, size_t bytes, fv_stream stream)
{
    const int32_t has_entered = fv_cuda_enter(device);
    return finish(device, has_entered, "copy to the host",
                  cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, (cudaStream_t)stream));
}

static fv_status cuda_fill(fv_device *device, void *dst, uint8_t value, size_t bytes, fv_stream stream)
{
    const int32_t has_entered = fv_cuda_enter(device);
    return finish(device, has_entered, "fill", cudaMemsetAsync(dst, value, bytes, (cudaStream_t)stream));
}

static fv_status cuda_memory_info(size_t *free_bytes, size_t *total_bytes, fv_device *device)
{
    const int32_t has_entered = fv_cuda_enter(device);
    return finish(device, has_entered, "asking for free memory", cudaMemGetInfo(free_bytes, total_bytes));
}

/* --- streams, events, graphs --------------------------------------------------------------------------- */

static fv_status cuda_stream_create(fv_stream *stream, fv_device *device)
{
    const int32_t has_entered = fv_cuda_enter(device);
    return finish(device, has_entered, "stream",
                  cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking));
}

static void cuda_stream_destroy(fv_device *device, fv_stream stream)
{
    const int32_t has_entered = fv_cuda_enter(device);
    fv_cuda_gemm_forget(device, stream);
    if (cudaStreamDestroy((cudaStream_t)stream) != cudaSuccess) (void)cudaGetLastError();
    fv_cuda_leave(device, has_entered);
}

static fv_status cuda_stream_synchronize(fv_device *device, fv_stream stream)
{
    const int32_t has_entered = fv_cuda_enter(device);
    return finish(device, has_entered, "waiting for a stream", cudaStreamSynchronize((cudaStream_t)stream));
}

static fv_status cuda_event_create(fv_event *event, fv_device *device)
{
    const int32_t has_entered = fv_cuda_enter(device);
    return finish(device, has_entered, "event", cudaEventCreateWithFlags((cudaEvent_t *)event, cudaEventDisableTiming));
}

static void cuda_event_destroy(fv_device *device, fv_event event)
{
    const int32_t has_entered = fv_cuda_enter(device);
    if (cudaEventDestroy((cudaEvent_t)event) != cudaSuccess) (void)cudaGetLastError();
    fv_cuda_leave(device, has_entered);
}

static fv_status cuda_event_record(fv_device *device, fv_event event, fv_stream stream)
{
    const int32_t has_entered = fv_cuda_enter(device);
    return finish(device, has_entered, "recording an event", cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream));
}

static fv_status cuda_event_synchronize(fv_device *device, fv_event event)
{
    const int32_t has_entered = fv_cuda_enter(device);
    return finish(device, has_entered, "waiting for an event", cudaEventSynchronize((cudaEvent_t)event));
}

static fv_status cuda_graph_begin(fv_device *device, fv_stream stream)
{
    if (!stream) {
        return fv_cuda_state_of(device)->host.fail(FV_ERR_INVALID,
                                                   "%s: the default stream cannot be captured; "
                                                   "accepted: one of fv_stream_create",
                                                   device->name);
    }
    const int32_t has_entered = fv_cuda_enter(device);
    return finish(device, has_entered, "capture",
                  cudaStreamBeginCapture((cudaStream_t)stream, cudaStreamCaptureModeThreadLocal));
}

static fv_status cuda_graph_end(fv_graph *graph, fv_device *device, fv_stream stream)
{
    const int32_t has_entered = fv_cuda_enter(device);
    cudaGraph_t captured = NULL;
    cudaGraphExec_t runnable = NULL;
    size_t num_nodes = 0;
    cudaError_t error = cudaStreamEndCapture((cudaStream_t)stream, &captured);
    if (error == cudaSuccess) error = cudaGraphGetNodes(captured, NULL, &num_nodes);
    if (error == cudaSuccess && num_nodes > 0) error = cudaGraphInstantiate(&runnable, captured, 0);
    if (captured) (void)cudaGraphDestroy(captured);
    fv_cuda_leave(device, has_entered);
    if (error == cudaSuccess && num_nodes == 0) {
        return fv_cuda_state_of(device)->host.fail(FV_ERR_DEVICE, "%s: nothing was captured", device->name);
    }
    *graph = runnable;
    return fv_cuda_status(device, "end of a capture", error);
}

static fv_status cuda_graph_launch(fv_device *device, fv_graph graph, fv_stream stream)
{
    const int32_t has_entered = fv_cuda_enter(device);
    return finish(device, has_entered, "launching a graph",
                  cudaGraphLaunch((cudaGraphExec_t)graph, (cudaStream_t)stream));
}

static void cuda_graph_destroy(fv_device *device, fv_graph graph)
{
    const int32_t has_entered = fv_cuda_enter(device);
    if (cudaGraphExecDestroy((cudaGraphExec_t)graph) != cudaSuccess) (void)cudaGetLastError();
    fv_cuda_leave(device, has_entered);
}

static int32_t cuda_is_capturing(fv_device *device, fv_stream stream)
{
    enum cudaStreamCaptureStatus found = cudaStreamCaptureStatusNone;
    const int32_t has_entered = fv_cuda_enter(device);
    const cudaError_t error = cudaStreamIsCapturing((cudaStream_t)stream, &found);
    if (error != cudaSuccess) (void)cudaGetLastError();
    fv_cuda_leave(device, has_entered);
    return error == cudaSuccess && found != cudaStreamCaptureStatusNone;
}

/* --- the device ---------------------------------------------------------------------------------------- */

static void cuda_destroy(fv_device *device)
{
    const fv_allocator allocator = fv_cuda_state_of(device)->host.allocator;
    fv_cuda_gemm_destroy(fv_cuda_state_of(device)->gemm, device);
    fv_cuda_context_close(&fv_cuda_state_of(device)->context);
    allocator.free(allocator.user, device->state);
    allocator.free(allocator.user, device);
}

static const fv_device_ops cuda_ops = {
    .alloc = cuda_alloc,
    .free = cuda_free,
    .alloc_host = cuda_alloc_host,
    .free_host = cuda_free_host,
    .copy_in = cuda_copy_in,
    .copy_out = cuda_copy_out,
    .fill = cuda_fill,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .stream_synchronize = cuda_stream_synchronize,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_synchronize = cuda_event_synchronize,
    .graph_begin = cuda_graph_begin,
    .graph_end = cuda_graph_end,
    .graph_launch = cuda_graph_launch,
    .graph_destroy = cuda_graph_destroy,
    .is_capturing = cuda_is_capturing,
    .gemm = fv_cuda_gemm_run,
    .memory_info = cuda_memory_info,
    .destroy = cuda_destroy,
};

/* Why there is no GPU at all. */
static fv_status no_gpus(const fv_plugin_host *host, int32_t index, cudaError_t error)
{
    int driver = 0;
    (void)cudaGetLastError();
    (void)cudaDriverGetVersion(&driver);
    if (error == cudaErrorInsufficientDriver && driver > 0) {
        return host->fail(FV_ERR_UNSUPPORTED,
                          "no device 'cuda:%d': the driver is for CUDA %d.%d; accepted: %d.%d and later", index,
                          driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    }
    if (error == cudaErrorInsufficientDriver) {
        return host->fail(FV_ERR_UNSUPPORTED, "no device 'cuda:%d': there is no NVIDIA driver (libcuda.so.1)", index);
    }
    if (error == cudaErrorNoDevice || error == cudaSuccess) {
        return host->fail(FV_ERR_UNSUPPORTED, "no device 'cuda:%d': the driver sees no GPU", index);
    }
    return host->fail(FV_ERR_UNSUPPORTED, "no device 'cuda:%d': %s (%s)", index, cudaGetErrorString(error),
                      cudaGetErrorName(error));
}

static fv_status check_gpu(struct cudaDeviceProp *gpu, const fv_plugin_host *host, int32_t index)
{
    int num_gpus = 0;
    cudaError_t error = cudaGetDeviceCount(&num_gpus);
    if (error != cudaSuccess || num_gpus == 0) return no_gpus(host, index, error);
    if (index >= num_gpus) {
        return host->fail(FV_ERR_UNSUPPORTED, "no device 'cuda:%d'; there are %d GPUs, from cuda:0", index, num_gpus);
    }
    error = cudaGetDeviceProperties(gpu, index);
    if (error != cudaSuccess) return no_gpus(host, index, error);
    if (gpu->major < FV_CUDA_MIN_MAJOR) {
        return host->fail(FV_ERR_UNSUPPORTED,
                          "device 'cuda:%d' is %s of compute capability %d.%d; accepted: %d.0 and later", index,
                          gpu->name, gpu->major, gpu->minor, FV_CUDA_MIN_MAJOR);
    }
    return FV_OK;
}

static void *alloc_zeroed(const fv_allocator *allocator, size_t bytes)
{
    void *memory = allocator->alloc(allocator->user, bytes, FV_CACHE_LINE);
    return memory ? memset(memory, 0, bytes) : NULL;
}

static void describe(fv_device *device, const struct cudaDeviceProp *gpu)
{
    int driver = 0;
    (void)cudaDriverGetVersion(&driver);
    snprintf(device->description, sizeof(device->description),
             "%.80s, compute capability %d.%d, %d multiprocessors, %.1f GiB, driver for CUDA %d.%d, kernels %s",
             gpu->name, gpu->major, gpu->minor, gpu->multiProcessorCount, (double)gpu->totalGlobalMem / (1 << 30),
             driver / 1000, driver % 1000 / 10, device->tables[device->num_tables - 1]->name);
}

static const struct fv_cuda_hopper_kernels *hopper_kernels_of(const struct cudaDeviceProp *gpu)
{
#if FOVEA_CUDA_HAS_90A
    if (gpu->major == 9 && gpu->minor == 0) return &fv_cuda_hopper;
#endif
    (void)gpu;
    return NULL;
}

fv_status fv_cuda_device_open(fv_device **out, const fv_plugin_host *host, int32_t index)
{
    static const fv_kernel_table *const tables[] = {&fv_cuda_kernels, &fv_hopper_kernels};
    struct cudaDeviceProp gpu;
    fv_status status = check_gpu(&gpu, host, index);
    if (status != FV_OK) return status;
    fv_device *device = alloc_zeroed(&host->allocator, sizeof(*device));
    fv_cuda_state *state = alloc_zeroed(&host->allocator, sizeof(*state));
    if (!device || !state) {
        status = host->fail(FV_ERR_NO_MEMORY, "no memory for device 'cuda:%d'", index);
        goto fail;
    }
    *state = (fv_cuda_state){
        .host = *host,
        .index = index,
        .max_shared = (int32_t)gpu.sharedMemPerBlockOptin,
        .hopper = hopper_kernels_of(&gpu),
    };
    snprintf(state->name, sizeof(state->name), "cuda:%d", index);
    *device = (fv_device){
        .name = state->name,
        .ops = &cuda_ops,
        .tables = tables,
        .num_tables = state->hopper ? 2 : 1,
        .layers = &fv_cuda_layers,
        .num_workers = gpu.multiProcessorCount,
        .probes = &fv_cuda_probes,
        .context = host->context,
        .state = state,
    };
    describe(device, &gpu);
    status = fv_cuda_context_open(device); /* the first call that needs the GPU itself */
    if (status == FV_OK) status = fv_cuda_overlap_open(device);
    if (status == FV_OK) status = fv_cuda_attend_open(device);
    if (status == FV_OK) status = fv_cuda_gemm_create(&state->gemm, device);
    if (status != FV_OK) goto fail;
    *out = device;
    return FV_OK;

fail:
    if (state) fv_cuda_context_close(&state->context);
    if (state) host->allocator.free(host->allocator.user, state);
    if (device) host->allocator.free(host->allocator.user, device);
    return status;
}
