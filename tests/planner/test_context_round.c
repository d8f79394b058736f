/* Context rounds: every new token of every extend is in one round, rounds fit the state buffers and chunks
 * the gather buffers, and each key of the context (or of all) that a run of tokens sees is gathered for it once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "planner/context_round.h"

enum { MAX_SEQS = 12, MAX_SEQ_LEN = 3000, NUM_RANDOM_STEPS = 6000 };

typedef struct fixture {
    fv_problem problem;
    fv_context_limits limits;
    int32_t block_q;
    int32_t query_start[MAX_SEQS + 1];
    int32_t seq_lens[MAX_SEQS];
    uint8_t causal[MAX_SEQS];
    fv_step step;
    int32_t extends[MAX_SEQS];
    int32_t num_extends;
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

/* 2 query heads for a KV head: queries of up to 8 tokens are short. */
static void init(fixture *f, int32_t block_q, int32_t block_size, fv_context_limits limits)
{
    *f = (fixture){
        .problem = {.kind = FV_ATTENTION_MHA,
                    .mha = {4, 2, 64, 64},
                    .block_size = block_size,
                    .context_parallel = {1, 0, 1}},
        .limits = limits,
        .block_q = block_q,
    };
    f->step = (fv_step){0, f->query_start, f->seq_lens, NULL};
}

static void add(fixture *f, int32_t query_len, int32_t seq_len, int32_t is_extend)
{
    const int32_t seq = f->step.num_seqs++;
    f->query_start[seq + 1] = f->query_start[seq] + query_len;
    f->seq_lens[seq] = seq_len;
    f->causal[seq] = 1;
    if (is_extend) f->extends[f->num_extends++] = seq;
}

/* --- what a token sees, position by position ------------------------------------------------------- */

static int32_t token_sees(const fixture *f, int32_t seq, int64_t token, int64_t key)
{
    const int32_t window = f->problem.window;
    if (f->step.causal && !f->step.causal[seq]) return window == 0 || (key > token - window && key < token + window);
    return key <= token && (window == 0 || key > token - window);
}

/* Marks the local keys that some of the run's tokens see, of the context or, where new tokens are gathered too,
 * of the sequence. Returns their number. */
static int32_t mark_keys(char *seen, const fixture *f, const fv_query_run *run)
{
    const fv_context_parallel *cp = &f->problem.context_parallel;
    const int32_t context = f->seq_lens[run->seq] - fv_step_query_len(&f->step, run->seq);
    const int32_t end = f->limits.gathers_new ? f->seq_lens[run->seq] : context;
    int32_t num_local = 0;
    for (int64_t key = 0; key < end; key++) {
        if (key / cp->interleave % cp->world != cp->rank) continue;
        seen[num_local] = 0;
        for (int32_t i = 0; i < run->num_tokens && !seen[num_local]; i++)
            seen[num_local] = (char)token_sees(f, run->seq, (int64_t)context + run->first_token + i, key);
        num_local++;
    }
    return num_local;
}

/* --- walking a step ----------------------------------------------------------------------------------- */

typedef struct walk {
    int32_t num_rounds, num_chunks;
    int32_t extend, token; /* the next token that must come */
    int32_t most_rows;     /* of a chunk */
    int32_t most_state;    /* tokens of a round */
    int64_t num_keys;      /* gathered */
} walk;

/* The keys of a run as its pieces brought them, and those that it needs. */
static void check_run_keys(const fixture *f, const fv_query_run *run)
{
    static char seen[MAX_SEQ_LEN];
    const int32_t num_local = mark_keys(seen, f, run);
    assert_true(run->first_key >= 0 && run->first_key <= run->end_key && run->end_key <= num_local);
    for (int32_t key = 0; key < num_local; key++)
        assert_int_equal(seen[key], key >= run->first_key && key < run->end_key);
}

static void check_chunks(walk *at, const fixture *f, const fv_query_run *runs, int32_t num_runs)
{
    fv_context_piece pieces[MAX_SEQS];
    fv_context_cursor cursor = {0, -1};
    int32_t next_key[MAX_SEQS], num_pieces, most = 0;
    for (int32_t run = 0; run < num_runs; run++) next_key[run] = runs[run].first_key;
    while ((num_pieces = fv_context_chunk_next(&cursor, pieces, &f->problem, runs, num_runs, &f->limits)) > 0) {
        assert_true(num_pieces <= num_runs);
        int32_t rows = 0;
        for (int32_t i = 0; i < num_pieces; i++) {
            const fv_context_piece *piece = &pieces[i];
            const fv_query_run *run = &runs[piece->run];
            assert_true(piece->run >= 0 && piece->run < num_runs && (i == 0 || piece->run > pieces[i - 1].run));
            assert_int_equal(piece->first_key, next_key[piece->run]); /* in order, none twice */
            assert_true(piece->end_key > piece->first_key && piece->end_key <= run->end_key);
            if (i > 0) assert_int_equal(piece->first_key, run->first_key); /* only the first continues a run */
            if (i < num_pieces - 1) assert_true(piece->is_last);           /* and only the last is cut */
            assert_int_equal(piece->is_last, piece->end_key == run->end_key);
            if (!piece->is_last && piece->end_key % f->problem.block_size != 0) {
                /* Cut inside a block: it is all that the chunk holds, and no block would have ended. */
                assert_int_equal(num_pieces, 1);
                assert_int_equal(piece->end_key - piece->first_key, f->limits.gather_rows);
                assert_int_equal(piece->first_key / f->problem.block_size, piece->end_key / f->problem.block_size);
            }
            assert_int_equal(piece->first_row, rows);
            rows += piece->end_key - piece->first_key;
            next_key[piece->run] = piece->end_key;
        }
        assert_true(rows <= f->limits.gather_rows);
        if (rows > most) most = rows;
        at->num_keys += rows;
        at->num_chunks++;
    }
    for (int32_t run = 0; run < num_runs; run++) assert_int_equal(next_key[run], runs[run].end_key);
    if (most > at->most_rows) at->most_rows = most;
}

static void check_runs(walk *at, const fixture *f, const fv_context_round *round, const fv_query_run *runs)
{
    for (int32_t i = 0; i < round->num_runs; i++) {
        const fv_query_run *run = &runs[i];
        const int32_t query_len = fv_step_query_len(&f->step, run->seq);
        const int32_t start = f->query_start[run->seq] + run->first_token;
        assert_int_equal(run->seq, f->extends[at->extend]);
        assert_int_equal(run->first_token, at->token); /* in order, none twice, none left out */
        assert_true(run->num_tokens > 0 && run->first_token + run->num_tokens <= query_len);
        if (i == 0) assert_int_equal(start, round->first_token);
        const int32_t end_row = start + run->num_tokens - round->first_token;
        assert_true(end_row <= f->limits.state_tokens);
        if (end_row > at->most_state) at->most_state = end_row;
        if (fv_query_is_short(&f->problem, query_len)) assert_int_equal(run->num_tokens, query_len);
        assert_int_equal(run->first_token % f->block_q, 0); /* cut where a Q block ends */
        check_run_keys(f, run);
        at->token += run->num_tokens;
        if (at->token < query_len) {
            assert_int_equal(i, round->num_runs - 1);
            continue;
        }
        at->token = 0;
        at->extend++;
    }
}

static walk check_step(const fixture *f)
{
    walk at = {0};
    fv_context_round round = {0};
    fv_query_run runs[MAX_SEQS];
    while (fv_context_round_next(&round, runs, &f->problem, &f->step, f->extends, f->num_extends, f->block_q,
                                 &f->limits)) {
        assert_true(round.num_runs > 0 && round.num_runs <= f->num_extends);
        check_runs(&at, f, &round, runs);
        check_chunks(&at, f, runs, round.num_runs);
        at.num_rounds++;
    }
    assert_int_equal(at.extend, f->num_extends);
    assert_int_equal(at.token, 0);
    return at;
}

/* --- tests ------------------------------------------------------------------------------------------------ */

static void random_step(fixture *f, uint32_t *random)
{
    static const int32_t block_sizes[] = {1, 3, 16, 17, 64, 544};
    const int32_t block_q = random_int(random, 1, 40);
    const int32_t least_state = block_q > 8 ? block_q : 8; /* a short query must fit */
    const fv_context_limits limits = {
        .state_tokens = (least_state + block_q - 1) / block_q * block_q + block_q * random_int(random, 0, 20),
        .gather_rows = random_int(random, 1, next_random(random) % 2 ? 100 : 4000),
        .gathers_new = next_random(random) % 4 == 0,
    };
    init(f, block_q, block_sizes[next_random(random) % 6], limits);
    if (next_random(random) % 2) f->problem.window = random_int(random, 1, next_random(random) % 2 ? 30 : 1000);
    if (next_random(random) % 4 == 0) {
        const int32_t world = random_int(random, 2, 4);
        f->problem.context_parallel = (fv_context_parallel){world, random_int(random, 0, world - 1),
                                                            random_int(random, 1, 20)};
    }
    if (next_random(random) % 3 == 0) f->step.causal = f->causal;
    const int32_t num_seqs = random_int(random, 1, MAX_SEQS);
    for (int32_t seq = 0; seq < num_seqs; seq++) {
        const int32_t query_len = random_int(random, 1, next_random(random) % 3 ? 12 : 150);
        const int32_t context = random_int(random, 0, next_random(random) % 4 ? 60 : 1200);
        add(f, query_len, context + query_len, next_random(random) % 4 > 0);
        if (f->step.causal) f->causal[seq] = next_random(random) % 2;
    }
}

static void test_random_steps(void **state)
{
    (void)state;
    static fixture f;
    uint32_t random = 5;
    int64_t rounds = 0, chunks = 0;
    for (int32_t i = 0; i < NUM_RANDOM_STEPS; i++) {
        random_step(&f, &random);
        const walk seen = check_step(&f);
        rounds += seen.num_rounds;
        chunks += seen.num_chunks;
    }
    assert_true(rounds > 2 * NUM_RANDOM_STEPS && chunks > 4 * NUM_RANDOM_STEPS); /* the limits did cut */
}

/* The picture at the head of context_round.h: a round of two extends, their context in two chunks. */
static void test_picture(void **state)
{
    (void)state;
    fixture f;
    init(&f, 16, 1, (fv_context_limits){.state_tokens = 64, .gather_rows = 4196});
    add(&f, 1, 50, 0);
    add(&f, 1, 60, 0);
    add(&f, 20, 4096 + 20, 1);
    add(&f, 20, 901 + 20, 1);
    fv_context_round round = {0};
    fv_context_cursor cursor = {0, -1};
    fv_context_piece pieces[2];
    fv_query_run runs[2];
    assert_int_equal(fv_context_round_next(&round, runs, &f.problem, &f.step, f.extends, 2, 16, &f.limits), 2);
    assert_int_equal(round.first_token, 2);
    assert_int_equal(fv_context_chunk_next(&cursor, pieces, &f.problem, runs, 2, &f.limits), 2);
    const fv_context_piece first[] = {{0, 0, 4096, 0, 1}, {1, 0, 100, 4096, 0}}, second = {1, 100, 901, 0, 1};
    assert_memory_equal(pieces, first, sizeof(first));
    assert_int_equal(fv_context_chunk_next(&cursor, pieces, &f.problem, runs, 2, &f.limits), 1);
    assert_memory_equal(pieces, &second, sizeof(second));
    assert_int_equal(fv_context_chunk_next(&cursor, pieces, &f.problem, runs, 2, &f.limits), 0);
    assert_int_equal(fv_context_round_next(&round, runs, &f.problem, &f.step, f.extends, 2, 16, &f.limits), 0);
}

/* One step, ever less memory: more rounds, more chunks, never more rows. */
static void test_less_memory_means_more_rounds(void **state)
{
    (void)state;
    static fixture f;
    walk before = {0};
    for (int32_t state_tokens = 1024, gather_rows = 4096; state_tokens >= 16; state_tokens /= 2, gather_rows /= 2) {
        init(&f, 16, 16, (fv_context_limits){.state_tokens = state_tokens, .gather_rows = gather_rows});
        for (int32_t i = 0; i < 6; i++) add(&f, 50 + 30 * i, 700 + 300 * i, 1);
        const walk now = check_step(&f);
        assert_true(now.num_rounds >= before.num_rounds && now.num_chunks >= before.num_chunks);
        if (before.num_rounds > 0)
            assert_true(now.num_rounds > before.num_rounds && now.num_chunks > before.num_chunks);
        assert_true(now.most_state <= state_tokens && now.most_rows <= gather_rows);
        before = now;
    }
    assert_true(before.num_rounds > 40);
}

/* Sequences between two extends take rows of the state buffers too, for rows are tokens of the batch. */
static void test_gaps_count(void **state)
{
    (void)state;
    static fixture f;
    init(&f, 16, 16, (fv_context_limits){.state_tokens = 64, .gather_rows = 1024});
    add(&f, 16, 100, 1);
    add(&f, 40, 40, 0);
    add(&f, 16, 100, 1);
    const walk seen = check_step(&f);
    assert_int_equal(seen.num_rounds, 2); /* 16 + 40 + 16 > 64 */
}

/* Tokens that a window keeps from the context gather nothing, and the others only what they see. */
static void test_window(void **state)
{
    (void)state;
    static fixture f;
    init(&f, 16, 16, (fv_context_limits){.state_tokens = 1024, .gather_rows = 1024});
    f.problem.window = 40;
    add(&f, 200, 1200, 1);
    add(&f, 200, 200, 1);
    walk seen = check_step(&f);
    assert_int_equal(seen.num_keys, 39);
    const fv_key_range keys = fv_context_keys(&f.problem, &f.step, 0, 39, 161);
    assert_int_equal(keys.first, keys.end);
    f.problem.window = 1;
    seen = check_step(&f);
    assert_int_equal(seen.num_keys, 0);
}

static void test_nothing_to_do(void **state)
{
    (void)state;
    fixture f;
    init(&f, 16, 16, (fv_context_limits){.state_tokens = 64, .gather_rows = 64});
    add(&f, 1, 10, 0);
    const walk seen = check_step(&f);
    assert_int_equal(seen.num_rounds, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_steps),
        cmocka_unit_test(test_picture),
        cmocka_unit_test(test_less_memory_means_more_rounds),
        cmocka_unit_test(test_gaps_count),
        cmocka_unit_test(test_window),
        cmocka_unit_test(test_nothing_to_do),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
