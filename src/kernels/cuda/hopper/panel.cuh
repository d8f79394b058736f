/* What Hopper's attention kernels share: panels of shared memory (wgmma.cuh), and the scores of a warpgroup. They serve
 * caches and dense rows of the queries' own 16-bit dtype, many rows also caches of one byte, whose rows lie together,
 * without scales of single keys, and scores that need no more than scale and mask; attend.cu sends everything else to the
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

/* The largest of the even and of the odd ones of the first COUNT, a power of two, as a tree, to [0] and [1]. */
template <int COUNT, int N> static __device__ __forceinline__ void fold_maxima(float (&values)[N])
{
    static_assert(COUNT >= 2 && (COUNT & (COUNT - 1)) == 0, "halves");
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) values[i] = fmaxf(values[i], values[COUNT / 2 + i]);
    if constexpr (COUNT > 4) fold_maxima<COUNT / 2>(values);
}

/* The largest of the thread's own products of each of its rows. */
template <int N> static __device__ __forceinline__ void find_own_maxima(float (&max)[2], const float (&s)[N])
{
    float largest[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) largest[i] = fmaxf(s[2 * i], s[2 * i + 1]);
    fold_maxima<N / 2>(largest);
    max[0] = largest[0];
    max[1] = largest[1];
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

/* What the sums of the thread's rows are relative to after a tile of which the thread's own largest products are `own`:
 * what it was, unless a score passes that by more than `slack`. It seldom does, so a vote comes first, and four shuffles
 * behind it. */
static __device__ __forceinline__ void choose_row_maxima(float (&max)[2], const float (&own)[2], const row_sums *sums,
                                                         float factor, float slack)
{
    bool passes = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        max[half] = sums->max[half];
        passes = passes || own[half] * factor > max[half] + slack;
    }
    if (!__any_sync(~0u, passes)) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = fmaxf(own[half], __shfl_xor_sync(~0u, own[half], 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)) * factor;
        max[half] = largest > max[half] + slack ? largest : max[half];
    }
}

template <int N> static __device__ __forceinline__ void rescale_values(float (&out)[N], const float (&factor)[2])
{
#pragma unroll
    for (int i = 0; i < N; i++) out[i] *= factor[i / 2 % 2];
}

/* P in place of dot products, which are scores when multiplied by `scale`: an instruction for both. */
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
        const float2 rounded = fv_widen_pair<T>(p[i]);
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
