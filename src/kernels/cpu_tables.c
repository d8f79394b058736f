/* The kernel tables of the CPU, filled from kernels.def. */
#include "kernels/cpu_tables.h"

#include "core/context.h"
#include "kernels/cpu/kernels.h"
#include "reference/reference.h"

#define FV_KERNEL(operation, params, LEVEL, level) [FV_ISA_##LEVEL].operation = fv_##operation##_##level,
#define FV_KERNEL_VARIANTS(operation, variant, LEVEL, level) \
    [FV_ISA_##LEVEL].operation = fv_##operation##_##level,   \
    [FV_ISA_##LEVEL].num_##operation = FV_NUM_VARIANTS_##operation,
static const fv_kernel_table kernels[] = {
    [FV_ISA_PORTABLE].name = "portable",
#if defined(__x86_64__)
    [FV_ISA_AVX2].name = "avx2",
#endif
#if defined(FV_HAVE_AVX512)
    [FV_ISA_AVX512].name = "avx512",
#endif
#if defined(FV_HAVE_AVX512_BF16)
    [FV_ISA_AVX512_BF16].name = "avx512_bf16",
#endif
#if defined(FV_HAVE_AMX)
    [FV_ISA_AMX].name = "amx",
#endif
#include "kernels/kernels.def"
};
#undef FV_KERNEL
#undef FV_KERNEL_VARIANTS

static const fv_kernel_table *const tables_of_isa[] = {
    &fv_reference_kernels,        &kernels[FV_ISA_PORTABLE],
#if defined(__x86_64__)
    &kernels[FV_ISA_AVX2],
#endif
#if defined(FV_HAVE_AVX512)
    &kernels[FV_ISA_AVX512],
#endif
#if defined(FV_HAVE_AVX512_BF16)
    &kernels[FV_ISA_AVX512_BF16],
#endif
#if defined(FV_HAVE_AMX)
    &kernels[FV_ISA_AMX],
#endif
};

const fv_kernel_table fv_cpu_emulated_bf16 = {
    .name = "avx512_bf16-emulated",
    .attend_paged = fv_attend_paged_bf16_emulated,
    .num_attend_paged = FV_NUM_VARIANTS_attend_paged,
    .attend_dense = fv_attend_dense_bf16_emulated,
    .num_attend_dense = FV_NUM_VARIANTS_attend_dense,
    .mla_decode = fv_mla_decode_bf16_emulated,
    .num_mla_decode = FV_NUM_VARIANTS_mla_decode,
};

const fv_kernel_table fv_cpu_emulated_amx = {
    .name = "amx-emulated",
    .attend_paged = fv_attend_paged_amx_emulated,
    .num_attend_paged = FV_NUM_VARIANTS_attend_paged,
    .attend_dense = fv_attend_dense_amx_emulated,
    .num_attend_dense = FV_NUM_VARIANTS_attend_dense,
    .mla_decode = fv_mla_decode_amx_emulated,
    .num_mla_decode = FV_NUM_VARIANTS_mla_decode,
};

int32_t fv_cpu_tables(const fv_kernel_table *const **tables, fv_isa limit)
{
    const fv_isa isa = limit < fv_cpu_isa() ? limit : fv_cpu_isa();
    *tables = tables_of_isa;
    return fv_min_i32((int32_t)isa + 2, FV_ARRAY_LEN(tables_of_isa)); /* the reference, and levels 0 to isa */
}
