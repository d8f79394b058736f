#include "kernels/cuda/context.h"

#include <string.h>

#include "core/compiler.h"
#include "kernels/cuda/device.h"

void *fv_cuda_driver_function(const char *name)
{
    enum cudaDriverEntryPointQueryResult found;
    void *function = NULL;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess) (void)cudaGetLastError();
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : NULL;
}

static fv_status find_functions(fv_cuda_context *context, const fv_device *device)
{
    const struct {
        const char *name;
        void *at;
    } functions[] = {
        {"cuDeviceGet", &context->find_gpu},
        {"cuDevicePrimaryCtxRetain", &context->retain},
        {"cuDevicePrimaryCtxRelease", &context->release},
        {"cuCtxPushCurrent", &context->push},
        {"cuCtxPopCurrent", &context->pop},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(functions); i++) {
        void *found = fv_cuda_driver_function(functions[i].name);
        if (!found) {
            return fv_cuda_state_of(device)->host.fail(FV_ERR_UNSUPPORTED, "%s: the driver has no %s", device->name,
                                                       functions[i].name);
        }
        memcpy(functions[i].at, &found, sizeof(found));
    }
    return FV_OK;
}

/* The driver's errors have the numbers of the run-time's. */
fv_status fv_cuda_context_open(const fv_device *device)
{
    fv_cuda_context *context = &fv_cuda_state_of(device)->context;
    const fv_status status = find_functions(context, device);
    if (status != FV_OK) return status;
    CUresult result = context->find_gpu(&context->gpu, fv_cuda_state_of(device)->index);
    if (result == CUDA_SUCCESS) result = context->retain(&context->primary, context->gpu);
    if (result != CUDA_SUCCESS) {
        context->primary = NULL;
        return fv_cuda_status(device, "its context", (cudaError_t)result);
    }
    const int32_t has_entered = fv_cuda_enter(device);
    const cudaError_t error = cudaFree(NULL); /* the run-time's own state of it */
    fv_cuda_leave(device, has_entered);
    return fv_cuda_status(device, "its context", error);
}

void fv_cuda_context_close(fv_cuda_context *context)
{
    if (context->primary) (void)context->release(context->gpu);
    context->primary = NULL;
}

int32_t fv_cuda_context_enter(const fv_cuda_context *context)
{
    return context->push(context->primary) == CUDA_SUCCESS;
}

void fv_cuda_context_leave(const fv_cuda_context *context, int32_t has_entered)
{
    CUcontext ours;
    if (has_entered) (void)context->pop(&ours);
}

int32_t fv_cuda_enter(const fv_device *device) { return fv_cuda_context_enter(&fv_cuda_state_of(device)->context); }

void fv_cuda_leave(const fv_device *device, int32_t has_entered)
{
    fv_cuda_context_leave(&fv_cuda_state_of(device)->context, has_entered);
}
