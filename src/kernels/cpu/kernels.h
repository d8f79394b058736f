/* Declarations of the CPU kernels of every ISA level. */
#ifndef FV_KERNELS_CPU_KERNELS_H
#define FV_KERNELS_CPU_KERNELS_H

#include "ops/kernel_table.h"

enum { FV_NUM_VARIANTS_attend_paged = 3, FV_NUM_VARIANTS_attend_dense = 2, FV_NUM_VARIANTS_mla_decode = 4 };

#define FV_KERNEL(operation, params, LEVEL, level) \
    fv_status fv_##operation##_##level(const fv_launch *launch, const params *arguments);
#define FV_KERNEL_VARIANTS(operation, variant, LEVEL, level) \
    extern const variant fv_##operation##_##level[FV_NUM_VARIANTS_##operation];
#include "kernels/kernels.def"
#undef FV_KERNEL
#undef FV_KERNEL_VARIANTS

/* The kernels of pairs of bf16 and those of tiles in plain C: for tests, where the CPU has none. */
extern const fv_attend_variant fv_attend_paged_bf16_emulated[FV_NUM_VARIANTS_attend_paged];
extern const fv_attend_variant fv_attend_dense_bf16_emulated[FV_NUM_VARIANTS_attend_dense];
extern const fv_attend_variant fv_mla_decode_bf16_emulated[FV_NUM_VARIANTS_mla_decode];

/* The AMX kernels with the tiles in plain C: for tests, where the CPU has none. */
extern const fv_attend_variant fv_attend_paged_amx_emulated[FV_NUM_VARIANTS_attend_paged];
extern const fv_attend_variant fv_attend_dense_amx_emulated[FV_NUM_VARIANTS_attend_dense];
extern const fv_attend_variant fv_mla_decode_amx_emulated[FV_NUM_VARIANTS_mla_decode];

#endif
