/* A block of threads of the attention kernel on tensor cores (attend_mma.cuh): its shape, its shared memory, and what a
 * thread keeps. */
#ifndef FV_KERNELS_CUDA_MMA_BLOCK_CUH
#define FV_KERNELS_CUDA_MMA_BLOCK_CUH

#include "kernels/cuda/attend.cuh"

/* 16-bit dtype, head sizes of keys and values, warps over rows and over keys or value elements, row tiles of
 * 16 for each warp, keys of a tile, tiles in shared memory; SHARED_KV: values are the start of the keys. */
template <class Element, int HEAD_, int VALUE_, int WARPS_M_, int WARPS_N_, int ROW_TILES_, int TILE_, int STAGES_,
          bool SHARED_KV_ = false>
struct attend_shape {
    using T = Element;
    static constexpr int HEAD = HEAD_, VALUE = VALUE_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_;
    static constexpr int ROW_TILES = ROW_TILES_, TILE = TILE_, STAGES = STAGES_;
    static constexpr bool SHARED_KV = SHARED_KV_;
    static constexpr bool WIDENS = STAGES > 1 && ROW_TILES == 1; /* see widen_tile; else registers do not suffice */
    static constexpr int THREADS = 32 * WARPS_M * WARPS_N, BLOCK_M = 16 * ROW_TILES * WARPS_M;
    static constexpr int K_ROW = HEAD + 8, V_ROW = SHARED_KV ? K_ROW : VALUE + 8, P_ROW = TILE + 8;
    static constexpr int KEY_TILES = TILE / WARPS_N / 8;    /* of 8 keys, of a warp's share of S */
    static constexpr int VALUE_TILES = VALUE / WARPS_N / 8; /* of 8 elements, of its share of O */
    static_assert(KEY_TILES == 1 || KEY_TILES % 2 == 0, "two 8-key matrices make a load");
    static_assert(VALUE_TILES % 2 == 0 && TILE % 16 == 0 && HEAD % 32 == 0, "whole instructions");
};

template <class S> struct attend_memory {
    using T = typename S::T;
    alignas(16) T q[S::BLOCK_M * S::K_ROW];
    alignas(16) T k[S::STAGES][S::TILE * S::K_ROW];
    alignas(16) T v[S::SHARED_KV ? 1 : S::STAGES][S::SHARED_KV ? 8 : S::TILE * S::V_ROW];
    alignas(16) T p[S::WARPS_N > 1 ? S::BLOCK_M *S::P_ROW : 8];
    float row_values[S::WARPS_N][S::BLOCK_M]; /* maxima, then sums, of the warps of a row */
    attend_row rows[S::BLOCK_M];
    attend_tile<S::TILE> tiles[3]; /* of tiles t, t + 1 and t + 2 */
    attend_keys keys;
    int32_t has_item;
    attend_job job; /* here: its two dozen numbers would take registers from the sums */
};

/* The state of a warp: two rows of each row tile for each thread, l / 4 and the eighth after it. */
template <class S> struct attend_state {
    float out[S::ROW_TILES][S::VALUE_TILES][4];
    float max[S::ROW_TILES][2];
    float sum[S::ROW_TILES][2];     /* of this thread's keys */
    float rounded[S::ROW_TILES][4]; /* sums of P as T holds it, of all keys: a column of ones behind V */
};

#endif
