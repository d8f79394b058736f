/* Runs of bytes, copied by a warp. */
#ifndef FV_KERNELS_CUDA_COPY_BYTES_CUH
#define FV_KERNELS_CUDA_COPY_BYTES_CUH

#include <stdint.h>

template <class Word> static __device__ __forceinline__ void copy_words(char *dst, const char *src, int64_t bytes)
{
    for (int64_t at = threadIdx.x % 32; at < bytes / (int64_t)sizeof(Word); at += 32)
        ((Word *)dst)[at] = ((const Word *)src)[at];
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
