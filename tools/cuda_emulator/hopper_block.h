/* What a block has beside its threads on Hopper: the products that its warps have asked for, and where its threads are with
 * the copies to global memory and the cluster's barrier. */
#ifndef CUDA_EMULATOR_HOPPER_BLOCK_H
#define CUDA_EMULATOR_HOPPER_BLOCK_H

#include <memory>

#include "cuda_emulator/emulator.h"
#include "cuda_emulator/wgmma_queue.h"

typedef struct hopper_thread {
    size_t num_open_stores; /* bulk copies to global memory that are in no group yet */
    bool has_arrived;       /* at the cluster's barrier, for which it has not waited since */
    uint32_t arrived_phase;
} hopper_thread;

typedef struct hopper_warp {
    wgmma_queue products;
    int32_t num_products; /* since the block began: the same in the four warps of a warpgroup */
    int32_t elected;      /* lane, -1: not asked for yet */
} hopper_warp;

/* A thread that waits for the phase of an mbarrier to end. */
typedef struct hopper_waiter {
    const uint64_t *barrier;
    emu_thread *thread;
} hopper_waiter;

typedef struct hopper_block {
    std::unique_ptr<hopper_thread[]> threads;
    std::unique_ptr<hopper_warp[]> warps;
    int32_t num_warps;
    std::vector<hopper_waiter> waiters; /* at the block's mbarriers */
    int32_t num_arrived;                /* at the cluster's barrier, in its phase: in the block of rank 0 */
    uint32_t phase;
} hopper_block;

/* The block's; made when it is first asked for. */
hopper_block *hopper_block_of(emu_block *block);
hopper_thread *hopper_self(void);
hopper_warp *hopper_warp_of_self(void);

/* When the cluster is over: gives back the memory. NULL, or what the block has left undone. */
const char *hopper_end_block(emu_block *block);

/* What is asked for by a block that has ended may read or write the memory of another. */
void hopper_check_running(const emu_block *block, const char *what);

#endif
