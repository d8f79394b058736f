/* The barrier of a cluster's blocks (barrier.cluster), and the addresses of their memory. It is kept in the block of rank 0.
 * A phase ends when all threads that have not exited have arrived. */
#include "cuda_emulator/hopper_block.h"
#include "kernels/cuda/hopper/mbarrier.cuh"

namespace
{

enum { MOST_BLOCKS = 8 /* of a cluster: emu_launch_on refuses more */ };

hopper_block *meeting_place(void) { return hopper_block_of(emu_block_of_rank(0)); }

typedef struct awaited_cluster {
    const hopper_block *barrier;
    uint32_t phase, num_blocks;
    const emu_block *blocks[MOST_BLOCKS];
} awaited_cluster;

bool has_ended(void *of)
{
    const awaited_cluster *awaited = (const awaited_cluster *)of;
    int32_t num_missing = -awaited->barrier->num_arrived;
    for (uint32_t rank = 0; rank < awaited->num_blocks; rank++)
        num_missing += awaited->blocks[rank]->num_threads - awaited->blocks[rank]->num_exited;
    return awaited->barrier->phase != awaited->phase || num_missing == 0;
}

} // namespace

void ptx_cluster_arrive(void)
{
    hopper_block *barrier = meeting_place();
    hopper_thread *thread = hopper_self();
    if (thread->has_arrived) emu_fail("a thread arrives twice at the cluster's barrier");
    thread->has_arrived = true;
    thread->arrived_phase = barrier->phase;
    barrier->num_arrived++;
}

void ptx_cluster_wait(void)
{
    hopper_block *barrier = meeting_place();
    hopper_thread *thread = hopper_self();
    if (!thread->has_arrived) emu_fail("a thread waits at the cluster's barrier where it has not arrived");
    awaited_cluster awaited = {barrier, thread->arrived_phase, emu_cluster_size(), {}};
    for (uint32_t rank = 0; rank < awaited.num_blocks; rank++) awaited.blocks[rank] = emu_block_of_rank(rank);
    emu_wait_until(has_ended, &awaited, "barrier.cluster, phase", (int32_t)awaited.phase, barrier->num_arrived);
    thread->has_arrived = false;
    if (barrier->phase != awaited.phase) return;
    barrier->phase++;
    barrier->num_arrived = 0;
}

uint32_t ptx_shared_address_in(const void *pointer, uint32_t rank)
{
    return emu_shared_address_in(emu_shared_address(pointer), rank);
}
