/* The queries of MLA decode over the 656-byte entry (attend_entry.cuh): latents as fp16, what is for RoPE as it is, in
 * the order in which the scorers read elements of keys. */
#ifndef FV_KERNELS_CUDA_HOPPER_ENTRY_QUERIES_CUH
#define FV_KERNELS_CUDA_HOPPER_ENTRY_QUERIES_CUH

#include "kernels/cuda/hopper/entry_block.cuh"

enum { LARGEST_BF16 = 0x7f7f }; /* the bits of infinity and NaN are above */

/* Zeros in place of those of two magnitudes that are no numbers. */
static __device__ __forceinline__ uint32_t keep_numbers(uint32_t magnitudes)
{
    const uint32_t others = (magnitudes + 0x00800080u) & 0x80008000u;
    return magnitudes & ~((others >> 15) * 0xffffu);
}

/* The largest magnitude of bf16 in a thread's part of a row, as its bits. */
template <bool OF_NUMBERS>
static __device__ __forceinline__ uint32_t largest_of_chunks(const uint4 (&chunks)[LATENT_PANELS])
{
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < LATENT_PANELS; i++) {
        const uint32_t words[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t magnitudes = words[j] & 0x7fff7fffu;
            largest = __vmaxu2(largest, OF_NUMBERS ? keep_numbers(magnitudes) : magnitudes);
        }
    }
    return max(largest & 0xffffu, largest >> 16);
}

/* Of a warp's parts. Infinity and NaN are left to their row: a scale that they had a part in would make zeros of all others. */
static __device__ __forceinline__ uint32_t largest_of_warp(const uint4 (&chunks)[LATENT_PANELS])
{
    const uint32_t largest = __reduce_max_sync(~0u, largest_of_chunks<false>(chunks));
    if (largest <= LARGEST_BF16) return largest;
    return __reduce_max_sync(~0u, largest_of_chunks<true>(chunks)); /* rare */
}

/* A power of two, and its inverse. */
typedef struct query_scale {
    float factor, inverse;
} query_scale;

/* What brings elements whose largest has those bits to 2^14 and above. */
static __device__ __forceinline__ query_scale find_query_scale(uint32_t largest)
{
    const uint32_t biased = max(largest >> 7, 15u); /* exponent; then all factors are normal */
    return {__uint_as_float((127 + 141 - biased) << 23), __uint_as_float((127 + biased - 141) << 23)};
}

template <class T> static __device__ __forceinline__ uint4 scale_chunk(uint4 chunk, float factor)
{
    uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = fv_widen_pair<__nv_bfloat16>(words[i]);
        words[i] = fv_narrow_pair<T>(pair.x * factor, pair.y * factor);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* Chunk `chunk` of row `r` of the queries, of 16 bytes, to a panel, or two of a group, in the order of the keys'
 * elements: of LANE_CHUNKS that a lane reads of a key, a word each to four steps' halves. */
template <int N, int LANE_CHUNKS>
static __device__ __forceinline__ void store_entry_chunk(char *panels, int32_t r, int32_t chunk, uint4 of)
{
    const uint32_t words[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        *(uint32_t *)(panels + panel_offset(N, r, chunk % LANE_CHUNKS * 4 + i) + chunk / LANE_CHUNKS * 4) = words[i];
}

/* Queries into panels, times the power of two that brings the largest number of all rows to 2^14 and above: what is
 * 2^31 below that is exact. By the valuers, whose registers are free: eight threads for a row. */
template <int N>
static __device__ __forceinline__ void load_entry_queries(entry_memory<N> *memory, const attend_args *args)
{
    constexpr int PASS = ENTRY_VALUERS / 8 /* rows */, NUM_PASSES = (N + PASS - 1) / PASS;
    const int32_t first_row = ((int32_t)threadIdx.x - entry_shape<N>::SCORERS) / 8, chunk = threadIdx.x % 8;
    uint4 chunks[NUM_PASSES][LATENT_PANELS];
#pragma unroll
    for (int i = 0; i < NUM_PASSES; i++) {
        const int32_t r = first_row + i * PASS;
        if (r >= N) continue;
        const attend_row *row = &memory->rows[r];
        const char *from = row->first < row->end ? query_row(&args->params, row) + chunk * 16 : NULL;
#pragma unroll
        for (int panel = 0; panel < LATENT_PANELS; panel++)
            chunks[i][panel] = from ? *(const uint4 *)(from + panel * FV_PANEL_ROW_BYTES) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < NUM_PASSES; i++) {
        if (first_row + i * PASS < N)
            atomicMax(&memory->largest_query, largest_of_warp(chunks[i]));
    }
    wait_at_bar(&memory->bars, ENTRY_BARRIER_VALUERS, ENTRY_VALUERS);
    const float factor = find_query_scale(memory->largest_query).factor;
#pragma unroll
    for (int i = 0; i < NUM_PASSES; i++) {
        const int32_t r = first_row + i * PASS;
        if (r >= N) continue;
#pragma unroll
        for (int panel = 0; panel < LATENT_PANELS - 1; panel++)
            store_entry_chunk<N, 4>(memory->q[panel / 2 * 2], r, panel % 2 * 8 + chunk,
                                    scale_chunk<__half>(chunks[i][panel], factor));
        store_entry_chunk<N, 2>(memory->q[LATENT_PANELS - 1], r, chunk,
                                scale_chunk<__nv_bfloat16>(chunks[i][LATENT_PANELS - 1], factor));
    }
    ptx_fence_proxy_async();
    arrive_at_bar(&memory->bars, ENTRY_BARRIER_QUERIES, entry_shape<N>::CONSUMERS);
}

#endif
