/* The blocks of a cluster while they run: what the scheduler and the ways to wait share. */
#ifndef CUDA_EMULATOR_CLUSTER_H
#define CUDA_EMULATOR_CLUSTER_H

#include "cuda_emulator/emulator.h"
#include "cuda_emulator/launch.h"

/* How the scheduler chooses among the warps that can go on. */
typedef enum emu_style { EMU_AT_RANDOM, EMU_OLDEST, EMU_NEWEST, EMU_NUM_STYLES } emu_style;

/* One for each thread of the operating system that runs blocks; kept from launch to launch, for its stacks. */
typedef struct emu_cluster {
    const emu_launch *launch;
    uint64_t random;
    emu_style style;
    uint32_t stays; /* of 256: how often a warp goes on while it can */
    std::vector<emu_block> blocks;
    std::vector<emu_warp> warps;
    std::vector<emu_thread> threads;
    std::vector<emu_warp *> ready;
    std::vector<emu_thread *> polled; /* those that wait until a condition is true */
    std::vector<emu_later_item *> items, free_items;
    std::vector<char *> stacks; /* the upper ends */
    std::vector<char *> shared; /* the upper ends of the blocks' memories */
    char *statics;              /* the static shared memory of all kernels */
    size_t static_bytes;
    emu_thread service; /* runs items between the steps of threads */
    char *service_stack;
    boost::context::detail::fcontext_t scheduler;
    int32_t num_alive; /* threads */
    bool has_failed;
} emu_cluster;

/* That of a thread, or of the service, which is of no block. */
static inline emu_cluster *emu_cluster_of(const emu_thread *thread)
{
    return thread->warp ? thread->block->cluster : (emu_cluster *)thread->condition_of;
}

/* Runs the blocks first, first + 1, ... of the grid, a cluster of them; false: they failed, which has been reported. */
bool emu_cluster_run(emu_cluster *cluster, const emu_launch *launch, uint64_t first_block, uint64_t seed);

/* A cluster that nobody uses, made if there is none. */
emu_cluster *emu_cluster_take(void);
void emu_cluster_give(emu_cluster *cluster);

/* The current thread stops here; it goes on after emu_wake. */
void emu_suspend(const char *what, int32_t id = -1, int32_t count = -1);
void emu_wake(emu_thread *thread);

/* Items, by chance or all that are left. */
void emu_run_item(emu_cluster *cluster, size_t at);

/* A thread has ended: barriers of all threads may be complete now. */
void emu_barriers_without(emu_block *block);

/* On stderr, one report at a time: where each thread of the cluster is. */
void emu_report(const emu_cluster *cluster, const emu_thread *of, const char *text);

#endif
