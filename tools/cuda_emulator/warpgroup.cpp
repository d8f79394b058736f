/* wgmma of a warp's share, and what else a warp does together on Hopper alone: stmatrix and elect. A warp's products read
 * shared memory when it is its turn, not the warpgroup's: the warps of one are not in step. */
#include "cuda_emulator/warpgroup.h"

#include <string.h>

#include "cuda_emulator/hopper_block.h"
#include "kernels/cuda/hopper/mbarrier.cuh"

namespace
{

void check(const char *fault)
{
    if (fault) emu_fail("%s", fault);
}

void commit_products(void *const *, uint32_t)
{
    wgmma_queue *queue = &hopper_warp_of_self()->products;
    emu_block *block = emu_self->block;
    const int32_t warp = emu_self->warp->index % 4;
    check(wgmma_queue_commit(queue));
    emu_do_later(queue, [queue, block, warp] {
        hopper_check_running(block, "wgmma");
        const matrix_memory memory = {block->shared, EMU_SHARED_BASE, EMU_SHARED_BASE + emu_shared_bytes()};
        check(wgmma_queue_run(queue, &memory, warp));
    });
}

} // namespace

void warpgroup_fence(void) { wgmma_queue_fence(&hopper_warp_of_self()->products, emu_self->lane); }

void warpgroup_multiply(const wgmma_product *product)
{
    hopper_warp *warp = hopper_warp_of_self();
    check(wgmma_queue_ask(&warp->products, emu_self->lane, product));
    if (emu_self->lane == 0) warp->num_products++;
}

void warpgroup_commit(void) { emu_meet(~0u, commit_products, NULL, "wgmma.commit_group"); }

void warpgroup_wait(size_t most) { emu_finish(&hopper_warp_of_self()->products, most); }

/* --- stmatrix -------------------------------------------------------------------------------------------------- */

namespace
{

typedef struct stored_row {
    uint16_t *to;
    uint32_t r[4];
} stored_row;

template <bool IS_TRANSPOSED> void store_matrices(void *const *lanes, uint32_t)
{
    for (int32_t lane = 0; lane < EMU_LANES; lane++) {
        const stored_row *own = (const stored_row *)lanes[lane];
        for (int32_t i = 0; i < 8; i++) { /* elements of four matrices */
            const int32_t matrix = i / 2, row = lane / 4, column = lane % 4 * 2 + i % 2;
            const stored_row *to = (const stored_row *)lanes[matrix * 8 + (IS_TRANSPOSED ? column : row)];
            to->to[IS_TRANSPOSED ? row : column] = (uint16_t)(own->r[matrix] >> i % 2 * 16);
        }
    }
}

} // namespace

void ptx_stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
    stored_row row = {(uint16_t *)emu_shared_at(address, 16, 16), {r0, r1, r2, r3}};
    emu_meet(~0u, store_matrices<false>, &row, "stmatrix");
}

void ptx_stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
    stored_row row = {(uint16_t *)emu_shared_at(address, 16, 16), {r0, r1, r2, r3}};
    emu_meet(~0u, store_matrices<true>, &row, "stmatrix.trans");
}

/* --- elect ----------------------------------------------------------------------------------------------------- */

/* Any lane, but of a warp always the same. */
static void elect(void *const *lanes, uint32_t)
{
    hopper_warp *warp = hopper_warp_of_self();
    if (warp->elected < 0) warp->elected = (int32_t)(emu_random() % EMU_LANES);
    for (int32_t lane = 0; lane < EMU_LANES; lane++) *(bool *)lanes[lane] = lane == warp->elected;
}

bool ptx_elect(void)
{
    bool is_elected = false;
    emu_meet(~0u, elect, &is_elected, "elect");
    return is_elected;
}
