/* AMLA on Hopper (wgmma), 64 rows: tiles of 64 latents of 576 elements, whose first 512 are the values.
 *
 *   tile t in shared memory     t + 1 on its way (cp.async)
 *
 *   S = Q K     warpgroup w: all 64 rows x keys 32 w to 32 w + 31
 *   maxima      meet in shared memory
 *   P           to shared memory, a panel of 64 keys
 *   O += P V    warpgroup w: all 64 rows x values 256 w to 256 w + 255, read from the same latents
 *
 * The output is rescaled by integer additions to its bits (exponent_add.cuh), or, to compare with, by multiplication
 * with P rounded as there. Its own kernel, apart from attend_latent.cuh: that one's scheme with the additions in its
 * loops took 1.4 times as long as this (docs/notes/cuda-hopper.md). */
#ifndef FV_KERNELS_CUDA_HOPPER_ATTEND_AMLA_CUH
#define FV_KERNELS_CUDA_HOPPER_ATTEND_AMLA_CUH

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/exponent_add.cuh"
#include "kernels/cuda/hopper/panel.cuh"

enum {
    AMLA_HEAD = 576,
    AMLA_VALUE = 512,
    AMLA_TILE = 64,
    AMLA_ROWS = 64,
    AMLA_THREADS = 256,
    AMLA_KEYS = 32, /* of a warpgroup's share of S */
    AMLA_SPANS = 3, /* sums of S: tensor cores cut off what they add, so long sums are made of short ones */
    AMLA_BYTES = AMLA_TILE * AMLA_HEAD * 2
};

struct amla_memory {
    alignas(1024) char q[AMLA_ROWS * AMLA_HEAD * 2];
    alignas(1024) char tiles[2][AMLA_BYTES];
    alignas(1024) char p[AMLA_ROWS * AMLA_TILE * 2];
    attend_row rows[AMLA_ROWS];
    float row_values[2][AMLA_ROWS]; /* maxima, then sums, of the two warpgroups */
    attend_keys keys;
    int32_t has_item;
    attend_job job;
};

/* A thread's two latents of a tile, eight threads to each: key threadIdx.x / 8 of the tile, and the 32nd after it.
 * NULL: no row sees the key. Asked for a tile ahead of their use; a list of them has no place in shared memory. */
typedef struct amla_rows {
    const char *of[2];
} amla_rows;

static __device__ __forceinline__ amla_rows find_amla_latents(const amla_memory *memory, const attend_args *args,
                                                              int32_t tile_first)
{
    amla_rows rows = {{NULL, NULL}};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t key = tile_first + threadIdx.x / 8 + i * 32;
        if (key < memory->keys.first || key >= memory->keys.end) continue;
        const int2 at = split_key(args, key);
        rows.of[i] = plain_row(&args->k[0].plane, memory->job.table[at.x], memory->job.kv_head, at.y) +
                     threadIdx.x % 8 * 16;
    }
    return rows;
}

static __device__ __forceinline__ void load_amla_tile(amla_memory *memory, const attend_args *args, int32_t tile,
                                                      const amla_rows *rows)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t in_tile = threadIdx.x / 8 + i * 32;
        const char *row = rows->of[i] ? rows->of[i] : (const char *)args->params.q;
        const int32_t bytes = rows->of[i] ? 16 : 0, step = rows->of[i] ? FV_PANEL_ROW_BYTES : 0;
        char *to = memory->tiles[tile % 2] + panel_offset(AMLA_TILE, in_tile, threadIdx.x % 8);
#pragma unroll
        for (int panel = 0; panel < AMLA_HEAD / 64; panel++)
            ptx_cp_async_16_or_zeros(to + panel * AMLA_TILE * FV_PANEL_ROW_BYTES, row + panel * step, bytes);
    }
}

template <class T>
static __device__ __forceinline__ void multiply_amla_keys(float (&s)[AMLA_KEYS / 2], const amla_memory *memory,
                                                          const char *tile, int32_t group)
{
    float spans[AMLA_SPANS][AMLA_KEYS / 2];
    constexpr int SPAN = AMLA_HEAD / AMLA_SPANS;
    const uint64_t q_at = ptx_matrix_descriptor(memory->q, 16, 1024);
    const uint64_t k_at = ptx_matrix_descriptor(tile + group * AMLA_KEYS * FV_PANEL_ROW_BYTES, 16, 1024);
    ptx_wgmma_fence();
#pragma unroll
    for (int d = 0; d < AMLA_HEAD; d += 16) {
        const uint64_t q = ptx_descriptor_at(q_at, d / 64 * AMLA_ROWS * FV_PANEL_ROW_BYTES + d % 64 * 2);
        const uint64_t k = ptx_descriptor_at(k_at, d / 64 * AMLA_TILE * FV_PANEL_ROW_BYTES + d % 64 * 2);
        ptx_wgmma_m64n32k16_ss<T>(spans[d / SPAN], q, k, d % SPAN > 0);
    }
    ptx_wgmma_commit();
    ptx_wgmma_wait<0>();
#pragma unroll
    for (int span = 0; span < AMLA_SPANS; span++) ptx_wgmma_settle(spans[span]);
#pragma unroll
    for (int i = 0; i < AMLA_KEYS / 2; i++) {
        s[i] = spans[0][i];
#pragma unroll
        for (int span = 1; span < AMLA_SPANS; span++) s[i] += spans[span][i];
    }
}

/* The warpgroup's share of P into its panel. */
static __device__ __forceinline__ void store_amla_weights(amla_memory *memory, const uint32_t (&p)[AMLA_KEYS / 4],
                                                          int32_t row, int32_t group)
{
    const int32_t pair = threadIdx.x % 4 * 4; /* bytes in a chunk */
#pragma unroll
    for (int i = 0; i < AMLA_KEYS / 4; i++) {
        const int32_t r = row + i % 2 * 8, chunk = group * (AMLA_KEYS / 8) + i / 2;
        *(uint32_t *)(memory->p + panel_offset(AMLA_ROWS, r, chunk) + pair) = p[i];
    }
}

template <class T>
static __device__ __forceinline__ void multiply_amla_values(float (&out)[AMLA_VALUE / 4], const amla_memory *memory,
                                                            const char *tile, int32_t group)
{
    constexpr int PANEL = AMLA_TILE * FV_PANEL_ROW_BYTES;
    const uint64_t p_at = ptx_matrix_descriptor(memory->p, 16, 1024);
    const uint64_t v_at = ptx_matrix_descriptor(tile + group * (AMLA_VALUE / 2 / 64) * PANEL, PANEL, 1024);
    ptx_wgmma_fence();
#pragma unroll
    for (int key = 0; key < AMLA_TILE; key += 16) {
        const uint64_t p = ptx_descriptor_at(p_at, key * 2), v = ptx_descriptor_at(v_at, key * FV_PANEL_ROW_BYTES);
        ptx_wgmma_m64n256k16_ss_nt<T>(out, p, v, 1);
    }
    ptx_wgmma_commit();
    ptx_wgmma_wait<0>();
    ptx_wgmma_settle(out);
}

/* The output follows the maxima, and P of the scores, as AMLA has them. */
static __device__ __forceinline__ void move_amla_scales(float (&out)[AMLA_VALUE / 4], float (&p)[AMLA_KEYS / 2],
                                                        amla_scale (&scales)[2], const row_sums *sums,
                                                        const float (&max_before)[2], const float (&factor)[2],
                                                        const attend_args *args)
{
    if (args->rescaling == FV_RESCALING_MULTIPLY_BF16) {
        if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) rescale_values(out, factor);
        return;
    }
    int32_t addend[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
        addend[half] = amla_move_scale(&scales[half], sums->max[half], max_before[half], args->params.q_dtype,
                                       args->rescaling);
#pragma unroll
    for (int i = 0; i < AMLA_KEYS / 2; i++) p[i] *= scales[i / 2 % 2].scale;
    if (!__any_sync(~0u, addend[0] != 0 || addend[1] != 0)) return;
#pragma unroll
    for (int i = 0; i < AMLA_VALUE / 4; i++) out[i] = exponent_add(out[i], addend[i / 2 % 2]);
}

template <class T>
static __device__ __forceinline__ void attend_amla_tiles(float (&out)[AMLA_VALUE / 4], row_sums *sums,
                                                         amla_scale (&scales)[2], amla_memory *memory,
                                                         const attend_args *args)
{
    const int32_t group = warpgroup_of_thread(), row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const float scale = args->params.scale * memory->job.k_head_scale * FV_LOG2E;
    const int32_t first_key = memory->keys.first;
    const int32_t num_tiles = uniform((memory->keys.end - first_key + AMLA_TILE - 1) / AMLA_TILE);
    amla_rows rows = find_amla_latents(memory, args, first_key);
    load_amla_tile(memory, args, 0, &rows);
    ptx_cp_async_commit();
    rows = find_amla_latents(memory, args, first_key + AMLA_TILE);
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; tile++) {
        const int32_t tile_first = first_key + tile * AMLA_TILE;
        if (tile + 1 < num_tiles) load_amla_tile(memory, args, tile + 1, &rows);
        ptx_cp_async_commit();
        rows = find_amla_latents(memory, args, tile_first + 2 * AMLA_TILE);
        ptx_cp_async_wait<1>();
        ptx_fence_proxy_async();
        __syncthreads();

        float s[AMLA_KEYS / 2], max[2], factor[2];
        multiply_amla_keys<T>(s, memory, memory->tiles[tile % 2], group);
        score_keys(s, memory->rows, &memory->keys, row, group * AMLA_KEYS, tile_first, AMLA_TILE, scale);
        find_row_maxima(max, s);
        if (threadIdx.x % 4 == 0) {
            memory->row_values[group][row] = max[0];
            memory->row_values[group][row + 8] = max[1];
        }
        __syncthreads();
        max[0] = fmaxf(max[0], memory->row_values[1 - group][row]);
        max[1] = fmaxf(max[1], memory->row_values[1 - group][row + 8]);
        const float max_before[2] = {sums->max[0], sums->max[1]};
        raise_row_maxima(factor, sums, max);
        uint32_t p[AMLA_KEYS / 4];
        exponentiate_keys(s, sums);
        move_amla_scales(out, s, scales, sums, max_before, factor, args);
        narrow_keys<T>(p, s, sums);
        store_amla_weights(memory, p, row, group);
        ptx_fence_proxy_async();
        __syncthreads();
        multiply_amla_values<T>(out, memory, memory->tiles[tile % 2], group);
        __syncthreads(); /* the tile, P and the maxima are read to the end */
    }
    ptx_cp_async_wait<0>();
}

/* Of the row, all keys: the thread's own and those of the other warpgroup. */
static __device__ __forceinline__ void meet_amla_sums(float (&of_rows)[2], amla_memory *memory, int32_t group,
                                                      int32_t row)
{
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        of_rows[half] = sum_of_quad(of_rows[half]);
        if (threadIdx.x % 4 == 0) memory->row_values[group][row + half * 8] = of_rows[half];
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++)
        of_rows[half] = memory->row_values[0][row + half * 8] + memory->row_values[1][row + half * 8];
}

template <class T>
static __device__ __forceinline__ void attend_amla_block(amla_memory *memory, const attend_args *args, int32_t row0)
{
    const attend_job *job = &memory->job;
    const int32_t group = warpgroup_of_thread(), row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const int32_t num_rows = fv_min_i32(AMLA_ROWS, job->num_rows - row0);
    find_rows<AMLA_ROWS>(memory->rows, &memory->keys, args, job, row0);
    load_query_panels<T, AMLA_ROWS, AMLA_HEAD, AMLA_THREADS>(memory->q, memory->rows, args, num_rows);
    float out[AMLA_VALUE / 4];
#pragma unroll
    for (int i = 0; i < AMLA_VALUE / 4; i++) out[i] = 0;
    row_sums sums;
    clear_row_sums(&sums);
    amla_scale scales[2] = {amla_scale_at_first(), amla_scale_at_first()};
    if (memory->keys.first < memory->keys.end) attend_amla_tiles<T>(out, &sums, scales, memory, args);
    meet_amla_sums(sums.sum, memory, group, row);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int32_t r = row + half * 8;
        if (r < num_rows)
            store_row(out, half, args, job, &memory->rows[r], sums.max[half], sums.sum[half],
                      job->v_head_scale / scales[half].scale, group * AMLA_VALUE / 2, group == 0);
    }
    __syncthreads(); /* rows are read to the end */
}

template <class T>
static __global__ void __launch_bounds__(AMLA_THREADS, 1) wgmma_amla_kernel(const __grid_constant__ attend_args args)
{
#if FV_HAS_WGMMA
    extern __shared__ __align__(1024) char shared[];
    amla_memory *memory = (amla_memory *)shared;
    overlap_begin();
    if (threadIdx.x == 0) memory->has_item = find_job(&memory->job, &args);
    __syncthreads();
    if (!memory->has_item) return;
    const int32_t first_row = (int32_t)blockIdx.x % args.row_parts * AMLA_ROWS;
    for (int32_t row0 = first_row; row0 < memory->job.num_rows; row0 += args.row_parts * AMLA_ROWS)
        attend_amla_block<T>(memory, &args, row0);
#endif
}

template <class T> constexpr fv_cuda_attend_kernel wgmma_amla_of(void)
{
    return {wgmma_amla_kernel<T>, (int32_t)sizeof(amla_memory), AMLA_THREADS, AMLA_ROWS, 1};
}

#endif
