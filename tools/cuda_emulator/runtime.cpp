/* The CUDA run-time and driver as far as the plugin calls them, on the memory of the host: what a stream is asked for is
 * done by the call; a stream that is captured keeps it for a graph. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "cuda_emulator/context.h"
#include "cuda_emulator/emulator.h"
#include "cuda_emulator/launch.h"
#include "cuda_emulator/tensor_map.h"

enum { DEFAULT_SHARED_BYTES = 48 << 10, ALIGNMENT = 256 };
static const size_t TOTAL_BYTES = (size_t)8 << 30;

typedef std::vector<std::function<bool(void)>> work_list; /* false: it failed */

struct CUstream_st {
    bool is_captured;
    work_list captured;
};

struct CUgraph_st {
    work_list work;
};

struct CUgraphExec_st {
    work_list work;
};

struct CUevent_st {
    double ms;
};

static std::atomic<int> sticky_error; /* of a launch that failed: until the end of the process */
static thread_local cudaError_t last_error;

static cudaError_t keep(cudaError_t error)
{
    if (error != cudaSuccess) last_error = error;
    return error;
}

/* The answer of a call: what failed before, first. */
static cudaError_t answer(void) { return keep((cudaError_t)sticky_error.load()); }

/* Of a call that works in a context. */
static cudaError_t answer_in_context(void)
{
    const cudaError_t error = emu_context_check();
    return error == cudaSuccess ? answer() : keep(error);
}

static cudaError_t do_in(cudaStream_t stream, std::function<bool(void)> work)
{
    const cudaError_t error = answer_in_context();
    if (error != cudaSuccess) return error;
    if (stream && stream->is_captured)
        stream->captured.push_back(std::move(work));
    else if (!work())
        sticky_error = cudaErrorLaunchFailure;
    return cudaSuccess; /* of a launch: it fails where the stream is waited for, or the next call */
}

/* --- launches ---------------------------------------------------------------------------------------------------- */

static std::mutex lock_of_limits;
static std::unordered_map<const void *, uint32_t> most_shared;

/* Bytes of dynamic shared memory that a kernel may ask for (cudaFuncSetAttribute). */
static uint32_t most_shared_of(const void *kernel)
{
    const std::lock_guard<std::mutex> guard(lock_of_limits);
    const auto found = most_shared.find(kernel);
    return found == most_shared.end() ? (uint32_t)DEFAULT_SHARED_BYTES : found->second;
}

cudaError_t emu_launch_on(cudaStream_t stream, const emu_launch *launch)
{
    const dim3 grid = launch->grid;
    const bool is_grid = grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.y < 65536 && grid.z < 65536;
    const bool is_block = launch->num_threads > 0 && launch->num_threads <= 1024;
    if (!is_grid || !is_block) return keep(cudaErrorInvalidConfiguration);
    if (launch->cluster < 1 || launch->cluster > 8 || grid.x % launch->cluster != 0)
        return keep(cudaErrorInvalidConfiguration);
    if (launch->shared_bytes > most_shared_of(launch->kernel)) return keep(cudaErrorInvalidValue);
    return do_in(stream, [kept = *launch] { return emu_launch_run(&kept); });
}

/* --- the device -------------------------------------------------------------------------------------------------- */

static int number_of(const char *variable, int otherwise)
{
    const char *text = getenv(variable);
    const int number = text ? atoi(text) : 0;
    return number > 0 ? number : otherwise;
}

static int num_multiprocessors(void) { return number_of("FOVEA_EMULATOR_SMS", 4); }

/* Bytes of shared memory that a block may ask for. */
static int max_shared_bytes(void)
{
    const int bytes = number_of("FOVEA_EMULATOR_SHARED_BYTES", EMU_MAX_SHARED_BYTES);
    return bytes < EMU_MAX_SHARED_BYTES ? bytes : EMU_MAX_SHARED_BYTES;
}

static void find_capability(int *major, int *minor)
{
    const char *text = getenv("FOVEA_EMULATOR_CAPABILITY");
    if (text && sscanf(text, "%d.%d", major, minor) == 2) return;
    *major = 9;
    *minor = 0;
}

int emu_ptx_version(void)
{
    int major, minor;
    find_capability(&major, &minor);
    return number_of("FOVEA_EMULATOR_PTX", 10 * major + minor);
}

extern "C" {

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = emu_num_gpus();
    return answer();
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *device, int index)
{
    if (index < 0 || index >= emu_num_gpus()) return keep(cudaErrorInvalidDevice);
    memset(device, 0, sizeof(*device));
    snprintf(device->name, sizeof(device->name), "CUDA emulated on the CPU");
    find_capability(&device->major, &device->minor);
    device->multiProcessorCount = num_multiprocessors();
    device->totalGlobalMem = TOTAL_BYTES;
    device->sharedMemPerBlock = DEFAULT_SHARED_BYTES;
    device->sharedMemPerBlockOptin = (size_t)max_shared_bytes();
    device->sharedMemPerMultiprocessor = (size_t)max_shared_bytes() + 1024;
    device->maxThreadsPerBlock = 1024;
    device->warpSize = EMU_LANES;
    return answer();
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int)
{
    if (attribute != cudaDevAttrL2CacheSize) return keep(cudaErrorInvalidValue);
    *value = 1 << 20;
    return answer();
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    *free_bytes = *total_bytes = TOTAL_BYTES;
    return answer_in_context();
}

cudaError_t cudaGetLastError(void)
{
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return sticky_error ? (cudaError_t)sticky_error.load() : error;
}

const char *cudaGetErrorName(cudaError_t error)
{
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorIncompatibleDriverContext: return "cudaErrorIncompatibleDriverContext";
    default: return "an error of CUDA";
    }
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorLaunchFailure ? "a kernel failed; the emulator's report is on stderr"
                                           : cudaGetErrorName(error);
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > max_shared_bytes())
        return keep(cudaErrorInvalidValue);
    const std::lock_guard<std::mutex> guard(lock_of_limits);
    most_shared[kernel] = (uint32_t)value;
    return answer_in_context();
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *)
{
    memset(attributes, 0, sizeof(*attributes));
    attributes->ptxVersion = emu_ptx_version();
    return answer_in_context();
}

/* Maps are of the memory of a context. */
static CUresult encode_map(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *memory,
                           const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                           const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
    if (!emu_has_context()) return CUDA_ERROR_INVALID_CONTEXT;
    return tensor_map_encode(map, type, rank, memory, sizes, strides, box, steps, interleave, swizzle, promotion, fill);
}

/* The driver's functions that the plugin asks for by name. */
#if CUDART_VERSION < 12050
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long,
                                    cudaDriverEntryPointQueryResult *found)
#else
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned int, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found)
#endif
{
    *function = strcmp(name, "cuTensorMapEncodeTiled") == 0 ? (void *)encode_map : emu_context_function(name);
    *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return answer();
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

static cudaError_t allocate(void **memory, size_t bytes, bool is_device)
{
    *memory = NULL;
    const cudaError_t error = answer_in_context();
    if (error != cudaSuccess) return error;
    if (bytes > TOTAL_BYTES || posix_memalign(memory, ALIGNMENT, bytes) != 0) return keep(cudaErrorMemoryAllocation);
    if (is_device) memset(*memory, 0xff, bytes); /* pages of the host's that nobody uses cost nothing */
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **memory, size_t bytes) { return allocate(memory, bytes, true); }
cudaError_t cudaMallocHost(void **memory, size_t bytes) { return allocate(memory, bytes, false); }

cudaError_t cudaFree(void *memory)
{
    free(memory);
    return answer_in_context();
}

cudaError_t cudaFreeHost(void *memory) { return cudaFree(memory); }

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind, cudaStream_t stream)
{
    return do_in(stream, [=] {
        memcpy(to, from, bytes);
        return true;
    });
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    return do_in(stream, [=] {
        memset(to, value, bytes);
        return true;
    });
}

/* --- streams and events ------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int)
{
    *stream = new CUstream_st();
    return answer_in_context();
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    delete stream;
    return answer_in_context();
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return answer_in_context(); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int)
{
    *event = new CUevent_st();
    return answer_in_context();
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return answer_in_context();
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return do_in(stream, [=] {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        event->ms = (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
        return true;
    });
}

cudaError_t cudaEventSynchronize(cudaEvent_t) { return answer_in_context(); }

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    *ms = (float)(end->ms - start->ms);
    return answer_in_context();
}

/* --- graphs --------------------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode)
{
    if (!stream || stream->is_captured) return keep(cudaErrorInvalidValue);
    stream->is_captured = true;
    return answer_in_context();
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    if (!stream || !stream->is_captured) return keep(cudaErrorInvalidValue);
    *graph = new CUgraph_st{std::move(stream->captured)};
    stream->captured.clear();
    stream->is_captured = false;
    return answer_in_context();
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    *status = stream && stream->is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return answer_in_context();
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    static thread_local enum cudaStreamCaptureMode current;
    const enum cudaStreamCaptureMode before = current;
    current = *mode;
    *mode = before;
    return answer();
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *count)
{
    *count = graph->work.size();
    return answer_in_context();
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *runnable, cudaGraph_t graph, unsigned long long)
{
    *runnable = new CUgraphExec_st{graph->work};
    return answer_in_context();
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return answer_in_context();
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t runnable)
{
    delete runnable;
    return answer_in_context();
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t runnable, cudaStream_t stream)
{
    for (const std::function<bool(void)> &work : runnable->work) {
        const cudaError_t error = do_in(stream, work);
        if (error != cudaSuccess) return error;
    }
    return answer_in_context();
}

} /* extern "C" */
