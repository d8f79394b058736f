/* Keys and values as tiles, kept by a worker from one item to the next: Q blocks of one sequence and KV head see the
 * same keys, and to make tiles of them takes a fifth of prefill's time where each Q block makes its own.
 *
 * Blocks of keys have slots. Where there are fewer slots than blocks, the first blocks keep theirs and the others share
 * the last two in turn, so an item that makes a block beside the one before it needs no more than these two.
 *
 * Items that a worker takes one after the other should be of the same KV head: fv_head_chains deals them out so. */
#ifndef FV_KERNELS_CPU_AMX_MADE_KEYS_H
#define FV_KERNELS_CPU_AMX_MADE_KEYS_H

#include <stdatomic.h>

#include "kernels/cpu/amx/tile_item.h"

enum {
    FV_MADE_MAX_SIZE = 256, /* of a head */
    FV_MADE_MAX_BLOCKS = 32,
    FV_MADE_BYTES = 1 << 21, /* of a worker, at most */
    FV_MADE_MAX_CHAINS = 256,
};

/* Keys [first, end) of the block; the rest of their steps are zeros. They are numbers, and far from overflow. */
typedef struct fv_made_block {
    int32_t is_made, index;
    int32_t first, end;
} fv_made_block;

/* A worker's; at the end of its scratch memory, which all else that runs there leaves alone. Valid for one launch. */
typedef struct fv_made_keys {
    int32_t seq, table_row, kv_head; /* seq -1: of none */
    int32_t chain;                   /* on which the worker is */
    fv_made_block blocks[FV_MADE_MAX_BLOCKS];
} fv_made_keys;

/* --- memory ------------------------------------------------------------------------------------------------------ */

static inline size_t fv_made_block_bytes(const fv_attend_params *params)
{
    return (size_t)FV_TILE_MANY_KEYS * (size_t)(fv_tile_size(params->head_size) + fv_tile_size(params->v_head_size)) *
           (size_t)fv_tile_pieces(params) * FV_BF16_BYTES;
}

static inline int32_t fv_made_num_blocks(const fv_attend_params *params)
{
    const int32_t most = fv_min_i32(FV_MADE_MAX_BLOCKS, (int32_t)(FV_MADE_BYTES / fv_made_block_bytes(params)));
    return fv_max_i32(2, fv_min_i32(most, (int32_t)fv_ceil_div(params->max_seq_len, FV_TILE_MANY_KEYS)));
}

/* 0: no item of the call has rows enough, or tiles do not serve its queries. */
static inline size_t fv_made_keys_bytes(const fv_attend_params *params)
{
    if (params->q_dtype != FV_DTYPE_BF16 && params->q_dtype != FV_DTYPE_F16) return 0;
    const int64_t num_rows = (int64_t)params->block_q * (params->num_heads / params->num_kv_heads);
    if (fv_ceil_div(num_rows, FV_TILE_STRIP_ROWS) < fv_tile_many_strips(params)) return 0;
    if (params->head_size > FV_MADE_MAX_SIZE || params->v_head_size > FV_MADE_MAX_SIZE) return 0;
    const size_t head = (size_t)fv_round_up((int64_t)sizeof(fv_made_keys), FV_CACHE_LINE) + FV_TILE_PAGE;
    return head + (size_t)fv_made_num_blocks(params) * fv_made_block_bytes(params);
}

/* Those of a worker whose scratch memory is params->scratch. */
static inline fv_made_keys *fv_made_keys_of(const fv_attend_params *params)
{
    return (void *)((char *)params->scratch + params->scratch_bytes - fv_made_keys_bytes(params));
}

/* Of a launch that has made none. */
static inline void fv_made_keys_clear(fv_made_keys *made, int32_t chain)
{
    made->seq = -1;
    made->chain = chain;
}

/* --- blocks ------------------------------------------------------------------------------------------------------ */

/* Readies them for an item: what another KV head or sequence has left is none of its. */
static inline void fv_made_keys_begin(fv_made_keys *made, const fv_work_item *item, int32_t kv_head)
{
    if (made->seq == item->seq && made->table_row == item->table_row && made->kv_head == kv_head) return;
    for (int32_t i = 0; i < FV_MADE_MAX_BLOCKS; i++) made->blocks[i].is_made = 0;
    made->seq = item->seq;
    made->table_row = item->table_row;
    made->kv_head = kv_head;
}

/* Do they serve block `index`, keys [first, end) of it? */
static inline int32_t fv_made_block_serves(const fv_made_block *made, int32_t index, int32_t first, int32_t end)
{
    return made->is_made && made->index == index && made->first <= first && made->end >= end;
}

static inline int32_t fv_made_slot(const fv_attend_params *params, int32_t index)
{
    const int32_t num_blocks = fv_made_num_blocks(params);
    return index < num_blocks - 2 ? index : num_blocks - 2 + index % 2;
}

/* K of a slot, on a page as queries and scores are (pair_step.h); its V follows. */
static inline char *fv_made_tiles(fv_made_keys *made, const fv_attend_params *params, int32_t slot)
{
    const uintptr_t end = (uintptr_t)made + sizeof(*made);
    return (char *)((end + FV_TILE_PAGE - 1) / FV_TILE_PAGE * FV_TILE_PAGE) +
           (size_t)slot * fv_made_block_bytes(params);
}

/* Aims at a slot's tiles. */
static inline void fv_made_tiles_aim(fv_tile_item *item, char *tiles, int32_t num_sites)
{
    const int64_t bytes = (int64_t)fv_made_block_bytes(item->job->params);
    fv_prefetch_aim_at_bytes(&item->ahead, tiles, bytes, FV_AHEAD_BYTES);
    item->ahead_portions = (int32_t)fv_ceil_div(bytes, (int64_t)num_sites * FV_AHEAD_BYTES);
}

/* --- items in chains --------------------------------------------------------------------------------------------- */

/* A stretch of a list in which items of one KV head each follow each other, head after head. Those of a head are a
 * chain, which a worker goes on with until it ends; then it joins the one of which most is left. */
typedef struct fv_head_chains {
    int32_t first, num_items, num_chains;
    atomic_int next[FV_MADE_MAX_CHAINS];
} fv_head_chains;

/* The longest stretch; none: num_items is 0. */
static inline void fv_head_chains_find(fv_head_chains *chains, const fv_attend_params *params)
{
    chains->first = chains->num_items = 0;
    chains->num_chains = params->num_kv_heads;
    if (params->num_kv_heads > FV_MADE_MAX_CHAINS) return;
    for (int32_t first = 0, end; first < params->num_items; first = end) {
        end = first;
        while (end < params->num_items && params->items[end].num_kv_heads == 1 &&
               params->items[end].first_kv_head == (end - first) % params->num_kv_heads)
            end++;
        if (end - first > chains->num_items) {
            chains->first = first;
            chains->num_items = end - first;
        }
        end = fv_max_i32(end, first + 1);
    }
    for (int32_t i = 0; i < chains->num_chains; i++) atomic_init(&chains->next[i], 0);
}

static inline int32_t fv_head_chain_length(const fv_head_chains *chains, int32_t chain)
{
    return (int32_t)fv_ceil_div(fv_max_i32(0, chains->num_items - chain), chains->num_chains);
}

static inline int32_t fv_head_chains_longest(fv_head_chains *chains)
{
    int32_t longest = 0, most = 0;
    for (int32_t i = 0; i < chains->num_chains; i++) {
        const int32_t next = atomic_load_explicit(&chains->next[i], memory_order_relaxed);
        const int32_t left = fv_head_chain_length(chains, i) - next;
        if (left > most) {
            longest = i;
            most = left;
        }
    }
    return longest;
}

/* The number in the list of the item that a worker takes next, on chain *chain. As many calls as there are items get
 * one each. */
static inline int32_t fv_head_chains_take(fv_head_chains *chains, int32_t *chain)
{
    for (;; *chain = fv_head_chains_longest(chains)) {
        const int32_t at = atomic_fetch_add_explicit(&chains->next[*chain], 1, memory_order_relaxed);
        if (at < fv_head_chain_length(chains, *chain)) return chains->first + at * chains->num_chains + *chain;
    }
}

#endif
