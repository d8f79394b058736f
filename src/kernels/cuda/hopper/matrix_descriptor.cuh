/* How wgmma is told where its operands lie in shared memory. */
#ifndef FV_KERNELS_CUDA_HOPPER_MATRIX_DESCRIPTOR_CUH
#define FV_KERNELS_CUDA_HOPPER_MATRIX_DESCRIPTOR_CUH

#include "kernels/cuda/ptx.cuh"

/* "Matrix Descriptor": swizzle of 128 bytes. Offsets and address in units of 16 bytes; `stride` is between groups of
 * eight rows, `leading` between panels where the columns of a transposed operand span several. In a
 * cluster an address has bits above those 18. */
__device__ __forceinline__ uint64_t ptx_matrix_descriptor(const void *shared, uint32_t leading_bytes,
                                                          uint32_t stride_bytes)
{
    return (uint64_t)((ptx_shared_address(shared) & 0x3ffff) >> 4) | (uint64_t)(leading_bytes >> 4) << 16 |
           (uint64_t)(stride_bytes >> 4) << 32 | (uint64_t)1 << 62;
}

/* The same, `bytes` further on: shared memory ends before the address could carry into the next field. */
__device__ __forceinline__ uint64_t ptx_descriptor_at(uint64_t descriptor, uint32_t bytes)
{
    return (descriptor & 0xffffffff00000000u) | (uint32_t)((uint32_t)descriptor + (bytes >> 4));
}

#endif
