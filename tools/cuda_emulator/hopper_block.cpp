#include "cuda_emulator/hopper_block.h"

hopper_block *hopper_block_of(emu_block *block)
{
    if (!block->hopper) {
        hopper_block *made = new hopper_block();
        made->num_warps = (block->num_threads + EMU_LANES - 1) / EMU_LANES;
        made->threads = std::make_unique<hopper_thread[]>((size_t)made->num_warps * EMU_LANES);
        made->warps = std::make_unique<hopper_warp[]>((size_t)made->num_warps);
        for (int32_t i = 0; i < made->num_warps; i++) made->warps[i].elected = -1;
        block->hopper = made;
    }
    return (hopper_block *)block->hopper;
}

hopper_thread *hopper_self(void)
{
    return &hopper_block_of(emu_self->block)->threads[emu_self->warp->index * EMU_LANES + emu_self->lane];
}

hopper_warp *hopper_warp_of_self(void) { return &hopper_block_of(emu_self->block)->warps[emu_self->warp->index]; }

static const char *find_undone(const hopper_block *block)
{
    for (int32_t i = 0; i < block->num_warps; i++) {
        const hopper_warp *warp = &block->warps[i];
        if (!warp->products.groups.empty()) return "a block ended with wgmma under way";
        for (const auto &asked : warp->products.asked)
            if (!asked.empty()) return "a block ended with wgmma that was not committed";
        if (warp->num_products != block->warps[i / 4 * 4].num_products)
            return "the warps of a warpgroup did not ask for the same wgmma";
    }
    for (int32_t i = 0; i < block->num_warps * EMU_LANES; i++)
        if (block->threads[i].has_arrived) return "a thread arrived at the cluster's barrier, and never waited for it";
    return NULL;
}

const char *hopper_end_block(emu_block *block)
{
    hopper_block *own = (hopper_block *)block->hopper;
    if (!own) return NULL;
    const char *fault = find_undone(own);
    delete own;
    block->hopper = NULL;
    return fault;
}

void hopper_check_running(const emu_block *block, const char *what)
{
    if (block->num_exited == block->num_threads)
        emu_fail("%s is under way, and its block (%u, %u, %u) has ended", what, block->index.x, block->index.y,
                 block->index.z);
}
