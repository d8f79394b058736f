/* Products of up to 4 rows with bf16 weights [n, k]: decodes of small batches. All the time goes into reading the
 * weights once, so a block reads one row of them, 16 bytes to a lane, as much of it at once as lies in its registers:
 *
 *   weights, row n   | warp 0 | warp 1 | warp 2 | warp 3 | warp 0 | ...    each 32 lanes x 8 elements
 *   x, M rows        the same elements, from the first-level cache, where all blocks find them
 *
 * The first loads are sent before the kernel waits for the one before it (overlap.cuh), since weights never change
 * meanwhile. A row's sum has one order whatever M is, in fp32.
 *
 * A token of a model of Llama-8B's shape on an H200: 4.65 ms this way, 4.9 with two warps for a row, 5.0 to 5.5 with
 * one, 4.67 with blocks that go on to further rows. */
#include "kernels/cuda/gemv.cuh"

#include "kernels/cuda/number.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/ptx.cuh"

#define WARPS 4
#define LOADS 4
#define MAX_ROWS 4
#define VECTOR 8 /* elements of a load */

/* Blocks that a multiprocessor holds: more rows of x take more registers. */
template <int M> struct gemv_shape {
    static constexpr int32_t BLOCKS = M == MAX_ROWS ? 8 : 10;
};

typedef struct gemv_params {
    const char *x, *weights; /* row strides in bytes */
    char *y;
    int64_t x_stride, weight_stride, y_stride;
    int32_t num_rows, n, k, is_bf16; /* y is bf16, else fp32 */
} gemv_params;

static __device__ __forceinline__ uint4 load_weights(const char *row, int32_t element, int32_t k)
{
    uint4 words = {0, 0, 0, 0};
    if (element < k) ptx_load_once(words, row + (int64_t)element * 2);
    return words;
}

/* Two products, the lower half's first. */
static __device__ __forceinline__ float add_pair(float sum, uint32_t weights, uint32_t x)
{
    sum = __fmaf_rn(__uint_as_float(weights << 16), __uint_as_float(x << 16), sum);
    return __fmaf_rn(__uint_as_float(weights & 0xffff0000u), __uint_as_float(x & 0xffff0000u), sum);
}

template <int M>
static __device__ __forceinline__ void add_products(float (&sums)[M], const uint4 &weights, const gemv_params *params,
                                                    int32_t element)
{
    if (element >= params->k) return;
#pragma unroll
    for (int32_t row = 0; row < M; row++) {
        const int32_t from = M < MAX_ROWS || row < params->num_rows ? row : 0; /* 3 rows: the fourth is not stored */
        const uint4 x = *(const uint4 *)(params->x + from * params->x_stride + (int64_t)element * 2);
        sums[row] = add_pair(sums[row], weights.x, x.x);
        sums[row] = add_pair(sums[row], weights.y, x.y);
        sums[row] = add_pair(sums[row], weights.z, x.z);
        sums[row] = add_pair(sums[row], weights.w, x.w);
    }
}

static __device__ __forceinline__ void store(const gemv_params *params, int32_t row, int32_t n, float value)
{
    char *to = params->y + row * params->y_stride;
    if (params->is_bf16) {
        ((__nv_bfloat16 *)to)[n] = __float2bfloat16_rn(value);
    } else {
        ((float *)to)[n] = value;
    }
}

template <int M>
static __global__ void __launch_bounds__(WARPS * 32, gemv_shape<M>::BLOCKS)
    gemv(const __grid_constant__ gemv_params params)
{
    constexpr int32_t turn = WARPS * 32 * VECTOR;
    __shared__ float parts[WARPS][M];
    const int32_t n = (int32_t)blockIdx.x, warp = (int32_t)threadIdx.x / 32, lane = (int32_t)threadIdx.x % 32;
    const char *row = params.weights + n * params.weight_stride;
    int32_t element = (int32_t)threadIdx.x * VECTOR;
    uint4 weights[LOADS];
    overlap_let_next_start();
#pragma unroll
    for (int32_t i = 0; i < LOADS; i++) weights[i] = load_weights(row, element + i * turn, params.k);
    overlap_wait();

    float sums[M] = {};
    for (; element < params.k; element += LOADS * turn) {
#pragma unroll
        for (int32_t i = 0; i < LOADS; i++) {
            const uint4 now = weights[i];
            weights[i] = load_weights(row, element + (LOADS + i) * turn, params.k);
            add_products<M>(sums, now, &params, element + i * turn);
        }
    }
#pragma unroll
    for (int32_t m = 0; m < M; m++) {
        const float sum = fv_warp_sum(sums[m]);
        if (lane == 0) parts[warp][m] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= M || (int32_t)threadIdx.x >= params.num_rows) return;
    float sum = 0;
#pragma unroll
    for (int32_t i = 0; i < WARPS; i++) sum += parts[i][lane];
    store(&params, lane, n, sum);
}

static int32_t is_aligned(const void *data, int64_t stride) { return ((uintptr_t)data | (uintptr_t)stride) % 16 == 0; }

extern "C" int32_t fv_cuda_gemv_fits(const fv_gemm *gemm)
{
    return gemm->num_matrices == 1 && gemm->m <= MAX_ROWS && gemm->b_is_transposed && gemm->a_dtype == FV_DTYPE_BF16 &&
           gemm->b_dtype == FV_DTYPE_BF16 && (gemm->c_dtype == FV_DTYPE_F32 || gemm->c_dtype == FV_DTYPE_BF16) &&
           gemm->k % VECTOR == 0 && is_aligned(gemm->a, gemm->m > 1 ? gemm->a_row_stride : 0) &&
           is_aligned(gemm->b, gemm->b_row_stride);
}

extern "C" fv_status fv_cuda_gemv(const fv_launch *launch, const fv_gemm *gemm)
{
    const gemv_params params = {
        .x = (const char *)gemm->a,
        .weights = (const char *)gemm->b,
        .y = (char *)gemm->c,
        .x_stride = gemm->a_row_stride,
        .weight_stride = gemm->b_row_stride,
        .y_stride = gemm->c_row_stride,
        .num_rows = gemm->m,
        .n = gemm->n,
        .k = gemm->k,
        .is_bf16 = gemm->c_dtype == FV_DTYPE_BF16,
    };
    void (*const kernel)(gemv_params) = gemm->m == 1 ? gemv<1> : gemm->m == 2 ? gemv<2> : gemv<MAX_ROWS>;
    return fv_cuda_launch_overlapped(launch, "gemv", kernel, dim3((uint32_t)gemm->n), WARPS * 32, 0, params);
}
