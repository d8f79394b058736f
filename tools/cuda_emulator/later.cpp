/* What is done in its own time: items of a cluster, and the copies of each thread by cp.async. */
#include <string.h>

#include "cuda_emulator/cluster.h"

void *emu_later(void *owner, void (*run)(void *of))
{
    emu_cluster *cluster = emu_cluster_of(emu_self);
    if (cluster->free_items.empty()) cluster->free_items.push_back(new emu_later_item());
    emu_later_item *item = cluster->free_items.back();
    cluster->free_items.pop_back();
    item->owner = owner;
    item->run = run;
    cluster->items.push_back(item);
    return item->of;
}

/* Item `at`, or the oldest one of its owner. */
void emu_run_item(emu_cluster *cluster, size_t at)
{
    void *owner = cluster->items[at]->owner;
    for (size_t i = 0; owner && i < at; i++)
        if (cluster->items[i]->owner == owner) at = i;
    emu_later_item *item = cluster->items[at];
    cluster->items.erase(cluster->items.begin() + (ptrdiff_t)at);
    item->run(item->of);
    cluster->free_items.push_back(item);
}

void emu_finish(void *owner, size_t most)
{
    emu_cluster *cluster = emu_cluster_of(emu_self);
    size_t count = 0;
    for (const emu_later_item *item : cluster->items) count += item->owner == owner;
    for (size_t i = 0; count > most;) {
        if (cluster->items[i]->owner != owner) {
            i++;
            continue;
        }
        emu_run_item(cluster, i);
        count--;
        i = 0; /* what has run may have asked for more */
    }
}

static void do_copy(const emu_copy *copy)
{
    if (copy->read_bytes > 0) memcpy(copy->to, copy->from, (size_t)copy->read_bytes);
    memset(copy->to + copy->read_bytes, 0, (size_t)(copy->bytes - copy->read_bytes));
}

void emu_copy_async(void *to, const void *from, int32_t read_bytes, int32_t bytes)
{
    emu_thread *thread = emu_self;
    const emu_copy copy = {(char *)to, (const char *)from, read_bytes, bytes, thread->copy_group};
    if (read_bytes < 0 || read_bytes > bytes) emu_fail("cp.async of %d bytes of %d", read_bytes, bytes);
    if (read_bytes > 0 && (uintptr_t)from % (uintptr_t)bytes != 0)
        emu_fail("cp.async of %d of %d bytes from %p", read_bytes, bytes, from);
    if (emu_random() % 4 == 0)
        do_copy(&copy);
    else
        thread->copies.push_back(copy);
}

void emu_copy_finish(emu_thread *thread, uint32_t group)
{
    size_t num_left = 0;
    for (const emu_copy &copy : thread->copies) {
        if (copy.group <= group)
            do_copy(&copy);
        else
            thread->copies[num_left++] = copy;
    }
    thread->copies.resize(num_left);
}

void emu_copy_commit(void)
{
    emu_thread *thread = emu_self;
    if (emu_random() % 8 == 0) emu_copy_finish(thread, thread->copy_group);
    thread->copy_group++;
}

void emu_copy_wait(uint32_t most)
{
    if (emu_self->copy_group > most) emu_copy_finish(emu_self, emu_self->copy_group - most - 1);
}
