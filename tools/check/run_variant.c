/* A variant of attend_paged, driven without a planner. */
#include <string.h>

#include "check/runs.h"
#include "check/schedule.h"
#include "core/error.h"

static void *alloc_scratch(check_scene *scene, const check_lane *lane, size_t bytes)
{
    void *scratch = check_arena_alloc_fenced(&scene->arena, bytes * (size_t)lane->executor->num_workers);
    return memset(scratch, 0xff, bytes * (size_t)lane->executor->num_workers);
}

void check_run_variant(check_result *result, check_scene *scene, const check_expected *expected, const check_lane *lane,
                       const fv_kernel_table *table, const fv_attend_variant *variant)
{
    check_result_init(result, scene->test->id, "%s/%s", table->name, variant->name);
    const char *reason = variant->why_not(&scene->test->problem);
    if (reason) {
        check_result_skip(result, "%s/%s: %s", table->name, variant->name, reason);
        return;
    }
    check_scene_reset(scene, 1);
    check_plan plan;
    check_plan_init(&plan, scene, variant->block_m, variant->tile_keys);
    plan.attend.scratch_bytes = (size_t)fv_round_up((int64_t)variant->scratch_bytes(&plan.attend), FV_CACHE_LINE);
    plan.attend.scratch = alloc_scratch(scene, lane, plan.attend.scratch_bytes);

    const fv_launch launch = check_lane_launch(lane);
    if (variant->narrows_partials) plan.reduce.narrow_partials = variant->narrows_partials(&launch, &plan.attend);
    fv_status status = variant->launch(&launch, &plan.attend);
    if (status == FV_OK && plan.reduces) status = check_lane_reduce_segments(lane, table)(&launch, &plan.reduce);
    status = check_lane_ran(lane, status);
    if (status != FV_OK) {
        check_result_fail(result, "%s: %s", fv_status_name(status), fv_last_error());
        return;
    }
    char text[400];
    if (!check_expected_compare(&result->worst, text, sizeof(text), expected, scene)) {
        check_result_fail(result, "%s", text);
    } else if (memcmp(scene->cache, scene->cache_after, scene->cache_bytes) != 0) {
        check_result_fail(result, "the kernel changed the cache");
    } else if (!check_arena_fences_whole(&scene->arena)) {
        check_result_fail(result, "out, lse, a partial result or the scratch is written beyond its end");
    }
}
