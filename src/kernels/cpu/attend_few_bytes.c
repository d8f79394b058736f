/* attend_paged for few rows (attend_few.h) over fp8 where queries or weights are fp32: what pairs do not serve.
 *
 * Numbers are looked up as bf16 (byte_words.h), whose bits are the upper half of an fp32: 9 instructions for a line of 64, where
 * the way by fp16 (wide_load.h) takes 32 for e4m3, 16 for e5m2. int8 becomes fp32 in 8. */
#define FV_FEW_HAS_3_ROWS 1
#define FV_FEW_HAS_ORDERS 1
#define FV_PREFETCH_ASKS 2
#define FV_WIDE_LOOKS_UP 1
#include "kernels/cpu/few_wide.h"
FV_FEW_DEFINE_FP8
static const fv_few_kernels kernels_of[][5] = FV_FEW_KERNEL_TABLE_FP8;
#include "kernels/cpu/attend_few.h"

#define MOST_ROWS 12 /* more are faster as one strip over panels (attend_one_strip.c of the base) */

int32_t FV_ISA_SYMBOL(fv_attend_few_bytes_serves)(const fv_attend_job *job, int64_t num_rows)
{
    const fv_attend_params *params = job->params;
    if (num_rows > MOST_ROWS || !fv_few_are_bytes(job) || !fv_few_is_fp8(job->cache.stored)) return 0;
    return params->head_size % FV_CACHE_LINE == 0 && params->v_head_size % FV_CACHE_LINE == 0;
}

void FV_ISA_SYMBOL(fv_attend_few_bytes)(const fv_attend_job *job, const fv_attend_job *next_job, void *memory)
{
    attend_few(job, next_job, memory);
}
