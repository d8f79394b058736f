/* Addresses of shared memory. */
#include "cuda_emulator/cluster.h"

uint32_t emu_shared_address(const void *place)
{
    const emu_block *block = emu_self->block;
    const emu_cluster *cluster = block->cluster;
    const uint64_t offset = (uint64_t)((const char *)place - block->shared);
    const uint64_t in_statics = (uint64_t)((const char *)place - cluster->statics);
    if (in_statics < cluster->static_bytes) return EMU_STATIC_BASE + (uint32_t)in_statics;
    if (offset > cluster->launch->shared_bytes) emu_fail("%p is not in the block's shared memory", place);
    return EMU_SHARED_BASE + (uint32_t)offset;
}

uint32_t emu_shared_address_in(uint32_t address, uint32_t rank)
{
    emu_block_of_rank(rank);
    return (address & ((1u << EMU_RANK_SHIFT) - 1)) | (rank + 1) << EMU_RANK_SHIFT;
}

/* A block's static variables are those of its thread of the operating system: only blocks without a cluster may have some. */
static void *static_at(const emu_cluster *cluster, uint32_t address, size_t bytes, uint32_t alignment)
{
    const uint32_t offset = address - EMU_STATIC_BASE;
    if (cluster->blocks.size() > 1 || offset + bytes > cluster->static_bytes || offset % alignment != 0)
        emu_fail("%zu bytes at static shared address %x", bytes, address);
    return cluster->statics + offset;
}

void *emu_shared_of(emu_block *block, uint32_t address, size_t bytes, uint32_t alignment)
{
    emu_cluster *cluster = block->cluster;
    const uint32_t rank = address >> EMU_RANK_SHIFT, own = address & ((1u << EMU_RANK_SHIFT) - 1);
    if (own >= EMU_STATIC_BASE) return static_at(cluster, own, bytes, alignment);
    const uint32_t offset = own - EMU_SHARED_BASE;
    if (rank > cluster->blocks.size())
        emu_fail("shared address %x: the cluster has %zu blocks", address, cluster->blocks.size());
    if ((uint64_t)offset + bytes > cluster->launch->shared_bytes)
        emu_fail("%zu bytes at shared address %x: the block has %u", bytes, address, cluster->launch->shared_bytes);
    if (offset % alignment != 0) emu_fail("shared address %x: no multiple of %u", address, alignment);
    emu_block *of = rank ? &cluster->blocks[rank - 1] : block;
    if (of != block && of->num_exited == of->num_threads)
        emu_fail("shared address %x: of a block that has ended", address);
    return of->shared + offset;
}

void *emu_shared_at(uint32_t address, size_t bytes, uint32_t alignment)
{
    return emu_shared_of(emu_self->block, address, bytes, alignment);
}
