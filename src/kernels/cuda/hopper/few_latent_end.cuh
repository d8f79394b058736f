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

/* A row's sums go to the other block, which may write where queries were from then on, and over to the keys of both
 * blocks; what each weighs. */
template <int N>
static __device__ __forceinline__ float4 share_few_latent_sums(few_latent_memory<N> *memory, const float4 &sums,
                                                               int32_t r)
{
    const uint32_t other_rank = ~blockIdx.x % 2;
    ptx_store_async_16(ptx_shared_address_in(&memory->sums_of_other[r], other_rank), sums,
                       ptx_shared_address_in(&memory->met, other_rank));
    ptx_mbarrier_wait(&memory->met, 0);
    const float4 other = memory->sums_of_other[r];
    const float max = fmaxf(sums.x, other.x), base = max == -INFINITY ? 0.0f : max;
    const float weight = ptx_ex2(sums.x - base), of_other = ptx_ex2(other.x - base);
    memory->ends.weights[r] = make_float2(weight, of_other);
    return make_float4(max, weight * sums.y + of_other * other.y, weight * sums.z + of_other * other.z, 0);
}

/* The warp's part of the output, relative to the block's own maxima, goes to the other block, from registers, when that
 * has sent its sums (share_few_latent_sums). Nothing comes back: a block stays until it has what the other sends. */
template <int N>
static __device__ __forceinline__ void give_few_latents(const float (&out)[FEW_LATENT_BLOCKS][N / 2],
                                                        few_latent_memory<N> *memory)
{
    const uint32_t other_rank = ~blockIdx.x % 2;
    const int32_t warp = warp_of_group(), lane = threadIdx.x % 32;
    const uint32_t to = ptx_shared_address_in(memory->parts[warp], other_rank) + (uint32_t)lane * 16;
    const uint32_t inbox = ptx_shared_address_in(&memory->inbox[warp], other_rank);
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

/* The warp's part of the output goes over to the keys of both. */
template <int N>
static __device__ __forceinline__ void take_few_latents(float (&out)[FEW_LATENT_BLOCKS][N / 2],
                                                        few_latent_memory<N> *memory)
{
    const int32_t warp = warp_of_group(), lane = threadIdx.x % 32;
    const char *from = memory->parts[warp] + lane * 16;
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
                                                      int32_t group)
{
    const attend_end *end = &memory->ends.rows[r];
    float largest = memory->ends.largest[group][0][r];
#pragma unroll
    for (int warp = 1; warp < 4; warp++) largest = ptx_max_or_nan(largest, memory->ends.largest[group][warp][r]);
    store_narrow_tail(narrow_row(args->params.partial_out, end->partial, LATENT_VALUE), group,
                      narrow_scale_of(largest, end->out_factor), end);
    memory->ends.by[group][r] = narrow_inverse_of(largest);
}

/* Of all rows, when their largest elements are there. */
template <int N>
static __device__ __forceinline__ void narrow_few_rows(few_latent_memory<N> *memory, const attend_args *args,
                                                       int32_t group)
{
    const int32_t r = threadIdx.x % 128;
    if (r < N && memory->ends.rows[r].partial >= 0) narrow_few_row<N>(memory, args, r, group);
    wait_at_bar(&memory->bars, FEW_LATENT_BARRIER_VALUERS + group, 128);
}

/* In 16 bits, that is, with a scale for half of a row. */
static __device__ __forceinline__ bool narrows_few_latents(const attend_args *args, const attend_job *job)
{
    return job->item.partial >= 0 && narrows_partials(&args->params);
}

/* The ends of all rows, by the scorers when all sums are there, a thread for each: where they go, what they are
 * multiplied by. The valuers multiply the last tile meanwhile. */
template <int N>
static __device__ __forceinline__ void end_few_latent_rows(few_latent_memory<N> *memory, const attend_args *args)
{
    const attend_job *job = &memory->job;
    const int32_t r = (int32_t)threadIdx.x;
    const bool narrows = narrows_few_latents(args, job), splits = is_split(args);
    const attend_row *row = &memory->rows[r < N ? r : 0];
    const bool is_row = r < memory->num_rows;
    attend_end end = {-INFINITY, 0, 0, -1, 0};
    if (splits) ptx_cluster_wait(); /* the other block's barriers are there */
    if (r < N) {
        char *to = NULL;
        float4 sums = sum_few_latent_row(memory, r);
        if (splits) sums = share_few_latent_sums(memory, sums, r);
        if (is_row) {
            end = end_row(args, job, row, sums.x, sums.y, factor_of_values(job, sums.y, sums.z));
            to = place_latent_row(args, row, &end, narrows);
        }
        memory->ends.rows[r] = end;
        memory->ends.by[0][r] = memory->ends.by[1][r] = end.out_factor;
        memory->ends.targets[r] = to;
    }
    __syncwarp();
    arrive_at_bar(&memory->bars, FEW_LATENT_BARRIER_CONSUMERS, FEW_LATENT_CONSUMERS);
    if (is_row && !narrows && !(splits && blockIdx.x % 2 != 0)) store_sums(args, row, &end);
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

/* Do the lanes' places, where they have any, lie at even steps from `from` on, that of the first lane, all at multiples of
 * 16 bytes, as the heads of a token do? */
static __device__ __forceinline__ bool is_even_run(uint64_t place, uint64_t from, uint64_t step)
{
    const uint32_t lane = threadIdx.x % 32;
    return !__any_sync(~0u, place != 0 && place != from + lane * step) && (from | step) % 16 == 0;
}

/* The warp's rows, whose places the lanes have, from shared memory: by the copy engine, or, where
 * one is at no multiple of 16 bytes, 16 bits at a time. A copy whose place comes from a lane takes 100 cycles to ask
 * for, one at even steps 10 instructions. */
static __device__ __forceinline__ void send_latent_rows(char *to_of_lane, const char *staged, int32_t row_bytes,
                                                        int32_t bytes)
{
    const int32_t lane = threadIdx.x % 32;
    const uint64_t own = (uint64_t)to_of_lane, from = __shfl_sync(~0u, own, 0), step = __shfl_sync(~0u, own, 1) - from;
    const int32_t num_rows = __reduce_max_sync(~0u, to_of_lane ? lane + 1 : 0); /* the last ones are no rows */
    if (is_even_run(own, from, step)) {
        char *to = (char *)from;
        if (ptx_elect()) {
#pragma unroll 1
            for (int32_t i = 0; i < num_rows; i++, staged += row_bytes, to += step) ptx_bulk_store(to, staged, bytes);
        }
        __syncwarp();
        return ptx_bulk_commit();
    }
#pragma unroll 1
    for (int32_t i = 0; i < num_rows; i++, staged += row_bytes) {
        char *to = (char *)__shfl_sync(~0u, own, i);
        if ((uintptr_t)to % 16 == 0) {
            if (ptx_elect()) ptx_bulk_store(to, staged, bytes);
            continue;
        }
#pragma unroll 1
        for (int32_t at = lane * 2; at < bytes; at += 64) *(uint16_t *)(to + at) = *(const uint16_t *)(staged + at);
    }
    ptx_bulk_commit();
}

/* The output of the block's rows, by way of the latents' place, of which each warpgroup has its own. */
template <int N>
static __device__ __forceinline__ void store_few_latents(float (&out)[FEW_LATENT_BLOCKS][N / 2],
                                                         few_latent_memory<N> *memory, const attend_args *args,
                                                         int32_t group)
{
    const bool is_partial = memory->job.item.partial >= 0, narrows = narrows_few_latents(args, &memory->job);
    const fv_dtype dtype = is_partial ? FV_DTYPE_F32 : args->params.out_dtype;
    const int32_t element_bytes = dtype == FV_DTYPE_F32 && !narrows ? 4 : 2, bytes = LATENT_VALUE / 2 * element_bytes;
    const int32_t row_bytes = staged_row_bytes(element_bytes);
    char *staged = memory->units[0] + group * N * staged_row_bytes(4);
    const bool splits = is_split(args);
    /* Where queries were: behind the last tile's P nobody reads them, without tiles they may still be on their way there. */
    const bool keeps_early = narrows && !splits && count_latent_tiles(&memory->keys) > 0;
    if (keeps_early) keep_largest_latents<N>(memory, out, group);
    if (splits) ptx_cluster_wait();
    wait_at_bar(&memory->bars, FEW_LATENT_BARRIER_CONSUMERS, FEW_LATENT_CONSUMERS);
    if (splits) {
        if (group != (int32_t)blockIdx.x % 2) return give_few_latents<N>(out, memory);
        take_few_latents<N>(out, memory);
    }
    if (narrows && !keeps_early) {
        keep_largest_latents<N>(memory, out, group);
        wait_at_bar(&memory->bars, FEW_LATENT_BARRIER_VALUERS + group, 128);
    }
    if (narrows) narrow_few_rows<N>(memory, args, group);
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
    wait_at_bar(&memory->bars, FEW_LATENT_BARRIER_VALUERS + group, 128);
    const int32_t lane = threadIdx.x % 32, first_row = warp_of_group() * (N / 4);
    char *to = lane < N / 4 ? memory->ends.targets[first_row + lane] : NULL;
    if (to) to += group * bytes;
    send_latent_rows(to, staged + first_row * row_bytes, row_bytes, bytes);
    ptx_bulk_wait_read();
}

#endif
