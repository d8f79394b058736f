/* The functions of the driver that have to do with contexts. Those of a test's own look for them here by name, as in
 * libcuda.so.1, to be a caller with contexts of its own. */
#include "cuda_emulator/context.h"

#include <cuda.h>
#include <stdlib.h>
#include <string.h>

#include <mutex>

enum { MOST_GPUS = 8, MOST_CURRENT = 16 };

struct CUctx_st {
    int gpu;
    int num_retained; /* of a primary one, which is there while this is above 0 */
    bool is_primary;
};

static std::mutex lock_of_primaries;
static CUctx_st primaries[MOST_GPUS];

/* Plain memory: threads of launches fill it (launch.cpp), and have nothing to do with contexts. */
static thread_local CUcontext current[MOST_CURRENT];
static thread_local int num_current;

int emu_num_gpus(void)
{
    const char *text = getenv("FOVEA_EMULATOR_GPUS");
    const int number = text ? atoi(text) : 0;
    return number > 0 && number <= MOST_GPUS ? number : 1;
}

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED CUresult cuInit(unsigned int) { return CUDA_SUCCESS; }

EXPORTED CUresult cuDeviceGet(CUdevice *gpu, int ordinal)
{
    if (ordinal < 0 || ordinal >= emu_num_gpus()) return CUDA_ERROR_INVALID_DEVICE;
    *gpu = ordinal;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice gpu)
{
    const std::lock_guard<std::mutex> guard(lock_of_primaries);
    if (gpu < 0 || gpu >= emu_num_gpus()) return CUDA_ERROR_INVALID_DEVICE;
    *context = &primaries[gpu];
    primaries[gpu].gpu = gpu;
    primaries[gpu].is_primary = true;
    primaries[gpu].num_retained++;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxRelease(CUdevice gpu)
{
    const std::lock_guard<std::mutex> guard(lock_of_primaries);
    if (gpu < 0 || gpu >= emu_num_gpus()) return CUDA_ERROR_INVALID_DEVICE;
    if (primaries[gpu].num_retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    primaries[gpu].num_retained--;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice gpu, unsigned int *flags, int *is_active)
{
    const std::lock_guard<std::mutex> guard(lock_of_primaries);
    if (gpu < 0 || gpu >= emu_num_gpus()) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *is_active = primaries[gpu].num_retained > 0;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxPushCurrent(CUcontext context)
{
    if (!context || (context->is_primary && context->num_retained == 0)) return CUDA_ERROR_INVALID_CONTEXT;
    if (num_current == MOST_CURRENT) return CUDA_ERROR_UNKNOWN;
    current[num_current++] = context;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxPopCurrent(CUcontext *context)
{
    if (num_current == 0) return CUDA_ERROR_INVALID_CONTEXT;
    *context = current[--num_current];
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = num_current > 0 ? current[num_current - 1] : NULL;
    return CUDA_SUCCESS;
}

/* As of before CUDA 13; the new context is current. */
EXPORTED CUresult cuCtxCreate_v2(CUcontext *context, unsigned int, CUdevice gpu)
{
    if (gpu < 0 || gpu >= emu_num_gpus()) return CUDA_ERROR_INVALID_DEVICE;
    *context = new CUctx_st{gpu, 0, false};
    return cuCtxPushCurrent(*context);
}

EXPORTED CUresult cuCtxDestroy(CUcontext context)
{
    if (num_current > 0 && current[num_current - 1] == context) num_current--;
    delete context;
    return CUDA_SUCCESS;
}

bool emu_has_context(void) { return num_current > 0; }

cudaError_t emu_context_check(void)
{
    CUcontext context = NULL;
    if (num_current == 0 && cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS) (void)cuCtxPushCurrent(context);
    context = current[num_current - 1];
    return context->is_primary && context->num_retained > 0 ? cudaSuccess : cudaErrorIncompatibleDriverContext;
}

void *emu_context_function(const char *name)
{
    static const struct {
        const char *name;
        void *function;
    } functions[] = {
        {"cuDeviceGet", (void *)cuDeviceGet},
        {"cuDevicePrimaryCtxRetain", (void *)cuDevicePrimaryCtxRetain},
        {"cuDevicePrimaryCtxRelease", (void *)cuDevicePrimaryCtxRelease},
        {"cuCtxPushCurrent", (void *)cuCtxPushCurrent},
        {"cuCtxPopCurrent", (void *)cuCtxPopCurrent},
    };
    for (const auto &known : functions)
        if (strcmp(known.name, name) == 0) return known.function;
    return NULL;
}
