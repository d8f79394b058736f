/* A GPU's threads on a CPU: what the device code of the emulator stands on.
 *
 *   launch    blocks of a grid, by clusters of them, go to a few threads of the operating system
 *   cluster   its blocks' threads are fibers of one such thread: one runs at a time, until it waits for others
 *   warp      32 threads; an instruction of a warp is a meeting: each lane brings its operands, the last one to come
 *             does the work of all
 *
 * Which thread goes on is drawn from a seed (FOVEA_EMULATOR_SEED), so that code that forgets a barrier fails sooner or
 * later. A cluster in which no thread can go on is reported, thread by thread, and ends its launch; so does emu_fail. */
#ifndef CUDA_EMULATOR_EMULATOR_H
#define CUDA_EMULATOR_EMULATOR_H

#include <stddef.h>
#include <stdint.h>
#include <vector_types.h>

#include <boost/context/detail/fcontext.hpp>
#include <type_traits>
#include <vector>

enum {
    EMU_LANES = 32,
    EMU_NUM_BARRIERS = 16,
    EMU_MAX_SHARED_BYTES = 227 << 10, /* that a block may ask for */
    EMU_SHARED_BASE = 1024,           /* of a block's memory: its first shared address, as on compute capability 9.0 */
    EMU_STATIC_BASE = 1 << 20,        /* the same, of static variables */
    EMU_RANK_SHIFT = 24,              /* the block of a cluster, in a shared address */
    EMU_LATER_BYTES = 256,            /* of what is done later, at most: a copy with its tensor map fits */
};

/* A copy that a thread has asked for by cp.async and that was put off. */
typedef struct emu_copy {
    char *to;
    const char *from;
    int32_t read_bytes, bytes; /* zeros behind those read */
    uint32_t group;
} emu_copy;

typedef struct emu_thread {
    uint3 index;
    int32_t lane;
    struct emu_warp *warp;
    struct emu_block *block;
    boost::context::detail::fcontext_t context;
    const char *waits_for;         /* NULL: for nothing */
    int32_t waits_id, waits_count; /* -1: is not said */
    bool (*condition)(void *);     /* of emu_wait_until, and what it is of */
    void *condition_of;
    bool has_exited, red; /* what a barrier has brought together */
    uint32_t copy_group;  /* the number of the group that is open */
    std::vector<emu_copy> copies;
} emu_thread;

/* The lanes of a mask that have come for one instruction. */
typedef struct emu_meeting {
    uint32_t mask, here; /* here 0: a place for the next one */
    void (*action)(void *const *lanes, uint32_t mask);
    const char *what;
    void *lanes[EMU_LANES];
} emu_meeting;

typedef struct emu_warp {
    struct emu_block *block;
    emu_thread *threads; /* of lane 0 */
    int32_t index;
    uint32_t ready; /* lanes that can go on */
    uint32_t alive;
    bool is_listed; /* among the cluster's warps that are ready, or runs */
    std::vector<emu_meeting> meetings;
} emu_warp;

typedef struct emu_barrier_state {
    int32_t expected, arrived; /* threads; expected 0: all that have not exited */
    bool is_open, red;
    std::vector<emu_thread *> waiting;
} emu_barrier_state;

typedef struct emu_block {
    struct emu_cluster *cluster;
    uint3 index;
    dim3 grid_size, size;
    int32_t rank; /* in the cluster */
    int32_t num_threads, num_exited;
    char *shared; /* of shared address EMU_SHARED_BASE: the launch's dynamic memory */
    emu_barrier_state barriers[EMU_NUM_BARRIERS];
    void *hopper; /* of the shadows of kernels/cuda/hopper; NULL when the block begins */
} emu_block;

/* Something that a copy engine or a tensor core does in its own time. */
typedef struct emu_later_item {
    void *owner;
    void (*run)(void *of);
    alignas(64) char of[EMU_LATER_BYTES];
} emu_later_item;

/* The thread that runs; its place in the grid. */
extern thread_local emu_thread *emu_self;
uint32_t emu_cluster_size(void);
uint32_t emu_shared_bytes(void);             /* dynamic, of the launch; also for items */
emu_block *emu_block_of_rank(uint32_t rank); /* of the cluster; fails where there is none */

/* A number of the cluster's seed. */
uint32_t emu_random(void);

/* Ends the launch with a report of what is wrong and where. */
[[noreturn]] void emu_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* --- waiting ------------------------------------------------------------------------------------------- */

/* Others may go on first. */
void emu_yield(void);

/* Until is(of), which must not wait or draw random numbers. `what` is for the report, with two numbers. */
void emu_wait_until(bool (*is)(void *of), void *of, const char *what, int32_t id = -1, int32_t count = -1);

/* The lanes of `mask` meet, this one among them. The last one calls action(lanes, mask): lanes[l] is the `mine` of lane l;
 * it may write there what l gets. All of a meeting bring the same action. */
void emu_meet(uint32_t mask, void (*action)(void *const *lanes, uint32_t mask), void *mine, const char *what);

/* A block's barrier `id`: `count` threads arrive (0: all of the block that have not exited), of which some wait. True
 * where `red` is true of one of them. */
bool emu_barrier(int32_t id, int32_t count, bool waits, bool red = false);

/* --- done in its own time ---------------------------------------------------------------------------------- */

/* The bytes of a new item of the cluster, to be filled in at once; run() is called on them at any time later, between the
 * steps of threads, or in one that waits for them (emu_self says nothing then: they must name their own). Items run in any order, but those of
 * one owner that is not NULL in theirs. */
void *emu_later(void *owner, void (*run)(void *of));

/* emu_later of a copy of `work`, to be called: a lambda that captures by value and can be copied as bytes. */
template <class Work> inline void emu_do_later(void *owner, const Work &work)
{
    static_assert(sizeof(Work) <= EMU_LATER_BYTES && alignof(Work) <= alignof(emu_later_item) &&
                      std::is_trivially_copyable<Work>::value,
                  "an item's bytes");
    __builtin_memcpy(emu_later(owner, [](void *of) { (*(Work *)of)(); }), (const void *)&work, sizeof(Work));
}

/* Runs the owner's items until at most `most` are left, the oldest first. */
void emu_finish(void *owner, size_t most = 0);

/* cp.async of the current thread: put off, or done at once. */
void emu_copy_async(void *to, const void *from, int32_t read_bytes, int32_t bytes);
void emu_copy_commit(void);
void emu_copy_wait(uint32_t most);                        /* until at most so many groups are under way */
void emu_copy_finish(emu_thread *thread, uint32_t group); /* all before and of the group */

/* --- shared memory --------------------------------------------------------------------------------------------- */

/* The shared address of a place in the current block's dynamic memory; fails for any other. */
uint32_t emu_shared_address(const void *place);

/* What lies at a shared address of the current block, or where its rank is not 0, of that block of the cluster (rank + 1 is
 * kept above EMU_RANK_SHIFT, so that 0 says: of the thread's own). Fails where `bytes` from there on are not in the launch's
 * memory or the address is no multiple of `alignment`. */
void *emu_shared_at(uint32_t address, size_t bytes, uint32_t alignment);
void *emu_shared_of(emu_block *block, uint32_t address, size_t bytes, uint32_t alignment);
uint32_t emu_shared_address_in(uint32_t address, uint32_t rank); /* mapa */

#endif
