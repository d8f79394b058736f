/* Work lists: every key of every row is in exactly one item, slots do not overlap, shares are even, and
 * nothing jumps when a batch or a length grows by one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "planner/lane_fill.h"
#include "planner/work_list.h"
#include "planner/worker_order.h"

enum { MAX_SEQS = 128, MAX_TOKENS = 4096, MAX_SEQ_LEN = 70000 };

#define SLOTS_LIMIT ((size_t)64 << 20)

typedef struct fixture {
    fv_problem problem;
    fv_bounds bounds;
    fv_split_rule rule;
    fv_work_list list;
    int32_t query_start[MAX_SEQS + 1];
    int32_t seq_lens[MAX_SEQS];
    fv_step step;
} fixture;

static fixture *make(int32_t heads, int32_t kv_heads, int32_t workers)
{
    fixture *f = calloc(1, sizeof(*f));
    f->problem = (fv_problem){
        .kind = FV_ATTENTION_MHA, .mha = {heads, kv_heads, 128, 128}, .context_parallel = {1, 0, 1}};
    f->bounds = (fv_bounds){sizeof(f->bounds), MAX_SEQS, MAX_TOKENS, MAX_TOKENS, MAX_SEQ_LEN};
    f->rule = (fv_split_rule){
        .problem = &f->problem, .block_q = 64 / (heads / kv_heads), .tile_keys = 64, .num_workers = workers};
    f->step = (fv_step){0, f->query_start, f->seq_lens, NULL};
    return f;
}

static void allocate_within(fixture *f, size_t slots_limit)
{
    const size_t row_floats = f->problem.kind == FV_ATTENTION_MLA ? 514 : 130;
    const size_t slot_bytes = (size_t)f->problem.mha.num_heads * row_floats * sizeof(float);
    fv_split_rule_fix(&f->rule, &f->bounds, slot_bytes, slots_limit);
    fv_work_list_room(&f->list, &f->rule, &f->bounds, slot_bytes, slots_limit);
    f->list.items = calloc((size_t)f->list.item_capacity, sizeof(fv_work_item));
    f->list.reduces = calloc((size_t)f->list.reduce_capacity, sizeof(fv_reduce_item));
}

static void allocate(fixture *f) { allocate_within(f, SLOTS_LIMIT); }

static void destroy(fixture *f)
{
    free(f->list.items);
    free(f->list.reduces);
    free(f);
}

static void add(fixture *f, int32_t query_len, int32_t seq_len)
{
    const int32_t seq = f->step.num_seqs++;
    f->query_start[seq + 1] = f->query_start[seq] + query_len;
    f->seq_lens[seq] = seq_len;
}

static void list_queries(fv_query_run *runs, const fixture *f)
{
    for (int32_t seq = 0; seq < f->step.num_seqs; seq++) runs[seq] = fv_step_whole_query(&f->step, seq);
}

/* One pass over all keys of all sequences, with `groups`. */
static void build_with(fixture *f, const fv_prefix_group *groups, int32_t num_groups)
{
    fv_query_run runs[MAX_SEQS];
    list_queries(runs, f);
    if (num_groups == 0) fv_worker_order(runs, &f->rule, &f->step);
    const fv_pass pass = {runs, f->step.num_seqs, groups, num_groups};
    f->list.num_items = f->list.num_reduces = 0;
    assert_int_equal(fv_work_list_append(&f->list, &f->rule, &f->step, &pass), FV_OK);
}

static void build(fixture *f) { build_with(f, NULL, 0); }

static int32_t group(const fixture *f) { return f->problem.mha.num_heads / f->problem.mha.num_kv_heads; }

/* For every (token, KV head): the items that hold it cover [first seen key, last seen key) without gap or
 * overlap; partial slots are used once. */
static void check_cover(const fixture *f)
{
    const int32_t kv_heads = f->problem.mha.num_kv_heads;
    const int32_t num_tokens = f->query_start[f->step.num_seqs];
    int64_t *covered = calloc((size_t)(num_tokens * kv_heads) + 1, sizeof(*covered));
    int32_t *first = calloc((size_t)(num_tokens * kv_heads) + 1, sizeof(*first));
    int32_t *last = calloc((size_t)(num_tokens * kv_heads) + 1, sizeof(*last));
    char *slot_used = calloc((size_t)f->list.slot_capacity * (size_t)kv_heads + 1, 1);
    memset(first, 0x7f, ((size_t)(num_tokens * kv_heads) + 1) * sizeof(*first));
    for (int32_t i = 0; i < f->list.num_items; i++) {
        const fv_work_item *item = &f->list.items[i];
        assert_true(item->num_tokens > 0 && item->num_kv_heads > 0);
        assert_int_equal(item->query_start, f->query_start[item->seq]);
        assert_int_equal(item->query_end, f->query_start[item->seq + 1]);
        assert_int_equal(item->seq_len, f->seq_lens[item->seq]);
        const int32_t shared_rows = f->rule.shared_rows ? f->rule.shared_rows : FV_DECODE_ROWS;
        assert_true(item->num_kv_heads == 1 || f->rule.num_lanes || item->num_tokens * group(f) <= shared_rows);
        assert_true(item->num_tokens <= fv_most_item_tokens(&f->rule));
        if (!f->rule.cascade) assert_int_equal(item->first_key % f->rule.tile_keys, 0);
        for (int32_t t = 0; t < item->num_tokens; t++) {
            for (int32_t h = 0; h < item->num_kv_heads; h++) {
                const int32_t row = (f->query_start[item->seq] + item->first_token + t) * kv_heads +
                                    item->first_kv_head + h;
                covered[row] += item->end_key - item->first_key;
                first[row] = fv_min_i32(first[row], item->first_key);
                last[row] = fv_max_i32(last[row], item->end_key);
                if (item->partial < 0) continue;
                char *used = &slot_used[(item->partial + t) * kv_heads + item->first_kv_head + h];
                assert_int_equal(*used, 0);
                *used = 1;
            }
        }
    }
    for (int32_t seq = 0; seq < f->step.num_seqs; seq++) {
        const int32_t query_len = f->query_start[seq + 1] - f->query_start[seq];
        for (int32_t t = 0; t < query_len; t++) {
            const fv_key_range keys = fv_row_keys(&f->problem.context_parallel, f->seq_lens[seq],
                                                  f->seq_lens[seq] - query_len + t, 1, f->problem.window);
            for (int32_t h = 0; h < kv_heads; h++) {
                const int32_t row = (f->query_start[seq] + t) * kv_heads + h;
                assert_int_equal(covered[row], last[row] - first[row]); /* no gap, no overlap */
                assert_true(first[row] <= keys.first && last[row] >= keys.end);
            }
        }
    }
    int64_t slots = 0;
    for (int32_t i = 0; i < f->list.num_reduces; i++) {
        const fv_reduce_item *reduce = &f->list.reduces[i];
        slots += (int64_t)reduce->num_segments * reduce->num_tokens;
        for (int32_t segment = 0; segment < reduce->num_segments; segment++) {
            for (int32_t t = 0; t < reduce->num_tokens; t++) {
                const int32_t slot = reduce->partial + segment * fv_reduce_segment_slots(reduce) + t;
                assert_true(slot < f->list.num_slots && slot_used[slot * kv_heads]);
            }
        }
    }
    assert_int_equal(slots, f->list.num_slots);
    assert_true(slots <= f->list.slot_capacity);
    free(covered);
    free(first);
    free(last);
    free(slot_used);
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void test_random_steps_are_covered(void **state)
{
    (void)state;
    uint32_t random = 11;
    for (int32_t i = 0; i < 400; i++) {
        const int32_t kv_heads = 1 + (int32_t)(next_random(&random) % 8);
        const int32_t heads = kv_heads * (1 + (int32_t)(next_random(&random) % 12));
        fixture *f = make(heads, kv_heads, 1 + (int32_t)(next_random(&random) % 16));
        f->problem.window = next_random(&random) % 3 == 0 ? 1 + (int32_t)(next_random(&random) % 3000) : 0;
        if (next_random(&random) % 3 == 0)
            f->rule.num_lanes = f->rule.num_workers * (1 + (int32_t)(next_random(&random) % 3));
        f->rule.batch_invariant = next_random(&random) % 3 == 0;
        f->rule.path = (fv_softmax_path)(next_random(&random) % 3);
        if (f->rule.path == FV_PATH_3D && next_random(&random) % 2) f->rule.segment_keys = 512;
        if (i % 3 == 1) f->rule.shared_rows = 32;
        if (i % 2 == 1 && !f->rule.num_lanes) f->rule.least_block_q = fv_max_i32(1, f->rule.block_q / 4);
        allocate(f);
        const int32_t num_seqs = 1 + (int32_t)(next_random(&random) % 20);
        for (int32_t seq = 0; seq < num_seqs; seq++) {
            const int32_t kind = (int32_t)(next_random(&random) % 4);
            const int32_t query_len = kind == 0   ? 1
                                      : kind == 1 ? (int32_t)(next_random(&random) % 9)
                                                  : (int32_t)(next_random(&random) % 200);
            add(f, query_len, query_len + (int32_t)(next_random(&random) % (kind == 3 ? 60000 : 2000)));
        }
        build(f);
        check_cover(f);
        destroy(f);
    }
}

static int64_t largest_item(const fixture *f, int64_t *total)
{
    int64_t largest = 0;
    *total = 0;
    for (int32_t i = 0; i < f->list.num_items; i++) {
        const fv_work_item *item = &f->list.items[i];
        const int64_t cost = (int64_t)(item->end_key - item->first_key) * item->num_kv_heads;
        *total += cost;
        if (cost > largest) largest = cost;
    }
    return largest;
}

/* When the last of the workers ends that take the items one by one in their order, over the mean of their work; one
 * that waits for no other has 1. */
static double longest_over_mean(const fixture *f)
{
    double busy[64] = {0}, total = 0, last = 0;
    const int32_t num_workers = f->rule.num_workers;
    for (int32_t i = 0; i < f->list.num_items; i++) {
        const fv_work_item *item = &f->list.items[i];
        const int32_t row_cost = fv_takes_several_heads(&f->rule, item->num_tokens) ? fv_few_row_cost(&f->rule) : 1;
        const double cost = (double)(item->end_key - item->first_key) * item->num_kv_heads * row_cost *
                            (4 + item->num_tokens * group(f));
        int32_t first = 0;
        for (int32_t worker = 1; worker < num_workers; worker++) {
            if (busy[worker] < busy[first]) first = worker;
        }
        busy[first] += cost;
        total += cost;
    }
    for (int32_t worker = 0; worker < num_workers; worker++) last = busy[worker] > last ? busy[worker] : last;
    return last * num_workers / total;
}

typedef struct batch_part {
    int32_t num_seqs, query_len, seq_len;
} batch_part;

static fixture *make_batch_in(fv_kv_layout layout, int32_t num_kv_heads, int32_t num_workers, const batch_part *parts,
                              int32_t num_parts)
{
    fixture *f = make(32, num_kv_heads, num_workers);
    f->problem.kv_layout = layout;
    if (num_kv_heads == 1) { /* absorbed MLA */
        f->problem.mha = (fv_mha_shape){128, 1, 576, 512};
        f->rule.block_q = 1;
    }
    allocate(f);
    for (int32_t i = 0; i < num_parts; i++) {
        for (int32_t seq = 0; seq < parts[i].num_seqs; seq++) add(f, parts[i].query_len, parts[i].seq_len);
    }
    build(f);
    return f;
}

static fixture *make_batch(int32_t num_kv_heads, int32_t num_workers, const batch_part *parts, int32_t num_parts)
{
    return make_batch_in(FV_KV_LAYOUT_STRIDED, num_kv_heads, num_workers, parts, num_parts);
}

/* No worker waits, whatever the lengths: one long sequence, the first or the last of the batch, is no straggler. Where the KV heads
 * of a token lie side by side a worker may wait for less than parting them would cost. */
static void test_workers_end_together(void **state)
{
    (void)state;
    static const struct {
        fv_kv_layout layout;
        int32_t num_kv_heads;
        double most;
    } forms[] = {
        {FV_KV_LAYOUT_STRIDED, 1, 1.12}, /* merges weigh more */
        {FV_KV_LAYOUT_X_PACKED, 8, 1.08},
        {FV_KV_LAYOUT_2_NB_BS_H_D, 8, 1.2},
    };
    static const batch_part batches[][2] = {
        {{1, 1, 32768}, {31, 1, 512}},
        {{31, 1, 512}, {1, 1, 32768}},
        {{32, 1, 1520}},
        {{1, 1, 32768}},
        {{8, 1, 4096}},
        {{3, 1, 9000}},
        {{32, 1, 4096}},
        {{9, 1, 4096}},
        {{31, 1, 512}, {1, 512, 8192}},
        {{1, 2048, 2048}},
        {{5, 4, 12000}, {1, 1, 700}},
    };
    for (int32_t num_workers = 2; num_workers <= 64; num_workers *= 2) {
        for (int32_t form = 0; form < FV_ARRAY_LEN(forms); form++) {
            const int32_t num_kv_heads = forms[form].num_kv_heads;
            for (int32_t i = 0; i < FV_ARRAY_LEN(batches); i++) {
                fixture *f = make_batch_in(forms[form].layout, num_kv_heads, num_workers, batches[i], 2);
                const double ratio = longest_over_mean(f);
                if (!(ratio <= forms[form].most))
                    fail_msg("batch %d, %d workers, %d KV heads: %g", i, num_workers, num_kv_heads, ratio);
                destroy(f);
            }
        }
    }
}

static int32_t is_short_item(const fixture *f, int32_t i)
{
    return fv_query_is_short(&f->problem, f->list.items[i].query_end - f->list.items[i].query_start);
}

/* Decodes beside prefills, in whatever order the batch has them: what takes longer comes first, all of it, and is cut no
 * finer than what comes behind it fills up. Where a row x key of decode takes six times as long, as beside tiles, that is
 * so by more of them. */
static void test_long_items_come_first(void **state)
{
    (void)state;
    static const struct {
        batch_part parts[3];
        int32_t few_row_cost, begins_with_short, num_whole; /* decodes that 8 workers do not cut */
    } cases[] = {
        {{{1, 512, 512}, {8, 1, 4096}}, 6, 1, 8},
        {{{8, 1, 4096}, {1, 512, 512}}, 6, 1, 8},
        {{{4, 1, 4096}, {1, 512, 512}, {4, 1, 4096}}, 1, 1, 8},
        {{{1, 2048, 2048}, {32, 1, 4096}}, 1, 1, 32},
        {{{32, 1, 1024}, {1, 512, 16384}}, 6, 0, 32},
        {{{32, 1, 1024}, {1, 512, 16384}}, 1, 0, 32},
        {{{4, 1, 65536}, {1, 512, 16384}}, 6, 1, 0},
        {{{4, 1, 65536}, {1, 512, 16384}}, 1, 0, 4},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(cases); i++) {
        for (int32_t num_workers = 2; num_workers <= 16; num_workers *= 2) {
            fixture *f = make(32, 8, num_workers);
            f->rule.block_q = 128;
            f->rule.least_block_q = 32;
            f->rule.few_row_cost = cases[i].few_row_cost;
            allocate(f);
            for (int32_t part = 0; part < 3; part++)
                for (int32_t seq = 0; seq < cases[i].parts[part].num_seqs; seq++)
                    add(f, cases[i].parts[part].query_len, cases[i].parts[part].seq_len);
            build(f);
            check_cover(f);
            int32_t num_changes = 0, num_whole = 0;
            for (int32_t item = 0; item < f->list.num_items; item++) {
                num_changes += item > 0 && is_short_item(f, item) != is_short_item(f, item - 1);
                num_whole += is_short_item(f, item) && f->list.items[item].num_kv_heads == 8 &&
                             f->list.items[item].partial < 0;
            }
            assert_int_equal(is_short_item(f, 0), cases[i].begins_with_short);
            assert_int_equal(num_changes, 1);
            if (num_workers == 8) assert_int_equal(num_whole, cases[i].num_whole);
            const double ratio = longest_over_mean(f);
            if (!(ratio <= 1.12)) fail_msg("case %d, %d workers: %g", i, num_workers, ratio);
            destroy(f);
        }
    }
}

/* A device that deals out items by itself has them in the order of the batch. */
static void test_lanes_keep_the_order(void **state)
{
    (void)state;
    fixture *f = make(32, 8, 1);
    f->rule.num_lanes = 132;
    static const int32_t query_lens[] = {1, 512, 1, 64, 1};
    for (int32_t i = 0; i < FV_ARRAY_LEN(query_lens); i++) add(f, query_lens[i], 1024);
    fv_query_run runs[MAX_SEQS];
    list_queries(runs, f);
    fv_worker_order(runs, &f->rule, &f->step);
    for (int32_t i = 0; i < FV_ARRAY_LEN(query_lens); i++) {
        assert_int_equal(runs[i].seq, i);
        assert_int_equal(runs[i].num_tokens, query_lens[i]);
        assert_int_equal(runs[i].end_key, 1024);
    }
    destroy(f);
}

/* Where the KV heads of a token lie side by side a short query is cut by keys, as long as its pieces are long enough. */
static void test_heads_stay_together(void **state)
{
    (void)state;
    static const struct {
        fv_kv_layout layout;
        int32_t seq_len, is_cut; /* by heads */
    } cases[] = {
        {FV_KV_LAYOUT_2_NB_BS_H_D, 512, 0},   {FV_KV_LAYOUT_2_NB_BS_H_D, 1024, 0}, {FV_KV_LAYOUT_2_NB_BS_H_D, 3072, 0},
        {FV_KV_LAYOUT_2_NB_BS_H_D, 65536, 0}, {FV_KV_LAYOUT_2_NB_BS_H_D, 256, 1},  {FV_KV_LAYOUT_X_PACKED, 1024, 1},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(cases); i++) {
        fixture *f = make(32, 8, 2);
        f->problem.kv_layout = cases[i].layout;
        allocate(f);
        add(f, 1, cases[i].seq_len);
        build(f);
        for (int32_t item = 0; item < f->list.num_items; item++)
            assert_int_equal(f->list.items[item].num_kv_heads < 8, cases[i].is_cut);
        destroy(f);
    }
}

/* Q blocks are halved where workers would wait for the largest, and nowhere else; nothing is left to be merged then. */
static void test_query_blocks_are_halved(void **state)
{
    (void)state;
    static const struct {
        int32_t num_workers, query_len, num_items;
    } cases[] = {{1, 256, 16}, {2, 256, 16}, {16, 256, 32}, {16, 512, 32}, {16, 128, 32}, {2, 2048, 128}};
    for (int32_t i = 0; i < FV_ARRAY_LEN(cases); i++) {
        fixture *f = make(32, 8, cases[i].num_workers);
        f->rule.block_q = 128;
        f->rule.least_block_q = 32;
        allocate(f);
        add(f, cases[i].query_len, cases[i].query_len);
        build(f);
        check_cover(f);
        assert_int_equal(f->list.num_items, cases[i].num_items);
        assert_int_equal(f->list.num_slots, 0);
        if (cases[i].num_workers > 1) assert_true(longest_over_mean(f) <= 1.12);
        destroy(f);
    }
}

/* Sequences that make whole rounds of the workers stay whole: partial results of MLA take as long as many keys. */
static void test_no_more_pieces_than_needed(void **state)
{
    (void)state;
    static const batch_part eight = {8, 1, 4096};
    for (int32_t num_workers = 2; num_workers <= 16; num_workers *= 2) {
        fixture *f = make_batch(1, num_workers, &eight, 1);
        assert_int_equal(f->list.num_items, fv_max_i32(8, num_workers));
        destroy(f);
    }
    static const batch_part one = {1, 1, 4096};
    fixture *f = make_batch(1, 2, &one, 1);
    assert_int_equal(f->list.num_items, 2);
    destroy(f);
}

/* Where workers take keys of each other's items one piece for each is enough; of several queries only where each has many. */
static void test_dealt_keys_need_no_spare_pieces(void **state)
{
    (void)state;
    static const struct {
        int32_t batch, num_workers, num_items;
    } cases[] = {{1, 2, 2}, {1, 4, 4}, {1, 16, 16}, {4, 16, 16}, {1, 1, 1}};
    for (int32_t i = 0; i < FV_ARRAY_LEN(cases); i++) {
        fixture *f = make(32, 8, cases[i].num_workers);
        f->rule.deals_keys = 1;
        allocate(f);
        for (int32_t seq = 0; seq < cases[i].batch; seq++) add(f, 1, 32768);
        build(f);
        assert_int_equal(f->list.num_items, cases[i].num_items);
        destroy(f);
    }
    for (int32_t deals_keys = 0; deals_keys < 2; deals_keys++) {
        fixture *f = make(32, 8, 4);
        f->rule.deals_keys = deals_keys;
        allocate(f);
        for (int32_t seq = 0; seq < 1 + deals_keys; seq++) add(f, 1, 32768);
        build(f);
        assert_true(f->list.num_items > 4); /* not dealt out, and two queries on four workers */
        destroy(f);
    }
}

/* Verification of up to 16 tokens is cut as well as single tokens. */
static void test_short_queries_are_cut_too(void **state)
{
    (void)state;
    for (int32_t query_len = 1; query_len <= 16; query_len++) {
        fixture *f = make(32, 8, 4);
        allocate(f);
        add(f, query_len, 16384);
        build(f);
        assert_true(f->list.num_items >= 8);
        assert_true(longest_over_mean(f) <= 1.08);
        destroy(f);
    }
}

/* Items of up to shared_rows rows of a KV head have all heads, and are cut by keys. */
static void test_shared_rows(void **state)
{
    (void)state;
    for (int32_t query_len = 1; query_len <= 9; query_len++) {
        fixture *f = make(32, 8, 4);
        f->rule.shared_rows = 32;
        allocate(f);
        add(f, query_len, 16384);
        build(f);
        check_cover(f);
        assert_int_equal(f->list.items[0].num_kv_heads, query_len <= 8 ? 8 : 1);
        assert_true(longest_over_mean(f) <= 1.08);
        destroy(f);
    }
}

/* A long query's tokens are reduced a few at a time: who reduces takes them one after the other. */
static void test_long_queries_are_reduced_in_runs(void **state)
{
    (void)state;
    for (int32_t query_len = 17; query_len <= 64; query_len++) {
        fixture *f = make(32, 8, 132);
        allocate(f);
        add(f, query_len, 16384);
        build(f);
        check_cover(f);
        assert_true(f->list.num_reduces >= query_len / 4);
        for (int32_t i = 0; i < f->list.num_reduces; i++) assert_in_range(f->list.reduces[i].num_tokens, 1, 4);
        destroy(f);
    }
}

/* No cliff: as a batch grows by one sequence, workers never wait long. */
static void test_nothing_jumps(void **state)
{
    (void)state;
    for (int32_t batch = 1; batch <= 48; batch++) {
        const batch_part part = {batch, 1, 4096};
        fixture *f = make_batch(8, 8, &part, 1);
        const double ratio = longest_over_mean(f);
        if (!(ratio <= 1.1)) fail_msg("%d sequences: %g", batch, ratio);
        destroy(f);
    }
}

/* Items of `batch` decodes over `keys` keys on a device of so many workers and lanes; *tapers: they get shorter. */
static int32_t items_of_dtype(fv_dtype kv_dtype, int32_t num_workers, int32_t num_lanes, int32_t batch, int32_t keys,
                              int32_t *tapers)
{
    fixture *f = make(32, 8, num_workers);
    f->problem.kv_dtype = kv_dtype;
    f->rule.num_lanes = num_lanes;
    f->rule.half_rows = kv_dtype == FV_DTYPE_F8_E4M3 ? 8 : 0;
    allocate(f);
    for (int32_t i = 0; i < batch; i++) add(f, 1, keys);
    build(f);
    check_cover(f);
    for (int32_t i = 0; i < f->list.num_items; i++) assert_int_equal(f->list.items[i].num_kv_heads, 8);
    const int32_t num_items = f->list.num_items;
    const fv_work_item *first = &f->list.items[0], *last = &f->list.items[num_items - 1];
    *tapers = 2 * (last->end_key - last->first_key) < first->end_key - first->first_key;
    if (!*tapers) assert_int_equal(num_items % batch, 0);
    destroy(f);
    return num_items;
}

static int32_t items_of_rule(int32_t num_workers, int32_t num_lanes, int32_t batch, int32_t keys, int32_t *tapers)
{
    return items_of_dtype(FV_DTYPE_BF16, num_workers, num_lanes, batch, keys, tapers);
}

/* On one of 132 workers with so many lanes each. */
static int32_t items_of_lanes(int32_t lanes_each, int32_t batch, int32_t keys, int32_t *tapers)
{
    return items_of_rule(132, lanes_each * 132, batch, keys, tapers);
}

static int32_t lane_items(int32_t batch, int32_t keys, int32_t *tapers)
{
    return items_of_lanes(3, batch, keys, tapers);
}

/* Few sequences are cut for the lanes to have work, many are left whole. */
static void test_lanes_have_work(void **state)
{
    (void)state;
    int32_t tapers;
    const int32_t one = lane_items(1, 32768, &tapers);
    assert_true(one * 8 > 396 / 3 && one * 8 <= 396);
    assert_in_range(lane_items(1, 65536, &tapers), 32,
                    33);                             /* two for each worker: as soon done as three, fewer to reduce */
    assert_true(lane_items(1, 1024, &tapers) <= 16); /* no piece below 64 keys */
    assert_int_equal(lane_items(48, 1024, &tapers), 48);
    for (int32_t batch = 8; batch <= 32; batch *= 2)
        assert_int_equal(lane_items(batch, 8192, &tapers), 32); /* 256 of heads, nearly two for each worker */
    for (int32_t batch = 1; batch <= 48; batch++) {
        const int32_t items = 8 * lane_items(batch, 4096, &tapers);
        assert_true(items >= 396 / 3);
        if (tapers) continue;
        assert_true(items <= 396 || items % 396 == 0 || items % 396 > 396 / 5 ||
                    items > 3 * 396); /* no round for a few */
    }
}

/* Two lanes a worker: where one round of a lane each is nearly full it takes no longer than two, and fewer pieces are reduced. */
static void test_two_lanes(void **state)
{
    (void)state;
    int32_t tapers;
    assert_int_equal(items_of_lanes(2, 1, 8192, &tapers), 16);
    for (int32_t batch = 1; batch <= 16; batch *= 2) assert_int_equal(items_of_lanes(2, batch, 16384, &tapers), 16);
    assert_int_equal(items_of_lanes(2, 32, 8192, &tapers), 32);
    for (int32_t batch = 64; batch <= 96; batch += 32)
        assert_int_equal(items_of_lanes(2, batch, 1024, &tapers), batch); /* whole rounds of 264 */
    assert_int_equal(items_of_lanes(2, 24, 4096, &tapers), 48); /* 384 of heads: one round of three smaller ones */
    assert_int_equal(items_of_lanes(2, 48, 2048, &tapers), 48);
}

/* Next to one byte more items than two a worker run four at once: those are one round, and whole sequences of few rounds
 * do not end with small pieces, beside which the large ones would take longer than alone. */
static void test_half_lanes(void **state)
{
    (void)state;
    int32_t tapers;
    for (int32_t batch = 34; batch <= 64; batch += 10) {
        assert_int_equal(items_of_dtype(FV_DTYPE_F8_E4M3, 132, 264, batch, 1024, &tapers), batch);
        assert_int_equal(items_of_dtype(FV_DTYPE_F8_E4M3, 132, 264, batch, 2048, &tapers), batch);
        assert_int_equal(items_of_dtype(FV_DTYPE_F8_E4M3, 132, 264, batch, 4096, &tapers), batch);
    }
    assert_int_equal(items_of_dtype(FV_DTYPE_F8_E4M3, 132, 264, 24, 4096, &tapers), 24);
    assert_int_equal(items_of_dtype(FV_DTYPE_F8_E4M3, 132, 264, 28, 4096, &tapers), 28);
    assert_int_equal(items_of_dtype(FV_DTYPE_F8_E4M3, 132, 264, 24, 8192, &tapers), 48);
    assert_int_equal(items_of_dtype(FV_DTYPE_F8_E4M3, 132, 264, 17, 3072, &tapers), 51);
    assert_int_equal(items_of_dtype(FV_DTYPE_F8_E4M3, 132, 264, 20, 4096, &tapers), 60);
    assert_int_equal(items_of_dtype(FV_DTYPE_F8_E4M3, 132, 264, 20, 2048, &tapers), 20);
}

/* Lanes that keep pace with each other are workers: few items are cut until they fill a round of all lanes. */
static void test_lanes_that_keep_pace(void **state)
{
    (void)state;
    int32_t tapers;
    assert_int_equal(items_of_rule(528, 528, 8, 8192, &tapers), 64); /* 512 of heads */
    assert_int_equal(items_of_rule(528, 528, 32, 4096, &tapers), 64);
    assert_int_equal(items_of_rule(528, 528, 64, 1024, &tapers), 64);
}

/* Where a lane is a worker or more, the sequences that fill whole rounds stay whole, and the others are cut into pieces that fill
 * one more; unless a round of short ones takes less time than their reduction. */
static void test_whole_rounds(void **state)
{
    (void)state;
    for (int32_t keys = 512; keys <= 4096; keys *= 2) {
        fixture *f = make(128, 1, 132);
        f->rule.block_q = 1;
        f->rule.num_lanes = 66;
        allocate(f);
        for (int32_t i = 0; i < 96; i++) add(f, 1, keys);
        build(f);
        check_cover(f);
        assert_int_equal(f->list.num_items, keys == 512 ? 96 : 66 + 2 * 30);
        for (int32_t i = 0; i < f->list.num_items; i++) {
            const fv_work_item *item = &f->list.items[i];
            const int32_t is_whole = keys == 512 || i < 66;
            assert_int_equal(item->end_key - item->first_key, is_whole ? keys : keys / 2);
        }
        destroy(f);
    }
}

/* Built: equal sequences of MLA, with items of 128 heads on two of 132 workers, else on one, which two lanes may share. */
static fixture *make_mla(int32_t heads, int32_t num_seqs, int32_t keys)
{
    fixture *f = make(heads, 1, 132);
    f->problem.kind = FV_ATTENTION_MLA;
    f->rule.block_q = 1;
    f->rule.num_lanes = heads == 128 ? 66 : 132;
    f->rule.splits_items = 1;
    allocate(f);
    for (int32_t seq = 0; seq < num_seqs; seq++) add(f, 1, keys);
    build(f);
    check_cover(f);
    return f;
}

/* Where two lanes may share an item, sequences that would be cut in two to fill the last round stay whole, for two lanes each. */
static void test_split_rounds(void **state)
{
    (void)state;
    static const struct {
        int32_t heads, num_seqs, num_items, num_split;
    } cases[] = {{128, 96, 96, 30}, {128, 90, 90, 24}, {128, 66, 66, 0}, {128, 33, 33, 33}, {128, 34, 0, 0},
                 {128, 16, 32, 32}, {128, 8, 0, 0},    {16, 64, 64, 64}, {16, 66, 66, 66},  {16, 67, 0, 0}};
    for (size_t i = 0; i < FV_ARRAY_LEN(cases); i++) {
        fixture *f = make_mla(cases[i].heads, cases[i].num_seqs, 4096);
        assert_int_equal(f->list.num_split, cases[i].num_split);
        if (cases[i].num_split > 0) assert_int_equal(f->list.num_items, cases[i].num_items);
        if (cases[i].num_split > 0) assert_int_equal(f->list.num_reduces, cases[i].num_seqs == 16 ? 16 : 0);
        destroy(f);
    }
}

/* Where up to eight lanes may share an item, few queries of one token and about one length stay whole: the longer, the more of
 * the workers have a part of them. */
static void test_meeting(void **state)
{
    (void)state;
    static const struct {
        int32_t num_kv_heads, num_seqs, keys, num_meeting;
        fv_dtype dtype;
    } cases[] = {{8, 1, 1024, 8, 0},
                 {8, 2, 1024, 4, 0},
                 {8, 3, 1024, 4, 0},
                 {8, 4, 1024, 2, 0},
                 {8, 4, 4160, 2, 0},
                 {8, 4, 4176, 0, 0},
                 {8, 8, 1024, 2, 0},
                 {8, 8, 8192, 2, 0},
                 {8, 9, 1024, 0, 0},
                 {8, 1, 256, 0, 0},
                 {8, 1, 16672, 8, FV_DTYPE_BF16},
                 {8, 1, 16688, 0, FV_DTYPE_BF16},
                 {4, 1, 8336, 8, FV_DTYPE_BF16},
                 {4, 1, 8352, 0, FV_DTYPE_BF16},
                 {4, 2, 16672, 8, FV_DTYPE_BF16},
                 {8, 2, 12400, 0, FV_DTYPE_BF16},
                 {8, 3, 12288, 4, FV_DTYPE_BF16},
                 {8, 3, 12304, 0, FV_DTYPE_BF16},
                 {8, 1, 23264, 8, FV_DTYPE_F8_E4M3},
                 {8, 1, 23280, 0, FV_DTYPE_F8_E4M3},
                 {2, 1, 5808, 8, FV_DTYPE_F8_E4M3},
                 {2, 1, 5824, 0, FV_DTYPE_F8_E4M3},
                 {8, 2, 8336, 4, FV_DTYPE_F8_E4M3},
                 {8, 2, 8352, 0, FV_DTYPE_F8_E4M3}};
    for (size_t i = 0; i < FV_ARRAY_LEN(cases); i++) {
        fixture *f = make(32, cases[i].num_kv_heads, 132);
        f->rule.num_lanes = 264;
        f->rule.splits_items = 8;
        if (cases[i].dtype) f->problem.kv_dtype = cases[i].dtype;
        allocate(f);
        for (int32_t seq = 0; seq < cases[i].num_seqs; seq++) add(f, 1, cases[i].keys);
        build(f);
        check_cover(f);
        const int32_t meets = cases[i].num_meeting > 0;
        assert_int_equal(f->list.num_meeting, cases[i].num_meeting);
        assert_int_equal(f->list.num_split, meets ? cases[i].num_seqs : 0);
        assert_int_equal(f->list.piece_keys, meets ? cases[i].keys / cases[i].num_meeting : 0);
        if (meets) assert_int_equal(f->list.num_reduces, 0);
        destroy(f);
    }
}

/* Equal sequences on 66 lanes: so many pieces of each, of whole tiles. */
static void check_pieces(fv_attention_kind kind, int32_t num_seqs, int32_t keys, int32_t pieces, int32_t piece_keys)
{
    fixture *f = make(128, 1, 132);
    f->problem.kind = kind;
    f->rule.block_q = 1;
    f->rule.num_lanes = 66;
    allocate(f);
    for (int32_t seq = 0; seq < num_seqs; seq++) add(f, 1, keys);
    build(f);
    check_cover(f);
    assert_int_equal(f->list.num_items, num_seqs * pieces);
    assert_int_equal(f->list.items[0].end_key, piece_keys);
    destroy(f);
}

/* Partial results of MLA are large: few keys are cut into pieces of more than one tile before they fill half of the lanes. */
static void test_large_parts(void **state)
{
    (void)state;
    check_pieces(FV_ATTENTION_MLA, 1, 1024, 16, 64);
    check_pieces(FV_ATTENTION_MLA, 1, 4096, 32, 128);
    check_pieces(FV_ATTENTION_MLA, 1, 32768, 64, 512);
    check_pieces(FV_ATTENTION_MLA, 2, 4096, 22, 192);
}

/* Few sequences: as many pieces of each as fill one round. */
static void test_one_round(void **state)
{
    (void)state;
    check_pieces(FV_ATTENTION_MHA, 1, 32768, 64, 512);
    check_pieces(FV_ATTENTION_MHA, 2, 8192, 32, 256);
    check_pieces(FV_ATTENTION_MHA, 3, 8192, 22, 384);
    check_pieces(FV_ATTENTION_MHA, 4, 8192, 16, 512);
    check_pieces(FV_ATTENTION_MHA, 5, 8192, 13, 640);
}

/* When the last lane ends that takes the items as they come, and parts are reduced, in keys. */
static double lanes_end(const fixture *f)
{
    double ends[132] = {0}, last = 0, reduction = 0;
    assert_true(f->rule.num_lanes <= 132);
    for (int32_t i = 0; i < f->list.num_items; i++) {
        const fv_work_item *item = &f->list.items[i];
        int32_t lane = 0;
        for (int32_t j = 1; j < f->rule.num_lanes; j++)
            if (ends[j] < ends[lane]) lane = j;
        const int32_t rows = item->num_tokens * group(f);
        ends[lane] += item->end_key - item->first_key +
                      (item->partial >= 0 ? fv_lane_fill_part_keys(rows) : fv_lane_item_keys(rows, 0));
        if (ends[lane] > last) last = ends[lane];
        if (item->partial >= 0) reduction = fv_lane_fill_reduce_keys(rows);
    }
    return last + reduction;
}

/* Sequences of MLA: 96 decodes of 128 heads, which two workers share, or of 16. `kind` of lengths; each sums up to the same. */
static double mla_lanes_end(int32_t heads, int32_t kind, uint32_t seed)
{
    enum { SEQS = 96, KEYS = 4096 };
    fixture *f = make(heads, 1, 132);
    f->rule.block_q = 1;
    f->rule.num_lanes = heads == 128 ? 66 : 132;
    allocate(f);
    int32_t lens[SEQS], rest = SEQS * KEYS;
    for (int32_t i = 0; i < SEQS; i++) {
        const int32_t random = 1 + (int32_t)(next_random(&seed) % (2 * KEYS - 1));
        const int32_t wanted = kind == 0   ? KEYS
                               : kind == 1 ? KEYS / 2 * (1 + i % 3)
                               : kind == 2 ? KEYS / 4 * (i % 2 ? 1 : 7)
                               : kind == 3 ? (i < 2 ? 14 * KEYS : KEYS / 2)
                                           : random;
        lens[i] = fv_max_i32(1, fv_min_i32(wanted, rest - (SEQS - 1 - i)));
        rest -= lens[i];
    }
    for (int32_t i = 0; rest > 0; i = (i + 1) % SEQS, rest--) lens[i]++;
    for (int32_t i = 0; i < SEQS; i++) add(f, 1, lens[i]);
    build(f);
    check_cover(f);
    const double end = lanes_end(f);
    destroy(f);
    return end;
}

/* Lengths that vary cost no more than equal ones of the same sum that stay whole in rounds, up to 2% more than equal ones that are
 * filled; random ones little more: one of twenty up to 4%, the others 3. */
static void test_lanes_are_filled(void **state)
{
    (void)state;
    for (int32_t heads = 16; heads <= 128; heads *= 8) {
        const double equal = mla_lanes_end(heads, 0, 0);
        const double most = heads == 128 ? equal : 1.02 * equal; /* else equal ones are filled, too */
        for (int32_t kind = 1; kind <= 3; kind++) assert_true(mla_lanes_end(heads, kind, 0) <= most);
        int32_t num_long = 0;
        for (uint32_t seed = 1; seed <= 20; seed++) {
            const double end = mla_lanes_end(heads, 4, seed);
            num_long += end > 1.03 * equal;
            assert_true(end <= 1.04 * equal);
        }
        assert_true(num_long <= 1);
    }
}

/* Sequences that are all alike are filled where equal shares would leave many lanes idle, and stay whole where few would be. */
static void test_alike_are_filled(void **state)
{
    (void)state;
    static const struct {
        int32_t heads, num_seqs, keys;
        double most; /* of whole ones */
    } cases[] = {{128, 34, 4096, 0.75}, {128, 40, 4096, 0.8},  {128, 34, 16384, 0.6}, {128, 48, 4096, 0.9},
                 {128, 56, 4096, 1},    {16, 67, 4096, 0.7},   {16, 80, 4096, 0.75},  {16, 96, 16384, 0.85},
                 {16, 100, 4096, 1},    {64, 110, 65536, 0.9}, {64, 110, 8192, 1},    {16, 120, 65536, 0.96}};
    for (size_t i = 0; i < FV_ARRAY_LEN(cases); i++) {
        fixture *f = make_mla(cases[i].heads, cases[i].num_seqs, cases[i].keys);
        const double whole = cases[i].keys + fv_lane_item_keys(cases[i].heads, 0);
        assert_true(lanes_end(f) <= cases[i].most * whole);
        if (cases[i].most == 1) assert_int_equal(f->list.num_items, cases[i].num_seqs);
        destroy(f);
    }
}

/* Long sequences of MLA whose parts the room for partial results would not hold, had each as many as would fill the rounds best:
 * the last ones do not stay whole behind the others, nor are the first ones longer than a lane's share. */
static void test_parts_find_room(void **state)
{
    (void)state;
    static const int32_t nums[] = {90, 95, 100, 105, 110, 120};
    for (size_t i = 0; i < FV_ARRAY_LEN(nums); i++) {
        fixture *f = make_mla(64, nums[i], 65536);
        assert_true(lanes_end(f) <= 1.15 * nums[i] * 65536 / 132);
        assert_true(f->list.num_slots <= f->list.slot_capacity);
        destroy(f);
    }
}

/* More than a token each, windows, and more sequences than are filled: covered all the same. */
static void test_filled_lanes_are_covered(void **state)
{
    (void)state;
    uint32_t random = 5;
    for (int32_t i = 0; i < 200; i++) {
        fixture *f = make(1 + (int32_t)(next_random(&random) % 16), 1, 1 + (int32_t)(next_random(&random) % 40));
        f->rule.num_lanes = 1 + (int32_t)(next_random(&random) % (uint32_t)f->rule.num_workers);
        f->problem.window = next_random(&random) % 3 == 0 ? 1 + (int32_t)(next_random(&random) % 9000) : 0;
        allocate(f);
        const int32_t num_seqs = 1 + (int32_t)(next_random(&random) % MAX_SEQS);
        for (int32_t seq = 0; seq < num_seqs; seq++) {
            const int32_t query_len = 1 + (int32_t)(next_random(&random) % (uint32_t)(FV_DECODE_ROWS / group(f)));
            add(f, query_len, query_len + (int32_t)(next_random(&random) % (next_random(&random) % 4 ? 9000 : 60000)));
        }
        build(f);
        check_cover(f);
        destroy(f);
    }
}

/* Where there is work for several rounds of the lanes the first sequences stay whole and the last are cut, ever smaller, so
 * that lanes end together. */
static void test_pieces_taper(void **state)
{
    (void)state;
    fixture *f = make(32, 8, 33);
    f->rule.num_lanes = 3 * 33;
    allocate(f);
    for (int32_t i = 0; i < 60; i++) add(f, 1, 4096);
    build(f);
    check_cover(f);
    int32_t before = INT32_MAX, num_whole = 0;
    for (int32_t i = 0; i < f->list.num_items; i++) {
        const fv_work_item *item = &f->list.items[i];
        const int32_t keys = item->end_key - item->first_key;
        num_whole += keys == 4096;
        assert_true(keys <= before || before < 4096 / 2); /* the last piece of a sequence may be short */
        before = keys;
    }
    assert_in_range(num_whole, 60 - 99 / 12 - 2, 60 - 99 / 12 + 1); /* until two thirds of a job are left for a lane */
    assert_true(before <= 1024);
    destroy(f);
}

/* Many passes that share few slots: room for the pieces that these leave, not for all that workers would like. */
static void test_room_follows_slots(void **state)
{
    (void)state;
    enum { PASSES = 8, RUNS = MAX_SEQS / PASSES, BLOCKS = MAX_TOKENS / 16 + MAX_SEQS };
    for (int32_t num_slots = 0; num_slots <= 12; num_slots += 4) {
        fixture *f = make(16, 1, 64);
        const size_t slot_bytes = 16 * 130 * sizeof(float);
        f->rule.num_passes = PASSES;
        f->rule.block_q = 16;
        fv_work_list_room(&f->list, &f->rule, &f->bounds, slot_bytes, (size_t)num_slots * slot_bytes);
        assert_int_equal(f->list.slot_capacity, num_slots);
        assert_int_equal(f->list.item_capacity, BLOCKS + PASSES * (1 + num_slots));
        f->list.items = calloc((size_t)f->list.item_capacity, sizeof(fv_work_item));
        f->list.reduces = calloc((size_t)f->list.reduce_capacity, sizeof(fv_reduce_item));
        for (int32_t seq = 0; seq < MAX_SEQS; seq++) add(f, 1, 600);
        for (int32_t pass = 0; pass < PASSES; pass++) {
            fv_query_run runs[RUNS];
            for (int32_t i = 0; i < RUNS; i++) runs[i] = (fv_query_run){pass * RUNS + i, 0, 1, 0, 600};
            assert_int_equal(fv_work_list_append(&f->list, &f->rule, &f->step, &(fv_pass){runs, RUNS, NULL, 0}), FV_OK);
            assert_int_equal(f->list.num_slots, num_slots); /* two for each that is cut */
        }
        assert_int_equal(f->list.num_items, MAX_SEQS + PASSES * num_slots / 2);
        destroy(f);
    }
}

/* Where the slots have no room for a piece for each share there are fewer and longer pieces, or runs of heads, and still work
 * for all workers. */
static void test_little_room_is_shared(void **state)
{
    (void)state;
    static const batch_part batches[][2] = {
        {{1, 1, 65536}}, {{1, 4, 65536}}, {{3, 1, 65536}}, {{1, 1, 65536}, {5, 1, 9000}}};
    static const size_t limits[] = {100 << 10, 500 << 10, 1 << 20, 2 << 20, 8 << 20};
    for (int32_t num_workers = 2; num_workers <= 64; num_workers *= 2) {
        for (int32_t i = 0; i < FV_ARRAY_LEN(batches); i++) {
            for (int32_t limit = 0; limit < FV_ARRAY_LEN(limits); limit++) {
                fixture *f = make(64, 8, num_workers);
                f->problem.kv_layout = FV_KV_LAYOUT_2_NB_BS_H_D;
                f->rule.block_q = 4;
                allocate_within(f, limits[limit]);
                for (int32_t part = 0; part < 2; part++) {
                    const batch_part *of = &batches[i][part];
                    for (int32_t seq = 0; seq < of->num_seqs; seq++) add(f, of->query_len, of->seq_len);
                }
                build(f);
                check_cover(f);
                const int64_t places = 8 * (int64_t)fv_max_i32(f->list.slot_capacity / batches[i][0].query_len, 1);
                const double ratio = longest_over_mean(f),
                             least = (double)num_workers / (double)fv_min_i64(places, num_workers);
                if (!(ratio <= 1.4 * least))
                    fail_msg("batch %d, %d workers, %zu bytes: %g, %d items", i, num_workers, limits[limit], ratio,
                             f->list.num_items);
                destroy(f);
            }
        }
    }
}

/* An item of a device with lanes has all KV heads: room is for as many whatever their number. */
static void test_room_of_lanes_is_for_all_heads(void **state)
{
    (void)state;
    int32_t capacities[2];
    for (int32_t i = 0; i < 2; i++) {
        const int32_t heads = i == 0 ? 1 : 32;
        fixture *f = make(heads, heads, 132);
        f->rule.num_lanes = 264;
        fv_work_list_room(&f->list, &f->rule, &f->bounds, 130 * sizeof(float), SLOTS_LIMIT);
        capacities[i] = f->list.item_capacity;
        destroy(f);
    }
    assert_int_equal(capacities[1], capacities[0]);
}

/* Batch-invariant rules cut a sequence alike, whoever else is in the batch. */
static void test_batch_invariant_cuts(void **state)
{
    (void)state;
    fixture *alone = make(32, 8, 4), *together = make(32, 8, 4);
    alone->rule.batch_invariant = together->rule.batch_invariant = 1;
    allocate(alone);
    allocate(together);
    add(alone, 1, 30000);
    for (int32_t i = 0; i < 9; i++) add(together, 1 + i * 3, 500 + 7000 * i);
    add(together, 1, 30000);
    build(alone);
    build(together);
    assert_true(alone->list.num_reduces == 1);
    const fv_reduce_item *mine = &alone->list.reduces[0];
    const fv_reduce_item *theirs = &together->list.reduces[together->list.num_reduces - 1];
    assert_int_equal(mine->num_segments, theirs->num_segments);
    assert_true(mine->num_segments > 1);
    destroy(alone);
    destroy(together);
}

/* Sequences that share their first keys: every key of every token still once, and the shared keys of all
 * members in the same items. */
static void test_shared_keys_are_read_once(void **state)
{
    (void)state;
    const fv_prefix_group groups[] = {{1, 6, 2048}, {8, 2, 512}};
    fixture *f = make(32, 8, 2), *plain = make(32, 8, 2);
    f->rule.cascade = 1;
    allocate(f);
    allocate(plain);
    for (int32_t i = 0; i < 10; i++) {
        add(f, i == 3 ? 7 : 1, 2500 + 100 * i);
        add(plain, i == 3 ? 7 : 1, 2500 + 100 * i);
    }
    build_with(f, groups, 2);
    check_cover(f);
    build(plain);
    int64_t keys, plain_keys;
    largest_item(f, &keys);
    largest_item(plain, &plain_keys);
    assert_true(keys < plain_keys * 2 / 3);
    destroy(f);
    destroy(plain);
}

/* What few rows cost where each has keys of its own says nothing of many that share them. */
static void test_shared_keys_cost_what_many_rows_do(void **state)
{
    (void)state;
    const fv_prefix_group group = {0, 32, 8192};
    fixture *all[2];
    for (int32_t i = 0; i < 2; i++) {
        all[i] = make(32, 8, 6);
        all[i]->rule.cascade = 1;
        all[i]->rule.block_q = 128;
        all[i]->rule.few_row_cost = i == 0 ? 1 : 6;
        allocate(all[i]);
        for (int32_t seq = 0; seq < 32; seq++) add(all[i], 1, 9000);
        build_with(all[i], &group, 1);
        check_cover(all[i]);
    }
    assert_int_equal(all[0]->list.num_items, all[1]->list.num_items);
    assert_memory_equal(all[0]->list.items, all[1]->list.items, (size_t)all[0]->list.num_items * sizeof(fv_work_item));
    destroy(all[0]);
    destroy(all[1]);
}

/* Nor has an item of a group more tokens than the kernels' scratch has room for, however many rows share heads. */
static void test_groups_fit_the_scratch(void **state)
{
    (void)state;
    const fv_prefix_group groups[] = {{0, 2, 1024}};
    for (int32_t shared_rows = 0; shared_rows <= 48; shared_rows += 16) {
        fixture *f = make(32, 8, 2);
        f->rule.cascade = 1;
        f->rule.block_q = 4;
        f->rule.shared_rows = shared_rows;
        allocate(f);
        add(f, 4, 2048);
        add(f, 4, 2000);
        build_with(f, groups, 1);
        check_cover(f);
        destroy(f);
    }
}

/* The static grid finds the same sequence as a walk, with empty sequences among the others. */
static void test_grid_search(void **state)
{
    (void)state;
    const int32_t query_lens[] = {0, 5, 1, 0, 0, 17, 4, 0};
    int32_t query_start[9] = {0};
    for (int32_t i = 0; i < 8; i++) query_start[i + 1] = query_start[i] + query_lens[i];
    const int32_t seq_lens[] = {9, 5, 300, 0, 4, 17, 40, 0};
    for (int32_t block_q = 1; block_q <= 8; block_q++) {
        const fv_attend_params params = {.num_seqs = 8,
                                         .query_start = query_start,
                                         .seq_lens = seq_lens,
                                         .context_parallel = {1, 0, 1},
                                         .block_q = block_q,
                                         .tile_keys = 16,
                                         .num_segments = 1};
        int32_t seen[32] = {0};
        for (int32_t q_block = 0; q_block < query_start[8] / block_q + 8; q_block++) {
            fv_work_item item;
            if (!fv_grid_item(&item, &params, q_block, 0, 0)) continue;
            for (int32_t t = 0; t < item.num_tokens; t++) {
                const int32_t token = query_start[item.seq] + item.first_token + t;
                assert_true(token < query_start[item.seq + 1]);
                seen[token]++;
            }
        }
        for (int32_t token = 0; token < query_start[8]; token++) assert_int_equal(seen[token], 1);
    }
}

/* A list of fixed length has room for any decodes within its bounds: pieces beside one for each query are no more than the rule
 * says, whatever the lengths, and a long query among short ones is cut as finely as that allows. */
static void test_lists_of_fixed_length(void **state)
{
    (void)state;
    static const struct {
        int32_t heads, kv_heads, workers, lanes, spare;
    } devices[] = {{32, 8, 132, 264, 66},
                   {32, 8, 528, 528, 34},
                   {128, 1, 132, 66, 66},
                   {16, 1, 132, 132, 132},
                   {8, 8, 132, 264, 1}};
    uint32_t random = 5;
    for (int32_t i = 0; i < 300; i++) {
        const int32_t device = i % 5;
        fixture *f = make(devices[device].heads, devices[device].kv_heads, devices[device].workers);
        f->rule.block_q = fv_max_i32(1, f->rule.block_q);
        f->rule.num_lanes = devices[device].lanes;
        f->rule.spare_pieces = devices[device].spare;
        const int32_t num_seqs = 1 + (int32_t)(next_random(&random) % MAX_SEQS), are_long = i / 5 % 3;
        f->bounds.max_num_seqs = num_seqs;
        f->bounds.max_num_tokens = num_seqs + (int32_t)(next_random(&random) % 20);
        f->bounds.max_query_len = 1;
        allocate(f);
        fv_work_list_fix(&f->list, &f->rule, &f->bounds);
        assert_int_equal(f->list.item_capacity, num_seqs + devices[device].spare);
        for (int32_t seq = 0; seq < num_seqs; seq++)
            add(f, 1,
                1 + (int32_t)(next_random(&random) % (are_long == 2 || (are_long == 1 && seq == 0) ? 60000 : 1000)));
        f->seq_lens[0] = are_long == 1 ? 32768 : f->seq_lens[0];
        build(f);
        check_cover(f);
        assert_in_range(f->list.num_items, num_seqs, f->list.item_capacity);
        assert_in_range(f->list.num_reduces, 0, f->list.reduce_capacity);
        int64_t total;
        if (are_long == 1 && devices[device].spare > 1)
            assert_in_range(largest_item(f, &total), 1, 32768 * devices[device].kv_heads / 8);
        destroy(f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lists_of_fixed_length),
        cmocka_unit_test(test_random_steps_are_covered),
        cmocka_unit_test(test_workers_end_together),
        cmocka_unit_test(test_long_items_come_first),
        cmocka_unit_test(test_lanes_keep_the_order),
        cmocka_unit_test(test_heads_stay_together),
        cmocka_unit_test(test_query_blocks_are_halved),
        cmocka_unit_test(test_no_more_pieces_than_needed),
        cmocka_unit_test(test_dealt_keys_need_no_spare_pieces),
        cmocka_unit_test(test_short_queries_are_cut_too),
        cmocka_unit_test(test_shared_rows),
        cmocka_unit_test(test_long_queries_are_reduced_in_runs),
        cmocka_unit_test(test_nothing_jumps),
        cmocka_unit_test(test_batch_invariant_cuts),
        cmocka_unit_test(test_grid_search),
        cmocka_unit_test(test_shared_keys_are_read_once),
        cmocka_unit_test(test_shared_keys_cost_what_many_rows_do),
        cmocka_unit_test(test_groups_fit_the_scratch),
        cmocka_unit_test(test_lanes_have_work),
        cmocka_unit_test(test_two_lanes),
        cmocka_unit_test(test_half_lanes),
        cmocka_unit_test(test_lanes_that_keep_pace),
        cmocka_unit_test(test_lanes_are_filled),
        cmocka_unit_test(test_alike_are_filled),
        cmocka_unit_test(test_parts_find_room),
        cmocka_unit_test(test_filled_lanes_are_covered),
        cmocka_unit_test(test_whole_rounds),
        cmocka_unit_test(test_split_rounds),
        cmocka_unit_test(test_meeting),
        cmocka_unit_test(test_large_parts),
        cmocka_unit_test(test_one_round),
        cmocka_unit_test(test_pieces_taper),
        cmocka_unit_test(test_room_follows_slots),
        cmocka_unit_test(test_little_room_is_shared),
        cmocka_unit_test(test_room_of_lanes_is_for_all_heads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
