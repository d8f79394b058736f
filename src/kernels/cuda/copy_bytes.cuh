/* Runs of bytes, copied by a warp. */
#ifndef FV_KERNELS_CUDA_COPY_BYTES_CUH
#define FV_KERNELS_CUDA_COPY_BYTES_CUH

#include <stdint.h>

/* Several words are asked for before the first of them is written: for all that the compiler knows it could be one that
 * is still to be read. */
template <class Word> static __device__ __forceinline__ void copy_words(char *dst, const char *src, int64_t bytes)
{
    constexpr int AT_ONCE = 4;
    const int64_t count = bytes / (int64_t)sizeof(Word);
    for (int64_t first = threadIdx.x % 32; first < count; first += 32 * AT_ONCE) {
        Word words[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + 32 * i < count) words[i] = ((const Word *)src)[first + 32 * i];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + 32 * i < count) ((Word *)dst)[first + 32 * i] = words[i];
    }
}

/* By the widest accesses that both ends and the length allow. */
static __device__ __forceinline__ void copy_bytes(char *dst, const char *src, int64_t bytes)
{
    const uint64_t alignment = (uint64_t)dst | (uint64_t)src | (uint64_t)bytes;
    if (alignment % 16 == 0)
        copy_words<uint4>(dst, src, bytes);
    else if (alignment % 4 == 0)
        copy_words<uint32_t>(dst, src, bytes);
    else
        copy_words<uint8_t>(dst, src, bytes);
}

#endif
