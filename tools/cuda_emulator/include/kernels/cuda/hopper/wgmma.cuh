/* In place of the kernels' hopper/wgmma.cuh: the same functions, as the emulator does them (warpgroup.cpp). What they mean
 * is said there. */
#ifndef FV_KERNELS_CUDA_HOPPER_WGMMA_CUH
#define FV_KERNELS_CUDA_HOPPER_WGMMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda_emulator/warpgroup.h"
#include "kernels/cuda/hopper/matrix_descriptor.cuh"

static inline uint64_t ptx_anew(uint64_t descriptor) { return descriptor; }
static inline void ptx_wgmma_fence(void) { warpgroup_fence(); }
static inline void ptx_wgmma_commit(void) { warpgroup_commit(); }
template <int N> static inline void ptx_wgmma_wait(void) { warpgroup_wait(N); }
template <int N> static inline void ptx_wgmma_settle(float (&)[N]) {}
static inline void ptx_fence_proxy_async(void) {}

template <class T> constexpr matrix_type ptx_matrix_type = MATRIX_BF16;
template <> constexpr matrix_type ptx_matrix_type<__half> = MATRIX_F16;

#define PTX_WGMMA_SS(NAME, N, IS_TRANSPOSED)                                                                \
    template <class T> static inline void NAME(float(&d)[(N) / 2], uint64_t a, uint64_t b, int32_t adds)    \
    {                                                                                                       \
        const wgmma_product product = {d, N, ptx_matrix_type<T>, true, IS_TRANSPOSED, adds != 0, a, b, {}}; \
        warpgroup_multiply(&product);                                                                       \
    }
#define PTX_WGMMA_RS(NAME, N, IS_TRANSPOSED)                                                                        \
    template <class T> static inline void NAME(float(&d)[(N) / 2], const uint32_t(&a)[4], uint64_t b, int32_t adds) \
    {                                                                                                               \
        const wgmma_product product = {d, N, ptx_matrix_type<T>,      false, IS_TRANSPOSED, adds != 0,              \
                                       0, b, {a[0], a[1], a[2], a[3]}};                                             \
        warpgroup_multiply(&product);                                                                               \
    }

PTX_WGMMA_SS(ptx_wgmma_m64n64k16_ss, 64, false)
PTX_WGMMA_SS(ptx_wgmma_m64n128k16_ss, 128, false)
PTX_WGMMA_SS(ptx_wgmma_m64n192k16_ss, 192, false)
PTX_WGMMA_SS(ptx_wgmma_m64n256k16_ss_nt, 256, true)
PTX_WGMMA_RS(ptx_wgmma_m64n16k16_rs, 16, false)
PTX_WGMMA_RS(ptx_wgmma_m64n32k16_rs, 32, false)
PTX_WGMMA_RS(ptx_wgmma_m64n64k16_rs, 64, false)
PTX_WGMMA_RS(ptx_wgmma_m64n64k16_rs_nt, 64, true)
PTX_WGMMA_RS(ptx_wgmma_m64n128k16_rs_nt, 128, true)
PTX_WGMMA_RS(ptx_wgmma_m64n256k16_rs_nt, 256, true)

#endif
