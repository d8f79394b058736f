/* A CUDA GPU as a device of the library: what the files of the plugin share. */
#ifndef FV_KERNELS_CUDA_DEVICE_H
#define FV_KERNELS_CUDA_DEVICE_H

#include <cuda_runtime_api.h>

#include "core/plugin.h"
#include "kernels/cuda/context.h"

struct fv_cuda_gemm;           /* kernels/cuda/gemm.h */
struct fv_cuda_hopper_kernels; /* kernels/cuda/hopper/attend.cuh */

#ifdef __cplusplus
extern "C" {
#endif

/* The oldest GPUs that the kernels run on: compute capability 8.0. */
#define FV_CUDA_MIN_MAJOR 8

typedef struct fv_cuda_state {
    fv_plugin_host host;
    int32_t index; /* of the CUDA run-time */
    fv_cuda_context context;
    int32_t max_shared;                          /* bytes of shared memory that a block may have */
    int32_t overlaps;                            /* kernels launched so wait for the one before: overlap.cuh */
    const struct fv_cuda_hopper_kernels *hopper; /* NULL: not compute capability 9.0, or built without 90a */
    void *encode_map; /* cuTensorMapEncodeTiled of the driver; NULL: not Hopper, or the driver has none */
    struct fv_cuda_gemm *gemm;
    char name[32];
} fv_cuda_state;

/* Opens GPU `index`: fv_plugin.device_open. */
fv_status fv_cuda_device_open(fv_device **device, const fv_plugin_host *host, int32_t index);

/* FV_OK, or the failure of `what` on the device as a status with a text. Clears the error that CUDA keeps. */
fv_status fv_cuda_status(const fv_device *device, const char *what, cudaError_t error);

static inline fv_cuda_state *fv_cuda_state_of(const fv_device *device) { return (fv_cuda_state *)device->state; }

#ifdef __cplusplus
}
#endif
#endif
