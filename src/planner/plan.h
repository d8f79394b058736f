/* The plan's insides, shared by the backends.
 *
 * fv_plan_create (backends/plan.c) fills in who and what; the backend's create() chooses kernels and
 * sizes, update() the schedule of a step, run() launches. */
#ifndef FV_PLANNER_PLAN_H
#define FV_PLANNER_PLAN_H

#include "core/context.h"
#include "fovea/plan.h"
#include "ops/kernel_table.h"
#include "planner/step_buffers.h"
#include "planner/work_list.h"

struct fv_backend; /* backends/backend.h */

/* Byte offsets into the workspace that the caller brings. */
typedef struct fv_workspace_layout {
    size_t partial_out, partial_max, partial_sum;
    size_t scratch;
    size_t scratch_bytes; /* for each worker */
    size_t bytes;         /* of all */
} fv_workspace_layout;

struct fv_plan {
    fv_context *context;
    fv_device *device;
    const struct fv_backend *backend;
    const fv_kernel_table *kernels;
    fv_problem problem; /* normal */
    fv_bounds bounds;
    fv_plan_options options; /* strings are not kept: backend, variant and kernels are resolved */

    const fv_attend_variant *variant;
    int32_t group;        /* query heads of a KV head */
    int32_t static_grid;  /* 1: launches are sized by the bounds, counts are read from the step header */
    int32_t num_segments; /* of the static grid */
    fv_split_rule rule;
    fv_work_list room; /* capacities */
    fv_workspace_layout workspace;
    fv_step_buffers buffers;

    /* the step */
    int32_t updated;
    fv_batch batch;
    int32_t num_items, num_reduces; /* of the work list; 0 on the static grid */
    int32_t num_split_blocks;
    int64_t max_block; /* largest block id in use; -1 where it was not looked at */
    char text[512];
};

/* FV_ERR_INVALID for a malformed batch, FV_NEEDS_PLAN for one outside the bounds. With lengths on the
 * host (*step filled, else step->query_start NULL) also their order and the width of the table. */
fv_status fv_plan_check_batch(fv_step *step, const fv_plan *plan, const fv_batch *batch);

/* Shapes, dtypes and pointers of a layer against the problem and the step. */
fv_status fv_plan_check_layer(const fv_plan *plan, const fv_layer *layer);

#endif
