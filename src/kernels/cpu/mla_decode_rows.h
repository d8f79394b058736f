/* Strategies of mla_decode: by the arithmetic (mla_many_rows.c) and by the bytes of the cache (mla_few_rows.c). Level avx512_bf16
 * takes them from its base. */
#ifndef FV_KERNELS_CPU_MLA_DECODE_ROWS_H
#define FV_KERNELS_CPU_MLA_DECODE_ROWS_H

#include "kernels/cpu/attend_item.h"

/* Up to FV_DECODE_ROWS; fv_mla_few_limit says up to how many it is the faster one. */
int32_t FV_BASE_SYMBOL(fv_mla_few_limit)(const fv_attend_params *params);
size_t FV_BASE_SYMBOL(fv_mla_few_scratch)(const fv_attend_params *params);
void FV_BASE_SYMBOL(fv_mla_few_rows)(const fv_attend_job *job, void *scratch);

/* Any number of rows: items have at most max(FV_DECODE_ROWS, block_q * Hq). */
size_t FV_BASE_SYMBOL(fv_mla_many_scratch)(const fv_attend_params *params);
void FV_BASE_SYMBOL(fv_mla_many_rows)(const fv_attend_job *job, void *scratch);

#endif
