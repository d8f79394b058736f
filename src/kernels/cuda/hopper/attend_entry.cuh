/* MLA decode of 64 rows over the 656-byte entry on Hopper (wgmma): the pipeline of attend_latent.cuh, over tiles that
 * the third warpgroup widens. Why: docs/cuda/mla_decode.md.
 *
 *   entry   512 e4m3 | 4 scales, one for 128 elements each | 64 bf16 for RoPE
 *   bytes   as they come by cp.async, in the tile itself
 *   tile    eight panels of fp16, in which e4m3 is exact; the ninth as it was stored
 *
 * Latents meet the tensor cores without their scales, which are fp32 and exact nowhere else:
 *
 *   S = s0 (Q0 K0) + s1 (Q1 K1) + s2 (Q2 K2) + s3 (Q3 K3) + Qr Kr      sums of groups are multiplied in registers
 *   O_g = (P s_g) V_g                                                  P as each group of columns needs it
 *
 * Queries are fp16 for the latents: a row of bf16 times a power of two loses nothing that fp32 sums would keep. */
#ifndef FV_KERNELS_CUDA_HOPPER_ATTEND_ENTRY_CUH
#define FV_KERNELS_CUDA_HOPPER_ATTEND_ENTRY_CUH

#include <float.h>

#include "kernels/cuda/hopper/attend_latent.cuh"

enum {
    ENTRY_CONSUMER_REGISTERS = 200,
    ENTRY_PRODUCER_REGISTERS = 104,
    ENTRY_GROUPS = FV_DS_LATENT / FV_DS_TILE, /* of elements that share a scale: two panels each */
    ENTRY_PARTS = ENTRY_GROUPS + 1            /* of a tile, each announced apart: its groups, and RoPE */
};

static_assert(2 * ENTRY_CONSUMER_REGISTERS + ENTRY_PRODUCER_REGISTERS <= 3 * 168,
              "what warpgroups take, others gave: a block of LATENT_THREADS begins with 168 for each");

/* Scales are taken for at least so much of the largest one of their key: quotients stay finite, and what such groups
 * then add to scores and outputs is nothing, as before. */
#define ENTRY_LEAST_SCALE 0x1p-90f

/* What fp16 holds, 2^-24 to 2^15, is shared by P and scales. What a row's sums are relative to lies ENTRY_HEADROOM below
 * the largest score that it was chosen by, so P is up to 2^12; scales are in units, powers of two, up to
 * ENTRY_LARGEST_SCALE of them. */
#define ENTRY_HEADROOM 4.0f
#define ENTRY_FIRST_UNIT 0x1p-100f
#define ENTRY_LARGEST_SCALE 8.0f

typedef latent_form<__half, false> entry_form;

/* --- producers ------------------------------------------------------------------------------------------------- */

/* A warp brings 16 entries of each tile, from its copies to the panels, and waits for no other. As bytes, a group of
 * elements is a row of 128 for each entry, whose eight chunks of 16 bytes lie in two halves, the other way round in odd
 * rows: eight threads that widen read four of each of two rows, from all banks. */
static __device__ __forceinline__ int32_t first_entry_of_warp(void)
{
    return (int32_t)(threadIdx.x % LATENT_PRODUCERS / 32 * 16);
}

/* Where entry lane % 16 of the warp's lies. */
static __device__ __forceinline__ latent_slot find_entry_slot(const latent_memory *memory, const attend_args *args,
                                                              int32_t origin, int32_t tile)
{
    const int32_t entry = first_entry_of_warp() + (int32_t)(threadIdx.x % 16);
    return find_latent_slot(memory, args, origin + tile * LATENT_TILE + entry);
}

/* A thread's four entries of a tile, every fourth one of the warp's, and the chunk that it copies of each row. */
typedef struct entry_places {
    const char *of[4];
    float4 scales; /* of entry lane % 16 */
} entry_places;

static __device__ __forceinline__ entry_places find_entries(const attend_args *args, latent_slot slot)
{
    const fv_kv_plane *plane = &args->k[0].plane;
    const int64_t own = slot.page * plane->block_stride + slot.slot * plane->slot_stride;
    entry_places places;
#pragma unroll
    for (int i = 0; i < 4; i++)
        places.of[i] = (const char *)plane->data + __shfl_sync(~0u, own, (int32_t)(threadIdx.x % 32 / 8) + i * 4) +
                       threadIdx.x % 8 * 16;
    places.scales = *(const float4 *)((const char *)plane->data + own + FV_DS_SCALES_AT);
    return places;
}

/* Where a warp's bytes of a tile's first group come to; the next one's two panels on. In place: to the second panel of
 * those that they are widened to. */
static __device__ __forceinline__ char *bytes_in_place(latent_memory *memory, int32_t buffer)
{
    return memory->tiles[buffer][1] + first_entry_of_warp() * FV_DS_TILE;
}

/* Bytes of groups GROUP and the next: asked for. */
template <int GROUP> static __device__ __forceinline__ void copy_entry_groups(char *bytes, const entry_places *places)
{
    const int32_t row = threadIdx.x % 32 / 8, chunk = (threadIdx.x % 8) ^ (row % 2 * 4);
    const uint32_t to = ptx_shared_address(bytes) + row * (int32_t)FV_DS_TILE + chunk * 16;
#pragma unroll
    for (int group = GROUP; group < GROUP + 2; group++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            ptx_cp_async_16(to + group * 2 * LATENT_PANEL_BYTES + i * 4 * FV_DS_TILE,
                            places->of[i] + group * FV_DS_TILE);
    }
}

/* RoPE's elements, as they are, to their panel: asked for; the panel's barrier counts each thread when its copies are
 * there. */
static __device__ __forceinline__ void copy_entry_rope(latent_memory *memory, int32_t buffer,
                                                       const entry_places *places)
{
    const uint32_t panel = ptx_shared_address(memory->tiles[buffer][LATENT_PANELS - 1]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int32_t entry = first_entry_of_warp() + (int32_t)(threadIdx.x % 32 / 8) + i * 4;
        ptx_cp_async_16(panel + panel_offset(LATENT_TILE, entry, threadIdx.x % 8), places->of[i] + FV_DS_ROPE_AT);
    }
    ptx_cp_async_arrive(&memory->full[buffer][ENTRY_GROUPS]);
}

/* A thread's chunks of two groups: of each panel, of entries lane / 4 and the eighth after it. */
typedef struct entry_chunks {
    uint4 of[2][2][2];
} entry_chunks;

/* Of groups GROUP and the next, when the warp's copies are there but for the last PENDING groups of those; then their
 * place may be written again. */
template <int GROUP, int PENDING>
static __device__ __forceinline__ void read_entries(entry_chunks *chunks, const char *bytes)
{
    const int32_t row = threadIdx.x % 32 / 4, at = row * FV_DS_TILE + (threadIdx.x % 4 + row % 2 * 4) * 16;
    ptx_cp_async_wait<PENDING>();
    __syncwarp();
#pragma unroll
    for (int group = 0; group < 2; group++) {
        const char *from = bytes + (GROUP + group) * 2 * LATENT_PANEL_BYTES;
#pragma unroll
        for (int panel = 0; panel < 2; panel++) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                chunks->of[group][panel][i] = *(const uint4 *)(from + (at ^ (panel * 64)) + i * 8 * FV_DS_TILE);
        }
    }
    __syncwarp();
}

/* To the panels of groups GROUP and the next, each announced. A chunk becomes two; eight threads write two rows, and
 * chunks of all banks. */
template <int GROUP>
static __device__ __forceinline__ void widen_entries(latent_memory *memory, int32_t buffer, const entry_chunks *chunks)
{
    const int32_t at = panel_offset(LATENT_TILE, first_entry_of_warp() + (int32_t)(threadIdx.x % 32 / 4),
                                    threadIdx.x % 4 * 2);
#pragma unroll
    for (int group = 0; group < 2; group++) {
#pragma unroll
        for (int panel = 0; panel < 2; panel++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                char *to = memory->tiles[buffer][2 * (GROUP + group) + panel] + i * 8 * FV_PANEL_ROW_BYTES;
                const uint4 from = chunks->of[group][panel][i];
                const uint2 a = ptx_widen_e4m3(from.x), b = ptx_widen_e4m3(from.y);
                *(uint4 *)(to + at) = make_uint4(a.x, a.y, b.x, b.y);
                const uint2 c = ptx_widen_e4m3(from.z), d = ptx_widen_e4m3(from.w);
                *(uint4 *)(to + (at ^ 16)) = make_uint4(c.x, c.y, d.x, d.y);
            }
        }
        ptx_fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx_mbarrier_arrive(&memory->full[buffer][GROUP + group]);
    }
}

/* An entry's scales as scores want them: of a group what has to be multiplied by the next one's, of the last its own;
 * and the largest of the warp's entries. */
typedef struct entry_scales {
    float of[ENTRY_GROUPS];
    float largest;
} entry_scales;

static __device__ __forceinline__ entry_scales relate_scales(float4 of)
{
    entry_scales scales = {{of.x, of.y, of.z, of.w}};
    float most = 0;
#pragma unroll
    for (int group = 0; group < ENTRY_GROUPS; group++) most = fmaxf(most, fabsf(scales.of[group]));
#pragma unroll
    for (int group = 0; group < ENTRY_GROUPS; group++) {
        const float size = fmaxf(fmaxf(fabsf(scales.of[group]), most * ENTRY_LEAST_SCALE), FLT_MIN);
        scales.of[group] = copysignf(size, scales.of[group]);
    }
#pragma unroll
    for (int group = 0; group < ENTRY_GROUPS - 1; group++)
        scales.of[group] = __fdividef(scales.of[group], scales.of[group + 1]);
    scales.largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
    return scales;
}

/* To shared memory, those of groups GROUP and the next. */
template <int GROUP>
static __device__ __forceinline__ void store_entry_scales(latent_memory *memory, int32_t buffer,
                                                          const entry_scales *scales)
{
    const int32_t lane = threadIdx.x % 32, entry = first_entry_of_warp() + lane;
    if (lane >= 16) return;
    memory->scales[buffer][GROUP][entry] = scales->of[GROUP];
    memory->scales[buffer][GROUP + 1][entry] = scales->of[GROUP + 1];
    if (GROUP > 0 && lane == 0) memory->largest_scale[buffer][entry / 16] = scales->largest;
}

/* Copies of a tile to its own place, each half as soon as that is free: two groups of them. */
static __device__ __forceinline__ void ask_for_entries(latent_memory *memory, int32_t buffer, int32_t parity,
                                                       const entry_places *places)
{
    ptx_mbarrier_wait(&memory->empty[buffer][0], parity);
    copy_entry_groups<0>(bytes_in_place(memory, buffer), places);
    ptx_cp_async_commit();
    ptx_mbarrier_wait(&memory->empty[buffer][1], parity);
    copy_entry_groups<2>(bytes_in_place(memory, buffer), places);
    copy_entry_rope(memory, buffer, places);
    ptx_cp_async_commit();
}

/* PENDING: groups of copies that have been asked for after the tile's. */
template <int PENDING>
static __device__ __forceinline__ void widen_in_place(latent_memory *memory, int32_t buffer, float4 of_entry)
{
    const entry_scales scales = relate_scales(of_entry);
    entry_chunks chunks;
    read_entries<0, PENDING + 1>(&chunks, bytes_in_place(memory, buffer));
    store_entry_scales<0>(memory, buffer, &scales);
    widen_entries<0>(memory, buffer, &chunks);
    read_entries<2, PENDING>(&chunks, bytes_in_place(memory, buffer));
    store_entry_scales<2>(memory, buffer, &scales);
    widen_entries<2>(memory, buffer, &chunks);
}

/* Bytes come to the panels that they are widened to, for two tiles at a time: what frees the high half of an even tile
 * comes after the scores of the odd one. */
static __device__ __forceinline__ void produce_entries(latent_memory *memory, const attend_args *args)
{
    ptx_bar_sync(LATENT_BARRIER_KEYS, LATENT_THREADS);
    const int32_t origin = first_latent_key(&memory->keys), num_tiles = count_latent_tiles(&memory->keys);
    if (num_tiles == 0) return;
    latent_slot even = find_entry_slot(memory, args, origin, 0), odd = find_entry_slot(memory, args, origin, 1);
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; tile += 2) {
        const int32_t parity = (tile / 2 + 1) % 2;
        const entry_places even_places = find_entries(args, even), odd_places = find_entries(args, odd);
        const bool has_odd = tile + 1 < num_tiles;
        even = find_entry_slot(memory, args, origin, tile + 2);
        odd = find_entry_slot(memory, args, origin, tile + 3);
        ask_for_entries(memory, 0, parity, &even_places);
        if (has_odd) {
            ask_for_entries(memory, 1, parity, &odd_places);
            widen_in_place<2>(memory, 0, even_places.scales);
            widen_in_place<0>(memory, 1, odd_places.scales);
        } else {
            widen_in_place<0>(memory, 0, even_places.scales);
        }
    }
}

/* --- consumers ------------------------------------------------------------------------------------------------- */

typedef struct entry_state {
    latent_state of_rows;
    float scale;        /* of scores, in base 2 */
    float inverse_unit; /* of P times scale: what they are multiplied by */
} entry_state;

/* The largest magnitude of bf16 in a thread's part of a row, as its bits. */
static __device__ __forceinline__ uint32_t largest_of_chunks(const uint4 (&chunks)[LATENT_PANELS])
{
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < LATENT_PANELS; i++) {
        const uint32_t words[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++) largest = __vmaxu2(largest, words[j] & 0x7fff7fffu);
    }
    return max(largest & 0xffffu, largest >> 16);
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
        const float2 pair = widen_pair<__nv_bfloat16>(words[i]);
        words[i] = fv_narrow_pair<T>(pair.x * factor, pair.y * factor);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* Queries into panels, times the power of two that brings the largest element of all rows to 2^14 and above: what is
 * 2^31 below that is exact. Returns its inverse. */
static __device__ __forceinline__ float load_entry_queries(latent_memory *memory, const attend_args *args)
{
    uint4 chunks[2][LATENT_PANELS];
    const int32_t first_row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const attend_row *row = &memory->rows[first_row + i * (LATENT_CONSUMERS / 8)];
        const char *from = row->first < row->end ? query_row(&args->params, row) + chunk * 16 : NULL;
#pragma unroll
        for (int panel = 0; panel < LATENT_PANELS; panel++)
            chunks[i][panel] = from ? *(const uint4 *)(from + panel * FV_PANEL_ROW_BYTES) : make_uint4(0, 0, 0, 0);
    }
    ptx_bar_arrive(LATENT_BARRIER_KEYS, LATENT_THREADS); /* the place of rows is that of scales from here on */
#pragma unroll
    for (int i = 0; i < 2; i++) largest = max(largest, largest_of_chunks(chunks[i]));
    atomicMax((uint32_t *)memory->p, __reduce_max_sync(~0u, largest));
    ptx_bar_sync(LATENT_BARRIER_CONSUMERS, LATENT_CONSUMERS);
    const query_scale scale = find_query_scale(*(const uint32_t *)memory->p);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        char *to = memory->q[0] + panel_offset(LATENT_ROWS, first_row + i * (LATENT_CONSUMERS / 8), chunk);
#pragma unroll
        for (int panel = 0; panel < LATENT_PANELS; panel++)
            *(uint4 *)(to + panel * LATENT_PANEL_BYTES) = panel < LATENT_PANELS - 1
                                                              ? scale_chunk<__half>(chunks[i][panel], scale.factor)
                                                              : scale_chunk<__nv_bfloat16>(chunks[i][panel], scale.factor);
    }
    return scale.inverse;
}
static_assert(LATENT_ROWS == 2 * LATENT_CONSUMERS / 8, "two rows of each eight threads");

/* Dot products of part PART of a tile, when it is there, added to those of the parts before, which are multiplied by a
 * quotient of scales: issued. All that can be done while the part before is under way is. */
template <int PART>
static __device__ __forceinline__ void multiply_entry_part(float (&s)[LATENT_TILE / 2], latent_memory *memory,
                                                           int32_t buffer, uint32_t parity)
{
    constexpr int PANEL = 2 * PART, SIZE = PART < ENTRY_GROUPS ? FV_DS_TILE : FV_DS_ROPE;
    const uint64_t q_at = ptx_anew(ptx_matrix_descriptor(memory->q[PANEL], 16, 1024));
    const uint64_t k_at = ptx_anew(ptx_matrix_descriptor(memory->tiles[buffer][PANEL], 16, 1024));
    ptx_mbarrier_wait(&memory->full[buffer][PART], parity);
    if (PART == ENTRY_GROUPS) ptx_fence_proxy_async(); /* what came by cp.async; of groups the producers have passed it */
    if (PART > 0) {
        float2 scales[LATENT_TILE / 8];
#pragma unroll
        for (int n = 0; n < LATENT_TILE / 8; n++)
            scales[n] = *(const float2 *)&memory->scales[buffer][PART - 1][n * 8 + threadIdx.x % 4 * 2];
        ptx_wgmma_wait<0>();
        ptx_wgmma_settle(s);
#pragma unroll
        for (int n = 0; n < LATENT_TILE / 8; n++) {
            s[4 * n] *= scales[n].x;
            s[4 * n + 1] *= scales[n].y;
            s[4 * n + 2] *= scales[n].x;
            s[4 * n + 3] *= scales[n].y;
        }
    }
    ptx_wgmma_settle(s);
    ptx_wgmma_fence();
#pragma unroll
    for (int d = 0; d < SIZE; d += 16) {
        const uint32_t at = d / 64 * LATENT_PANEL_BYTES + d % 64 * 2;
        const uint64_t q = ptx_descriptor_at(q_at, at), k = ptx_descriptor_at(k_at, at);
        if (PART < ENTRY_GROUPS)
            ptx_wgmma_m64n64k16_ss<__half>(s, q, k, PART + d > 0);
        else
            ptx_wgmma_m64n64k16_ss<__nv_bfloat16>(s, q, k, 1);
    }
    ptx_wgmma_commit();
}

/* S of a tile. */
static __device__ __forceinline__ void multiply_entry_keys(float (&s)[LATENT_TILE / 2], latent_memory *memory,
                                                           int32_t buffer, uint32_t parity)
{
    multiply_entry_part<0>(s, memory, buffer, parity);
    multiply_entry_part<1>(s, memory, buffer, parity);
    multiply_entry_part<2>(s, memory, buffer, parity);
    multiply_entry_part<3>(s, memory, buffer, parity);
    multiply_entry_part<4>(s, memory, buffer, parity);
    ptx_wgmma_wait<0>();
    ptx_wgmma_settle(s);
}

/* O += P V of a tile, half of the columns, a group of them with each P: issued. */
static __device__ __forceinline__ void multiply_entry_values(float (&out)[LATENT_VALUE / 4],
                                                             const uint32_t (&p)[2][LATENT_TILE / 4],
                                                             const latent_memory *memory, int32_t buffer,
                                                             int32_t warpgroup)
{
    const uint64_t v_at = latent_values_at(memory, buffer, warpgroup);
    ptx_wgmma_settle(out);
    ptx_wgmma_fence();
#pragma unroll
    for (int group = 0; group < 2; group++) {
        float(&sums)[LATENT_VALUE / 8] = *(float(*)[LATENT_VALUE / 8])(out + group * (LATENT_VALUE / 8));
#pragma unroll
        for (int key = 0; key < LATENT_TILE; key += 16) {
            const uint32_t *of = p[group] + key / 4, a[4] = {of[0], of[1], of[2], of[3]};
            const uint32_t at = group * 2 * LATENT_PANEL_BYTES + key * FV_PANEL_ROW_BYTES;
            ptx_wgmma_m64n128k16_rs_nt<__half>(sums, a, ptx_descriptor_at(v_at, at), 1);
        }
    }
    ptx_wgmma_commit();
}

/* To the unit of scales up to `largest`; returns what sums in units move by. */
static __device__ __forceinline__ float enlarge_unit(float *inverse_unit, float largest)
{
    const uint32_t power = __float_as_uint(largest) & 0x7f800000u; /* at or below it */
    const float inverse = __uint_as_float((254u << 23) - power);
    const float factor = inverse * __uint_as_float((254u << 23) - __float_as_uint(*inverse_unit));
    *inverse_unit = inverse;
    return factor;
}

/* A tile's scales may ask for a larger unit; then the output has to move to it, too. */
static __device__ __forceinline__ bool raise_entry_unit(latent_move *move, entry_state *state,
                                                        const latent_memory *memory, int32_t buffer)
{
    const float4 of = *(const float4 *)memory->largest_scale[buffer];
    const float largest = fmaxf(fmaxf(of.x, of.y), fmaxf(of.z, of.w));
    if (largest * state->inverse_unit < ENTRY_LARGEST_SCALE) return false;
    const float factor = enlarge_unit(&state->inverse_unit, largest);
    move->by[0] *= factor;
    move->by[1] *= factor;
    return true;
}

static __device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b)
{
    const __half2 product = __hmul2(*(const __half2 *)&a, *(const __half2 *)&b);
    return *(const uint32_t *)&product;
}

/* P of a thread's keys 8 n and on, two in each of its rows, times the scales of the warpgroup's two groups of
 * columns. */
template <int WARPGROUP>
static __device__ __forceinline__ void scale_entry_weights(uint32_t (&p)[2][LATENT_TILE / 4], uint32_t low,
                                                           uint32_t high, int n, const latent_memory *memory,
                                                           int32_t buffer, float inverse_unit)
{
    float2 scale = make_float2(inverse_unit, inverse_unit);
#pragma unroll
    for (int group = ENTRY_GROUPS - 1; group >= 2 * WARPGROUP; group--) {
        const float2 factor = *(const float2 *)&memory->scales[buffer][group][n * 8 + threadIdx.x % 4 * 2];
        scale = make_float2(scale.x * factor.x, scale.y * factor.y);
        const int columns = group - 2 * WARPGROUP;
        if (columns >= 2) continue;
        const uint32_t scales = fv_narrow_pair<__half>(scale.x, scale.y);
        p[columns][2 * n] = multiply_halves(low, scales);
        p[columns][2 * n + 1] = multiply_halves(high, scales);
    }
}

/* What a row's sums are relative to after a tile whose largest score is `max`. */
static __device__ __forceinline__ float choose_entry_max(float before, float max)
{
    return max > before + ENTRY_HEADROOM + FV_MAX_SLACK ? max - ENTRY_HEADROOM : before;
}

/* P of the warpgroup's own tile in place of its dot products; true: the output has to be moved. */
static __device__ __forceinline__ bool weigh_entry_keys(float (&s)[LATENT_TILE / 2], latent_move *move,
                                                        entry_state *state, const latent_memory *memory,
                                                        const attend_args *args, int32_t row0, int32_t tile_first)
{
    latent_state *rows = &state->of_rows;
#pragma unroll
    for (int i = 0; i < LATENT_TILE / 2; i++) s[i] *= state->scale;
    if (tile_first < memory->keys.full_first || tile_first + LATENT_TILE > memory->keys.full_end) {
        const int32_t origin = tile_first + threadIdx.x % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const attend_row row = row_of(args, &memory->job, row0 + rows->row + half * 8);
#pragma unroll
            for (int i = 0; i < LATENT_TILE / 4; i++) {
                const int32_t key = origin + i / 2 * 8 + i % 2;
                if (key < row.first || key >= row.end) s[i / 2 * 4 + half * 2 + i % 2] = -INFINITY;
            }
        }
    }
    float max[2];
    find_row_maxima(max, s);
#pragma unroll
    for (int half = 0; half < 2; half++) max[half] = choose_entry_max(rows->sums.max[half], max[half]);
    const bool changes = move_latent_maxima<entry_form>(move, rows, max, args);
    exponentiate_keys(s, &rows->sums);
    return changes;
}

/* P in pairs, and to where both warpgroups read it, thread by thread, with the maxima it is relative to. */
static __device__ __forceinline__ void hand_over_entry_weights(uint4 (&weights)[4], const float (&s)[LATENT_TILE / 2],
                                                               const entry_state *state, latent_memory *memory,
                                                               int32_t barrier)
{
    const latent_state *rows = &state->of_rows;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        weights[i] = make_uint4(
            fv_narrow_pair<__half>(s[8 * i], s[8 * i + 1]), fv_narrow_pair<__half>(s[8 * i + 2], s[8 * i + 3]),
            fv_narrow_pair<__half>(s[8 * i + 4], s[8 * i + 5]), fv_narrow_pair<__half>(s[8 * i + 6], s[8 * i + 7]));
        *((uint4 *)memory->p + threadIdx.x % 128 + i * 128) = weights[i];
    }
    /* Of the sums nothing is stored, but they have to be there: else the compiler leaves their additions for later, and
     * the registers of S with them. */
    const float max[2] = {rows->sums.max[0] + 0.0f * rows->sums.sum[0], rows->sums.max[1] + 0.0f * rows->sums.sum[1]};
    if (threadIdx.x % 4 == 0) {
        memory->row_max[rows->row] = max[0];
        memory->row_max[rows->row + 8] = max[1];
    }
    ptx_bar_arrive(barrier, LATENT_CONSUMERS);
}

static __device__ __forceinline__ void load_entry_weights(uint4 (&weights)[4], const latent_memory *memory)
{
#pragma unroll
    for (int i = 0; i < 4; i++) weights[i] = *((const uint4 *)memory->p + threadIdx.x % 128 + i * 128);
}

/* The other warpgroup's tile: the maxima that its P is relative to; true where the output has to be moved to them. */
static __device__ __forceinline__ bool take_over_entry_maxima(latent_move *move, entry_state *state,
                                                              const latent_memory *memory, const attend_args *args,
                                                              int32_t barrier)
{
    latent_state *rows = &state->of_rows;
    ptx_bar_sync(barrier, LATENT_CONSUMERS);
    const float max[2] = {memory->row_max[rows->row], memory->row_max[rows->row + 8]};
    return move_latent_maxima<entry_form>(move, rows, max, args);
}

/* O += P V of a tile, to the end. */
template <int WARPGROUP>
static __device__ __forceinline__ void attend_entries(float (&out)[LATENT_VALUE / 4], const uint4 (&weights)[4],
                                                      latent_move *move, bool moves, entry_state *state,
                                                      const latent_memory *memory, int32_t buffer)
{
    uint32_t p[2][LATENT_TILE / 4];
    moves = raise_entry_unit(move, state, memory, buffer) || moves;
    if (moves) rescale_values(out, move->by);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 of = weights[i];
        scale_entry_weights<WARPGROUP>(p, of.x, of.y, 2 * i, memory, buffer, state->inverse_unit);
        scale_entry_weights<WARPGROUP>(p, of.z, of.w, 2 * i + 1, memory, buffer, state->inverse_unit);
    }
    multiply_entry_values(out, p, memory, buffer, WARPGROUP);
    ptx_wgmma_wait<0>();
    ptx_wgmma_settle(out);
}

/* The first warpgroup: S and softmax of tiles 0, 2, ..., and the first half of the columns of all. */
static __device__ __forceinline__ void attend_even_entries(float (&out)[LATENT_VALUE / 4], entry_state *state,
                                                           latent_memory *memory, const attend_args *args, int32_t row0,
                                                           int32_t origin, int32_t num_tiles)
{
    float s[LATENT_TILE / 2];
    uint4 weights[4];
    latent_move move;
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; tile += 2) {
        multiply_entry_keys(s, memory, 0, tile / 2 % 2);
        bool moves = weigh_entry_keys(s, &move, state, memory, args, row0, origin + tile * LATENT_TILE);
        hand_over_entry_weights(weights, s, state, memory, LATENT_BARRIER_EVEN);
        attend_entries<0>(out, weights, &move, moves, state, memory, 0);
        release_latents(memory, 0, 0);
        if (tile + 1 >= num_tiles) return;
        moves = take_over_entry_maxima(&move, state, memory, args, LATENT_BARRIER_ODD);
        load_entry_weights(weights, memory);
        attend_entries<0>(out, weights, &move, moves, state, memory, 1);
        release_latents(memory, 1, 0);
    }
}

/* The second: tiles 1, 3, ..., and the other half of the columns. Its own P stays in shared memory while registers are
 * the other one's: the first warpgroup writes there again after a tile that is brought when this one is released. */
static __device__ __forceinline__ void attend_odd_entries(float (&out)[LATENT_VALUE / 4], entry_state *state,
                                                          latent_memory *memory, const attend_args *args, int32_t row0,
                                                          int32_t origin, int32_t num_tiles)
{
    float s[LATENT_TILE / 2];
    uint4 other_weights[4], weights[4];
    latent_move other_move, move;
#pragma unroll 1
    for (int32_t tile = 1; tile < num_tiles; tile += 2) {
        multiply_entry_keys(s, memory, 1, tile / 2 % 2);
        const bool moves = take_over_entry_maxima(&other_move, state, memory, args, LATENT_BARRIER_EVEN);
        const bool moves_again = weigh_entry_keys(s, &move, state, memory, args, row0, origin + tile * LATENT_TILE);
        load_entry_weights(other_weights, memory);
        hand_over_entry_weights(weights, s, state, memory, LATENT_BARRIER_ODD);
        attend_entries<1>(out, other_weights, &other_move, moves, state, memory, 0);
        load_entry_weights(weights, memory);
        release_latents(memory, 0, 1);
        attend_entries<1>(out, weights, &move, moves_again, state, memory, 1);
        release_latents(memory, 1, 1);
    }
    if (num_tiles % 2 == 0) return;
    const bool moves = take_over_entry_maxima(&move, state, memory, args, LATENT_BARRIER_EVEN);
    load_entry_weights(weights, memory);
    attend_entries<1>(out, weights, &move, moves, state, memory, 0);
}

static __device__ __forceinline__ void consume_entries(latent_memory *memory, const attend_args *args)
{
    const attend_job *job = &memory->job;
    const int32_t row0 = (int32_t)blockIdx.x % args->row_parts * LATENT_ROWS, group = warpgroup_of_thread();
    find_latent_rows(memory, args, row0);
    const float inverse = load_entry_queries(memory, args);
    float out[LATENT_VALUE / 4];
#pragma unroll
    for (int i = 0; i < LATENT_VALUE / 4; i++) out[i] = 0;
    entry_state state;
    latent_state *rows = &state.of_rows;
    clear_row_sums(&rows->sums);
    rows->row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    state.scale = args->params.scale * job->k_head_scale * FV_LOG2E * inverse;
    state.inverse_unit = 1.0f / ENTRY_FIRST_UNIT;
    const int32_t origin = first_latent_key(&memory->keys), num_tiles = count_latent_tiles(&memory->keys);
    ptx_fence_proxy_async();
    ptx_bar_sync(LATENT_BARRIER_CONSUMERS, LATENT_CONSUMERS);
    if (group == 0)
        attend_even_entries(out, &state, memory, args, row0, origin, num_tiles);
    else
        attend_odd_entries(out, &state, memory, args, row0, origin, num_tiles);
    ptx_bar_sync(LATENT_BARRIER_CONSUMERS, LATENT_CONSUMERS);
    if (threadIdx.x < LATENT_ROWS) memory->rows[threadIdx.x] = row_of(args, job, row0 + (int32_t)threadIdx.x);
#pragma unroll
    for (int half = 0; half < 2; half++) rows->sums.rounded[half] = rows->sums.sum[half] * state.inverse_unit;
    store_latent_rows<entry_form>(out, rows, memory, args, group, fv_min_i32(LATENT_ROWS, job->num_rows - row0));
}

static __device__ __forceinline__ void init_entry_memory(latent_memory *memory)
{
    for (int32_t buffer = 0; buffer < 2; buffer++) {
        for (int32_t part = 0; part < ENTRY_PARTS; part++)
            ptx_mbarrier_init(&memory->full[buffer][part],
                              part < ENTRY_GROUPS ? LATENT_PRODUCERS / 32 : LATENT_PRODUCERS);
        for (int32_t side = 0; side < 2; side++) ptx_mbarrier_init(&memory->empty[buffer][side], 4);
    }
    ptx_fence_mbarrier_init();
    memory->keys.first = memory->keys.full_end = INT32_MAX;
    memory->keys.end = memory->keys.full_first = 0;
    *(uint32_t *)memory->p = 0; /* the largest query */
}

static __global__ void __launch_bounds__(LATENT_THREADS, 1) wgmma_entry_kernel(const __grid_constant__ attend_args args)
{
#if FV_HAS_WGMMA
    extern __shared__ __align__(1024) char shared[];
    latent_memory *memory = (latent_memory *)shared;
    if (threadIdx.x == 0) init_entry_memory(memory);
    overlap_begin();
    if (threadIdx.x == 0) memory->has_item = find_job(&memory->job, &args);
    __syncthreads();
    if (!memory->has_item) return;
    if (threadIdx.x >= LATENT_CONSUMERS) {
        ptx_give_registers<ENTRY_PRODUCER_REGISTERS>();
        produce_entries(memory, &args);
    } else {
        ptx_take_registers<ENTRY_CONSUMER_REGISTERS>();
        consume_entries(memory, &args);
    }
#endif
}

constexpr fv_cuda_attend_kernel wgmma_entry(void)
{
    return {wgmma_entry_kernel, (int32_t)sizeof(latent_memory), LATENT_THREADS, LATENT_ROWS, 1};
}

#endif
