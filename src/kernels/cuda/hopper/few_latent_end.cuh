/* The ends of the rows of MLA decode of up to 32 rows (attend_few_latent.cuh): from the valuers' registers, of two
 * blocks that share an item by way of each other, to the output or to partial results. */
#ifndef FV_KERNELS_CUDA_HOPPER_FEW_LATENT_END_CUH
#define FV_KERNELS_CUDA_HOPPER_FEW_LATENT_END_CUH

#include "kernels/cuda/hopper/few_latent_block.cuh"
#include "kernels/cuda/hopper/latent_end.cuh"
#include "kernels/cuda/narrow_partial.cuh"

/* Maximum, sum, and sum of P as rounded, of a row, from the scorers. */
template <int N>
static __device__ __forceinline__ float4 sum_few_latent_row(const few_latent_memory<N> *memory, int32_t r)
{
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int warp = 0; warp < FEW_LATENT_SCORERS / 32; warp++) {
        const float2 part = memory->ends.sums[warp][r];
        sum = make_float2(sum.x + part.x, sum.y + part.y);
    }
    return make_float4(memory->max[r], sum.x, sum.y, 0);
}

/* Bytes from one staged row to the next: lanes meet no bank twice. */
static __device__ __forceinline__ constexpr int32_t staged_row_bytes(int32_t element_bytes)
{
    return LATENT_VALUE / 2 * element_bytes + 16;
}

/* --- two blocks of an item: the first ends the first valuers' columns, the second the second's -------------------- */

static_assert(2 * 32 * staged_row_bytes(4) + 4 * few_part_bytes<32> <= FEW_UNITS * FEW_UNIT_BYTES,
              "rows are staged, and come from the other block, in the place of units");

/* Where a warp's part of the other block comes: where it has no place of its own in that of units, behind what both
 * warpgroups stage. */
template <int N> static __device__ __forceinline__ char *inbox_of_warp(few_latent_memory<N> *memory, int32_t warp)
{
    char *parts = few_latent_memory<N>::HAS_INBOX ? memory->parts
                                                  : (char *)memory->units + 2 * N * staged_row_bytes(4);
    return parts + warp * few_part_bytes<N>;
}

/* The warp's part of the output, relative to the block's own maxima, goes to the other block, from registers; to the
 * place of units when that has sent its sums, too: then it has none any more. Nothing comes back: a block stays until it
 * has what the other sends. */
template <int N>
static __device__ __forceinline__ void give_few_latents(const float (&out)[FEW_LATENT_BLOCKS][N / 2],
                                                        few_latent_memory<N> *memory)
{
    const uint32_t other_rank = ~blockIdx.x % 2;
    const int32_t warp = warp_of_group(), lane = threadIdx.x % 32, r = threadIdx.x % 128;
    const uint32_t to = ptx_shared_address_in(inbox_of_warp(memory, warp), other_rank) + (uint32_t)lane * 16;
    const uint32_t inbox = ptx_shared_address_in(&memory->inbox[warp], other_rank);
    ptx_cluster_wait(); /* its barriers are there */
    if (r < N)
        ptx_store_async_16(ptx_shared_address_in(&memory->sums_of_other[r], other_rank), sum_few_latent_row(memory, r),
                           ptx_shared_address_in(&memory->met, other_rank));
    if (!few_latent_memory<N>::HAS_INBOX) ptx_mbarrier_wait(&memory->met, 0);
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
#pragma unroll
        for (int block = 0; block < FEW_LATENT_BLOCKS; block++)
            ptx_store_async_16(
                to + (uint32_t)(i * FEW_LATENT_BLOCKS + block) * 32 * 16,
                make_float4(out[block][4 * i], out[block][4 * i + 1], out[block][4 * i + 2], out[block][4 * i + 3]),
                inbox);
    }
}

/* A row's sums go over to the keys of both blocks; what each weighs. By a thread for each row. */
template <int N>
static __device__ __forceinline__ float4 take_few_latent_sums(few_latent_memory<N> *memory, const float4 &sums,
                                                              int32_t r)
{
    ptx_mbarrier_wait(&memory->met, 0);
    const float4 other = memory->sums_of_other[r];
    const float max = fmaxf(sums.x, other.x), base = max == -INFINITY ? 0.0f : max;
    const float weight = ptx_ex2(sums.x - base), of_other = ptx_ex2(other.x - base);
    memory->ends.weights[r] = make_float2(weight, of_other);
    return make_float4(max, weight * sums.y + of_other * other.y, weight * sums.z + of_other * other.z, 0);
}

/* The warp's part of the output goes over to the keys of both. */
template <int N>
static __device__ __forceinline__ void take_few_latents(float (&out)[FEW_LATENT_BLOCKS][N / 2],
                                                        few_latent_memory<N> *memory)
{
    const int32_t warp = warp_of_group(), lane = threadIdx.x % 32;
    const char *from = inbox_of_warp(memory, warp) + lane * 16;
    ptx_mbarrier_wait(&memory->inbox[warp], 0);
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
        const float2 even = memory->ends.weights[column_of_thread(2 * i)];
        const float2 odd = memory->ends.weights[column_of_thread(2 * i + 1)];
#pragma unroll
        for (int block = 0; block < FEW_LATENT_BLOCKS; block++) {
            const float4 other = *(const float4 *)(from + (i * FEW_LATENT_BLOCKS + block) * 32 * 16);
            float *own = &out[block][4 * i];
            own[0] = own[0] * even.x + other.x * even.y;
            own[1] = own[1] * odd.x + other.y * odd.y;
            own[2] = own[2] * even.x + other.z * even.y;
            own[3] = own[3] * odd.x + other.w * odd.y;
        }
    }
}

/* --- the end of the rows ----------------------------------------------------------------------------------------- */

/* The largest element of each row, of the warp's columns: for all of them, behind a barrier. */
template <int N>
static __device__ __forceinline__ void keep_largest_latents(few_latent_memory<N> *memory,
                                                            const float (&out)[FEW_LATENT_BLOCKS][N / 2], int32_t group)
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        float largest = FV_NARROW_LEAST;
#pragma unroll
        for (int block = 0; block < FEW_LATENT_BLOCKS; block++) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                largest = ptx_max_or_nan(largest, fabsf(out[block][element_of_column(i, half)]));
        }
#pragma unroll
        for (int step = 4; step < 32; step *= 2) largest = ptx_max_or_nan(largest, __shfl_xor_sync(~0u, largest, step));
        if (threadIdx.x % 32 < 4) memory->ends.largest[group][threadIdx.x / 32 % 4][column_of_thread(i)] = largest;
    }
}

/* The scale of the warpgroup's half of row `r`, from its warps' largest elements: to the row's slot, with maximum and
 * sum. */
template <int N>
static __device__ __forceinline__ void narrow_few_row(few_latent_memory<N> *memory, const attend_args *args, int32_t r,
                                                      int32_t group, const attend_end *end)
{
    float largest = memory->ends.largest[group][0][r];
#pragma unroll
    for (int warp = 1; warp < 4; warp++) largest = ptx_max_or_nan(largest, memory->ends.largest[group][warp][r]);
    store_narrow_tail(narrow_row(args->params.partial_out, end->partial, LATENT_VALUE), group,
                      narrow_scale_of(largest, end->out_factor), end);
    memory->ends.by[group][r] = narrow_inverse_of(largest);
}

/* Of all rows, when what came from the other block is added. */
template <int N>
static __device__ __forceinline__ void narrow_few_rows(few_latent_memory<N> *memory,
                                                       const float (&out)[FEW_LATENT_BLOCKS][N / 2],
                                                       const attend_args *args, int32_t group, const attend_end *end)
{
    keep_largest_latents<N>(memory, out, group);
    ptx_bar_sync(FEW_LATENT_BARRIER_VALUERS + group, 128);
    if (end->partial >= 0) narrow_few_row<N>(memory, args, threadIdx.x % 128, group, end);
    ptx_bar_sync(FEW_LATENT_BARRIER_VALUERS + group, 128);
}

/* The ends of all rows, from the sums of the scorers: where they go and what they are multiplied by. That of the
 * thread's own row is returned; others: of no place. */
template <int N>
static __device__ __forceinline__ attend_end end_few_latent_rows(few_latent_memory<N> *memory, const attend_args *args,
                                                                 int32_t row0, int32_t group, int32_t bytes,
                                                                 bool narrows)
{
    const attend_job *job = &memory->job;
    const int32_t r = threadIdx.x % 128;
    attend_end end = {-INFINITY, 0, 0, -1, 0};
    if (r < N) {
        char *to = NULL;
        float4 sums = sum_few_latent_row(memory, r);
        if (is_split(args)) sums = take_few_latent_sums(memory, sums, r);
        if (row0 + r < job->num_rows) {
            const attend_row *row = &memory->rows[r];
            end = end_row(args, job, row, sums.x, sums.y, factor_of_values(job, sums.y, sums.z));
            to = place_latent_row(args, row, &end, narrows) + group * bytes;
            if (group == 0 && !narrows) store_sums(args, row, &end);
        }
        memory->ends.by[group][r] = end.out_factor;
        memory->ends.targets[group][r] = to;
        if (narrows && end.partial >= 0 && !is_split(args)) narrow_few_row<N>(memory, args, r, group, &end);
    }
    ptx_bar_sync(FEW_LATENT_BARRIER_VALUERS + group, 128);
    return end;
}

/* The thread's part of the output as its ends have it, to shared memory, a row of the output after the other. */
template <class T, int N>
static __device__ __forceinline__ void stage_few_latents(const float (&out)[FEW_LATENT_BLOCKS][N / 2], char *staged,
                                                         const float *by_of_rows)
{
    constexpr int32_t BYTES = (int32_t)sizeof(T), ROW_BYTES = staged_row_bytes(BYTES);
    char *to = staged + threadIdx.x % 4 * 2 * ROW_BYTES +
               (warp_of_group() * 64 + (int32_t)threadIdx.x % 32 / 4 * 8) * BYTES;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const float by = by_of_rows[column_of_thread(i)];
        char *at = to + (i / 2 * 8 + i % 2) * ROW_BYTES;
        float of[FEW_LATENT_BLOCKS][2]; /* neighbours */
#pragma unroll
        for (int block = 0; block < FEW_LATENT_BLOCKS; block++) {
#pragma unroll
            for (int half = 0; half < 2; half++) /* no key: 0, whatever the sums are */
                of[block][half] = by == 0 ? 0.0f : out[block][element_of_column(i, half)];
        }
        if constexpr (BYTES == 4) {
            *(float4 *)at = make_float4(of[0][0] * by, of[0][1] * by, of[1][0] * by, of[1][1] * by);
            *(float4 *)(at + 16) = make_float4(of[2][0] * by, of[2][1] * by, of[3][0] * by, of[3][1] * by);
        } else {
            *(uint4 *)at = make_uint4(latent_pair<T>(of[0][0], of[0][1], by), latent_pair<T>(of[1][0], of[1][1], by),
                                      latent_pair<T>(of[2][0], of[2][1], by), latent_pair<T>(of[3][0], of[3][1], by));
        }
    }
}

/* The output of the block's rows, by way of the latents' place, of which each warpgroup has its own. */
template <int N>
static __device__ __forceinline__ void store_few_latents(float (&out)[FEW_LATENT_BLOCKS][N / 2],
                                                         few_latent_memory<N> *memory, const attend_args *args,
                                                         int32_t row0, int32_t group)
{
    const bool is_partial = memory->job.item.partial >= 0, narrows = is_partial && narrows_partials(&args->params);
    const fv_dtype dtype = is_partial ? FV_DTYPE_F32 : args->params.out_dtype;
    const int32_t element_bytes = dtype == FV_DTYPE_F32 && !narrows ? 4 : 2, bytes = LATENT_VALUE / 2 * element_bytes;
    const int32_t row_bytes = staged_row_bytes(element_bytes);
    char *staged = memory->units[0] + group * N * staged_row_bytes(4);
    const bool splits = is_split(args);
    if (narrows && !splits) keep_largest_latents<N>(memory, out, group);
    ptx_bar_sync(FEW_LATENT_BARRIER_CONSUMERS, FEW_LATENT_CONSUMERS);
    if (splits) {
        if (group != (int32_t)blockIdx.x % 2) return give_few_latents<N>(out, memory);
        ptx_cluster_wait();
    }
    const attend_end end = end_few_latent_rows<N>(memory, args, row0, group, bytes, narrows);
    if (splits) take_few_latents<N>(out, memory);
    if (splits && narrows) narrow_few_rows<N>(memory, out, args, group, &end);
    const float *by = memory->ends.by[group];
    if (narrows)
        stage_few_latents<int16_t, N>(out, staged, by);
    else if (dtype == FV_DTYPE_F32)
        stage_few_latents<float, N>(out, staged, by);
    else if (dtype == FV_DTYPE_F16)
        stage_few_latents<__half, N>(out, staged, by);
    else
        stage_few_latents<__nv_bfloat16, N>(out, staged, by);
    ptx_fence_proxy_async();
    ptx_bar_sync(FEW_LATENT_BARRIER_VALUERS + group, 128);
    const int32_t lane = threadIdx.x % 32, first_row = warp_of_group() * (N / 4);
    char *to = lane < N / 4 ? memory->ends.targets[group][first_row + lane] : NULL;
    send_latent_rows(to, staged + first_row * row_bytes, row_bytes, bytes);
    ptx_bulk_wait_read();
}

#endif
