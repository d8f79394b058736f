/* Numbers of any dtype as fp32 and back, at multiples of their size, bit for bit as core/float.h has them. */
#ifndef FV_KERNELS_CUDA_NUMBER_CUH
#define FV_KERNELS_CUDA_NUMBER_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "fovea/dtype.h"

/* log2(e) and its inverse: scores are kept in base 2. */
#define FV_LOG2E 1.4426950408889634f
#define FV_LN2 0.6931471805599453f

__device__ __forceinline__ int32_t fv_element_bytes(fv_dtype dtype)
{
    return dtype == FV_DTYPE_F32 ? 4 : dtype == FV_DTYPE_F16 || dtype == FV_DTYPE_BF16 ? 2 : 1;
}

/* What the cache's 8-bit formats stand for is exact in fp16. */
__device__ __forceinline__ float fv_float_of_fp8(uint8_t stored, __nv_fp8_interpretation_t format)
{
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(stored, format)));
}

/* One element. */
__device__ __forceinline__ float fv_element_load(const void *from, fv_dtype dtype)
{
    switch (dtype) {
    case FV_DTYPE_F32: return *(const float *)from;
    case FV_DTYPE_F16: return __half2float(*(const __half *)from);
    case FV_DTYPE_BF16: return __bfloat162float(*(const __nv_bfloat16 *)from);
    case FV_DTYPE_F8_E4M3: return fv_float_of_fp8(*(const uint8_t *)from, __NV_E4M3);
    case FV_DTYPE_F8_E5M2: return fv_float_of_fp8(*(const uint8_t *)from, __NV_E5M2);
    case FV_DTYPE_I8: return (float)*(const int8_t *)from;
    default: return 0;
    }
}

/* NaN keeps what core/float.h keeps of it; the hardware's conversions make one NaN of all. */
__device__ __forceinline__ uint32_t fv_bits_of_nan(float value, fv_dtype dtype)
{
    const uint32_t bits = __float_as_uint(value), sign = bits >> 31;
    if (dtype == FV_DTYPE_F16) return sign << 15 | 0x7fffu;
    if (dtype == FV_DTYPE_BF16) return bits >> 16 | 0x40u;
    return sign << 7 | 0x7fu;
}

__device__ __forceinline__ int8_t fv_int8_of_float(float value)
{
    const float number = value == value ? value : 0.0f;
    const float clamped = number > 127.0f ? 127.0f : number < -127.0f ? -127.0f : number;
    return (int8_t)(clamped + (clamped < 0 ? -0.5f : 0.5f));
}

__device__ __forceinline__ void fv_element_store(void *to, float value, fv_dtype dtype)
{
    const bool is_nan = value != value;
    switch (dtype) {
    case FV_DTYPE_F32: *(float *)to = value; break;
    case FV_DTYPE_F16:
        *(uint16_t *)to = is_nan ? (uint16_t)fv_bits_of_nan(value, dtype) : __half_as_ushort(__float2half_rn(value));
        break;
    case FV_DTYPE_BF16:
        *(uint16_t *)to = is_nan ? (uint16_t)fv_bits_of_nan(value, dtype)
                                 : __bfloat16_as_ushort(__float2bfloat16_rn(value));
        break;
    case FV_DTYPE_F8_E4M3:
    case FV_DTYPE_F8_E5M2:
        *(uint8_t *)to = is_nan ? (uint8_t)fv_bits_of_nan(value, dtype)
                                : __nv_cvt_float_to_fp8(value, __NV_SATFINITE,
                                                        dtype == FV_DTYPE_F8_E4M3 ? __NV_E4M3 : __NV_E5M2);
        break;
    case FV_DTYPE_I8: *(int8_t *)to = fv_int8_of_float(value); break;
    default: break;
    }
}

/* fp32 to a 16-bit type, and two of them packed as the tensor cores take them. */
template <class T> __device__ __forceinline__ T fv_narrow(float value);
template <> __device__ __forceinline__ __half fv_narrow<__half>(float value) { return __float2half_rn(value); }
template <> __device__ __forceinline__ __nv_bfloat16 fv_narrow<__nv_bfloat16>(float value)
{
    return __float2bfloat16_rn(value);
}

template <class T> __device__ __forceinline__ uint32_t fv_narrow_pair(float low, float high);
template <> __device__ __forceinline__ uint32_t fv_narrow_pair<__half>(float low, float high)
{
    const __half2 pair = __floats2half2_rn(low, high);
    return *(const uint32_t *)&pair;
}
template <> __device__ __forceinline__ uint32_t fv_narrow_pair<__nv_bfloat16>(float low, float high)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&pair;
}

/* And back. */
template <class T> __device__ __forceinline__ float2 fv_widen_pair(uint32_t pair);
template <> __device__ __forceinline__ float2 fv_widen_pair<__half>(uint32_t pair)
{
    return __half22float2(*(const __half2 *)&pair);
}
template <> __device__ __forceinline__ float2 fv_widen_pair<__nv_bfloat16>(uint32_t pair)
{
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

/* Two elements of a 1-byte dtype to a 16-bit type, in which all of their numbers are exact. */
template <class T, fv_dtype DTYPE> __device__ __forceinline__ uint32_t fv_widen_two(uint16_t two)
{
    if constexpr (DTYPE == FV_DTYPE_I8) {
        return fv_narrow_pair<T>((float)(int8_t)(two & 0xff), (float)(int8_t)(two >> 8));
    } else {
        const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(two, DTYPE == FV_DTYPE_F8_E4M3 ? __NV_E4M3 : __NV_E5M2);
        if constexpr (std::is_same<T, __half>::value) return (uint32_t)halves.x | (uint32_t)halves.y << 16;
        const float2 real = __half22float2(__half2(halves));
        return fv_narrow_pair<T>(real.x, real.y);
    }
}

/* The scale of a head: scales[0] where there is one for all, 1 where there is none. */
__device__ __forceinline__ float fv_scale_of_head(const float *scales, int32_t num_scales, int32_t head)
{
    if (!scales || num_scales == 0) return 1.0f;
    return scales[num_scales == 1 ? 0 : head];
}

/* Sums and maxima over the lanes of a warp. */
__device__ __forceinline__ float fv_warp_max(float value)
{
    for (int32_t step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

__device__ __forceinline__ float fv_warp_sum(float value)
{
    for (int32_t step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

#endif
