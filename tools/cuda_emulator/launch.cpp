/* A grid's blocks on threads of the operating system. These live as long as the launch and have nothing
 * thread_local that outlives a block but the static shared memory of kernels, so that all of it can be filled when a block
 * begins. */
#include "cuda_emulator/launch.h"

#include <link.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include <atomic>
#include <thread>
#include <vector>

#include "cuda_emulator/cluster.h"

typedef struct grid_run {
    const emu_launch *launch;
    uint64_t num_blocks, seed;
    std::atomic<uint64_t> next;
    std::atomic<bool> has_failed;
} grid_run;

typedef struct thread_memory {
    void *at;
    size_t bytes;
} thread_memory;

/* The thread_local variables of this library. */
static int find_thread_memory(struct dl_phdr_info *info, size_t, void *found)
{
    const uintptr_t code = (uintptr_t)&find_thread_memory - info->dlpi_addr;
    bool is_ours = false;
    thread_memory memory = {info->dlpi_tls_data, 0};
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && code - part->p_vaddr < part->p_memsz) is_ours = true;
        if (part->p_type == PT_TLS) memory.bytes = part->p_memsz;
    }
    if (is_ours) *(thread_memory *)found = memory;
    return is_ours;
}

static uint64_t number_of(const char *variable, uint64_t otherwise)
{
    const char *text = getenv(variable);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static void run_clusters(grid_run *run)
{
    emu_cluster *cluster = emu_cluster_take();
    thread_memory memory = {};
    emu_self = NULL; /* the library's thread_local memory is there from here on */
    dl_iterate_phdr(find_thread_memory, &memory);
    cluster->statics = (char *)memory.at;
    cluster->static_bytes = memory.bytes;
    const uint32_t step = run->launch->cluster;
    for (;;) {
        const uint64_t first = run->next.fetch_add(step);
        if (first >= run->num_blocks || run->has_failed) break;
        if (memory.at) memset(memory.at, 0xff, memory.bytes);
        if (!emu_cluster_run(cluster, run->launch, first, run->seed)) run->has_failed = true;
    }
    emu_cluster_give(cluster);
}

/* Each has the fibers of a cluster, of which each maps its own stack: the operating system counts mappings. */
static const uint32_t MOST_CPUS = 16;

/* Launches under way share the CPUs. */
static std::atomic<uint32_t> num_running;

bool emu_launch_run(const emu_launch *launch)
{
    static std::atomic<uint64_t> num_launches;
    grid_run run = {};
    run.launch = launch;
    run.num_blocks = (uint64_t)launch->grid.x * launch->grid.y * launch->grid.z;
    run.seed = number_of("FOVEA_EMULATOR_SEED", 1) * 1000003 + num_launches++ * 65537;
    const uint64_t num_cpus = number_of("FOVEA_EMULATOR_CPUS",
                                        std::min(MOST_CPUS, std::thread::hardware_concurrency()));
    const uint64_t busy = num_running; /* read once: others change it meanwhile */
    const uint64_t share = num_cpus > busy ? num_cpus - busy : 1;
    const uint64_t num_clusters = run.num_blocks / launch->cluster;
    const uint64_t num_threads = num_clusters < share ? num_clusters : share;
    num_running += (uint32_t)num_threads;
    std::vector<std::thread> threads;
    for (uint64_t i = 0; i < num_threads; i++) threads.emplace_back(run_clusters, &run);
    for (std::thread &thread : threads) thread.join();
    num_running -= (uint32_t)num_threads;
    return !run.has_failed;
}
