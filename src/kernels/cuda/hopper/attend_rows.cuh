/* Attention of many rows on Hopper (wgmma): 128 rows x tiles of keys, a warpgroup for each 64 rows.
 *
 *   tile t      K, V in shared memory   t + 1 the same   t + 2 on its way (cp.async)
 *
 *   S(t + 1) = Q K(t + 1)       issued, then
 *   O += P(t) V(t)              issued; while it runs:
 *   softmax of S(t + 1)         maxima, exponentials, in the registers of S
 *   O to the new maxima, P(t + 1)
 *
 * P stays in registers: the layout of a sum is that of an operand. One barrier for each tile. After the design of
 * FlashAttention-3 (arXiv 2407.08608, section 3.2, algorithm 2), without its roles of warps. */
#ifndef FV_KERNELS_CUDA_HOPPER_ATTEND_ROWS_CUH
#define FV_KERNELS_CUDA_HOPPER_ATTEND_ROWS_CUH

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/hopper/panel.cuh"

/* 16-bit dtype, head sizes of keys and values, keys of a tile. */
template <class Element, int HEAD_, int VALUE_, int TILE_> struct rows_shape {
    using T = Element;
    static constexpr int HEAD = HEAD_, VALUE = VALUE_, TILE = TILE_, STAGES = 3, THREADS = 256, BLOCK_M = 128;
    static constexpr int K_BYTES = TILE * HEAD * 2, V_BYTES = TILE * VALUE * 2;
    static_assert(HEAD % 64 == 0 && VALUE % 64 == 0 && TILE % 16 == 0, "whole panels and instructions");
};

template <class S> struct rows_memory {
    alignas(1024) char q[S::BLOCK_M * S::HEAD * 2];
    alignas(1024) char k[S::STAGES][S::K_BYTES];
    alignas(1024) char v[S::STAGES][S::V_BYTES];
    tile_places<S::TILE> places[2]; /* of tiles t + 2 and t + 3, in turn */
    attend_row rows[S::BLOCK_M];
    attend_keys keys;
    int32_t has_item;
    attend_job job;
};

template <class S>
static __device__ __forceinline__ void load_rows_tile(rows_memory<S> *memory, const attend_args *args, int32_t tile)
{
    const int32_t stage = tile % S::STAGES;
    const tile_places<S::TILE> *places = &memory->places[tile % 2];
    copy_to_panels<S::TILE, S::HEAD, S::THREADS>(memory->k[stage], places->k, args->params.q, args->params.head_size);
    copy_to_panels<S::TILE, S::VALUE, S::THREADS>(memory->v[stage], places->v, args->params.q,
                                                  args->params.v_head_size);
}

/* S = Q K of a tile, for a warpgroup's rows: issued. */
template <class S>
static __device__ __forceinline__ void multiply_rows_keys(float (&s)[S::TILE / 2], const rows_memory<S> *memory,
                                                          int32_t stage, int32_t group)
{
    using T = typename S::T;
    const uint64_t q_at = ptx_matrix_descriptor(memory->q + group * 64 * FV_PANEL_ROW_BYTES, 16, 1024);
    const uint64_t k_at = ptx_matrix_descriptor(memory->k[stage], 16, 1024);
    ptx_wgmma_fence();
#pragma unroll
    for (int d = 0; d < S::HEAD; d += 16) {
        const uint64_t q = ptx_descriptor_at(q_at, d / 64 * S::BLOCK_M * FV_PANEL_ROW_BYTES + d % 64 * 2);
        const uint64_t k = ptx_descriptor_at(k_at, d / 64 * S::TILE * FV_PANEL_ROW_BYTES + d % 64 * 2);
        if constexpr (S::TILE == 96) ptx_wgmma_m64n96k16_ss<T>(s, q, k, d > 0);
        if constexpr (S::TILE == 128) ptx_wgmma_m64n128k16_ss<T>(s, q, k, d > 0);
    }
    ptx_wgmma_commit();
}

/* O += P V: issued. */
template <class S>
static __device__ __forceinline__ void multiply_rows_values(float (&out)[S::VALUE / 2],
                                                            const uint32_t (&p)[S::TILE / 4],
                                                            const rows_memory<S> *memory, int32_t stage)
{
    using T = typename S::T;
    const uint64_t v_at = ptx_matrix_descriptor(memory->v[stage], S::TILE * FV_PANEL_ROW_BYTES, 1024);
    ptx_wgmma_fence();
#pragma unroll
    for (int key = 0; key < S::TILE; key += 16) {
        const uint32_t a[4] = {p[key / 4], p[key / 4 + 1], p[key / 4 + 2], p[key / 4 + 3]};
        const uint64_t v = ptx_descriptor_at(v_at, key * FV_PANEL_ROW_BYTES);
        if constexpr (S::VALUE == 64) ptx_wgmma_m64n64k16_rs_nt<T>(out, a, v, 1);
        if constexpr (S::VALUE == 128) ptx_wgmma_m64n128k16_rs_nt<T>(out, a, v, 1);
    }
    ptx_wgmma_commit();
}

/* Waits for the tiles on their way; what every thread wrote is then seen by wgmma. */
static __device__ __forceinline__ void wait_for_tiles(void)
{
    ptx_cp_async_wait<0>();
    ptx_fence_proxy_async();
    __syncthreads();
}

template <class S>
static __device__ __forceinline__ void attend_rows_tiles(float (&out)[S::VALUE / 2], row_sums *sums,
                                                         rows_memory<S> *memory, const attend_args *args)
{
    using T = typename S::T;
    const attend_job *job = &memory->job;
    const int32_t group = warpgroup_of_thread(), row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const float scale = args->params.scale * job->k_head_scale * FV_LOG2E;
    const int32_t first_key = memory->keys.first;
    const int32_t num_tiles = uniform((memory->keys.end - first_key + S::TILE - 1) / S::TILE);

    for (int32_t tile = 0; tile < 2; tile++)
        find_places<S::TILE>(&memory->places[tile], args, job, &memory->keys, first_key + tile * S::TILE);
    __syncthreads();
    load_rows_tile<S>(memory, args, 0);
    ptx_cp_async_commit();
    wait_for_tiles();
    find_places<S::TILE>(&memory->places[0], args, job, &memory->keys, first_key + 2 * S::TILE);
    if (num_tiles > 1) load_rows_tile<S>(memory, args, 1);
    ptx_cp_async_commit();

    float s[S::TILE / 2], max[2], factor[2];
    uint32_t p[S::TILE / 4];
    multiply_rows_keys<S>(s, memory, 0, group);
    ptx_wgmma_wait<0>();
    ptx_wgmma_settle(s);
    score_keys(s, memory->rows, &memory->keys, row, 0, first_key, S::TILE, scale);
    find_row_maxima(max, s);
    raise_row_maxima(factor, sums, max);
    exponentiate_keys(s, sums);
    narrow_keys<T>(p, s, sums);

#pragma unroll 1
    for (int32_t tile = 0; tile + 1 < num_tiles; tile++) {
        wait_for_tiles(); /* tile + 1 is there; tile - 1 is done with by all */
        if (tile + 2 < num_tiles) load_rows_tile<S>(memory, args, tile + 2);
        ptx_cp_async_commit();
        find_places<S::TILE>(&memory->places[(tile + 3) % 2], args, job, &memory->keys,
                             first_key + (tile + 3) * S::TILE);
        multiply_rows_keys<S>(s, memory, (tile + 1) % S::STAGES, group);
        multiply_rows_values<S>(out, p, memory, tile % S::STAGES);
        ptx_wgmma_wait<1>();
        ptx_wgmma_settle(s);
        score_keys(s, memory->rows, &memory->keys, row, 0, first_key + (tile + 1) * S::TILE, S::TILE, scale);
        find_row_maxima(max, s);
        const bool changes = raise_row_maxima(factor, sums, max);
        exponentiate_keys(s, sums);
        ptx_wgmma_wait<0>();
        ptx_wgmma_settle(out);
        narrow_keys<T>(p, s, sums); /* not before: the registers of P were an operand */
        if (changes) rescale_values(out, factor);
    }
    multiply_rows_values<S>(out, p, memory, (num_tiles - 1) % S::STAGES);
    ptx_wgmma_wait<0>();
    ptx_wgmma_settle(out);
    ptx_cp_async_wait<0>();
}

template <class S>
static __device__ __forceinline__ void attend_rows_block(rows_memory<S> *memory, const attend_args *args, int32_t row0)
{
    const attend_job *job = &memory->job;
    const int32_t num_rows = fv_min_i32(S::BLOCK_M, job->num_rows - row0);
    find_rows<S::BLOCK_M>(memory->rows, &memory->keys, args, job, row0);
    load_query_panels<typename S::T, S::BLOCK_M, S::HEAD, S::THREADS>(memory->q, memory->rows, args, num_rows);
    float out[S::VALUE / 2];
#pragma unroll
    for (int i = 0; i < S::VALUE / 2; i++) out[i] = 0;
    row_sums sums;
    clear_row_sums(&sums);
    if (memory->keys.first < memory->keys.end) attend_rows_tiles<S>(out, &sums, memory, args);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int32_t r = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + half * 8;
        const float sum = sum_of_quad(sums.sum[half]), rounded = sum_of_quad(sums.rounded[half]);
        if (r < num_rows)
            store_row(out, half, args, job, &memory->rows[r], sums.max[half], sum, factor_of_values(job, sum, rounded),
                      0, true);
    }
    __syncthreads(); /* rows are read to the end */
}

template <class S>
static __global__ void __launch_bounds__(S::THREADS, 1) wgmma_rows_kernel(const __grid_constant__ attend_args args)
{
    PTX_DYNAMIC_SHARED(1024, shared);
    rows_memory<S> *memory = (rows_memory<S> *)shared;
    overlap_begin();
    if (threadIdx.x == 0) memory->has_item = find_job(&memory->job, &args);
    __syncthreads();
    if (!memory->has_item) return;
    for (int32_t row0 = 0; row0 < memory->job.num_rows; row0 += S::BLOCK_M) attend_rows_block<S>(memory, &args, row0);
}

template <class S> constexpr fv_cuda_attend_kernel wgmma_rows_of(void)
{
    return {wgmma_rows_kernel<S>, (int32_t)sizeof(rows_memory<S>), S::THREADS, S::BLOCK_M, 0};
}

#endif
