/* Prefix groups against a search that compares every pair of rows: members share exactly the keys that the
 * group names, all of them context, and no garbage past a sequence makes it longer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "planner/prefix_group.h"
#include "planner/query_block.h"

enum { MAX_SEQS = 14, MAX_WIDTH = 40, NUM_RANDOM_TABLES = 20000, GARBAGE = INT32_MAX };

typedef struct fixture {
    fv_problem problem;
    int32_t query_start[MAX_SEQS + 1];
    int32_t seq_lens[MAX_SEQS];
    fv_step step;
    fv_query_run runs[MAX_SEQS];
    int32_t num_runs;
    int32_t table[MAX_SEQS * MAX_WIDTH];
    fv_block_rows rows;
} fixture;

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* In [low, high]. */
static int32_t random_int(uint32_t *random, int32_t low, int32_t high)
{
    return low + (int32_t)(next_random(random) % (uint32_t)(high - low + 1));
}

static void init(fixture *f, int32_t heads, int32_t kv_heads, int32_t block_size, int32_t width)
{
    memset(f, 0, sizeof(*f));
    f->problem = (fv_problem){.kind = FV_ATTENTION_MHA,
                              .mha = {heads, kv_heads, 128, 128},
                              .block_size = block_size,
                              .context_parallel = {1, 0, 1}};
    f->step = (fv_step){0, f->query_start, f->seq_lens, NULL};
    f->rows = (fv_block_rows){f->table, width, width};
    for (int32_t i = 0; i < MAX_SEQS * MAX_WIDTH; i++) f->table[i] = GARBAGE;
}

/* A sequence, its whole query as a run, and the row of its blocks; past them lies what was there. */
static void add(fixture *f, int32_t query_len, int32_t seq_len, const int32_t *blocks)
{
    const int32_t seq = f->step.num_seqs++;
    f->query_start[seq + 1] = f->query_start[seq] + query_len;
    f->seq_lens[seq] = seq_len;
    f->runs[f->num_runs++] = (fv_query_run){seq, 0, query_len, 0, seq_len};
    const int32_t num_blocks = (seq_len + f->problem.block_size - 1) / f->problem.block_size;
    memcpy(f->table + seq * f->rows.stride, blocks, (size_t)num_blocks * sizeof(int32_t));
}

/* --- the search by comparing everything ---------------------------------------------------------------- */

/* Blocks at the start of a run's sequence that hold nothing but context, if the run may join a group. */
static int32_t context_blocks(const fixture *f, int32_t run)
{
    const fv_query_run *at = &f->runs[run];
    const int32_t query_len = f->query_start[at->seq + 1] - f->query_start[at->seq];
    if (query_len == 0 || at->num_tokens != query_len || at->first_token != 0 || at->first_key != 0) return 0;
    int32_t blocks = 0;
    while (blocks < f->rows.width && (blocks + 1) * f->problem.block_size <= f->seq_lens[at->seq] - query_len) blocks++;
    return blocks;
}

/* Blocks that all of the runs [first, first + count) share, every pair compared; 0 where they may not join. */
static int32_t shared_blocks(const fixture *f, int32_t first, int32_t count)
{
    int32_t shared = context_blocks(f, first);
    for (int32_t i = first + 1; i < first + count; i++) {
        if (f->runs[i].seq != f->runs[i - 1].seq + 1) return 0;
        if (context_blocks(f, i) < shared) shared = context_blocks(f, i);
    }
    for (int32_t i = first; i < first + count; i++) {
        for (int32_t j = first; j < i; j++) {
            for (int32_t block = 0; block < shared; block++) {
                if (f->table[f->runs[i].seq * f->rows.stride + block] !=
                    f->table[f->runs[j].seq * f->rows.stride + block])
                    shared = block;
            }
        }
    }
    return shared;
}

static int64_t gain_of(const fixture *f, int32_t first, int32_t count, int32_t always)
{
    const int64_t keys = (int64_t)shared_blocks(f, first, count) * f->problem.block_size;
    int64_t num_tokens = 0;
    for (int32_t i = first; i < first + count; i++) num_tokens += f->runs[i].num_tokens;
    if (keys == 0) return 0;
    return always ? keys * count : fv_work_cascade_gain(&f->problem, keys, count, num_tokens);
}

/* From each run on, the group with the largest gain, the shorter one of equals. */
static int32_t expected_groups(fv_prefix_group *groups, const fixture *f, int32_t always)
{
    int32_t num_groups = 0;
    for (int32_t first = 0; first < f->num_runs;) {
        int64_t best_gain = 0;
        int32_t best = 1;
        for (int32_t count = 2; first + count <= f->num_runs; count++) {
            const int64_t gain = gain_of(f, first, count, always);
            if (gain > best_gain) {
                best_gain = gain;
                best = count;
            }
        }
        if (best > 1) {
            groups[num_groups++] = (fv_prefix_group){first, best,
                                                     shared_blocks(f, first, best) * f->problem.block_size};
        }
        first += best;
    }
    return num_groups;
}

static int32_t find(fv_prefix_group *groups, const fixture *f, int32_t always)
{
    return fv_prefix_groups_find(groups, &f->problem, &f->step, f->runs, f->num_runs, &f->rows, always);
}

static int32_t check(const fixture *f, int32_t always)
{
    fv_prefix_group groups[MAX_SEQS / 2], expected[MAX_SEQS / 2];
    const int32_t num_groups = find(groups, f, always);
    assert_int_equal(num_groups, expected_groups(expected, f, always));
    if (num_groups > 0) assert_memory_equal(groups, expected, (size_t)num_groups * sizeof(groups[0]));
    return num_groups;
}

/* --- tests ------------------------------------------------------------------------------------------------ */

/* Rows that continue the row before them for a while, and then go their own way. */
static void random_table(fixture *f, uint32_t *random)
{
    static const int32_t block_sizes[] = {1, 3, 16, 64};
    const int32_t kv_heads = random_int(random, 1, 4), block_size = block_sizes[next_random(random) % 4];
    init(f, kv_heads * random_int(random, 1, 8), kv_heads, block_size, MAX_WIDTH - random_int(random, 0, 6));
    f->rows.stride = f->rows.width + random_int(random, 0, MAX_WIDTH - f->rows.width);
    const int32_t same_garbage = next_random(random) % 2, num_seqs = random_int(random, 1, MAX_SEQS);
    const int32_t turns = random_int(random, 1, 5), most_new = next_random(random) % 3 ? 4 : 60;
    int32_t row[MAX_WIDTH] = {0};
    for (int32_t seq = 0; seq < num_seqs; seq++) {
        const int32_t room = f->rows.width * block_size,
                      query_len = random_int(random, 0, most_new < room ? most_new : room);
        const int32_t seq_len = random_int(random, query_len, room);
        const int32_t own_from = next_random(random) % (uint32_t)turns ? random_int(random, 0, f->rows.width) : 0;
        for (int32_t i = own_from; i < f->rows.width; i++) row[i] = random_int(random, 1, 1000);
        add(f, query_len, seq_len, row);
        int32_t *tail = f->table + seq * f->rows.stride;
        for (int32_t i = (seq_len + block_size - 1) / block_size; i < f->rows.width; i++)
            tail[i] = same_garbage ? 7 : random_int(random, -5, 5); /* past the sequence */
    }
}

/* Some runs are left out, halves of a query, or do not begin at key 0. */
static void spoil_runs(fixture *f, uint32_t *random)
{
    int32_t num_runs = 0;
    for (int32_t i = 0; i < f->num_runs; i++) {
        fv_query_run run = f->runs[i];
        const uint32_t kind = next_random(random) % 20;
        if (kind == 0) continue;
        if (kind == 1) run.num_tokens /= 2;
        if (kind == 2 && run.num_tokens > 1) {
            run.first_token = 1;
            run.num_tokens--;
        }
        if (kind == 3) run.first_key = f->problem.block_size;
        f->runs[num_runs++] = run;
    }
    f->num_runs = num_runs;
}

static void test_random_tables(void **state)
{
    (void)state;
    static fixture f;
    uint32_t random = 9;
    int32_t found[2] = {0};
    for (int32_t i = 0; i < NUM_RANDOM_TABLES; i++) {
        random_table(&f, &random);
        if (i % 3 == 0) spoil_runs(&f, &random);
        for (int32_t always = 0; always < 2; always++) found[always] += check(&f, always);
    }
    assert_true(found[0] > NUM_RANDOM_TABLES / 2 && found[1] > found[0]); /* the tables did have groups */
}

/* The picture at the head of prefix_group.h. */
static void test_picture(void **state)
{
    (void)state;
    static fixture f;
    init(&f, 8, 8, 16, 5);
    add(&f, 1, 70, (const int32_t[]){7, 8, 9, 4, 1});
    add(&f, 1, 60, (const int32_t[]){7, 8, 9, 2});
    add(&f, 1, 75, (const int32_t[]){7, 8, 9, 5, 6});
    add(&f, 1, 30, (const int32_t[]){3, 1});
    add(&f, 1, 40, (const int32_t[]){2, 2, 9});
    add(&f, 1, 40, (const int32_t[]){2, 2, 4});
    fv_prefix_group groups[3];
    assert_int_equal(find(groups, &f, 1), 2);
    const fv_prefix_group expected[] = {{0, 3, 48}, {4, 2, 32}};
    assert_memory_equal(groups, expected, sizeof(expected));
}

/* Equal entries past the context are no shared keys, be they garbage or blocks of new tokens. */
static void test_ends_with_the_context(void **state)
{
    (void)state;
    static fixture f;
    const int32_t blocks[] = {5, 6, 7, 8};
    fv_prefix_group groups[1];
    for (int32_t context = 0; context <= 48; context++) {
        init(&f, 8, 8, 16, 4);
        add(&f, 1, context + 1, blocks);
        add(&f, 16, 64, blocks);
        for (int32_t i = 0; i < 8; i++) f.table[i] = blocks[i % 4]; /* past the end the same again */
        const int32_t num_groups = find(groups, &f, 1);
        assert_int_equal(num_groups, context >= 16);
        if (num_groups) assert_int_equal(groups[0].num_keys, context / 16 * 16);
    }
}

/* A table narrower than its sequences is not read past its width, were the rows after it the same. */
static void test_stays_in_the_table(void **state)
{
    (void)state;
    static fixture f;
    const int32_t blocks[] = {5, 6, 7, 8}, rows[] = {5, 6, 5, 6, 5, 6, 5, 6};
    fv_prefix_group groups[1];
    init(&f, 8, 8, 16, 4);
    add(&f, 1, 60, blocks);
    add(&f, 1, 60, blocks);
    f.rows = (fv_block_rows){rows, 2, 2};
    assert_int_equal(find(groups, &f, 1), 1);
    assert_int_equal(groups[0].num_keys, 32);
}

/* Where members see the shared keys in different ways, there are no groups. */
static void test_left_alone(void **state)
{
    (void)state;
    static fixture f;
    const int32_t blocks[] = {5, 6, 7, 8};
    fv_prefix_group groups[1];
    init(&f, 8, 8, 16, 4);
    add(&f, 1, 60, blocks);
    add(&f, 1, 60, blocks);
    assert_int_equal(find(groups, &f, 1), 1);
    f.problem.window = 1000;
    assert_int_equal(find(groups, &f, 1), 0);
    f.problem.window = 0;
    f.problem.alibi = FV_ALIBI_LINEAR;
    assert_int_equal(find(groups, &f, 1), 0);
    f.problem.alibi = FV_ALIBI_SQRT;
    assert_int_equal(find(groups, &f, 1), 0);
    f.problem.alibi = FV_ALIBI_NONE;
    f.problem.context_parallel = (fv_context_parallel){2, 0, 16};
    assert_int_equal(find(groups, &f, 1), 0);
    f.problem.context_parallel = (fv_context_parallel){1, 0, 1};
    f.num_runs = 1;
    assert_int_equal(find(groups, &f, 1), 0);
    f.num_runs = 0;
    assert_int_equal(find(groups, &f, 1), 0);
}

/* By the cost rule a group must pay: not a short prefix of two, but a long one, or one of many. */
static void test_cost_rule(void **state)
{
    (void)state;
    static fixture f;
    int32_t blocks[MAX_WIDTH];
    fv_prefix_group groups[MAX_SEQS / 2];
    for (int32_t i = 0; i < MAX_WIDTH; i++) blocks[i] = i + 1;
    int32_t least = 0; /* blocks from which on two sequences are a group */
    for (int32_t num_blocks = 1; num_blocks < MAX_WIDTH; num_blocks++) {
        init(&f, 32, 8, 1, MAX_WIDTH);
        add(&f, 1, num_blocks + 1, blocks);
        add(&f, 1, num_blocks + 1, blocks);
        const int32_t is_group = find(groups, &f, 0);
        assert_int_equal(is_group, fv_work_cascade_gain(&f.problem, num_blocks, 2, 2) > 0);
        if (is_group && !least) least = num_blocks;
        assert_true(is_group || !least); /* never again less */
    }
    assert_true(least > 1);
    init(&f, 32, 8, 1, MAX_WIDTH);
    for (int32_t i = 0; i < 8; i++) add(&f, 1, least, blocks); /* least - 1 blocks of context each */
    assert_int_equal(find(groups, &f, 0), 1);
    assert_int_equal(groups[0].num_runs, 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_tables),
        cmocka_unit_test(test_picture),
        cmocka_unit_test(test_ends_with_the_context),
        cmocka_unit_test(test_stays_in_the_table),
        cmocka_unit_test(test_left_alone),
        cmocka_unit_test(test_cost_rule),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
