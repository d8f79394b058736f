/* kernels/cuda/ptx.cuh, for the emulator: the same functions, each as the section of the PTX ISA that is named there says. */
#ifndef FV_KERNELS_CUDA_PTX_CUH
#define FV_KERNELS_CUDA_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>
#include <time.h>

#include "cuda_emulator/matrix_of_warp.h"

typedef struct alignas(64) fv_tensor_map {
    uint64_t words[16];
} fv_tensor_map;

/* --- shared memory and copies to it ------------------------------------------------------------------------------- */

#define PTX_DYNAMIC_SHARED(ALIGNMENT, name) char *name = emu_self->block->shared
inline uint32_t ptx_shared_address(const void *pointer) { return emu_shared_address(pointer); }

inline void ptx_cp_async_16_or_zeros(void *shared, const void *global, int32_t bytes)
{
    emu_copy_async(emu_shared_at(emu_shared_address(shared), 16, 16), global, bytes, 16);
}
inline void ptx_cp_async_16(uint32_t shared, const void *global)
{
    emu_copy_async(emu_shared_at(shared, 16, 16), global, 16, 16);
}
inline void ptx_cp_async_16_of_256(uint32_t shared, const void *global) { ptx_cp_async_16(shared, global); }
inline void ptx_cp_async_stream_16(uint32_t shared, const void *global) { ptx_cp_async_16(shared, global); }
inline void ptx_cp_async_stream_16_or_zeros(void *shared, const void *global, int32_t bytes)
{
    ptx_cp_async_16_or_zeros(shared, global, bytes);
}
inline void ptx_cp_async_8_or_zeros(void *shared, const void *global, int32_t bytes)
{
    emu_copy_async(emu_shared_at(emu_shared_address(shared), 8, 8), global, bytes, 8);
}
inline void ptx_cp_async_commit(void) { emu_copy_commit(); }
template <int N> inline void ptx_cp_async_wait(void) { emu_copy_wait(N); }

inline uint4 ptx_ld_shared_v4(uint32_t address) { return *(const uint4 *)emu_shared_at(address, 16, 16); }

/* --- memory ------------------------------------------------------------------------------------------------------- */

inline uint64_t ptx_policy_of_streams(void) { return 0; }
inline void ptx_prefetch_l2(const void *) {}
template <class T> inline T ptx_keep(T number) { return number; }

inline float ptx_load_or(const float *from, bool is_there, float otherwise) { return is_there ? *from : otherwise; }
inline float4 ptx_load_or_zero(const float4 *from, bool is_there) { return is_there ? *from : make_float4(0, 0, 0, 0); }
inline uint2 ptx_load_or_zero(const uint2 *from, bool is_there) { return is_there ? *from : make_uint2(0, 0); }
inline void ptx_load_once(uint4 &words, const char *from) { words = *(const uint4 *)from; }

inline uint64_t ptx_nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* --- matrices of a warp ------------------------------------------------------------------------------------------- */

inline void ptx_ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { emu_ldmatrix(r, 4, address, false); }
inline void ptx_ldmatrix_x2(uint32_t (&r)[2], uint32_t address) { emu_ldmatrix(r, 2, address, false); }
inline void ptx_ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { emu_ldmatrix(r, 4, address, true); }
inline uint32_t ptx_movmatrix_trans(uint32_t two) { return emu_movmatrix_trans(two); }

template <class T> inline void ptx_mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    emu_mma<T>(d, a, b0, b1);
}

/* --- numbers ------------------------------------------------------------------------------------------------------- */

inline float ptx_flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
inline float ptx_ex2(float x) { return ptx_flushed(exp2f(ptx_flushed(x))); }
inline float ptx_sqrt(float x) { return sqrtf(x); }
inline float ptx_max_or_nan(float a, float b) { return isnan(a) || isnan(b) ? NAN : fmaxf(a, b); }
inline float ptx_min_or_nan(float a, float b) { return isnan(a) || isnan(b) ? NAN : fminf(a, b); }
inline int32_t ptx_redux_max(int32_t number) { return __reduce_max_sync(~0u, number); }

inline uint2 ptx_widen_fp8(uint32_t four, __nv_fp8_interpretation_t format)
{
    uint2 wide = make_uint2(0, 0);
    for (int i = 0; i < 4; i++) {
        const uint32_t half = __nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)(four >> 8 * i), format).x;
        (i < 2 ? wide.x : wide.y) |= half << i % 2 * 16;
    }
    return wide;
}
inline uint2 ptx_widen_e4m3(uint32_t four) { return ptx_widen_fp8(four, __NV_E4M3); }
inline uint2 ptx_widen_e5m2(uint32_t four) { return ptx_widen_fp8(four, __NV_E5M2); }

#endif
