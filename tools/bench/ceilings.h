/* What the machine can do, measured beside the kernels: a pure read of the same pages in the same
 * order, with the widest vectors of this CPU whatever FOVEA_ISA says, and a loop of multiply-adds of a level's own
 * instructions: with those of its vectors or, for bf16 at level avx512_bf16, of pairs, for bf16 and fp16 at level amx, of tiles. Both run on the context's executor. */
#ifndef FV_TOOLS_BENCH_CEILINGS_H
#define FV_TOOLS_BENCH_CEILINGS_H

#include "core/cpu.h"
#include "fovea/context.h"
#include "fovea/dtype.h"

/* A run of bytes, from the start of a cache. */
typedef struct fv_read_range {
    int64_t offset;
    int64_t bytes;
} fv_read_range;

/* Reads every range of the memory at `base` once, each worker a stretch of the list at a time.
 * Returns a sum of what was read, so that no compiler can leave the reading out. */
uint64_t fv_ceiling_read(fv_context *context, const void *base, const fv_read_range *ranges, int64_t num_ranges);

/* Multiply-adds on all workers, in fp32, of pairs of bf16, or, bf16 and fp16 (in pieces, of kv_dtype) at level amx, in tiles: returns the
 * operations done (2 for each multiply-add). `isa` is one that this CPU has. */
double fv_ceiling_compute(fv_context *context, fv_dtype dtype, fv_dtype kv_dtype, fv_isa isa);

/* The level of the reads: "amx", "avx512", "avx2" or "portable". */
const char *fv_ceiling_isa(void);

#endif
