/* A stack of the ids that were given back. Those that were never out are the last ones, so that a pool touches no more memory
 * than is used. */
#include "engine/block_pool.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"

fv_status fv_block_pool_init(fv_block_pool *pool, int32_t num_blocks)
{
    memset(pool, 0, sizeof(*pool));
    if (num_blocks < 1) return fv_fail(FV_ERR_INVALID, "num_blocks is %d; accepted: 1 or more", num_blocks);
    pool->returned = malloc((size_t)num_blocks * sizeof(*pool->returned));
    pool->is_used = calloc((size_t)num_blocks + 1, sizeof(*pool->is_used));
    if (!pool->returned || !pool->is_used) {
        fv_block_pool_deinit(pool);
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for a pool of %d blocks", num_blocks);
    }
    pool->num_blocks = num_blocks;
    pool->num_free = num_blocks;
    return FV_OK;
}

void fv_block_pool_deinit(fv_block_pool *pool)
{
    free(pool->returned);
    free(pool->is_used);
    memset(pool, 0, sizeof(*pool));
}

bool fv_block_pool_acquire(int32_t *blocks, fv_block_pool *pool, int32_t count)
{
    if (count > pool->num_free) return false;
    for (int32_t i = 0; i < count; i++) {
        const int32_t first_new = pool->num_blocks - pool->num_free + 1; /* where none are on the stack */
        blocks[i] = pool->num_returned > 0 ? pool->returned[--pool->num_returned] : first_new;
        pool->num_free--;
        pool->is_used[blocks[i]] = true;
    }
    pool->max_used = fv_max_i32(pool->max_used, pool->num_blocks - pool->num_free);
    return true;
}

void fv_block_pool_release(fv_block_pool *pool, const int32_t *blocks, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        assert(blocks[i] >= 1 && blocks[i] <= pool->num_blocks && pool->is_used[blocks[i]]);
        pool->is_used[blocks[i]] = false;
        pool->returned[pool->num_returned++] = blocks[i];
    }
    pool->num_free += count;
}
