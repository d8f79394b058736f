/* The ends of the rows of the kernel of many rows (attend_rows.cuh): from a warp's registers, by way of its queries' place in
 * shared memory, to memory. */
#ifndef FV_KERNELS_CUDA_HOPPER_ROWS_END_CUH
#define FV_KERNELS_CUDA_HOPPER_ROWS_END_CUH

#include "kernels/cuda/hopper/mbarrier.cuh"
#include "kernels/cuda/hopper/rows_block.cuh"

/* The end of row `lane` of the warp's 16, in its first 16 lanes; others: of no row. Sums are those of whole rows. */
static __device__ __forceinline__ attend_end end_row_of_lane(const row_sums *sums, const attend_args *args,
                                                             const attend_job *job, const attend_row *rows,
                                                             bool is_row)
{
    const int32_t lane = threadIdx.x % 32, from = lane % 8 * 4;
    float max = 0, sum = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float of_half[2] = {__shfl_sync(~0u, sums->max[half], from),
                                  __shfl_sync(~0u, sums->sum[half], from)};
        if (lane / 8 % 2 != half) continue;
        max = of_half[0];
        sum = of_half[1];
    }
    if (!is_row) return {-INFINITY, 0, 0, -1, 0};
    return end_row(args, job, &rows[lane], max, sum, job->v_head_scale);
}

/* Neighbouring columns multiplied by `by`, or 0 where that is. */
template <class T>
static __device__ __forceinline__ uint32_t end_pair(const float *pair, float by)
{
    return by == 0.0f ? 0 : fv_narrow_pair<T>(pair[0] * by, pair[1] * by);
}

/* The warp's output, of elements T, to where its queries were. */
template <class T, int N>
static __device__ __forceinline__ void stage_rows(uint32_t to, const float (&out)[N], const float (&by)[2])
{
#pragma unroll
    for (int i = 0; i < N; i += 8) {
        const uint32_t at = (to ^ (i / 8 % 4 << 5)) + i / 32 * ROWS_BLOCK_M * FV_PANEL_ROW_BYTES;
        ptx_stmatrix_x4(at, end_pair<T>(&out[i], by[0]), end_pair<T>(&out[i + 2], by[1]),
                        end_pair<T>(&out[i + 4], by[0]), end_pair<T>(&out[i + 6], by[1]));
    }
}

/* A warp's rows, of which lane i has the i-th one's target, if it is one: from shared memory, 16 bytes a lane. */
template <class S>
static __device__ __forceinline__ void send_rows(const char *staged, const attend_target *target, int32_t size,
                                                 int32_t first_row)
{
    constexpr int CHUNKS = S::HEAD / 8, AT_ONCE = 32 / CHUNKS;
    const int32_t lane = threadIdx.x % 32, chunk = lane % CHUNKS;
#pragma unroll
    for (int step = 0; step < 16 / AT_ONCE; step++) {
        const int32_t row = step * AT_ONCE + lane / CHUNKS;
        char *to = (char *)__shfl_sync(~0u, (uint64_t)target->to, row);
        const char *from = staged + panel_offset(ROWS_BLOCK_M, first_row + row, chunk);
        if (to && chunk * 8 < size) *(uint4 *)(to + chunk * 16) = *(const uint4 *)from;
    }
}

/* All of a warp's rows: those of 16 bits at multiples of 16 bytes by way of their queries' place, others from registers. */
template <class S>
static __device__ __forceinline__ void store_rows(const float (&out)[S::HEAD / 2], const row_sums *sums, char *staged,
                                                  const rows_slot *slot, const attend_args *args)
{
    const attend_job *job = &slot->job;
    const int32_t lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16;
    const attend_row *rows = &slot->rows[first_row];
    const bool is_row = lane < 16 && first_row + lane < slot->num_rows;
    const attend_end end = end_row_of_lane(sums, args, job, rows, is_row);
    attend_target target = {};
    if (is_row) {
        store_sums(args, &rows[lane], &end);
        target = target_of(args, &rows[lane], &end);
    }
    const bool is_single = is_row && (target.dtype == FV_DTYPE_F32 || (uint64_t)target.to % 16 != 0);
    if (__any_sync(~0u, is_single)) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int32_t r = lane / 4 + half * 8;
            if (first_row + r < slot->num_rows)
                store_row(out, half, args, job, &rows[r], sums->max[half], sums->sum[half], job->v_head_scale, 0, false);
        }
        return;
    }
    const float by[2] = {__shfl_sync(~0u, target.out_factor, lane / 4),
                         __shfl_sync(~0u, target.out_factor, lane / 4 + 8)};
    const uint32_t to = ptx_shared_address(staged) + panel_offset(ROWS_BLOCK_M, first_row + lane % 16, lane / 16);
    if (args->params.out_dtype == FV_DTYPE_F16)
        stage_rows<__half>(to, out, by);
    else
        stage_rows<__nv_bfloat16>(to, out, by);
    __syncwarp();
    send_rows<S>(staged, &target, args->params.v_head_size, first_row);
}

#endif
