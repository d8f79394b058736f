/* fovea: attention for large language models. Everything of libfovea; the engine has engine.h.
 *
 *   fv_problem  ->  fv_plan_create  ->  fv_plan_update (each step)  ->  fv_plan_run (each layer)
 */
#ifndef FOVEA_FOVEA_H
#define FOVEA_FOVEA_H

#include "fovea/backend.h"
#include "fovea/batch.h"
#include "fovea/context.h"
#include "fovea/context_parallel.h"
#include "fovea/device.h"
#include "fovea/dtype.h"
#include "fovea/gemm.h"
#include "fovea/mla.h"
#include "fovea/ops.h"
#include "fovea/plan.h"
#include "fovea/preload_pipeline.h"
#include "fovea/problem.h"
#include "fovea/status.h"
#include "fovea/view.h"

#endif
