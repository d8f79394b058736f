/* The base tiles that the planner chooses can be measured, and one that cannot is refused by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "info/tile_measure.h"

static fv_tiling_problem problem_of(int32_t rows)
{
    return (fv_tiling_problem){.rows = rows, .qk_size = 576, .v_size = 512, .stored_bytes = 2};
}

/* Skips the test where no loops are compiled at all. */
static fv_tile_measure *create_measure(fv_isa isa, const fv_tiling_problem *problem)
{
    fv_tile_measure *measure = NULL;
    const fv_status status = fv_tile_measure_create(&measure, isa, problem);
    if (status == FV_ERR_UNSUPPORTED) skip();
    assert_int_equal(status, FV_OK);
    return measure;
}

static void chosen_tiles_have_loops(void **state)
{
    (void)state;
    static const fv_cpu_caches caches[] = {{32 << 10, 512 << 10, 16 << 20, 8, 1}, {48 << 10, 2 << 20, 2 << 20, 1, 1}};
    static const fv_isa isas[] = {FV_ISA_AVX2, FV_ISA_AVX512, FV_ISA_AMX};
    for (int32_t i = 0; i < 6; i++) {
        const fv_isa isa = isas[i / 2];
        const fv_tiling_machine machine = fv_tiling_cpu(isa, &caches[i % 2], 4);
        for (int32_t rows = 1; rows <= 40; rows++) {
            const fv_tiling_problem problem = problem_of(rows);
            fv_tiling tiling;
            assert_int_equal(fv_tiling_choose(&tiling, &machine, &problem), FV_OK);
            fv_tile_measure *measure = create_measure(isa, &problem);
            assert_int_equal(fv_tile_measure_check(measure, &tiling), FV_OK);
            fv_tile_measure_destroy(measure);
        }
    }
}

static void a_tile_without_loops_is_refused(void **state)
{
    (void)state;
    const fv_tiling_problem problem = problem_of(7);
    const fv_tiling tiling = {.rows = 7, .kv_block = 16, .qk = {.base = {3, 16, 1}}, .pv = {.base = {3, 16, 1}}};
    fv_tile_measure *measure = create_measure(FV_ISA_AVX512, &problem);
    assert_int_equal(fv_tile_measure_check(measure, &tiling), FV_ERR_UNSUPPORTED);
    assert_non_null(strstr(fv_last_error(), "3 x 16"));
    assert_non_null(strstr(fv_last_error(), "accepted: other --rows"));
    assert_true(fv_tile_measure_run(measure, &tiling) < 0);
    fv_tile_measure_destroy(measure);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chosen_tiles_have_loops),
        cmocka_unit_test(a_tile_without_loops_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
