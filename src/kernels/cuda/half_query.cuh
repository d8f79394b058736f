/* Queries next to entries of one byte, which are exact in fp16: those of bf16 become fp16 times a power of two of the row's own
 * that makes its largest element about 2^13, so that what fp16 cannot hold is 2^-37 of that. */
#ifndef FV_KERNELS_CUDA_HALF_QUERY_CUH
#define FV_KERNELS_CUDA_HALF_QUERY_CUH

#include "kernels/cuda/number.cuh"

/* Eight elements of bf16 as fp16 times a power of two, of a row that CHUNKS neighbouring lanes have, eight elements each; all
 * lanes of the warp together. What its scores lack then. */
template <int CHUNKS> static __device__ __forceinline__ float half_query_of(uint4 *eight)
{
    uint32_t *pairs = &eight->x;
    float2 reals[4];
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        reals[i] = fv_widen_pair<__nv_bfloat16>(pairs[i]);
        largest = fmaxf(largest, fmaxf(fabsf(reals[i].x), fabsf(reals[i].y)));
    }
#pragma unroll
    for (int step = 1; step < CHUNKS; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const uint32_t exponent = max(__float_as_uint(largest) >> 23, 40u); /* biased by 127 */
    const float factor = __uint_as_float((267 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = fv_narrow_pair<__half>(reals[i].x * factor, reals[i].y * factor);
    return __uint_as_float((exponent - 13) << 23);
}

#endif
