/* The blocks of a paged KV cache: which are free. Block 0 is the null block and never handed out.
 *
 *   block   0     1  2  3  ...  num_blocks
 *           null  |<- handed out ->|
 *
 * Ids only; the memory belongs to the cache. Not for several threads at once. */
#ifndef FV_ENGINE_BLOCK_POOL_H
#define FV_ENGINE_BLOCK_POOL_H

#include <stdbool.h>

#include "core/error.h"

typedef struct fv_block_pool {
    int32_t num_blocks; /* that can be handed out; the cache has one more, the null block */
    int32_t num_free;
    int32_t max_used;     /* the most that were out at one time */
    int32_t num_returned; /* of the free ones */
    int32_t *returned;    /* [num_blocks]: a stack, the block released last is the next one out */
    bool *is_used;        /* [num_blocks + 1], catches a block released twice */
} fv_block_pool;

/* A pool of blocks 1 to num_blocks, at least 1. */
fv_status fv_block_pool_init(fv_block_pool *pool, int32_t num_blocks);
void fv_block_pool_deinit(fv_block_pool *pool); /* takes a zeroed pool */

/* Takes `count` blocks, all or none: false, and `blocks` untouched, when fewer are free. */
bool fv_block_pool_acquire(int32_t *blocks, fv_block_pool *pool, int32_t count);

/* Gives back `count` blocks that were acquired. */
void fv_block_pool_release(fv_block_pool *pool, const int32_t *blocks, int32_t count);

#endif
