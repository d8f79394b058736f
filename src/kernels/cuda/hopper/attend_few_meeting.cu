/* The instances of the kernels of few rows whose pieces meet: of any number of pieces one block is all that a
 * multiprocessor has of memory under way. One-byte entries, of which as many bytes are twice as many keys, take more warps. */
#include "kernels/cuda/hopper/attend_few_meeting.cuh"

template <bool IS_NARROW, int WARPS> using meeting = few_shape<128, IS_NARROW, 8, WARPS, 1, true>;

const fv_cuda_attend_kernel fv_hopper_few_meeting[2] = {
    attend_few_meeting_of<meeting<false, 8>>(),
    attend_few_meeting_of<meeting<true, 12>>(),
};
