/* mbarriers and what arrives at them by itself: copies of the copy engine, stores to other blocks of a cluster, cp.async.
 * Each is an item that the scheduler runs when it likes; the bytes are counted at their barrier when they are there. */
#include <string.h>

#include "cuda_emulator/cluster.h"
#include "cuda_emulator/hopper_block.h"
#include "cuda_emulator/mbarrier.h"
#include "cuda_emulator/tensor_map.h"
#include "kernels/cuda/hopper/mbarrier.cuh"

namespace
{

/* A place in the shared memory of a block, of which the address may name another of the cluster. */
typedef struct shared_place {
    emu_block *block;
    char *at;
} shared_place;

shared_place find_place(uint32_t address, size_t bytes, uint32_t alignment)
{
    const uint32_t rank = address >> EMU_RANK_SHIFT;
    return {rank ? emu_block_of_rank(rank - 1) : emu_self->block, (char *)emu_shared_at(address, bytes, alignment)};
}

shared_place own_place(const void *pointer, size_t bytes, uint32_t alignment)
{
    return find_place(emu_shared_address(pointer), bytes, alignment);
}

void check_at(const char *fault, const emu_block *block, const void *barrier)
{
    if (fault)
        emu_fail("%s (at shared address %d of block (%u, %u, %u))", fault,
                 EMU_SHARED_BASE + (int32_t)((const char *)barrier - block->shared), block->index.x, block->index.y,
                 block->index.z);
}

/* At the end of a phase those who wait for it go on: they look again themselves. */
void count(const shared_place &barrier, int32_t arrivals, int64_t bytes)
{
    uint64_t *word = (uint64_t *)barrier.at;
    const uint64_t before = *word;
    check_at(mbarrier_count(word, arrivals, bytes), barrier.block, word);
    if (!mbarrier_has_turned(before, *word)) return;
    std::erase_if(hopper_block_of(barrier.block)->waiters, [word](const hopper_waiter &waiter) {
        if (waiter.barrier != word) return false;
        emu_wake(waiter.thread);
        return true;
    });
}

shared_place barrier_of(uint64_t *barrier) { return own_place(barrier, sizeof(*barrier), sizeof(*barrier)); }

/* Bytes that the copy engine moves to `to`, and which arrive at a barrier of the same block. */
void copy_later(const shared_place &to, const void *from, const emu_block *from_block, int32_t bytes,
                const shared_place &barrier, const char *what)
{
    if ((uintptr_t)from % 16 != 0 || bytes <= 0 || bytes % 16 != 0)
        emu_fail("%s of %d bytes from %p: both are to be multiples of 16", what, bytes, from);
    if (to.block != barrier.block) emu_fail("%s to one block, and to the barrier of another", what);
    emu_do_later(NULL, [to, from, from_block, bytes, barrier, what] {
        hopper_check_running(to.block, what);
        if (from_block) hopper_check_running(from_block, what);
        memcpy(to.at, from, (size_t)bytes);
        count(barrier, 0, -bytes);
    });
}

} // namespace

/* --- mbarriers ------------------------------------------------------------------------------------------------- */

void ptx_mbarrier_init(uint64_t *barrier, uint32_t count)
{
    const shared_place place = barrier_of(barrier);
    check_at(mbarrier_init((uint64_t *)place.at, count), place.block, place.at);
}

void ptx_mbarrier_arrive(uint64_t *barrier) { count(barrier_of(barrier), 1, 0); }

void ptx_mbarrier_expect(uint64_t *barrier, uint32_t bytes)
{
    const shared_place place = barrier_of(barrier);
    count(place, 0, bytes); /* before the arrival, which may end the phase */
    count(place, 1, 0);
}

void ptx_mbarrier_wait(uint64_t *barrier, uint32_t parity)
{
    const shared_place place = barrier_of(barrier);
    uint64_t *word = (uint64_t *)place.at;
    for (;;) {
        bool has_ended;
        check_at(mbarrier_test(&has_ended, *word, parity), place.block, word);
        if (has_ended) return;
        hopper_block_of(place.block)->waiters.push_back({word, emu_self});
        emu_suspend("the mbarrier (parity) at shared address", (int32_t)emu_shared_address(barrier), (int32_t)parity);
    }
}

void ptx_mbarrier_arrive_and_wait(uint64_t *barrier)
{
    const shared_place place = barrier_of(barrier);
    mbarrier_state state;
    check_at(mbarrier_read(&state, *(uint64_t *)place.at), place.block, place.at);
    count(place, 1, 0);
    ptx_mbarrier_wait(barrier, state.parity);
}

/* --- copies ---------------------------------------------------------------------------------------------------- */

void ptx_prefetch_map(const fv_tensor_map *) {}

void ptx_tensor_copy(void *shared, const fv_tensor_map *map, int32_t x, int32_t y, int32_t z, uint64_t *barrier)
{
    if ((uintptr_t)map % 64 != 0) emu_fail("a tensor map at %p, which is no multiple of 64", (const void *)map);
    const fv_tensor_map own = *map; /* the thread that has it may be gone by then */
    emu_block *block = emu_self->block;
    const uint32_t address = emu_shared_address(shared);
    const shared_place at = barrier_of(barrier);
    emu_do_later(NULL, [own, block, address, x, y, z, at] {
        hopper_check_running(block, "a copy by a tensor map");
        const int32_t from[3] = {x, y, z};
        int32_t bytes = 0;
        const char *fault = tensor_map_copy(&bytes, block->shared, EMU_SHARED_BASE, emu_shared_bytes(), address, &own,
                                            from);
        if (fault) emu_fail("%s: element (%d, %d, %d) to shared address %u", fault, x, y, z, address);
        count(at, 0, -bytes);
    });
}

void ptx_bulk_load(void *shared, const void *global, int32_t bytes, uint64_t *barrier)
{
    copy_later(own_place(shared, (size_t)bytes, 16), global, NULL, bytes, barrier_of(barrier), "cp.async.bulk");
}

void ptx_bulk_send(uint32_t shared, const void *from, int32_t bytes, uint32_t barrier)
{
    const shared_place place = own_place(from, (size_t)bytes, 16);
    copy_later(find_place(shared, (size_t)bytes, 16), place.at, place.block, bytes,
               find_place(barrier, sizeof(uint64_t), sizeof(uint64_t)), "cp.async.bulk to another block");
}

void ptx_store_async_16(uint32_t shared, float4 value, uint32_t barrier)
{
    const shared_place to = find_place(shared, sizeof(value), 16);
    const shared_place at = find_place(barrier, sizeof(uint64_t), sizeof(uint64_t));
    if (to.block != at.block) emu_fail("st.async to one block, and to the barrier of another");
    emu_do_later(NULL, [to, value, at] {
        hopper_check_running(to.block, "st.async");
        memcpy(to.at, &value, sizeof(value));
        count(at, 0, -(int64_t)sizeof(value));
    });
}

/* A thread's stores are one owner's: it waits for its groups by how many are left. */
void ptx_bulk_store(void *global, const void *shared, int32_t bytes)
{
    const shared_place from = own_place(shared, (size_t)bytes, 16);
    hopper_thread *thread = hopper_self();
    if ((uintptr_t)global % 16 != 0 || bytes <= 0 || bytes % 16 != 0)
        emu_fail("cp.async.bulk of %d bytes to %p: both are to be multiples of 16", bytes, global);
    thread->num_open_stores++;
    emu_do_later(thread, [from, global, bytes] {
        hopper_check_running(from.block, "cp.async.bulk to global memory");
        memcpy(global, from.at, (size_t)bytes);
    });
}

void ptx_tensor_store(const fv_tensor_map *map, const void *shared, int32_t x, int32_t y, int32_t z)
{
    if ((uintptr_t)map % 64 != 0) emu_fail("a tensor map at %p, which is no multiple of 64", (const void *)map);
    const fv_tensor_map own = *map; /* the thread that has it may be gone by then */
    emu_block *block = emu_self->block;
    const uint32_t address = emu_shared_address(shared);
    hopper_thread *thread = hopper_self();
    thread->num_open_stores++;
    emu_do_later(thread, [own, block, address, x, y, z] {
        hopper_check_running(block, "a copy by a tensor map to global memory");
        const int32_t to[3] = {x, y, z};
        int32_t bytes = 0;
        const char *fault = tensor_map_copy(&bytes, block->shared, EMU_SHARED_BASE, emu_shared_bytes(), address, &own,
                                            to, true);
        if (fault) emu_fail("%s: shared address %u to element (%d, %d, %d)", fault, address, x, y, z);
    });
}

void ptx_bulk_commit(void) { hopper_self()->num_open_stores = 0; }
void ptx_bulk_wait_read(void) { emu_finish(hopper_self(), hopper_self()->num_open_stores); }

void ptx_cp_async_arrive(uint64_t *barrier)
{
    const shared_place at = barrier_of(barrier);
    emu_thread *thread = emu_self;
    const uint32_t group = thread->copy_group;
    emu_do_later(NULL, [at, thread, group] {
        hopper_check_running(at.block, "cp.async");
        emu_copy_finish(thread, group);
        count(at, 1, 0);
    });
}

/* --- barriers of threads --------------------------------------------------------------------------------------- */

void ptx_bar_sync(int32_t id, int32_t threads) { (void)emu_barrier(id, threads, true); }
void ptx_bar_arrive(int32_t id, int32_t threads) { (void)emu_barrier(id, threads, false); }
bool ptx_bar_any(int32_t id, int32_t threads, bool is) { return emu_barrier(id, threads, true, is); }
