/* The scheduler: fibers of Boost.Context, one for each thread of a cluster's blocks. */
#include "cuda_emulator/cluster.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <mutex>

#include "cuda_emulator/hopper_block.h"

using boost::context::detail::fcontext_t;
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

enum {
    STACK_BYTES = 128 << 10,
    GUARD_BYTES = 64 << 10, /* the largest page there is */
    SHARED_BYTES = 256 << 10,
    ITEMS_EVERY = 16, /* steps, of a warp, about: an item that nobody waits for yet */
    POLLS_EVERY = 4,
};

thread_local emu_thread *emu_self;

/* --- memory that is kept --------------------------------------------------------------------------------------- */

/* The upper end of so many bytes, pages that nobody may touch on both sides. */
static char *map_guarded(size_t bytes)
{
    char *at = (char *)mmap(NULL, bytes + 2 * GUARD_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                            0);
    if (at == MAP_FAILED || mprotect(at + GUARD_BYTES, bytes, PROT_READ | PROT_WRITE) != 0) {
        fprintf(stderr, "CUDA emulator: no memory for fibers\n");
        abort();
    }
    return at + GUARD_BYTES + bytes;
}

static std::mutex lock_of_clusters, lock_of_reports;
static std::vector<emu_cluster *> idle_clusters;

emu_cluster *emu_cluster_take(void)
{
    const std::lock_guard<std::mutex> guard(lock_of_clusters);
    if (idle_clusters.empty()) {
        emu_cluster *cluster = new emu_cluster();
        cluster->service.condition_of = cluster;
        return cluster;
    }
    emu_cluster *cluster = idle_clusters.back();
    idle_clusters.pop_back();
    return cluster;
}

void emu_cluster_give(emu_cluster *cluster)
{
    const std::lock_guard<std::mutex> guard(lock_of_clusters);
    idle_clusters.push_back(cluster);
}

/* --- what went wrong ----------------------------------------------------------------------------------------------- */

static bool is_alike(const emu_thread *a, const emu_thread *b)
{
    return a->waits_for == b->waits_for && a->waits_id == b->waits_id && a->waits_count == b->waits_count &&
           a->has_exited == b->has_exited;
}

static void report_warp(const emu_warp *warp, int32_t num_lanes)
{
    uint32_t told = 0;
    for (int32_t lane = 0; lane < num_lanes; lane++) {
        const emu_thread *thread = &warp->threads[lane];
        if (told >> lane & 1) continue;
        uint32_t lanes = 0;
        for (int32_t other = lane; other < num_lanes; other++)
            if (is_alike(thread, &warp->threads[other])) lanes |= 1u << other;
        told |= lanes;
        const uint3 block = warp->block->index;
        fprintf(stderr, "  block (%u, %u, %u) warp %d lanes %08x: ", block.x, block.y, block.z, warp->index, lanes);
        if (thread->has_exited)
            fprintf(stderr, "have ended\n");
        else if (!thread->waits_for)
            fprintf(stderr, "can go on\n");
        else if (thread->waits_id < 0)
            fprintf(stderr, "wait for %s\n", thread->waits_for);
        else
            fprintf(stderr, "wait for %s %d (%d)\n", thread->waits_for, thread->waits_id, thread->waits_count);
    }
}

void emu_report(const emu_cluster *cluster, const emu_thread *of, const char *text)
{
    const std::lock_guard<std::mutex> guard(lock_of_reports);
    const emu_launch *launch = cluster->launch;
    fprintf(stderr,
            "CUDA emulator: %s (kernel at %p, grid %u x %u x %u, %u threads, %u bytes shared): ", launch->operation,
            launch->kernel, launch->grid.x, launch->grid.y, launch->grid.z, launch->num_threads, launch->shared_bytes);
    if (of && of->block) {
        const uint3 block = of->block->index;
        fprintf(stderr, "block (%u, %u, %u) thread %u: ", block.x, block.y, block.z, of->index.x);
    }
    fprintf(stderr, "%s\n", text);
    for (const emu_warp &warp : cluster->warps) {
        const int32_t left = warp.block->num_threads - warp.index * EMU_LANES;
        report_warp(&warp, left < EMU_LANES ? left : EMU_LANES);
    }
    fprintf(stderr, "  %zu copies or products are under way\n", cluster->items.size());
}

void emu_fail(const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    emu_cluster *cluster = emu_cluster_of(emu_self);
    if (!cluster->has_failed) emu_report(cluster, emu_self, text);
    cluster->has_failed = true;
    for (;;) jump_fcontext(cluster->scheduler, NULL);
}

/* --- threads --------------------------------------------------------------------------------------------------------- */

uint32_t emu_random(void)
{
    uint64_t *state = &emu_cluster_of(emu_self)->random;
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (uint32_t)(*state >> 32);
}

static uint32_t draw(emu_cluster *cluster)
{
    emu_self = &cluster->service;
    return emu_random();
}

uint32_t emu_shared_bytes(void) { return emu_cluster_of(emu_self)->launch->shared_bytes; }

uint32_t emu_cluster_size(void) { return emu_self->block->cluster->launch->cluster; }

emu_block *emu_block_of_rank(uint32_t rank)
{
    emu_cluster *cluster = emu_self->block->cluster;
    if (rank >= cluster->blocks.size()) emu_fail("block %u of a cluster of %zu", rank, cluster->blocks.size());
    return &cluster->blocks[rank];
}

void emu_wake(emu_thread *thread)
{
    emu_warp *warp = thread->warp;
    warp->ready |= 1u << thread->lane;
    if (warp->is_listed) return;
    warp->is_listed = true;
    thread->block->cluster->ready.push_back(warp);
}

void emu_suspend(const char *what, int32_t id, int32_t count)
{
    emu_thread *thread = emu_self;
    emu_cluster *cluster = emu_cluster_of(thread);
    thread->waits_for = what;
    thread->waits_id = id;
    thread->waits_count = count;
    const transfer_t back = jump_fcontext(cluster->scheduler, NULL);
    cluster->scheduler = back.fctx;
    thread->waits_for = NULL;
}

void emu_yield(void)
{
    emu_wake(emu_self);
    emu_suspend(NULL);
}

void emu_wait_until(bool (*is)(void *of), void *of, const char *what, int32_t id, int32_t count)
{
    if (is(of)) return;
    emu_thread *thread = emu_self;
    thread->condition = is;
    thread->condition_of = of;
    thread->block->cluster->polled.push_back(thread);
    emu_suspend(what, id, count);
}

static void end_thread(emu_thread *thread)
{
    thread->has_exited = true;
    thread->warp->alive &= ~(1u << thread->lane);
    thread->block->num_exited++;
    thread->block->cluster->num_alive--;
    emu_barriers_without(thread->block);
}

static void run_fiber(transfer_t from)
{
    emu_thread *thread = (emu_thread *)from.data;
    emu_cluster *cluster = thread->block->cluster;
    cluster->scheduler = from.fctx;
    cluster->launch->call();
    end_thread(thread);
    for (;;) jump_fcontext(cluster->scheduler, NULL);
}

/* Items run on a stack of their own, so that they may fail like threads. */
static void run_service(transfer_t from)
{
    emu_cluster *cluster = (emu_cluster *)from.data;
    for (;;) {
        cluster->scheduler = from.fctx;
        emu_run_item(cluster, emu_random() % cluster->items.size());
        from = jump_fcontext(cluster->scheduler, NULL);
    }
}

static void step(emu_thread *thread, void *with)
{
    emu_self = thread;
    thread->context = jump_fcontext(thread->context, with).fctx;
}

/* --- a cluster ------------------------------------------------------------------------------------------------------- */

static void begin_threads(emu_cluster *cluster, emu_block *block, size_t first_warp, size_t first_thread)
{
    for (int32_t i = 0; i < block->num_threads; i++) {
        emu_thread *thread = &cluster->threads[first_thread + (size_t)i];
        emu_warp *warp = &cluster->warps[first_warp + (size_t)(i / EMU_LANES)];
        if (i % EMU_LANES == 0) {
            warp->block = block;
            warp->threads = thread;
            warp->index = i / EMU_LANES;
            warp->ready = warp->alive = 0;
            warp->is_listed = false;
            for (emu_meeting &meeting : warp->meetings) meeting.here = 0;
        }
        thread->index = {(unsigned)i, 0, 0};
        thread->lane = i % EMU_LANES;
        thread->warp = warp;
        thread->block = block;
        thread->waits_for = NULL;
        thread->has_exited = false;
        thread->copy_group = 0;
        thread->copies.clear();
        thread->context = make_fcontext(cluster->stacks[first_thread + (size_t)i], STACK_BYTES, run_fiber);
        warp->alive |= 1u << thread->lane;
        emu_wake(thread);
    }
}

static uint3 place_in(dim3 grid, uint64_t index)
{
    return {(unsigned)(index % grid.x), (unsigned)(index / grid.x % grid.y), (unsigned)(index / grid.x / grid.y)};
}

static void begin_block(emu_cluster *cluster, size_t rank, uint64_t index)
{
    const emu_launch *launch = cluster->launch;
    const size_t bytes = (launch->shared_bytes + 1023u) / 1024 * 1024;
    const size_t num_warps = (launch->num_threads + EMU_LANES - 1) / EMU_LANES;
    emu_block *block = &cluster->blocks[rank];
    block->cluster = cluster;
    block->index = place_in(launch->grid, index);
    block->grid_size = launch->grid;
    block->size = dim3(launch->num_threads);
    block->rank = (int32_t)rank;
    block->num_threads = (int32_t)launch->num_threads;
    block->num_exited = 0;
    block->shared = cluster->shared[rank] - bytes;
    block->hopper = NULL;
    memset(block->shared, 0xff, bytes);
    for (emu_barrier_state &barrier : block->barriers) {
        barrier.is_open = false;
        barrier.waiting.clear();
    }
    begin_threads(cluster, block, rank * num_warps, rank * launch->num_threads);
}

static void begin(emu_cluster *cluster, uint64_t first_block)
{
    const emu_launch *launch = cluster->launch;
    const size_t num_warps = (launch->num_threads + EMU_LANES - 1) / EMU_LANES;
    cluster->blocks.resize(launch->cluster);
    cluster->warps.resize(launch->cluster * num_warps);
    cluster->threads.resize(launch->cluster * launch->num_threads);
    while (cluster->stacks.size() < cluster->threads.size()) cluster->stacks.push_back(map_guarded(STACK_BYTES));
    while (cluster->shared.size() < launch->cluster) cluster->shared.push_back(map_guarded(SHARED_BYTES));
    cluster->ready.clear();
    cluster->polled.clear();
    cluster->free_items.insert(cluster->free_items.end(), cluster->items.begin(), cluster->items.end());
    cluster->items.clear();
    cluster->has_failed = false;
    cluster->num_alive = (int32_t)cluster->threads.size();
    for (uint32_t rank = 0; rank < launch->cluster; rank++) begin_block(cluster, rank, first_block + rank);
    /* Begun anew: a fiber may keep the place of its thread's thread_local memory, and the next launch has other threads. */
    if (!cluster->service_stack) cluster->service_stack = map_guarded(STACK_BYTES);
    cluster->service.context = make_fcontext(cluster->service_stack, STACK_BYTES, run_service);
}

static void poll(emu_cluster *cluster)
{
    for (size_t i = 0; i < cluster->polled.size();) {
        emu_thread *thread = cluster->polled[i];
        if (!thread->condition(thread->condition_of)) {
            i++;
            continue;
        }
        cluster->polled[i] = cluster->polled.back();
        cluster->polled.pop_back();
        emu_wake(thread);
    }
}

/* The lanes of a warp that can go on, in an order by chance, and again while it stays. */
static void run_warp(emu_cluster *cluster, emu_warp *warp)
{
    uint32_t dice;
    do {
        dice = draw(cluster);
        const uint32_t first = dice, stride = dice >> 5 | 1;
        for (uint32_t i = 0; i < EMU_LANES && !cluster->has_failed; i++) {
            const uint32_t lane = (first + i * stride) % EMU_LANES;
            if (!(warp->ready >> lane & 1)) continue;
            warp->ready &= ~(1u << lane);
            step(&warp->threads[lane], &warp->threads[lane]);
        }
    } while (warp->ready && dice >> 24 < cluster->stays && !cluster->has_failed);
    warp->is_listed = warp->ready != 0;
    if (warp->is_listed) cluster->ready.push_back(warp);
}

static emu_warp *next_warp(emu_cluster *cluster, uint32_t dice)
{
    const size_t num_ready = cluster->ready.size();
    const size_t at = cluster->style == EMU_NEWEST   ? num_ready - 1
                      : cluster->style == EMU_OLDEST ? 0
                                                     : dice % num_ready;
    emu_warp *warp = cluster->ready[at];
    cluster->ready.erase(cluster->ready.begin() + (ptrdiff_t)at);
    return warp;
}

static void run(emu_cluster *cluster)
{
    while (cluster->num_alive > 0 && !cluster->has_failed) {
        const uint32_t dice = draw(cluster);
        const bool is_stuck = cluster->ready.empty();
        if (!cluster->polled.empty() && (is_stuck || dice % POLLS_EVERY == 0)) poll(cluster);
        const bool is_due = cluster->ready.empty() || dice / 64 % ITEMS_EVERY == 0;
        if (!cluster->items.empty() && is_due)
            step(&cluster->service, cluster);
        else if (!cluster->ready.empty())
            run_warp(cluster, next_warp(cluster, dice >> 12));
        else {
            emu_report(cluster, NULL, "no thread can go on");
            cluster->has_failed = true;
        }
    }
}

static void end_blocks(emu_cluster *cluster)
{
    for (emu_block &block : cluster->blocks) {
        const char *fault = hopper_end_block(&block);
        if (!fault || cluster->has_failed) continue;
        emu_report(cluster, block.num_threads > 0 ? &cluster->threads[(size_t)(block.rank * block.num_threads)] : NULL,
                   fault);
        cluster->has_failed = true;
    }
}

bool emu_cluster_run(emu_cluster *cluster, const emu_launch *launch, uint64_t first_block, uint64_t seed)
{
    cluster->launch = launch;
    cluster->random = (seed + first_block) * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
    const uint32_t dice = draw(cluster) ^ draw(cluster) >> 7;
    cluster->style = (emu_style)(dice % EMU_NUM_STYLES);
    cluster->stays = dice / 8 % 3 * 125;
    begin(cluster, first_block);
    run(cluster);
    while (!cluster->items.empty() && !cluster->has_failed) step(&cluster->service, cluster);
    end_blocks(cluster);
    return !cluster->has_failed;
}
