/* The preload-pipeline theorem, on random durations: the cycle as planned, whole runs in a simulation that
 * knows the chain of a block and nothing of the construction, and all orders of small pipelines. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "fovea/preload_pipeline.h"

#include "core/compiler.h"

#define MAX_N 8
#define MAX_BLOCKS 24
#define NUM_RANDOM 100000

typedef struct durations {
    int32_t n;
    int64_t c[MAX_N], v[MAX_N];
} durations;

static uint64_t next_random(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state >> 33;
}

/* Zeros, equal values, small numbers that often tie, wide ranges, sums that differ by one. */
static durations random_durations(uint64_t *random, int32_t max_n)
{
    durations d = {.n = 1 + (int32_t)(next_random(random) % (uint64_t)max_n)};
    const int32_t kind = (int32_t)(next_random(random) % 5);
    for (int32_t i = 0; i < d.n; i++) {
        for (int32_t unit = 0; unit < 2; unit++) {
            int64_t *time = unit ? &d.v[i] : &d.c[i];
            const int64_t r = (int64_t)next_random(random);
            switch (kind) {
            case 0: *time = r % 3; break;
            case 1: *time = r % 20; break;
            case 2: *time = INT64_C(1) << (r % 40); break;
            case 3: *time = r % 4 ? r % 1000000 : 0; break;
            default: *time = 7; break;
            }
        }
    }
    if (kind == 4) d.v[next_random(random) % (uint64_t)d.n] += (int64_t)(next_random(random) % 3) - 1;
    d.c[0] += d.n == 1 && d.c[0] == 0 && d.v[0] == 0;
    int64_t sum = 0;
    for (int32_t i = 0; i < d.n; i++) sum += d.c[i] + d.v[i];
    if (sum == 0) d.v[d.n - 1] = 1;
    return d;
}

static fv_preload_pipeline plan(const durations *d)
{
    fv_preload_pipeline p = {.struct_size = sizeof(p)};
    assert_int_equal(fv_preload_pipeline_plan(&p, d->c, d->v, d->n), FV_OK);
    return p;
}

/* Place of a stage in the chain C_1 V_1 C_2 ... V_n. */
static int32_t link_of(const fv_preload_stage *stage) { return 2 * stage->pair + stage->unit; }

/* One cycle: every stage once, in time, without overlap; the dominant unit never waits; inputs come from the
 * same cycle earlier in time, or from the cycle before. */
static void check_cycle(const fv_preload_pipeline *p, const durations *d)
{
    const fv_preload_stage *by_link[2 * MAX_N] = {NULL};
    int32_t num_chains = 0, num_ahead = 0;
    for (int32_t unit = 0; unit < 2; unit++) {
        int64_t free = 0;
        for (int32_t place = 0; place < d->n; place++) {
            const fv_preload_stage *s = &p->stages[unit][place];
            assert_int_equal(s->unit, unit);
            assert_null(by_link[link_of(s)]);
            by_link[link_of(s)] = s;
            assert_int_equal(s->end - s->start, unit ? d->v[s->pair] : d->c[s->pair]);
            assert_true(s->start >= free && s->end <= p->cycle_time && s->slack >= 0);
            if ((int32_t)p->bound == unit) assert_true(s->start == free && s->slack == 0);
            free = s->end;
        }
        if ((int32_t)p->bound == unit) assert_int_equal(free, p->cycle_time);
    }
    for (int32_t link = 0; link < 2 * d->n; link++) {
        const fv_preload_stage *s = by_link[link];
        num_ahead += s->ahead;
        if (link == 0) continue;
        const fv_preload_stage *input = by_link[link - 1];
        const int32_t in_cycle = input->ahead == s->ahead;
        assert_int_equal(in_cycle, s->in_chain);
        if (in_cycle) assert_true(s->unit == FV_UNIT_VECTOR && input->end <= s->start);
        if (!in_cycle) assert_int_equal(input->ahead, s->ahead + 1);
        num_chains += in_cycle;
    }
    assert_int_equal(by_link[2 * d->n - 1]->ahead, 0);
    assert_int_equal(num_chains, d->n - 1);
    assert_int_equal(p->num_chains, num_chains);
    assert_int_equal(p->preload_count, d->n); /* the theorem */
    assert_int_equal(by_link[0]->ahead, d->n);
    assert_int_equal(p->num_preload_stages, num_ahead);
}

/* All the slack of a stage used at once: nothing else has to move. */
static void check_slack(const fv_preload_pipeline *p)
{
    for (int32_t unit = 0; unit < 2; unit++) {
        for (int32_t place = 0; place < p->num_pairs; place++) {
            const fv_preload_stage *s = &p->stages[unit][place];
            int64_t end = s->end + s->slack;
            for (int32_t after = place + 1; after < p->num_pairs; after++) { /* those behind it move with it */
                const fv_preload_stage *next = &p->stages[unit][after];
                const int64_t start = end > next->start ? end : next->start;
                assert_true(start <= next->start + next->slack);
                end = start + next->end - next->start;
            }
            assert_true(end <= p->cycle_time);
        }
    }
}

/* --- whole runs ------------------------------------------------------------------------------------ */

static fv_preload_op all_ops[2 * MAX_N * MAX_BLOCKS];

/* The dependencies hold in the times as planned, every stage of every block is there once, and no unit does
 * two things at once. */
static void check_run(const fv_preload_run *run, const durations *d, int32_t num_blocks)
{
    int64_t start[MAX_BLOCKS][2 * MAX_N], end[MAX_BLOCKS][2 * MAX_N], free[2] = {0, 0};
    memset(start, 0xff, sizeof(start));
    assert_int_equal(run->num_ops, 2 * d->n * num_blocks);
    for (int32_t i = 0; i < run->num_ops; i++) {
        const fv_preload_op *op = &all_ops[i];
        const int32_t link = 2 * op->pair + op->unit;
        assert_true(op->block >= 0 && op->block < num_blocks && start[op->block][link] == -1);
        assert_int_equal(op->end - op->start, op->unit ? d->v[op->pair] : d->c[op->pair]);
        assert_true(op->start >= free[op->unit]);
        free[op->unit] = end[op->block][link] = op->end;
        start[op->block][link] = op->start;
    }
    for (int32_t block = 0; block < num_blocks; block++) {
        for (int32_t link = 1; link < 2 * d->n; link++) assert_true(start[block][link] >= end[block][link - 1]);
    }
    assert_int_equal(run->total_time, fv_max_i64(free[0], free[1]));
}

/* Events: two units, each with a queue in the order of the run; a unit starts the head of its queue when it
 * is free and the block's stage before has ended, but what belongs to the loop not before the loop. Returns
 * the end of the last; *idle is what the dominant unit waits within the loop. */
static int64_t simulate(int64_t *idle, const fv_preload_run *run, const durations *d, fv_preload_unit bound)
{
    int32_t next[2] = {0, 0}, done[MAX_BLOCKS] = {0}; /* stages of each block that have ended */
    const fv_preload_op *running[2] = {NULL, NULL};
    int64_t now = 0, running_end[2] = {0, 0}, loop_busy_until = run->loop_start, last_end = 0;
    int32_t num_done = 0;
    *idle = 0;
    while (num_done < run->num_ops) {
        int32_t started = 0;
        for (int32_t unit = 0; unit < 2; unit++) {
            while (next[unit] < run->num_ops && (int32_t)all_ops[next[unit]].unit != unit) next[unit]++;
            if (running[unit] || next[unit] == run->num_ops) continue;
            const fv_preload_op *op = &all_ops[next[unit]];
            if (done[op->block] != 2 * op->pair + unit) continue;
            if (op->phase == FV_PHASE_LOOP && now < run->loop_start) continue;
            running[unit] = op;
            running_end[unit] = now + (unit ? d->v[op->pair] : d->c[op->pair]);
            next[unit]++;
            started = 1;
            assert_true(now <= op->start); /* never later than planned */
            if (op->phase != FV_PHASE_LOOP || op->unit != bound) continue;
            *idle += now - loop_busy_until;
            loop_busy_until = running_end[unit];
        }
        int64_t soonest = INT64_MAX;
        for (int32_t unit = 0; unit < 2; unit++) {
            if (running[unit]) soonest = fv_min_i64(soonest, running_end[unit]);
        }
        if (run->num_cycles && now < run->loop_start) soonest = fv_min_i64(soonest, run->loop_start);
        assert_true(soonest != INT64_MAX || started); /* no deadlock */
        now = soonest;
        for (int32_t unit = 0; unit < 2; unit++) {
            if (!running[unit] || running_end[unit] != now) continue;
            done[running[unit]->block]++;
            running[unit] = NULL;
            num_done++;
            last_end = now;
        }
    }
    if (run->num_cycles) *idle += run->loop_end - loop_busy_until;
    return last_end;
}

static void check_whole_run(const fv_preload_pipeline *p, const durations *d, int32_t num_blocks)
{
    fv_preload_run run = {.struct_size = sizeof(run)};
    assert_int_equal(fv_preload_pipeline_run(&run, all_ops, FV_ARRAY_LEN(all_ops), p, num_blocks), FV_OK);
    check_run(&run, d, num_blocks);
    int64_t idle;
    assert_true(simulate(&idle, &run, d, p->bound) <= run.total_time); /* the loop's windows are the plan's, not its */
    assert_int_equal(idle, 0);
    assert_int_equal(run.num_cycles, num_blocks > d->n ? num_blocks - d->n : 0);
    /* No worse than preload and tail one stage after the other, no better than the dominant unit's work. */
    assert_true(run.total_time >= num_blocks * p->cycle_time);
    assert_true(run.total_time <= num_blocks * (p->busy[0] + p->busy[1]));
}

static void test_random_durations(void **state)
{
    (void)state;
    uint64_t random = 5;
    int32_t num_vector_bound = 0;
    for (int32_t i = 0; i < NUM_RANDOM; i++) {
        const durations d = random_durations(&random, MAX_N);
        const fv_preload_pipeline p = plan(&d);
        check_cycle(&p, &d);
        check_slack(&p);
        check_whole_run(&p, &d, 1 + (int32_t)(next_random(&random) % (i % 10 ? 6 : MAX_BLOCKS)));
        num_vector_bound += p.bound == FV_UNIT_VECTOR;
    }
    assert_true(num_vector_bound > NUM_RANDOM / 4 && num_vector_bound < NUM_RANDOM * 3 / 4);
}

/* --- all orders ------------------------------------------------------------------------------------ */

#define MAX_SMALL 3

static const int32_t orders[6][3] = {{0, 1, 2}, {1, 0, 2}, {0, 2, 1}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
static const int32_t num_orders[MAX_SMALL + 1] = {1, 1, 2, 6};

/* Whether both orders keep within a cycle when the chains in `mask` (bit i: stage i -> stage i + 1) are inside:
 * stages as early as possible, to the fixed point; n stages on each unit settle in 2n rounds or never. */
static int32_t fits(const durations *d, const int32_t *matrix_order, const int32_t *vector_order, int32_t mask)
{
    int64_t start[2 * MAX_SMALL] = {0}, matrix = 0, vector = 0;
    for (int32_t i = 0; i < d->n; i++) matrix += d->c[i], vector += d->v[i];
    const int64_t cycle = fv_max_i64(matrix, vector);
    for (int32_t round = 0; round <= 2 * d->n; round++) {
        int32_t moved = 0;
        for (int32_t unit = 0; unit < 2; unit++) {
            int64_t free = 0;
            for (int32_t place = 0; place < d->n; place++) {
                const int32_t pair = unit ? vector_order[place] : matrix_order[place], link = 2 * pair + unit;
                if (link && mask >> (link - 1) & 1) {
                    const int32_t input = link - 1;
                    free = fv_max_i64(free, start[input] + (input & 1 ? d->v[input / 2] : d->c[input / 2]));
                }
                moved |= start[link] != free;
                start[link] = free;
                free += unit ? d->v[pair] : d->c[pair];
            }
            if (free > cycle) return 0;
        }
        if (!moved) return 1;
    }
    return 0;
}

/* The least preload count of any cycle that is no longer than its dominant unit's work. */
static int32_t least_preload_count(const durations *d)
{
    int32_t most = 0;
    for (int32_t mask = 0; mask < 1 << (2 * d->n - 1); mask++) {
        const int32_t num_chains = __builtin_popcount((unsigned)mask);
        if (num_chains <= most) continue;
        int32_t found = 0;
        for (int32_t m = 0; m < num_orders[d->n] && !found; m++) {
            for (int32_t v = 0; v < num_orders[d->n] && !found; v++) found = fits(d, orders[m], orders[v], mask);
        }
        if (found) most = num_chains;
    }
    return 2 * d->n - 1 - most;
}

static void test_all_orders(void **state)
{
    (void)state;
    uint64_t random = 17;
    int32_t num_fewer[MAX_SMALL + 1] = {0}, num_equal[MAX_SMALL + 1] = {0};
    for (int32_t i = 0; i < 4000; i++) {
        const durations d = random_durations(&random, MAX_SMALL);
        const int32_t least = least_preload_count(&d), planned = plan(&d).preload_count;
        assert_true(least <= planned); /* what is planned is among all orders */
        if (least < planned) num_fewer[d.n]++;
        if (least == planned) num_equal[d.n]++;
    }
    /* Both happen: fewer with favourable durations, and n as the least that can be had. */
    for (int32_t n = 2; n <= MAX_SMALL; n++) assert_true(num_fewer[n] > 50 && num_equal[n] > 50);
}

/* The adversary of lemma B.2: one V longer than all C but any one of them. No order does with fewer than n. */
static void test_adversary_needs_n(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= MAX_SMALL; n++) {
        for (int32_t longest = 0; longest < n; longest++) {
            durations d = {.n = n};
            for (int32_t i = 0; i < n; i++) d.c[i] = 10, d.v[i] = 1;
            d.v[longest] = 10 * n - 2 - (n - 1);
            if (n > 1) assert_int_equal(least_preload_count(&d), n);
            assert_int_equal(plan(&d).preload_count, n);
        }
    }
    /* And durations that let a whole block pass in one cycle but for one input. */
    const durations easy = {.n = 2, .c = {4, 4}, .v = {0, 0}};
    assert_int_equal(least_preload_count(&easy), 0);
}

/* AMLA: n = 2, V_2 = 0. Preload C_1 and V_1 of the first block, C_1 of the second; in the cycle C_2 of block i,
 * V_1 of i + 1, C_1 of i + 2; nothing of duration waits inside it. */
static void test_amla(void **state)
{
    (void)state;
    const durations d = {.n = 2, .c = {9, 8}, .v = {10, 0}};
    const fv_preload_pipeline p = plan(&d);
    assert_int_equal(p.bound, FV_UNIT_MATRIX);
    assert_int_equal(p.cycle_time, 17);
    assert_int_equal(p.num_preload_stages, 3);
    assert_int_equal(p.stages[FV_UNIT_MATRIX][0].pair, 1);
    assert_int_equal(p.stages[FV_UNIT_MATRIX][0].ahead, 0);
    assert_int_equal(p.stages[FV_UNIT_MATRIX][1].ahead, 2);
    assert_int_equal(p.stages[FV_UNIT_VECTOR][0].pair, 0);
    assert_int_equal(p.stages[FV_UNIT_VECTOR][0].ahead, 1);
    assert_int_equal(p.stages[FV_UNIT_VECTOR][0].in_chain, 0);

    fv_preload_run run = {.struct_size = sizeof(run)};
    assert_int_equal(fv_preload_pipeline_run(&run, all_ops, FV_ARRAY_LEN(all_ops), &p, 5), FV_OK);
    const struct {
        int32_t pair, block;
        fv_preload_unit unit;
    } preload[] = {{0, 0, FV_UNIT_MATRIX}, {0, 1, FV_UNIT_MATRIX}, {0, 0, FV_UNIT_VECTOR}};
    for (int32_t i = 0; i < FV_ARRAY_LEN(preload); i++) {
        assert_int_equal(all_ops[i].phase, FV_PHASE_PRELOAD);
        assert_int_equal(all_ops[i].pair, preload[i].pair);
        assert_int_equal(all_ops[i].block, preload[i].block);
        assert_int_equal(all_ops[i].unit, preload[i].unit);
    }
    assert_int_equal(all_ops[3].phase, FV_PHASE_LOOP);
    assert_int_equal(run.num_cycles, 3);
    assert_int_equal(run.loop_start, 19); /* C_1 and V_1 of the first block; C_1 of the second beside V_1 */
    /* Tail: C_2 of the last but one beside V_1 of the last, then its C_2. */
    assert_int_equal(run.total_time, 19 + 3 * 17 + 10 + 8);
}

static void test_refusals(void **state)
{
    (void)state;
    fv_preload_pipeline p = {.struct_size = sizeof(p)};
    const int64_t one[FV_PRELOAD_MAX_PAIRS + 1] = {1}, zero[1] = {0}, negative[1] = {-1}, huge[1] = {INT64_MAX};
    assert_int_equal(fv_preload_pipeline_plan(&p, one, one, 0), FV_ERR_INVALID);
    assert_int_equal(fv_preload_pipeline_plan(&p, one, one, FV_PRELOAD_MAX_PAIRS + 1), FV_ERR_INVALID);
    assert_non_null(strstr(fv_last_error(), "1 to 16"));
    assert_int_equal(fv_preload_pipeline_plan(&p, zero, zero, 1), FV_ERR_INVALID);
    assert_int_equal(fv_preload_pipeline_plan(&p, one, negative, 1), FV_ERR_INVALID);
    assert_non_null(strstr(fv_last_error(), "V_1 takes -1"));
    assert_int_equal(fv_preload_pipeline_plan(&p, huge, one, 1), FV_ERR_INVALID);
    assert_int_equal(fv_preload_pipeline_plan(&(fv_preload_pipeline){0}, one, one, 1), FV_ERR_INVALID);
    assert_int_equal(fv_preload_pipeline_plan(&p, one, zero, 1), FV_OK);
    assert_int_equal(fv_preload_pipeline_plan(NULL, one, zero, 1), FV_ERR_INVALID);
    assert_int_equal(fv_preload_pipeline_plan(&p, NULL, zero, 1), FV_ERR_INVALID);
    fv_preload_run run = {.struct_size = sizeof(run)};
    const fv_preload_pipeline empty = {.struct_size = sizeof(empty)}, beyond = {.num_pairs = FV_PRELOAD_MAX_PAIRS + 1};
    assert_int_equal(fv_preload_pipeline_run(&run, all_ops, FV_ARRAY_LEN(all_ops), &empty, 1), FV_ERR_INVALID);
    assert_int_equal(fv_preload_pipeline_run(&run, all_ops, FV_ARRAY_LEN(all_ops), &beyond, 1), FV_ERR_INVALID);
    assert_non_null(strstr(fv_last_error(), "17 pairs"));
    assert_int_equal(fv_preload_pipeline_run(&run, NULL, 2, &p, 1), FV_ERR_INVALID);
    assert_int_equal(fv_preload_pipeline_run(&run, all_ops, 1, &p, 1), FV_ERR_NO_SPACE);
    assert_int_equal(fv_preload_pipeline_run(&run, all_ops, 1, &p, 0), FV_ERR_INVALID);
    assert_int_equal(fv_preload_pipeline_run(&run, all_ops, 2, &p, 1), FV_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_durations),  cmocka_unit_test(test_all_orders),
        cmocka_unit_test(test_adversary_needs_n), cmocka_unit_test(test_amla),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
