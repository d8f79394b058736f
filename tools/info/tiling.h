/* `fovea info --tiling`: the tile sizes that the planner chooses for a machine, with the arithmetic. */
#ifndef FV_TOOLS_INFO_TILING_H
#define FV_TOOLS_INFO_TILING_H

#include "fovea/status.h"

typedef struct fv_tiling_options {
    const char *machine; /* cpu, portable, avx2, avx512, amx, ascend910 */
    int32_t rows;        /* query tokens x heads */
    int32_t measure;     /* 1: the neighbours are timed here */
    int32_t json;
} fv_tiling_options;

#define FV_TILING_NUM_MACHINES 6
extern const char *const fv_tiling_machines[FV_TILING_NUM_MACHINES];

/* Prints on stdout. */
fv_status fv_tiling_report(const fv_tiling_options *options);

#endif
