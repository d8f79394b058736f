/* How keys and values of one byte come to the kernel of many rows (attend_rows.cuh): half a tile a warp, as they are to the last
 * panels of the place where the 16-bit rows that they become will be, and widened there by the warp that asked for them. A row's
 * bytes are overwritten by its own elements alone, so the lanes that have it meet between reading and writing.
 *
 *   row 5 of heads of 128    |     panel 0     |     panel 1     |
 *                            |                 | bytes           |    copied
 *                            | elements 0 ..63 | 64 .. 127       |    widened
 */
#ifndef FV_KERNELS_CUDA_HOPPER_ROWS_WIDEN_CUH
#define FV_KERNELS_CUDA_HOPPER_ROWS_WIDEN_CUH

#include "kernels/cuda/hopper/rows_block.cuh"
#include "kernels/cuda/widen.cuh"

/* Lanes that have a row, 16 elements each, and rows that a warp has at once. */
template <class S> struct rows_lanes {
    static constexpr int OF_ROW = S::HEAD / 16, ROWS = 32 / OF_ROW;
};

/* Where 16 bytes of a row are copied to: as a box of a map has them. */
template <class S> static __device__ __forceinline__ int32_t bytes_offset(int32_t row, int32_t chunk)
{
    return S::FIRST_BYTES_PANEL * S::TILE * FV_PANEL_ROW_BYTES + panel_offset(S::TILE, row, chunk);
}

/* 32 rows of `size` elements, of which each lane has where one lies: asked for. Chunks behind a row's last one are zeros. */
template <class S>
static __device__ __forceinline__ void copy_rows_bytes(char *to, uint64_t own, int32_t size, const void *somewhere)
{
    typedef rows_lanes<S> L;
    const int32_t lane = threadIdx.x % 32, chunk = lane % L::OF_ROW;
    const bool is_there = chunk * 16 < size;
#pragma unroll 4
    for (int row0 = 0; row0 < 32; row0 += L::ROWS) {
        const int32_t row = row0 + lane / L::OF_ROW;
        const char *from = (const char *)__shfl_sync(~0u, own, row);
        ptx_cp_async_16_or_zeros(to + bytes_offset<S>(row, chunk), is_there ? from + chunk * 16 : somewhere,
                                 is_there ? 16 : 0);
    }
}

/* A lane's 16 bytes of a row, as elements. */
template <class S, fv_dtype DTYPE>
static __device__ __forceinline__ void widen_chunk(char *to, int32_t row, int32_t chunk, uint4 bytes)
{
    const int32_t turn = S::PANELS > 1 ? chunk / 4 % 2 : 0; /* eight lanes write to all banks */
    const uint4 in_turn = turn ? make_uint4(bytes.z, bytes.w, bytes.x, bytes.y) : bytes;
    const uint2 a = fv_half_four<DTYPE>(in_turn.x), b = fv_half_four<DTYPE>(in_turn.y);
    const uint2 c = fv_half_four<DTYPE>(in_turn.z), d = fv_half_four<DTYPE>(in_turn.w);
    *(uint4 *)(to + panel_offset(S::TILE, row, 2 * chunk + turn)) = make_uint4(a.x, a.y, b.x, b.y);
    *(uint4 *)(to + panel_offset(S::TILE, row, 2 * chunk + 1 - turn)) = make_uint4(c.x, c.y, d.x, d.y);
}

/* The warp's rows, which are there. */
template <class S, fv_dtype DTYPE> static __device__ __forceinline__ void widen_rows_of(char *to)
{
    typedef rows_lanes<S> L;
    const int32_t lane = threadIdx.x % 32, chunk = lane % L::OF_ROW;
#pragma unroll 1
    for (int row0 = lane / L::OF_ROW; row0 < S::HALF; row0 += S::WIDENED * L::ROWS) {
        uint4 bytes[S::WIDENED];
#pragma unroll
        for (int i = 0; i < S::WIDENED; i++) bytes[i] = *(const uint4 *)(to + bytes_offset<S>(row0 + i * L::ROWS, chunk));
        __syncwarp();
#pragma unroll
        for (int i = 0; i < S::WIDENED; i++) widen_chunk<S, DTYPE>(to, row0 + i * L::ROWS, chunk, bytes[i]);
    }
}

template <class S> static __device__ __forceinline__ void widen_rows(char *to, fv_dtype dtype)
{
    switch (dtype) {
    case FV_DTYPE_F8_E4M3: widen_rows_of<S, FV_DTYPE_F8_E4M3>(to); break;
    case FV_DTYPE_F8_E5M2: widen_rows_of<S, FV_DTYPE_F8_E5M2>(to); break;
    default: widen_rows_of<S, FV_DTYPE_I8>(to); break;
    }
}

#endif
