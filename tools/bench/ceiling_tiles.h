/* The loop of the AMX units' ceiling. */
#ifndef FV_TOOLS_BENCH_CEILING_TILES_H
#define FV_TOOLS_BENCH_CEILING_TILES_H

#include <stdint.h>

/* `rounds` products of 32 x 32 x 256 bf16, in the calling thread, on a CPU with AMX. Returns the operations done; 0
 * where the compiler knows no AMX. */
double fv_tile_loop(int32_t rounds);

#endif
