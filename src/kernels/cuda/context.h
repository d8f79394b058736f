/* The GPU's primary context, current on a thread while the plugin calls CUDA.
 *
 * It is the one that other users of the run-time in the process have, too. But a thread may have another one current,
 * another GPU's or one of the caller's making, or none: each call pushes ours and pops it at its end, so that what
 * was prepared in it (memory, streams, what kernels may ask for) is there, and the thread is left as it was. The
 * run-time's own cudaSetDevice knows GPUs alone: it takes any context of the GPU for the right one, and to put back a
 * GPU that a thread never used makes a context there. */
#ifndef FV_KERNELS_CUDA_CONTEXT_H
#define FV_KERNELS_CUDA_CONTEXT_H

#include <cuda.h>

#include "core/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fv_cuda_context {
    CUcontext primary; /* NULL: not open */
    CUdevice gpu;
    __typeof__(cuDeviceGet) *find_gpu;
    __typeof__(cuDevicePrimaryCtxRetain) *retain;
    __typeof__(cuDevicePrimaryCtxRelease) *release;
    __typeof__(cuCtxPushCurrent) *push;
    __typeof__(cuCtxPopCurrent) *pop;
} fv_cuda_context;

/* The driver's function of that name, as of CUDA 12.0; NULL: it has none. */
void *fv_cuda_driver_function(const char *name);

/* Retains the context of fv_cuda_state.index, making it where there is none, or says why not: others may hold the GPU,
 * or its memory. close() takes one that is not open, too. */
fv_status fv_cuda_context_open(const fv_device *device);
void fv_cuda_context_close(fv_cuda_context *context);

/* Makes it the thread's current one; leave() takes what this returned. Pushing a context that is retained does not fail
 * while there is a driver, so calls look at nothing. */
int32_t fv_cuda_context_enter(const fv_cuda_context *context);
void fv_cuda_context_leave(const fv_cuda_context *context, int32_t has_entered);

/* The same of a device's. */
int32_t fv_cuda_enter(const fv_device *device);
void fv_cuda_leave(const fv_device *device, int32_t has_entered);

#ifdef __cplusplus
}
#endif
#endif
