/* A schedule made by the check itself, so that kernels are driven in ways that no planner would choose:
 * ragged segments, runs of heads, items without keys. */
#ifndef FV_TOOLS_CHECK_SCHEDULE_H
#define FV_TOOLS_CHECK_SCHEDULE_H

#include "check/scene.h"

typedef struct check_plan {
    fv_attend_params attend;
    fv_reduce_params reduce;
    int32_t reduces; /* 1: reduce has to run */
} check_plan;

/* Fills both parameters for a kernel that likes Q blocks of `block_m` rows and tiles of `tile_keys`
 * keys. Memory, fenced and NaN, is the scene's. */
void check_plan_init(check_plan *plan, check_scene *scene, int32_t block_m, int32_t tile_keys);

#endif
