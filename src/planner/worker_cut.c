#include "planner/worker_cut.h"

#include <math.h>

#include "planner/query_block.h"

#define MAX_BLOCKS 512   /* Q blocks that are weighed; more of them need not be cut */
#define MAX_WORKERS 256  /* that are weighed */
#define WAIT_PARTS 12    /* workers differ: the last item counts by this part of the largest again */
#define DEALT_PARTS 96   /* where those that end first take keys of the others: of one query, which are siblings, */
#define LEAST_SIBLINGS 4 /* and so many for each where there are several queries */
#define HALVING_PARTS 24 /* half a Q block takes longer by this part: its keys are brought in for half of the rows */

/* An item of a part of the KV heads takes longer by this part where the heads of a token lie side by side (measured: 1.05 to 2
 * times): it reads a part of each row of the cache, and asks for it bit by bit. */
#define STRIDED_PARTS 4

/* Of one partial row, in rows x keys, from its bytes, written and read: with few rows the keys are bytes as well, with
 * many they are products, which differ by ten times between AVX2 (about 12) and AMX (about 140). */
#define FEW_MERGE_COST 16
#define MANY_MERGE_COST 96

__extension__ typedef __int128 wide;

/* A Q block: `count` items alike where it is not cut. */
typedef struct worker_block {
    int64_t cost;  /* of an item */
    int64_t merge; /* what a segment costs besides */
    int32_t count;
    int32_t num_heads; /* KV heads of an item */
    int32_t is_few;    /* 1: all of them, of few rows */
    int32_t num_tokens;
    int32_t span; /* keys */
    int32_t most_segments;
    int32_t is_dealt;   /* 1: its items deal out their keys */
    int32_t is_strided; /* 1: its items do where they have a part of the KV heads */
} worker_block;

/* 1: the KV heads of a token lie side by side in the cache. */
static int32_t has_rows_of_heads(const fv_problem *problem)
{
    return problem->kv_layout != FV_KV_LAYOUT_X_PACKED && problem->kv_layout != FV_KV_LAYOUT_SHUFFLED &&
           problem->kv_layout != FV_KV_LAYOUT_PACKED_HND;
}

/* What workers have to do. */
typedef struct worker_load {
    int64_t busy[MAX_WORKERS]; /* until then, a heap */
    int64_t largest;           /* cost of an item of the kind that comes last */
    int64_t num_items;
    int32_t all_dealt;
} worker_load;

static worker_block weigh_block(const fv_split_rule *rule, const fv_query_block *block)
{
    const int32_t num_kv_heads = rule->problem->mha.num_kv_heads;
    const int32_t rows = block->num_tokens * fv_group_of(rule->problem);
    const int32_t is_few = fv_takes_several_heads(rule, block->num_tokens), count = is_few ? 1 : num_kv_heads;
    const int32_t span = fv_max_i32(1, block->end_key - block->first_key);
    return (worker_block){
        .cost = fv_query_block_cost(rule, block) / count,
        .merge = (int64_t)(is_few ? FEW_MERGE_COST * fv_few_row_cost(rule) : MANY_MERGE_COST) * rows *
                 (num_kv_heads / count),
        .count = count,
        .num_heads = num_kv_heads / count,
        .is_few = is_few,
        .num_tokens = block->num_tokens,
        .span = span,
        .most_segments = rule->path == FV_PATH_2D ? 1 : fv_max_i32(1, span / FV_MIN_SEGMENT_KEYS),
        .is_dealt = is_few && rule->deals_keys,
        .is_strided = is_few && has_rows_of_heads(rule->problem),
    };
}

/* The pass's Q blocks in the order of the work list; 0: there are more than MAX_BLOCKS. */
static int32_t list_blocks(worker_block *blocks, const fv_split_rule *rule, const fv_step *step, const fv_pass *pass)
{
    int32_t num_blocks = 0;
    for (int32_t i = 0; i < pass->num_runs; i++) {
        const fv_query_run *run = &pass->runs[i];
        const int32_t is_short = fv_query_is_short(rule->problem, fv_step_query_len(step, run->seq));
        const int32_t block_q = is_short ? fv_max_i32(1, run->num_tokens) : rule->block_q;
        for (int64_t block = fv_ceil_div(run->num_tokens, block_q) - 1; block >= 0; block--) {
            if (num_blocks == MAX_BLOCKS) return 0;
            const fv_query_block at = fv_query_block_at(rule, step, run, run->first_token + (int32_t)block * block_q);
            blocks[num_blocks++] = weigh_block(rule, &at);
        }
    }
    return num_blocks;
}

/* The worker that is free first takes an item: busy[0], the least of a heap. */
static void take_item(int64_t *busy, int32_t num_workers, int64_t cost)
{
    const int64_t until = busy[0] + cost;
    int32_t at = 0;
    for (int32_t child; (child = 2 * at + 1) < num_workers; at = child) {
        if (child + 1 < num_workers && busy[child + 1] < busy[child]) child++;
        if (busy[child] >= until) break;
        busy[at] = busy[child];
    }
    busy[at] = until;
}

static int64_t segments_of(const worker_block *block, int64_t key_share)
{
    return fv_min_i64(fv_max_i64(1, fv_ceil_div(block->cost, key_share)), block->most_segments);
}

static int64_t segment_keys_of(const fv_split_rule *rule, const worker_block *block, int64_t key_share)
{
    return fv_round_up(fv_ceil_div(block->span, segments_of(block, key_share)), rule->tile_keys);
}

/* The least share of keys, `share` or more, of whose pieces the slots have room for the partial results; `share` where no
 * block would be cut then: the first ones are, as long as there is room. */
static int64_t key_share_of(const fv_split_rule *rule, const worker_block *blocks, int32_t num_blocks, int64_t share)
{
    for (int64_t key_share = share;; key_share += key_share / 4 + 1) {
        int64_t num_slots = 0;
        for (int32_t i = 0; i < num_blocks; i++) {
            const int64_t segments = fv_ceil_div(blocks[i].span, segment_keys_of(rule, &blocks[i], key_share));
            if (segments > 1) num_slots += segments * blocks[i].num_tokens;
        }
        if (num_slots == 0) return share;
        if (rule->max_slots == 0 || num_slots <= rule->max_slots) return key_share;
    }
}

/* The items of a block, cut for the shares as the work list does. */
static void take_block(worker_load *load, const fv_split_rule *rule, const worker_block *block, int64_t share,
                       int64_t key_share)
{
    const int64_t pieces = fv_max_i64(1, fv_ceil_div(block->cost, share));
    const int64_t keys = segment_keys_of(rule, block, key_share);
    const int64_t head_run = fv_max_i64(1, block->num_heads / fv_ceil_div(pieces, segments_of(block, key_share)));
    const int64_t head_runs = fv_ceil_div(block->num_heads, head_run), num_items = head_runs * block->count;
    const int64_t merge = keys < block->span ? block->merge : 0;
    load->all_dealt &= block->is_dealt;
    for (int64_t key = 0; key < block->span; key += keys) {
        const wide product = (wide)block->cost * fv_min_i64(keys, block->span - key);
        const int64_t whole = (int64_t)(product / block->span);
        const int64_t cost = whole + (block->is_strided && head_runs > 1 ? whole / STRIDED_PARTS : 0);
        const int64_t item = (cost + merge) / head_runs;
        for (int64_t n = 0; n < num_items; n++) take_item(load->busy, rule->num_workers, item);
        load->largest = fv_max_i64(load->largest, item);
        load->num_items += num_items;
    }
}

/* 1: from block `at` on come items of another kind, few rows behind many or the other way round, and some for each worker: what is
 * before them nobody waits for. */
static int32_t begins_kind(const fv_split_rule *rule, const worker_block *blocks, int32_t num_blocks, int32_t at)
{
    if (at == 0 || blocks[at].is_few == blocks[at - 1].is_few) return 0;
    int64_t num_items = 0;
    for (int32_t i = at; i < num_blocks && blocks[i].is_few == blocks[at].is_few; i++) num_items += blocks[i].count;
    return num_items >= rule->num_workers;
}

/* When the last worker ends. */
static int64_t time_of_share(const fv_split_rule *rule, const worker_block *blocks, int32_t num_blocks, int64_t share,
                             int64_t key_share)
{
    worker_load load = {.all_dealt = 1};
    int64_t last = 0;
    for (int32_t i = 0; i < num_blocks; i++) {
        if (begins_kind(rule, blocks, num_blocks, i)) load.largest = 0;
        take_block(&load, rule, &blocks[i], share, key_share);
    }
    for (int32_t i = 0; i < rule->num_workers; i++) last = fv_max_i64(last, load.busy[i]);
    const int32_t is_dealt = load.all_dealt && load.num_items <= rule->num_workers &&
                             (num_blocks == 1 || load.num_items >= LEAST_SIBLINGS * num_blocks);
    return last + load.largest / (is_dealt ? DEALT_PARTS : WAIT_PARTS);
}

/* A rule that says itself how many pieces a Q block has. */
static int32_t is_fixed(const fv_split_rule *rule)
{
    return rule->path == FV_PATH_3D || rule->batch_invariant || rule->segment_keys || rule->num_segments;
}

static int64_t share_of(const fv_split_rule *rule, int64_t total, int32_t shares)
{
    return fv_max_i64(1, fv_ceil_div(total, (int64_t)rule->num_workers * shares));
}

/* The shares with which the Q blocks take the least time. */
static fv_worker_cut best_shares(int64_t *least_time, const fv_split_rule *rule, const worker_block *blocks,
                                 int32_t num_blocks, int64_t total)
{
    static const int32_t shares[] = {1, 2, 3, 4, 6, FV_SHARES_PER_WORKER};
    fv_worker_cut best = {.block_q = rule->block_q};
    *least_time = INT64_MAX;
    for (int32_t i = rule->path == FV_PATH_2D ? FV_ARRAY_LEN(shares) - 1 : 0; i < FV_ARRAY_LEN(shares); i++) {
        const int64_t share = share_of(rule, total, shares[i]);
        const int64_t key_share = key_share_of(rule, blocks, num_blocks, share);
        const int64_t time = time_of_share(rule, blocks, num_blocks, share, key_share);
        if (time >= *least_time) continue;
        *least_time = time;
        best.share = share;
        best.key_share = key_share;
    }
    return best;
}

fv_worker_cut fv_worker_cut_choose(const fv_split_rule *rule, const fv_step *step, const fv_pass *pass, int64_t total)
{
    const int64_t least_share = share_of(rule, total, FV_SHARES_PER_WORKER);
    fv_worker_cut best = {rule->block_q, least_share, least_share};
    if (is_fixed(rule) || pass->num_groups > 0 || rule->num_workers > MAX_WORKERS) return best;
    worker_block blocks[MAX_BLOCKS];
    fv_split_rule halved = *rule;
    double least = INFINITY;
    for (int32_t halvings = 0, last = 0; (halved.block_q = rule->block_q >> halvings) >= fv_least_block_tokens(rule);
         halvings++) {
        const int32_t num_blocks = list_blocks(blocks, &halved, step, pass);
        if (num_blocks == last) break; /* all are whole queries, or too many */
        last = num_blocks;
        int64_t largest = 0, all = 0, time;
        for (int32_t i = 0; i < num_blocks; i++) {
            largest = fv_max_i64(largest, blocks[i].cost);
            all += blocks[i].cost * blocks[i].count;
        }
        if (halvings == 0 && largest <= best.share) break; /* nothing is cut */
        const fv_worker_cut cut = best_shares(&time, &halved, blocks, num_blocks, total);
        /* Of its own cost, in which each row of a block counts the keys of the last: no time for whoever sees fewer. */
        const double relative = (double)time / (double)all * (1 + (double)halvings / HALVING_PARTS);
        if (relative >= least) continue;
        least = relative;
        best = cut;
    }
    return best;
}
