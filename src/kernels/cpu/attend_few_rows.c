/* attend_paged for few rows (attend_few.h) with the products of few_rows.h, at level avx512 those of few_wide.h; level
 * avx512_bf16 has those of few_pairs.h, on CPUs where pairs are fast, and leaves to attend_few_bytes.c and to its base what bf16 does
 * not have exactly, queries or keys of fp16 and fp32, and what gains nothing by pairs, int8 of fewer than 4 rows. */
#if defined(__AVX2__)
#define FV_FEW_HAS_3_ROWS 1
#define FV_FEW_HAS_ORDERS 1
#endif
#if defined(FV_HAS_PAIRS)
#define FV_PREFETCH_ASKS 3
#include "kernels/cpu/few_pairs.h"
FV_FEW_DEFINE_PAIRS
static const fv_few_kernels kernels_of[][5] = FV_FEW_KERNEL_TABLE_PAIRS;
#else
#define FV_PREFETCH_ASKS 2
#if defined(__AVX512BW__)
#include "kernels/cpu/few_wide.h"
#else
#include "kernels/cpu/few_rows.h"
#endif
FV_FEW_DEFINE_ALL
#if defined(__AVX2__) && !defined(__AVX512BW__)
#define FV_FEW_HAS_E4M3_BITS 1
FV_FEW_DEFINE_DTYPE(e4m3_bits, FV_FEW_E4M3_BITS)
static const fv_few_kernels kernels_of[][5] = {
    FV_FEW_KERNELS_OF_ALL, [FV_FEW_E4M3_BITS] = FV_FEW_KERNELS_OF_DTYPE(e4m3_bits)};
#else
static const fv_few_kernels kernels_of[][5] = FV_FEW_KERNEL_TABLE;
#endif
#endif
#include "kernels/cpu/attend_few.h"

size_t FV_ISA_SYMBOL(fv_attend_few_scratch)(const fv_attend_params *params)
{
    return few_scratch_of(params, FV_DECODE_ROWS, NULL).bytes;
}

#if defined(FV_HAS_PAIRS)
#define LEAST_ROWS_I8 4 /* fewer do not pay for its look-up: the base converts 16 numbers in two instructions */

int32_t FV_ISA_SYMBOL(fv_attend_few_serves)(const fv_attend_job *job, int64_t num_rows)
{
    const fv_attend_params *params = job->params;
    if (!params->multiplies_pairs || params->q_dtype != FV_DTYPE_BF16) return 0;
    const int32_t width = FV_FEW_UNIT * fv_few_units_of_line(job->lane_dtype);
    if (params->head_size % width != 0 || params->v_head_size % width != 0) return 0;
    if (job->lane_dtype == FV_DTYPE_I8 && num_rows < LEAST_ROWS_I8) return 0;
    return fv_few_reads_bf16(job) || fv_few_reads_bytes(job);
}
#else
int32_t FV_ISA_SYMBOL(fv_attend_few_serves)(const fv_attend_job *job, int64_t num_rows)
{
    return job != NULL && num_rows > 0;
}
#endif

void FV_ISA_SYMBOL(fv_attend_few_rows)(const fv_attend_job *job, const fv_attend_job *next_job, void *memory)
{
    attend_few(job, next_job, memory);
}
