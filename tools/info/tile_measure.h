/* Times a tiling on this CPU: both products over a cache of bf16 latents, in fp32, cut as the tiling says. */
#ifndef FV_TOOLS_INFO_TILE_MEASURE_H
#define FV_TOOLS_INFO_TILE_MEASURE_H

#include "planner/tiling.h"

typedef struct fv_tile_measure fv_tile_measure;

/* For problems of this many rows and these sizes. FV_ERR_UNSUPPORTED where no loops are compiled for `isa`. */
fv_status fv_tile_measure_create(fv_tile_measure **measure, fv_isa isa, const fv_tiling_problem *problem);
void fv_tile_measure_destroy(fv_tile_measure *measure); /* takes NULL */

/* FV_ERR_UNSUPPORTED: no loops for the base tile. */
fv_status fv_tile_measure_check(const fv_tile_measure *measure, const fv_tiling *tiling);

/* Seconds for each row and key, the best of some runs of one thread; negative: no loops for this base tile, or no
 * memory. A fv_tiling_measure, with a fv_tile_measure as `user`. */
double fv_tile_measure_run(void *user, const fv_tiling *tiling);

#endif
