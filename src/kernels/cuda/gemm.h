/* Matrix products of the plugin: cuBLASLt, found at run time. */
#ifndef FV_KERNELS_CUDA_GEMM_H
#define FV_KERNELS_CUDA_GEMM_H

#include "core/device.h"

/* What a device keeps for its GEMM: fv_cuda_state.gemm. Loads nothing yet. */
typedef struct fv_cuda_gemm fv_cuda_gemm;

fv_status fv_cuda_gemm_create(fv_cuda_gemm **gemm, const fv_device *device);
void fv_cuda_gemm_destroy(fv_cuda_gemm *gemm, const fv_device *device); /* takes NULL */

/* fv_device_ops.gemm. */
fv_status fv_cuda_gemm_run(fv_device *device, const fv_gemm *gemm, fv_stream stream);

/* Waits for the stream, if products have run on it, and frees what they worked with. */
void fv_cuda_gemm_forget(fv_device *device, fv_stream stream);

#endif
