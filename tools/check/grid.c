/* Adding cases of a grid. */
#include "check/grid.h"

check_case grid_case(heads num_heads, int32_t head_size, int32_t block_size, fv_dtype dtype)
{
    return (check_case){
        .problem =
            {
                .struct_size = sizeof(fv_problem),
                .kind = FV_ATTENTION_MHA,
                .mha = {num_heads.q, num_heads.kv, head_size, 0},
                .q_dtype = dtype,
                .kv_layout = FV_KV_LAYOUT_NB_2_BS_H_D,
                .block_size = block_size,
            },
        .plain = 1,
        .options = {.struct_size = sizeof(fv_plan_options)},
    };
}

void grid_add(check_case_list *list, const char *group, const check_case *test, const lens_list *lens)
{
    check_case_list_add(list, group, test, lens->lens, lens->num_lens, lens->repeat);
}

void grid_add_both_paths(check_case_list *list, const char *group, check_case test, const lens_list *lens)
{
    test.options.path = FV_PATH_2D;
    test.schedule = CHECK_SCHEDULE_WHOLE;
    grid_add(list, group, &test, lens);
    test.options.path = FV_PATH_3D;
    test.schedule = CHECK_SCHEDULE_SEGMENTS;
    grid_add(list, group, &test, lens);
}

void grid_set_fp8(check_case *test, fv_dtype dtype)
{
    test->problem.kv_dtype = dtype;
    test->problem.kv_scaling = FV_KV_SCALING_PER_TENSOR;
}
