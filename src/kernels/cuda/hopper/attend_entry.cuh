/* MLA decode over the 656-byte entry on Hopper (wgmma), N rows of queries (16, 32 or 64): keys, and then columns of the
 * values, are the 64 rows of a product, the queries its N columns, so no tensor core multiplies empty rows. Why:
 * docs/cuda/mla_decode.md.
 *
 *   entry   512 e4m3 | 4 scales, one for 128 elements each | 64 bf16 for RoPE; in shared memory as in the cache
 *   S^T     = s0 (K0 Q0^T) + s1 (K1 Q1^T) + s2 (K2 Q2^T) + s3 (K3 Q3^T) + Kr Qr^T
 *   O^T_g  += (s_g V_g)^T P^T
 *
 * The left operand comes from registers, so entries go from their bytes to the tensor cores without panels in between:
 * e4m3 is exact in fp16, and of entries nothing but bytes is written to shared memory. Queries are fp16 for the
 * latents: a row of bf16 times a power of two loses nothing that fp32 sums would keep. Roles:
 *
 *   four warps                       bring tiles of 64 entries by the copy engine, as far ahead as tiles are held
 *   two warpgroups; one of 64 rows   S^T and softmax, of every second tile each, or of all; P to shared memory
 *   two more                         O^T, half of the columns each: 64 of them for N / 2 registers of a thread
 *
 * What a row's sums are relative to, and the unit of scales, are chosen tile by tile, so two warpgroups of scores pass
 * them on to each other; most tiles change neither, which a barrier's vote says. */
#ifndef FV_KERNELS_CUDA_HOPPER_ATTEND_ENTRY_CUH
#define FV_KERNELS_CUDA_HOPPER_ATTEND_ENTRY_CUH

#include "kernels/cuda/hopper/entry_copy.cuh"
#include "kernels/cuda/hopper/entry_end.cuh"
#include "kernels/cuda/hopper/entry_maxima.cuh"
#include "kernels/cuda/hopper/entry_queries.cuh"
#include "kernels/cuda/hopper/entry_scores.cuh"

/* --- softmax --------------------------------------------------------------------------------------------------- */

/* P in place of scores. */
template <int N>
static __device__ __forceinline__ void exponentiate_entry_scores(float (&s)[N / 2], entry_state<N> *state)
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        float *low = &s[element_of_column(i, 0)], *high = low + 2;
        *low = ptx_ex2(*low - state->max[i]);
        *high = ptx_ex2(*high - state->max[i]);
        state->sum[i] += *low + *high;
    }
}

/* P's place is free for a tile. */
template <int N> static __device__ __forceinline__ void wait_for_entry_space(entry_memory<N> *memory, int32_t tile)
{
    ptx_mbarrier_wait(&memory->p_empty[tile % ENTRY_P], (tile / ENTRY_P + 1) % 2);
}

/* P to its panel, and what the values of its keys have to be multiplied by: scales in units, in the order in which the
 * valuers take keys (read_value_scales). */
template <int N>
static __device__ __forceinline__ void store_entry_weights(entry_memory<N> *memory, const float (&s)[N / 2],
                                                           float2 scales, float inverse_unit, int32_t buffer)
{
    const int32_t step = threadIdx.x / 32 % 4, key = threadIdx.x % 32 / 4;
    __half *to = memory->scales[buffer][threadIdx.x % 4] + step * 16 + key / 2 * 4 + key % 2;
    uint32_t p[N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; i++) p[i] = fv_narrow_pair<__half>(s[2 * i], s[2 * i + 1]);
    store_columns<N>(memory->p[buffer], p);
    to[0] = fv_narrow<__half>(scales.x * inverse_unit);
    to[2] = fv_narrow<__half>(scales.y * inverse_unit);
}

/* A warpgroup's tiles: all, or every second one. */
template <int N>
static __device__ __forceinline__ void weigh_entries(entry_state<N> *state, entry_memory<N> *memory, int32_t group,
                                                     int32_t origin, int32_t num_tiles, float scale)
{
    constexpr int TILES = entry_shape<N>::TILES, GROUPS = entry_shape<N>::SCORER_GROUPS,
                  SCORERS = entry_shape<N>::SCORERS;
    const int32_t offset = key_of_thread() * (int32_t)FV_DS_ENTRY_BYTES;
#pragma unroll 1
    for (int32_t tile = group; tile < num_tiles; tile += GROUPS) {
        const int32_t buffer = tile % ENTRY_P;
        float s[N / 2];
        ptx_mbarrier_wait(&memory->full[tile % TILES], tile / TILES % 2);
        const char *key = memory->tiles[tile % TILES] + offset;
        multiply_entry_keys<N>(s, memory, key, scale);
        if (GROUPS == 1 && tile > 0 && arrives_for_warp()) ptx_mbarrier_arrive(&memory->scored[tile % 2]);
        const int32_t tile_first = origin + tile * LATENT_TILE;
        if (tile_first < memory->keys.full_first || tile_first + LATENT_TILE > memory->keys.full_end)
            mask_columns<N>(s, memory->rows, tile_first);
        const float2 scales = read_entry_scales(key);
        const float largest_scale = fmaxf(fabsf(scales.x), fabsf(scales.y));
        if (GROUPS > 1 && tile > 0) wait_at_bar(&memory->bars, ENTRY_BARRIER_ODD - group, SCORERS);
        follow_entry_maxima<N>(state, memory);
        const bool raises = vote_at_bar(&memory->bars, ENTRY_BARRIER_GROUP + group, 128,
                                        exceeds_entry_maxima<N>(s, state, largest_scale));
        if (raises) raise_entry_maxima<N>(state, s, largest_scale, memory, group, tile);
        if (GROUPS > 1 && tile + 1 < num_tiles) arrive_at_bar(&memory->bars, ENTRY_BARRIER_EVEN + group, SCORERS);
        exponentiate_entry_scores<N>(s, state);
        wait_for_entry_space(memory, tile);
        if (threadIdx.x % 128 == 0) memory->move[buffer].is_needed = raises;
        store_entry_weights<N>(memory, s, scales, state->inverse_unit, buffer);
        ptx_fence_proxy_async();
        __syncwarp();
        if (arrives_for_warp()) ptx_mbarrier_arrive(&memory->p_full[buffer]);
    }
}

template <int N>
static __device__ __forceinline__ void score_entries(entry_memory<N> *memory, const attend_args *args, int32_t group,
                                                     int32_t origin, int32_t num_tiles)
{
    wait_at_bar(&memory->bars, ENTRY_BARRIER_QUERIES, entry_shape<N>::CONSUMERS);
    const float inverse = find_query_scale(memory->largest_query).inverse;
    const float scale = args->params.scale * memory->job.k_head_scale * FV_LOG2E * inverse; /* of scores, in base 2 */
    entry_state<N> state = {};
    state.inverse_unit = 1.0f / ENTRY_FIRST_UNIT;
    weigh_entries<N>(&state, memory, group, origin, num_tiles, scale);
    wait_at_bar(&memory->bars, ENTRY_BARRIER_SCORERS, entry_shape<N>::SCORERS);
    follow_entry_maxima<N>(&state, memory);
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float sum = sum_of_column(state.sum[i]);
        if (threadIdx.x % 32 < 4) memory->sums[threadIdx.x / 32][column_of_thread(i)] = sum;
    }
    arrive_at_bar(&memory->bars, ENTRY_BARRIER_CONSUMERS, entry_shape<N>::CONSUMERS);
}

/* --- values ---------------------------------------------------------------------------------------------------- */

/* Four elements of each of a thread's four keys of a step. */
typedef struct value_words {
    uint32_t of[4];
} value_words;

/* Keys 16 steps + 2 (l % 4), the next, and those eight further on: four rows of 32 bytes of each, all banks. */
static __device__ __forceinline__ value_words read_value_words(const char *values)
{
    value_words words;
#pragma unroll
    for (int i = 0; i < 4; i++) words.of[i] = *(const uint32_t *)(values + (i / 2 * 8 + i % 2) * FV_DS_ENTRY_BYTES);
    return words;
}

/* Of those keys in a group of columns: scales of pairs. */
static __device__ __forceinline__ uint2 read_value_scales(const __half *scales, int32_t step)
{
    return *(const uint2 *)(scales + step * 16 + threadIdx.x % 4 * 4);
}

static __device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b)
{
    const __half2 product = __hmul2(*(const __half2 *)&a, *(const __half2 *)&b);
    return *(const uint32_t *)&product;
}

/* Operands of two blocks, times scales: rows l / 4 and the eighth after it of the first are the first and second
 * element, those of the second the third and fourth. */
static __device__ __forceinline__ void widen_value_words(uint32_t (&a)[2][4], const value_words *words, uint2 scales)
{
#pragma unroll
    for (int pair = 0; pair < 2; pair++) { /* of keys */
        const uint32_t first = words->of[2 * pair], second = words->of[2 * pair + 1],
                       scale = pair ? scales.y : scales.x;
        const uint2 low = ptx_widen_e4m3(__byte_perm(first, second, 0x5140));
        const uint2 high = ptx_widen_e4m3(__byte_perm(first, second, 0x7362));
        a[0][2 * pair] = multiply_halves(low.x, scale);
        a[0][2 * pair + 1] = multiply_halves(low.y, scale);
        a[1][2 * pair] = multiply_halves(high.x, scale);
        a[1][2 * pair + 1] = multiply_halves(high.y, scale);
    }
}

template <int N>
static __device__ __forceinline__ void move_entry_values(float (&out)[ENTRY_BLOCKS][N / 2], const entry_move<N> *move)
{
#pragma unroll
    for (int i = 0; i < N / 4; i += 2) {
        const float2 by = *(const float2 *)&move->by[column_of_thread(i)];
#pragma unroll
        for (int block = 0; block < ENTRY_BLOCKS; block++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                out[block][element_of_column(i, half)] *= by.x;
                out[block][element_of_column(i + 1, half)] *= by.y;
            }
        }
    }
}

/* O^T of columns 256 group .. of all tiles. Element 4 i + 2 half + c of block b: column 128 (b / 2) + 32 w + 4 (l / 4)
 * + 2 (b % 2) + half of row 8 i + 2 (l % 4) + c. */
template <int N>
static __device__ __forceinline__ void attend_entry_values(float (&out)[ENTRY_BLOCKS][N / 2], entry_memory<N> *memory,
                                                           int32_t group, int32_t num_tiles)
{
    constexpr int TILES = entry_shape<N>::TILES;
    const int32_t lane = threadIdx.x % 32;
    const int32_t offset = lane % 4 * 2 * FV_DS_ENTRY_BYTES + group * (LATENT_VALUE / 2) + warp_of_group() * 32 +
                           lane / 4 * 4;
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; tile++) {
        const int32_t at = tile % TILES, buffer = tile % ENTRY_P;
        const char *values = memory->tiles[at] + offset;
        const __half(*scales)[LATENT_TILE] = memory->scales[buffer] + group * 2;
        const uint64_t p_at = ptx_anew(ptx_matrix_descriptor(memory->p[buffer], 16, 1024));
        uint32_t a[2][2][4]; /* of two parts: a group of columns, 16 keys */
        ptx_mbarrier_wait(&memory->full[at], tile / TILES % 2);
        value_words next = read_value_words(values);
        ptx_mbarrier_wait(&memory->p_full[buffer], tile / ENTRY_P % 2);
        if (entry_shape<N>::SCORER_GROUPS == 1 &&
            tile + 1 < num_tiles) /* while its softmax leaves the tensor cores free */
            ptx_mbarrier_wait(&memory->scored[(tile + 1) % 2], tile / 2 % 2);
        uint2 next_scales = read_value_scales(scales[0], 0);
        if (memory->move[buffer].is_needed) move_entry_values<N>(out, &memory->move[buffer]);
#pragma unroll
        for (int block = 0; block < ENTRY_BLOCKS; block++) ptx_wgmma_settle(out[block]);
#pragma unroll
        for (int part = 0; part < LATENT_TILE / 8; part++) {
            const int columns = part % 2, step = part / 2;
            if (part > 1) ptx_wgmma_wait<1>(); /* the part before the last one, of the same registers */
            widen_value_words(a[part % 2], &next, next_scales);
            if (part + 1 < LATENT_TILE / 8) {
                next = read_value_words(values + (part + 1) / 2 * 16 * FV_DS_ENTRY_BYTES + (part + 1) % 2 * FV_DS_TILE);
                next_scales = read_value_scales(scales[(part + 1) % 2], (part + 1) / 2);
            }
            ptx_wgmma_fence();
#pragma unroll
            for (int block = 0; block < 2; block++)
                multiply_columns<__half>(out[columns * 2 + block], a[part % 2][block],
                                         ptx_descriptor_at(p_at, step * 32), 1);
            ptx_wgmma_commit();
        }
        ptx_wgmma_wait<0>();
#pragma unroll
        for (int block = 0; block < ENTRY_BLOCKS; block++) ptx_wgmma_settle(out[block]);
        __syncwarp();
        if (ARRIVALS_OF_WARP > 1 || lane == 0) {
            ptx_mbarrier_arrive(&memory->p_empty[buffer]);
            ptx_mbarrier_arrive(&memory->empty[at]);
        }
    }
}

/* --- the kernel ------------------------------------------------------------------------------------------------- */

template <int N>
static __global__ void __launch_bounds__(entry_shape<N>::THREADS, 1)
    wgmma_entry_kernel(const __grid_constant__ attend_args args)
{
    typedef entry_shape<N> shape;
    PTX_DYNAMIC_SHARED(1024, shared);
    entry_memory<N> *memory = (entry_memory<N> *)shared;
    const int32_t row0 = row_part_of_block(&args) * N, group = warpgroup_of_thread();
    if (threadIdx.x < N) memory->max[threadIdx.x] = ENTRY_NO_MAX;
    if (threadIdx.x < shape::SCORERS) {
        for (int32_t r = threadIdx.x % 32; r < N; r += 32) memory->known_max[threadIdx.x / 32][r] = ENTRY_NO_MAX;
    }
    if (threadIdx.x == 0) init_entry_memory<N>(memory);
    overlap_begin();
    if (threadIdx.x == 0) memory->has_item = find_job(&memory->job, &args);
    __syncthreads();
    if (!memory->has_item) return;
    if (threadIdx.x < 32) find_entry_rows<N>(memory, &args, row0);
    __syncthreads();
    const int32_t origin = first_latent_key(&memory->keys), num_tiles = count_latent_tiles(&memory->keys);
    if (group == shape::CONSUMERS / 128) {
        ptx_give_registers<ENTRY_PRODUCER_REGISTERS>();
        bring_entries<N>(memory, &args, origin, num_tiles);
    } else if (group < shape::SCORER_GROUPS) {
        ptx_take_registers<shape::SCORER_REGISTERS>();
        score_entries<N>(memory, &args, group, origin, num_tiles);
    } else {
        ptx_take_registers<shape::VALUER_REGISTERS>();
        load_entry_queries<N>(memory, &args);
        float out[ENTRY_BLOCKS][N / 2] = {};
        attend_entry_values<N>(out, memory, group - shape::SCORER_GROUPS, num_tiles);
        store_entry_values<N>(out, memory, &args, row0, group - shape::SCORER_GROUPS);
    }
}

template <int N> constexpr fv_cuda_attend_kernel wgmma_entry_of(void)
{
    return {wgmma_entry_kernel<N>, (int32_t)sizeof(entry_memory<N>), entry_shape<N>::THREADS, N, 1};
}

#endif
