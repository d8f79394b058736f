/* The kernels of few rows of which several blocks share an item (attend_few_meeting.cuh), as their launcher knows them. */
#ifndef FV_KERNELS_CUDA_HOPPER_FEW_MEETING_H
#define FV_KERNELS_CUDA_HOPPER_FEW_MEETING_H

#include "kernels/cuda/attend.cuh"

enum { FV_CUDA_MOST_MEETING = 8 /* blocks that share an item */ };

/* Heads of 128, up to 8 rows: [is_narrow]. */
extern const fv_cuda_attend_kernel fv_hopper_few_meeting[2];

#endif
