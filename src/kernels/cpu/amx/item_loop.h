/* The work items of a call of attention, one task of the executor for each, first to the tiles and, where they cannot
 * serve it, to the level below. */
#ifndef FV_KERNELS_CPU_AMX_ITEM_LOOP_H
#define FV_KERNELS_CPU_AMX_ITEM_LOOP_H

#include "core/executor.h"
#include "kernels/cpu/amx/attend_few_tiles.h"
#include "kernels/cpu/amx/attend_tiles.h"
#include "kernels/cpu/amx/key_shares.h"
#include "kernels/cpu/amx/made_keys.h"
#include "kernels/cpu/kernels.h"

/* Rows of a query, in all, from which on tiles are used: vectors serve fewer faster (docs/notes/cpu-amx.md). */
#define FV_TILE_LEAST_ROWS 3
/* The same where keys do not lie in tiles, so that they are copied first, have scales of their own, or are integers. */
#define FV_TILE_LEAST_COPIED_ROWS 5
/* The same where numbers come in two pieces, so that four times as many products are to pay for. */
#define FV_TILE_LEAST_PIECED_ROWS 13

/* 1: done; 0: the base takes the item. */
typedef int32_t (*fv_tile_item_fn)(const fv_attend_params *params, const fv_work_item *item, void *scratch,
                                   fv_rescaling rescaling, fv_key_shares *shares);

typedef struct fv_item_loop {
    const fv_launch *launch;
    const fv_attend_params *params;
    const fv_attend_variant *base;
    fv_tile_item_fn attend;
    fv_rescaling rescaling;
    fv_key_shares *shares; /* set by fv_item_loop_run */
} fv_item_loop;

typedef struct fv_chain_loop {
    const fv_item_loop *loop;
    fv_head_chains chains;
} fv_chain_loop;

typedef struct fv_grid_loop {
    const fv_item_loop *loop;
    fv_attend_grid grid;
} fv_grid_loop;

/* An item without keys is as its siblings are, whose keys it may take (key_shares.h). */
static inline int32_t fv_item_loop_uses_cache(const fv_attend_job *job)
{
    return !job->params->dense.k || job->keys.first < fv_min_i32(job->keys.end, job->dense_from);
}

/* 1: the cache's keys and values lie in rows. */
static inline int32_t fv_item_loop_reads_rows(const fv_attend_job *job)
{
    return !fv_item_loop_uses_cache(job) || (job->cache.k_in_place && job->cache.v_in_place);
}

/* 1: those of 16 keys are a tile as they lie, but for their heads' size. */
static inline int32_t fv_item_loop_reads_tiles(const fv_attend_job *job)
{
    return !fv_item_loop_uses_cache(job) || job->params->cache.block_size % FV_TILE_ROWS == 0;
}

/* 1: rows of the cache are converted or copied before they are tiles, or scores have scales: tiles begin to pay later. */
static inline int32_t fv_item_loop_is_slow(const fv_attend_params *params)
{
    const fv_kv_view *cache = &params->cache;
    const int32_t has_piece_words = fv_dtype_bytes(cache->dtype) == 2 && fv_has_piece_rows(params);
    return cache->dtype == FV_DTYPE_I8 || fv_has_latent_parts(params) || cache->k_scales.data || cache->v_scales.data ||
           has_piece_words || fv_heads_are_padded(params->head_size, params->v_head_size);
}

/* Rows from which on tiles pay. */
static inline int32_t fv_item_loop_least_rows(const fv_attend_params *params, int32_t is_slow)
{
    if (fv_tile_pieces(params) > 1) return FV_TILE_LEAST_PIECED_ROWS;
    return is_slow ? FV_TILE_LEAST_COPIED_ROWS : FV_TILE_LEAST_ROWS;
}

/* The strategy for the item's rows; a query of num_rows rows in all. Few would not pay for copies of the keys, which
 * the base reads as they are; one or two leave most of a tile empty. */
static inline int32_t fv_item_loop_tiles(const fv_attend_job *job, int64_t num_rows, void *scratch,
                                         fv_rescaling rescaling, fv_key_shares *shares)
{
    const int32_t in_tiles = fv_item_loop_reads_tiles(job);
    const int32_t is_slow = !in_tiles || job->has_k_scales || job->has_v_scales || fv_item_loop_is_slow(job->params);
    if (num_rows < fv_item_loop_least_rows(job->params, is_slow)) return 0;
    const int32_t has_pieces = fv_has_piece_rows(job->params) && !job->params->dense.k;
    const int32_t reads_rows = fv_item_loop_reads_rows(job) || has_pieces;
    if (num_rows <= FV_DECODE_ROWS && !reads_rows) return 0;
    const int32_t copies_few = reads_rows && (in_tiles || job->num_rows <= FV_TILE_STRIP_ROWS / 2);
    if (copies_few && FV_ISA_SYMBOL(fv_few_tiles_serve)(job))
        return FV_ISA_SYMBOL(fv_attend_few_tiles)(job, scratch, rescaling, shares);
    return FV_ISA_SYMBOL(fv_attend_tiles)(job, scratch, rescaling, shares);
}

/* The params of a worker, with its scratch memory. */
static inline fv_attend_params fv_item_loop_params(const fv_item_loop *loop, int32_t worker)
{
    fv_attend_params one = *loop->params;
    one.scratch = (char *)one.scratch + (size_t)worker * one.scratch_bytes;
    return one;
}

/* The base takes the item, of one: it runs here, as worker 0. */
static inline void fv_item_loop_fall_back(const fv_item_loop *loop, const fv_work_item *item, int32_t worker)
{
    fv_attend_params one = fv_item_loop_params(loop, worker);
    one.items = item;
    one.num_items = 1;
    loop->base->launch(loop->launch, &one);
}

static inline void fv_item_loop_attend(const fv_item_loop *loop, const fv_work_item *item, int32_t worker)
{
    const fv_attend_params one = fv_item_loop_params(loop, worker);
    if (loop->attend(&one, item, one.scratch, loop->rescaling, loop->shares)) return;
    if (loop->shares->num_items > 0 && fv_key_shares_lose(loop->shares, item - loop->params->items)) return;
    fv_item_loop_fall_back(loop, item, worker);
}

/* Items whose siblings or who themselves lost their results. */
static inline void fv_item_loop_again_task(void *user, int64_t index, int32_t worker)
{
    const fv_item_loop *loop = user;
    if (fv_key_shares_lost(loop->shares, index)) fv_item_loop_fall_back(loop, &loop->params->items[index], worker);
}

static inline int32_t fv_item_loop_has_lost(const fv_item_loop *loop)
{
    for (int32_t i = 0; i < loop->shares->num_items; i++)
        if (fv_key_shares_lost(loop->shares, i)) return 1;
    return 0;
}

static inline void fv_item_loop_list_task(void *user, int64_t index, int32_t worker)
{
    const fv_item_loop *loop = user;
    fv_item_loop_attend(loop, &loop->params->items[index], worker);
}

static inline void fv_item_loop_chain_task(void *user, int64_t index, int32_t worker)
{
    fv_chain_loop *chained = user;
    fv_head_chains *chains = &chained->chains;
    if (index >= chains->first && index < chains->first + chains->num_items) {
        const fv_attend_params one = fv_item_loop_params(chained->loop, worker);
        index = fv_head_chains_take(chains, &fv_made_keys_of(&one)->chain);
    }
    fv_item_loop_attend(chained->loop, &chained->loop->params->items[index], worker);
}

static inline void fv_item_loop_grid_task(void *user, int64_t index, int32_t worker)
{
    const fv_grid_loop *of_grid = user;
    fv_work_item item;
    if (fv_attend_grid_item(&item, &of_grid->grid, index)) fv_item_loop_attend(of_grid->loop, &item, worker);
}

/* 1: all items of the call go to the base, which takes them at once. */
static inline int32_t fv_item_loop_is_of_base(const fv_attend_params *params)
{
    if (!FV_ISA_SYMBOL(fv_tiles_serve)(params)) return 1;
    const int32_t num_seqs = params->num_seqs_at ? *params->num_seqs_at : params->num_seqs;
    int32_t most_tokens = 0;
    for (int32_t seq = 0; seq < num_seqs; seq++)
        most_tokens = fv_max_i32(most_tokens, params->query_start[seq + 1] - params->query_start[seq]);
    for (int32_t i = 0; params->items && i < params->num_items; i++)
        most_tokens = fv_max_i32(most_tokens,
                                 params->items[i].num_tokens); /* of several queries, over a shared prefix */
    const int64_t most_rows = (int64_t)most_tokens * (params->num_heads / params->num_kv_heads);
    return most_rows < fv_item_loop_least_rows(params, fv_item_loop_is_slow(params));
}

/* Readies what workers keep of keys. */
static inline void fv_item_loop_begin(const fv_item_loop *loop)
{
    for (int32_t worker = 0; worker < loop->launch->executor->num_workers; worker++) {
        const fv_attend_params one = fv_item_loop_params(loop, worker);
        fv_made_keys_clear(fv_made_keys_of(&one), worker % loop->params->num_kv_heads);
    }
}

static inline fv_status fv_item_loop_run(fv_item_loop *loop)
{
    const fv_attend_params *params = loop->params;
    assert(params->scratch);
    if (fv_item_loop_is_of_base(params)) return loop->base->launch(loop->launch, params);
    const int32_t keeps_keys = fv_made_keys_bytes(params) > 0;
    if (keeps_keys) fv_item_loop_begin(loop);
    fv_key_shares shares;
    fv_key_shares_find(&shares, params, loop->launch->executor->num_workers);
    loop->shares = &shares;
    if (params->items && keeps_keys) {
        fv_chain_loop chained = {.loop = loop};
        fv_head_chains_find(&chained.chains, params);
        fv_executor_run(loop->launch->executor, params->num_items, fv_item_loop_chain_task, &chained);
    } else if (params->items) {
        fv_executor_run(loop->launch->executor, params->num_items, fv_item_loop_list_task, loop);
    } else {
        fv_grid_loop of_grid = {loop, fv_attend_grid_of(params, loop->launch->executor->num_workers)};
        fv_executor_run(loop->launch->executor, of_grid.grid.num_cells, fv_item_loop_grid_task, &of_grid);
    }
    if (fv_item_loop_has_lost(loop))
        fv_executor_run(loop->launch->executor, params->num_items, fv_item_loop_again_task, loop);
    return FV_OK;
}

/* Scratch of a worker that serves the tiles and the base. */
static inline size_t fv_item_loop_scratch(const fv_attend_params *params, const fv_attend_variant *base)
{
    const size_t own = FV_ISA_SYMBOL(fv_tiles_scratch)(params), of_base = base->scratch_bytes(params);
    const size_t passing = own > of_base ? own : of_base;
    return (size_t)fv_round_up((int64_t)(passing + fv_made_keys_bytes(params)), FV_CACHE_LINE);
}

/* Of a table: the base refuses nothing that it does not serve; emulated, tiles are alone. */
static inline const char *fv_item_loop_why_not(const fv_problem *problem, const fv_attend_variant *base)
{
#if defined(FV_TILES_EMULATED)
    const char *reason = FV_ISA_SYMBOL(fv_tiles_why_not)(problem);
    if (reason) return reason;
#endif
    return base->why_not(problem);
}

#endif
