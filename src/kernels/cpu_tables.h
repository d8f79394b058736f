/* The kernel tables of the CPU. */
#ifndef FV_KERNELS_CPU_TABLES_H
#define FV_KERNELS_CPU_TABLES_H

#include "core/cpu.h"
#include "ops/kernel_table.h"

/* Writes to *tables those that this CPU runs, weakest to strongest and none above `limit`: the
 * reference, "portable", "avx2", "avx512", "avx512_bf16", "amx". Returns their number. Static memory. Also declared in
 * core/context.h, for core/ may not include this folder. */
int32_t fv_cpu_tables(const fv_kernel_table *const **tables, fv_isa limit);

/* The attention kernels of level "avx512_bf16" with its products in plain C: runs anywhere, slowly, and in no plan. */
extern const fv_kernel_table fv_cpu_emulated_bf16;

/* The attention kernels of level "amx" with the tile instructions in plain C: runs anywhere, slowly, and in no plan. */
extern const fv_kernel_table fv_cpu_emulated_amx;

#endif
