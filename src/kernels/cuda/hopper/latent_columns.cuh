/* Sums of products whose 64 rows are a tile's keys, or values, and whose ROWS columns are the rows of queries: which of
 * them a thread has. */
#ifndef FV_KERNELS_CUDA_HOPPER_LATENT_COLUMNS_CUH
#define FV_KERNELS_CUDA_HOPPER_LATENT_COLUMNS_CUH

#include "kernels/cuda/hopper/mbarrier.cuh"
#include "kernels/cuda/hopper/panel.cuh"

/* The thread's i-th column, and the element of a sum that it has there, of the first or second half of 16 rows. */
static __device__ __forceinline__ int32_t column_of_thread(int i)
{
    return i / 2 * 8 + (int32_t)(threadIdx.x % 4 * 2) + i % 2;
}
static __device__ __forceinline__ constexpr int element_of_column(int i, int which)
{
    return i / 2 * 4 + which * 2 + i % 2;
}

/* Latents of `bytes` that lie together in a page, at most `most`: a copy is of so many where all of them are seen. */
static __device__ __forceinline__ int32_t find_run_latents(const attend_args *args, int32_t bytes, int32_t most)
{
    const int32_t page = (int32_t)args->block.by;
    return args->k[0].plane.slot_stride == bytes ? fv_min_i32(page & -page, most) : 1;
}

/* The thread's first row of 64: a key of the tile, or a value of a panel. */
static __device__ __forceinline__ int32_t key_of_thread(void)
{
    return (int32_t)(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
}

static __device__ __forceinline__ int32_t warp_of_group(void) { return uniform((int32_t)threadIdx.x / 32 % 4); }

/* A product of 16, 32 or 64 columns, 16 deep. */
template <class T>
static __device__ __forceinline__ void multiply_columns(float (&d)[8], const uint32_t (&a)[4], uint64_t b, int32_t adds)
{
    ptx_wgmma_m64n16k16_rs<T>(d, a, b, adds);
}
template <class T>
static __device__ __forceinline__ void multiply_columns(float (&d)[16], const uint32_t (&a)[4], uint64_t b,
                                                        int32_t adds)
{
    ptx_wgmma_m64n32k16_rs<T>(d, a, b, adds);
}
template <class T>
static __device__ __forceinline__ void multiply_columns(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                                        int32_t adds)
{
    ptx_wgmma_m64n64k16_rs<T>(d, a, b, adds);
}

/* What the thread's columns are relative to by `known` and by `now`, of all columns; true: some of them moved. */
template <int ROWS>
static __device__ __forceinline__ bool load_column_maxima(float (&before)[ROWS / 4], float (&after)[ROWS / 4],
                                                          const float *known, const float *now)
{
    bool moves = false;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i += 2) {
        const float2 was = *(const float2 *)&known[column_of_thread(i)];
        const float2 is = *(const float2 *)&now[column_of_thread(i)];
        before[i] = was.x;
        before[i + 1] = was.y;
        after[i] = is.x;
        after[i + 1] = is.y;
        moves = moves || was.x != is.x || was.y != is.y;
    }
    return moves;
}

/* -inf for keys that a row does not see. */
template <int ROWS>
static __device__ __forceinline__ void mask_columns(float (&s)[ROWS / 2], const attend_row *rows, int32_t tile_first)
{
    const int32_t origin = tile_first + key_of_thread();
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const attend_row *row = &rows[column_of_thread(i)];
        const int32_t first = row->first - origin, end = row->end - origin;
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (half * 8 < first || half * 8 >= end) s[element_of_column(i, half)] = -INFINITY;
    }
}

/* To a panel of ROWS rows of 64 keys, as products take P^T; they read it behind a fence (ptx_fence_proxy_async) and a
 * barrier. */
template <int ROWS> static __device__ __forceinline__ void store_columns(char *panel, const uint32_t (&p)[ROWS / 4])
{
    const int32_t lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8;
    const int32_t chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
    const uint32_t to = ptx_shared_address(panel) + panel_offset(ROWS, row, chunk);
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
        ptx_stmatrix_x4_trans(to + i * 16 * FV_PANEL_ROW_BYTES, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
}

/* Of a column, from what the eight lanes have that share it. */
static __device__ __forceinline__ float sum_of_column(float value)
{
#pragma unroll
    for (int step = 4; step < 32; step *= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

#endif
