/* Meetings of lanes, and barriers of a block. */
#include "cuda_emulator/cluster.h"

static emu_meeting *meeting_of(emu_warp *warp, uint32_t mask)
{
    emu_meeting *free_place = NULL;
    for (emu_meeting &meeting : warp->meetings) {
        if (meeting.here && meeting.mask == mask) return &meeting;
        if (!meeting.here) free_place = &meeting;
    }
    if (free_place) return free_place;
    warp->meetings.resize(warp->meetings.size() + 1); /* none of the warp's threads looks at them now */
    return &warp->meetings.back();
}

void emu_meet(uint32_t mask, void (*action)(void *const *lanes, uint32_t mask), void *mine, const char *what)
{
    emu_thread *thread = emu_self;
    emu_warp *warp = thread->warp;
    const uint32_t self = 1u << thread->lane;
    if (!(mask & self)) emu_fail("%s of lanes %08x, by lane %d", what, mask, thread->lane);
    if (mask & ~warp->alive) emu_fail("%s of lanes %08x, of which %08x have ended", what, mask, mask & ~warp->alive);
    emu_meeting *meeting = meeting_of(warp, mask);
    if (meeting->here && meeting->action != action)
        emu_fail("lane %d is at %s, lanes %08x at %s", thread->lane, what, meeting->here, meeting->what);
    meeting->mask = mask;
    meeting->here |= self;
    meeting->action = action;
    meeting->what = what;
    meeting->lanes[thread->lane] = mine;
    if (meeting->here != mask) {
        emu_suspend(what, 0, (int32_t)mask);
        return;
    }
    action(meeting->lanes, mask);
    meeting->here = 0;
    warp->ready |= mask & ~self;
    if (mask != self) emu_wake(&warp->threads[__builtin_ctz(mask & ~self)]);
}

static void complete(emu_barrier_state *barrier, emu_thread *but)
{
    barrier->is_open = false;
    for (emu_thread *thread : barrier->waiting) {
        thread->red = barrier->red;
        if (thread != but) emu_wake(thread);
    }
    barrier->waiting.clear();
}

static bool is_complete(const emu_block *block, const emu_barrier_state *barrier)
{
    return barrier->arrived == (barrier->expected ? barrier->expected : block->num_threads - block->num_exited);
}

bool emu_barrier(int32_t id, int32_t count, bool waits, bool red)
{
    emu_thread *thread = emu_self;
    emu_block *block = thread->block;
    if (id < 0 || id >= EMU_NUM_BARRIERS || count % EMU_LANES != 0) emu_fail("barrier %d of %d threads", id, count);
    emu_barrier_state *barrier = &block->barriers[id];
    if (!barrier->is_open) {
        barrier->is_open = true;
        barrier->expected = count;
        barrier->arrived = 0;
        barrier->red = false;
    }
    if (barrier->expected != count) emu_fail("barrier %d of %d threads is one of %d", id, count, barrier->expected);
    barrier->arrived++;
    barrier->red |= red;
    if (waits) barrier->waiting.push_back(thread);
    if (is_complete(block, barrier)) {
        complete(barrier, thread);
        return thread->red;
    }
    if (waits) emu_suspend("barrier", id, count);
    return thread->red;
}

void emu_barriers_without(emu_block *block)
{
    for (emu_barrier_state &barrier : block->barriers) {
        if (barrier.is_open && !barrier.expected && is_complete(block, &barrier) && barrier.arrived > 0)
            complete(&barrier, NULL);
    }
}
