/* The instances of the kernels of few rows whose pieces meet: of two or four pieces one block is all that a multiprocessor
 * has of memory under way; where there are more pieces they are short. */
#include "kernels/cuda/hopper/attend_few_meeting.cuh"

template <bool IS_NARROW, int WARPS> using meeting = few_shape<128, IS_NARROW, 8, WARPS, 1, true>;

const fv_cuda_attend_kernel fv_hopper_few_meeting[2][2] = {
    {attend_few_meeting_of<meeting<false, 12>>(), attend_few_meeting_of<meeting<false, 4>>()},
    {attend_few_meeting_of<meeting<true, 12>>(), attend_few_meeting_of<meeting<true, 4>>()},
};
