/* Cutting a pass into work items.
 *
 * A Q block is cut where it costs more than a share (planner/worker_cut.h), into as many pieces as it has shares, so
 * that no worker waits long for the last one. Pieces are runs of keys first, as long as those are worth a reduction,
 * then runs of KV heads, which need none.
 *
 * For a device with lanes see planner/lane_cut.h. */
#include "planner/work_list.h"

#include <assert.h>

#include "core/error.h"
#include "planner/lane_cut.h"
#include "planner/lane_fill.h"
#include "planner/lane_meeting.h"
#include "planner/query_block.h"
#include "planner/worker_cut.h"

#define FORCED_SEGMENTS 16     /* of the forced 3D path, as in the Triton attention paper */
#define INVARIANT_SEGMENTS 8   /* at most, of a sequence at the maximal length */
#define REDUCE_TOKENS 4        /* of a reduction of a prefix group, or of a long query */
#define SIDE_BY_SIDE_KEYS 4096 /* of a lane, at least, where it takes several heads at once */

static int64_t total_cost(const fv_split_rule *rule, const fv_step *step, const fv_pass *pass)
{
    int64_t total = 0, cost = 0;
    for (int32_t i = 0; i < pass->num_runs; i++) {
        if (!fv_query_run_repeats(step, pass, i)) cost = fv_query_run_cost(rule, step, &pass->runs[i]);
        total += cost;
    }
    return total;
}

/* How one Q block is cut: runs of keys of segment_keys, runs of KV heads of head_run. */
typedef struct block_cut {
    int32_t num_segments, segment_keys, head_run;
} block_cut;

static block_cut cut_keys(const fv_split_rule *rule, const fv_query_block *block, int64_t segment_keys,
                          int32_t head_run)
{
    const int32_t span = block->end_key - block->first_key;
    const int64_t rounded = fv_round_up(fv_max_i64(1, segment_keys), rule->tile_keys);
    const int32_t num_segments = fv_max_i32(1, (int32_t)fv_ceil_div(span, rounded));
    return (block_cut){num_segments, (int32_t)fv_min_i64(rounded, INT32_MAX), head_run};
}

/* KV heads of an item that is not cut for them. Lanes take one each: a device knows to deal an item's heads out. */
static int32_t whole_head_run(const fv_split_rule *rule, int32_t num_tokens)
{
    return rule->num_lanes || fv_takes_several_heads(rule, num_tokens) ? rule->problem->mha.num_kv_heads : 1;
}

/* Keys of the shortest piece that is worth a reduction. */
static int32_t min_segment_keys(const fv_split_rule *rule)
{
    return rule->num_lanes ? FV_MIN_LANE_SEGMENT_KEYS : FV_MIN_SEGMENT_KEYS;
}

/* Pieces that there is room for, with their partial results. */
static int64_t most_segments(const fv_work_list *list, int32_t num_tokens)
{
    const int64_t slots = (list->slot_capacity - list->num_slots) / fv_max_i32(1, num_tokens);
    return fv_max_i64(1, fv_min_i64(slots, (int64_t)list->spare_pieces + 1));
}

/* Where there is no room for all runs of keys, workers have fewer, and KV heads parted for them; lanes, and whoever fixes the
 * number of pieces, have none (append_block). */
static block_cut choose_cut(const fv_work_list *list, const fv_split_rule *rule, const fv_query_block *block,
                            int64_t share, int64_t key_share)
{
    const int32_t num_kv_heads = rule->problem->mha.num_kv_heads;
    const int32_t several_heads = fv_takes_several_heads(rule, block->num_tokens);
    const int32_t span = block->end_key - block->first_key;
    const int64_t cost = fv_query_block_cost(rule, block) / (several_heads ? 1 : fv_lane_parts(rule));
    const int64_t pieces = fv_max_i64(1, fv_ceil_div(cost, share));
    int32_t head_run = whole_head_run(rule, block->num_tokens);

    int64_t segments = fv_min_i64(fv_max_i64(1, fv_ceil_div(cost, key_share)),
                                  fv_max_i32(1, span / min_segment_keys(rule)));
    int64_t segment_keys = 0; /* 0: equal shares of the span */
    if (rule->path == FV_PATH_2D || (rule->batch_invariant && !block->is_short)) {
        segments = 1;
    } else if (rule->segment_keys) {
        segment_keys = rule->segment_keys;
        segments = fv_ceil_div(span, segment_keys);
    } else if (rule->path == FV_PATH_3D) {
        segments = fv_max_i64(2, fv_min_i64(FORCED_SEGMENTS, fv_ceil_div(span, rule->tile_keys)));
    } else if (rule->num_segments && segments > 1) {
        segments = fv_min_i64(rule->num_segments, span / min_segment_keys(rule));
    }
    const int64_t most = most_segments(list, block->num_tokens);
    if (segments > most && !rule->num_lanes && !rule->batch_invariant && !rule->spare_pieces) {
        segments = most;
        segment_keys = 0;
    }
    if (several_heads && segments > 0 && segments < pieces) {
        head_run = (int32_t)fv_max_i64(1, num_kv_heads / fv_ceil_div(pieces, segments));
    }
    if (segments <= 1) return (block_cut){1, fv_max_i32(1, span), head_run};
    return cut_keys(rule, block, segment_keys ? segment_keys : fv_ceil_div(span, segments), head_run);
}

static int64_t items_of(const fv_split_rule *rule, block_cut cut)
{
    return cut.num_segments * fv_ceil_div(rule->problem->mha.num_kv_heads, cut.head_run);
}

/* The items of a Q block; segment g writes to slot `partial` + g * segment_slots, or, partial -1, the one
 * segment writes the result. The caller has seen to the room. */
static void append_items(fv_work_list *list, const fv_split_rule *rule, const fv_step *step,
                         const fv_query_block *block, block_cut cut, int32_t partial, int32_t segment_slots)
{
    const int32_t num_kv_heads = rule->problem->mha.num_kv_heads;
    for (int32_t segment = 0; segment < cut.num_segments; segment++) {
        const int64_t first_key = block->first_key + (int64_t)segment * cut.segment_keys;
        for (int32_t head = 0; head < num_kv_heads; head += cut.head_run) {
            list->items[list->num_items++] = (fv_work_item){
                .seq = block->seq,
                .table_row = block->seq,
                .first_token = block->first_token,
                .num_tokens = block->num_tokens,
                .first_kv_head = head,
                .num_kv_heads = fv_min_i32(cut.head_run, num_kv_heads - head),
                .first_key = (int32_t)fv_min_i64(first_key, block->end_key),
                .end_key = (int32_t)fv_min_i64(first_key + cut.segment_keys, block->end_key),
                .partial = partial < 0 ? -1 : partial + segment * segment_slots,
                .query_start = step->query_start[block->seq],
                .query_end = step->query_start[block->seq + 1],
                .seq_len = step->seq_lens[block->seq],
            };
        }
    }
}

/* Reductions of a block that is cut: long queries' are many, for who reduces takes a reduction's tokens one after the other. */
static int32_t count_reduces(const fv_split_rule *rule, int32_t num_tokens)
{
    const int32_t is_short = fv_query_is_short(rule->problem, num_tokens);
    return is_short ? 1 : (int32_t)fv_ceil_div(num_tokens, REDUCE_TOKENS);
}

/* And these, of tokens from `first` on, whose partial results take the next slots. */
static void append_reduces(fv_work_list *list, const fv_split_rule *rule, int32_t first, int32_t num_tokens,
                           int32_t num_segments)
{
    const int32_t num_reduces = count_reduces(rule, num_tokens);
    for (int32_t i = 0; i < num_reduces; i++) {
        const int32_t token = i * REDUCE_TOKENS;
        list->reduces[list->num_reduces++] = (fv_reduce_item){
            .first_token = first + token,
            .num_tokens = num_reduces == 1 ? num_tokens : fv_min_i32(REDUCE_TOKENS, num_tokens - token),
            .partial = list->num_slots + token,
            .num_segments = num_segments,
            .segment_slots = num_reduces == 1 ? 0 : num_tokens,
        };
    }
    list->num_slots += num_segments * num_tokens;
}

static fv_status append_block(fv_work_list *list, const fv_split_rule *rule, const fv_step *step,
                              const fv_query_block *block, block_cut cut)
{
    if (cut.num_segments > most_segments(list, block->num_tokens))
        cut = (block_cut){1, fv_max_i32(1, block->end_key - block->first_key), cut.head_run};
    const int32_t num_reduces = cut.num_segments == 1 ? 0 : count_reduces(rule, block->num_tokens);
    if (list->num_items + items_of(rule, cut) > list->item_capacity ||
        list->num_reduces + num_reduces > list->reduce_capacity) {
        return fv_fail(FV_ERR_NO_SPACE, "the work list holds %d items; the step needs more", list->item_capacity);
    }
    append_items(list, rule, step, block, cut, cut.num_segments > 1 ? list->num_slots : -1, block->num_tokens);
    if (cut.num_segments == 1) return FV_OK;
    list->spare_pieces -= cut.num_segments - 1;
    append_reduces(list, rule, step->query_start[block->seq] + block->first_token, block->num_tokens, cut.num_segments);
    return FV_OK;
}

static fv_status append_run(fv_work_list *list, const fv_split_rule *rule, const fv_step *step, const fv_query_run *run,
                            int64_t share, int64_t key_share)
{
    if (run->num_tokens <= 0) return FV_OK;
    const int32_t is_short = fv_query_is_short(rule->problem, fv_step_query_len(step, run->seq));
    const int32_t block_q = is_short ? run->num_tokens : rule->block_q;
    /* Last Q block first: it sees the most keys, and the longest item should not start last. */
    for (int32_t block = (int32_t)fv_ceil_div(run->num_tokens, block_q) - 1; block >= 0; block--) {
        const fv_query_block at = fv_query_block_at(rule, step, run, run->first_token + block * block_q);
        const fv_status status = append_block(list, rule, step, &at, choose_cut(list, rule, &at, share, key_share));
        if (status != FV_OK) return status;
    }
    return FV_OK;
}

/* --- prefix groups ---------------------------------------------------------------------------------- */

/* A prefix group as it will be cut: the shared keys in prefix_segments, each member's own keys in
 * suffix_segments, the same number for all, so that one row of slots serves a segment of all tokens. */
typedef struct group_cut {
    int32_t num_tokens;
    int32_t block_tokens;    /* of a Q block over the shared keys */
    int32_t prefix_segments; /* of prefix_keys each */
    int32_t prefix_keys;
    int32_t suffix_segments;
    int64_t num_items; /* at most */
} group_cut;

/* Own keys of a member. */
static fv_query_run suffix_run(const fv_query_run *run, const fv_prefix_group *group)
{
    fv_query_run suffix = *run;
    suffix.first_key = fv_max_i32(suffix.first_key, group->num_keys);
    return suffix;
}

static int64_t pieces_of(const fv_split_rule *rule, int64_t cost, int32_t num_tokens, int64_t share)
{
    const int32_t several_heads = fv_takes_several_heads(rule, num_tokens);
    return fv_max_i64(1, fv_ceil_div(cost / (several_heads ? 1 : fv_lane_parts(rule)), share));
}

static group_cut cut_group(const fv_split_rule *rule, const fv_step *step, const fv_pass *pass,
                           const fv_prefix_group *group, int64_t share)
{
    group_cut cut = {.suffix_segments = 1};
    int32_t num_blocks = 0;
    for (int32_t i = 0; i < group->num_runs; i++) {
        const fv_query_run run = suffix_run(&pass->runs[group->first_run + i], group);
        cut.num_tokens += run.num_tokens;
        for (int32_t token = 0; token < run.num_tokens;) {
            const fv_query_block block = fv_query_block_at(rule, step, &run, token);
            const int64_t pieces = pieces_of(rule, fv_query_block_cost(rule, &block), block.num_tokens, share);
            const int64_t most = fv_max_i32(1, (block.end_key - block.first_key) / FV_MIN_SEGMENT_KEYS);
            cut.suffix_segments = (int32_t)fv_max_i64(cut.suffix_segments, fv_min_i64(pieces, most));
            token += block.num_tokens;
            num_blocks++;
        }
    }
    const int32_t is_one_block = fv_takes_several_heads(rule, cut.num_tokens) &&
                                 cut.num_tokens <= fv_most_item_tokens(rule);
    cut.block_tokens = is_one_block ? cut.num_tokens : rule->block_q;
    const int32_t prefix_blocks = (int32_t)fv_ceil_div(cut.num_tokens, cut.block_tokens);
    const fv_query_block shared = {.num_tokens = cut.block_tokens, .end_key = group->num_keys};
    const int64_t cost = fv_query_block_cost(rule, &shared);
    const int64_t segments = fv_min_i64(pieces_of(rule, cost, cut.block_tokens, share),
                                        fv_max_i32(1, group->num_keys / FV_MIN_SEGMENT_KEYS));
    cut.prefix_keys = (int32_t)fv_round_up(fv_ceil_div(group->num_keys, segments), rule->tile_keys);
    cut.prefix_segments = (int32_t)fv_ceil_div(group->num_keys, cut.prefix_keys);
    cut.num_items = ((int64_t)prefix_blocks * cut.prefix_segments + (int64_t)num_blocks * cut.suffix_segments) *
                    rule->problem->mha.num_kv_heads;
    return cut;
}

static void append_shared_keys(fv_work_list *list, const fv_split_rule *rule, const fv_step *step,
                               const fv_query_run *first, const fv_prefix_group *group, const group_cut *cut)
{
    for (int32_t token = 0; token < cut->num_tokens; token += cut->block_tokens) {
        const fv_query_block block = {
            .seq = first->seq,
            .first_token = token,
            .num_tokens = fv_min_i32(cut->block_tokens, cut->num_tokens - token),
            .end_key = group->num_keys,
        };
        const int32_t head_run = whole_head_run(rule, cut->block_tokens);
        append_items(list, rule, step, &block, (block_cut){cut->prefix_segments, cut->prefix_keys, head_run},
                     list->num_slots + token, cut->num_tokens);
    }
}

static void append_own_keys(fv_work_list *list, const fv_split_rule *rule, const fv_step *step, const fv_pass *pass,
                            const fv_prefix_group *group, const group_cut *cut)
{
    const int32_t first_slot = list->num_slots + cut->prefix_segments * cut->num_tokens;
    for (int32_t i = 0, done = 0; i < group->num_runs; i++) {
        const fv_query_run run = suffix_run(&pass->runs[group->first_run + i], group);
        for (int32_t token = 0; token < run.num_tokens;) {
            const fv_query_block block = fv_query_block_at(rule, step, &run, token);
            const int32_t span = block.end_key - block.first_key;
            const int64_t keys = fv_round_up(fv_max_i64(1, fv_ceil_div(span, cut->suffix_segments)), rule->tile_keys);
            const int32_t head_run = whole_head_run(rule, block.num_tokens);
            append_items(list, rule, step, &block, (block_cut){cut->suffix_segments, (int32_t)keys, head_run},
                         first_slot + done + token, cut->num_tokens);
            token += block.num_tokens;
        }
        done += run.num_tokens;
    }
}

/* 1: done; 0: there is no room, the runs are to be cut one by one. */
static int32_t append_group(fv_work_list *list, const fv_split_rule *rule, const fv_step *step, const fv_pass *pass,
                            const fv_prefix_group *group, int64_t share)
{
    const group_cut cut = cut_group(rule, step, pass, group, share);
    const int64_t num_segments = cut.prefix_segments + cut.suffix_segments;
    const int64_t num_reduces = fv_ceil_div(cut.num_tokens, REDUCE_TOKENS);
    if (cut.num_items > list->spare_items || list->num_reduces + num_reduces > list->reduce_capacity ||
        list->num_slots + num_segments * cut.num_tokens > list->slot_capacity) {
        return 0;
    }
    list->spare_items -= (int32_t)cut.num_items;
    const fv_query_run *first = &pass->runs[group->first_run];
    append_shared_keys(list, rule, step, first, group, &cut);
    append_own_keys(list, rule, step, pass, group, &cut);
    for (int32_t token = 0; token < cut.num_tokens; token += REDUCE_TOKENS) {
        list->reduces[list->num_reduces++] = (fv_reduce_item){
            .first_token = step->query_start[first->seq] + token,
            .num_tokens = fv_min_i32(REDUCE_TOKENS, cut.num_tokens - token),
            .partial = list->num_slots + token,
            .num_segments = (int32_t)num_segments,
            .segment_slots = cut.num_tokens,
        };
    }
    list->num_slots += (int32_t)num_segments * cut.num_tokens;
    return 1;
}

/* --- filled lanes ----------------------------------------------------------------------------------- */

/* 1: done; 0: there is no room, or the pass is not for it. */
static int32_t append_fill(fv_work_list *list, const fv_split_rule *rule, const fv_step *step, const fv_pass *pass,
                           const fv_lane_cut *of_shares)
{
    fv_lane_fill fill;
    if (!fv_lane_fill_choose(&fill, rule, step, pass, of_shares)) return 0;
    int32_t num_slots = 0, num_reduces = 0;
    for (int32_t i = 0; i < pass->num_runs; i++) {
        if (fill.num_of_run[i] == 1) continue;
        num_slots += fill.num_of_run[i] * pass->runs[i].num_tokens;
        num_reduces += count_reduces(rule, pass->runs[i].num_tokens);
    }
    if (list->num_items + fill.num_pieces > list->item_capacity ||
        fill.num_pieces - pass->num_runs > list->spare_pieces || num_slots > list->slot_capacity ||
        list->num_reduces + num_reduces > list->reduce_capacity)
        return 0;

    int32_t next_key[FV_LANE_FILL_RUNS], next_slot[FV_LANE_FILL_RUNS];
    for (int32_t i = 0; i < pass->num_runs; i++) {
        const fv_query_run *run = &pass->runs[i];
        next_key[i] = fv_query_block_at(rule, step, run, run->first_token).first_key;
        next_slot[i] = list->num_slots;
        if (fill.num_of_run[i] == 1) continue;
        append_reduces(list, rule, step->query_start[run->seq] + run->first_token, run->num_tokens, fill.num_of_run[i]);
    }
    for (int32_t i = 0; i < fill.num_pieces; i++) {
        const fv_lane_piece *piece = &fill.pieces[i];
        const fv_query_run *run = &pass->runs[piece->run];
        const fv_query_block block = {
            .seq = run->seq,
            .first_token = run->first_token,
            .num_tokens = run->num_tokens,
            .first_key = next_key[piece->run],
            .end_key = next_key[piece->run] + piece->keys,
        };
        const int32_t is_part = fill.num_of_run[piece->run] > 1;
        append_items(list, rule, step, &block, (block_cut){1, piece->keys, whole_head_run(rule, run->num_tokens)},
                     is_part ? next_slot[piece->run] : -1, run->num_tokens);
        next_key[piece->run] += piece->keys;
        next_slot[piece->run] += run->num_tokens;
    }
    return 1;
}

/* --- lanes that meet --------------------------------------------------------------------------------- */

/* 1: done, each query an item that lanes share; 0: they do not. */
static int32_t append_meeting(fv_work_list *list, const fv_split_rule *rule, const fv_step *step, const fv_pass *pass)
{
    const int32_t num_meeting = fv_lane_meeting_choose(rule, step, pass);
    if (num_meeting == 0 || list->num_items + pass->num_runs > list->item_capacity) return 0;
    int32_t longest = 0;
    for (int32_t i = 0; i < pass->num_runs; i++) {
        const fv_query_block block = fv_query_block_at(rule, step, &pass->runs[i], pass->runs[i].first_token);
        const int32_t span = fv_max_i32(1, block.end_key - block.first_key);
        append_items(list, rule, step, &block, (block_cut){1, span, whole_head_run(rule, 1)}, -1, 1);
        longest = fv_max_i32(longest, span);
    }
    list->num_meeting = num_meeting;
    list->piece_keys = longest / num_meeting;
    list->num_split = pass->num_runs;
    return 1;
}

/* --- the pass ---------------------------------------------------------------------------------------- */

/* Shares that the total is at most cut into. */
static int64_t max_shares(const fv_split_rule *rule)
{
    return fv_max_i64((int64_t)rule->num_workers * FV_SHARES_PER_WORKER, 4 * (int64_t)rule->num_lanes);
}

/* KV heads that the lanes take side by side: several where that leaves parts for more than one round of the lanes, and
 * many keys for each, for what a lane begins and ends with takes longer. */
static int32_t heads_side_by_side(const fv_split_rule *rule, const fv_pass *pass)
{
    const int64_t parts = fv_lane_parts(rule);
    if (rule->lane_heads <= 1 || pass->num_groups > 0 || pass->num_runs * parts <= rule->num_lanes) return 1;
    int64_t keys = 0;
    for (int32_t i = 0; i < pass->num_runs; i++) {
        if (pass->runs[i].num_tokens != 1) return 1;
        keys += pass->runs[i].end_key - pass->runs[i].first_key;
    }
    return keys * parts >= (int64_t)SIDE_BY_SIDE_KEYS * rule->num_lanes ? rule->lane_heads : 1;
}

fv_status fv_work_list_append(fv_work_list *list, const fv_split_rule *of_plan, const fv_step *step,
                              const fv_pass *pass)
{
    fv_split_rule of_pass = *of_plan;
    const fv_split_rule *rule = &of_pass;
    of_pass.lane_heads = list->lane_heads = heads_side_by_side(of_plan, pass);
    of_pass.max_slots = fv_max_i32(1, list->slot_capacity);
    if (pass->num_groups > 0) of_pass.few_row_cost = 1; /* for the total counts shared keys for each */
    const int32_t first_item = list->num_items;
    list->num_slots = list->num_split = list->num_meeting = list->piece_keys = 0;
    list->spare_pieces = rule->spare_pieces > 0 ? rule->spare_pieces : INT32_MAX;
    const int64_t no_share = INT64_MAX / 2;            /* whole */
    int64_t share = no_share, key_share = 0, rest = 0; /* key_share 0: the share */
    int64_t cost = 0;
    fv_lane_cut cut = {0};
    if (rule->num_lanes) {
        if (append_meeting(list, rule, step, pass)) return FV_OK;
        if (append_fill(list, rule, step, pass, NULL)) return FV_OK; /* lengths differ: shares need not be weighed */
        rest = total_cost(rule, step, pass);
        cut = fv_lane_cut_choose(rule, step, pass, rest);
        if (append_fill(list, rule, step, pass, &cut)) return FV_OK;
        share = cut.share;
    } else if (rule->num_workers > 1) {
        const fv_worker_cut of_workers = fv_worker_cut_choose(rule, step, pass, total_cost(rule, step, pass));
        of_pass.block_q = of_workers.block_q;
        share = of_workers.share;
        key_share = of_workers.key_share;
    }
    const fv_prefix_group *group = pass->groups, *end = pass->groups + pass->num_groups;
    for (int32_t i = 0; i < pass->num_runs;) {
        const int32_t at_group = group < end && group->first_run == i;
        const fv_prefix_group *now = at_group ? group++ : NULL;
        if (now && append_group(list, rule, step, pass, now, share)) {
            i += now->num_runs;
            continue;
        }
        for (const int32_t until = i + (now ? now->num_runs : 1); i < until; i++) {
            const fv_query_run *run = &pass->runs[i];
            if (cut.tapers && !fv_query_run_repeats(step, pass, i)) cost = fv_query_run_cost(rule, step, run);
            if (cut.tapers) share = fv_lane_taper_share(rule, &cut, rest, cost / fv_lane_parts(rule));
            const int64_t of_run = i < cut.whole_runs ? no_share : share;
            const fv_status status = append_run(list, rule, step, run, of_run, key_share ? key_share : of_run);
            rest -= cost;
            if (status != FV_OK) return status;
        }
    }
    const int32_t num_cut = list->num_items - first_item - cut.whole_runs;
    if (cut.splits && 2 * num_cut <= rule->num_lanes) list->num_split = num_cut; /* a path may have forced more */
    return FV_OK;
}

/* --- room --------------------------------------------------------------------------------------------- */

/* Tokens that may be in short queries at once. */
static int64_t max_short_tokens(const fv_split_rule *rule, const fv_bounds *bounds)
{
    return fv_min_i64(bounds->max_num_tokens, (int64_t)bounds->max_num_seqs * fv_short_query_tokens(rule->problem));
}

void fv_split_rule_fix(fv_split_rule *rule, const fv_bounds *bounds, size_t slot_bytes, size_t slots_limit_bytes)
{
    if (!rule->batch_invariant) return;
    const int64_t slots_each = (int64_t)(slots_limit_bytes / slot_bytes) / max_short_tokens(rule, bounds);
    const int64_t segments = fv_min_i64(INVARIANT_SEGMENTS, slots_each - 1); /* one more where the first tile is cut */
    rule->num_segments = 0;
    if (segments < 2) {
        rule->path = FV_PATH_2D;
        return;
    }
    const int64_t least = fv_max_i64(FV_MIN_SEGMENT_KEYS, fv_ceil_div(bounds->max_seq_len, segments));
    rule->segment_keys = (int32_t)fv_round_up(fv_max_i64(least, rule->segment_keys), rule->tile_keys);
}

void fv_work_list_fix(fv_work_list *list, const fv_split_rule *rule, const fv_bounds *bounds)
{
    const int32_t are_short = fv_query_is_short(rule->problem, bounds->max_query_len);
    const int64_t of_query = are_short ? 1 : fv_ceil_div(bounds->max_query_len, rule->block_q);
    const int32_t num_blocks = (int32_t)fv_min_i64(bounds->max_num_tokens, bounds->max_num_seqs * of_query);
    list->item_capacity = num_blocks + rule->spare_pieces;
    const int32_t block_tokens = are_short ? 1 : rule->block_q;
    const int64_t reduces = (int64_t)fv_min_i32(num_blocks, rule->spare_pieces) * count_reduces(rule, block_tokens);
    list->reduce_capacity = (int32_t)fv_min_i64(reduces, INT32_MAX / 2);
}

void fv_work_list_room(fv_work_list *list, const fv_split_rule *rule, const fv_bounds *bounds, size_t slot_bytes,
                       size_t slots_limit_bytes)
{
    const int64_t num_kv_heads = fv_most_head_runs(rule);
    const int64_t blocks = (int64_t)(bounds->max_num_tokens / fv_least_block_tokens(rule)) + bounds->max_num_seqs;
    const int64_t block_tokens = fv_most_item_tokens(rule);
    const int64_t shares = max_shares(rule);
    const int64_t short_tokens = max_short_tokens(rule, bounds);
    const int32_t is_forced = rule->segment_keys || rule->path == FV_PATH_3D;
    int64_t extra_pieces, slots;
    if (is_forced) {
        const int64_t keys = rule->segment_keys ? fv_round_up(rule->segment_keys, rule->tile_keys) : rule->tile_keys;
        int64_t segments = fv_ceil_div(bounds->max_seq_len, keys) + 1;
        if (!rule->segment_keys) segments = fv_min_i64(segments, FORCED_SEGMENTS + 1);
        extra_pieces = blocks * segments;
        slots = (rule->batch_invariant ? short_tokens : bounds->max_num_tokens) * segments;
    } else if (rule->num_segments) {
        const int64_t cut_blocks = fv_min_i64(blocks, 2 * shares);
        extra_pieces = 4 * shares + cut_blocks * (rule->num_segments + 1);
        slots = cut_blocks * (rule->num_segments + 1) * block_tokens;
    } else {
        /* A block is cut only above one share, so at most that many are, each rounded up by one. */
        extra_pieces = 4 * shares;
        slots = 2 * shares * block_tokens;
    }
    const int64_t most_slots = rule->path == FV_PATH_2D ? 0 : (int64_t)(slots_limit_bytes / slot_bytes);
    extra_pieces = fv_min_i64(extra_pieces, most_slots); /* each piece of a block that is cut has a slot or more */
    if (is_forced) extra_pieces = fv_min_i64(extra_pieces, slots);
    int64_t reduces = blocks + 1 + fv_ceil_div(bounds->max_num_tokens, REDUCE_TOKENS);
    list->spare_items = 0;
    if (rule->cascade) {
        slots += short_tokens * 4;
        list->spare_items = (int32_t)fv_min_i64((2 * blocks + 4 * shares) * num_kv_heads, 1 << 24);
        reduces += fv_ceil_div(bounds->max_num_tokens, REDUCE_TOKENS) + bounds->max_num_seqs;
    }
    const int64_t passes = fv_max_i32(2, rule->num_passes);
    const int64_t pieces = blocks + passes + passes * extra_pieces;
    list->item_capacity = (int32_t)fv_min_i64(pieces * num_kv_heads + list->spare_items, INT32_MAX / 2);
    list->reduce_capacity = (int32_t)fv_min_i64(reduces, INT32_MAX / 2);
    list->slot_capacity = (int32_t)fv_min_i64(slots, most_slots);
}
