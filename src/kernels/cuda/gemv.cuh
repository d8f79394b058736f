/* Products of a few rows with weights. */
#ifndef FV_KERNELS_CUDA_GEMV_CUH
#define FV_KERNELS_CUDA_GEMV_CUH

#include "core/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Up to 4 rows, bf16 by bf16 transposed, 16-byte aligned: what fv_cuda_gemv takes.
 *
 * b is taken for weights: it may be read before the kernels sent to the stream before have ended. Who fills it
 * by a kernel synchronises before the first product. */
int32_t fv_cuda_gemv_fits(const fv_gemm *gemm);
fv_status fv_cuda_gemv(const fv_launch *launch, const fv_gemm *gemm);

#ifdef __cplusplus
}
#endif
#endif
