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

/* The warpgroup's maxima and sums: for those who end the rows. */
static __device__ __forceinline__ void give_row_sums(const latent_state *state, latent_memory *memory, int32_t group)
{
    const row_sums *sums = &state->sums;
    float4 *to = ends_of(memory)->sums[group] + state->row;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float sum = sum_of_quad(sums->sum[half]), rounded = sum_of_quad(sums->rounded[half]);
        if (threadIdx.x % 4 == 0) to[half * 8] = make_float4(sums->max[half], sum, rounded, state->scale[half]);
    }
    __syncwarp();
    arrive_at_bar(&memory->bars, LATENT_BARRIER_SUMS, LATENT_ENDERS);
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

/* Rows `first` .. end - 1 of the warp's, whose places the lanes have, from shared memory, of `bytes`, a multiple of 512:
 * written by all lanes. A block that has a multiprocessor's shared memory to itself is gone sooner so than where the
 * copy engine has to have read it. */
static __device__ __forceinline__ void write_latent_rows(char *to_of_lane, const char *staged, int32_t row_bytes,
                                                         int32_t bytes, int32_t first, int32_t end)
{
    const int32_t lane = threadIdx.x % 32;
    if (!__any_sync(~0u, (uintptr_t)to_of_lane % 16 != 0)) {
#pragma unroll 1
        for (int32_t at = lane * 16; at < bytes; at += 1024) {
#pragma unroll 1
            for (int32_t i = first; i < end; i += 4) { /* eight loads at a time: behind a store none can be asked for */
                uint4 part[4][2];
#pragma unroll
                for (int row = 0; row < 4; row++) {
                    part[row][0] = *(const uint4 *)(staged + (i + row) * row_bytes + at);
                    part[row][1] = *(const uint4 *)(staged + (i + row) * row_bytes + at + 512);
                }
#pragma unroll
                for (int row = 0; row < 4; row++) {
                    char *to = (char *)__shfl_sync(~0u, (uint64_t)to_of_lane, i + row);
                    if (to) *(uint4 *)(to + at) = part[row][0];
                    if (to && at + 512 < bytes) *(uint4 *)(to + at + 512) = part[row][1];
                }
            }
        }
        return;
    }
#pragma unroll 1
    for (int32_t i = first; i < end; i++) {
        char *to = (char *)__shfl_sync(~0u, (uint64_t)to_of_lane, i);
#pragma unroll 1
        for (int32_t at = lane * 2; to && at < bytes; at += 64)
            *(uint16_t *)(to + at) = *(const uint16_t *)(staged + i * row_bytes + at);
    }
}

/* Bytes that lie together, in the same way. */
static __device__ __forceinline__ void write_latent_run(char *to, const char *staged, int32_t bytes)
{
#pragma unroll 1
    for (int32_t at = threadIdx.x % 32 * 16; at < bytes; at += 4 * 512) {
        uint4 part[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (at + i * 512 < bytes) part[i] = *(const uint4 *)(staged + at + i * 512);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (at + i * 512 < bytes) *(uint4 *)(to + at + i * 512) = part[i];
    }
}

/* --- two blocks of an item: the first ends the first warpgroup's columns, the second the second's ----------------- */

/* A row's sums go to the other block, which may write where queries were from then on, and over to the keys of both
 * blocks; what each weighs. */
static __device__ __forceinline__ float4 share_latent_sums(latent_memory *memory, const float4 &sums, int32_t r)
{
    const uint32_t other_rank = ~blockIdx.x % 2;
    ptx_store_async_16(ptx_shared_address_in(sums_of_other(memory, r), other_rank), sums,
                       ptx_shared_address_in(&memory->met, other_rank));
    ptx_mbarrier_wait(&memory->met, 0);
    const float4 other = *sums_of_other(memory, r);
    const float max = fmaxf(sums.x, other.x), base = max == -INFINITY ? 0.0f : max;
    const float weight = ptx_ex2(sums.x - base), of_other = ptx_ex2(other.x - base);
    ends_of(memory)->weights[r] = make_float2(weight, of_other);
    return make_float4(max, weight * sums.y + of_other * other.y, weight * sums.z + of_other * other.z, 0);
}

/* The warp's part of the output, relative to the block's own maxima, goes to the other block when that has sent its
 * sums and needs its queries no more. The block stays until it is there. */
static __device__ __forceinline__ void give_latent_values(const float (&out)[LATENT_VALUE / 4], latent_memory *memory,
                                                          int32_t group)
{
    const uint32_t other_rank = ~blockIdx.x % 2;
    const int32_t warp = threadIdx.x / 32 % 4;
    const float as_it_is[2] = {1, 1};
    char *staged = memory->tiles[group][0] + warp * LATENT_WARP_BYTES;
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

/* The output goes over to the keys of both blocks. */
static __device__ __forceinline__ void take_latent_values(float (&out)[LATENT_VALUE / 4], latent_memory *memory,
                                                          int32_t row)
{
    const uint32_t other_rank = ~blockIdx.x % 2;
    const int32_t warp = threadIdx.x / 32 % 4;
    const float2 weights[2] = {ends_of(memory)->weights[row], ends_of(memory)->weights[row + 8]};
    ptx_mbarrier_wait(&memory->inbox[warp], 0);
    if (ptx_elect()) /* to where nothing is any more */
        ptx_store_async_16(ptx_shared_address_in(memory->p + LATENT_PANEL_BYTES / 2 + warp * 16, other_rank),
                           make_float4(0, 0, 0, 0), ptx_shared_address_in(&memory->taken, other_rank));
    __syncwarp();
    const char *from = memory->q[0] + warp * LATENT_WARP_BYTES + staged_part(LATENT_STAGED_BYTES);
#pragma unroll
    for (int i = 0; i < LATENT_VALUE / 8; i++) {
        if (i % 16 == 0) __syncwarp(); /* so many loads at a time: for more there are no registers */
        const float2 values = *(const float2 *)(from + i % 2 * 8 * LATENT_STAGED_BYTES + i / 2 * 32);
        out[2 * i] = out[2 * i] * weights[i % 2].x + values.x * weights[i % 2].y;
        out[2 * i + 1] = out[2 * i + 1] * weights[i % 2].x + values.y * weights[i % 2].y;
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

/* Do two blocks share the item's keys? */
template <class F> static __device__ __forceinline__ bool shares_item(const attend_args *args)
{
    return !F::IS_AMLA && is_split(args);
}

/* In 16 bits, that is, with a scale for half of a row. */
static __device__ __forceinline__ bool narrows_latents(const attend_args *args, const attend_job *job)
{
    return job->item.partial >= 0 && narrows_partials(&args->params);
}

/* Where an announcer's row goes, known from the start; `end` says that it has no key yet. NULL: there is no such row. */
static __device__ __forceinline__ char *place_row_of_announcer(attend_end *end, const latent_memory *memory,
                                                               const attend_args *args)
{
    const attend_job *job = &memory->job;
    const int32_t r = threadIdx.x % LATENT_ROWS;
    wait_at_bar(&memory->bars, LATENT_BARRIER_JOB, LATENT_ENDERS);
    *end = {-INFINITY, 0, 0, -1, 0};
    if (r >= job->num_rows - memory->row0) return NULL;
    *end = place_row(args, job, &memory->rows[r]);
    return place_latent_row(args, &memory->rows[r], end, narrows_latents(args, job));
}

/* The ends of all rows, by the announcers when all sums are there, a thread for each: what they are multiplied by. The
 * last products are under way meanwhile. */
template <class F>
static __device__ __forceinline__ void end_latent_rows(attend_end *end, char *to, latent_memory *memory,
                                                       const attend_args *args)
{
    const attend_job *job = &memory->job;
    const int32_t r = threadIdx.x % LATENT_ROWS;
    const attend_row *row = &memory->rows[r];
    const bool shares = shares_item<F>(args);
    latent_ends *ends = ends_of(memory);
    wait_at_bar(&memory->bars, LATENT_BARRIER_SUMS, LATENT_ENDERS);
    const float4 low = ends->sums[0][r], high = ends->sums[1][r];
    float4 sums = make_float4(low.x, low.y + high.y, low.z + high.z, 0);
    if (shares) sums = share_latent_sums(memory, sums, r);
    if (to) finish_row(end, args, row, sums.x, sums.y, factor_of_values(job, sums.y, sums.z));
    ends->rows[r] = *end;
    ends->by[0][r] = F::IS_AMLA ? __fdividef(end->out_factor, low.w) : end->out_factor;
    ends->by[1][r] = F::IS_AMLA ? __fdividef(end->out_factor, high.w) : end->out_factor;
    ends->targets[r] = to;
    __syncwarp();
    arrive_at_bar(&memory->bars, LATENT_BARRIER_ENDS, LATENT_ENDERS);
    if (to && !narrows_latents(args, job) && !(shares && blockIdx.x % 2 != 0)) store_sums(args, row, end);
}

/* The output, by way of the tiles' shared memory: written from registers it would be 3000 instructions, which a block
 * runs once, and 32 bytes of a row at a time. The two warps that have the same rows send half of them each. */
template <class F>
static __device__ __forceinline__ void store_latent_rows(float (&out)[LATENT_VALUE / 4], const latent_state *state,
                                                         latent_memory *memory, const attend_args *args, int32_t group)
{
    const bool shares = shares_item<F>(args), gives = shares && group != (int32_t)blockIdx.x % 2;
    latent_ends *ends = ends_of(memory);
    if (shares) ptx_cluster_wait();
    ptx_bar_sync(LATENT_BARRIER_CONSUMERS, LATENT_CONSUMERS); /* no product reads shared memory any more */
    if (gives) {
        arrive_at_bar(&memory->bars, LATENT_BARRIER_ENDS, LATENT_ENDERS);
        return give_latent_values(out, memory, group);
    }
    wait_at_bar(&memory->bars, LATENT_BARRIER_ENDS, LATENT_ENDERS);
    if (shares) take_latent_values(out, memory, state->row);
    const bool narrows = narrows_latents(args, &memory->job);
    const fv_dtype dtype = memory->job.item.partial >= 0 ? FV_DTYPE_F32 : args->params.out_dtype;
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, first_row = warp * 16;
    const int32_t element_bytes = dtype == FV_DTYPE_F32 && !narrows ? 4 : 2;
    const int32_t half_bytes = LATENT_VALUE / 2 * element_bytes;
    const int32_t row_bytes = (shares ? LATENT_VALUE / 2 + 8 : LATENT_VALUE + 8) * element_bytes;
    float factor[2] = {ends->by[group][state->row], ends->by[group][state->row + 8]};
    const attend_end *end = &ends->rows[first_row + lane % 16];
    char *to = lane < 16 ? ends->targets[first_row + lane] : NULL;
    const bool is_row = to != NULL;
    char *rows = memory->tiles[shares ? group : 0][0] + first_row * row_bytes;
    char *staged = rows + (shares ? 0 : group * half_bytes);
    if (narrows) {
        float inverse[2];
        find_narrow_scales(inverse, factor, out);
        const float scales[2] = {__shfl_sync(~0u, factor[0], lane % 8 * 4), __shfl_sync(~0u, factor[1], lane % 8 * 4)};
        if (is_row)
            store_narrow_tail(shares ? to : rows + lane * row_bytes, group, lane < 8 ? scales[0] : scales[1], end);
        stage_latent_values<int16_t>(out, staged, row_bytes, inverse);
    } else if (dtype == FV_DTYPE_F32) {
        stage_latent_values<float>(out, staged, row_bytes, factor);
    } else if (dtype == FV_DTYPE_F16) {
        stage_latent_values<__half>(out, staged, row_bytes, factor);
    } else {
        stage_latent_values<__nv_bfloat16>(out, staged, row_bytes, factor);
    }
    __syncwarp();
    if (is_row && end->out_factor == 0 && !narrows) { /* no key: 0, whatever the sums are */
#pragma unroll 1
        for (int32_t at = 0; at < half_bytes; at += 16)
            *(uint4 *)(staged + lane * row_bytes + at) = make_uint4(0, 0, 0, 0);
    }
    if (shares)
        __syncwarp();
    else
        ptx_bar_sync(LATENT_BARRIER_ROWS + warp, 64); /* the other warp's half of the rows is there */
    if (narrows && !shares) { /* one after the other in their slots, too, for all heads have one key */
        const int32_t num_rows = fv_min_i32(LATENT_ROWS, memory->job.num_rows - memory->row0);
        write_latent_run((char *)__shfl_sync(~0u, (uint64_t)to, group * 8), rows + group * 8 * row_bytes,
                         fv_min_i32(8, num_rows - first_row - group * 8) * row_bytes);
    } else {
        const int32_t first = shares ? 0 : group * 8, end_row = shares ? 16 : first + 8;
        if (shares && to) to += group * half_bytes;
        write_latent_rows(to, rows, row_bytes, shares ? half_bytes : 2 * half_bytes, first, end_row);
    }
}

#endif
