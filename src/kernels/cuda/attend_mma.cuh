/* The attention kernel on tensor cores (mma.sync, sm_80 and later): tiles of keys against a block of rows,
 * online softmax, for queries of bf16 and fp16 over caches whose entries are exact in the queries' dtype.
 *
 *            tile of keys t            t + 1
 *   K, V     [ in shared memory ]      [ on its way: cp.async, or loads and conversions ]
 *   S = Q K  each warp: its rows x its share of the tile's keys
 *   P        several warps to a row: maxima and P meet in shared memory; else P stays in registers
 *   O += P V each warp: its rows x its share of the value's elements
 *
 * Where a row belongs to one warp (WARPS_N 1: long queries), nothing but the tiles is shared. Where rows are
 * few, or the head is so long that O does not fit one warp's registers, WARPS_N warps share a row.
 *
 * Rows in shared memory are 16 bytes longer than their elements, so that the eight rows of an 8x8 matrix
 * lie in different banks. Elements past the head size are zero. Keys that no row of the block sees are zeros
 * too: their place may hold NaN, and 0 * NaN is NaN. */
#ifndef FV_KERNELS_CUDA_ATTEND_MMA_CUH
#define FV_KERNELS_CUDA_ATTEND_MMA_CUH

#include <type_traits>

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/attend_job.cuh"
#include "kernels/cuda/ptx.cuh"

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

/* --- loading ------------------------------------------------------------------------------------------- */

/* Two elements of a 1-byte dtype to T; all of their numbers are exact in both. */
template <class T, fv_dtype DTYPE> static __device__ __forceinline__ uint32_t widen_two(uint16_t two)
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

/* Eight elements of a dtype that only the call knows: a branch for each two, for code of three kinds costs registers. */
template <class T> static __device__ __forceinline__ uint4 widen_chunk(uint2 stored, fv_dtype dtype)
{
    uint4 wide;
    uint32_t *pairs = (uint32_t *)&wide;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint16_t two = (uint16_t)((i < 2 ? stored.x : stored.y) >> (i % 2 * 16));
        if (dtype == FV_DTYPE_I8)
            pairs[i] = widen_two<T, FV_DTYPE_I8>(two);
        else if (dtype == FV_DTYPE_F8_E4M3)
            pairs[i] = widen_two<T, FV_DTYPE_F8_E4M3>(two);
        else
            pairs[i] = widen_two<T, FV_DTYPE_F8_E5M2>(two);
    }
    return wide;
}

/* Eight elements, one by one. */
template <class T>
static __device__ __forceinline__ uint4 collect_chunk(const char *row, const attend_source *source, int32_t chunk)
{
    uint4 wide;
    uint32_t *pairs = (uint32_t *)&wide;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const char *low = row + element_offset(&source->plane, chunk * 8 + 2 * i);
        const char *high = row + element_offset(&source->plane, chunk * 8 + 2 * i + 1);
        if (fv_element_bytes(source->dtype) == 2) /* the kernel's own */
            pairs[i] = (uint32_t) * (const uint16_t *)low | (uint32_t) * (const uint16_t *)high << 16;
        else
            pairs[i] = fv_narrow_pair<T>(fv_element_load(low, source->dtype), fv_element_load(high, source->dtype));
    }
    return wide;
}

/* Where chunk `chunk` of a row begins. */
static __device__ __forceinline__ int64_t chunk_offset(const attend_source *source, int32_t chunk, int32_t chunk_bytes)
{
    const int32_t in_run = chunk & ((1 << source->chunk_shift) - 1);
    return (chunk >> source->chunk_shift) * source->chunk_stride + in_run * chunk_bytes;
}

/* The chunks of a tile, dealt out to the threads: neighbours take neighbouring chunks of a key. */
template <class S, int SIZE> struct chunk_steps {
    static constexpr int CHUNKS = SIZE / 8, ALL = S::TILE * CHUNKS;
    static constexpr int STEPS = (ALL + S::THREADS - 1) / S::THREADS;
    static constexpr int UNROLL = STEPS % 8 == 0 ? 8 : STEPS % 4 == 0 ? 4 : STEPS % 2 == 0 ? 2 : STEPS <= 9 ? STEPS : 1;
};

/* A tile of K or V whose rows are of one source that asynchronous copies can read. */
template <class S, int SIZE, int ROW>
static __device__ __forceinline__ void copy_rows_async(typename S::T *to, const char *const *rows,
                                                       const attend_source *source, const void *somewhere, int32_t size)
{
    using D = chunk_steps<S, SIZE>;
#pragma unroll(D::UNROLL)
    for (int step = 0; step < D::STEPS; step++) {
        const int32_t i = threadIdx.x + step * S::THREADS, key = i / D::CHUNKS, chunk = i % D::CHUNKS;
        if ((D::ALL % S::THREADS != 0 && i >= D::ALL) || chunk * 8 >= size) continue;
        const char *row = rows[key];
        ptx_cp_async_16_or_zeros(to + key * ROW + chunk * 8, row ? row + chunk_offset(source, chunk, 16) : somewhere,
                                 row ? 16 : 0);
    }
}

/* The same of a 1-byte dtype: a few loads are under way before the first is converted. */
template <class S, int SIZE, int ROW>
static __device__ __forceinline__ void convert_rows(typename S::T *to, const char *const *rows,
                                                    const attend_source *source, int32_t size)
{
    using D = chunk_steps<S, SIZE>;
    for (int first = 0; first < D::STEPS; first += D::UNROLL) {
        uint2 stored[D::UNROLL];
#pragma unroll
        for (int step = 0; step < D::UNROLL; step++) {
            const int32_t i = threadIdx.x + (first + step) * S::THREADS, key = i / D::CHUNKS, chunk = i % D::CHUNKS;
            stored[step] = make_uint2(0, 0);
            if ((D::ALL % S::THREADS != 0 && i >= D::ALL) || chunk * 8 >= size || !rows[key]) continue;
            stored[step] = *(const uint2 *)(rows[key] + chunk_offset(source, chunk, 8));
        }
#pragma unroll
        for (int step = 0; step < D::UNROLL; step++) {
            const int32_t i = threadIdx.x + (first + step) * S::THREADS, key = i / D::CHUNKS, chunk = i % D::CHUNKS;
            if ((D::ALL % S::THREADS != 0 && i >= D::ALL) || chunk * 8 >= size) continue;
            *(uint4 *)(to + key * ROW + chunk * 8) = widen_chunk<typename S::T>(stored[step], source->dtype);
        }
    }
}

/* A tile whose keys lie side by side for each element. Eight keys of a tile that begin at a multiple of eight
 * are in one block; those past an end of the range are zeros here too. */
template <class S, int SIZE, int ROW>
static __device__ __forceinline__ void transpose_rows(typename S::T *to, const char *const *rows,
                                                      const attend_source *source, int32_t size)
{
    const int32_t bytes = fv_element_bytes(source->dtype);
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < S::TILE / 8 * SIZE; i += S::THREADS) {
        const int32_t key = i / SIZE * 8, d = i % SIZE;
        if (d >= size) continue;
        const char *first = NULL;
        uint32_t there = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (!rows[key + k]) continue;
            first = rows[key + k] - k * bytes;
            there |= 1u << k;
        }
        uint4 eight = make_uint4(0, 0, 0, 0);
        const char *from = first + element_offset(&source->plane, d);
        if (first && bytes == 2) eight = *(const uint4 *)from;
        if (first && bytes == 1) eight = widen_chunk<typename S::T>(*(const uint2 *)from, source->dtype);
        const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const uint16_t element = (uint16_t)(pairs[k / 2] >> k % 2 * 16);
            ((uint16_t *)to)[(key + k) * ROW + d] = there >> k & 1 ? element : (uint16_t)0;
        }
    }
}

/* Entries of one byte, as they are, for widen_rows. */
template <class S, int SIZE>
static __device__ __forceinline__ void copy_narrow_async(uint8_t *to, const char *const *rows,
                                                         const attend_source *source, const void *somewhere,
                                                         int32_t size)
{
    using D = chunk_steps<S, SIZE>;
#pragma unroll(D::UNROLL)
    for (int step = 0; step < D::STEPS; step++) {
        const int32_t i = threadIdx.x + step * S::THREADS, key = i / D::CHUNKS, chunk = i % D::CHUNKS;
        if ((D::ALL % S::THREADS != 0 && i >= D::ALL) || chunk * 8 >= size) continue;
        const char *row = rows[key];
        ptx_cp_async_8_or_zeros(to + key * SIZE + chunk * 8, row ? row + chunk_offset(source, chunk, 8) : somewhere,
                                row ? 8 : 0);
    }
}

template <class S, int SIZE, int ROW>
static __device__ __forceinline__ void widen_rows(typename S::T *to, const uint8_t *from, fv_dtype dtype, int32_t size)
{
    using D = chunk_steps<S, SIZE>;
#pragma unroll 2
    for (int step = 0; step < D::STEPS; step++) {
        const int32_t i = threadIdx.x + step * S::THREADS, key = i / D::CHUNKS, chunk = i % D::CHUNKS;
        if ((D::ALL % S::THREADS != 0 && i >= D::ALL) || chunk * 8 >= size) continue;
        *(uint4 *)(to + key * ROW +
                   chunk * 8) = widen_chunk<typename S::T>(*(const uint2 *)(from + key * SIZE + chunk * 8), dtype);
    }
}

/* Any rows. Chunks from own_size on come from the shared end of dense keys. */
template <class S, int SIZE, int ROW>
static __device__ __forceinline__ void collect_rows(typename S::T *to, const attend_tile<S::TILE> *places,
                                                    const char *const *rows, const attend_source *sources, int32_t size,
                                                    int32_t own_size)
{
    constexpr int CHUNKS = SIZE / 8;
    const bool keys_first = sources[0].keys_first;
    for (int32_t i = threadIdx.x; i < S::TILE * CHUNKS; i += S::THREADS) {
        const int32_t key = keys_first ? i % S::TILE : i / CHUNKS;
        int32_t chunk = keys_first ? i / S::TILE : i % CHUNKS;
        if (chunk * 8 >= size) continue;
        const char *row = rows[key];
        typename S::T *at = to + key * ROW + chunk * 8;
        const attend_source *source = &sources[places->is_dense[key]];
        if (places->is_dense[key] && chunk * 8 >= own_size) {
            source = &sources[2];
            row = places->shared[key];
            chunk -= own_size / 8;
        }
        *(uint4 *)at = row ? collect_chunk<typename S::T>(row, source, chunk) : make_uint4(0, 0, 0, 0);
    }
}

/* A tile of K or V: size / 8 chunks of each key. `sources` as in attend_args; `uniform`: the one that all of
 * the tile's rows are of, -1 where there are several. */
template <class S, int SIZE, int ROW>
static __device__ __forceinline__ void load_rows(typename S::T *to, const attend_tile<S::TILE> *places,
                                                 const char *const *rows, const attend_args *args,
                                                 const attend_source *sources, int32_t uniform, int32_t size,
                                                 int32_t own_size)
{
    const int32_t read = uniform < 0 ? FV_READ_ELEMENTS : sources[uniform].read;
    if (read == FV_READ_COPY)
        copy_rows_async<S, SIZE, ROW>(to, rows, &sources[uniform], args->params.q, size);
    else if (read == FV_READ_CONVERT)
        convert_rows<S, SIZE, ROW>(to, rows, &sources[uniform], size);
    else if (read == FV_READ_TRANSPOSE)
        transpose_rows<S, SIZE, ROW>(to, rows, &sources[uniform], size);
    else
        collect_rows<S, SIZE, ROW>(to, places, rows, sources, size, own_size);
}

/* Where tile `tile` lies as it came, with is_narrow: two of them in the room of the second tile. */
template <class S> static __device__ __forceinline__ uint8_t *narrow_keys(attend_memory<S> *memory, int32_t tile)
{
    return (uint8_t *)memory->k[S::STAGES - 1] + tile % 2 * S::TILE * S::HEAD;
}

template <class S> static __device__ __forceinline__ uint8_t *narrow_values(attend_memory<S> *memory, int32_t tile)
{
    return (uint8_t *)memory->v[S::SHARED_KV ? 0 : S::STAGES - 1] + tile % 2 * S::TILE * S::VALUE;
}

/* With is_narrow: from the bytes of a tile to numbers, in the room of the first tile. */
template <class S>
static __device__ __forceinline__ void widen_tile(attend_memory<S> *memory, const attend_args *args, int32_t tile)
{
    const fv_attend_params *params = &args->params;
    const fv_dtype dtype = params->cache.dtype;
    widen_rows<S, S::HEAD, S::K_ROW>(memory->k[0], narrow_keys<S>(memory, tile), dtype, params->head_size);
    if constexpr (!S::SHARED_KV) {
        widen_rows<S, S::VALUE, S::V_ROW>(memory->v[0], narrow_values<S>(memory, tile), dtype, params->v_head_size);
    }
}

/* Tile `tile`, of the keys from tile_first on. */
template <class S>
static __device__ __forceinline__ void load_tile(attend_memory<S> *memory, const attend_args *args,
                                                 const attend_job *job, int32_t tile, int32_t tile_first)
{
    const fv_attend_params *params = &args->params;
    const attend_tile<S::TILE> *places = &memory->tiles[tile % 3];
    const int32_t stage = tile % S::STAGES;
    if (S::WIDENS && args->is_narrow) {
        copy_narrow_async<S, S::HEAD>(narrow_keys<S>(memory, tile), places->k, &args->k[0], params->q,
                                      params->head_size);
        if constexpr (!S::SHARED_KV) {
            copy_narrow_async<S, S::VALUE>(narrow_values<S>(memory, tile), places->v, &args->v[0], params->q,
                                           params->v_head_size);
        }
        return;
    }
    const int32_t uniform = tile_first >= job->dense_from ? 1 : tile_first + S::TILE <= job->dense_from ? 0 : -1;
    const bool is_whole = uniform == 0 || args->own_size >= params->head_size;
    load_rows<S, S::HEAD, S::K_ROW>(memory->k[stage], places, places->k, args, args->k, is_whole ? uniform : -1,
                                    params->head_size, args->own_size);
    if constexpr (!S::SHARED_KV) {
        load_rows<S, S::VALUE, S::V_ROW>(memory->v[stage], places, places->v, args, args->v, uniform,
                                         params->v_head_size, INT32_MAX);
    }
}

/* Elements past the head size of every tile: once, as loads never touch them. */
template <class S, int ROW>
static __device__ __forceinline__ void clear_tails(typename S::T *rows, int32_t num_rows, int32_t size)
{
    const int32_t tail = ROW - size; /* the 16 bytes of padding too */
    for (int32_t i = threadIdx.x; i < num_rows * tail; i += S::THREADS)
        rows[i / tail * ROW + size + i % tail] = fv_narrow<typename S::T>(0);
}

template <class S>
static __device__ __forceinline__ void load_queries(attend_memory<S> *memory, const attend_args *args, int32_t num_rows)
{
    using T = typename S::T;
    constexpr int CHUNKS = S::HEAD / 8;
    const fv_attend_params *params = &args->params;
    for (int32_t i = threadIdx.x; i < S::BLOCK_M * CHUNKS; i += S::THREADS) {
        const int32_t r = i / CHUNKS, chunk = i % CHUNKS;
        uint4 loaded = make_uint4(0, 0, 0, 0);
        if (r < num_rows && chunk * 8 < params->head_size) {
            const attend_row *row = &memory->rows[r];
            const uint16_t *from = (const uint16_t *)query_row(params, row) + chunk * 8;
            if (args->q_vectors) {
                loaded = *(const uint4 *)from;
            } else {
                uint32_t *pairs = (uint32_t *)&loaded;
#pragma unroll
                for (int j = 0; j < 4; j++) pairs[j] = (uint32_t)from[2 * j] | (uint32_t)from[2 * j + 1] << 16;
            }
        }
        *(uint4 *)(memory->q + r * S::K_ROW + chunk * 8) = loaded;
    }
}

/* --- one tile ------------------------------------------------------------------------------------------ */

/* Adds the products of elements [first, first + SPAN) to `s`. */
template <class S, int SPAN>
static __device__ __forceinline__ void multiply_span(float (&s)[S::ROW_TILES][S::KEY_TILES][4], uint32_t q_at,
                                                     uint32_t k_at, int32_t first)
{
    using T = typename S::T;
#pragma unroll
    for (int d = 0; d < SPAN; d += 32) {
        uint32_t q[2][S::ROW_TILES][4];
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int m = 0; m < S::ROW_TILES; m++)
                ptx_ldmatrix_x4(q[half][m], q_at + (m * 16 * S::K_ROW + first + d + half * 16) * (int)sizeof(T));
        if constexpr (S::KEY_TILES == 1) { /* one load: 8 keys x 32 elements */
            uint32_t k[4];
            ptx_ldmatrix_x4(k, k_at + (first + d) * (int)sizeof(T));
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int m = 0; m < S::ROW_TILES; m++)
                    ptx_mma_m16n8k16<T>(s[m][0], q[half][m], k[2 * half], k[2 * half + 1]);
        } else { /* 16 keys x 16 elements */
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int n = 0; n < S::KEY_TILES; n += 2) {
                    uint32_t k[4];
                    ptx_ldmatrix_x4(k, k_at + (n * 8 * S::K_ROW + first + d + half * 16) * (int)sizeof(T));
#pragma unroll
                    for (int m = 0; m < S::ROW_TILES; m++) {
                        ptx_mma_m16n8k16<T>(s[m][n], q[half][m], k[0], k[1]);
                        ptx_mma_m16n8k16<T>(s[m][n + 1], q[half][m], k[2], k[3]);
                    }
                }
            }
        }
    }
}

/* S of the warp's rows and its share of the keys: sums in fp32, not scaled. The tensor cores cut what they add
 * off instead of rounding it, always down; of long heads they add up spans of 64, which are added here. */
template <class S>
static __device__ __forceinline__ void multiply_keys(float (&s)[S::ROW_TILES][S::KEY_TILES][4],
                                                     const attend_memory<S> *memory, int32_t stage, int32_t warp_m,
                                                     int32_t warp_n)
{
    using T = typename S::T;
    constexpr int SPAN = S::HEAD > 128 ? 64 : S::HEAD;
    const int32_t lane = threadIdx.x % 32, in_matrix = lane % 8, matrix = lane / 8;
    const int32_t q_row = warp_m * S::ROW_TILES * 16 + matrix % 2 * 8 + in_matrix;
    const uint32_t q_at = ptx_shared_address(memory->q + q_row * S::K_ROW + matrix / 2 * 8);
    const T *keys = memory->k[stage] + warp_n * S::KEY_TILES * 8 * S::K_ROW;
    const uint32_t k_at = S::KEY_TILES == 1
                              ? ptx_shared_address(keys + in_matrix * S::K_ROW + matrix * 8)
                              : ptx_shared_address(keys + (matrix / 2 * 8 + in_matrix) * S::K_ROW + matrix % 2 * 8);
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
        for (int n = 0; n < S::KEY_TILES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) s[m][n][j] = 0;
    multiply_span<S, SPAN>(s, q_at, k_at, 0);
#pragma unroll 1
    for (int first = SPAN; first < S::HEAD; first += SPAN) {
        float part[S::ROW_TILES][S::KEY_TILES][4] = {};
        multiply_span<S, SPAN>(part, q_at, k_at, first);
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
            for (int n = 0; n < S::KEY_TILES; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) s[m][n][j] += part[m][n][j];
    }
}

/* From dot products to scores in base 2. */
template <class S>
static __device__ __forceinline__ void score_tile(float (&s)[S::ROW_TILES][S::KEY_TILES][4],
                                                  const attend_memory<S> *memory, const attend_args *args,
                                                  const attend_job *job, int32_t tile, int32_t first_key,
                                                  int32_t warp_m, int32_t warp_n, float scale)
{
    const attend_tile<S::TILE> *places = &memory->tiles[tile % 3];
    const int32_t lane = threadIdx.x % 32;
    const int32_t column = warp_n * S::KEY_TILES * 8 + lane % 4 * 2, row = warp_m * S::ROW_TILES * 16 + lane / 4;
    const int32_t tile_first = first_key + tile * S::TILE;
    const bool is_plain = !args->is_special && tile_first >= memory->keys.full_first &&
                          tile_first + S::TILE <= memory->keys.full_end;
    const float plain_scale = is_plain ? scale * FV_LOG2E : scale;
#pragma unroll
    for (int n = 0; n < S::KEY_TILES; n++) {
        const float low = args->key_scales ? plain_scale * places->k_scale[column + n * 8] : plain_scale;
        const float high = args->key_scales ? plain_scale * places->k_scale[column + n * 8 + 1] : plain_scale;
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++) {
            s[m][n][0] *= low;
            s[m][n][1] *= high;
            s[m][n][2] *= low;
            s[m][n][3] *= high;
        }
    }
    if (is_plain) return;
    if (args->params.soft_cap > 0) {
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
            for (int n = 0; n < S::KEY_TILES; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) s[m][n][j] = cap_score(args, s[m][n][j]);
    }
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const attend_row *at = &memory->rows[row + m * 16 + half * 8];
            const int32_t first = at->first - tile_first - column, end = at->end - tile_first - column;
#pragma unroll
            for (int n = 0; n < S::KEY_TILES; n++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int32_t key = n * 8 + j;
                    float *score = &s[m][n][2 * half + j];
                    *score *= FV_LOG2E;
                    if (args->params.alibi != FV_ALIBI_NONE)
                        *score += alibi_of(args->params.alibi, at->slope, places->position[column + key], at->position);
                    bool sees = key >= first && key < end;
                    if (args->params.tree_mask)
                        sees = sees && tree_shows(at->tree, job->context, places->position[column + key]);
                    *score = sees ? *score : -INFINITY;
                }
            }
        }
    }
}

/* The largest of each row's scores, of all its warps. */
template <class S>
static __device__ __forceinline__ void find_maxima(float (&max)[S::ROW_TILES][2], attend_memory<S> *memory,
                                                   const float (&s)[S::ROW_TILES][S::KEY_TILES][4], int32_t warp_m,
                                                   int32_t warp_n)
{
    const int32_t lane = threadIdx.x % 32, row = warp_m * S::ROW_TILES * 16 + lane / 4;
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float largest = -INFINITY;
#pragma unroll
            for (int n = 0; n < S::KEY_TILES; n++)
                largest = fmaxf(largest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            max[m][half] = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            if (S::WARPS_N > 1 && lane % 4 == 0) memory->row_values[warp_n][row + m * 16 + half * 8] = max[m][half];
        }
    }
    if constexpr (S::WARPS_N > 1) {
        __syncthreads();
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int w = 0; w < S::WARPS_N; w++)
                    max[m][half] = fmaxf(max[m][half], memory->row_values[w][row + m * 16 + half * 8]);
    }
}

/* New maxima; the sums so far follow them. */
template <class S>
static __device__ __forceinline__ void rescale(attend_state<S> *state, const float (&max)[S::ROW_TILES][2])
{
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
        float factor[2];
        bool changes = false;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float larger = fmaxf(state->max[m][half], max[m][half]);
            factor[half] = larger == state->max[m][half] ? 1.0f : ptx_ex2(state->max[m][half] - larger);
            changes = changes || factor[half] != 1.0f;
            state->max[m][half] = larger;
            state->sum[m][half] *= factor[half];
        }
        if (!__any_sync(~0u, changes)) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) state->rounded[m][j] *= factor[j / 2];
#pragma unroll
        for (int n = 0; n < S::VALUE_TILES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) state->out[m][n][j] *= factor[j / 2];
    }
}

/* P of the warp's share of the keys, in place of the scores, and its sums. */
template <class S>
static __device__ __forceinline__ void exponentiate(float (&s)[S::ROW_TILES][S::KEY_TILES][4], attend_state<S> *state,
                                                    const attend_memory<S> *memory, const attend_args *args,
                                                    int32_t tile, int32_t warp_n)
{
    const attend_tile<S::TILE> *places = &memory->tiles[tile % 3];
    const int32_t column = warp_n * S::KEY_TILES * 8 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
        const float max[2] = {state->max[m][0] == -INFINITY ? 0.0f : state->max[m][0],
                              state->max[m][1] == -INFINITY ? 0.0f : state->max[m][1]};
#pragma unroll
        for (int n = 0; n < S::KEY_TILES; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float p = ptx_ex2(s[m][n][j] - max[j / 2]);
                state->sum[m][j / 2] += p;
                s[m][n][j] = args->key_scales ? p * places->v_scale[column + n * 8 + j % 2] : p;
            }
        }
    }
}

/* O += P V for the warp's rows and its share of the value's elements, P as T holds it. */
template <class S>
static __device__ __forceinline__ void multiply_values(attend_state<S> *state, attend_memory<S> *memory,
                                                       const float (&s)[S::ROW_TILES][S::KEY_TILES][4], int32_t stage,
                                                       int32_t warp_m, int32_t warp_n)
{
    using T = typename S::T;
    const int32_t lane = threadIdx.x % 32, in_matrix = lane % 8, matrix = lane / 8;
    uint32_t p_at = 0;
    if constexpr (S::WARPS_N > 1) {
        const int32_t row = warp_m * S::ROW_TILES * 16, column = warp_n * S::KEY_TILES * 8 + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
            for (int n = 0; n < S::KEY_TILES; n++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *(uint32_t *)(memory->p + (row + m * 16 + half * 8 + lane / 4) * S::P_ROW + column +
                                  n * 8) = fv_narrow_pair<T>(s[m][n][2 * half], s[m][n][2 * half + 1]);
        __syncthreads();
        p_at = ptx_shared_address(memory->p + (row + matrix % 2 * 8 + in_matrix) * S::P_ROW + matrix / 2 * 8);
    }
    const T *values = S::SHARED_KV ? memory->k[stage] : memory->v[stage];
    const uint32_t v_at = ptx_shared_address(values + (matrix % 2 * 8 + in_matrix) * S::V_ROW +
                                             warp_n * S::VALUE_TILES * 8 + matrix / 2 * 8);
#pragma unroll
    for (int k = 0; k < S::TILE / 16; k++) {
        uint32_t p[S::ROW_TILES][4];
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++) {
            if constexpr (S::WARPS_N > 1) {
                ptx_ldmatrix_x4(p[m], p_at + (m * 16 * S::P_ROW + k * 16) * (int)sizeof(T));
            } else { /* the layout of a result is that of an operand */
                p[m][0] = fv_narrow_pair<T>(s[m][2 * k][0], s[m][2 * k][1]);
                p[m][1] = fv_narrow_pair<T>(s[m][2 * k][2], s[m][2 * k][3]);
                p[m][2] = fv_narrow_pair<T>(s[m][2 * k + 1][0], s[m][2 * k + 1][1]);
                p[m][3] = fv_narrow_pair<T>(s[m][2 * k + 1][2], s[m][2 * k + 1][3]);
            }
        }
        const uint32_t ones = fv_narrow_pair<T>(1, 1);
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++) ptx_mma_m16n8k16<T>(state->rounded[m], p[m], ones, ones);
#pragma unroll
        for (int n = 0; n < S::VALUE_TILES; n += 2) {
            uint32_t v[4];
            ptx_ldmatrix_x4_trans(v, v_at + (k * 16 * S::V_ROW + n * 8) * (int)sizeof(T));
#pragma unroll
            for (int m = 0; m < S::ROW_TILES; m++) {
                ptx_mma_m16n8k16<T>(state->out[m][n], p[m], v[0], v[1]);
                ptx_mma_m16n8k16<T>(state->out[m][n + 1], p[m], v[2], v[3]);
            }
        }
    }
}

template <class S>
static __device__ __forceinline__ void attend_one_tile(attend_state<S> *state, attend_memory<S> *memory,
                                                       const attend_args *args, const attend_job *job, int32_t tile,
                                                       int32_t first_key, int32_t warp_m, int32_t warp_n, float scale)
{
    float s[S::ROW_TILES][S::KEY_TILES][4], max[S::ROW_TILES][2];
    const int32_t stage = S::WIDENS && args->is_narrow ? 0 : tile % S::STAGES;
    multiply_keys<S>(s, memory, stage, warp_m, warp_n);
    score_tile<S>(s, memory, args, job, tile, first_key, warp_m, warp_n, scale);
    find_maxima<S>(max, memory, s, warp_m, warp_n);
    rescale<S>(state, max);
    exponentiate<S>(s, state, memory, args, tile, warp_n);
    /* P times the scale of a key is rounded where P alone may be exact: the rest of it in a second pass, and of
     * bf16 a third. */
    constexpr int LAST_PASS = std::is_same<typename S::T, __half>::value ? 1 : 2;
#pragma unroll 1
    for (int pass = 0;; pass++) {
        multiply_values<S>(state, memory, s, stage, warp_m, warp_n);
        if (!args->key_scales || pass == LAST_PASS) return;
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; m++)
#pragma unroll
            for (int n = 0; n < S::KEY_TILES; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) s[m][n][j] -= (float)fv_narrow<typename S::T>(s[m][n][j]);
        if (S::WARPS_N > 1) __syncthreads();
    }
}

/* --- a block of rows ----------------------------------------------------------------------------------- */

/* All tiles; with two of them in shared memory the loads of tile t + 1 are under way while tile t is worked on. */
template <class S>
static __device__ __forceinline__ void attend_tiles(attend_state<S> *state, attend_memory<S> *memory,
                                                    const attend_args *args, const attend_job *job, int32_t warp_m,
                                                    int32_t warp_n)
{
    constexpr int AHEAD = S::STAGES - 1;
    const float scale = args->params.scale * (args->key_scales ? 1.0f : job->k_head_scale);
    const int32_t first_key = memory->keys.first / 8 * 8; /* see transpose_rows */
    const int32_t num_tiles = (memory->keys.end - first_key + S::TILE - 1) / S::TILE;
    find_keys<S::TILE>(&memory->tiles[0], args, job, &memory->keys, first_key);
    __syncthreads();
#pragma unroll 1
    for (int32_t tile = -AHEAD; tile < num_tiles; tile++) {
        const int32_t loaded = tile + AHEAD;
        if (loaded < num_tiles) load_tile<S>(memory, args, job, loaded, first_key + loaded * S::TILE);
        ptx_cp_async_commit();
        find_keys<S::TILE>(&memory->tiles[(loaded + 1) % 3], args, job, &memory->keys,
                           first_key + (loaded + 1) * S::TILE);
        if (tile >= 0) {
            ptx_cp_async_wait<AHEAD>();
            __syncthreads();
            if (S::WIDENS && args->is_narrow) {
                widen_tile<S>(memory, args, tile);
                __syncthreads();
            }
            attend_one_tile<S>(state, memory, args, job, tile, first_key, warp_m, warp_n, scale);
        }
        __syncthreads();
    }
    ptx_cp_async_wait<0>();
}

/* Sums of all threads of a row, and the row's results to memory. */
template <class S>
static __device__ __forceinline__ void store_rows(attend_state<S> *state, attend_memory<S> *memory,
                                                  const attend_args *args, const attend_job *job, int32_t num_rows,
                                                  int32_t warp_m, int32_t warp_n)
{
    const int32_t lane = threadIdx.x % 32, first_row = warp_m * S::ROW_TILES * 16 + lane / 4;
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = state->sum[m][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            state->sum[m][half] = sum + __shfl_xor_sync(~0u, sum, 2);
            if (S::WARPS_N > 1 && lane % 4 == 0)
                memory->row_values[warp_n][first_row + m * 16 + half * 8] = state->sum[m][half];
        }
    }
    if constexpr (S::WARPS_N > 1) __syncthreads();
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int32_t r = first_row + m * 16 + half * 8;
            if (r >= num_rows) continue;
            float sum = state->sum[m][half];
            if constexpr (S::WARPS_N > 1) {
                sum = 0;
#pragma unroll
                for (int w = 0; w < S::WARPS_N; w++) sum += memory->row_values[w][r];
            }
            const attend_row *row = &memory->rows[r];
            /* Values are weighed by the rounded P, so what they are divided by is its sum. */
            const float rounded = state->rounded[m][2 * half];
            const float values_factor = args->key_scales
                                            ? __fdividef(1.0f, args->p_factor)
                                            : job->v_head_scale * (rounded > 0 ? __fdividef(sum, rounded) : 1.0f);
            const attend_end end = end_row(args, job, row, state->max[m][half], sum, values_factor);
            if (warp_n == 0 && lane % 4 == 0) store_sums(args, row, &end);
            const attend_target target = target_of(args, row, &end);
            const int32_t first = warp_n * S::VALUE_TILES * 8 + lane % 4 * 2, size = args->params.v_head_size;
            if (target.pairs) {
#pragma unroll
                for (int n = 0; n < S::VALUE_TILES; n++)
                    if (first + n * 8 < size)
                        store_pair(&target, first + n * 8, state->out[m][n][2 * half], state->out[m][n][2 * half + 1]);
                continue;
            }
#pragma unroll
            for (int n = 0; n < S::VALUE_TILES; n++) {
                if (first + n * 8 >= size) continue;
                store_element(&target, first + n * 8, state->out[m][n][2 * half]);
                store_element(&target, first + n * 8 + 1, state->out[m][n][2 * half + 1]);
            }
        }
    }
}

template <class S>
static __device__ __forceinline__ void attend_rows(attend_memory<S> *memory, const attend_args *args, int32_t row0)
{
    const attend_job *job = &memory->job;
    const int32_t warp = threadIdx.x / 32, warp_m = warp / S::WARPS_N, warp_n = warp % S::WARPS_N;
    const int32_t num_rows = fv_min_i32(S::BLOCK_M, job->num_rows - row0);
    find_rows<S::BLOCK_M>(memory->rows, &memory->keys, args, job, row0);
    load_queries<S>(memory, args, num_rows);
    attend_state<S> state;
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; m++) {
#pragma unroll
        for (int n = 0; n < S::VALUE_TILES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) state.out[m][n][j] = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) state.rounded[m][j] = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            state.max[m][half] = -INFINITY;
            state.sum[m][half] = 0;
        }
    }
    if (memory->keys.first < memory->keys.end) attend_tiles<S>(&state, memory, args, job, warp_m, warp_n);
    store_rows<S>(&state, memory, args, job, num_rows, warp_m, warp_n);
    __syncthreads(); /* rows and sums are read to the end */
}

template <class S>
static __global__ void __launch_bounds__(S::THREADS, S::THREADS <= 128 ? 2 : 1)
    attend_kernel(const __grid_constant__ attend_args args)
{
    extern __shared__ __align__(16) char shared[];
    attend_memory<S> *memory = (attend_memory<S> *)shared;
    overlap_begin();
    if (threadIdx.x == 0) memory->has_item = find_job(&memory->job, &args);
    __syncthreads();
    if (!memory->has_item) return;
    for (int stage = 0; stage < S::STAGES; stage++) {
        clear_tails<S, S::K_ROW>(memory->k[stage], S::TILE, args.params.head_size);
        if constexpr (!S::SHARED_KV) clear_tails<S, S::V_ROW>(memory->v[stage], S::TILE, args.params.v_head_size);
    }
    for (int32_t row0 = 0; row0 < memory->job.num_rows; row0 += S::BLOCK_M) attend_rows<S>(memory, &args, row0);
}

/* The kernel of a shape as the launcher takes it. */
template <class S> constexpr fv_cuda_attend_kernel attend_kernel_of(void)
{
    return {attend_kernel<S>, (int32_t)sizeof(attend_memory<S>), S::THREADS, S::BLOCK_M, 0};
}

#endif
