/* Entries of one byte, four at a time, as fp16, in which all of their numbers are exact. */
#ifndef FV_KERNELS_CUDA_WIDEN_CUH
#define FV_KERNELS_CUDA_WIDEN_CUH

#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"

/* Two int8, each with its sign bit turned, in the low bytes of the halves of a word of which the high ones are those of 1024 in
 * fp16: 1024 + 128 + the number. */
static __device__ __forceinline__ uint32_t fv_half_pair_of_int8(uint32_t biased)
{
    const uint32_t bias = 0x64806480;
    const __half2 pair = __hsub2(*(const __half2 *)&biased, *(const __half2 *)&bias);
    return *(const uint32_t *)&pair;
}

/* Elements 0 and 1 in x, 2 and 3 in y. */
template <fv_dtype DTYPE> static __device__ __forceinline__ uint2 fv_half_four(uint32_t four)
{
    if constexpr (DTYPE == FV_DTYPE_I8) {
        const uint32_t turned = four ^ 0x80808080;
        return make_uint2(fv_half_pair_of_int8(__byte_perm(turned, 0x64646464, 0x4140)),
                          fv_half_pair_of_int8(__byte_perm(turned, 0x64646464, 0x4342)));
    }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
    if constexpr (DTYPE == FV_DTYPE_F8_E4M3) return ptx_widen_e4m3(four);
    if constexpr (DTYPE == FV_DTYPE_F8_E5M2) return ptx_widen_e5m2(four);
#endif
    return make_uint2(fv_widen_two<__half, DTYPE>((uint16_t)four), fv_widen_two<__half, DTYPE>((uint16_t)(four >> 16)));
}

#endif
