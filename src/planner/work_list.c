/* Cutting a step into work items.
 *
 * The cost of an item is keys x KV heads x (KEY_COST + rows): bringing in a key costs as much as
 * KEY_COST rows of arithmetic. A Q block is cut where it costs more than its share, the total over
 * ITEMS_PER_WORKER items for each worker, so that no worker waits long for the last one, and the number
 * of pieces grows by one at a time with the length: there is no batch size or length where the
 * schedule jumps. Pieces are runs of keys first, as long as those are worth a reduction, then runs of
 * KV heads, which need none. */
#include "planner/work_list.h"

#include <assert.h>

#include "core/error.h"

#define KEY_COST 4
#define ITEMS_PER_WORKER 8
#define MIN_SEGMENT_KEYS 256
#define TRITON_SEGMENTS 16   /* of the forced 3D path, as in the Triton attention paper */
#define INVARIANT_SEGMENTS 8 /* at most, of a sequence at the maximal length */
#define SLOTS_LIMIT_BYTES (64ll << 20)

static int32_t group_of(const fv_problem *problem) { return problem->mha.num_heads / problem->mha.num_kv_heads; }

/* A short query is one Q block with all its tokens; a long one is cut into blocks of block_q. */
static int32_t is_short(const fv_split_rule *rule, int32_t query_len)
{
    return (int64_t)query_len * group_of(rule->problem) <= FV_DECODE_ROWS;
}

typedef struct q_block {
    int32_t seq, first_token, num_tokens;
    int32_t first_key, end_key;
    int32_t is_short;
} q_block;

static q_block block_at(const fv_split_rule *rule, const fv_step *step, int32_t seq, int32_t first_token)
{
    const int32_t query_len = step->query_start[seq + 1] - step->query_start[seq];
    const int32_t whole = is_short(rule, query_len);
    const int32_t num_tokens = whole ? query_len : fv_min_i32(rule->block_q, query_len - first_token);
    const int32_t causal = step->causal ? step->causal[seq] : 1;
    const fv_key_range keys = fv_block_keys(&rule->problem->context_parallel, step->seq_lens[seq],
                                            step->seq_lens[seq] - query_len, first_token, num_tokens, causal,
                                            rule->problem->window);
    return (q_block){seq, first_token, num_tokens, keys.first / rule->tile_keys * rule->tile_keys, keys.end, whole};
}

static int64_t cost_of(const fv_split_rule *rule, const q_block *block, int32_t num_kv_heads)
{
    const int64_t keys = fv_max_i32(1, block->end_key - block->first_key);
    return keys * num_kv_heads * (KEY_COST + block->num_tokens * group_of(rule->problem));
}

static int64_t total_cost(const fv_split_rule *rule, const fv_step *step)
{
    int64_t total = 0;
    for (int32_t seq = 0; seq < step->num_seqs; seq++) {
        const int32_t query_len = step->query_start[seq + 1] - step->query_start[seq];
        for (int32_t token = 0; token < query_len;) {
            const q_block block = block_at(rule, step, seq, token);
            total += cost_of(rule, &block, rule->problem->mha.num_kv_heads);
            token += block.num_tokens;
        }
    }
    return total;
}

/* How one Q block is cut: runs of keys of segment_keys, runs of KV heads of head_run. */
typedef struct block_cut {
    int32_t num_segments, segment_keys, head_run;
} block_cut;

static block_cut cut_keys(const fv_split_rule *rule, const q_block *block, int64_t segment_keys, int32_t head_run)
{
    const int32_t span = fv_max_i32(0, block->end_key - block->first_key);
    const int64_t rounded = fv_round_up(fv_max_i64(1, segment_keys), rule->tile_keys);
    const int32_t num_segments = fv_max_i32(1, (int32_t)fv_ceil_div(span, rounded));
    return (block_cut){num_segments, (int32_t)fv_min_i64(rounded, INT32_MAX), head_run};
}

static block_cut choose_cut(const fv_split_rule *rule, const q_block *block, int64_t share)
{
    const int32_t num_kv_heads = rule->problem->mha.num_kv_heads;
    const int32_t several_heads = block->num_tokens * group_of(rule->problem) <= FV_DECODE_ROWS;
    const int32_t span = fv_max_i32(0, block->end_key - block->first_key);
    const int64_t cost = cost_of(rule, block, several_heads ? num_kv_heads : 1);
    const int64_t pieces = fv_max_i64(1, fv_ceil_div(cost, share));
    int32_t head_run = several_heads ? num_kv_heads : 1;

    int64_t segments = fv_min_i64(pieces, fv_max_i32(1, span / MIN_SEGMENT_KEYS));
    int64_t segment_keys = 0; /* 0: equal shares of the span */
    if (rule->path == FV_PATH_2D || (rule->batch_invariant && !block->is_short)) {
        segments = 1;
    } else if (rule->batch_invariant || (rule->path == FV_PATH_3D && rule->segment_keys)) {
        segment_keys = rule->segment_keys;
        segments = fv_ceil_div(span, segment_keys);
    } else if (rule->path == FV_PATH_3D) {
        segments = fv_max_i64(2, fv_min_i64(TRITON_SEGMENTS, fv_ceil_div(span, rule->tile_keys)));
    }
    if (several_heads && segments > 0 && segments < pieces) {
        head_run = (int32_t)fv_max_i64(1, num_kv_heads / fv_ceil_div(pieces, segments));
    }
    if (segments <= 1) return (block_cut){1, fv_max_i32(1, span), head_run};
    return cut_keys(rule, block, segment_keys ? segment_keys : fv_ceil_div(span, segments), head_run);
}

static fv_status append_block(fv_work_list *list, const fv_split_rule *rule, const fv_step *step, const q_block *block,
                              block_cut cut)
{
    const int32_t num_kv_heads = rule->problem->mha.num_kv_heads;
    if (cut.num_segments > 1 && list->num_slots + cut.num_segments * block->num_tokens > list->slot_capacity) {
        cut = (block_cut){1, fv_max_i32(1, block->end_key - block->first_key), cut.head_run};
    }
    const int32_t num_items = cut.num_segments * (int32_t)fv_ceil_div(num_kv_heads, cut.head_run);
    if (list->num_items + num_items > list->item_capacity || list->num_reduces >= list->reduce_capacity) {
        return fv_fail(FV_ERR_NO_SPACE, "the work list holds %d items; the step needs more", list->item_capacity);
    }
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
                .first_key = (int32_t)first_key,
                .end_key = (int32_t)fv_min_i64(first_key + cut.segment_keys, block->end_key),
                .partial = cut.num_segments == 1 ? -1 : list->num_slots + segment * block->num_tokens,
            };
        }
    }
    if (cut.num_segments > 1) {
        list->reduces[list->num_reduces++] = (fv_reduce_item){
            .first_token = step->query_start[block->seq] + block->first_token,
            .num_tokens = block->num_tokens,
            .partial = list->num_slots,
            .num_segments = cut.num_segments,
        };
        list->num_slots += cut.num_segments * block->num_tokens;
    }
    return FV_OK;
}

fv_status fv_work_list_build(fv_work_list *list, const fv_split_rule *rule, const fv_step *step)
{
    list->num_items = list->num_reduces = list->num_slots = 0;
    int64_t share = INT64_MAX / 2;
    if (rule->num_workers > 1) {
        share = fv_max_i64(1, total_cost(rule, step) / ((int64_t)rule->num_workers * ITEMS_PER_WORKER));
    }
    for (int32_t seq = 0; seq < step->num_seqs; seq++) {
        const int32_t query_len = step->query_start[seq + 1] - step->query_start[seq];
        const int32_t block_q = is_short(rule, query_len) ? fv_max_i32(1, query_len) : rule->block_q;
        /* Last Q block first: it sees the most keys, and the longest item should not start last. */
        for (int32_t block = (int32_t)fv_ceil_div(query_len, block_q) - 1; block >= 0; block--) {
            const q_block at = block_at(rule, step, seq, block * block_q);
            const fv_status status = append_block(list, rule, step, &at, choose_cut(rule, &at, share));
            if (status != FV_OK) return status;
        }
    }
    return FV_OK;
}

/* Tokens that may be in short queries at once. */
static int64_t max_short_tokens(const fv_split_rule *rule, const fv_bounds *bounds)
{
    return fv_min_i64(bounds->max_num_tokens,
                      (int64_t)bounds->max_num_seqs * fv_max_i32(1, FV_DECODE_ROWS / group_of(rule->problem)));
}

void fv_split_rule_fix(fv_split_rule *rule, const fv_bounds *bounds, size_t slot_bytes)
{
    if (!rule->batch_invariant) return;
    const int64_t slots_each = SLOTS_LIMIT_BYTES / (int64_t)slot_bytes / max_short_tokens(rule, bounds);
    const int64_t segments = fv_min_i64(INVARIANT_SEGMENTS, slots_each - 1); /* one more where the first tile is cut */
    if (segments < 2) {
        rule->path = FV_PATH_2D;
        return;
    }
    const int64_t least = fv_max_i64(MIN_SEGMENT_KEYS, fv_ceil_div(bounds->max_seq_len, segments));
    rule->segment_keys = (int32_t)fv_round_up(fv_max_i64(least, rule->segment_keys), rule->tile_keys);
}

void fv_work_list_room(fv_work_list *list, const fv_split_rule *rule, const fv_bounds *bounds, size_t slot_bytes)
{
    const int64_t blocks = bounds->max_num_tokens / rule->block_q + bounds->max_num_seqs;
    const int64_t block_tokens = fv_max_i32(rule->block_q, FV_DECODE_ROWS / group_of(rule->problem));
    int64_t extra_pieces, slots;
    if (rule->segment_keys || rule->path == FV_PATH_3D) {
        const int64_t keys = rule->segment_keys ? fv_round_up(rule->segment_keys, rule->tile_keys) : rule->tile_keys;
        int64_t segments = fv_ceil_div(bounds->max_seq_len, keys) + 1;
        if (!rule->segment_keys) segments = fv_min_i64(segments, TRITON_SEGMENTS + 1);
        extra_pieces = blocks * segments;
        slots = (rule->batch_invariant ? max_short_tokens(rule, bounds) : bounds->max_num_tokens) * segments;
    } else {
        /* A block is cut only above one share, so at most that many are, each rounded up by one. */
        extra_pieces = 4ll * rule->num_workers * ITEMS_PER_WORKER;
        slots = 2ll * rule->num_workers * ITEMS_PER_WORKER * block_tokens;
    }
    if (rule->path == FV_PATH_2D) slots = 0;
    slots = fv_min_i64(slots, SLOTS_LIMIT_BYTES / (int64_t)slot_bytes);
    list->item_capacity = (int32_t)fv_min_i64((blocks + extra_pieces) * rule->problem->mha.num_kv_heads, 1 << 26);
    list->reduce_capacity = (int32_t)blocks + 1;
    list->slot_capacity = (int32_t)slots;
}
