/* wgmma, as a thread calls it (include/kernels/cuda/hopper/wgmma.cuh). */
#ifndef CUDA_EMULATOR_WARPGROUP_H
#define CUDA_EMULATOR_WARPGROUP_H

#include "cuda_emulator/wgmma_queue.h"

void warpgroup_fence(void);
void warpgroup_multiply(const wgmma_product *product);
void warpgroup_commit(void);
void warpgroup_wait(size_t most); /* until at most so many groups are under way */

#endif
