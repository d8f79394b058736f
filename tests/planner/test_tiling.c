/* Tile sizes: the paper's own on its machine, and what fits on others. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "planner/tiling.h"

#include "core/compiler.h"

static const fv_tiling_problem mtp_problem = {.rows = 256, .qk_size = 576, .v_size = 512, .stored_bytes = 2};
static const fv_cpu_caches small_caches = {32 << 10, 512 << 10, 32 << 20, 8, 1};
static const fv_cpu_caches large_caches = {48 << 10, 2 << 20, 300 << 20, 64, 1};

static fv_tiling choose(const fv_tiling_machine *machine, const fv_tiling_problem *problem)
{
    fv_tiling tiling;
    assert_int_equal(fv_tiling_choose(&tiling, machine, problem), FV_OK);
    assert_null(fv_tiling_why_not(&tiling, machine, problem));
    return tiling;
}

static void assert_tile(fv_tile tile, int32_t m, int32_t n, int32_t k)
{
    assert_int_equal(tile.m, m);
    assert_int_equal(tile.n, n);
    assert_int_equal(tile.k, k);
}

/* AMLA, section 4.2. */
static void test_ascend_gives_the_papers_numbers(void **state)
{
    (void)state;
    const fv_tiling_machine ascend = fv_tiling_ascend910();
    const int32_t rows[] = {256, 384, 512, 2048}; /* more rows do not fit: 256 at a time */
    for (int32_t i = 0; i < FV_ARRAY_LEN(rows); i++) {
        fv_tiling_problem problem = mtp_problem;
        problem.rows = rows[i];
        const fv_tiling t = choose(&ascend, &problem);
        assert_int_equal(t.rows, 256);
        assert_int_equal(t.kv_block, 512);
        assert_int_equal(t.buffer_bytes, 72 << 10);
        assert_int_equal(t.num_q_buffers, 4);
        assert_int_equal(t.num_kv_buffers, 3);
        assert_tile(t.qk.base, 128, 128, 96);
        assert_tile(t.pv.base, 128, 128, 128);
        assert_int_equal(t.qk.stripe, 288);
        assert_int_equal(t.pv.stripe, 256);
        assert_int_equal(t.min_rows, 117);
    }
    fv_tiling_problem one_token = mtp_problem;
    one_token.rows = 128;
    const fv_tiling t = choose(&ascend, &one_token);
    assert_int_equal(t.rows, 128);
    assert_int_equal(t.num_q_buffers, 2);
    assert_int_equal(t.num_kv_buffers, 5);
}

/* The traffic of the paper's step, by hand. */
static void test_ascend_traffic(void **state)
{
    (void)state;
    const fv_tiling_machine ascend = fv_tiling_ascend910();
    const fv_tiling t = choose(&ascend, &mtp_problem);
    const fv_tiling_cost cost = fv_tiling_price(&t, &ascend, &mtp_problem);
    assert_true(cost.operations == 2.0 * 256 * 512 * (576 + 512));
    /* Each element of A once for each of the column tiles, each of B for each of the row tiles, 128 wide. */
    const double qk = 256 * 576 * (512 / 128) + 512 * 576 * (256 / 128);
    const double pv = 256 * 512 * (512 / 128) + 512 * 512 * (256 / 128);
    assert_true(cost.level_bytes[0] == 2 * (qk + pv));
    assert_true(cost.level_bytes[1] == (288 + 256 + 576 + 512 + 512 + 512) * 1024.0);
    assert_true(cost.level_bytes[2] == 576 * 1024);
    assert_true(cost.time == cost.compute_time && cost.level_time[2] < 0.5 * cost.compute_time);
    /* Below min_rows the keys are the limit. */
    fv_tiling few = t;
    few.rows = t.min_rows - 1;
    const fv_tiling_cost bound = fv_tiling_price(&few, &ascend, &mtp_problem);
    assert_true(bound.operations / ascend.peak < bound.level_time[2]);
    few.rows = t.min_rows;
    const fv_tiling_cost balanced = fv_tiling_price(&few, &ascend, &mtp_problem);
    assert_true(balanced.operations / ascend.peak >= balanced.level_time[2]);
}

/* Registers as in the kernels of BLAS libraries, and 2 x 2 tiles of AMX. */
static void test_register_tiles(void **state)
{
    (void)state;
    const fv_tiling_machine portable = fv_tiling_cpu(FV_ISA_PORTABLE, &small_caches, 2);
    const fv_tiling_machine avx2 = fv_tiling_cpu(FV_ISA_AVX2, &small_caches, 2);
    const fv_tiling_machine avx512 = fv_tiling_cpu(FV_ISA_AVX512, &large_caches, 16);
    const fv_tiling_machine amx = fv_tiling_amx(&large_caches, 16);
    assert_tile(choose(&portable, &mtp_problem).qk.base, 4, 12, 1);
    assert_tile(choose(&avx2, &mtp_problem).qk.base, 4, 24, 1);
    assert_tile(choose(&avx512, &mtp_problem).qk.base, 4, 64, 1);
    assert_tile(choose(&amx, &mtp_problem).qk.base, 32, 32, 32);
    assert_int_equal(choose(&avx2, &mtp_problem).qk.stripe, 192);
}

/* No neighbour is better by the model, whose best it is; of the paper's numbers none by more than 5%. */
static void test_neighbours(void **state)
{
    (void)state;
    const fv_tiling_machine machines[] = {
        fv_tiling_ascend910(), fv_tiling_amx(&large_caches, 16), fv_tiling_cpu(FV_ISA_PORTABLE, &small_caches, 2),
        fv_tiling_cpu(FV_ISA_AVX2, &small_caches, 2), fv_tiling_cpu(FV_ISA_AVX512, &large_caches, 16)};
    for (int32_t i = 0; i < FV_ARRAY_LEN(machines); i++) {
        const fv_tiling t = choose(&machines[i], &mtp_problem);
        fv_tiling_neighbour neighbours[FV_TILING_MAX_NEIGHBOURS];
        const int32_t num = fv_tiling_neighbours(neighbours, &t, &machines[i], &mtp_problem, NULL, NULL);
        assert_true(num >= 4);
        for (int32_t n = 0; n < num; n++) {
            assert_null(fv_tiling_why_not(&neighbours[n].tiling, &machines[i], &mtp_problem));
            assert_true(memcmp(&neighbours[n].tiling, &t, sizeof(t)) != 0);
            assert_true(neighbours[n].time_ratio >= 0.95);
            if (i == 0) assert_true(neighbours[n].time_ratio >= 1 && neighbours[n].bytes_ratio >= 0.95);
        }
    }
}

typedef struct measuring {
    int32_t num_calls;
    int32_t fails_for_rows;
} measuring;

static double measure_rows(void *user, const fv_tiling *tiling)
{
    measuring *m = user;
    m->num_calls++;
    return tiling->rows == m->fails_for_rows ? -1 : tiling->rows;
}

/* The hook is asked for the chosen one and each neighbour in turn; what cannot be measured is left out. */
static void test_measured_neighbours(void **state)
{
    (void)state;
    const fv_tiling_machine avx2 = fv_tiling_cpu(FV_ISA_AVX2, &small_caches, 2);
    const fv_tiling t = choose(&avx2, &mtp_problem);
    fv_tiling_neighbour neighbours[FV_TILING_MAX_NEIGHBOURS];
    measuring m = {0, -1};
    const int32_t num = fv_tiling_neighbours(neighbours, &t, &avx2, &mtp_problem, measure_rows, &m);
    assert_int_equal(m.num_calls, 2 * FV_TILING_ROUNDS * num);
    assert_string_equal(neighbours[0].what, "rows");
    assert_true(neighbours[0].time_ratio == (t.rows - t.qk.base.m) / (double)t.rows);
    int32_t num_failing = 0;
    for (int32_t i = 0; i < num; i++) num_failing += neighbours[i].tiling.rows == t.rows - t.qk.base.m;
    m = (measuring){0, t.rows - t.qk.base.m};
    assert_int_equal(fv_tiling_neighbours(neighbours, &t, &avx2, &mtp_problem, measure_rows, &m), num - num_failing);
    assert_true(num_failing > 0);
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Machines and problems of any size: a tiling that fits, or a refusal that says so; a larger machine is never
 * priced higher. */
static void test_random_machines(void **state)
{
    (void)state;
    uint32_t random = 3;
    int32_t num_refused = 0;
    for (int32_t i = 0; i < 300; i++) {
        const int64_t l1 = (int64_t)(8 + next_random(&random) % 64) << 10;
        const fv_cpu_caches caches = {l1, l1 * (2 + next_random(&random) % 30), 0, 1, 1};
        const fv_cpu_caches doubled = {l1, caches.l2_bytes * 2, 0, 1, 1};
        const int32_t isa = (int32_t)(next_random(&random) % 3);
        const fv_tiling_problem problem = {.rows = 1 + (int32_t)(next_random(&random) % 300),
                                           .qk_size = 16 * (1 + (int32_t)(next_random(&random) % 48)),
                                           .v_size = 16 * (1 + (int32_t)(next_random(&random) % 40)),
                                           .stored_bytes = 1 << next_random(&random) % 3,
                                           .context_len = (int32_t)(next_random(&random) % 5000)};
        const fv_tiling_machine machine = fv_tiling_cpu((fv_isa)isa, &caches, 4);
        const fv_tiling_machine larger = fv_tiling_cpu((fv_isa)isa, &doubled, 4);
        fv_tiling t, u;
        const fv_status status = fv_tiling_choose(&t, &machine, &problem);
        if (status != FV_OK) {
            assert_int_equal(status, FV_ERR_UNSUPPORTED);
            num_refused++;
            continue;
        }
        assert_null(fv_tiling_why_not(&t, &machine, &problem));
        assert_int_equal(t.rows % t.qk.base.m, 0);
        assert_int_equal(fv_tiling_choose(&u, &larger, &problem), FV_OK);
        assert_true(fv_tiling_price(&u, &larger, &problem).time_per_row_key <=
                    fv_tiling_price(&t, &machine, &problem).time_per_row_key * (1 + 1e-9));
    }
    assert_true(num_refused < 150);
}

static void test_refusals(void **state)
{
    (void)state;
    fv_tiling t;
    fv_tiling_machine ascend = fv_tiling_ascend910();
    fv_tiling_problem problem = mtp_problem;
    problem.rows = 0;
    assert_int_equal(fv_tiling_choose(&t, &ascend, &problem), FV_ERR_INVALID);
    problem = mtp_problem;
    problem.kv_block = -1;
    assert_int_equal(fv_tiling_choose(&t, &ascend, &problem), FV_ERR_INVALID);
    ascend.level_bytes[0] = 64 << 10;
    assert_int_equal(fv_tiling_choose(&t, &ascend, &mtp_problem), FV_ERR_UNSUPPORTED);
    assert_non_null(strstr(fv_last_error(), "no tiling"));
    ascend.c_bytes = 16;
    assert_int_equal(fv_tiling_choose(&t, &ascend, &mtp_problem), FV_ERR_UNSUPPORTED);
    assert_non_null(strstr(fv_last_error(), "no tiling"));
}

/* The caches of this machine, whatever it is. */
static void test_caches_of_this_cpu(void **state)
{
    (void)state;
    const fv_cpu_caches caches = fv_cpu_find_caches();
    assert_true(caches.l1_bytes >= 4 << 10 && caches.l2_bytes >= caches.l1_bytes && caches.l3_cpus >= 1);
    assert_true(caches.l3_bytes == 0 || caches.is_known);
    const fv_tiling_machine machine = fv_tiling_cpu(fv_cpu_isa(), &caches, fv_cpu_count());
    choose(&machine, &mtp_problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ascend_gives_the_papers_numbers),
        cmocka_unit_test(test_ascend_traffic),
        cmocka_unit_test(test_register_tiles),
        cmocka_unit_test(test_neighbours),
        cmocka_unit_test(test_measured_neighbours),
        cmocka_unit_test(test_random_machines),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_caches_of_this_cpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
