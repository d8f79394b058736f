/* What Hopper's attention kernels share: panels of shared memory (wgmma.cuh), where a tile's keys lie, and the scores
 * of a warpgroup. They serve caches and dense rows of the queries' own 16-bit dtype whose rows lie together, without
 * scales of single keys, and scores that need no more than scale and mask; attend.cu sends everything else to the
 * portable kernels. */
#ifndef FV_KERNELS_CUDA_HOPPER_PANEL_CUH
#define FV_KERNELS_CUDA_HOPPER_PANEL_CUH

#include "kernels/cuda/attend_job.cuh"
#include "kernels/cuda/hopper/wgmma.cuh"

enum { FV_PANEL_COLUMNS = 64, FV_PANEL_ROW_BYTES = 128 };

/* The same value in all lanes, known to be: what is computed from it can stay in uniform registers, where wgmma wants
 * its descriptors. */
static __device__ __forceinline__ int32_t uniform(int32_t value) { return __shfl_sync(~0u, value, 0); }
static __device__ __forceinline__ int32_t warpgroup_of_thread(void) { return uniform((int32_t)threadIdx.x / 128); }

/* Offset in bytes of 16-byte chunk `chunk` of row `row` in panels of `rows` rows. */
static __device__ __forceinline__ int32_t panel_offset(int32_t rows, int32_t row, int32_t chunk)
{
    return chunk / 8 * rows * FV_PANEL_ROW_BYTES + row * FV_PANEL_ROW_BYTES + (((chunk ^ row) & 7) << 4);
}

/* Rows of keys and values, or latents: NULL where no row of the block sees the key, zeros stand for it. */
template <int TILE> struct tile_places {
    const char *k[TILE];
    const char *v[TILE];
};

/* The keys first_key .. first_key + TILE - 1, a thread for each. */
template <int TILE>
static __device__ __forceinline__ void find_places(tile_places<TILE> *tile, const attend_args *args,
                                                   const attend_job *job, const attend_keys *keys, int32_t first_key)
{
    for (int32_t i = threadIdx.x; i < TILE; i += blockDim.x) {
        const int32_t key = first_key + i;
        const char *k = NULL, *v = NULL;
        if (key < keys->first || key >= keys->end) { /* nothing */
        } else if (key >= job->dense_from) {
            k = dense_row(&args->k[1], job->dense_row + key, job->kv_head);
            v = dense_row(&args->v[1], job->dense_row + key, job->kv_head);
        } else {
            const int2 at = split_key(args, key);
            const int64_t block = job->table[at.x];
            k = plain_row(&args->k[0].plane, block, job->kv_head, at.y);
            v = plain_row(&args->v[0].plane, block, job->kv_head, at.y);
        }
        tile->k[i] = k;
        tile->v[i] = v;
    }
}

/* Asynchronous copies of a tile's rows into panels: neighbouring threads take neighbouring chunks of a row. Chunks
 * from `size` on are zeros. */
template <int TILE, int SIZE, int THREADS>
static __device__ __forceinline__ void copy_to_panels(char *panels, const char *const *rows, const void *somewhere,
                                                      int32_t size)
{
    constexpr int CHUNKS = SIZE / 8, STEPS = TILE * CHUNKS / THREADS;
    static_assert(TILE * CHUNKS % THREADS == 0, "whole steps");
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int32_t i = threadIdx.x + step * THREADS, key = i / CHUNKS, chunk = i % CHUNKS;
        const char *row = rows[key];
        const bool is_there = row && chunk * 8 < size;
        ptx_cp_async_16_or_zeros(panels + panel_offset(TILE, key, chunk), is_there ? row + chunk * 16 : somewhere,
                                 is_there ? 16 : 0);
    }
}

/* Queries of a block of rows into panels; zeros for rows from num_rows on. */
template <class T, int BLOCK_M, int SIZE, int THREADS>
static __device__ __forceinline__ void load_query_panels(char *panels, const attend_row *rows, const attend_args *args,
                                                         int32_t num_rows)
{
    constexpr int CHUNKS = SIZE / 8;
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < BLOCK_M * CHUNKS; i += THREADS) {
        const int32_t r = i / CHUNKS, chunk = i % CHUNKS;
        *(uint4 *)(panels + panel_offset(BLOCK_M, r, chunk)) = query_chunk(&args->params, rows, r, num_rows, chunk);
    }
}

/* --- scores of a warpgroup: 64 rows x KEYS, in the registers of a wgmma sum ------------------------------------ */

/* -inf for keys that a row does not see. `row`: the thread's first one in the block, `first_key`: that of s. */
template <int N>
static __device__ __forceinline__ void mask_keys(float (&s)[N], const attend_row *rows, int32_t row, int32_t first_key)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int32_t origin = first_key + threadIdx.x % 4 * 2;
        const int32_t first = rows[row + half * 8].first - origin, end = rows[row + half * 8].end - origin;
#pragma unroll
        for (int n = 0; n < N / 4; n++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int32_t key = n * 8 + j;
                if (key < first || key >= end) s[4 * n + 2 * half + j] = -INFINITY;
            }
        }
    }
}

/* From dot products to scores in base 2. `first_column`: of s in the tile. */
template <int N>
static __device__ __forceinline__ void score_keys(float (&s)[N], const attend_row *rows, const attend_keys *keys,
                                                  int32_t row, int32_t first_column, int32_t tile_first,
                                                  int32_t tile_keys, float scale)
{
#pragma unroll
    for (int i = 0; i < N; i++) s[i] *= scale;
    if (tile_first >= keys->full_first && tile_first + tile_keys <= keys->full_end) return;
    mask_keys(s, rows, row, tile_first + first_column);
}

/* The largest of each of the thread's two rows. */
template <int N> static __device__ __forceinline__ void find_row_maxima(float (&max)[2], const float (&s)[N])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = -INFINITY;
#pragma unroll
        for (int n = 0; n < N / 4; n++) largest = fmaxf(largest, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        max[half] = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    }
}

/* Maximum, and sums of this thread's keys, of the thread's two rows. */
typedef struct row_sums {
    float max[2];
    float sum[2];     /* of P */
    float rounded[2]; /* of P as the tensor cores get it: what the values are divided by */
} row_sums;

static __device__ __forceinline__ void clear_row_sums(row_sums *rows)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        rows->max[half] = -INFINITY;
        rows->sum[half] = rows->rounded[half] = 0;
    }
}

/* New maxima; the sums follow them. True where the values' sums have to be multiplied by `factor`. */
static __device__ __forceinline__ bool raise_row_maxima(float (&factor)[2], row_sums *rows, const float (&max)[2])
{
    bool changes = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float larger = fmaxf(rows->max[half], max[half]);
        factor[half] = larger == rows->max[half] ? 1.0f : ptx_ex2(rows->max[half] - larger);
        changes = changes || factor[half] != 1.0f;
        rows->max[half] = larger;
        rows->sum[half] *= factor[half];
        rows->rounded[half] *= factor[half];
    }
    return __any_sync(~0u, changes);
}

template <int N> static __device__ __forceinline__ void rescale_values(float (&out)[N], const float (&factor)[2])
{
#pragma unroll
    for (int i = 0; i < N; i++) out[i] *= factor[i / 2 % 2];
}

template <class T> static __device__ __forceinline__ float2 widen_pair(uint32_t pair);
template <> __device__ __forceinline__ float2 widen_pair<__nv_bfloat16>(uint32_t pair)
{
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 widen_pair<__half>(uint32_t pair)
{
    return __half22float2(*(const __half2 *)&pair);
}

/* P in place of the scores. */
template <int N> static __device__ __forceinline__ void exponentiate_keys(float (&s)[N], row_sums *rows)
{
    const float max[2] = {rows->max[0] == -INFINITY ? 0.0f : rows->max[0],
                          rows->max[1] == -INFINITY ? 0.0f : rows->max[1]};
#pragma unroll
    for (int i = 0; i < N; i++) {
        s[i] = ptx_ex2(s[i] - max[i / 2 % 2]);
        rows->sum[i / 2 % 2] += s[i];
    }
}

/* The same in place of dot products, which are scores when multiplied by `scale`: an instruction for both. */
template <int N>
static __device__ __forceinline__ void exponentiate_products(float (&s)[N], row_sums *rows, float scale)
{
    const float max[2] = {rows->max[0] == -INFINITY ? 0.0f : rows->max[0],
                          rows->max[1] == -INFINITY ? 0.0f : rows->max[1]};
#pragma unroll
    for (int i = 0; i < N; i++) {
        s[i] = ptx_ex2(fmaf(s[i], scale, -max[i / 2 % 2]));
        rows->sum[i / 2 % 2] += s[i];
    }
}

/* P as T holds it, in pairs: p[2 n] of the first row's keys 8 n + .., p[2 n + 1] of the second's, the operand of a
 * wgmma. */
template <class T, int N>
static __device__ __forceinline__ void narrow_keys(uint32_t (&p)[N / 2], const float (&s)[N], row_sums *rows)
{
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        p[i] = fv_narrow_pair<T>(s[2 * i], s[2 * i + 1]);
        const float2 rounded = widen_pair<T>(p[i]);
        rows->rounded[i % 2] += rounded.x + rounded.y;
    }
}

static __device__ __forceinline__ float sum_of_quad(float value)
{
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}

/* Values are weighed by the rounded P, so what they are divided by is its sum. */
static __device__ __forceinline__ float factor_of_values(const attend_job *job, float sum, float rounded)
{
    return job->v_head_scale * (rounded > 0 ? __fdividef(sum, rounded) : 1.0f);
}

/* One of the thread's rows to memory: columns first_column .. of its values. `sum`: of all keys; `values_factor`: what
 * the values still have to be multiplied by. */
template <int N>
static __device__ __forceinline__ void store_row(const float (&out)[N], int32_t which, const attend_args *args,
                                                 const attend_job *job, const attend_row *row, float max, float sum,
                                                 float values_factor, int32_t first_column, bool stores_sums)
{
    const attend_end end = end_row(args, job, row, max, sum, values_factor);
    if (stores_sums && threadIdx.x % 4 == 0) store_sums(args, row, &end);
    const attend_target target = target_of(args, row, &end);
    const int32_t first = first_column + threadIdx.x % 4 * 2, size = args->params.v_head_size;
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
        const int32_t d = first + n * 8;
        if (d >= size) continue;
        if (target.pairs) {
            store_pair(&target, d, out[4 * n + 2 * which], out[4 * n + 2 * which + 1]);
        } else {
            store_element(&target, d, out[4 * n + 2 * which]);
            store_element(&target, d + 1, out[4 * n + 2 * which + 1]);
        }
    }
}

#endif
