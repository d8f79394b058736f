/* The ends of the rows of MLA decode of 64 rows (attend_latent.cuh): from a warpgroup's registers, of two blocks that
 * share an item by way of each other, to the output or to partial results. */
#ifndef FV_KERNELS_CUDA_HOPPER_LATENT_END_CUH
#define FV_KERNELS_CUDA_HOPPER_LATENT_END_CUH

#include "kernels/cuda/exponent_add.cuh"
#include "kernels/cuda/hopper/latent_block.cuh"
#include "kernels/cuda/narrow_partial.cuh"

/* What a warpgroup knows of its rows, of which a thread has two. */
typedef struct latent_state {
    row_sums sums;  /* of the warpgroup's own tiles; maxima of all */
    float scale[2]; /* of AMLA's rows, as it follows from their maxima */
    int32_t row;    /* the thread's first one; the other is 8 further on */
} latent_state;

/* Maximum, sum and sum of P as rounded of row lane % 16 of the warp's 16, from both warpgroups. Two barriers, after the
 * first of which no product reads shared memory any more. */
static __device__ __forceinline__ float4 sum_latent_row(const latent_state *state, latent_memory *memory, int32_t group)
{
    const row_sums *sums = &state->sums;
    float2 *values = (float2 *)memory->p;
    ptx_bar_sync(LATENT_BARRIER_CONSUMERS, LATENT_CONSUMERS);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float2 own = make_float2(sum_of_quad(sums->sum[half]), sum_of_quad(sums->rounded[half]));
        if (threadIdx.x % 4 == 0) values[group * LATENT_ROWS + state->row + half * 8] = own;
    }
    ptx_bar_sync(LATENT_BARRIER_CONSUMERS, LATENT_CONSUMERS);
    const int32_t lane = threadIdx.x % 32, r = threadIdx.x / 32 % 4 * 16 + lane % 16, from = lane % 8 * 4;
    const float max[2] = {__shfl_sync(~0u, sums->max[0], from), __shfl_sync(~0u, sums->max[1], from)};
    const float2 low = values[r], high = values[LATENT_ROWS + r];
    return make_float4(lane % 16 < 8 ? max[0] : max[1], low.x + high.x, low.y + high.y, 0);
}

/* The end of row `lane` of the warp's 16, in its first 16 lanes; others: out_factor 0, of no row. */
template <class F>
static __device__ __forceinline__ attend_end end_latent_row(const float4 *sums, const latent_state *state,
                                                            const latent_memory *memory, const attend_args *args,
                                                            int32_t num_rows)
{
    const attend_job *job = &memory->job;
    const int32_t lane = threadIdx.x % 32, r = threadIdx.x / 32 % 4 * 16 + lane, from = lane % 8 * 4;
    const float scale[2] = {F::IS_AMLA ? __shfl_sync(~0u, state->scale[0], from) : 1.0f,
                            F::IS_AMLA ? __shfl_sync(~0u, state->scale[1], from) : 1.0f};
    if (lane >= 16 || r >= num_rows) return {-INFINITY, 0, 0, -1, 0};
    float factor = factor_of_values(job, sums->y, sums->z);
    if (F::IS_AMLA) factor = __fdividef(factor, lane < 8 ? scale[0] : scale[1]);
    return end_row(args, job, &memory->rows[r], sums->x, sums->y, factor);
}

/* Neighbouring elements in 16 bits: multiplied by `by`, as fp16 or bf16, or as multiples of the scale that it is the
 * inverse of. */
template <class T> static __device__ __forceinline__ uint32_t latent_pair(float low, float high, float by)
{
    return fv_narrow_pair<T>(low * by, high * by);
}
template <> __device__ __forceinline__ uint32_t latent_pair<int16_t>(float low, float high, float by)
{
    return narrow_pair(low, high, by);
}

/* Where the thread's part of rows of fp32 lies, of `row_bytes`. */
static __device__ __forceinline__ int32_t staged_part(int32_t row_bytes)
{
    return threadIdx.x % 32 / 4 * row_bytes + threadIdx.x % 4 * (int32_t)sizeof(float2);
}

/* The warp's part of the output as its end has it, to shared memory from `to` on, rows of `row_bytes`: where four rows
 * of fp32, or eight of 16 bits, lie in all banks. */
template <class T>
static __device__ __forceinline__ void stage_latent_values(const float (&out)[LATENT_VALUE / 4], char *to,
                                                           int32_t row_bytes, const float (&by)[2])
{
    if constexpr (sizeof(T) == 4) {
        char *const own = to + staged_part(row_bytes), *const rows[2] = {own, own + 8 * row_bytes};
#pragma unroll
        for (int i = 0; i < LATENT_VALUE / 8; i++)
            *(float2 *)(rows[i % 2] + i / 2 * 32) = make_float2(out[2 * i] * by[i % 2], out[2 * i + 1] * by[i % 2]);
    } else {
        const int32_t lane = threadIdx.x % 32;
        const uint32_t at = ptx_shared_address(to) + lane % 16 * row_bytes + lane / 16 * 16;
#pragma unroll
        for (int i = 0; i < LATENT_VALUE / 4; i += 8)
            ptx_stmatrix_x4(
                at + i * 4, latent_pair<T>(out[i], out[i + 1], by[0]), latent_pair<T>(out[i + 2], out[i + 3], by[1]),
                latent_pair<T>(out[i + 4], out[i + 5], by[0]), latent_pair<T>(out[i + 6], out[i + 7], by[1]));
    }
}

/* Of the warp's half of each of the thread's rows the inverse of the scale of a partial result in 16 bits. The scale
 * takes the place of what the row is multiplied by. */
static __device__ __forceinline__ void find_narrow_scales(float (&inverse)[2], float (&factor)[2],
                                                          const float (&out)[LATENT_VALUE / 4])
{
    float largest[2] = {FV_NARROW_LEAST, FV_NARROW_LEAST};
#pragma unroll
    for (int i = 0; i < LATENT_VALUE / 4; i++) largest[i / 2 % 2] = ptx_max_or_nan(largest[i / 2 % 2], fabsf(out[i]));
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int step = 1; step < 4; step *= 2)
            largest[half] = ptx_max_or_nan(largest[half], __shfl_xor_sync(~0u, largest[half], step));
        inverse[half] = narrow_inverse_of(largest[half]);
        factor[half] = narrow_scale_of(largest[half], factor[half]);
    }
}

/* Do the lanes' places lie at even steps from `from` on, the first of them that of lane `first`, all at multiples of 16
 * bytes, as the heads of a token do? Lanes that are no `is_row` have none. */
static __device__ __forceinline__ bool is_even_run(uint64_t place, uint64_t from, uint64_t step, int32_t first,
                                                   bool is_row)
{
    const uint32_t number = threadIdx.x % 32 - first;
    return !__any_sync(~0u, is_row && place != from + number * step) && (from | step) % 16 == 0;
}

/* Rows first .. end - 1 of the warp's, whose places the lanes have, from shared memory: by the copy engine, or, where
 * one is at no multiple of 16 bytes, 16 bits at a time. A copy whose place comes from a lane takes 100 cycles to ask
 * for, one at even steps 10 instructions. */
static __device__ __forceinline__ void send_latent_rows(char *to_of_lane, const char *staged, int32_t row_bytes,
                                                        int32_t bytes, int32_t first = 0, int32_t end = 16)
{
    const int32_t lane = threadIdx.x % 32;
    const uint64_t own = (uint64_t)to_of_lane, from = __shfl_sync(~0u, own, first);
    const uint64_t step = __shfl_sync(~0u, own, first + 1) - from;
    const bool is_row = lane >= first && lane < end && to_of_lane;
    const int32_t num_rows = __reduce_max_sync(~0u, is_row ? lane + 1 - first : 0); /* the last ones are no rows */
    staged += first * row_bytes;
    if (is_even_run(own, from, step, first, is_row)) {
        char *to = (char *)from;
        if (ptx_elect()) {
#pragma unroll 1
            for (int32_t i = 0; i < num_rows; i++, staged += row_bytes, to += step) ptx_bulk_store(to, staged, bytes);
        }
        __syncwarp();
        return ptx_bulk_commit();
    }
#pragma unroll 1
    for (int32_t i = first; i < first + num_rows; i++, staged += row_bytes) {
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

/* Bytes that lie together, if there are any. */
static __device__ __forceinline__ void send_latent_run(char *to, const char *staged, int32_t bytes)
{
    if (bytes > 0 && ptx_elect()) ptx_bulk_store(to, staged, bytes);
    ptx_bulk_commit();
}

/* --- two blocks of an item: the first ends the first warpgroup's columns, the second the second's ----------------- */

/* The warp's part of the output, relative to the block's own maxima, goes to the other block when that has sent its
 * sums too and needs its queries no more. The block stays until it is there. */
static __device__ __forceinline__ void give_latent_values(const float (&out)[LATENT_VALUE / 4], const float4 *sums,
                                                          latent_memory *memory, int32_t group)
{
    const uint32_t other_rank = ~blockIdx.x % 2;
    const int32_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const float as_it_is[2] = {1, 1};
    char *staged = memory->tiles[group][0] + warp * LATENT_WARP_BYTES;
    ptx_cluster_wait(); /* its barriers are there */
    if (lane < 16)
        ptx_store_async_16(ptx_shared_address_in(sums_of_other(memory, warp * 16 + lane), other_rank), *sums,
                           ptx_shared_address_in(&memory->met, other_rank));
    stage_latent_values<float>(out, staged, LATENT_STAGED_BYTES, as_it_is);
    ptx_fence_proxy_async();
    ptx_mbarrier_wait(&memory->met, 0);
    __syncwarp();
    if (ptx_elect())
        ptx_bulk_send(ptx_shared_address_in(memory->q[0] + warp * LATENT_WARP_BYTES, other_rank), staged,
                      LATENT_WARP_BYTES, ptx_shared_address_in(&memory->inbox[warp], other_rank));
    __syncwarp();
    ptx_mbarrier_wait(&memory->taken, 0);
}

/* Output and sums go over to the keys of both blocks. */
static __device__ __forceinline__ void take_latent_values(float (&out)[LATENT_VALUE / 4], float4 *sums,
                                                          latent_memory *memory)
{
    const uint32_t other_rank = ~blockIdx.x % 2;
    const int32_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    ptx_cluster_wait();
    ptx_mbarrier_wait(&memory->met, 0);
    const float4 other = *sums_of_other(memory, warp * 16 + lane % 16);
    const float max = fmaxf(sums->x, other.x), base = max == -INFINITY ? 0.0f : max;
    const float weight = ptx_ex2(sums->x - base), of_other = ptx_ex2(other.x - base);
    *sums = make_float4(max, weight * sums->y + of_other * other.y, weight * sums->z + of_other * other.z, 0);
    const float weights[2] = {__shfl_sync(~0u, weight, lane / 4), __shfl_sync(~0u, weight, lane / 4 + 8)};
    const float others[2] = {__shfl_sync(~0u, of_other, lane / 4), __shfl_sync(~0u, of_other, lane / 4 + 8)};
    ptx_mbarrier_wait(&memory->inbox[warp], 0);
    if (ptx_elect()) /* to where nothing is any more */
        ptx_store_async_16(ptx_shared_address_in(memory->p + LATENT_PANEL_BYTES / 2 + warp * 16, other_rank), other,
                           ptx_shared_address_in(&memory->taken, other_rank));
    __syncwarp();
    const char *from = memory->q[0] + warp * LATENT_WARP_BYTES + staged_part(LATENT_STAGED_BYTES);
#pragma unroll
    for (int i = 0; i < LATENT_VALUE / 8; i++) {
        if (i % 16 == 0) __syncwarp(); /* so many loads at a time: for more there are no registers */
        const float2 values = *(const float2 *)(from + i % 2 * 8 * LATENT_STAGED_BYTES + i / 2 * 32);
        out[2 * i] = out[2 * i] * weights[i % 2] + values.x * others[i % 2];
        out[2 * i + 1] = out[2 * i + 1] * weights[i % 2] + values.y * others[i % 2];
    }
}

/* --- the end of the rows ----------------------------------------------------------------------------------------- */

/* Where a row goes, as fp32, in 16 bits, or as the output. */
static __device__ __forceinline__ char *place_latent_row(const attend_args *args, const attend_row *row,
                                                         const attend_end *end, bool narrows)
{
    return narrows ? narrow_row(args->params.partial_out, end->partial, LATENT_VALUE) : target_of(args, row, end).to;
}

/* Scales, maximum and sum of a row in 16 bits: what the group has of it. */
static __device__ __forceinline__ void store_narrow_tail(char *row, int32_t group, float scale, const attend_end *end)
{
    narrow_tail *tail = (narrow_tail *)(row + LATENT_VALUE * 2);
    tail->scale[group] = scale;
    if (group == 0) store_partial_sums(&tail->max, &tail->sum, end);
}

/* The output, by way of the tiles' shared memory: written from registers it would be 3000 instructions, which a block
 * runs once, and 32 bytes of a row at a time. The two warps that have the same rows send half of them each. */
template <class F>
static __device__ __forceinline__ void store_latent_rows(float (&out)[LATENT_VALUE / 4], const latent_state *state,
                                                         latent_memory *memory, const attend_args *args, int32_t group,
                                                         int32_t num_rows)
{
    const bool shares = !F::IS_AMLA && is_split(args);
    float4 sums = sum_latent_row(state, memory, group);
    if (shares) {
        if (group != (int32_t)blockIdx.x % 2) return give_latent_values(out, &sums, memory, group);
        take_latent_values(out, &sums, memory);
    }
    const attend_end end = end_latent_row<F>(&sums, state, memory, args, num_rows);
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, first_row = warp * 16;
    const bool is_row = lane < 16 && first_row + lane < num_rows, is_partial = memory->job.item.partial >= 0;
    const bool narrows = is_partial && narrows_partials(&args->params);
    const fv_dtype dtype = is_partial ? FV_DTYPE_F32 : args->params.out_dtype;
    const int32_t element_bytes = dtype == FV_DTYPE_F32 && !narrows ? 4 : 2;
    const int32_t half_bytes = LATENT_VALUE / 2 * element_bytes;
    const int32_t row_bytes = (shares ? LATENT_VALUE / 2 + 8 : LATENT_VALUE + 8) * element_bytes;
    float factor[2] = {__shfl_sync(~0u, end.out_factor, lane / 4), __shfl_sync(~0u, end.out_factor, lane / 4 + 8)};
    char *rows = memory->tiles[shares ? group : 0][0] + first_row * row_bytes;
    char *staged = rows + (shares ? 0 : group * half_bytes);
    const attend_row *row = &memory->rows[first_row + lane % 16];
    char *to = is_row ? place_latent_row(args, row, &end, narrows) : NULL;
    if (narrows) {
        float inverse[2];
        find_narrow_scales(inverse, factor, out);
        const float scales[2] = {__shfl_sync(~0u, factor[0], lane % 8 * 4), __shfl_sync(~0u, factor[1], lane % 8 * 4)};
        if (is_row)
            store_narrow_tail(shares ? to : rows + lane * row_bytes, group, lane < 8 ? scales[0] : scales[1], &end);
        stage_latent_values<int16_t>(out, staged, row_bytes, inverse);
    } else if (dtype == FV_DTYPE_F32) {
        stage_latent_values<float>(out, staged, row_bytes, factor);
    } else if (dtype == FV_DTYPE_F16) {
        stage_latent_values<__half>(out, staged, row_bytes, factor);
    } else {
        stage_latent_values<__nv_bfloat16>(out, staged, row_bytes, factor);
    }
    __syncwarp();
    if (is_row && end.out_factor == 0 && !narrows) { /* no key: 0, whatever the sums are */
#pragma unroll 1
        for (int32_t at = 0; at < half_bytes; at += 16)
            *(uint4 *)(staged + lane * row_bytes + at) = make_uint4(0, 0, 0, 0);
    }
    ptx_fence_proxy_async();
    if (shares) {
        __syncwarp();
        send_latent_rows(is_row ? to + group * half_bytes : NULL, rows, row_bytes, half_bytes, 0, 16);
    } else {
        ptx_bar_sync(LATENT_BARRIER_ROWS + warp, 64); /* whole rows are there: half as many copies */
        if (narrows) /* one after the other in their slots, too, for all heads have one key */
            send_latent_run((char *)__shfl_sync(~0u, (uint64_t)to, group * 8), rows + group * 8 * row_bytes,
                            fv_min_i32(8, num_rows - first_row - group * 8) * row_bytes);
        else
            send_latent_rows(to, rows, row_bytes, 2 * half_bytes, group * 8, group * 8 + 8);
    }
    if (is_row && group == 0 && !narrows) store_sums(args, row, &end);
    ptx_bulk_wait_read();
}

#endif
