/* Queries and tiles of keys and values on their way to shared memory, for the attention kernel on tensor cores
 * (attend_mma.cuh): by asynchronous copies, or by loads and conversions. */
#ifndef FV_KERNELS_CUDA_MMA_LOAD_CUH
#define FV_KERNELS_CUDA_MMA_LOAD_CUH

#include "kernels/cuda/mma_block.cuh"
#include "kernels/cuda/ptx.cuh"

/* Eight elements of a dtype that only the call knows: a branch for each two, for code of three kinds costs
 * registers. */
template <class T> static __device__ __forceinline__ uint4 widen_chunk(uint2 stored, fv_dtype dtype)
{
    uint4 wide;
    uint32_t *pairs = (uint32_t *)&wide;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint16_t two = (uint16_t)((i < 2 ? stored.x : stored.y) >> (i % 2 * 16));
        if (dtype == FV_DTYPE_I8)
            pairs[i] = fv_widen_two<T, FV_DTYPE_I8>(two);
        else if (dtype == FV_DTYPE_F8_E4M3)
            pairs[i] = fv_widen_two<T, FV_DTYPE_F8_E4M3>(two);
        else
            pairs[i] = fv_widen_two<T, FV_DTYPE_F8_E5M2>(two);
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

#endif
