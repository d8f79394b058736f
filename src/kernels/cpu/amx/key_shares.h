/* Keys that workers deal out while they attend: where one query's keys are cut into items, one for each worker, the item
 * of a worker that others slow down would end last. So an item that has no keys left takes some of those that a sibling
 * has not come to, from their end: softmax's partial results are of any set of keys.
 *
 *   item 0  |################|      <- next                 steps of 32 keys
 *   item 1  |########........|      <- next, end ->
 *                        |##|       item 0 takes half of what is left
 *
 * Which keys a partial result is of, and so the last bits of the sum of all, depend on who was faster: batch-invariant
 * plans keep to their items. */
#ifndef FV_KERNELS_CPU_AMX_KEY_SHARES_H
#define FV_KERNELS_CPU_AMX_KEY_SHARES_H

#include <stdatomic.h>

#include "kernels/cpu/amx/tile_item.h"

enum {
    FV_KEY_SHARES = 64,      /* items at most */
    FV_KEY_SHARES_LEAST = 4, /* steps that are worth taking from another */
};

/* Steps [first, end) that nobody has taken, as first + (end << 32). */
typedef struct fv_key_share {
    _Atomic uint64_t left;
    int32_t first_item, end_item; /* the siblings */
    atomic_int is_lost;           /* of the first sibling: 1: results of some are not to be used, all are done again */
} fv_key_share;

typedef struct fv_key_shares {
    int32_t num_items; /* 0: items keep their keys */
    fv_key_share of[FV_KEY_SHARES];
} fv_key_shares;

typedef struct fv_step_run {
    int32_t first, end;
} fv_step_run;

static inline fv_step_run fv_key_share_left(fv_key_share *share, uint64_t *left)
{
    *left = atomic_load_explicit(&share->left, memory_order_relaxed);
    return (fv_step_run){(int32_t)(*left & UINT32_MAX), (int32_t)(*left >> 32)};
}

static inline uint64_t fv_key_share_of(int32_t first, int32_t end)
{
    return (uint64_t)(uint32_t)first | (uint64_t)(uint32_t)end << 32;
}

/* Do the items' keys follow each other, for the same rows? */
static inline int32_t fv_key_shares_follow(const fv_work_item *item, const fv_work_item *next)
{
    return next->seq == item->seq && next->table_row == item->table_row && next->first_token == item->first_token &&
           next->num_tokens == item->num_tokens && next->first_kv_head == item->first_kv_head &&
           next->num_kv_heads == item->num_kv_heads && next->first_key == item->end_key &&
           next->first_key % FV_STEP_KEYS == 0 && next->partial >= 0 && item->partial >= 0;
}

/* Of a launch. Items that wait for a worker balance by themselves, and would find too few keys left to be worth their
 * beginning: keys are dealt out where each item has a worker. */
static inline void fv_key_shares_find(fv_key_shares *shares, const fv_attend_params *params, int32_t num_workers)
{
    shares->num_items = 0;
    if (!params->items || params->num_items > fv_min_i32(num_workers, FV_KEY_SHARES)) return;
    if (params->batch_invariant) return;
    if (params->window || params->context_parallel.world > 1 || params->dense.k) return;
    shares->num_items = params->num_items;
    for (int32_t first = 0, end; first < params->num_items; first = end) {
        end = first + 1;
        while (end < params->num_items && fv_key_shares_follow(&params->items[end - 1], &params->items[end])) end++;
        for (int32_t i = first; i < end; i++) {
            const fv_work_item *item = &params->items[i];
            const int32_t end_key = fv_max_i32(item->first_key, fv_min_i32(item->end_key, params->seq_lens[item->seq]));
            shares->of[i].first_item = first;
            shares->of[i].end_item = end;
            atomic_init(&shares->of[i].is_lost, 0);
            atomic_init(&shares->of[i].left,
                        fv_key_share_of(item->first_key / FV_STEP_KEYS, (int32_t)fv_ceil_div(end_key, FV_STEP_KEYS)));
        }
    }
}

static inline int32_t fv_key_share_index(const fv_attend_job *job) { return (int32_t)(job->item - job->params->items); }

/* Has the job's item siblings? */
static inline int32_t fv_key_shares_has(const fv_key_shares *shares, const fv_attend_job *job)
{
    if (shares->num_items == 0) return 0;
    const fv_key_share *share = &shares->of[fv_key_share_index(job)];
    return share->end_item - share->first_item > 1;
}

/* The result of item `index` is not to be used, nor then those of its siblings: who has which keys is not known any more.
 * 0: it has none. */
static inline int32_t fv_key_shares_lose(fv_key_shares *shares, int64_t index)
{
    const fv_key_share *share = &shares->of[index];
    if (share->end_item - share->first_item == 1) return 0;
    atomic_store_explicit(&shares->of[share->first_item].is_lost, 1, memory_order_relaxed);
    return 1;
}

/* After the launch's items: is item `index` to be done again, with its own keys? */
static inline int32_t fv_key_shares_lost(fv_key_shares *shares, int64_t index)
{
    return atomic_load_explicit(&shares->of[shares->of[index].first_item].is_lost, memory_order_relaxed);
}

/* The job with the keys of all siblings. */
static inline fv_attend_job fv_key_shares_whole(const fv_key_shares *shares, const fv_attend_job *job)
{
    const fv_attend_params *params = job->params;
    const fv_work_item *item = job->item;
    const fv_key_share *share = &shares->of[fv_key_share_index(job)];
    fv_attend_job whole = *job;
    whole.keys = fv_block_keys(&params->context_parallel, job->seq_len, job->context, item->first_token,
                               item->num_tokens, job->causal, params->window);
    whole.keys.first = fv_max_i32(whole.keys.first, params->items[share->first_item].first_key);
    whole.keys.end = fv_min_i32(whole.keys.end, params->items[share->end_item - 1].end_key);
    return whole;
}

/* The sibling that has the most steps left. */
static inline fv_key_share *fv_key_shares_longest(fv_key_shares *shares, int32_t index)
{
    fv_key_share *longest = NULL;
    int32_t most = FV_KEY_SHARES_LEAST - 1;
    for (int32_t i = shares->of[index].first_item; i < shares->of[index].end_item; i++) {
        uint64_t left;
        const fv_step_run run = fv_key_share_left(&shares->of[i], &left);
        if (run.end - run.first <= most) continue;
        most = run.end - run.first;
        longest = &shares->of[i];
    }
    return longest;
}

/* The steps that item `index` takes next, up to most_steps, its own first; without is_taken what it would take now.
 * Empty: none is left. */
static inline fv_step_run fv_key_shares_next(fv_key_shares *shares, int32_t index, int32_t most_steps, int32_t is_taken)
{
    for (;;) {
        uint64_t left;
        fv_key_share *share = &shares->of[index];
        fv_step_run run = fv_key_share_left(share, &left), taken = run, rest = run;
        if (run.first < run.end) {
            taken.end = rest.first = fv_min_i32(run.end, run.first + most_steps);
        } else {
            share = fv_key_shares_longest(shares, index);
            if (!share) return (fv_step_run){0, 0};
            taken = rest = run = fv_key_share_left(share, &left);
            if (run.end - run.first < FV_KEY_SHARES_LEAST) continue; /* since now */
            const int32_t num = fv_min_i32(most_steps, (run.end - run.first + 1) / 2);
            taken.first = rest.end = run.end - num;
        }
        if (!is_taken ||
            atomic_compare_exchange_strong_explicit(&share->left, &left, fv_key_share_of(rest.first, rest.end),
                                                    memory_order_relaxed, memory_order_relaxed))
            return taken;
    }
}

#endif
