/* The ends of the rows of MLA decode over the 656-byte entry (attend_entry.cuh): from the valuers' registers to the
 * output or to partial results. */
#ifndef FV_KERNELS_CUDA_HOPPER_ENTRY_END_CUH
#define FV_KERNELS_CUDA_HOPPER_ENTRY_END_CUH

#include "kernels/cuda/hopper/entry_block.cuh"

/* Four neighbouring elements, as T. */
template <class T> static __device__ __forceinline__ void store_four(char *to, const float (&of)[4])
{
    if constexpr (sizeof(T) == 4)
        *(float4 *)to = make_float4(of[0], of[1], of[2], of[3]);
    else
        *(uint2 *)to = make_uint2(fv_narrow_pair<T>(of[0], of[1]), fv_narrow_pair<T>(of[2], of[3]));
}

/* What a thread has of all rows, whose targets are by lanes, 32 at a time; four elements at once where they are at
 * multiples of them. */
template <class T, bool FOUR, int N>
static __device__ __forceinline__ void store_entry_columns(const float (&out)[ENTRY_BLOCKS][N / 2],
                                                           const attend_target (&of_lane)[(N + 31) / 32], int32_t first)
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const attend_target *of = &of_lane[i / 8];
        const int32_t lane = column_of_thread(i) % 32;
        attend_target target = *of;
        target.to = (char *)__shfl_sync(~0u, (uint64_t)of->to, lane);
        target.out_factor = __shfl_sync(~0u, of->out_factor, lane);
        if (!target.to) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) { /* of the columns */
            const float(&low)[N / 2] = out[2 * half], (&high)[N / 2] = out[2 * half + 1];
            const int at = element_of_column(i, 0), next = element_of_column(i, 1), d = half * FV_DS_TILE;
            float four[4] = {low[at], low[next], high[at], high[next]};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (!FOUR) store_element(&target, first + d + j, four[j]);
                four[j] = target.out_factor == 0 ? 0.0f : four[j] * target.out_factor; /* no key: whatever sums are */
            }
            if (FOUR) store_four<T>(target.to + (first + d) * (int32_t)sizeof(T), four);
        }
    }
}

/* A row's end, by a lane. `to` is NULL where there is no such row. */
template <int N>
static __device__ __forceinline__ attend_target end_entry_row(const entry_memory<N> *memory, const attend_args *args,
                                                              int32_t row0, int32_t r, bool tells)
{
    const attend_job *job = &memory->job;
    const attend_row *row = &memory->rows[fv_min_i32(r, N - 1)];
    const bool is_row = r < N && row0 + r < job->num_rows;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < entry_shape<N>::SCORERS / 32; i++) sum += memory->sums[i][fv_min_i32(r, N - 1)];
    float max = memory->max[fv_min_i32(r, N - 1)];
    if (max == ENTRY_NO_MAX) max = -INFINITY;
    const attend_end end = end_row(args, job, row, max, sum, job->v_head_scale / memory->inverse_unit);
    attend_target target = target_of(args, row, &end);
    if (!is_row) target.to = NULL;
    if (is_row && tells) store_sums(args, row, &end);
    return target;
}

/* Lanes find the ends of rows, and all write what they have of them: eight lanes 32 neighbouring elements. */
template <int N>
static __device__ __forceinline__ void store_entry_values(const float (&out)[ENTRY_BLOCKS][N / 2],
                                                          const entry_memory<N> *memory, const attend_args *args,
                                                          int32_t row0, int32_t group)
{
    const int32_t lane = threadIdx.x % 32, warp = warp_of_group();
    attend_target targets[(N + 31) / 32];
    bool is_apart = false;
    wait_at_bar(&memory->bars, ENTRY_BARRIER_CONSUMERS, entry_shape<N>::CONSUMERS);
#pragma unroll
    for (int i = 0; i < (N + 31) / 32; i++) {
        targets[i] = end_entry_row<N>(memory, args, row0, lane + i * 32, group == 0 && warp == 0);
        is_apart = is_apart || (uintptr_t)targets[i].to % 16 != 0;
    }
    const int32_t first = group * (LATENT_VALUE / 2) + warp * 32 + lane / 4 * 4;
    const fv_dtype dtype = memory->job.item.partial >= 0 ? FV_DTYPE_F32 : args->params.out_dtype;
    if (__any_sync(~0u, is_apart))
        store_entry_columns<float, false, N>(out, targets, first);
    else if (dtype == FV_DTYPE_F32)
        store_entry_columns<float, true, N>(out, targets, first);
    else if (dtype == FV_DTYPE_F16)
        store_entry_columns<__half, true, N>(out, targets, first);
    else
        store_entry_columns<__nv_bfloat16, true, N>(out, targets, first);
}

#endif
